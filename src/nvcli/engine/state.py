"""RequestState: a request as the scheduler sees it, from arrival to its last token."""

from __future__ import annotations

from array import array

from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.request import Request
from nvcli.messages import TokenLogprobs, unpack


class RequestState:
    """Progress of one request. All counts are in tokens.

    A step is in flight while the next one is scheduled, so three lengths differ: what is known here (`token_ids`),
    what was sampled but not yet reported (`num_pending`), and what has been scheduled to be computed
    (`num_computed`: keys and values of that many leading tokens are in the cache once the submitted steps have run).
    """

    __slots__ = (
        "block_hashes",
        "blocks",
        "finished",
        "logprobs",
        "num_cached_tokens",
        "num_computed",
        "num_counted",
        "num_hashed_blocks",
        "num_pending",
        "num_prompt",
        "num_reported",
        "num_unscheduled",
        "request",
        "slot",
        "stop_ids",
        "stream",
        "token_ids",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: array[int] = unpack(request.prompt_ids)
        """Prompt and the generated tokens that were reported."""
        self.num_prompt = len(self.token_ids)
        self.num_pending = 0
        self.num_computed = 0
        self.num_counted = 0
        """Leading prompt tokens that the statistics have: those that are computed again count once."""
        self.num_unscheduled = request.max_tokens
        """Tokens that may still be asked for."""
        self.num_reported = self.num_prompt
        """Leading tokens that the parent has or does not need."""
        self.stop_ids = frozenset(request.stop_ids)
        self.stream = request.stream
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.num_hashed_blocks = 0
        """Leading blocks that are registered for reuse."""
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

    def hash_leading_blocks(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` blocks, which must be full of known tokens."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size].tobytes()
            hashes += hash_blocks(tokens, block_size, parent=hashes[-1] if hashes else b"")
        return hashes[:num_blocks]
