"""Qwen3 dense (https://arxiv.org/abs/2505.09388): pre-norm decoder, GQA with normed query and key heads, SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
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
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rope, config.head_dim, build.max_positions)
        self.layers = nn.ModuleList(Qwen3Layer(config, build, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch) -> Tensor:
        cos_sin = self.rotary(batch.positions)
        residual: Tensor = self.embed_tokens(batch.input_ids)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(delta, residual, cos_sin, batch)
        out: Tensor = self.norm(delta, residual)
        return out


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config)
        self.model = Qwen3Model(config, build)
        self.lm_head = ParallelLMHead(
            build,
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        out: Tensor = self.model(batch)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits
