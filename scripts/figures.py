"""Makes the tables of the pages from the result files in scripts/results, and takes outputs of `nvcli bench --json` in.

    python scripts/figures.py               writes the tables into README.md and docs/
    python scripts/figures.py --check       says which pages would change, and exits with 1 if any would
    python scripts/figures.py add NAME FILE --command 'nvcli bench …'
                                            makes scripts/results/NAME.json of an output of `nvcli bench --json`

A result file says how its figures were made: `command`, `date` (YYYY-MM-DD), `device`, `num_devices` and `versions`,
and has them under `figures`. A file of several results has what they share at its top, and each by its name under
`results`.

A table stands on a page as a template in a comment, and behind it what is made of it:

    <!-- figures
    | Qwen3-8B | {h200/qwen3-8b output_tokens_per_second:,.0f} | {h200/qwen3-8b of_limit:.0%} |
    *{sources}*
    -->
    …
    <!-- end -->

`{NAME KEY:FORMAT}` is a figure, `{NAME KEY / NAME KEY:FORMAT}` a ratio, `{sources}` the devices, versions and dates of
all that the template names. A line that begins with `?` is left out while one of its results is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "scripts/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_TEMPLATE = re.compile(r"<!-- figures\n(.*?)-->\n(.*?)<!-- end -->", re.DOTALL)
_FIGURE = re.compile(r"\{([^{}:]+?)(?::([^{}]*))?\}")
_MADE_WITH = ("torch", "triton", "vllm", "transformers", "lm-eval")
_NAMES = {"triton": "Triton", "vllm": "vLLM"}


@dataclass(slots=True, frozen=True)
class Result:
    """Figures, and how they were made."""

    command: str
    date: date
    device: str
    num_devices: int
    versions: dict[str, str]
    figures: dict[str, float]

    @classmethod
    def of(cls, said: dict[str, Any]) -> Result:
        """Read a result. Raises KeyError for what it does not say."""
        return cls(
            command=said["command"],
            date=date.fromisoformat(said["date"]),
            device=said["device"],
            num_devices=said["num_devices"],
            versions=said["versions"],
            figures=said["figures"],
        )


def of_bench(output: dict[str, Any], command: str) -> dict[str, Any]:
    """Make what a result file says of an output of `nvcli bench --json`. Figures are those of the median run."""
    runs = sorted(output["runs"], key=lambda run: run["output_tokens"] / run["seconds"])
    run = runs[len(runs) // 2]
    figures = {
        "output_tokens_per_second": round(run["output_tokens"] / run["seconds"], 1),
        "requests_per_second": round(run["num_requests"] / run["seconds"], 3),
        "seconds": round(run["seconds"], 3),
        "of_limit": round(run["roofline_share"], 4),
        "ready_seconds": round(output["ready_seconds"], 2),
        "preemptions": run["num_preemptions"],
        "passes": len(runs),
    }
    for phase, said in run["phases"].items():
        figures[f"{phase}_of_limit"] = round(said["limit_seconds"] / said["seconds"], 4)
    if (decode := run["steps"].get("DECODE")) is not None:
        figures["decode_step_ms"] = round(decode["median"], 3)
    gpus = output["layout"]["gpus"]
    versions = {name: version.split("+")[0] for name, version in output["versions"].items() if version is not None}
    return {
        "command": command,
        "date": output["date"][:10],
        "device": output["layout"]["device"],
        "num_devices": max(1, len(gpus)),
        "versions": versions,
        "figures": figures,
    }


def results() -> dict[str, Result]:
    """All results, by the name of their file and, where it has several, their own behind a slash."""
    return {name: result for path in sorted(RESULTS.glob("*.json")) for name, result in read_results(path).items()}


def read_results(path: Path) -> dict[str, Result]:
    """The results of one file. Raises KeyError for what it does not say."""
    said = json.loads(path.read_text(encoding="utf-8"))
    several = {"": {}} if "results" not in said else said.pop("results")
    return {"/".join(filter(None, (path.stem, name))): Result.of({**said, **own}) for name, own in several.items()}


def filled(template: str, known: dict[str, Result]) -> str:
    """Fill a template. Raises KeyError for a result or a figure that is not there."""
    lines = []
    for line in template.splitlines():
        if line.startswith("?"):
            line = line[1:]
            if any(name not in known for name in names(line)):
                continue
        lines.append(line)
    sources = _sources([known[name] for name in sorted({*names("\n".join(lines))})])
    text = "".join(
        _FIGURE.sub(lambda match: sources if match[1] == "sources" else _figure(match[1], match[2] or "", known), line)
        + "\n"
        for line in lines
    )
    return text.replace("*.* ", "")  # a table without figures has no sources


def names(template: str) -> list[str]:
    """The results that a template names."""
    parts = [part for match in _FIGURE.finditer(template) if match[1] != "sources" for part in match[1].split(" / ")]
    return [part.split()[0] for part in parts]


def _figure(expression: str, form: str, known: dict[str, Result]) -> str:
    values = []
    for part in expression.split(" / "):
        name, key = part.split()
        if key == "command":
            return f"`{known[name].command}`"
        values.append(known[name].figures[key])
    return format(values[0] if len(values) == 1 else values[0] / values[1], form)


def _sources(used: list[Result]) -> str:
    """The devices of results with their versions and dates, such as "NVIDIA H200, torch 2.11.0, 22 November 2026"."""
    dates: dict[str, set[date]] = {}
    for result in used:
        made_with = [
            f"{_NAMES.get(name, name)} {result.versions[name]}" for name in _MADE_WITH if name in result.versions
        ]
        dates.setdefault(", ".join([result.device, *made_with]), set()).add(result.date)
    said = []
    for made, days in dates.items():
        first, last = min(days), max(days)
        end = f"{last.day} {last:%B %Y}"
        month = "" if first.month == last.month else f" {first:%B}"
        said.append(f"{made}: {end}" if first == last else f"{made}: {first.day}{month} to {end}")
    return "; ".join(said)


def page_text(page: Path, known: dict[str, Result]) -> str:
    """The text of a page with its tables made anew."""
    return _TEMPLATE.sub(
        lambda match: f"<!-- figures\n{match[1]}-->\n{filled(match[1], known)}<!-- end -->",
        page.read_text(encoding="utf-8"),
    )


def unused(known: dict[str, Result]) -> list[str]:
    """The results that no page names."""
    text = "".join(match[1] for page in PAGES for match in _TEMPLATE.finditer(page.read_text(encoding="utf-8")))
    return sorted({*known} - {*names(text)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    commands = parser.add_subparsers(dest="action")
    add = commands.add_parser("add", help="make a result file of an output of `nvcli bench --json`")
    add.add_argument("name")
    add.add_argument("file", type=Path)
    add.add_argument("--command", required=True, help="the command that printed it")
    said = parser.parse_args()
    if said.action == "add":
        result = of_bench(json.loads(said.file.read_text(encoding="utf-8")), said.command)
        (RESULTS / f"{said.name}.json").write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return
    known = results()
    changed = [page for page in PAGES if page_text(page, known) != page.read_text(encoding="utf-8")]
    for page in changed:
        print(page.relative_to(ROOT))
        if not said.check:
            page.write_text(page_text(page, known), encoding="utf-8")
    if said.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
