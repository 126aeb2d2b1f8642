"""ModelDrafter: drafts by the head of a model, at two moments of a step.

At its end the head computes the step's tokens as well (`extend`), so that its keys follow the target's wherever these
go, and keeps a first guess for each row. At the start of a step with drafts it goes on from these guesses, one pass
for each further draft (`propose`). Tokens are chosen as the target chooses them, with the noise of their own position:
so a draft is right more often than one that is drawn independently.

Steps that leave `extend` out cost later drafts of their rows, and never an answer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.core.engine_config import EngineConfig
from nvcli.kernels.guesses import (
    begin_passes,
    empty_guesses,
    following_tokens,
    keep_guesses,
    last_tokens,
    next_pass,
    share_drafts,
    write_drafts,
)
from nvcli.kernels.step_tensors import Pass
from nvcli.kernels.token_scores import shard_scores
from nvcli.models.causal_lm import CausalLM
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.step_images import StepImages


class ModelDrafter:
    """Drafts of one rank's rows by a head. All ranks call it alike."""

    def __init__(
        self, config: EngineConfig, model: CausalLM, slots: SlotTable, sampler: Sampler, images: StepImages | None
    ) -> None:
        """`model` has a head. `images`: those of steps."""
        head = model.config.draft_head
        assert head is not None
        assert model.draft_head is not None
        self._head, self._slots, self._sampler = model.draft_head, slots, sampler
        self._reads_states = head.reads_states
        self._images = images if head.reads_states else None
        """The images that the head reads, or whose positions shift those of its tokens. A model of its own sees
        none."""
        self._has_uneven_rows = bool(config.uneven_draft_widths)
        """Whether steps may give the rows different numbers of drafts."""
        self._max_positions = config.max_model_len
        lengths, size = slots.state.lengths, head.state_size(model.config.hidden_size)
        self._kept = empty_guesses(len(lengths), size, getattr(torch, config.dtype), lengths.device)
        self._row_starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)

    def propose(self, batch: StepBatch, *, for_all: bool) -> None:
        """Draft tokens for the rows of a step that have a guess, before the step's inputs are prepared. `for_all`:
        old guesses serve too. In a step whose rows have different numbers of drafts they go where the head is surest of
        them."""
        drafts, state = batch.drafts, self._slots.state
        assert drafts is not None
        num_rows, width = batch.forward.shape.decode_rows, batch.forward.shape.tokens_per_row
        passes = begin_passes(self._kept, batch.rows, state, drafts, num_rows, for_all=for_all)
        ahead = int(self._reads_states)
        states = self._kept.states[passes.slots]
        guesses = self._kept.tokens[passes.slots] if ahead else None
        is_uneven = self._has_uneven_rows and batch.forward.shape.uneven_tokens > 0
        odds = [self._kept.odds[passes.slots]] if ahead else []
        for number in range(1, width - ahead):
            here = next_pass(passes, state, number, guesses, ahead=ahead, max_positions=self._max_positions)
            one = self._batch_of_pass(batch.forward, passes.slots, here)
            one.backend.plan_on_device(one)
            hidden, states = self._head(here.tokens, states, one, None)
            guesses, own = self._choose(hidden, passes.slots, here.sampled, with_odds=is_uneven)
            if own is not None:
                odds.append(odds[-1] * own if odds else own)
        assert guesses is not None
        write_drafts(passes, state, width - 1, guesses)
        if is_uneven:
            share_drafts(batch.rows, state, drafts, torch.stack(odds))
            if not guesses.is_cuda:  # where attention is planned on the host
                batch.forward.num_tokens_host[:num_rows] = batch.rows.num_tokens[:num_rows].numpy()

    def extend(self, batch: StepBatch, states: Tensor) -> None:
        """Compute the tokens of a step with the head, once the step's own tokens are chosen, and keep a guess for each
        row. states: [T, K], the target's (`CausalLM.forward_with_states`)."""
        forward, state = batch.forward, self._slots.state
        num_rows = forward.shape.num_rows
        last = last_tokens(batch.rows, state, batch.inputs.seq_lens, num_rows, forward.num_tokens)
        if not self._reads_states:  # all that is wanted are its keys
            self._head(forward.input_ids, states, forward, last.places[:0])
            keep_guesses(self._kept, last, None, None)
            return
        tokens = following_tokens(batch.rows, state, forward.positions)
        if self._images is not None:
            forward = self._images.prepare_head(batch.rows, forward)
        hidden, states = self._head(tokens, self._head.read(states), forward, last.places)
        guesses, odds = self._choose(hidden, last.slots, last.following, with_odds=self._has_uneven_rows)
        keep_guesses(self._kept, last, guesses, states, odds)

    def _choose(
        self, hidden: Tensor, slots: Tensor, positions: Tensor, *, with_odds: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the tokens of `positions` [R], as the target would: [R] int32. `with_odds`: also return the
        probability that the head gives to each, [R] float32."""
        logits = self._head.compute_logits(hidden)
        ids = self._sampler.sample(logits, slots, positions)
        if not with_odds:
            return ids, None
        scores = shard_scores(logits, ids.long().clamp(min=0), start=0, num_top=1)
        return ids, (scores.target - scores.log_sum).exp()

    def _batch_of_pass(self, forward: ForwardBatch, slots: Tensor, here: Pass) -> ForwardBatch:
        """Make the batch of a pass of one token for each decode row of a step."""
        num_rows = len(slots)
        return ForwardBatch(
            shape=BatchShape(decode_rows=num_rows),
            input_ids=here.tokens,
            positions=here.positions,
            slot_mapping=here.places,
            slots=slots,
            block_tables=forward.block_tables,
            seq_lens=here.seq_lens,
            query_start_loc=self._row_starts[: num_rows + 1],
            logits_rows=None,
            num_tokens_host=np.ones(num_rows, dtype=np.int32),
            seq_lens_host=forward.seq_lens_host[:num_rows],
            kv_cache=forward.kv_cache,
            backend=forward.backend,
            angle_positions=None if self._images is None else self._images.positions_behind(slots, here.positions),
        )
