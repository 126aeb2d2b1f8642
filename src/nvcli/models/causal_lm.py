"""CausalLM: the decoder of every family in `families/`, with its LM head, and the head that drafts tokens if the run
uses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.image_tokens import ImageTokens
from nvcli.attention.spec import AttentionSpec, CacheLayer, CacheSpec, attention_kinds
from nvcli.kernels.bounds import soft_cap
from nvcli.kernels.invariant_linear import row_by_row
from nvcli.models.altup_layer import AltUpEnd, AltUpLayer, AltUpStart
from nvcli.models.config import ModelConfig
from nvcli.models.convolved_layer import ConvolvedLayer
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.draft_heads.head import DraftHead, SharedParts
from nvcli.models.gated_residual_layer import GatedResidualLayer
from nvcli.models.geometry import EMBEDDING, EMBEDDING_NORM, HEAD, HEAD_BIAS, POSITIONS, SCORE
from nvcli.models.interpolated_layer import InterpolatedLayer
from nvcli.models.kv_groups import layer_specs
from nvcli.models.layer_config import STREAMS_AT_END
from nvcli.models.layer_inputs import LayerInputs
from nvcli.models.layers import Angles, CachedModule, InputNorm, RotaryTables, TokenMixer
from nvcli.models.parallel import (
    BuildContext,
    ParallelLMHead,
    PositionEmbedding,
    SinusoidalPositions,
    VocabParallelEmbedding,
)
from nvcli.models.prediction import ClassifierHead, Prediction
from nvcli.models.shared_block_layer import SharedBlockLayer
from nvcli.models.stream_layer import StreamEnd, StreamLayer
from nvcli.models.vision.tower import VisionTower
from nvcli.models.weights import WeightModule
from nvcli.worker.distributed.tensor_parallel import StageState


class Decoder(nn.Module):
    """The layers of one pipeline stage, with the embedding in the first stage and the final norm in the last."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, specs: Sequence[CacheSpec], first_cache_layer: int
    ) -> None:
        """`specs`: those of the stage's layers in the KV cache, numbered there from `first_cache_layer` on."""
        super().__init__()
        own = build.of_own_rows()
        self.group = own.group
        """The ranks that have the same rows."""
        self.all_ranks = build.group
        stage, decoder, layers = build.stage, config.decoder, config.layers
        self.embed_tokens = VocabParallelEmbedding(build, EMBEDDING) if stage.is_first else None
        self.embed_positions: PositionEmbedding | SinusoidalPositions | None = None
        if stage.is_first and decoder.learned_positions is not None:
            self.embed_positions = PositionEmbedding(build, POSITIONS, decoder.learned_positions)
        elif stage.is_first and decoder.first_sinusoid is not None:
            self.embed_positions = SinusoidalPositions(build, decoder.first_sinusoid)
        self.embedding_scale = decoder.embedding_scale
        self.image_scale, self.deep_scale = decoder.image_scale, decoder.deep_scale
        deep = () if config.vision is None else config.vision.deepstack
        self.deep_layers = [str(target - 1) for target in sorted(output.target for output in deep)]
        """The layers after which deep outputs of a vision tower are added to the residual stream."""
        if decoder.rounds_embedding_scale:
            dtype = getattr(torch, build.dtype)
            self.embedding_scale = torch.tensor(decoder.embedding_scale, dtype=dtype, device="cpu").item()
        self.embedding_norm: InputNorm | None = None
        if decoder.embedding_norm is not None and stage.is_first:
            self.embedding_norm = InputNorm(own, EMBEDDING_NORM, decoder.embedding_norm)
        self.keeps_embeddings = decoder.keeps_embeddings
        inputs = decoder.layer_inputs
        self.inputs = None if inputs is None else LayerInputs(build, inputs, decoder.norm, config.hidden_size)
        numbers, owners = decoder.stage_layers(stage), decoder.kv_owners
        of_head = () if config.draft_head is None else config.draft_head.mixers
        mixers = *(layers[number].mixer for number in numbers), *of_head
        axes = config.vision.axes if config.has_tower and config.vision is not None else ()
        self.rotary = RotaryTables(build, (rotation for mixer in mixers for rotation in mixer.rotations), axes)
        specs_of_layers, self.num_streams = iter(specs), decoder.num_streams
        self.start: AltUpStart | None = None
        self.end: StreamEnd | AltUpEnd | None = None
        make_layer: Callable[[LayerPlan], DecoderLayer] = DecoderLayer
        if decoder.streams is not None:
            make_layer = partial(StreamLayer, decoder.streams)
            self.end = StreamEnd(own, f"model.{STREAMS_AT_END}", decoder.streams)
        elif decoder.altup is not None:
            make_layer = partial(AltUpLayer, decoder.altup)
            self.start, self.end = AltUpStart(own, decoder.altup), AltUpEnd(own, decoder.altup)
        elif decoder.rate_factor is not None:
            make_layer = InterpolatedLayer
        elif decoder.residual_gates is not None:
            make_layer = partial(GatedResidualLayer, decoder.residual_gates)
        elif decoder.has_convolutions:
            make_layer = ConvolvedLayer
        self.layers = nn.ModuleDict(
            {
                str(number): (SharedBlockLayer if layers[number].reads_embeddings else make_layer)(
                    LayerPlan(
                        build=build,
                        path=f"model.layers.{number}",
                        config=layers[number],
                        norm=decoder.norm,
                        caches=[
                            CacheLayer(spec, owners[number] - numbers.start + first_cache_layer)
                            for spec in islice(specs_of_layers, len(layers[number].mixers))
                        ],
                        has_input=inputs is not None,
                        is_summed=number > 0 and layers[number - 1].norms.after_mlp is not None,
                    )
                )
                for number in numbers
            }
        )
        # After a norm of the block's output, `delta` is identical on all ranks and need not be summed.
        self.is_summed = layers[numbers[-1]].norms.after_mlp is not None
        last_norm = decoder.last_norm or decoder.norm
        self.norm = InputNorm(own, "model.norm", last_norm, is_summed=self.is_summed) if stage.is_last else None

    def embed(self, ids: Tensor, images: ImageTokens | None = None) -> Tensor:
        """Return the embeddings of tokens and images, without those of positions: [T] → [T, H]."""
        assert self.embed_tokens is not None
        embeddings: Tensor = self.embed_tokens(ids)
        if self.embedding_scale != 1.0:
            embeddings.mul_(self.embedding_scale)
        if images is not None and images.embeddings is not None:
            scaled = images.embeddings if self.image_scale == 1.0 else images.embeddings * self.image_scale
            embeddings.index_copy_(0, images.rows, scaled)
        if self.embedding_norm is not None:
            embeddings = self.embedding_norm(None, embeddings)
        return embeddings

    def angles(self, batch: ForwardBatch) -> Angles:
        """Return the angles by which the tokens of a batch are rotated."""
        angles: Angles = self.rotary(batch.positions if batch.angle_positions is None else batch.angle_positions)
        return angles

    def forward(
        self, batch: ForwardBatch, received: StageState | None, streams: Mapping[str, Tensor] | None = None
    ) -> Tensor | StageState:
        """Compute what `CausalLM.forward` returns. `streams`: [T, H] each, filled with the residual stream before the
        layers that they name."""
        streams, images = streams or {}, batch.images
        state: LayerState
        if self.embed_tokens is not None:
            residual = self.embed(batch.input_ids, images)
            if self.embed_positions is not None:
                residual.add_(self.embed_positions(batch.positions))
            embeddings = residual
            if self.start is not None:
                residual = self.start(embeddings)
            elif self.num_streams > 1:
                residual = residual.repeat(1, self.num_streams)
            state = LayerState(None, residual)
        else:
            assert received is not None
            state = LayerState(*self.group.recv_stage(received))
        angles = self.angles(batch)
        inputs: list[Tensor | None] = [None] * len(self.layers)
        if self.inputs is not None:
            places = None if images is None else images.rows
            inputs = list(self.inputs(batch.input_ids, embeddings, places).unbind(1))
        elif self.keeps_embeddings:
            inputs = [embeddings.clone()] * len(self.layers)
        *layers, (last, last_layer) = self.layers.items()
        deep = {} if images is None else dict(zip(self.deep_layers, images.deep, strict=False))
        for (number, layer), own in zip(layers, inputs, strict=False):
            state = layer(state, LayerStep(angles, batch, None, own, streams.get(number)))
            if images is not None and number in deep:
                state.residual.index_add_(0, images.rows, deep[number], alpha=self.deep_scale)
        # After the last attention, only rows that need logits are computed further.
        rows = None if self.norm is None else batch.logits_rows
        state = last_layer(state, LayerStep(angles, batch, rows, inputs[-1], streams.get(last)))
        delta, residual, _ = state
        if images is not None and last in deep:  # in a stage that ends where the last of them enters
            residual.index_add_(0, images.rows, deep[last], alpha=self.deep_scale)
        if self.end is not None:
            delta, residual = None, self.end(state, self.norm)
        if self.norm is None:
            if self.is_summed and delta is not None:
                residual, delta = residual.add_(delta), None
            return self.group.send_stage(delta, residual)
        if len(residual) == 0:
            return residual
        hidden: Tensor = residual if self.end is not None else self.norm(delta, residual)
        return hidden if batch.gathered_rows is None else self.all_ranks.gather_rows(hidden)[batch.gathered_rows]


class CausalLM(nn.Module):
    """One rank's shard of a decoder with a language-model head: the interface for the runner, the loader and the tests.
    Module names follow the checkpoint's tensor names."""

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        *,
        specs: Sequence[CacheSpec] | None = None,
        cache_layer: int = 0,
    ) -> None:
        """`specs` and `cache_layer`: the layers' part of the KV cache, and the number of the first one there, for a
        model whose keys lie beside those of another; None: as its own groups say."""
        super().__init__()
        specs = layer_specs(config, build.group.size, build.stage) if specs is None else specs
        self.config = config
        self.group = build.group
        self.stage = build.stage
        self.tensors = build.tensors
        """The checkpoint tensors that this rank's stage is made of, by name."""
        self.model = Decoder(config, build, specs, cache_layer)
        self.vision: VisionTower | None = None
        """The tower that reads images; None: the run reads none, or the stage is not the first."""
        if config.has_tower and build.stage.is_first:
            assert config.vision is not None
            self.vision = VisionTower(build, config.vision)
        self.batch_invariant = build.batch_invariant
        self.lm_head: ParallelLMHead | None = None
        self.prediction: Prediction | None = None
        """The prediction head before the LM head; None: there is none."""
        if build.stage.is_last and config.decoder.prediction_head is not None:
            self.prediction = Prediction(build, config.decoder.prediction_head, config.decoder.norm)
        if build.stage.is_last:
            name = EMBEDDING if config.tie_word_embeddings else HEAD
            tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
            self.lm_head = ParallelLMHead(build, {"weight": f"{name}.weight", "bias": HEAD_BIAS}, tied_to=tied_to)
        self.score: ClassifierHead | None = None
        """The head of a classifier, in its last stage."""
        if f"{SCORE}.weight" in build.tensors:
            self.score = ClassifierHead(build)
        self.draft_head: DraftHead | None = None
        """The head that drafts tokens; None: the run uses none."""
        if config.draft_head is not None:
            shared = SharedParts(
                embed=self.model.embed,
                compute_logits=self.compute_logits,
                angles=self.model.angles,
                vocab_size=config.vocab_size,
            )
            of_head = specs[-len(config.draft_head.mixers) :]
            caches = [CacheLayer(spec, config.num_layers + number) for number, spec in enumerate(of_head)]
            self.draft_head = config.draft_head.build(build, shared, caches)

    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        """Compute the hidden states after the final norm for the tokens that need logits (`batch.logits_rows`): [N, H],
        identical on every rank of the stage. A stage other than the last returns the state that the next one needs.
        Keys and values of all tokens are stored in the batch's cache.

        `received` is the state that the previous stage sent, which is overwritten; None in the first stage.
        """
        out: Tensor | StageState = self.model(batch, received)
        return out

    def forward_with_states(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Compute `forward` in a model of one stage. Returns its result [N, H], and the states of all tokens that the
        draft head reads: [T, H] for each of the head's `aux_layers`, side by side, or the hidden states after the final
        norm [T, H]."""
        head = self.config.draft_head
        assert head is not None
        if head.aux_layers:
            width = self.config.hidden_size
            embedding = self.model.embed_tokens
            assert embedding is not None
            shape = batch.num_tokens, width * len(head.aux_layers)
            states = torch.empty(shape, dtype=embedding.dtype, device=embedding.weight.device)
            parts = torch.split(states, width, dim=1)
            streams = dict(zip(map(str, head.aux_layers), parts, strict=True))
            hidden = self.model(batch, None, streams)
        else:
            states = self.model(replace(batch, logits_rows=None), None)
            if self.group.size > 1:
                states = states.clone()  # it holds until the next sum
            hidden = states if batch.logits_rows is None else states[batch.logits_rows]
        return hidden, states

    def run(self, batch: ForwardBatch, received: StageState | None = None) -> tuple[Tensor | StageState, Tensor | None]:
        """Compute `forward`, or `forward_with_states` if the draft head takes in the batch."""
        head = self.config.draft_head
        if head is None or not batch.shape.extends_drafts:
            return self.forward(batch, received), None
        if head.reads_states:
            return self.forward_with_states(batch)
        hidden = self.forward(batch)
        assert isinstance(hidden, Tensor)
        return hidden, hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [N, H] → [N, M] in the model's dtype, for this rank's part of the vocabulary: M tokens
        starting at rank × M. Only the last stage can.

        All ranks have the same M: tokens from vocab_size on are padding.
        """
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(hidden if self.prediction is None else self.prediction(hidden))
        cap = self.config.decoder.logit_soft_cap
        if cap is None:
            return logits
        capped = partial(soft_cap, cap=cap)
        return row_by_row(capped, logits) if self.batch_invariant else capped(logits)

    def read_states(self, hidden: Tensor) -> Tensor:
        """Return what requests for hidden states get: the state [H] in float32, or a classifier's logits [L], with the
        same bits whatever else is computed. Only the last stage can."""
        if self.score is None:
            return hidden
        if self.prediction is not None:
            hidden = self.prediction(hidden[None].to(self.prediction.weight.dtype))[0].float()
        logits: Tensor = self.score(hidden)
        return logits

    @property
    def mixers(self) -> tuple[TokenMixer, ...]:
        """The first token mixer of each layer of this rank."""
        return tuple(layer.mixer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer))

    @property
    def cache_layers(self) -> tuple[CacheSpec, ...]:
        """The parts of the KV cache on this rank that mixers have, in layer order."""
        return tuple(module.spec for module in self.modules() if isinstance(module, CachedModule))

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
