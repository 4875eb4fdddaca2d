"""A cluster as `baton serve` keeps it, but with a registry: gateways with ports of their own, of
which the one that has the lease says how many workers there should be."""

from __future__ import annotations

import os
import signal
import sys
from asyncio import Event, Queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.config import ServeOptions
from baton.supervisor import PROGRAMS, ChildSpec, Cluster
from baton.supervisor.child import Child
from baton.supervisor.cluster import child_environment
from baton.supervisor.log_lines import forward_to_stderr
from tests.support import led_gateway

#: Name of the process to kill at a line of a log, empty for none; by the name of the process that
#: wrote it, and the line. The phases of a start are lines, too.
VictimAt = Callable[[str, str], str]


class LedCluster(Cluster):
    """Its planners want what `want` said last; see led_gateway.py."""

    def __init__(self, options: ServeOptions, registry: str, file: Path) -> None:
        """options: with a planner and --max-workers. registry: URL of Redis. file: to be made."""
        gateway = (sys.executable, "-P", led_gateway.__file__, str(file))
        super().__init__(
            options,
            programs=replace(PROGRAMS, gateway=gateway),
            on_line=self._on_any_line,
            on_phase=self._on_any_phase,
        )
        self._registry, self._file = registry, file
        self._victim_at: VictimAt = _nobody
        self.has_killed = Event()
        self.said: Queue[int] = Queue()
        """Numbers of workers that gateways published."""
        self.leader = ""
        """The gateway that published the last one."""

    def want(self, num_workers: int, num_prefill: int) -> None:
        """Have the leader want so many workers, and so many of them to prefill."""
        led_gateway.write_wanted(self._file, num_workers, num_prefill)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Of those that were started and have not ended for good."""
        return tuple(name for name in self.names if not name.startswith("gateway"))

    def kill(self, name: str) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)

    def kill_at(self, victim_at: VictimAt) -> None:
        """Kill the first process that this names, then set `has_killed`."""
        self.has_killed.clear()
        self._victim_at = victim_at

    async def until_said(self, number: int) -> None:
        """Return once a gateway has published this number of workers."""
        while await self.said.get() != number:
            pass

    def _on_any_line(self, name: str, line: str) -> None:
        forward_to_stderr(name, line)
        if victim := self._victim_at(name, line):
            self._victim_at = _nobody
            self.kill(victim)
            self.has_killed.set()

    def _on_any_phase(self, name: str, phase: str) -> None:
        # The first phase begins before there is a process.
        if phase != "importing":
            self._on_any_line(name, phase)

    def _new_child(self, spec: ChildSpec) -> Child:
        own = [f"--registry={self._registry}"]
        left_out = {"--workers-fd", "--reuse-port"}
        if not spec.model:
            options = self._options
            own += ["--port=0", "--http-port=0", "--planner=on"]
            own += [f"--min-workers={options.min_workers}", f"--max-workers={options.max_workers}"]
        left_out |= {flag.partition("=")[0] for flag in own}
        kept = (part for part in spec.arguments if part.partition("=")[0] not in left_out)

        def on_number(model: str, number: int) -> None:
            self.leader = spec.name
            self.said.put_nowait(number)
            self._want(model, number)

        return Child(
            replace(spec, arguments=(*own, *kept)),
            self._on_line,
            {**child_environment(os.environ), **spec.environment},
            self._on_phase,
            on_number=None if spec.model else on_number,
        )


def _nobody(_name: str, _line: str) -> str:
    return ""
