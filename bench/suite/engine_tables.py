"""The engine beside the machine's roof, and beside its peers. Pure: results in, Markdown out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.figures import AGAIN
from bench.suite.markdown import Goal, about, goal_line, number, table

#: Models larger than caches, where memory reads bound a step.
_LARGE = ("125m", "1.1b")

_STEP = Goal("Goal: a step of one sequence in bfloat16 at 0.85 of the read roof or more", 0.85)
_PROMPT = Goal(
    "Goal: a prompt of 512 tokens in bfloat16 at 0.75 of the roof of products or more", 0.75
)
_INT8 = Goal("Goal: a step of one sequence in int8 1.6 times as fast as in bfloat16", 1.6)
_PEER_STEP = Goal(
    "Goal: a step of one sequence in bfloat16 1.1 times as fast as the best peer's", 1.1
)
_PEER_BATCH = Goal("Goal: a step of eight sequences in bfloat16 1.3 times as fast", 1.3)
_PEER_PROMPT = Goal("Goal: a prompt in bfloat16 1.1 times as fast, one or eight at once", 1.1)

_LEVEL_STEP = Goal("Goal: a step of one sequence of the 125m shape at 0.80 of the read roof", 0.8)
_LEVEL_PROMPT = Goal("Goal: its prompt at 0.7 of the level's roof of products", 0.7)
_LEVEL_LLAMA_STEP = Goal("Goal: that step 1.0 times as fast as llama.cpp's or faster", 1.0)
_LEVEL_LLAMA_PROMPT = Goal("Goal: that prompt 1.3 times as fast as by llama.cpp or faster", 1.3)
_LEVEL_TORCH = "Goal: never slower than torch in float32 or bfloat16, whichever is faster there"

Figure = Mapping[str, Any]


def engine_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.engine with their floors, and the roofs."""
    pairs = list(zip(document["figures"], document["floors"], strict=True))
    rows = [_engine_row(figure, floor) for figure, floor in pairs]
    headings = (
        *("Model", "Weights", "B", "Context", "Step, ms", "Floor / step"),
        *("Prompt, ms", "Floor / prompt"),
    )
    steps = {
        f["model"]: floor["step_ms"] / f["step_ms"]
        for f, floor in pairs
        if f["dtype"] == "bfloat16" and f["batch"] == 1 and f["model"] in _LARGE
    }
    prompts = {
        f["model"]: floor["prompt_ms"] / f["prompt_ms"]
        for f, floor in pairs
        if f["dtype"] == "bfloat16" and f["context"] == 512 and f["batch"] == 1
    }
    goals = [
        goal_line(_STEP, steps),
        goal_line(_PROMPT, prompts),
        goal_line(_INT8, _int8_gains(document["figures"]), " times"),
    ]
    threads = f"{document['num_threads']} threads, each on a core."
    parts = [about(document), threads, _roofs(document)]
    return "\n\n".join([" ".join(parts), table(headings, rows), "\n".join(goals)])


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
    """bfloat16 time of a single-sequence step over int8 time, for large models."""
    alone = {(f["model"], f["dtype"]): f["step_ms"] for f in figures if f["batch"] == 1}
    return {
        model: alone[model, "bfloat16"] / alone[model, "int8"]
        for model in _LARGE
        if {(model, "bfloat16"), (model, "int8")} <= alone.keys()
    }


def _roofs(document: Mapping[str, Any]) -> str:
    """Roofs by model, measured between its rounds."""
    lines = [
        f"{r['read_bytes_per_s'] / 1e9:.1f} GB/s and {r['flops_per_s'] / 1e9:.0f} GFLOP/s "
        f"({r['model']} {r['dtype']})"
        for r in document["roofs"]
    ]
    return f"Roofs of reading and of products, measured between the rounds: {', '.join(lines)}."


def peers_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.peers: each contender beside Baton's engine, which is 1."""
    figures: list[Figure] = document["figures"]
    headings = (
        *("Model", "Weights", "B", "Context", "Contender", "Step, ms", "Baton's step / its"),
        *("Prompt, ms", "Baton's prompt / its", "Same tokens"),
    )
    engine = {_task(f): f for f in figures if f["contender"] == "baton"}
    peers = [f for f in figures if not f["contender"].startswith("baton")]
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
        (_PEER_STEP, (1,), "step_ms"),
        (_PEER_BATCH, (8,), "step_ms"),
        (_PEER_PROMPT, (1, 8), "prompt_ms"),
    )
    lines = [
        goal_line(goal, _speedups(peers, engine, batches, key), " times")
        for goal, batches, key in goals
    ]
    lines += [_noise(figures, engine)]
    lines += [*_losses(peers, engine), *reasons]
    threads = (
        f"{document['num_threads']} threads, each on a core; all contenders on the same cores."
    )
    return "\n\n".join([f"{about(document)} {threads}", table(headings, rows), "\n".join(lines)])


def _task(figure: Figure) -> tuple[Any, ...]:
    return tuple(figure[key] for key in ("model", "dtype", "batch", "context"))


def _speedups(
    peers: Sequence[Figure], engine: Mapping[Any, Figure], batches: Sequence[int], key: str
) -> dict[str, float]:
    """Speed-up of Baton's engine in bfloat16 over the fastest peer, the least of the batches, by
    model."""
    least: dict[str, float] = {}
    for f in peers:
        if f["dtype"] == "bfloat16" and f["batch"] in batches and _task(f) in engine:
            ratio = f[key] / engine[_task(f)][key]
            least[f["model"]] = min(ratio, least.get(f["model"], ratio))
    return least


def _noise(figures: Sequence[Figure], engine: Mapping[Any, Figure]) -> str:
    """The largest differences of the engine from itself."""
    again = [f for f in figures if f["contender"] == AGAIN]
    if not again:
        return "* Noise: not measured."
    step, prompt = (
        max(abs(f[key] / engine[_task(f)][key] - 1) for f in again)
        for key in ("step_ms", "prompt_ms")
    )
    return (
        f"* Noise: the same engine in another process differs by up to {step:.0%} in steps and "
        f"{prompt:.0%} in prompts."
    )


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
        figure["contender"] + (f", chunks of {chunk:,}" if (chunk := figure.get("chunk")) else ""),
        number(figure["step_ms"]),
        step,
        number(figure["prompt_ms"]),
        prompt,
        "-" if agreed is None else f"{agreed:.0%}",
    ]


def _losses(figures: Sequence[Figure], engine: Mapping[Any, Figure]) -> Iterator[str]:
    """Cases where a peer is faster than Baton's engine, or a line that there are none."""
    slower = [
        f"{f['model']} {f['dtype']}, {f['batch']} x {f['context']}, {what} by {f['contender']} "
        f"({engine[_task(f)][key] / f[key]:.2f} times as fast)"
        for f in figures
        if _task(f) in engine
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


def levels_tables(document: Mapping[str, Any]) -> str:
    """A table for each machine."""
    return "\n\n".join(levels_table(machine) for machine in document["machines"])


def levels_table(document: Mapping[str, Any]) -> str:
    """Figures of bench.levels: a column for each level."""
    by_level = {one["level"]: _Level(one) for one in document["levels"]}
    tasks = list(
        dict.fromkeys(
            _task(f)
            for one in document["levels"]
            for f in one["figures"]
            if f["contender"] == "baton" and f["dtype"] != "float32"
        )
    )
    rows = [["Roofs, GB/s and GFLOP/s", *(level.roofs() for level in by_level.values())]]
    for task in tasks:
        model, dtype, batch, context = task
        for key, what in (("step_ms", "step"), ("prompt_ms", "prompt")):
            name = f"{model} {dtype}, {batch} x {context}: {what}, ms"
            rows.append([name, *(level.cell(task, key) for level in by_level.values())])
    one = ("125m", "bfloat16", 1, 256)
    against = Goal(f"{_LEVEL_TORCH} (the smallest ratio of all tasks)", 1.0)
    figures: tuple[tuple[Goal, Callable[[_Level], float | None], str], ...] = (
        (_LEVEL_STEP, lambda x: x.of_floor(one, "step_ms"), ""),
        (_LEVEL_PROMPT, lambda x: x.of_floor(one, "prompt_ms"), ""),
        (_LEVEL_LLAMA_STEP, lambda x: x.gain("llama.cpp", one, "step_ms"), " times"),
        (_LEVEL_LLAMA_PROMPT, lambda x: x.gain("llama.cpp", one, "prompt_ms"), " times"),
        (against, lambda x: x.least_gain_over_torch(tasks), " times"),
    )
    goals = [goal_line(goal, _by_level(by_level, of), unit) for goal, of, unit in figures]
    missing = sorted(
        {
            f"* {m['contender']} on {m['model']} in {m['dtype']} at {one['level']} has no figures: "
            f"{m['reason']}."
            for one in document["levels"]
            for m in one["missing"]
        }
    )
    threads = (
        f"{document['num_threads']} threads, each on a core. In brackets: the share of the floor; "
        "how many times as long llama.cpp takes; and torch, in its faster type."
    )
    body = table(("", *by_level), rows)
    return "\n\n".join([f"{about(document)} {threads}", body, "\n".join([*goals, *missing])])


@dataclass(frozen=True, slots=True)
class _Level:
    """Measurements at one level: `bench.levels.measure_level`, and its name."""

    measured: Mapping[str, Any]

    def _ms(self, contender: str, task: tuple[Any, ...], key: str) -> float | None:
        figures = self.measured["figures"]
        found = (f[key] for f in figures if (f["contender"], _task(f)) == (contender, task))
        return next(found, None)

    def of_floor(self, task: tuple[Any, ...], key: str) -> float | None:
        """Time at the roof of a step or prompt, divided by its measured time."""
        for f, floor in zip(self.measured["figures"], self.measured["floors"], strict=True):
            if (f["contender"], _task(f)) == ("baton", task) and floor[key] is not None:
                return float(floor[key] / f[key])
        return None

    def gain(self, contender: str, task: tuple[Any, ...], key: str) -> float | None:
        """Time of a contender, divided by Baton's."""
        ours, theirs = self._ms("baton", task, key), self._ms(contender, task, key)
        return None if ours is None or theirs is None else theirs / ours

    def gain_over_torch(self, task: tuple[Any, ...], key: str) -> float | None:
        """The gain over the faster dtype of torch."""
        model, _, batch, context = task
        ours = self._ms("baton", task, key)
        types = ((model, dtype, batch, context) for dtype in ("float32", "bfloat16"))
        theirs = [ms for t in types if (ms := self._ms("transformers", t, key)) is not None]
        return None if ours is None or not theirs else min(theirs) / ours

    def least_gain_over_torch(self, tasks: Sequence[tuple[Any, ...]]) -> float | None:
        """The least over steps and prompts of all tasks."""
        gains = [
            gain
            for task in tasks
            for key in ("step_ms", "prompt_ms")
            if (gain := self.gain_over_torch(task, key)) is not None
        ]
        return min(gains, default=None)

    def roofs(self) -> str:
        """Roofs of bfloat16 on the largest model measured."""
        roof = [r for r in self.measured["roofs"] if r["dtype"] == "bfloat16"][-1]
        return f"{roof['read_bytes_per_s'] / 1e9:.1f}; {roof['flops_per_s'] / 1e9:.0f}"

    def cell(self, task: tuple[Any, ...], key: str) -> str:
        """Milliseconds, and the ratios to floor, llama.cpp and torch."""
        ms = self._ms("baton", task, key)
        if ms is None:
            return "-"
        beside = (
            self.of_floor(task, key),
            self.gain("llama.cpp", task, key),
            self.gain_over_torch(task, key),
        )
        return f"{number(ms)} ({'; '.join('-' if x is None else f'{x:.2f}' for x in beside)})"


def _by_level(
    levels: Mapping[str, _Level], figure: Callable[[_Level], float | None]
) -> dict[str, float]:
    found = {name: figure(level) for name, level in levels.items()}
    return {name: value for name, value in found.items() if value is not None}
