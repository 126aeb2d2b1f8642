"""The report of a comparison as text and as JSON."""

from __future__ import annotations

import msgspec

from nvcli.tools.quality.compare import QualityReport


def format_json(report: QualityReport) -> str:
    """Return the report as indented JSON. Infinite perplexities become null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def format_report(report: QualityReport) -> str:
    """Return the report as a table."""
    lines = [f"A  {report.model_a}", f"B  {report.model_b}"]
    for key, (a, b) in report.differences.items():
        if key != "model":
            lines.append(f"   {key}: {_shown(a)} → {_shown(b)}")
    lines.append(f"{report.passages:,} passages of {report.input}")
    parts = report.predictions
    lines.append(_row("", *parts))
    lines += [
        _row("tokens", *(f"{part.tokens:,}" for part in parts.values())),
        _row("mean KL, nats", *(f"{part.mean_kl:.3g}" for part in parts.values())),
        _row("largest KL", *(f"{part.max_kl:.3g}" for part in parts.values())),
        _row("same likeliest", *(f"{100 * part.top1_agreement:.2f} %" for part in parts.values())),
        _row("perplexity of A", *(f"{part.perplexity_a:.5g}" for part in parts.values())),
        _row("perplexity of B", *(f"{part.perplexity_b:.5g}" for part in parts.values())),
    ]
    answers = report.answers
    if answers is not None:
        failed = f"; {answers.failed:,} rows were not answered" if answers.failed else ""
        lines += [
            f"greedy answers: {100 * answers.equal:.2f} % of {answers.rows:,} are equal{failed}",
            f"  they begin alike for {answers.mean_common_prefix:.1f} tokens on average, of {answers.mean_tokens:.1f}",
        ]
    return "\n".join(lines)


def _row(name: str, *values: str) -> str:
    return f"  {name:<16}" + "".join(f"{value:>12}" for value in values)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
