"""What a benchmark asks of the engine. The default is nano-vllm's workload, for which others' figures are known."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nvcli.engine.request import Request
from nvcli.messages import pack
from nvcli.sampling_params import SamplingParams

_MAX_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of random tokens, each answered with a fixed number of tokens."""

    num_requests: int = 256
    input_len: tuple[int, int] = (100, 1024)
    output_len: tuple[int, int] = (100, 1024)
    """Both uniform, ends included."""
    temperature: float = 0.6
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        """Longest request that it can hold."""
        return self.input_len[1] + self.output_len[1]

    def requests(self, vocab_size: int, *, first_id: int = 0) -> list[Request]:
        """All prompts are drawn first, then all output lengths."""
        rng = random.Random(self.seed)
        last_id = min(_MAX_TOKEN_ID, vocab_size - 1)
        prompts = [
            [rng.randint(0, last_id) for _ in range(rng.randint(*self.input_len))] for _ in range(self.num_requests)
        ]
        output_lens = [rng.randint(*self.output_len) for _ in range(self.num_requests)]
        sampling = SamplingParams(temperature=self.temperature, ignore_eos=True)
        return [
            Request(
                request_id=first_id + i,
                prompt_ids=pack(prompt),
                max_tokens=output_len,
                sampling=sampling,
                stop_ids=[],
                seed=self.seed,
                row=i,
                sample=0,
            )
            for i, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True))
        ]
