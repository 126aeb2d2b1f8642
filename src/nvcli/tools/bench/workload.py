"""A benchmark's made-up workload. The default is nano-vllm's, for which there are published figures."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request

_MAX_TOKEN_ID = 10_000
_FIRST_PLAIN_ID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLevel:
    """One level of shared prefixes, below each prefix of the previous level."""

    num_tokens: int
    """Tokens that this level adds to a prefix."""
    num_groups: int = 1
    """Number of different prefixes of this level after each prefix of the previous level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of random tokens, each answered with a fixed number of tokens."""

    num_requests: int = 256
    input_len: tuple[int, int] = (100, 1024)
    output_len: tuple[int, int] = (100, 1024)
    """Lengths of prompts and of answers in tokens are uniform over these ranges, ends included."""
    samples: int = 1
    """Answers to each prompt: `n`."""
    shared_prefix: tuple[PrefixLevel, ...] = ()
    """Tree of the prefixes that prompts share; each prompt adds `input_len` tokens of its own. Prompts are spread
    evenly over the last level's prefixes (one may have one more), in random order."""
    temperature: float = 0.6
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        """Length of the longest possible request of the workload."""
        prefix = sum(level.num_tokens for level in self.shared_prefix)
        return prefix + self.input_len[1] + self.output_len[1]

    def rows(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """Return each request's prompt and number of tokens to generate.

        All prompts are drawn first, then all lengths, then the prefixes and their assignment. Ids are 0 to 10,000 as in
        nano-vllm's workload; in a smaller vocabulary all but 0 and 1, which are often special.
        """
        rng = random.Random(self.seed)
        last = vocab_size - 1
        ids = (0, _MAX_TOKEN_ID) if last >= _MAX_TOKEN_ID else (min(_FIRST_PLAIN_ID, last), last)
        prompts = [[rng.randint(*ids) for _ in range(rng.randint(*self.input_len))] for _ in range(self.num_requests)]
        output_lens = [rng.randint(*self.output_len) for _ in range(self.num_requests)]
        prefixes: list[list[int]] = [[]]
        for level in self.shared_prefix:
            prefixes = [
                prefix + [rng.randint(*ids) for _ in range(level.num_tokens)]
                for prefix in prefixes
                for _ in range(level.num_groups)
            ]
        groups = [number % len(prefixes) for number in range(self.num_requests)]
        rng.shuffle(groups)
        return [
            (prefixes[group] + prompt, output_len)
            for group, prompt, output_len in zip(groups, prompts, output_lens, strict=True)
        ]

    def requests(self, vocab_size: int) -> list[Request]:
        """Return a request for each sample of each of `rows`, with ids from 0."""
        sampling = SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, n=self.samples, ignore_eos=True
        )
        return [
            Request(
                request_id=i * self.samples,
                prompt_ids=pack(prompt),
                max_tokens=output_len,
                sampling=sampling,
                stop_ids=[],
                seed=self.seed,
                row=i,
                sample=0,
                n=self.samples,
            )
            for i, (prompt, output_len) in enumerate(self.rows(vocab_size))
        ]
