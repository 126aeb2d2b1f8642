"""Continuations: the tokens of prompts together with what may follow them, for rows whose continuations are scored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from nvcli.errors import RowError
from nvcli.job_run.text.prompt_tasks import split_spaces
from nvcli.job_run.text.special_tokens import SpecialTokenRule
from nvcli.job_run.text.tokenizer import Tokenizer
from nvcli.jobs.job import Job, JobResult
from nvcli.jobs.tasks import ScoreTask


class Continuations:
    """Tokenizes continuations by the job's rule for special tokens."""

    def __init__(self, rule: SpecialTokenRule, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        """`eos_ids` are the model's end-of-sequence ids."""
        self._rule, self._tokenizer, self._eos_ids = rule, tokenizer, eos_ids

    @cached_property
    def lead(self) -> list[int]:
        """What stands for an empty prompt, as in lm-eval: the token that begins a text, else one that ends it."""
        bos_id = self._tokenizer.bos_token_id
        return [bos_id] if bos_id is not None else list(self._eos_ids[:1])

    @cached_property
    def num_behind(self) -> int:
        """The special tokens that the tokenizer puts behind a text."""
        (framed,), (bare,) = (self._rule.encode(["a"], is_rendered=is_rendered) for is_rendered in (False, True))
        if isinstance(framed, RowError) or isinstance(bare, RowError):
            return 0
        starts = range(len(framed) - len(bare) + 1)
        start = next((at for at in starts if framed[at : at + len(bare)] == bare), 0)
        return len(framed) - start - len(bare)

    def encode(
        self,
        rows: Sequence[Job | JobResult],
        prompts: dict[int, list[int] | RowError],
        plain: dict[int, str],
        chats: dict[int, str],
    ) -> dict[int, list[list[int] | RowError]]:
        """Return, by the number of each row with continuations, the tokens of its prompt with each of them.

        plain, chats: the texts of prompts and of rendered conversations by row. Spaces at the ends of prompts are cut
        off, because they count to the continuations; those of a conversation are the template's. prompts: prompts that
        are tokens already, and errors; a row whose continuations are refused gets its error.
        """
        found: dict[int, list[list[int] | RowError]] = {}
        places: dict[bool, list[int]] = {False: [], True: []}
        texts: dict[bool, list[str]] = {False: [], True: []}
        for at, row in enumerate(rows):
            if not isinstance(row, Job) or not isinstance(row.task, ScoreTask) or row.task.continuations is None:
                continue
            known = prompts.get(at)
            if isinstance(known, RowError):
                continue
            refusal = self._rule.check(list(row.task.continuations), row.task.key)
            if refusal is not None:
                self._forget(at, plain, chats)
                prompts[at] = refusal
                continue
            is_rendered = at not in plain
            before, given = chats.get(at, ""), list(row.task.continuations)
            if at in chats:
                given = [self._rule.to_template({"text": text})["text"] for text in given]
            elif at in plain:
                before, given = split_spaces(plain[at], given)
                plain[at] = before
            found[at] = []
            places[is_rendered] += [at] * len(given)
            texts[is_rendered] += [before + text for text in given]
        for is_rendered, of_rows in places.items():
            if of_rows:
                encoded = self._rule.encode(texts[is_rendered], is_rendered=is_rendered)
                for at, ids in zip(of_rows, encoded, strict=True):
                    known = prompts.get(at)
                    found[at].append([*known, *ids] if isinstance(known, list) and isinstance(ids, list) else ids)
        return found

    def _forget(self, at: int, *texts: dict[int, str]) -> None:
        for of_rows in texts:
            of_rows.pop(at, None)
