"""Tables of outcomes: times, and shares of the roofs of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.runner import Outcome


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a share of a roof, or on one item's time (or the rate of `what`) relative to
    another's."""

    text: str
    item: str
    bound: float
    is_at_most: bool = False
    over: str = ""
    what: str = "ms"


#: Goals of issue 5.
GOALS = (
    Goal("paged decode attention, of the copy roof", "attention decode 64 x 4K", 0.85),
    Goal(
        "shuffled blocks over contiguous ones", "attention decode 64 x 4K", 1.03, True,
        "attention decode 64 x 4K contiguous",
    ),
    Goal("prefill attention, of the matmul roof", "attention prefill 8K", 0.60),
    Goal(
        "prefill attention's time over SDPA's", "attention prefill 8K", 1 / 0.9, True,
        "SDPA prefill 8K",
    ),
    Goal("decode step at 1, of its floor", "engine decode 1 x 1K", 0.85),
    Goal("decode step at 64, of its floor", "engine decode 64 x 1K", 0.78),
    Goal("decode step at 256, of its floor", "engine decode 256 x 1K", 0.70),
    Goal("prefill of 8K, of the matmul roof", "engine prefill 8K", 0.75),
    Goal("kv_pack, of the copy roof", "kv_pack 8K tokens", 0.85),
    Goal("the same with its checksum", "kv_pack with its checksum 8K tokens", 0.85),
    Goal(
        "float8 KV's time over 16-bit KV's at 32K", "attention decode 8 x 32K fp8", 0.58, True,
        "attention decode 8 x 32K",
    ),
    Goal(
        "tokens/s over transformers' continuous batching", "64 prompts of 512, 64 tokens each", 2.5,
        False, "the same with transformers' continuous batching", "output_tokens_per_s",
    ),
)  # fmt: skip

_COLUMNS = ("item", "ms", "of its roof", "more")
_SHOWN_APART = ("ms", "bytes", "flops")


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Floor over time per item; the floor is the larger of bytes over the copy roof and operations
    over the matmul roof."""
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
    """`what` per millisecond."""
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


def goals(outcomes: Sequence[Outcome]) -> list[tuple[Goal, float | None]]:
    """Each goal with the value reached; None if an item has no result."""
    return [(goal, _reached(goal, outcomes)) for goal in GOALS]


def _reached(goal: Goal, outcomes: Sequence[Outcome]) -> float | None:
    if not goal.over:
        return shares(outcomes).get(goal.item)
    by_name = {outcome.name: outcome.result for outcome in outcomes}
    above, below = (by_name.get(name, {}).get(goal.what) for name in (goal.item, goal.over))
    return above / below if above and below else None


def goal_table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of the goals."""
    lines = ["| goal | wanted | reached | |", "|---|---:|---:|---|"]
    for goal, reached in goals(outcomes):
        wanted = f"{'<=' if goal.is_at_most else '>='} {goal.bound:.2f}"
        if reached is None:
            lines.append(f"| {goal.text} | {wanted} | | not measured |")
            continue
        is_met = reached <= goal.bound if goal.is_at_most else reached >= goal.bound
        lines.append(
            f"| {goal.text} | {wanted} | {reached:.2f} | {'met' if is_met else 'MISSED'} |"
        )
    return "\n".join(lines)
