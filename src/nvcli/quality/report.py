"""The report of a comparison as text and as JSON."""

from __future__ import annotations

import msgspec

from nvcli.quality.compare import QualityReport


def format_json(report: QualityReport) -> str:
    """Return the report as indented JSON. Perplexities beyond all numbers are null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def format_report(report: QualityReport) -> str:
    """Return the report as a table."""
    lines = [f"A  {report.model_a}", f"B  {report.model_b}"]
    for key, (a, b) in report.differences.items():
        if key != "model":
            lines.append(f"   {key}: {_shown(a)} → {_shown(b)}")
    rows = [
        ("mean KL of B from A", f"{report.mean_kl:.3g} nats a token (most: {report.max_kl:.3g})"),
        ("same likeliest token", f"{100 * report.top1_agreement:.2f} %"),
        ("perplexity of A", f"{report.perplexity_a:.5g}"),
        ("perplexity of B", f"{report.perplexity_b:.5g}"),
    ]
    if report.answers is not None:
        answers = report.answers
        rows += [
            ("greedy answers", f"{100 * answers.equal:.2f} % of {answers.rows:,} are equal"),
            (
                "  begin alike",
                f"{answers.mean_common_prefix:.1f} tokens on average, of {answers.mean_tokens:.1f}",
            ),
        ]
        if answers.failed:
            rows.append(("  not answered", f"{answers.failed:,}"))
    lines.append(f"{report.positions:,} tokens in {report.passages:,} passages of {report.input}")
    return "\n".join([*lines, *(f"  {name:<22}{value}" for name, value in rows)])


def _shown(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
