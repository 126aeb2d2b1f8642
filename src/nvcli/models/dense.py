"""DenseForCausalLM: the decoder of every family in `families.py` (Llama, Mistral, Qwen2, Qwen3).

Pre-norm layers of grouped-query attention with rotary positions, and a gated MLP. Which biases and norms a layer has is
said by the model's tensors, and its window by the attention kind.
"""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec
from nvcli.distributed.tensor_parallel import StageState
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import EMBEDDING, HEAD
from nvcli.models.kv_groups import kv_groups, kv_heads_per_rank
from nvcli.models.layers import Attention, GatedMLP, RMSNorm
from nvcli.models.parallel import BuildContext, ParallelLMHead, VocabParallelEmbedding
from nvcli.models.rope import RotaryTable


class DenseLayer(nn.Module):
    """One decoder layer. It takes and gives the residual stream as `layers.py` describes."""

    def __init__(self, build: BuildContext, path: str, spec: AttentionSpec, cache_layer: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, f"{path}.input_layernorm", eps)
        self.self_attn = Attention(build, f"{path}.self_attn", spec, cache_layer, eps)
        self.post_attention_layernorm = RMSNorm(build, f"{path}.post_attention_layernorm", eps)
        self.mlp = GatedMLP(build, f"{path}.mlp")

    def forward(
        self, delta: Tensor | None, residual: Tensor, cos_sin: Tensor, batch: ForwardBatch, rows: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Give the next `delta` and `residual`: [T, H] each, or [N, H] where only the tokens `rows` [N] go on behind
        the attention."""
        attended = self.self_attn(self.input_layernorm(delta, residual), cos_sin, batch)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
            if len(rows) == 0:
                return residual, residual
        delta = self.self_attn.o_proj(attended, residual)
        del attended  # the MLP can have its memory
        return self.mlp(self.post_attention_layernorm(delta, residual), residual), residual


class DenseModel(nn.Module):
    """The layers of one stage; in the first stage the embedding too, and in the last one the final norm."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.group = build.group
        stage, eps = build.stage, config.rms_norm_eps
        self.embed_tokens = VocabParallelEmbedding(build, EMBEDDING) if stage.is_first else None
        self.rotary = RotaryTable(config.rope, config.head_dim, build.max_positions)
        specs = attention_specs(config, build)
        self.layers = nn.ModuleDict(
            {
                str(number): DenseLayer(build, f"model.layers.{number}", spec, cache_layer, eps)
                for cache_layer, (number, spec) in enumerate(zip(stage.layers(config.num_layers), specs, strict=True))
            }
        )
        self.norm = RMSNorm(build, "model.norm", eps) if stage.is_last else None

    def forward(self, batch: ForwardBatch, received: StageState | None) -> Tensor | StageState:
        delta: Tensor | None = None
        if self.embed_tokens is not None:
            residual: Tensor = self.embed_tokens(batch.input_ids)
        else:
            assert received is not None
            delta, residual = self.group.recv_stage(received)
        cos_sin = self.rotary(batch.positions)
        *layers, last_layer = self.layers.values()
        for layer in layers:
            delta, residual = layer(delta, residual, cos_sin, batch, None)
        # Behind the last attention only rows that need logits are of use. Several ranks may share out the rows of the
        # residual stream among them, by the number of rows: there all rows go on.
        is_cut = self.norm is not None and self.group.size == 1
        delta, residual = last_layer(delta, residual, cos_sin, batch, batch.logits_rows if is_cut else None)
        if self.norm is None:
            return self.group.send_stage(delta, residual)
        if len(residual) == 0:
            return residual
        hidden: Tensor = self.norm(delta, residual)
        return hidden if is_cut or batch.logits_rows is None else hidden[batch.logits_rows]


class DenseForCausalLM(CausalLM):
    """A dense decoder with its LM head."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model = DenseModel(config, build)
        self.lm_head: ParallelLMHead | None = None
        if build.stage.is_last:
            name = EMBEDDING if config.tie_word_embeddings else HEAD
            self.lm_head = ParallelLMHead(
                build, name, tied_to=self.model.embed_tokens if config.tie_word_embeddings else None
            )

    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        out: Tensor | StageState = self.model(batch, received)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(hidden)
        return logits


def attention_specs(config: ModelConfig, build: BuildContext) -> tuple[AttentionSpec, ...]:
    """The attention kind of each layer of this rank. Layers of one KV group have equal ones."""
    by_layer = {}
    for number, group in enumerate(kv_groups(config, build.stage)):
        spec = AttentionSpec(
            num_heads=config.num_heads // build.group.size,
            num_kv_heads=kv_heads_per_rank(config, build.group.size),
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=group.window,
            kv_group=number,
        )
        by_layer.update(dict.fromkeys(group.layers, spec))
    return tuple(by_layer[layer] for layer in sorted(by_layer))
