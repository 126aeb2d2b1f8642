"""Inputs that are not on this machine, fetched to it before the job begins.

A job reads local files alone, so everything that is promised of those holds for fetched ones: digests, continuing, and
that a change is noticed. A file that was fetched before is fetched again only if it may be another one now.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.jobs.files import HUB_SCHEME, check_inputs, is_remote


def fetch_inputs(names: Sequence[str]) -> list[str]:
    """Return the inputs with each one that is not on this machine replaced by the files that it comes to.

    Raises ConfigError where one cannot be fetched, or the disk has no room for it.
    """
    local: list[str] = []
    for name in names:
        if not is_remote(name):
            local.append(name)
        elif name.startswith(HUB_SCHEME):
            from nvcli.jobs.input.hub_dataset import fetch_dataset

            local += fetch_dataset(name)
        else:
            from nvcli.jobs.input.remote_files import fetch_files

            local += fetch_files(name)
    if len(local) != len(names) or any(map(is_remote, names)):
        check_inputs(local)
    return local
