"""StepParts: the model, tables and buffers of a rank's steps, whatever the size of its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.models.causal_lm import CausalLM
from nvcli.worker.distributed.stage_link import StageLink
from nvcli.worker.runner.carried import Carried
from nvcli.worker.runner.constraints import Constraints
from nvcli.worker.runner.drafter import Drafter
from nvcli.worker.runner.input_buffers import InputBuffers
from nvcli.worker.runner.masked_choice import MaskedChoice
from nvcli.worker.runner.model_drafter import ModelDrafter
from nvcli.worker.runner.query_reader import PromptQueryReader
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.step_clock import StepClock
from nvcli.worker.runner.step_runner import StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The model, the tables and the buffers of one rank's steps, which are made once."""

    config: EngineConfig
    model: CausalLM
    slots: SlotTable
    buffers: InputBuffers
    backend: AttentionBackend
    sampler: Sampler
    model_drafter: ModelDrafter | None
    """Drafts by a head of the model; None: rows have none of these."""
    constraints: Constraints
    carried: Sequence[Carried]
    link: StageLink
    clock: StepClock
    kept_states: KeptStates | None
    may_draft: bool

    def make(self, kv_cache: KVCache) -> StepRunner:
        """Make the objects that run steps over these parts and a KV cache, without graphs."""
        config, model = self.config, self.model
        drafter = Drafter(
            self.slots, self.model_drafter, max_positions=config.max_model_len, accept_rate=config.draft_accept_rate
        )
        masks = MaskedChoice(
            self.constraints,
            self.sampler,
            self.slots,
            drafter,
            max_rows=config.max_step_logits,
            steps_in_flight=config.max_steps_in_flight,
        )
        device = self.slots.state.lengths.device
        return StepRunner(
            model,
            self.slots,
            self.buffers,
            kv_cache,
            self.backend,
            self.sampler,
            drafter,
            masks,
            PromptQueryReader(model, model.group, device, batch_invariant=config.batch_invariant),
            self.carried,
            self.link,
            self.clock,
            kept_states=self.kept_states,
            sets_lengths=self.may_draft and not model.stage.is_last,
            steps_in_flight=config.max_steps_in_flight,
            max_sampled=config.max_step_logits + 4 * config.max_padded_rows,
        )
