"""CausalLM: the decoder of every family in `families/`, with its LM head.

Each layer's `LayerConfig` says which blocks it has and where its norms are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec, CacheSpec, attention_kinds
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import row_by_row
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import EMBEDDING, HEAD
from nvcli.models.kv_groups import layer_specs
from nvcli.models.layer_config import LayerConfig
from nvcli.models.layer_inputs import LayerInput, LayerInputs
from nvcli.models.layers import Angles, FeedForward, InputNorm, ResultNorm, RotaryTables, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ParallelLMHead, TensorShard, VocabParallelEmbedding
from nvcli.models.weights import WeightModule
from nvcli.worker.distributed.tensor_parallel import StageState


class DecoderLayer(nn.Module):
    """One decoder layer. It takes and returns the residual stream as `layers.py` describes."""

    def __init__(
        self,
        build: BuildContext,
        path: str,
        config: LayerConfig,
        norm: NormConfig,
        spec: CacheSpec,
        cache_layer: int,
        *,
        has_input: bool,
    ) -> None:
        """Build the layer. `has_input`: whether it has an input besides the residual stream."""
        super().__init__()
        self.group = build.group
        self.is_parallel = config.norms.is_parallel

        def before(name: str | None, behind: str | None) -> InputNorm | None:
            """Build the norm of a block's input; `behind` names the norm after the previous block."""
            return None if name is None else InputNorm(build, f"{path}.{name}", norm, is_summed=behind is not None)

        def after(name: str | None, *, is_summed: bool = False) -> ResultNorm | None:
            return None if name is None else ResultNorm(build, f"{path}.{name}", norm, is_summed=is_summed)

        norms = config.norms
        self.before_attention = before(norms.before_attention, norms.after_mlp)
        self.mixer: TokenMixer = config.mixer.build(build, path, norm, spec, cache_layer)
        self.after_attention = after(norms.after_attention)
        self.before_mlp = before(norms.before_mlp, norms.after_attention)
        self.mlp: FeedForward = config.mlp.build(build, path, norm)
        self.after_mlp = after(norms.after_mlp, is_summed=self.mlp.is_summed)
        self.gives_stream = self.after_mlp is None or self.mlp.is_summed
        if not self.is_parallel:  # norms quantise for the projections behind them, where nothing else reads the result
            for input_norm, block in ((self.before_attention, self.mixer), (self.before_mlp, self.mlp)):
                if input_norm is not None and block.input_proj is not None:
                    input_norm.quantise_for(block.input_proj)
        self.input = LayerInput(build, path, norm) if has_input else None
        self.scalar = Scalar(build, f"{path}.layer_scalar") if config.has_scalar else None

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        own: Tensor | None,
        angles: Angles,
        batch: ForwardBatch,
        rows: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return the next `delta` and `residual`: [T, H] each, or [N, H] if only the tokens `rows` [N] continue after
        attention. `own` [T, P] is the layer's input besides the residual stream."""
        x = _input(self.before_attention, delta, residual)
        mixed = self.mixer(x, angles, batch)
        adapters = None if batch.adapters is None else batch.adapters.tokens if rows is None else batch.adapters.kept
        if rows is not None:
            if len(rows) == 0:
                return None, residual[rows]
            mixed = mixed[rows]
            if self.is_parallel:
                assert isinstance(x, Tensor)
                x = x[rows]
            residual = self.group.residual_rows(residual, rows)
        if self.is_parallel:
            return _add_part(self.mlp(x, None, adapters), self.mixer.o_proj.part(mixed, None, adapters)), residual
        delta = self.mixer.o_proj(mixed, residual if self.after_attention is None else None, adapters)
        del mixed  # the MLP can reuse its memory
        if self.after_attention is not None:
            delta = self.after_attention(delta, residual)
        x = _input(self.before_mlp, delta, residual)
        delta = self.mlp(x, residual if self.gives_stream else None, adapters)
        if self.after_mlp is not None:
            delta = self.after_mlp(delta, residual)
        if self.input is not None:
            assert own is not None
            residual, delta = self.input(residual.add_(delta), own if rows is None else own[rows]), None
        return (delta, residual) if self.scalar is None else (None, self.scalar(delta, residual))


class Scalar(TensorShard):
    """Adds `delta` to `residual` and multiplies the sum by one number, in place. [T, H] → [T, H]."""

    def forward(self, delta: Tensor | None, residual: Tensor) -> Tensor:
        return (residual if delta is None else residual.add_(delta)).mul_(self.weight)


class Decoder(nn.Module):
    """The layers of one pipeline stage, with the embedding in the first stage and the final norm in the last."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.group = build.group
        stage, decoder, layers = build.stage, config.decoder, config.layers
        self.embed_tokens = VocabParallelEmbedding(build, EMBEDDING) if stage.is_first else None
        self.embedding_scale = decoder.embedding_scale
        if decoder.rounds_embedding_scale:
            dtype = getattr(torch, build.dtype)
            self.embedding_scale = torch.tensor(decoder.embedding_scale, dtype=dtype, device="cpu").item()
        inputs = decoder.layer_inputs
        self.inputs = None if inputs is None else LayerInputs(build, inputs, decoder.norm, config.hidden_size)
        numbers, owners = stage.layers(config.num_layers), decoder.kv_owners
        self.rotary = RotaryTables((layers[number].mixer.rotation for number in numbers), build.max_positions)
        specs = layer_specs(config, build.group.size, stage)
        self.layers = nn.ModuleDict(
            {
                str(number): DecoderLayer(
                    build,
                    f"model.layers.{number}",
                    layers[number],
                    decoder.norm,
                    spec,
                    owners[number] - numbers.start,
                    has_input=inputs is not None,
                )
                for number, spec in zip(numbers, specs, strict=True)
            }
        )
        # After a norm of the block's output, `delta` is identical on all ranks and need not be summed.
        self.is_summed = layers[numbers[-1]].norms.after_mlp is not None
        self.norm = InputNorm(build, "model.norm", decoder.norm, is_summed=self.is_summed) if stage.is_last else None

    def forward(self, batch: ForwardBatch, received: StageState | None) -> Tensor | StageState:
        delta: Tensor | None = None
        if self.embed_tokens is not None:
            residual: Tensor = self.embed_tokens(batch.input_ids)
            if self.embedding_scale != 1.0:
                residual.mul_(self.embedding_scale)
        else:
            assert received is not None
            delta, residual = self.group.recv_stage(received)
        angles = self.rotary(batch.positions)
        inputs: list[Tensor | None] = [None] * len(self.layers)
        if self.inputs is not None:
            inputs = list(self.inputs(batch.input_ids, residual).unbind(1))
        *layers, last_layer = self.layers.values()
        for layer, own in zip(layers, inputs, strict=False):
            delta, residual = layer(delta, residual, own, angles, batch, None)
        # After the last attention, only rows that need logits are computed further.
        rows = None if self.norm is None else batch.logits_rows
        delta, residual = last_layer(delta, residual, inputs[-1], angles, batch, rows)
        if self.norm is None:
            if self.is_summed and delta is not None:
                residual, delta = residual.add_(delta), None
            return self.group.send_stage(delta, residual)
        if len(residual) == 0:
            return residual
        hidden: Tensor = self.norm(delta, residual)
        return hidden


class CausalLM(nn.Module):
    """One rank's shard of a decoder with a language-model head: the interface for the runner, the loader and the tests.
    Module names follow the checkpoint's tensor names."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.group = build.group
        self.stage = build.stage
        self.tensors = build.tensors
        """The checkpoint tensors that this rank's stage is made of, by name."""
        self.model = Decoder(config, build)
        self.batch_invariant = build.batch_invariant
        self.lm_head: ParallelLMHead | None = None
        if build.stage.is_last:
            name = EMBEDDING if config.tie_word_embeddings else HEAD
            tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(build, name, tied_to=tied_to)

    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        """Compute the hidden states after the final norm for the tokens that need logits (`batch.logits_rows`): [N, H],
        identical on every rank of the stage. A stage other than the last returns the state that the next one needs.
        Keys and values of all tokens are stored in the batch's cache.

        `received` is the state that the previous stage sent, which is overwritten; None in the first stage.
        """
        out: Tensor | StageState = self.model(batch, received)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [N, H] → [N, M] in the model's dtype, for this rank's part of the vocabulary: M tokens
        starting at rank × M. Only the last stage can.

        All ranks have the same M: tokens from vocab_size on are padding.
        """
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(hidden)
        cap = self.config.decoder.logit_soft_cap
        if cap is None:
            return logits
        logits.div_(cap)
        logits = row_by_row(torch.tanh_, logits) if self.batch_invariant else logits.tanh_()
        return logits.mul_(cap)

    @property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """The token mixer of each layer of this rank."""
        return tuple(module for module in self.modules() if isinstance(module, TokenMixer))

    @property
    def cache_layers(self) -> tuple[CacheSpec, ...]:
        """Each layer's part of the KV cache on this rank, in layer order."""
        return tuple(mixer.spec for mixer in self.mixers)

    @property
    def attention_kinds(self) -> tuple[AttentionSpec, ...]:
        """The distinct kinds of attention on this rank."""
        return attention_kinds(self.cache_layers)

    def weight_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters by part of the model. A shared parameter is counted where it first
        appears."""
        parts: dict[str, int] = {}
        for module in self.modules():
            if isinstance(module, WeightModule):
                sources = list(module.weight_sources())
                found = {source.parameter: source.tensor.part for source in sources}
                found |= {source.scales.parameter: source.tensor.part for source in sources if source.scales}
                if any(source.scales is not None and source.scales.order_row is not None for source in sources):
                    found["column_order"] = sources[0].tensor.part
                for name, part in found.items():
                    parameter = getattr(module, name)
                    parts[part] = parts.get(part, 0) + parameter.numel() * parameter.element_size()
        return parts


def _input(norm: InputNorm | None, delta: Tensor | None, residual: Tensor) -> Activations:
    """Compute a block's input: `delta` + `residual`, normed if there is a norm."""
    if norm is not None:
        x: Activations = norm(delta, residual)
        return x
    return residual if delta is None else residual.add_(delta)


def _add_part(delta: Tensor, part: Tensor) -> Tensor:
    """Add this rank's part [T, H] of one block's result to another's: [T, H], or float32 parts [P, T, H]."""
    (delta[0] if delta.dim() == 3 else delta).add_(part)
    return delta
