"""What the host costs. Pure: results of bench.host in, Markdown out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.suite.markdown import Goal, about, goal_line, number, table

_FLAT = Goal(
    "Goal: a sequence costs the same among many as among few (the dearest at most 1.25 times the "
    "cheapest), a step",
    1.25,
    is_at_most=True,
)
_AHEAD = Goal(
    "Goal: a step takes the engine's own time, to 3 %, by sequences", 1.03, is_at_most=True
)
_TOKENS = Goal("Goal: 200,000 tokens a second through one core", 200_000)
_TTFT = Goal("Goal: at most 1.5 ms added to the first token, p50", 1.5, is_at_most=True)
_SHARE = Goal("Goal: 0.97 of the engine's own tokens reach the clients", 0.97)


def scheduler_table(document: Mapping[str, Any]) -> str:
    """Microseconds of the decode tier, by the number of sequences."""
    keys = ("step_us", "plan_us", "open_us", "abort_us", "take_us", "find_us", "expire_us")
    headings = (
        *("Sequences", "Step", "Scheduler's part", "Open", "Abort"),
        *("Block taken and given back", "Block of a prefix found", "Ticket looked at"),
    )
    tier = document["tier"]
    rows = [[str(one["num_seqs"]), *(number(one[key]) for key in keys)] for one in tier]
    steps = [one["step_us"] for one in tier]
    plans = [one["plan_us"] for one in tier]
    spread = {"step": max(steps) / min(steps), "scheduler's part": max(plans) / min(plans)}
    return "\n\n".join([about(document), table(headings, rows), goal_line(_FLAT, spread)])


def ahead_table(document: Mapping[str, Any]) -> str:
    """Milliseconds from step to step, by the number of sequences."""
    headings = ("Sequences", "Engine", "Each waits for the one before", "Launched ahead", "Hidden")
    rows = [
        [
            str(one["num_seqs"]),
            *(number(one[key]) for key in ("engine_ms", "waiting_ms", "ahead_ms")),
            f"{one['hidden_share']:.0%}",
        ]
        for one in document["steps"]
    ]
    ratios = {f"{one['num_seqs']}": one["ahead_ms"] / one["engine_ms"] for one in document["steps"]}
    return "\n\n".join([about(document), table(headings, rows), goal_line(_AHEAD, ratios)])


def gateway_table(document: Mapping[str, Any]) -> str:
    """The gateway's process and what it adds to the first token, by each way in; and the whole
    service."""
    service = document["service"]
    parts = [about(document)]
    for end, door in (("", ""), ("_http", "By HTTP:\n\n")):
        if flows := document.get(f"gateway{end}"):
            added_ms = document[f"added_ttft_ms{end}"]["added_ms"]
            parts += [f"{door}{_flows_table(flows)}", _flow_goals(flows, added_ms)]
    shares = {f"{service['num_streams']} streams": service["share"]}
    return "\n\n".join(parts) + f"\n{goal_line(_SHARE, shares)}"


def _flows_table(flows: Sequence[Mapping[str, Any]]) -> str:
    headings = (
        *("Source", "Offers tokens/s", "Tokens in a chunk", "CPU us a chunk", "of a bare server"),
        "Tokens a second of one core",
    )
    keys = ("chunk_tokens", "chunk_cpu_us", "bare_cpu_us", "tokens_per_core_s")
    rows = [
        [_source(one["flow"]), number(_offered_per_s(one["flow"])), *(number(one[k]) for k in keys)]
        for one in flows
    ]
    return table(headings, rows)


def _flow_goals(flows: Sequence[Mapping[str, Any]], added_ms: float) -> str:
    # A gateway that is offered less takes more, and smaller, chunks than it could do with.
    at_most = {
        _source(one["flow"]): one["tokens_per_core_s"]
        for one in flows
        if _offered_per_s(one["flow"]) > _TOKENS.bound
    }
    return f"{goal_line(_TOKENS, at_most)}\n{goal_line(_TTFT, {'added': added_ms}, ' ms')}"


def _source(flow: Mapping[str, Any]) -> str:
    tokens = "token" if flow["step_tokens"] == 1 else "tokens"
    return f"{flow['step_tokens']} {tokens} each {flow['step_ms']:g} ms"


def _offered_per_s(flow: Mapping[str, Any]) -> float:
    return float(flow["num_streams"] * flow["step_tokens"] / flow["step_ms"] * 1e3)
