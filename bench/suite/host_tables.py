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
#: Maximum mean tokens per chunk of a flow with one-token chunks.
_MOST_OF_ONE = 1.05

_TOKENS = Goal("Goal: 200,000 tokens a second through one core", 200_000)
_TTFT = Goal(
    "Goal: by HTTP at most 1.0 ms added to the first token of a bare server, p50",
    1.0,
    is_at_most=True,
)
#: By the ends of a document's keys.
_CHUNKS = {
    "": Goal("Goal: at most 90 us of CPU for a chunk of one token", 90, is_at_most=True),
    "_http": Goal("Goal: at most 50 us of CPU for a chunk of one token", 50, is_at_most=True),
}
#: Between steps that a gateway keeps up with, so that each chunk has one step's tokens.
_STEADY_MS = 10.0
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
    """The gateway's process and what it adds to the first token, by each way in; what connections
    that want nothing cost it; and the whole service."""
    service = document["service"]
    parts = [about(document)]
    for end, door in (("", "By gRPC"), ("_http", "By HTTP")):
        if flows := document.get(f"gateway{end}"):
            ttft = document[f"added_ttft_ms{end}"]
            lines = [_CHUNKS[end], _TOKENS]
            goals = [goal_line(goal, _flow_values(goal, flows)) for goal in lines]
            if single := _single(flows):
                goals.insert(1, _times_bare_line(single))
            if end:
                goals.append(goal_line(_TTFT, {"added": ttft["beside_bare_ms"]}, " ms"))
            goals.append(_first_token_line(ttft))
            parts += [f"{door}:\n\n{_flows_table(flows)}", "\n".join(goals)]
    shares = {f"{service['num_streams']} streams": service["share"]}
    if "idle" in document:
        parts.append(f"{_idle_line(document['idle'])}\n{_slow_line(document['slow_readers'])}")
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


def _flow_values(goal: Goal, flows: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """What a goal is about, by source."""
    if goal is _TOKENS:
        # A gateway that is offered less takes more, and smaller, chunks than it could do with.
        busy = [one for one in flows if _offered_per_s(one["flow"]) > goal.bound]
        return {_source(one["flow"]): one["tokens_per_core_s"] for one in busy}
    return {_source(one["flow"]): one["chunk_cpu_us"] for one in _single(flows)}


def _single(flows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Flows with one-token chunks."""
    return [one for one in flows if one["chunk_tokens"] < _MOST_OF_ONE]


def _times_bare_line(single: Sequence[Mapping[str, Any]]) -> str:
    """The goal's figures again, since not every machine is as fast."""
    times = (
        f"{_source(one['flow'])} {number(one['chunk_cpu_us'] / one['bare_cpu_us'])}"
        for one in single
    )
    return f"* As times of the bare server's: {', '.join(times)}."


def _first_token_line(ttft: Mapping[str, float]) -> str:
    return (
        f"* To the first token: {number(ttft['gateway_ms'])} ms through the gateway, "
        f"{number(ttft['source_ms'])} at the source itself, {number(ttft['bare_ms'])} at a bare "
        f"server; {number(ttft['cpu_ms'])} ms of the gateway's CPU for the whole request."
    )


def _idle_line(idle: Mapping[str, float]) -> str:
    return (
        f"* {idle['num_connections']:,} idle HTTP connections: "
        f"{number(idle['bytes_each'] / 1024)} KiB of memory each, and {idle['cpu']:.2%} of a core "
        f"for all, {idle['cpu_before']:.2%} without them."
    )


def _slow_line(slow: Mapping[str, float]) -> str:
    return (
        f"* {slow['num_streams']} clients that do not read, beside as many that do: "
        f"{number(slow['cpu_us'])} us of CPU a token, {number(slow['brisk_cpu_us'])} without them; "
        f"{number(slow['held_bytes'])} bytes of memory for each token that is held."
    )


def _source(flow: Mapping[str, Any]) -> str:
    tokens = "token" if flow["step_tokens"] == 1 else "tokens"
    return f"{flow['step_tokens']} {tokens} each {flow['step_ms']:g} ms"


def _offered_per_s(flow: Mapping[str, Any]) -> float:
    return float(flow["num_streams"] * flow["step_tokens"] / flow["step_ms"] * 1e3)
