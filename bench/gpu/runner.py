"""Runs items in sequence in a child process; continues with the next one if an item fails, hangs or
crashes the child."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an item. failure: empty if it ran; else the end of its process's output, or why it
    was not run."""

    name: str
    result: dict[str, Any]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds: of one item, including the start of its process; of items with their
    own limit; of all items together."""

    item_s: float
    total_s: float
    of_items: Mapping[str, float] = field(default_factory=dict)

    def item_limit_s(self, name: str) -> float:
        return self.of_items.get(name, self.item_s)


def run_items(
    names: Sequence[str],
    command: Sequence[str],
    environment: dict[str, str],
    limits: Limits,
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run items and return their outcomes, in order. command: a child with the protocol of
    child.py. on_outcome: called with each outcome as it comes."""
    deadline = time.monotonic() + limits.total_s
    outcomes: list[Outcome] = []
    while len(outcomes) < len(names):
        rest = names[len(outcomes) :]
        if time.monotonic() >= deadline:
            late = [Outcome(name, {}, "not run: out of time") for name in rest]
            for outcome in late:
                on_outcome(outcome)
            return [*outcomes, *late]
        begun = len(outcomes)

        def report(outcome: Outcome) -> None:
            outcomes.append(outcome)
            on_outcome(outcome)

        _run_child(rest, command, environment, limits, deadline, report)
        if len(outcomes) == begun:
            raise RuntimeError("a child process has reported nothing, not even a failure")
    return outcomes


def rehearse(
    groups: Sequence[Sequence[str]],
    command: Sequence[str],
    environment: dict[str, str],
    limits: Limits,
) -> Outcome:
    """Run the groups of items in parallel, one process per group, to fill the kernel cache. Returns
    one outcome: how many items ran, and which failed."""
    started = time.monotonic()

    def run(names: Sequence[str]) -> list[Outcome]:
        return run_items(names, command, environment, limits, lambda _: None)

    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        outcomes = [outcome for found in threads.map(run, groups) for outcome in found]
    failed = [f"{o.name}: {o.failure}" for o in outcomes if o.failure]
    result: dict[str, Any] = {
        "seconds": time.monotonic() - started,
        "processes": len(groups),
        "num_items": len(outcomes) - len(failed),
    }
    return Outcome("rehearsal", result | ({"not_run": "; ".join(failed)} if failed else {}))


def _run_child(
    names: Sequence[str],
    command: Sequence[str],
    environment: dict[str, str],
    limits: Limits,
    deadline: float,
    report: Callable[[Outcome], None],
) -> None:
    """Run one child and report outcomes as they come: of all items, or up to the first that
    fails."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment},
        )
        try:
            _listen(child, names, limits, deadline, errors, report)
        finally:
            child.kill()
            child.communicate()


def _listen(
    child: subprocess.Popen[bytes],
    names: Sequence[str],
    limits: Limits,
    deadline: float,
    errors: IO[bytes],
    report: Callable[[Outcome], None],
) -> None:
    if child.stdin is None or child.stdout is None:
        raise ValueError("the child's pipes are not open")
    lines = _Lines(child.stdout)
    for name in names:
        try:
            child.stdin.write(f"{name}\n".encode())
            child.stdin.flush()
        except BrokenPipeError:
            report(Outcome(name, {}, _end_of(errors)))
            return
        until = min(time.monotonic() + limits.item_limit_s(name), deadline)
        result = _result(lines, until)
        if result is None:
            if time.monotonic() >= until:
                report(Outcome(name, {}, ": ".join(filter(None, ("out of time", _tail(errors))))))
            else:
                report(Outcome(name, {}, _end_of(errors, child)))
            return
        report(Outcome(name, result))


def _result(lines: _Lines, until: float) -> dict[str, Any] | None:
    """The next result; None if the child ends, or at time `until`."""
    while (line := lines.next(until)) is not None:
        message = json.loads(line)
        if "result" in message:
            return dict(message["result"])
    return None


def _end_of(errors: IO[bytes], child: subprocess.Popen[bytes] | None = None) -> str:
    """Last lines of the child's standard error, once it has ended."""
    if child is not None:
        child.wait()
    return _tail(errors) or "ended without a word"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip()
    return "\n".join(text.splitlines()[-4:])[-800:]


class _Lines:
    """Lines of a pipe, with a deadline."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._fd = pipe.fileno()
        self._pending = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def next(self, until: float) -> bytes | None:
        """The next JSON line; None at the end of the pipe, or at time `until`."""
        while True:
            line, found, rest = self._pending.partition(b"\n")
            if found:
                self._pending = rest
                if line.startswith(b"{"):
                    return line
                continue
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            chunk = os.read(self._fd, 65536)
            if not chunk:
                return None
            self._pending += chunk


def child_command(
    seed: int, *, is_dry: bool, is_rehearsal: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Command and additional environment variables of the child."""
    command = [sys.executable, "-m", "bench.gpu.child", "--seed", str(seed)]
    command += ["--rehearse"] * is_rehearsal
    if is_dry:
        return [*command, "--dry-run"], {"TRITON_INTERPRET": "1"}
    return command, {}
