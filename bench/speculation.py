"""Gain of speculation: tokens per second of a decode worker with and without it, in turns.

    python -m bench.speculation [--model MODEL] [--draft DIR] [--seconds 45] [--batch 48]
        [--eagle DIR] [--medusa DIR] [--tree WIDTHS] [--always N]
        [--clock wall|cpu] [--json FILE]

One decode core per method (none, none again as a control, ngram, draft; eagle and medusa if heads
are given, also with a tree if --tree is given, and with N drafts in every step, regardless of gain)
in this process, each with its own engine; the control's ratio is the error of the measurement. The
cores take turns at every step, so that other load affects all alike; with --clock cpu and one
thread, CPU seconds are measured, which hardly depend on other load.
As soon as a sequence ends the next one is opened, the same for each method: the batch is always
full. Shown are tokens over the seconds of a core's own steps, prompts and drafting included; the
ratio to none, median and quartiles over ten stretches of the run; how many drafts were right; and
the share of sequences that have the same tokens as without speculation (numerics: all of them in
float32, in bfloat16 where the engine's result does not depend on how many rows a step has).

Workloads, each with one sequence at a time and with --batch of them:
    copy     Prompts are functions of this Python's standard library; answers are greedy. A
             model as small as the bundled one soon repeats what stands before: text that
             copies, for which ngram is made.
    sampled  The same prompts at temperature 1: little repeats. What speculation costs where it
             cannot gain.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from baton.config import DecodeOptions
from baton.events import Tokens
from baton.types import KvSource, Sampling, SequenceSpec
from bench.host_rig import decode_core
from bench.machine import document_of, now, publish
from engine.checkpoint import resolve_checkpoint
from worker_core.admission import CoreLimits
from worker_core.build import build_decode_engine, build_matchers, build_pool
from worker_core.commands import Command, Open
from worker_core.speculation.interface import Estimate
from worker_core.speculation.speculator import Speculator, build_speculation

#: Modules with the functions used as prompts.
MODULES = ("calendar", "fnmatch", "heapq", "shutil", "statistics", "textwrap")

#: Accepted lengths of functions, in characters.
PROMPT_CHARS = range(200, 900)

METHODS = ("none", "control", "ngram")

NUM_STRETCHES = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """Keeps num_at_once sequences running."""

    name: str
    temperature: float
    num_at_once: int
    max_tokens: int


@dataclass(slots=True)
class Tally:
    """Results of one core. stretches: (tokens, seconds) of each."""

    stretches: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])
    num_drafted: int = 0
    num_accepted: int = 0
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, num_tokens: int, seconds: float) -> None:
        tokens_before, seconds_before = self.stretches[-1]
        self.stretches[-1] = (tokens_before + num_tokens, seconds_before + seconds)


@dataclass(frozen=True, slots=True)
class Figures:
    """One method and workload. ratio: relative to no speculation, median over the stretches; low
    and high: quartiles."""

    tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    drafted_per_token: float
    acceptance: float
    share_equal: float


def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Functions of the library that runs this script."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [text for name in MODULES for text in _functions((root / f"{name}.py").read_text())]
    return [tuple(tokenizer.encode(text).ids) for text in texts]


def _functions(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        text = ast.get_source_segment(source, node) or ""
        if isinstance(node, ast.FunctionDef) and len(text) in PROMPT_CHARS:
            yield f"{text}\n\n"


def spec_of(index: int, workload: Workload, texts: Sequence[tuple[int, ...]]) -> SequenceSpec:
    sampling = Sampling(
        temperature=workload.temperature, seed=index, max_tokens=workload.max_tokens
    )
    return SequenceSpec(f"r{index}", texts[index % len(texts)], sampling, arrival_ns=index)


class AlwaysDrafting(Speculator):
    """Always drafts `max_num_drafts` tokens, regardless of their cost."""

    def _lengths(self, _tracks: object, estimates: Sequence[Estimate], *_: object) -> list[int]:
        return [min(self.max_num_drafts, estimate.num_drafts) for estimate in estimates]


class MethodRun:
    """One method's engine and decode core, by the real clock, at work on the sequences 0, 1, 2, ...
    of a workload."""

    def __init__(
        self, options: DecodeOptions, clock: Callable[[], float], num_always: int = 0
    ) -> None:
        """clock: by which steps are timed, in seconds. num_always: drafts in each step, unless it
        is 0."""
        self._clock = clock
        self._commands: list[Command] = []
        self._running: dict[int, list[int]] = {}
        self._num_opened = 0
        engine = build_decode_engine(options)
        speculation = build_speculation(options, engine, clock)
        if num_always:
            assert isinstance(speculation, Speculator)
            speculation = AlwaysDrafting(speculation._proposer, num_always, clock)
        self._core, _ = decode_core(
            engine,
            build_pool(options, engine, bytes(32)),
            CoreLimits(options.max_num_seqs, options.max_num_batched_tokens),
            self._commands,
            build_matchers(options, engine),
            speculation,
        )

    def begin(self, workload: Workload, texts: Sequence[tuple[int, ...]]) -> None:
        self._workload, self._texts = workload, texts
        self._first = self._num_opened
        self.tally = Tally()

    def step(self, *, is_counted: bool) -> None:
        """One step, with the batch filled up before; counted or not."""
        while len(self._running) < self._workload.num_at_once:
            handle = self._num_opened
            spec = spec_of(handle - self._first, self._workload, self._texts)
            self._commands.append(Open(0, handle, spec, KvSource.LOCAL))
            self._running[handle] = []
            self._num_opened += 1
        self._step(is_counted=is_counted)

    def drain(self) -> None:
        """Let the sequences that run end."""
        while self._running:
            self._step(is_counted=False)

    def _step(self, *, is_counted: bool) -> None:
        commands, self._commands[:] = list(self._commands), []
        begin_s = self._clock()
        events = self._core.step(commands).events
        seconds = self._clock() - begin_s
        emitted = [(e.handle, e.event) for e in events if isinstance(e.event, Tokens)]
        for handle, tokens in emitted:
            self._running[handle] += [sample.token_id for sample in tokens.samples]
            if tokens.finish:
                output = tuple(self._running.pop(handle))
                self.tally.outputs[handle - self._first] = output
        if is_counted:
            self.tally.add(sum(len(tokens.samples) for _, tokens in emitted), seconds)
            self.tally.num_drafted += sum(tokens.num_draft_tokens for _, tokens in emitted)
            self.tally.num_accepted += sum(tokens.num_accepted_tokens for _, tokens in emitted)


def measure(
    method_runs: dict[str, MethodRun],
    workload: Workload,
    texts: Sequence[tuple[int, ...]],
    seconds: float,
) -> dict[str, Tally]:
    for method_run in method_runs.values():
        method_run.begin(workload, texts)
    _turns(method_runs, seconds / NUM_STRETCHES, is_counted=False)
    for _ in range(NUM_STRETCHES):
        for method_run in method_runs.values():
            method_run.tally.stretches.append((0, 0.0))
        _turns(method_runs, seconds / NUM_STRETCHES, is_counted=True)
    for method_run in method_runs.values():
        method_run.drain()
    return {method: method_run.tally for method, method_run in method_runs.items()}


def _turns(method_runs: dict[str, MethodRun], seconds: float, *, is_counted: bool) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for method_run in method_runs.values():
            method_run.step(is_counted=is_counted)


def figures(tally: Tally, plain: Tally) -> Figures:
    rates = [tokens / spent for tokens, spent in tally.stretches[1:]]
    plain_rates = [tokens / spent for tokens, spent in plain.stretches[1:]]
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(rates, plain_rates, strict=True)], n=4
    )
    num_tokens = sum(tokens for tokens, _ in tally.stretches)
    total_s = sum(spent for _, spent in tally.stretches)
    common = tally.outputs.keys() & plain.outputs.keys()
    return Figures(
        tokens_per_s=num_tokens / total_s,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        drafted_per_token=tally.num_drafted / num_tokens,
        acceptance=tally.num_accepted / tally.num_drafted if tally.num_drafted else 0.0,
        share_equal=sum(tally.outputs[i] == plain.outputs[i] for i in common) / len(common),
    )


def start_method(method: str, arguments: argparse.Namespace) -> MethodRun:
    heads = {"draft": arguments.draft, "eagle": arguments.eagle, "medusa": arguments.medusa}
    method, _, how = method.partition(" ")
    values = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "num_threads": arguments.num_threads,
        "max_num_seqs": arguments.batch,
        "max_model_len": 1024,
        "speculative_method": "none" if method == "control" else method,
        "speculative_model": heads.get(method),
        "speculative_tree": arguments.tree if how == "tree" else None,
    }
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    num_always = arguments.always if how == "always" else 0
    return MethodRun(DecodeOptions.model_validate(values), clock, num_always)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="models/baton-py-6m")
    parser.add_argument("--draft", default="models/baton-py-6m-draft", help="empty for none")
    parser.add_argument("--eagle", help="an EAGLE head of the model; without one, none is measured")
    parser.add_argument("--medusa", help="Medusa heads of the model; without, none are measured")
    parser.add_argument("--tree", help="--speculative-tree of these heads, measured beside chains")
    parser.add_argument("--always", type=int, help="drafts of these heads in every step, besides")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each workload")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--num-threads", type=int, help="all cores if not given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = now()
    texts = prompts(
        Tokenizer.from_file(str(resolve_checkpoint(arguments.model) / "tokenizer.json"))
    )
    heads = [method for method in ("eagle", "medusa") if vars(arguments)[method]]
    trees = [f"{method} tree" for method in heads if arguments.tree]
    always = [f"{method} always" for method in heads if arguments.always]
    drafts = ["draft"] if arguments.draft else []
    methods = (*METHODS, *drafts, *heads, *trees, *always)
    method_runs = {method: start_method(method, arguments) for method in methods}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for num_at_once, max_tokens in ((1, 256), (arguments.batch, 128)):
        for name, temperature in (("copy", 0.0), ("sampled", 1.0)):
            workload = Workload(
                f"{name}, batch {num_at_once}", temperature, num_at_once, max_tokens
            )
            tallies = measure(method_runs, workload, texts, arguments.seconds)
            results[workload.name] = {
                method: asdict(figures(tally, tallies["none"])) for method, tally in tallies.items()
            }
            _show(workload.name, results[workload.name])
    data = {
        "dtype": arguments.dtype,
        "num_threads": arguments.num_threads,
        "clock": arguments.clock,
        "results": results,
    }
    publish(document_of("bench.speculation", started, data), arguments.json)
    return 0


def _show(name: str, by_method: dict[str, dict[str, float]]) -> None:
    for method, found in by_method.items():
        print(
            f"{name:18} {method:13} {found['tokens_per_s']:7.0f} tok/s  x{found['ratio']:.2f} "
            f"({found['ratio_low']:.2f}-{found['ratio_high']:.2f})  "
            f"{found['drafted_per_token']:.2f} drafts a token, {found['acceptance']:.0%} right  "
            f"{found['share_equal']:.0%} of outputs equal",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
