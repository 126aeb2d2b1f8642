"""RequestState: a request as the scheduler sees it, from arrival to its last token. Prompt: the part that the samples
of one row share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from nvcli.core.messages import CONSTRAINT_FAILED, NO_ADAPTER, NOT_FINITE, TOKEN_BYTES, TokenLogprobs, pack, unpack
from nvcli.engine.answer_watch import AnswerWatch, watch_of
from nvcli.engine.block_manager import BlockHash, hash_blocks
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.prompt_queries import PromptQueries
from nvcli.engine.request import FinishReason, Request, RequestOutput


class Prompt:
    """A request's prompt, shared by its samples. Only its cached hashes ever change."""

    __slots__ = ("_block_hashes", "_packed_ids", "hash_root", "num_tokens", "stop_ids")

    def __init__(self, request: Request) -> None:
        self._packed_ids = request.prompt_ids
        self.num_tokens = len(request.prompt_ids) // TOKEN_BYTES
        self.stop_ids = frozenset((*request.stop_ids, NOT_FINITE, CONSTRAINT_FAILED))
        """The ids that end an answer when they come back: the request's own, and those that stand for failures."""
        self.hash_root: BlockHash = pack([request.adapter]) if request.adapter != NO_ADAPTER else b""
        """The beginning of the hashes of blocks: keys and values under one adapter are never those under another, nor
        those of a prompt whose tokens attend to each other those of another prompt."""
        if any(image.whole_prompt for image in request.images):
            self.hash_root = blake2b(request.prompt_ids, digest_size=16, key=self.hash_root).digest()
        self._block_hashes: list[BlockHash] | None = None

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the tokens at positions `start` to `end`, without `end`, which is at most `num_tokens`."""
        return unpack(self._packed_ids[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def hash_blocks(self, hashes: PromptHashes) -> list[BlockHash]:
        """Return the hashes of all blocks that are full of prompt tokens. The caller must not modify the list.

        `hashes` has the same block size in every call.
        """
        if self._block_hashes is None:
            self._block_hashes = hashes.of(self._packed_ids, self.hash_root)
        return self._block_hashes


@dataclass(slots=True, eq=False)
class RequestState:
    """Progress of one request. All counts are in tokens.

    Steps are in flight while the next one is scheduled, and a step may give fewer tokens than it computes logits for.
    So the host knows the prompt, the tokens that came back (`generated`), and an upper bound on the tokens whose keys
    and values are in the cache once the submitted steps have run (`num_computed`). A row of n tokens adds n to it when
    it is scheduled; what the row did not give is subtracted when its count arrives. A decoding request's next row
    computes its last token, which may be on its way: at most `num_computed + 1` tokens are known by then.
    """

    request: Request
    """The request of this one sample."""
    prompt: Prompt
    """The prompt, shared with the row's other samples."""
    needs_last_token: bool = False
    """Whether a decode row must bring the request's last token along."""
    whole_spans: tuple[tuple[int, int], ...] = ()
    """The parts of the prompt that no chunk may cut (`whole_images.py`)."""
    generated: array[int] = field(default_factory=lambda: array("i"))
    """The generated tokens that have come back."""
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)
    """Tokens, prompt included, at which the answer ends."""
    most_computed: int = field(init=False)
    """The tokens that decode rows may compute until others are known: all but the answer's last, or those before the
    watch's barrier."""
    parks_at: int = field(init=False)
    """Once `num_computed` reaches this number, tokens must come back before the next decode row is scheduled."""
    num_reported: int = 0
    """Generated tokens already reported to the parent."""
    watch: AnswerWatch | None = field(init=False)
    """Watches the tokens as they come back; None for most requests."""
    stop_ids: frozenset[int] = field(init=False)
    stream: bool = field(init=False)
    num_computed: int = 0
    num_owed: int = 0
    """The most tokens that steps in flight may still add to a request that was preempted."""
    num_counted: int = 0
    """Leading prompt tokens that the statistics have counted; recomputed tokens count once."""
    slot: int | None = None
    home: int = 0
    """The number of its home, while it has a slot (`engine.homes`)."""
    adapter_place: int = NO_ADAPTER
    """The place on the device of its adapter, while it has a slot."""
    blocks: list[list[int]] = field(default_factory=list)
    """The block ids of each KV group, set by `BlockTables`: entry c holds the tokens from c × block_size on. It is 0
    where the group's window has passed the block, and where a state is not kept. A state that moved from one column to
    the next appears in both."""
    first_columns: list[int] = field(default_factory=list)
    """The number of leading entries of each KV group's `blocks` that the window has passed; they are 0."""
    num_found_blocks: int = 0
    """Leading blocks whose keys were found in the prefix cache, with or without the state after them."""
    capacity: int = 0
    """Tokens that fit the blocks of every group."""
    num_hashed_blocks: int = 0
    """Leading blocks that are registered for reuse."""
    checked_at: int = 0
    """The number of generated tokens from which an arriving token needs more than appending: the answer may be full or
    due for a check, a block may be registered, or tokens may be reported."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Chained hashes of the full blocks of known tokens after those full of prompt tokens, as far as they were
    needed."""
    num_brought: int = 0
    """Leading tokens of which steps have brought the last ones to the ranks, since the request entered its slot."""
    drafts_right: float = 0.0
    """Drafts that were right, the latest counting most (`RowRates`)."""
    drafts_tried: float = 0.0
    """Drafts whose predecessors were right, counted likewise, whether they were right or not."""
    num_cached_tokens: int | None = None
    """Prefix-cache hit of the first admission; None before it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False
    queries: PromptQueries | None = field(init=False)
    """Queries of the prompt; None if there are none."""

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = self.prompt.num_tokens
        self.max_len = self.num_prompt + request.max_tokens
        self.watch = watch_of(request)
        self._set_parks_at()
        self.stop_ids = self.prompt.stop_ids
        self.stream = request.stream
        self.queries = None if request.read is None else PromptQueries(request.read, unpack(request.prompt_ids))

    def _set_parks_at(self) -> None:
        self.most_computed = min(self.max_len, self.barrier) - 1
        self.parks_at = 0 if self.needs_last_token else self.most_computed

    @property
    def barrier(self) -> int:
        """Tokens, prompt included, that must be known before more are computed."""
        return self.max_len if self.watch is None else self.num_prompt + self.watch.barrier

    def look(self, block_size: int) -> tuple[int, FinishReason | None]:
        """Let the watch check the answer, which has `checked_at` tokens.

        Returns the number of forced tokens with which the answer continues (none of them is on its way then), and the
        reason why it ends here, if it does.
        """
        assert self.watch is not None
        if self.watch.is_loop(self.generated):
            return 0, "repetition"
        num_forced = self._take_forced(self.watch, block_size)
        return num_forced, "length" if num_forced and self.num_tokens == self.max_len else None

    def _take_forced(self, watch: AnswerWatch, block_size: int) -> int:
        """Continue with the watch's forced tokens, as far as they fit. Returns their number.

        Room for one sampled token is left while the prompt is still to be read: a full answer ends without a step.
        """
        room = self.max_len - self.num_tokens
        if self.first_unread is not None:
            room -= 1
        forced = watch.take_forced(self.generated)[:room]
        self._set_parks_at()
        self.set_hashed_blocks(self.num_hashed_blocks, block_size)
        if forced:
            assert not self.num_pending
            self.generated.extend(forced)
            if self.request.sampling.logprobs is not None:
                self.logprobs += [TokenLogprobs(logprob=0.0, top_ids=[], top_logprobs=[])] * len(forced)
        return len(forced)

    @property
    def first_unread(self) -> int | None:
        """The first token of the prompt that must be computed, because it is still to be read; None if all may come
        from the prefix cache."""
        return None if self.queries is None else self.queries.first_unread

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the generated tokens that came back."""
        return self.num_prompt + len(self.generated)

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the known tokens at positions `start` to `end`, without `end`, as prompts are compared
        (`Request.prompt_ids`)."""
        num_prompt = self.num_prompt
        if end <= num_prompt:
            return self.prompt.tokens(start, end)
        if start >= num_prompt:
            return self.generated[start - num_prompt : end - num_prompt]
        return self.prompt.tokens(start, num_prompt) + self.generated[: end - num_prompt]

    @property
    def needs_prefix_ids(self) -> bool:
        """Whether the ranks need the tokens of its cached prefix: penalties count them, bad words may begin with them,
        and a grammar starts at the beginning of the answer."""
        request = self.request
        return request.needs_tokens or (request.constraint is not None and len(self.generated) > 0)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that no submitted step computes."""
        return self.num_tokens - self.num_computed

    @property
    def num_pending(self) -> int:
        """The most tokens that the steps in flight may still add."""
        return self.num_owed if self.slot is None else max(0, self.num_computed + 1 - self.num_tokens)

    @property
    def must_wait(self) -> bool:
        """Whether a decoding request must wait for tokens to come back."""
        return self.num_computed >= self.parks_at and self.num_computed >= self.num_tokens

    @property
    def least_computed(self) -> int:
        """The fewest tokens whose keys and values are in the cache once the submitted steps have run."""
        return min(self.num_computed, self.num_tokens - 1)

    def set_hashed_blocks(self, num_blocks: int, block_size: int) -> None:
        """Record that the first `num_blocks` blocks are registered for reuse."""
        self.num_hashed_blocks = num_blocks
        checked_len = 0 if self.stream else min(self.max_len, (num_blocks + 1) * block_size)
        self.checked_at = checked_len - self.num_prompt
        if self.watch is not None:
            self.checked_at = min(self.checked_at, self.watch.due_at)

    def hash_blocks(self, first: int, end: int, hashes: PromptHashes) -> list[BlockHash]:
        """Return the hashes of the blocks `first` to `end`, without `end`, which must be full of known tokens.

        `hashes` has the same block size in every call.
        """
        if end <= first:
            return []
        shared = self.prompt.hash_blocks(hashes)
        num_shared = len(shared)
        if end <= num_shared:
            return shared[first:end]
        own, block_size = self.block_hashes, hashes.block_size
        if (num_known := num_shared + len(own)) < end:
            parent = own[-1] if own else shared[-1] if shared else self.prompt.hash_root
            own += hash_blocks(
                self.tokens(num_known * block_size, end * block_size).tobytes(), block_size, parent=parent
            )
        return shared[first:num_shared] + own[max(0, first - num_shared) : end - num_shared]

    def report(
        self,
        reason: FinishReason | None = None,
        *,
        stopped_by_id: bool = False,
        error_type: str = "",
        error: str = "",
    ) -> RequestOutput:
        """Make the output that brings the parent the tokens since the last report."""
        token_ids = self.generated[self.num_reported :]
        self.num_reported = len(self.generated)
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
            query_results=self.queries.report() if self.queries is not None else [],
        )
