"""`nvcli models`: lists the supported families of models."""

from __future__ import annotations

import typer

from nvcli.cli.options import AsJson, with_options


@with_options()
def models(*, as_json: AsJson = False) -> None:
    """List the supported families of models: their features, the names in `architectures` of their
    config.json, and examples on the Hugging Face hub. Reads no files and uses no network.

    \b
    Examples:
      nvcli models
      nvcli models --json | jq -r '.[].architectures[]'
    """
    from nvcli.models.families.catalogue import FAMILIES
    from nvcli.models.families.listing import format_families, format_families_json

    typer.echo(format_families_json(FAMILIES) if as_json else format_families(FAMILIES))
