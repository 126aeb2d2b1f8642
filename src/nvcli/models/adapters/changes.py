"""AdapterReader: turns an adapter's tensors, module by module, into changes of the decoder's tensors. Torch-free."""

from __future__ import annotations

from msgspec.structs import replace

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.adapters.adapter_config import AdapterConfig
from nvcli.models.adapters.adapter_files import ModuleTensors, quote, tensor_error
from nvcli.models.adapters.decoder_names import DecoderNames, Place
from nvcli.models.checkpoint_check import TIED_HEAD
from nvcli.models.tensor_info import BiasChange, LowRankChange, RowPlaces, RowsChange, TensorInfo, WeightChange

Changes = dict[str, tuple[WeightChange, ...]]
"""The decoder's name of a tensor → its changes, in this order."""

_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Parameters of transformers' stacks of experts, in the order of its classes. PEFT wraps those that it changes in this
order, so the first is the innermost."""


class AdapterReader:
    """Collects `changes`. Everything raises LoadError that names the file, and the tensor or the key."""

    def __init__(self, config: AdapterConfig, names: DecoderNames) -> None:
        self.changes: Changes = {}
        self.left: list[str] = []
        """Names of tensors for parts other than the text model."""
        self._config = config
        self._names = names

    def add(self, module: ModuleTensors) -> None:
        """Add the changes of a module."""
        tensors = module.tensors
        stack = self._stack(module)
        if stack is not None:
            return self._add_stack(module, stack)
        name = self._names.find(f"{module.name}.weight")
        if name is None:
            if not self._names.is_left(f"{module.name}.weight"):
                raise self.unknown(module.any_tensor)
            self.left += [info.name for info in tensors.values()]
            return None
        places = self._names.places(name)
        if not places or any(len(self._names.shapes[place.name]) != 2 for place in places):
            raise self.unknown(module.any_tensor)
        if "rows" in tensors:
            self._add_rows(module, places[0])
        if "up" in tensors:
            self._add_product(module, places)
        elif "rows" not in tensors:
            raise self.unknown(module.any_tensor)
        return None

    def unknown(self, info: TensorInfo) -> LoadError:
        """Return the error for a tensor that matches nothing in the model."""
        return tensor_error(info, f"matches nothing in this model; {self._other_base()}")

    def mismatch(self, info: TensorInfo, name: str) -> LoadError:
        """Return the error for a tensor that does not fit the decoder's tensor `name`."""
        shape = list(info.shape[::-1] if info.is_transposed else info.shape)
        wanted = f"{name} {list(self._names.shapes[name])}"
        return tensor_error(info, f"has shape {shape}, which does not fit {wanted}; {self._other_base()}")

    def _other_base(self) -> str:
        base = self._config.base
        of_base = "another base model" if base is None else f"{show(base)[1:-1]} (base_model_name_or_path)"
        return f"the adapter was made for {of_base}"

    def _add_rows(self, module: ModuleTensors, place: Place) -> None:
        key = "trainable_token_indices"
        values, file = module.tensors["rows"], self._config.file
        found = [ids for end, ids in self._config.token_ids.items() if f".{module.name}".endswith(f".{end}")]
        if not found:
            raise file.error(key, f"names no tokens of {quote(module.name)}, but {values.file.name} has rows of it")
        vocab_size, hidden = self._names.shapes[place.name]
        if values.shape != (len(found[0]), hidden):
            raise self.mismatch(values, place.name)
        if max(found[0]) >= vocab_size:
            raise file.error(key, f"{max(found[0])} is not a token of this model, which has {vocab_size:,}")
        self._add_change(place.name, RowsChange(rows=found[0], values=values))

    def _add_product(self, module: ModuleTensors, places: list[Place]) -> None:
        """Add the product of two matrices for a module, which may fuse several of the decoder's."""
        parameter = f"{module.name}.weight"
        problem = self._config.targets.problem(module.name)
        is_parameter = problem is not None and self._config.chooses_parameter(parameter)
        is_tied = self._config.ties_weights and places[0].name == TIED_HEAD  # PEFT saves it with the embedding
        if problem is not None and not is_parameter and not is_tied:
            raise self._not_chosen(module, problem)
        rank, scaling = self._config.scaling(parameter if is_parameter else module.name)
        up, down = module.tensors["up"], module.tensors["down"]
        self._check_product(up, down, rank, places)
        magnitude = module.tensors.get("magnitude")
        self._check_dora(module, magnitude, num_features=up.shape[1])
        for place in places:
            change = LowRankChange(up=up, down=down, scaling=scaling, features=place.features, magnitude=magnitude)
            self._add_change(place.name, change)
        if "bias" in module.tensors or (self._config.adds_biases and not module.is_embedding):
            self._add_biases(module, places, scaling, num_features=up.shape[1])

    def _check_product(self, up: TensorInfo, down: TensorInfo, rank: int, places: list[Place], *, num: int = 1) -> None:
        """Check two matrices that hold `num` products of the same rank."""
        for info in (up, down):
            if info.shape[0] != rank * num:
                found = f"{info.shape[0]}" if num == 1 else f"{info.shape[0]:,} for {num:,} experts"
                where = f"`r` or `rank_pattern` in {self._config.file.path.name}"
                raise tensor_error(info, f"has rank {found}, and {where} says {rank}; download the adapter again")
        shapes = [self._names.shapes[place.name] for place in places]
        if down.shape[1] != shapes[0][1]:
            raise self.mismatch(down, places[0].name)
        if up.shape[1] != sum(rows for rows, _ in shapes):
            raise self.mismatch(up, places[0].name)

    def _check_dora(self, module: ModuleTensors, magnitude: TensorInfo | None, *, num_features: int) -> None:
        config, name = self._config, quote(module.name)
        if config.uses_dora and module.is_embedding:
            raise config.file.error("use_dora", f"an embedding ({name}) with DoRA is not served; merge it with peft")
        if config.uses_dora != (magnitude is not None):
            found = "has" if magnitude is not None else "lacks"
            raise config.file.error(
                "use_dora",
                f"{show(config.uses_dora)}, and {module.any_tensor.file.name} {found} magnitudes of {name}; download "
                "the adapter again",
            )
        if magnitude is not None and magnitude.shape != (num_features,):
            raise tensor_error(
                magnitude,
                f"has shape {list(magnitude.shape)}, and {num_features:,} features have a magnitude; download the "
                "adapter again",
            )

    def _add_biases(self, module: ModuleTensors, places: list[Place], scaling: float, *, num_features: int) -> None:
        values = module.tensors.get("bias")
        biases = [place.name.removesuffix(".weight") + ".bias" for place in places]
        problem = None
        if not self._config.adds_biases:
            problem = f"false, and {module.any_tensor.file.name} has a bias of {quote(module.name)}; make them agree"
        elif values is None:
            problem = (
                f"{module.any_tensor.file.name} lacks the bias of {quote(module.name)}; download the adapter again"
            )
        elif values.shape != (num_features,):
            problem = f"the bias of {quote(module.name)} has shape {list(values.shape)}; download the adapter again"
        elif any(bias not in self._names.shapes for bias in biases):
            problem = f"{quote(module.name)} has no bias in the base model to add one to; not served"
        if problem is not None or values is None:
            raise self._config.file.error("lora_bias", problem or "")
        for place, bias in zip(places, biases, strict=True):
            self._add_change(bias, BiasChange(values=values, scaling=scaling, features=place.features))

    def _stack(self, module: ModuleTensors) -> str | None:
        """Return the parameter of stacked experts that a module's product changes; None if the module has no stacks."""
        if all(self._names.find(f"{module.name}.{name}") is None for name in _STACKS[::2]):
            return None
        chosen = [name for name in _STACKS if self._config.chooses_parameter(f"{module.name}.{name}")]
        number = len(chosen) - 1 - module.depth
        if number < 0:
            raise self._not_chosen(module, "target_parameters")
        if chosen[number].endswith("_bias"):
            raise self._config.file.error("target_parameters", f"{show(chosen[number])} is not served; leave it out")
        return f"{module.name}.{chosen[number]}"

    def _add_stack(self, module: ModuleTensors, parameter: str) -> None:
        """Add the products for all experts: A is [experts × rank, in], expert by expert, and B [out, rank × experts],
        in which neighbours belong to different experts. Experts that return their input may come last; theirs are
        unused."""
        name = self._names.find(parameter)
        if name is None or set(module.tensors) != {"up", "down"}:
            raise self.unknown(module.any_tensor)
        experts = self._names.places_in_stack(name)
        rank, scaling = self._config.scaling(parameter)
        up, down = module.tensors["up"], module.tensors["down"]
        num_routed = self._names.num_routed(name)
        num_held = num_routed if up.shape[0] == rank * num_routed else len(experts)
        self._check_product(up, down, rank, experts[0], num=num_held)
        for number, places in enumerate(experts):
            own_down = replace(down, shape=(rank, down.shape[1]), rows=RowPlaces(first=number * rank))
            own_up = replace(up, shape=(rank, up.shape[1]), rows=RowPlaces(first=number, step=num_held))
            for place in places:
                change = LowRankChange(up=own_up, down=own_down, scaling=scaling, features=place.features)
                self._add_change(place.name, change)

    def _add_change(self, name: str, change: WeightChange) -> None:
        if isinstance(change, LowRankChange) and any(
            isinstance(other, LowRankChange) for other in self.changes.get(name, ())
        ):
            problem = f"changes {name}, which another tensor changes too; download the adapter again"
            raise tensor_error(change.up, problem)
        self.changes[name] = (*self.changes.get(name, ()), change)

    def _not_chosen(self, module: ModuleTensors, key: str) -> LoadError:
        return self._config.file.error(
            key,
            f"leaves out {quote(module.name)}, but {module.any_tensor.file.name} has tensors for it; make them agree",
        )
