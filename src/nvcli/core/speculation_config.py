"""The `speculation:` section: drafts of several tokens, all checked by one step."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from nvcli.core.config_types import MAX_DRAFT_TOKENS, DraftPolicyName, Name
from nvcli.core.flags import MODEL, Flag


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted. Drafts change no answer: only tokens that the model itself would give are kept."""

    method: Annotated[
        Name,
        Flag(
            "--speculate",
            MODEL,
            "Draft several tokens per step and keep the correct ones: lookup: from earlier text; mtp: by the model's "
            "own head for that; PATH: by the EAGLE-3 head or the small model in this folder; auto: lookup, or mtp "
            "where few requests run at a time",
            metavar="auto|none|lookup|mtp|PATH",
        ),
    ] = "auto"
    """lookup: a row's last tokens are looked up in its prompt and answer so far and in other answers, and the tokens
    that followed them there are drafted; tokens that a grammar forces are taken several at a time. mtp: the
    checkpoint's head for multi-token prediction drafts, and where it cannot, earlier text. A folder, or an id in the
    local cache of the Hugging Face hub: the EAGLE-3 head there drafts likewise, or the model there, whose tokens must
    be the same. auto: what never costs time: drafts from earlier text if the model can check them, one forced token at
    a time; with few requests at a time (`job.run.engine_settings`), the checkpoint's head."""
    max_draft_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] = 7
    """Maximum tokens drafted for a row in one step."""
    policy: DraftPolicyName = "auto"
    """auto: as many drafts as make the run faster, or none; always: as many as are found."""

    @property
    def draft_head(self) -> str | None:
        """The head that drafts: mtp, or the name of a folder; None: there is none."""
        return None if self.method in ("auto", "none", "lookup") else self.method

    @property
    def num_draft_tokens(self) -> int:
        """The maximum tokens drafted for a row; 0: none are."""
        return 0 if self.method == "none" else self.max_draft_tokens
