"""Qwen3 dense (https://arxiv.org/abs/2505.09388): pre-norm decoder, GQA with normed query and key heads, SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.distributed.tensor_parallel import StageState
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import ModelConfig
from nvcli.models.layers import Attention, GatedMLP, RMSNorm
from nvcli.models.parallel import BuildContext, ParallelLMHead, VocabParallelEmbedding
from nvcli.models.rope import RotaryTable


class Qwen3Layer(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, build, layer, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, build)

    def forward(self, delta: Tensor | None, residual: Tensor, cos_sin: Tensor, batch: ForwardBatch) -> Tensor:
        delta = self.self_attn(self.input_layernorm(delta, residual), cos_sin, batch)
        out: Tensor = self.mlp(self.post_attention_layernorm(delta, residual))
        return out


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.group = build.group
        stage, hidden = build.stage, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, hidden) if stage.is_first else None
        self.rotary = RotaryTable(config.rope, config.head_dim, build.max_positions)
        numbers = stage.layers(config.num_layers)
        self.layers = nn.ModuleDict({str(n): Qwen3Layer(config, build, at) for at, n in enumerate(numbers)})
        self.norm = RMSNorm(build, hidden, config.rms_norm_eps) if stage.is_last else None

    def forward(self, batch: ForwardBatch, received: StageState | None) -> Tensor | StageState:
        delta: Tensor | None = None
        if self.embed_tokens is not None:
            residual: Tensor = self.embed_tokens(batch.input_ids)
        else:
            assert received is not None
            delta, residual = self.group.recv_stage(received)
        cos_sin = self.rotary(batch.positions)
        for layer in self.layers.values():
            delta = layer(delta, residual, cos_sin, batch)
        assert delta is not None
        if self.norm is None:
            return self.group.send_stage(delta, residual)
        out: Tensor = self.norm(delta, residual)
        return out


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build.stage)
        self.model = Qwen3Model(config, build)
        is_tied = config.tie_word_embeddings
        self.lm_head = (
            ParallelLMHead(
                build,
                config.vocab_size,
                config.hidden_size,
                tied_to=self.model.embed_tokens if is_tied else None,
                copy_of="model.embed_tokens" if is_tied else None,
            )
            if build.stage.is_last
            else None
        )

    def forward(self, batch: ForwardBatch, received: StageState | None = None) -> Tensor | StageState:
        out: Tensor | StageState = self.model(batch, received)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(hidden)
        return logits
