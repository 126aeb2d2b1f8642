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
        (core.dtype, "is_int", _whole_number_types),
        (core.block_type, "__init__", _kept_block_types),
        (core.block_type, "to_ir", _itself),
        (core.tensor, "__init__", _kept_shapes),
        (interpreter, "_get_np_dtype", _kept_by_type),
        (interpreter.TensorHandle, "__init__", _sized_at_once),
        (interpreter, "_patch_lang", _exchanged_once),
        (_BUILDER, "create_splat", _filled),
        (_BUILDER, "create_expand_dims", _indexed),
        (_BUILDER, "create_atomic_rmw", _of_whole_arrays),
        (_BUILDER, "create_atomic_cas", _of_whole_arrays),
        (_SEMANTIC, "to_tensor", _tensors_first),
        (_SEMANTIC, "cast", _same_type_first),
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


def _whole_number_types(_is_int: Callable[[Any], bool]) -> Callable[[Any], bool]:
    names = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    return lambda self: self.name in names


def _sized_at_once(init: Callable[..., None]) -> Callable[..., None]:
    """Make a handle, and have the one that says what is wrong made by Triton where its elements are too large."""
    pointer = core.pointer_type

    def __init__(self: Any, data: Any, dtype: Any, attr: dict[Any, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.__class__ is not pointer and data.itemsize > 1 and data.itemsize * 8 > dtype.primitive_bitwidth:
            init(self, data, dtype, self.attr)

    return __init__


def _tensors_first(convert: Callable[..., Any]) -> Callable[..., Any]:
    tensor = core.tensor
    return lambda self, x, check_type=True: x if x.__class__ is tensor else convert(self, x, check_type)


def _same_type_first(cast: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, input, dst_ty, *args, **kwargs: (
        input if input.dtype is dst_ty else cast(self, input, dst_ty, *args, **kwargs)
    )


def _indexed(_expand: Callable[..., Any]) -> Callable[..., Any]:
    whole = slice(None)
    handle = interpreter.TensorHandle

    def create_expand_dims(self: Any, arg: Any, axis: int) -> Any:
        axis = axis if axis >= 0 else axis + arg.data.ndim + 1
        return handle(arg.data[(*[whole] * axis, None)], arg.dtype.scalar)

    return create_expand_dims


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
        # One element stands for all, as in what is broadcast.
        data, shape = np.ascontiguousarray(arg.data), ret_ty.shape.values
        return interpreter.TensorHandle(np.ndarray(shape, data.dtype, data, strides=(0,) * len(shape)), arg.dtype)

    return create_splat


def _of_whole_arrays(operate: Callable[..., Any]) -> Callable[..., Any]:
    """Give an atomic operation arrays with all their elements: it reads past the end of those that repeat one."""
    handle = interpreter.TensorHandle

    def whole(argument: Any) -> Any:
        is_array = argument.__class__ is handle
        return handle(np.ascontiguousarray(argument.data), argument.dtype) if is_array else argument

    def create_atomic(self: Any, *arguments: Any) -> Any:
        return operate(self, *map(whole, arguments))

    return create_atomic


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
    """The usual operands: of one shape, one that fills the shape of the other, or both of one length in all axes."""
    tensor, handle = core.tensor, interpreter.TensorHandle
    blocks = dict[tuple[int, int], Any]()
    shapes = dict[Any, tuple[int, ...] | None]()
    kept = list[Any]()  # those of whose ids `blocks` knows

    def filled(semantic: Any, scalar: Any, shape: Any) -> Any:
        key = (id(scalar.dtype), id(shape))
        block = blocks.get(key)
        if block is None:
            block = blocks[key] = core.block_type(scalar.dtype, shape)
            kept.append((scalar.dtype, shape))
        return tensor(semantic.builder.create_splat(block, scalar.handle), block)

    def spread(operand: Any, shape: tuple[int, ...]) -> Any:
        data = operand.handle.data
        if data.shape == shape:
            return operand
        return tensor(handle(_spread(data, shape), operand.handle.dtype), core.block_type(operand.dtype, list(shape)))

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type, rhs.type
        if not right.is_block():
            return lhs, filled(self, rhs, left.shape)
        if not left.is_block():
            return filled(self, lhs, right.shape), rhs
        key = (tuple(left.shape.values), tuple(right.shape.values))
        if key[0] == key[1]:
            return lhs, rhs
        if key not in shapes:
            shapes[key] = _common_shape(*key)
        shape = shapes[key]
        return broadcast(self, lhs, rhs) if shape is None else (spread(lhs, shape), spread(rhs, shape))

    return broadcast_impl_value


def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of what comes of two blocks with as many axes; None: there is none."""
    shape = tuple(max(sizes) for sizes in zip(left, right, strict=False))
    fits = all(size in (1, most) for sizes in (left, right) for size, most in zip(sizes, shape, strict=False))
    return shape if fits and len(left) == len(right) else None


def _spread(data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a view of an array in a larger shape, where the elements of axes of length 1 are repeated."""
    if not data.flags.c_contiguous:
        return np.broadcast_to(data, shape)
    strides = tuple([0 if size == 1 else stride for size, stride in zip(data.shape, data.strides, strict=True)])
    return np.ndarray(shape, data.dtype, data, strides=strides)
