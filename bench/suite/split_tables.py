"""Two tiers beside one. Pure: results of bench.split in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.suite.markdown import Goal, about, goal_line, number, table

_STEADY = Goal("Goal: gaps in steady answers, p99, a tenth of those of one tier", 10.0)
_SPLIT, _COLOCATED = "split", "colocated"


def split_table(document: Mapping[str, Any]) -> str:
    """A row for each run; then the gaps of one tier over those of two, and the goodput."""
    headings = (
        *("Target", "Long prompts/s", "ITL p50, ms", "p99", "max"),
        *("TTFT of long p50, ms", "p99", "Inside SLO"),
    )
    rows = [_row(point) for point in document["points"]]
    goal = goal_line(_STEADY, _ratios(document, _COLOCATED), " times")
    lines = "\n".join([goal, *_bounds(document), *_beside_others(document), _goodput(document)])
    return "\n\n".join([f"{about(document)} {_load(document)}", table(headings, rows), lines])


def _row(point: Mapping[str, Any]) -> list[str]:
    summary = point["summary"]
    return [
        point["target"],
        f"{point['rate']:g}",
        *(number(summary["itl_ms"][key]) for key in ("p50", "p99", "max")),
        *(number(summary["burst_ttft_ms"][key]) for key in ("p50", "p99")),
        f"{summary['attainment']:.0%}",
    ]


def _ratios(document: Mapping[str, Any], rival: str) -> dict[str, float]:
    """ITL p99 of the rival over that of split, for each rate; of the first run of each."""
    gaps: dict[tuple[str, float], float] = {}
    for point in document["points"]:
        gaps.setdefault((point["target"], point["rate"]), point["summary"]["itl_ms"]["p99"])
    return {
        f"{rival} at {rate:g}/s": gap / gaps[_SPLIT, rate]
        for (target, rate), gap in gaps.items()
        if target == rival and gaps.get((_SPLIT, rate))
    }


def _bounds(document: Mapping[str, Any]) -> list[str]:
    """What the ratios could be at most, where that is known: nobody's gap is shorter than a step,
    and one tier's longest step is one with a full chunk."""
    step_ms, token_us = document["engine"]["step_ms"], document["engine"]["token_us"]
    if not (step_ms and token_us):
        return []
    lines = []
    for target, chunk in document["chunk_tokens"].items():
        full_ms = step_ms + chunk * token_us / 1e3
        lines.append(f"{full_ms / step_ms:.1f} times {target}'s ({number(full_ms)} ms)")
    return [
        f"* At most it could be {', '.join(lines)}: by a step of {step_ms:g} ms, and one with a "
        "full chunk of a prompt."
    ]


def _beside_others(document: Mapping[str, Any]) -> list[str]:
    """The same ratios for rivals that no goal speaks of."""
    rivals = [t for t in document["goodput_long_prompts_per_s"] if t not in (_SPLIT, _COLOCATED)]
    ratios = {k: v for rival in rivals for k, v in _ratios(document, rival).items()}
    text = ", ".join(f"{name} {number(value)} times" for name, value in ratios.items())
    return [f"* The same, beside small chunks: {text}."] if text else []


def _goodput(document: Mapping[str, Any]) -> str:
    comparison = document["comparison"]
    slo = comparison["slo"]
    lowest = min(comparison["rates"])
    lines = [
        f"{target} {f'below {lowest:g}' if rate is None else f'{rate:g}'}"
        for target, rate in document["goodput_long_prompts_per_s"].items()
    ]
    return (
        f"* Goodput, long prompts a second ({comparison['wanted']:.0%} of all requests with "
        f"TTFT <= {slo['ttft_ms']:g} ms and TPOT <= {slo['tpot_ms']:g} ms): {', '.join(lines)}."
    )


def _load(document: Mapping[str, Any]) -> str:
    """What engine, what is steady, and what comes in bursts."""
    engine, comparison = document["engine"], document["comparison"]
    steady, long = comparison["steady"], comparison["long"]
    what = (
        f"Engines that compute nothing: a step takes {engine['step_ms']:g} ms and "
        f"{engine['token_us']:g} us for each new token"
        if engine["step_ms"] or engine["token_us"]
        else f"Model: {document['model']}"
    )
    lengths = (
        f"of the lengths of {long['trace']}"
        if long["trace"]
        else f"of about {long['num_input_tokens']} tokens"
    )
    return (
        f"{what}. Steady: {steady['rate']:g} requests a second, "
        f"{steady['num_input_tokens']} tokens in, {steady['num_output_tokens']} out; "
        f"in bursts: {long['burst_size']} prompts at once, {lengths}; "
        f"{comparison['seconds']:g} s a row; tuned: chunks of {document['tuned_tokens']} tokens."
    )
