"""The engine beside the machine's roof, and beside its peers. Pure: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.suite.markdown import Goal, about, goal_line, number, table

#: Models too large for any cache of such a machine: only there is reading memory what bounds a
#: step.
_LARGE = ("125m", "1.1b")

_STEP = Goal("Goal: a step of one sequence in bfloat16 at 0.85 of the read roof or more", 0.85)
_PROMPT = Goal(
    "Goal: a prompt of 512 tokens in bfloat16 at 0.75 of the roof of products or more", 0.75
)
_INT8 = Goal("Goal: a step of one sequence in int8 1.6 times as fast as in bfloat16", 1.6)
_BATCH = Goal(
    "Goal: a step of 8 sequences 2.2 times as fast as transformers' continuous batching", 2.2
)

_LLAMA_STEP = Goal("Goal: a step of one sequence in bfloat16 1.1 times as fast as llama.cpp's", 1.1)
_LLAMA_PROMPT = Goal("Goal: one prompt in bfloat16 twice as fast as by llama.cpp", 2.0)

Figure = Mapping[str, Any]


def engine_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.engine with their floors, and the roofs."""
    pairs = list(zip(document["figures"], document["floors"], strict=True))
    rows = [_engine_row(figure, floor) for figure, floor in pairs]
    headings = (
        *("Model", "Weights", "B", "Context", "Step, ms", "Floor / step"),
        *("Prompt, ms", "Floor / prompt"),
    )
    ours = [(f, floor) for f, floor in pairs if f["contender"] == "baton"]
    steps = {
        f["model"]: floor["step_ms"] / f["step_ms"]
        for f, floor in ours
        if f["dtype"] == "bfloat16" and f["batch"] == 1 and f["model"] in _LARGE
    }
    prompts = {
        f["model"]: floor["prompt_ms"] / f["prompt_ms"]
        for f, floor in ours
        if f["dtype"] == "bfloat16" and f["context"] == 512 and f["batch"] == 1
    }
    goals = [
        goal_line(_STEP, steps),
        goal_line(_PROMPT, prompts),
        goal_line(_INT8, _int8_gains([f for f, _ in ours]), " times"),
    ]
    threads = f"{document['num_threads']} threads, each on a core."
    parts = [about(document), threads, _roofs(document)]
    return "\n\n".join([" ".join(parts), table(headings, rows), "\n".join(goals)])


def profile_table(document: Mapping[str, Any]) -> str:
    """Milliseconds of a decode step's parts, by bench.step_profile."""
    floors, parts = document["floors_ms"], document["parts_ms"]
    rows = [_profile_row(part, floors[part], ms) for part, ms in parts.items()]
    rows.append(_profile_row("All parts", sum(floors.values()), sum(parts.values())))
    what = (
        f"{document['model']}, {document['dtype']}, one sequence, "
        f"context {document['context']} in the mean, {document['num_threads']} threads, "
        f"roof {document['roof']['read_bytes_per_s'] / 1e9:.1f} GB/s. "
        f"A step that nobody looks into took {number(document['step_ms'])} ms."
    )
    headings = ("Part", "Floor, ms", "Time, ms", "Above its floor, ms")
    return "\n\n".join([f"{about(document)} {what}", table(headings, rows)])


def _profile_row(part: str, floor_ms: float, ms: float) -> list[str]:
    floor = number(floor_ms) if floor_ms else "-"
    return [part, floor, number(ms), number(ms - floor_ms)]


def _engine_row(figure: Figure, floor: Mapping[str, Any]) -> list[str]:
    prompt_floor = floor["prompt_ms"]
    return [
        figure["model"],
        figure["dtype"],
        str(figure["batch"]),
        str(figure["context"]),
        number(figure["step_ms"]),
        f"{floor['step_ms'] / figure['step_ms']:.2f}",
        number(figure["prompt_ms"]),
        "-" if prompt_floor is None else f"{prompt_floor / figure['prompt_ms']:.2f}",
    ]


def _int8_gains(figures: Sequence[Figure]) -> dict[str, float]:
    """Time of a step of one sequence in bfloat16 over that in int8, of the large models."""
    alone = {(f["model"], f["dtype"]): f["step_ms"] for f in figures if f["batch"] == 1}
    return {
        model: alone[model, "bfloat16"] / alone[model, "int8"]
        for model in _LARGE
        if {(model, "bfloat16"), (model, "int8")} <= alone.keys()
    }


def _roofs(document: Mapping[str, Any]) -> str:
    """Each model has its own, measured between its rounds."""
    told = [
        f"{r['read_bytes_per_s'] / 1e9:.1f} GB/s and {r['flops_per_s'] / 1e9:.0f} GFLOP/s "
        f"({r['model']} {r['dtype']})"
        for r in document["roofs"]
    ]
    return f"Roofs of reading and of products, measured between the rounds: {', '.join(told)}."


def peers_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.peers: each contender beside Baton's engine, which is 1."""
    figures: list[Figure] = document["figures"]
    headings = (
        *("Model", "Weights", "B", "Context", "Contender", "Step, ms", "Baton's step / its"),
        *("Prompt, ms", "Baton's prompt / its", "Same tokens"),
    )
    engine = {_task(f): f for f in figures if f["contender"] == "baton"}
    rows = [_peer_row(f, engine.get(_task(f))) for f in figures]
    rows += [
        [m["model"], m["dtype"], "", "", m["contender"], "none", "", "", "", ""]
        for m in document["missing"]
    ]
    reasons = [
        f"* {m['contender']} on {m['model']} in {m['dtype']} has no figures: {m['reason']}."
        for m in document["missing"]
    ]
    goals = (
        (_BATCH, "continuous-batching", 8, "step_ms"),
        (_LLAMA_STEP, "llama.cpp", 1, "step_ms"),
        (_LLAMA_PROMPT, "llama.cpp", 1, "prompt_ms"),
    )
    told = [
        goal_line(goal, _speedups(figures, engine, contender, batch, key), " times")
        for goal, contender, batch, key in goals
    ]
    told += [*_losses(figures, engine), *reasons]
    threads = (
        f"{document['num_threads']} threads, each on a core; all contenders on the same cores."
    )
    return "\n\n".join([f"{about(document)} {threads}", table(headings, rows), "\n".join(told)])


def _task(figure: Figure) -> tuple[Any, ...]:
    return tuple(figure[key] for key in ("model", "dtype", "batch", "context"))


def _speedups(
    figures: Sequence[Figure], engine: Mapping[Any, Figure], contender: str, batch: int, key: str
) -> dict[str, float]:
    """How many times as fast Baton's engine is in bfloat16, by model."""
    return {
        f["model"]: f[key] / engine[_task(f)][key]
        for f in figures
        if (f["contender"], f["batch"], f["dtype"]) == (contender, batch, "bfloat16")
        and _task(f) in engine
    }


def _peer_row(figure: Figure, engine: Figure | None) -> list[str]:
    agreed = figure["agreement"]
    step, prompt = (
        ("-", "-")
        if engine is None
        else (
            f"{engine['step_ms'] / figure['step_ms']:.2f}",
            f"{engine['prompt_ms'] / figure['prompt_ms']:.2f}",
        )
    )
    return [
        figure["model"],
        figure["dtype"],
        str(figure["batch"]),
        str(figure["context"]),
        figure["contender"],
        number(figure["step_ms"]),
        step,
        number(figure["prompt_ms"]),
        prompt,
        "-" if agreed is None else f"{agreed:.0%}",
    ]


def _losses(figures: Sequence[Figure], engine: Mapping[Any, Figure]) -> Iterator[str]:
    """Where a peer is faster than Baton's engine, or that none is."""
    slower = [
        f"{f['model']} {f['dtype']}, {f['batch']} x {f['context']}, {what} by {f['contender']} "
        f"({engine[_task(f)][key] / f[key]:.2f} times as fast)"
        for f in figures
        if _task(f) in engine and not f["contender"].startswith("baton")
        for what, key in (("a step", "step_ms"), ("a prompt", "prompt_ms"))
        if f[key] < engine[_task(f)][key]
    ]
    if slower:
        yield f"* **Where Baton's engine loses**: {'; '.join(slower)}."
    else:
        yield "* No peer is faster than Baton's engine in any row."
    unequal = [
        f"{f['contender']} on {f['model']} {f['agreement']:.0%}"
        for f in figures
        if f["dtype"] == "float32" and f["agreement"] is not None and f["agreement"] < 1
    ]
    yield (
        "* In float32 all should write the same tokens as transformers; **not so**: "
        f"{', '.join(unequal)}."
        if unequal
        else "* In float32 all write the same tokens as transformers."
    )
