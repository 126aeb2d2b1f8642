"""DraftPolicy: how many tokens to draft for each decode row of the next step.

An accepted draft saves its row a step, but every draft makes the step longer, and the first step of a shape captures
its graph. The policy takes the number of tokens with the most tokens per second, or no drafts if none is faster. With
few rows, all get equally many drafts. With more, drafts may also go to the rows where they are likeliest to be right:
those whose latest drafts were right or, with a head, those of whose drafts it is surest, which only the ranks know.
Whether the head is sure of the right ones shows only in such steps. So they begin once capturing a graph for them is a
small share of the run, and between them are steps with equally many drafts for all rows, which show how often these are
right. The policy relies on

- how often the first, second, … draft of a row is right (`DraftRates`), and how often each row's own are (`RowRates`):
  measured on the drafts that ran, and estimated from the answers, which show without any draft what would have been
  right (`DraftEvidence`);
- how long steps take (`DraftCosts`). A form of step that has not run yet is tried if it is likely to pay for the try.

Only its drafts show how often a head is right. So they are tried at once, in steps whose graphs are captured at the
start (`core/first_drafts.py`).

The time that drafts have cost and not yet won back is a debt, of which a small share of the elapsed time is written
off. While the debt is large, there are no drafts. If the estimates speak against drafts, they are still tried from time
to time, because the evidence may miss some: ever more rarely, and only where that creates no debt. So wrong guesses
cost a bounded part of the run.

All of this is arithmetic on the host, on numbers that come with the outputs of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from nvcli.core.config_types import DraftPolicyName
from nvcli.core.first_drafts import captured_first_from, first_draft_widths
from nvcli.core.messages import DRAFT_SOURCES, StepInput, StepOutput, unpack
from nvcli.engine.draft_costs import DraftCosts, Form, size_of
from nvcli.engine.draft_evidence import DraftEvidence
from nvcli.engine.draft_rates import DraftRates
from nvcli.engine.row_widths import RowRates
from nvcli.engine.state import RequestState

_PLAIN = Form(1)
_HEAD = DRAFT_SOURCES.index("head")

_ROWS_SEEN = 64
"""Each look weighs at least 1 / `_ROWS_SEEN` in the mean rate of all requests."""
_PRIOR_ROWS, _PRIOR_ROWS_OF_HEAD = 16, 3
"""Number of rows with drafts that the estimate before the first drafts counts as: from the evidence, and for a head."""
_UNSEEN = 4
"""Number of looks with only wrong drafts that are assumed before the first real one."""
_LOOKS = 32
"""Number of looks at the start, one per step; afterwards there is one every fourth step, or every 16th with drafts."""
_LEAST_GAIN, _LEAST_TO_STAY, _LEAST_TO_TRY = 1.03, 1.01, 1.1
"""Minimum gain for a step with drafts if the previous step had none, and if it had some; and the additional factor by
which a shape that was never measured must be better with drafts that are looked up."""
_EVEN_EVERY = 32
"""Steps that keep the surest drafts before one with as many for all rows, which shows how often drafts are right."""
_TRY_SECONDS, _TRY_STEPS = 0.03, 5
"""The assumed cost of the first step of a shape, until one has run: seconds, and with a head, whose passes are captured
too, at least this many steps without drafts, but no more than `_MOST_SAVED` (15 to 35 ms for Qwen3-0.6B and 8B on an
H200, 50 to 125 ms for Qwen3.5-35B-A3B with its head, 200 ms for Qwen3-32B with a draft model)."""
_HORIZON = 1.0
"""Steps of a size are expected to go on for as long as they have so far and, unless a head drafts, for at least this
many seconds; a head's first drafts have graphs from the start."""
_UNTESTED_SECONDS = 10.0
"""Seconds of steps in which a head takes in prompts although it has not drafted yet."""
_MOST_IDLE = 1.0
"""Maximum seconds of idle time before a step that are counted as a cost of its drafts."""
_MOST_DEBT, _MOST_DEBT_OF_KNOWN = 0.2, 0.5
"""Maximum debt in seconds at which steps have drafts: in any form, and in one that was measured."""
_MOST_SAVED = 0.2
"""Maximum seconds that are saved up for later tries."""
_TRIED_SHARE = 0.005
"""Share of the elapsed time that is written off the debt. First steps that keep a head's surest drafts take at most
this share, too: only they show whether the head knows which of its drafts are right."""
_STEPS_IN_FLIGHT = 4
"""Upper bound on the steps whose outputs are still awaited when a step is scheduled."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 4096
"""Steps without drafts before the next try when the estimates speak against drafts: at first, and at most."""
_RATE_OF_HEADS = 0.7
"""The assumed acceptance rate of the drafts of a head, until some have run."""
_ROWS_TO_TRUST = 16
"""Number of rows with drafts of a head before it has more of them than at first."""
_NEWS = 0.1
"""The acceptance rate must exceed its estimate by this much for the pause to be short again."""
_PLAIN_EVERY, _PLAIN_OFTEN = 128, 32
"""Steps with drafts before one without, whose time is measured; the second applies to drafts that are looked up, unless
the gain exceeds `_LARGE_GAIN`."""
_LARGE_GAIN = 1.2
_UNEVEN_EVERY = 8
"""Steps between two estimates of what uneven drafts would gain, while there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The limits of drafts. By default decode rows have none."""

    widths: tuple[int, ...] = (1,)
    """Allowed numbers of tokens per row in steps with drafts, ascending; (1,): there are no such steps."""
    uneven_widths: tuple[float, ...] = ()
    """Allowed numbers of tokens per row, on average, in steps whose rows have different numbers of drafts."""
    most_of_uneven: int = 1
    """The most tokens of a row in such a step; all of `uneven_widths` are less."""
    uneven_from: int = 1
    """The fewest rows of such a step."""
    policy: DraftPolicyName = "auto"
    """auto: as many drafts as make the run faster; always: as many as possible."""
    max_step_tokens: int = 1 << 30
    """Maximum tokens of all decode rows of a step with drafts."""
    accept_rate: float | None = None
    """See `EngineConfig.draft_accept_rate`."""
    has_head: bool = False
    """Whether a head of the model drafts, which must have taken in the steps before (`DraftPolicy.extends`)."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a decode row."""
        return self.widths[-1]


NO_DRAFTS = Drafting()


class DraftPolicy:
    """Chooses the number of tokens of each decode row for one replica's steps."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self.num_drafted = [0] * len(DRAFT_SOURCES)
        """Drafted tokens from each of `DRAFT_SOURCES`."""
        self.num_accepted = [0] * len(DRAFT_SOURCES)
        most = drafting.most_tokens - 1
        self._has_head = drafting.has_head
        prior = _RATE_OF_HEADS if self._has_head else 0.0
        self._accepted = DraftRates(
            most, prior=prior, prior_rows=_PRIOR_ROWS_OF_HEAD if self._has_head else _PRIOR_ROWS
        )
        self._is_extended = False
        """Whether the head takes in the latest step."""
        self._awaited: Form | None = None
        """The form of the next step, if this one has no drafts of the head yet; None: it is still to be chosen."""
        self._evidence = DraftEvidence(most, drafting.accept_rate)
        self._costs = DraftCosts(has_head=self._has_head)
        self._num_steps = 0
        self._num_looks = 0
        self._elapsed = 0.0
        """Seconds of all steps."""
        self._try_seconds: float | None = None
        """The cost of the first step of a shape; None: none has run."""
        self._debt = 0.0
        """Seconds that drafts have cost, less what they have gained and what was written off. Below 0: the seconds that
        tries may cost."""
        self._seconds_of: dict[int, float] = {}
        """Seconds of the steps of each size."""
        self._rates = RowRates(drafting.most_of_uneven - 1)
        forms = [*(Form(mean, False) for mean in drafting.uneven_widths), *(Form(w) for w in drafting.widths if w > 1)]
        self._forms = sorted(forms, key=lambda form: (form.mean, not form.is_even))
        """The forms of steps with drafts, those with the fewest tokens first; empty if there are no such steps."""
        self._form = _PLAIN
        self._uneven_left = 0
        """Steps that may keep the surest drafts of a head before one with as many for all rows."""
        self._steps_without_drafts = 0
        self._steps_with_drafts = 0
        """Steps since the last one without drafts."""
        self._steps_to_wait = 0
        """Steps to wait before another shape is tried, until the steps in flight at the last try have finished."""
        self._pause = self._steps_to_try = _FIRST_PAUSE
        """Steps without drafts between two tries, and how many are left until the next one."""

    def widths(self, rows: Sequence[RequestState], max_tokens: int, *, has_prompts: bool) -> list[int]:
        """Return the number of tokens for each of a step's decode rows, up to `max_tokens` in all. `has_prompts`: the
        step may compute prompts too."""
        num_rows, drafting = len(rows), self._drafting
        if not self._forms or num_rows == 0:
            return [1] * num_rows
        if all(state.request.constraint is not None for state in rows):  # they have no drafts
            self._form, self._steps_with_drafts = _PLAIN, 0
            self._steps_without_drafts += 1
            return [1] * num_rows
        most = min(max_tokens, drafting.max_step_tokens)
        is_due = not has_prompts if self._has_head else self._steps_without_drafts % _UNEVEN_EVERY <= 1
        has_uneven = num_rows >= drafting.uneven_from and is_due
        forms = [form for form in self._forms if form.num_tokens(num_rows) <= most and (form.is_even or has_uneven)]
        is_always = drafting.policy == "always"
        if not forms or (has_prompts and not is_always):
            return [1] * num_rows
        levels = self._rates.levels(rows) if has_uneven and not self._has_head else []
        form, self._awaited = self._awaited, None
        if form is None or form not in forms:
            form = forms[-1] if is_always else self._choose(size_of(num_rows), forms, levels)
        if self._has_head and form != _PLAIN and not self._is_extended:
            self._awaited = form
        self._form = form
        self._steps_with_drafts = 0 if self._form == _PLAIN else self._steps_with_drafts + 1
        self._steps_without_drafts = self._steps_without_drafts + 1 if self._form == _PLAIN else 0
        if self._form.is_even:
            return [int(self._form.mean)] * num_rows
        if self._has_head:
            return [drafting.most_of_uneven] * num_rows
        return self._rates.widths(levels, self._rates.plan(levels, self._form.num_tokens(num_rows) - num_rows))

    def shared_tokens(self, num_rows: int) -> int:
        """Return the tokens of all rows together, if the ranks are to choose which rows of the step have more drafts;
        0: each has as many as `widths` says."""
        return self._form.num_tokens(num_rows) if self._has_head and not self._form.is_even else 0

    def extends(self, *, has_drafts: bool, has_prompts: bool) -> bool:
        """Return whether the head takes in the next step, so that rows can have its drafts afterwards: steps with
        drafts, and steps with prompts while drafts pay or have not been tried. Call it once for each step, after
        `widths`."""
        if not self._has_head:
            return False
        is_untested = not self._accepted.num_rows and self._elapsed < _UNTESTED_SECONDS
        self._is_extended = has_drafts or (has_prompts and (is_untested or self.has_drafts))
        return self._is_extended

    @property
    def has_drafts(self) -> bool:
        """Whether the latest steps that could have drafts had some, because they pay."""
        return self._steps_with_drafts > 0 or self._steps_without_drafts == 1

    def learn(self, step: StepInput, output: StepOutput, decoding: Sequence[RequestState] = ()) -> None:
        """Learn from a step's output and duration. `decoding`: the requests of its decode rows, before the step's
        tokens are added to them."""
        if not self._forms:
            return
        num_rows = step.num_decodes
        widths = unpack(step.num_tokens)[:num_rows] if step.row_limits else [1] * num_rows
        form = self._form_of(widths, step.draft_tokens) if step.row_limits else _PLAIN
        seconds = output.seconds + min(output.idle_seconds, output.seconds)
        self._elapsed += seconds
        debt = self._debt - _TRIED_SHARE * seconds
        self._num_steps += 1
        counts = unpack(output.counts)[:num_rows] if output.counts else widths
        if form != _PLAIN:
            learns_rates = decoding and not self._has_head
            rates = self._rates.learn(decoding, widths, counts) if learns_rates else []
            self._count(output, form, counts, widths, rates)
        if num_rows and num_rows == step.num_rows and output.seconds > 0:
            size = size_of(num_rows)
            self._seconds_of[size] = self._seconds_of.get(size, 0.0) + seconds
            plain = self._costs.plain(size)
            if form != _PLAIN and plain is not None:
                spent = output.seconds + min(output.idle_seconds, _MOST_IDLE)
                debt += spent - plain * sum(counts) / num_rows
                if not self._has_graph(size, form):
                    self._try_seconds = max(self._try_seconds or 0.0, min(output.idle_seconds, _MOST_IDLE))
            self._costs.learn(size, form, output.seconds, output.idle_seconds)
        self._debt = max(-_MOST_SAVED, debt)
        every = 1 if self._num_looks < _LOOKS else 4 if form == _PLAIN else 16
        if decoding and self._num_steps % every == 0 and not self._has_head:
            state = decoding[self._num_looks % len(decoding)]
            if state.request.constraint is None:
                self._look(state)
            else:
                self._num_looks += 1

    def _form_of(self, widths: Sequence[int], shared_tokens: int) -> Form:
        """Return the form of a step with drafts. `shared_tokens`: see `StepInput.draft_tokens`."""
        if min(widths) == max(widths) and not shared_tokens:
            return Form(widths[0])
        mean = (shared_tokens or sum(widths)) / len(widths)
        return Form(min(self._drafting.uneven_widths, key=lambda known: abs(known - mean), default=mean), False)

    def _count(
        self, output: StepOutput, form: Form, counts: Sequence[int], widths: Sequence[int], rates: Sequence[float]
    ) -> None:
        """Update the acceptance rates from the number of tokens that each row with drafts gave. `rates`: how often the
        drafts of each row are right, for drafts that a row did not have; empty: unknown."""
        num_rows = len(counts)
        drafted = unpack(output.drafted) if output.drafted else [width - 1 for width in widths]
        sources = unpack(output.draft_sources) if output.draft_sources else [0] * num_rows
        for source, num_drafted, count in zip(sources, drafted, counts, strict=True):
            self.num_drafted[source] += num_drafted
            self.num_accepted[source] += max(0, count - 1)
        all_counts = counts
        if self._has_head:  # rows without its drafts say nothing about it
            has_drafts = [num_drafted > 0 for num_drafted in drafted]
            counts, widths = list(compress(counts, has_drafts)), list(compress(widths, has_drafts))
            num_rows = len(counts)
            if _HEAD not in compress(sources, has_drafts):
                return
            if not form.is_even:  # its drafts are the surest ones
                self._accepted.learn_surest(form.mean, self._drafting.most_of_uneven, all_counts)
                return
        if sum(count > 1 for count in counts) / num_rows > self._accepted.shares()[0] + _NEWS:
            self._pause = _FIRST_PAUSE
            self._steps_to_try = min(self._steps_to_try, self._pause)
        else:
            self._uneven_left = _EVEN_EVERY
        self._accepted.learn(counts, widths, rates)

    def _look(self, state: RequestState) -> None:
        """Update the acceptance rates from how drafts would have done for a request."""
        self._num_looks += 1
        outcome = self._evidence.of(state)
        if outcome is None:
            return
        weight = max(1 / _ROWS_SEEN, 1 / (self._num_looks + _UNSEEN))
        self._rates.saw(state, outcome.num_right, outcome.num_drafts, weight=weight)
        self._accepted.look(outcome.num_right, outcome.num_drafts)

    def _choose(self, size: int, forms: list[Form], levels: Sequence[int]) -> Form:
        """Return the best form for steps of a size, one of `forms` or without drafts. `levels`: of the rows' rates;
        empty if no form is uneven."""
        costs = self._costs
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
        if costs.plain(size) is None:
            return _PLAIN  # nothing to compare with
        with_graphs = [form for form in forms if self._has_graph(size, form)]
        forms = self._candidates(size, forms, with_graphs)
        shares = self._accepted.shares()
        gains = {form: self._tokens_of(form, shares, levels) / costs.ratio(size, form) for form in forms}
        best, best_gain = self._best(size, gains, with_graphs)
        if best != _PLAIN and self._debt <= (_MOST_DEBT_OF_KNOWN if costs.is_known(size, best) else _MOST_DEBT):
            is_rare = self._has_head or best_gain > _LARGE_GAIN
            if self._steps_with_drafts >= (_PLAIN_EVERY if is_rare else _PLAIN_OFTEN):
                return _PLAIN
            if not costs.is_known(size, best):
                self._steps_to_wait = _STEPS_IN_FLIGHT
            return best
        likely = [form for form in forms if form in with_graphs or not self._has_head] or forms
        return self._try(size, max((gains[form], form) for form in likely)[1])

    def _candidates(self, size: int, forms: list[Form], with_graphs: list[Form]) -> list[Form]:
        """Return the forms to compare: all of them, once steps with drafts of this size were measured, and rows enough
        with drafts of a head were seen."""
        if self._has_head and self._accepted.num_rows < _ROWS_TO_TRUST and with_graphs:
            return with_graphs[:1]
        return forms if self._costs.knows_from(size) else with_graphs or forms[: 1 + self._has_head]

    def _best(self, size: int, gains: dict[Form, float], with_graphs: list[Form]) -> tuple[Form, float]:
        """Return the form with the largest gain, and the gain; `_PLAIN` if none gains enough, or is worth a try."""
        costs = self._costs
        seconds = max(self._seconds_of.get(size, 0.0), 0.0 if self._has_head else _HORIZON)
        ready = [form for form in gains if costs.is_known(size, form) or form in with_graphs]
        most_ready = max([1.0, *(gains[form] for form in ready)])
        best, best_gain = _PLAIN, _LEAST_GAIN if self._form == _PLAIN else _LEAST_TO_STAY
        for form, gain in gains.items():
            if not costs.is_known(size, form):
                saved = (gain / most_ready - 1) * seconds
                gain /= 1.0 if self._has_head else _LEAST_TO_TRY
                if self._steps_to_wait > 0 or (form not in with_graphs and saved < self._worth_of_try(size, form)):
                    continue
            if gain > best_gain:
                best, best_gain = form, gain
        if self._has_head and not best.is_even:
            if self._uneven_left <= 0:
                best = max((form for form in ready if form.is_even), key=gains.__getitem__, default=best)
            self._uneven_left -= 1
        return best, best_gain

    def _tokens_of(self, form: Form, shares: Sequence[float], levels: Sequence[int]) -> float:
        """Return the tokens that a row can be expected to get in a step of this form."""
        if form.is_even:
            return 1 + sum(shares[: int(form.mean) - 1])
        if self._has_head:
            return self._accepted.surest(form.mean, self._drafting.most_of_uneven)
        num_rows = len(levels)
        return 1 + self._rates.plan(levels, form.num_tokens(num_rows) - num_rows).num_right / num_rows

    def _try(self, size: int, form: Form) -> Form:
        """Return `form` if it is time to try it although the estimates speak against it, else a step without drafts."""
        if self._steps_to_try > 0:
            self._steps_to_try -= 1
            return _PLAIN
        if form.mean < _LEAST_GAIN * self._costs.ratio(size, form) or self._debt + self._price(size, form) > 0:
            return _PLAIN
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        self._steps_to_try = self._pause
        return form

    def _price(self, size: int, form: Form) -> float:
        """Return the seconds that a step with drafts wastes if all of them are wrong."""
        plain = self._costs.plain(size)
        assert plain is not None
        capture = self._try_seconds or min(_MOST_SAVED, max(_TRY_SECONDS, _TRY_STEPS * plain * self._has_head))
        return (self._costs.ratio(size, form) - 1) * plain + (0.0 if self._has_graph(size, form) else capture)

    def _worth_of_try(self, size: int, form: Form) -> float:
        """Return the seconds that a form must be expected to save before a step of it is worth its graph. With a head,
        graphs are captured for a small share of the time, and of what drafts have gained."""
        price, share = self._price(size, form), _TRIED_SHARE * self._elapsed
        of_uneven = 0.0 if form.is_even else (1 + self._costs.num_uneven) * price
        if self._has_head and (price + self._debt > 2 * share or of_uneven > share):
            return math.inf
        return price + max(0.0, self._debt)

    def _has_graph(self, size: int, form: Form) -> bool:
        """Whether the graph of a shape is likely to have been captured."""
        is_first = form.mean in first_draft_widths(self._drafting.widths, captured_first_from(size))
        return (self._has_head and form.is_even and is_first) or self._costs.has_graph(size, form)
