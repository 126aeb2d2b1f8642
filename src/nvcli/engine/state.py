"""RequestState: a request as the scheduler sees it, from arrival to its last token."""

from __future__ import annotations

from array import array

from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.request import FinishReason, Request, RequestOutput
from nvcli.messages import TokenLogprobs, unpack


class RequestState:
    """Progress of one request. All counts are in tokens.

    Steps are in flight while the next one is scheduled, and a step may give fewer tokens than it computes logits for.
    So the host knows three lengths of a request: the tokens that came back (`token_ids`), the most that steps in flight
    may add (`num_pending`), and the most tokens whose keys and values are in the cache once the submitted steps have
    run (`num_computed`). A decode row of k tokens adds k to the last two when it is scheduled; of these, what it did
    not give is taken back when its count arrives. While a request decodes,
    `num_computed == len(token_ids) + num_pending - 1`: the last token is computed by the next row.
    """

    __slots__ = (
        "block_hashes",
        "blocks",
        "capacity",
        "finished",
        "first_columns",
        "logprobs",
        "max_len",
        "next_hashed_len",
        "num_cached_tokens",
        "num_computed",
        "num_counted",
        "num_hashed_blocks",
        "num_pending",
        "num_prompt",
        "num_reported",
        "parks_at",
        "request",
        "slot",
        "stop_ids",
        "stream",
        "token_ids",
    )

    def __init__(self, request: Request, *, needs_last_token: bool = False) -> None:
        self.request = request
        self.token_ids: array[int] = unpack(request.prompt_ids)
        """Prompt and the generated tokens that came back."""
        self.num_prompt = len(self.token_ids)
        self.max_len = self.num_prompt + request.max_tokens
        """Tokens, prompt included, at which the answer ends."""
        self.parks_at = self.max_len - 1
        """Once so many tokens are computed, tokens must come back before the next decode row is scheduled."""
        self.needs_last_token = needs_last_token
        self.num_pending = 0
        self.num_computed = 0
        self.num_counted = 0
        """Leading prompt tokens that the statistics have: those that are computed again count once."""
        self.num_reported = self.num_prompt
        """Leading tokens that the parent has or does not need."""
        self.stop_ids = frozenset(request.stop_ids)
        self.stream = request.stream
        self.slot: int | None = None
        self.blocks: list[list[int]] = []
        """For each KV group a column of block ids, set by `BlockTables`: block c holds the tokens from
        c × block_size on; 0 where the group's window has left it behind."""
        self.first_columns: list[int] = []
        """For each KV group the number of leading zeros in `blocks`."""
        self.capacity = 0
        """Tokens that the blocks of every group have room for."""
        self.num_hashed_blocks = 0
        """Leading blocks that are registered for reuse."""
        self.next_hashed_len = 0
        """Known tokens with which there is another block to register."""
        self.block_hashes: list[BlockHash] = []
        """Chained hashes of leading full blocks of known tokens, as far as they were needed."""
        self.num_cached_tokens: int | None = None
        """Prefix-cache hit of the first admission; None before it."""
        self.logprobs: list[TokenLogprobs] = []
        self.finished = False

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that no submitted step computes."""
        return len(self.token_ids) - self.num_computed

    @property
    def needs_last_token(self) -> bool:
        """Whether its next row is scheduled only when its last token is known here, and brings it to the ranks."""
        return self.parks_at == 0

    @needs_last_token.setter
    def needs_last_token(self, value: bool) -> None:
        self.parks_at = 0 if value else self.max_len - 1

    @property
    def must_wait(self) -> bool:
        """Whether a decoding request has asked for all that it may before tokens come back."""
        return self.num_pending > 0 and self.num_computed >= self.parks_at

    @property
    def least_computed(self) -> int:
        """The fewest tokens whose keys and values are in the cache once the submitted steps have run."""
        return min(self.num_computed, len(self.token_ids) - 1)

    def hash_leading_blocks(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` blocks, which must be full of known tokens."""
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
        """What the parent is told of the tokens since the last report."""
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
