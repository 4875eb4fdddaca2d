"""Outcomes as a table: times, and shares of the roofs of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.runner import Outcome

_COLUMNS = ("item", "ms", "of its roof", "more")
_SHOWN_APART = ("ms", "bytes", "flops")


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """By item, its floor over its time: the larger of bytes over the copy roof and operations over the matmul roof."""
    by_name = {outcome.name: outcome.result for outcome in outcomes}
    copy = _rate(by_name.get("roof copy", {}), "bytes")
    matmul = _rate(by_name.get("roof matmul", {}), "flops")
    if copy is None or matmul is None:
        return {}
    found = {}
    for name, result in by_name.items():
        if "ms" in result and ("bytes" in result or "flops" in result):
            floor_ms = max(result.get("bytes", 0.0) / copy, result.get("flops", 0.0) / matmul)
            found[name] = floor_ms / result["ms"]
    return found


def _rate(result: Mapping[str, Any], what: str) -> float | None:
    """Of `what` per millisecond."""
    return float(result[what]) / float(result["ms"]) if what in result and "ms" in result else None


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table, one row for each item."""
    found = shares(outcomes)
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---:|---:|---|"]
    for outcome in outcomes:
        ms = outcome.result.get("ms")
        share = found.get(outcome.name)
        cells = (
            outcome.name,
            "" if ms is None else f"{ms:.4g}",
            "" if share is None else f"{share:.2f}",
            _more(outcome),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _more(outcome: Outcome) -> str:
    if outcome.failure:
        return "FAILED: " + " ".join(outcome.failure.split()).replace("|", "/")[-200:]
    pairs = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in outcome.result.items()
        if name not in _SHOWN_APART
    ]
    rates = [
        f"{outcome.result[what] / outcome.result['ms'] / scale:.4g} {unit}"
        for what, scale, unit in (("bytes", 1e6, "GB/s"), ("flops", 1e9, "TFLOP/s"))
        if what in outcome.result and outcome.result.get("ms")
    ]
    return "; ".join([*rates, *pairs])
