"""The data that the parent and an engine exchange: requests go in; outputs, statistics and step records come out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import sub
from typing import Literal

import msgspec

from nvcli.core.messages import (
    DRAFT_SOURCES,
    FORBIDDEN,
    NO_ADAPTER,
    TOKEN_BYTES,
    ForwardMode,
    PromptQueryResult,
    SlotSampling,
    TokenLogprobs,
)
from nvcli.core.prompt_image import PromptImage
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint
from nvcli.core.task_config import Position

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


class ThoughtLimit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The limit of an answer's thought, and the tokens that mark and end it."""

    budget: int
    """The maximum number of tokens in the thought, not counting its marks."""
    start_ids: list[int]
    """The ids that begin the thought; if empty, the answer begins inside it."""
    ends: list[list[int]]
    """Sequences of ids, each of which ends the thought."""
    forced_ids: list[int]
    """The ids that end a thought that has used up its budget."""


class PromptScoring(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """A request for the log-probabilities of the prompt's tokens from one position on."""

    first: int
    """The position of the first token to score, at least 1: nothing precedes the token at 0."""
    next_id: int | None = None
    """The id of one more token to score, as if it followed the prompt; None if there is none."""
    num_top: int = 0
    """The number of likeliest tokens wanted at each position, at most `MAX_LOGPROBS`."""


class Pooling(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """A request for the sum of the prompt's hidden states after the final norm. The engine's configuration must have
    an `embedding_size`."""

    position: Position


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One row, or one sample of it. The scheduler makes a request of each sample; they share the prompt.

    `sampling` holds biases by token ids alone, and need not hold what only the parent uses (stop strings, bad words).
    """

    request_id: int
    """An id unique in the run, chosen by the parent. The samples of a row have consecutive ids, starting with this
    one."""
    prompt_ids: bytes
    """Packed int32 (`messages.pack`): at least one id, and fewer than `EngineConfig.max_request_tokens`. The tokens of
    images have negative numbers made of the image's digest, so that prompts with other images never begin alike."""
    images: list[PromptImage] = []
    """The images of the prompt, in order."""
    image_token_id: int = 0
    """The model's id for the tokens of images."""
    max_tokens: int
    """At least 1; prompt and answer together must fit `EngineConfig.max_request_tokens`."""
    sampling: SamplingParams
    stop_ids: list[int]
    """Ids that end the answer: end-of-sequence ids unless ignored, and `stop_token_ids`."""
    forbidden_ids: Sequence[int] = ()
    """Ids that must never be chosen."""
    bad_words: Sequence[Sequence[int]] = ()
    """Sequences of at least two ids that the answer must not contain."""
    thought_limit: ThoughtLimit | None = None
    """The limit of the answer's thought; None if there is none."""
    seed: int
    """The key of the request's random numbers; the next two are words of their counter (`nvcli.kernels.philox`)."""
    row: int
    """The row's number in the job, or 0 if the row brought its own seed."""
    sample: int
    """The number of the first sample among the row's, from 0."""
    n: int = 1
    """The number of samples requested."""
    stream: bool = False
    """Whether to report tokens as they come (for rows with stop strings) or once, at the end."""
    constraint: Constraint | None = None
    """The form of the answer; None if any will do. `sampling` need not repeat it."""
    read: PromptScoring | Pooling | None = None
    """A request to read the prompt itself, carried by the first sample."""
    adapter: int = NO_ADAPTER
    """The number of its LoRA adapter in `EngineConfig.lora_paths`, from 1; NO_ADAPTER: it has none."""

    def model_tokens(self, tokens: array[int]) -> array[int]:
        """Return tokens of the prompt or answer as the model knows them: with its own id for those of images."""
        if not self.images:
            return tokens
        return array("i", [self.image_token_id if token < 0 else token for token in tokens])

    @property
    def needs_tokens(self) -> bool:
        """Whether the choice of a token depends on the tokens before it, so that the ranks must have them all."""
        return self.sampling.has_penalties or bool(self.bad_words)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from modified logits, so that they say nothing about the model's weights."""
        sampling = self.sampling
        return bool(
            self.needs_tokens
            or self.forbidden_ids
            or self.constraint is not None
            or sampling.logit_bias
            or sampling.min_tokens
            or sampling.allowed_token_ids is not None
        )

    def slot_sampling(self) -> SlotSampling:
        """Return the sampling parameters as ranks keep them in the request's slot."""
        params = self.sampling
        return SlotSampling(
            seed=self.seed,
            row=self.row,
            sample=self.sample,
            prompt_len=len(self.prompt_ids) // TOKEN_BYTES,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            stop_ids=self.stop_ids if params.min_tokens else [],
            bias_ids=[*map(int, params.logit_bias), *self.forbidden_ids],
            bias_values=[*params.logit_bias.values(), *[FORBIDDEN] * len(self.forbidden_ids)],
            allowed_ids=params.allowed_token_ids or [],
            bad_words=[list(word) for word in self.bad_words],
        )

    def samples(self) -> list[Request]:
        """Return a request for each sample."""
        if self.n == 1:
            return [self]
        return [
            msgspec.structs.replace(
                self,
                request_id=self.request_id + number,
                sample=self.sample + number,
                n=1,
                read=self.read if number == 0 else None,
            )
            for number in range(self.n)
        ]


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tokens of a request since its last output. The last output of a request has a `finish_reason`."""

    request_id: int
    token_ids: bytes
    """Packed int32. A stop id that ended the answer is included, as the last token."""
    finish_reason: FinishReason | None = None
    stopped_by_id: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    logprobs: list[TokenLogprobs] = []
    """One entry for each token where the row asked for them; else empty."""
    error_type: str = ""
    error: str = ""
    """The reason for finish_reason `error`, for the row's error object."""
    query_results: list[PromptQueryResult] = []
    """Results for the prompt since the last output, if the request asked for any: consecutive parts."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot, sent with outputs a few times a second. Counts start with the engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks held by running requests (cached but unused blocks are free)."""
    prompt_tokens: int = 0
    """Prompt tokens computed or found in the prefix cache."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_preemptions: int = 0
    kv_bytes_saved: int = 0
    """Bytes of the KV cache, over all ranks, that were not read because shared blocks are read once for several
    requests."""
    decode_rows: int = 0
    """The decode rows of all steps, each of which gives a token and its accepted drafts."""
    drafted: tuple[int, ...] = (0,) * len(DRAFT_SOURCES)
    """Drafted tokens from each of `DRAFT_SOURCES`."""
    accepted: tuple[int, ...] = (0,) * len(DRAFT_SOURCES)
    """Drafted tokens that the model would have given too, from each of `DRAFT_SOURCES`."""
    forced_tokens: int = 0
    """Tokens that grammars gave without decode rows of their own."""
    running_lengths: bytes = b""
    """The running answers' lengths, three int32 each (`messages.pack`): (generated tokens, `max_tokens`, prompt
    tokens). They are updated less often than the rest, and cover only a sample if many requests run."""

    @property
    def drafted_tokens(self) -> int:
        return sum(self.drafted)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted)

    def since(self, before: EngineStats) -> EngineStats:
        """Return the stats with counts since an earlier snapshot."""
        if not before.prompt_tokens:
            return self
        return msgspec.structs.replace(
            self,
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTS_SINCE_START},
            **{name: tuple(map(sub, getattr(self, name), getattr(before, name))) for name in ("drafted", "accepted")},
        )


class DraftFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of drafted tokens."""

    drafted_tokens: int
    accepted_tokens: int
    """Drafted tokens that the model would have given too."""


class SpeculationFigures(DraftFigures, frozen=True, kw_only=True):
    """Drafts of all replicas together."""

    tokens_per_step: float
    """The tokens that a decoding request got in a step, on average."""
    by_source: dict[str, DraftFigures]
    """Drafted and accepted tokens by source (`DRAFT_SOURCES`, and grammars), without sources that gave none."""

    @staticmethod
    def of(replicas: Sequence[EngineStats]) -> SpeculationFigures | None:
        """Return the figures of replicas; None: nothing was drafted."""
        by_source = {
            source: DraftFigures(
                drafted_tokens=sum(stats.drafted[number] for stats in replicas),
                accepted_tokens=sum(stats.accepted[number] for stats in replicas),
            )
            for number, source in enumerate(DRAFT_SOURCES)
        }
        rows, drafted, accepted, forced = (
            sum(getattr(stats, name) for stats in replicas)
            for name in ("decode_rows", "drafted_tokens", "accepted_tokens", "forced_tokens")
        )
        if not drafted and not forced:
            return None
        by_source["grammar"] = DraftFigures(drafted_tokens=forced, accepted_tokens=forced)
        return SpeculationFigures(
            drafted_tokens=drafted + forced,
            accepted_tokens=accepted + forced,
            tokens_per_step=round((rows + accepted + forced) / max(1, rows), 3),
            by_source={source: figures for source, figures in by_source.items() if figures.drafted_tokens},
        )


_COUNTS_SINCE_START = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "num_preemptions",
    "kv_bytes_saved",
    "decode_rows",
    "forced_tokens",
)


class StepRecord(msgspec.Struct, array_like=True, kw_only=True):
    """One step as it ran; sent if `record_steps` is on."""

    mode: ForwardMode
    num_decodes: int
    num_prefill_tokens: int
    num_sampled: int
    """Tokens to which the LM head was applied."""
    decode_keys: int
    """Tokens that each decode row attended to, summed over the rows: an upper bound if earlier steps may have given
    fewer tokens than they computed logits for."""
    prefill_keys: int
    """Tokens that each prefill chunk attended to, summed over the chunks."""
    prefill_pairs: int
    """Pairs of a chunk's token and a token that it attended to."""
    repeated_decode_keys: int = 0
    """The part of `decode_keys` that another decode row of the step reads too, so that it need not be read again."""
    repeated_prefill_keys: int = 0
    """The part of `prefill_keys` that another chunk of the step reads too, so that it need not be read again."""
    num_chunks: int = 0
    """Prefill chunks."""
    num_used_blocks: int = 0
    """KV blocks held by running requests when the step was scheduled."""
    seconds: float = 0.0
    """The device's time for the step."""
    idle_seconds: float = 0.0
    """The time that the device waited for the host, before the step and in it."""
    is_graph: bool = False
    """Whether the step ran as a CUDA graph."""
