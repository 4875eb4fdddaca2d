"""Servers beside each other by HTTP. Pure: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.suite.markdown import Goal, about, goal_line, number, table

#: The server that takes two turns, and its name in the second.
TWICE, AGAIN = "baton, split", "baton again"

_GOODPUT = Goal("Goal: goodput 1.2 times the best peer's", 1.2)


def served_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.peers.open_loop: conditions, one line for each run, goals, and noise."""
    headings = (
        *("requests/s", "Contender", "Goodput, 1/s", "Inside both", "Failed"),
        *("TTFT, ms (p50, p90)", "TPOT, ms (p50, p90)"),
    )
    rows = [_row(run) for run in document["runs"]]
    lines = [goal_line(_GOODPUT, _gains(document), " times"), _noise(document)]
    lines += [f"* {name} has no figures: {why}." for name, why in document["missing"].items()]
    slo, load, bounds = document["slo"], document["load"], document["bounds"]
    conditions = (
        f"{about(document)} The {document['model']} model in bfloat16, {bounds['num_threads']} "
        f"threads, KV memory of {bounds['kv_bytes'] >> 20:,} MiB and {bounds['max_num_seqs']} "
        f"sequences for each server. {load['num_requests']} requests a run, after "
        f"{load['num_before']} that do not count. Targets: first token {slo['ttft_ms']:,.0f} ms, "
        f"each later one {slo['tpot_ms']:,.0f} ms."
    )
    return "\n\n".join((conditions, table(headings, rows), "\n".join(lines)))


def _row(run: Mapping[str, Any]) -> list[str]:
    summary = run["summary"]
    times = (
        f"{number(summary[key]['p50'])}, {number(summary[key]['p90'])}"
        if summary[key]["count"]
        else "-"
        for key in ("ttft_ms", "tpot_ms")
    )
    return [
        f"{run['rate']:g}",
        run["contender"],
        number(run["goodput_per_s"]),
        f"{summary['slo_attainment']:.0%}",
        str(summary["num_requests"] - summary["num_complete"]),
        *times,
    ]


def _gains(document: Mapping[str, Any]) -> dict[str, float]:
    """Goodput of Baton's better shape over the best peer's, by rate; rates at which no peer has
    any are left out."""
    gains = {}
    for rate, by_name in _by_rate(document).items():
        ours = [v for name, v in by_name.items() if _is_ours(name) and name != AGAIN]
        theirs = max((v for name, v in by_name.items() if not _is_ours(name)), default=0.0)
        if ours and theirs:
            gains[f"{rate:g} requests/s"] = max(ours) / theirs
    return gains


def _noise(document: Mapping[str, Any]) -> str:
    """The largest difference of a server from itself."""
    largest = max(
        (abs(by_name[AGAIN] - by_name[TWICE]) for by_name in _by_rate(document).values()),
        default=0.0,
    )
    return f"* Noise: two turns of one server differ by up to {number(largest)} answers/s."


def _by_rate(document: Mapping[str, Any]) -> dict[float, dict[str, float]]:
    goodputs: dict[float, dict[str, float]] = {}
    for run in document["runs"]:
        goodputs.setdefault(run["rate"], {})[run["contender"]] = run["goodput_per_s"]
    return goodputs


def _is_ours(name: str) -> bool:
    return name.startswith("baton")
