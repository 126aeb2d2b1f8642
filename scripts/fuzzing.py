"""The parts that fuzz scripts share: options, the texts and values of `fuzz_data.json`, and the count of outcomes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_data(section: str) -> dict[str, Any]:
    """Load the texts and values of a script, from which hostile ones are made."""
    data: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("fuzz_data.json").read_text(encoding="utf-8"))
    return data[section]


def make_parser(doc: str | None, option: str, default: int) -> argparse.ArgumentParser:
    """Make the parser of a script that tries so many cases, which `option` names, such as `--rows`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, type=int, default=default, help="number of cases [default: %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[default: %(default)s]")
    return parser


def print_counts(counts: Mapping[str, int], started: float) -> None:
    """Print how often each outcome came, the most frequent first; `started` is by the monotonic clock."""
    for outcome, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {outcome:<28} {count:>9,}")
    print(f"{sum(counts.values()):,} cases in {time.monotonic() - started:.0f} s")
