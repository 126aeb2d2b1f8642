"""RequestState: a request as the scheduler sees it, from arrival to its last token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.request import FinishReason, Request, RequestOutput
from nvcli.messages import TokenLogprobs, unpack


@dataclass(slots=True, eq=False)
class RequestState:
    """Progress of one request. All counts are in tokens.

    Steps are in flight while the next one is scheduled, and a step may give fewer tokens than it computes logits for.
    So the host knows the tokens that came back (`token_ids`), and an upper bound of the tokens whose keys and values
    are in the cache once the submitted steps have run (`num_computed`). A row of n tokens adds n to it when it is
    scheduled; of these, as many as the row did not give are taken back when its count arrives. A decoding request's
    next row computes its last token, which may be on its way: at most `num_computed + 1` tokens are known by then.
    """

    request: Request
    needs_last_token: bool = False
    """Whether a decode row must bring the request's last token along."""
    token_ids: array[int] = field(init=False)
    """Prompt and the generated tokens that came back."""
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)
    """Tokens, prompt included, at which the answer ends."""
    parks_at: int = field(init=False)
    """Once `num_computed` reaches this number, tokens must come back before the next decode row is scheduled."""
    num_reported: int = field(init=False)
    """Leading tokens that the parent has or does not need."""
    stop_ids: frozenset[int] = field(init=False)
    stream: bool = field(init=False)
    num_computed: int = 0
    num_owed: int = 0
    """The most tokens that steps in flight may still add to a request that was preempted."""
    num_counted: int = 0
    """Leading prompt tokens that the statistics have counted; tokens that are computed again count once."""
    slot: int | None = None
    blocks: list[list[int]] = field(default_factory=list)
    """The block ids of each KV group, set by `BlockTables`: entry c holds the tokens from c × block_size on. It is 0
    where the group's window has left the block behind."""
    first_columns: list[int] = field(default_factory=list)
    """The number of leading zeros in `blocks` of each KV group."""
    capacity: int = 0
    """Tokens that the blocks of every group have room for."""
    num_hashed_blocks: int = 0
    """Leading blocks that are registered for reuse."""
    checked_at: int = 0
    """The number of known tokens from which on an arriving token needs more than to be appended: the answer has its
    full length, a block may be registered, or tokens are to be reported."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Chained hashes of leading full blocks of known tokens, as far as they were needed."""
    num_cached_tokens: int | None = None
    """Prefix-cache hit of the first admission; None before it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = unpack(request.prompt_ids)
        self.num_prompt = self.num_reported = len(self.token_ids)
        self.max_len = self.num_prompt + request.max_tokens
        self.parks_at = 0 if self.needs_last_token else self.max_len - 1
        self.stop_ids = frozenset(request.stop_ids)
        self.stream = request.stream

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that no submitted step computes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_pending(self) -> int:
        """The most tokens that the steps in flight may still add."""
        return self.num_owed if self.slot is None else max(0, self.num_computed + 1 - len(self.token_ids))

    def require_last_token(self) -> None:
        """Schedule its next rows, from now on, only once its last token is known here; the row brings it to the
        ranks."""
        self.needs_last_token = True
        self.parks_at = 0

    @property
    def must_wait(self) -> bool:
        """Whether a decoding request has been scheduled as far as it may be before tokens come back."""
        return self.num_computed >= self.parks_at and self.num_computed >= len(self.token_ids)

    @property
    def least_computed(self) -> int:
        """The fewest tokens whose keys and values are in the cache once the submitted steps have run."""
        return min(self.num_computed, len(self.token_ids) - 1)

    def set_hashed_blocks(self, num_blocks: int, block_size: int) -> None:
        """Note that the first `num_blocks` blocks are registered for reuse."""
        self.num_hashed_blocks = num_blocks
        self.checked_at = 0 if self.stream else min(self.max_len, (num_blocks + 1) * block_size)

    def hash_leading_blocks(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` blocks, which must be full of known tokens."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size].tobytes()
            hashes += hash_blocks(tokens, block_size, parent=hashes[-1] if hashes else b"")
        return hashes[:num_blocks]

    def report(
        self,
        reason: FinishReason | None = None,
        *,
        stopped_by_id: bool = False,
        error_type: str = "",
        error: str = "",
    ) -> RequestOutput:
        """Make the output that brings the parent the tokens since the last report."""
        token_ids = self.token_ids[self.num_reported :]
        self.num_reported = len(self.token_ids)
        logprobs, self.logprobs = self.logprobs[: len(token_ids)], self.logprobs[len(token_ids) :]
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=token_ids.tobytes(),
            finish_reason=reason,
            stopped_by_id=stopped_by_id,
            num_cached_tokens=self.num_cached_tokens or 0,
            logprobs=logprobs,
            error_type=error_type,
            error=error,
        )
