"""StepDraft: a step's input while the scheduler puts it together."""

from __future__ import annotations

from nvcli.engine.state import RequestState
from nvcli.messages import ForwardMode, NewSlot, SlotSampling, StepInput, pack


class StepDraft:
    """Collects what the ranks are told: who enters, which blocks are whose, which slices of prompts to compute."""

    def __init__(self) -> None:
        self.num_prefix_ids = 0
        """Of the requests that enter: a message has room for so many, see `max_step_input_bytes`."""
        self._new_slots: list[NewSlot] = []
        self._blocks: list[tuple[int, int, int]] = []
        """(slot, column, block)"""
        self._extend_slots: list[int] = []
        self._extend_lens: list[int] = []
        self._extend_samples: list[int] = []
        self._token_ids = bytearray()

    @property
    def has_new_slots(self) -> bool:
        return bool(self._new_slots)

    def enter(self, state: RequestState, num_prefix_ids: int) -> None:
        """A request enters its slot, with all its blocks."""
        assert state.slot is not None
        self._new_slots.append(
            NewSlot(
                slot=state.slot,
                num_cached_tokens=state.num_computed,
                prefix_ids=state.token_ids[:num_prefix_ids].tobytes(),
                sampling=_slot_sampling(state),
            )
        )
        self.num_prefix_ids += num_prefix_ids
        self.add_blocks(state.slot, 0, state.blocks)

    def add_blocks(self, slot: int, first_column: int, blocks: list[int]) -> None:
        self._blocks += [(slot, column, block) for column, block in enumerate(blocks, first_column)]

    def keep_blocks_of(self, slots: set[int | None]) -> None:
        """Forget the blocks of all other slots."""
        self._blocks = [row for row in self._blocks if row[0] in slots]

    def extend(self, slot: int, token_ids: bytes, *, samples: bool) -> None:
        """A slice of a prompt, of packed ids; `samples`: it ends the prompt."""
        self._extend_slots.append(slot)
        self._extend_lens.append(len(token_ids) // 4)
        self._extend_samples.append(int(samples))
        self._token_ids += token_ids

    def finish(
        self, step_id: int, *, decode_slots: bytes, decode_ids: bytes, freed_slots: list[int], restarts: bool
    ) -> StepInput | None:
        """The input; None where nothing is to be computed."""
        if self._extend_slots:
            mode = ForwardMode.MIXED if decode_slots else ForwardMode.EXTEND
        elif decode_slots:
            mode = ForwardMode.DECODE
        else:
            return None
        return StepInput(
            step_id=step_id,
            mode=mode,
            freed_slots=pack(freed_slots),
            new_slots=self._new_slots,
            block_slots=pack(slot for slot, _, _ in self._blocks),
            block_columns=pack(column for _, column, _ in self._blocks),
            block_ids=pack(block for _, _, block in self._blocks),
            decode_slots=decode_slots,
            decode_ids=decode_ids,
            extend_slots=pack(self._extend_slots),
            extend_lens=pack(self._extend_lens),
            extend_samples=pack(self._extend_samples),
            token_ids=bytes(self._token_ids),
            restarts=restarts,
        )


def _slot_sampling(state: RequestState) -> SlotSampling:
    request = state.request
    params = request.sampling
    return SlotSampling(
        seed=request.seed,
        row=request.row,
        sample=request.sample,
        prompt_len=state.num_prompt,
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        stop_ids=request.stop_ids if params.min_tokens else [],
        bias_ids=list(params.logit_bias),
        bias_values=list(params.logit_bias.values()),
    )
