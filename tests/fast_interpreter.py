"""Makes Triton's interpreter faster without changing what it computes.

Most of its time goes into objects of Triton's language: the same types, shapes and constants are made anew for every
operation, and the same questions about types are asked again. Here they are kept. What is not one of the usual cases
goes on to Triton's own functions. All of this holds for the whole process, in which nothing compiles kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

_BUILDER = interpreter.InterpreterBuilder
_SEMANTIC = type(interpreter.interpreter_semantic)
_NO_SHAPE = core.tuple([])
_ONE = core.constexpr(1)
_PLAIN = (int, bool, float, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type)
_PATCHED = "of the fast interpreter"


def speed_up() -> None:
    """Replace the dear functions of Triton's language and interpreter. Doing it twice does it once."""
    if hasattr(interpreter, _PATCHED):
        return
    setattr(interpreter, _PATCHED, True)
    for place, name, make in (
        (core, "_unwrap_if_constexpr", _unwrapping),
        (core.tuple, "__getitem__", _numbers_first),
        (core.dtype, "__eq__", _identity_first),
        (core.pointer_type, "__eq__", _identity_first),
        (core.block_type, "__init__", _kept_block_types),
        (core.block_type, "to_ir", _itself),
        (core.tensor, "__init__", _kept_shapes),
        (interpreter, "_get_np_dtype", _kept_by_type),
        (interpreter, "_patch_lang", _exchanged_once),
        (_BUILDER, "create_splat", _filled),
        (_SEMANTIC, "computation_type_impl", _kept_answers),
        (_SEMANTIC, "scalar_constant", _kept_constants),
        (_SEMANTIC, "binary_op_type_checking_impl", _usual_types_first),
        (_SEMANTIC, "broadcast_impl_value", _usual_shapes_first),
    ):
        setattr(place, name, make(getattr(place, name)))
    interpreter._patch_attr = _patch_attr


def _unwrapping(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    constexpr, plain = core.constexpr, frozenset(_PLAIN)

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = value.__class__
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    return unwrap_if_constexpr


def _numbers_first(item: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, index: self.values[index] if index.__class__ is int else item(self, index)


def _identity_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _kept_block_types(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    kept: dict[Any, dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        # By identity: the kept fields hold the type, so that no other gets its id.
        key = (id(element_ty), *(shape.values if shape.__class__ is core.tuple else shape))
        fields = kept.get(key)
        if fields is None:
            init(self, element_ty, shape)
            self.tensor_shape = core.tuple([core.constexpr(size) for size in self.shape])
            self.tensor_numel = core.constexpr(self.numel)
            kept[key] = dict(self.__dict__)
        else:
            self.__dict__.update(fields)

    return __init__


def _itself(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a type as the interpreter's own, which it is."""
    return lambda self, builder: self if builder is interpreter.interpreter_builder else make(self, builder)


def _kept_shapes(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    def __init__(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.tensor_shape, type.tensor_numel
        else:
            self.shape, self.numel = _NO_SHAPE, _ONE

    return __init__


def _kept_by_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    kept: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        answer = kept.get(dtype.name)
        if answer is None:
            answer = kept[dtype.name] = find(dtype)
        return answer

    return found


def _exchanged_once(exchange: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Exchange Triton's functions for the interpreter's once for each kernel's module, and for good.

    The interpreter does it at every call within a kernel, which takes half of its time.
    """
    exchanged = set[int]()

    def exchange_once(function: Any) -> SimpleNamespace:
        if id(function.__globals__) not in exchanged:
            exchanged.add(id(function.__globals__))
            exchange(function)
        return SimpleNamespace(restore=lambda: None)

    return exchange_once


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give a function of Triton's language the interpreter's semantic, without the checks of Triton's wrapper."""
    function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


def _kept_answers(compute: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def computation_type_impl(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div)
        answer = kept.get(key)
        if answer is None:
            answer = kept[key] = compute(self, a, a_is_scalar, b, b_is_scalar, div)
        return answer

    return computation_type_impl


def _kept_constants(make: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if value.__class__ not in (int, float, bool):
            return make(self, value, dtype)
        key = (value.__class__, value, dtype.name)
        constant = kept.get(key)
        if constant is None:
            constant = make(self, value, dtype)
            constant.handle.data.flags.writeable = False
            kept[key] = constant
        return constant

    return scalar_constant


def _filled(splat: Callable[..., Any]) -> Callable[..., Any]:
    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.dtype.is_block():
            return splat(self, ret_ty, arg)
        # Of the data's type: a comparison's handle names the type of its operands, which Triton 3.9 refuses as a mask.
        return interpreter.TensorHandle(np.full(ret_ty.shape.values, arg.data, dtype=arg.data.dtype), arg.dtype)

    return create_splat


def _usual_types_first(check: Callable[..., Any]) -> Callable[..., Any]:
    """The usual operands: of one type, a pointer and whole numbers, or a constant that takes on the other's type."""
    tensor, kept = core.tensor, dict[Any, Any]()
    halves = ("fp16", "bf16")

    def constant_of_type(semantic: Any, other: Any, value: Any, options: tuple[bool, ...]) -> Any:
        """Return a constant as the right operand of `other`, or None where the other would be converted too."""
        key = (other.dtype.name, value.__class__, value, options)
        if key not in kept:
            scalar = tensor(other.handle, other.dtype)
            left, constant = check(semantic, scalar, value, *options)
            kept[key] = constant if left is scalar else None
        return kept[key]

    def binary_op_type_checking_impl(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if lhs.__class__ is tensor:
            left = lhs.dtype
            if rhs.__class__ is tensor:
                right = rhs.dtype
                if left is right and not left.is_ptr() and not (div_or_mod and left.name in halves):
                    return self.broadcast_impl_value(lhs, rhs)
                if allow_lhs_ptr and left.is_ptr() and not right.is_ptr() and right.is_int():
                    return self.broadcast_impl_value(lhs, rhs)
            elif rhs.__class__ in (int, float):
                constant = constant_of_type(self, lhs, rhs, options)
                if constant is not None:
                    return self.broadcast_impl_value(lhs, constant)
        return check(self, lhs, rhs, *options)

    return binary_op_type_checking_impl


def _usual_shapes_first(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """The usual operands: of one shape, or one that fills the shape of the other."""

    def filled(semantic: Any, scalar: Any, shape: Any) -> Any:
        block = core.block_type(scalar.dtype, shape)
        return core.tensor(semantic.builder.create_splat(block, scalar.handle), block)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type, rhs.type
        if not right.is_block():
            return lhs, filled(self, rhs, left.shape)
        if not left.is_block():
            return filled(self, lhs, right.shape), rhs
        if left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value
