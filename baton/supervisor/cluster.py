"""All tiers on this machine, as processes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Self

from baton.config import ServeOptions
from baton.config.load import CPU_LEVEL_VARIABLE, ENV_PREFIX
from baton.grpc_environment import GRPC_ENVIRONMENT
from baton.numa import usable_nodes
from baton.rpc.bind import check_bindable
from baton.service import ReadyReport
from baton.supervisor.child import Child, ChildFailed, describe_exit
from baton.supervisor.feed import Feed
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.numa_places import kept_to_nodes
from baton.supervisor.plan import (
    PROGRAMS,
    ChildSpec,
    Programs,
    describe_gpus,
    num_visible_gpus,
    plan_gateways,
    plan_workers,
)
from baton.supervisor.scaling import Scaling
from baton.supervisor.serving import wait_until_serving

logger = logging.getLogger(__name__)

#: Seconds beyond its drain timeout after which a process is killed.
_KILL_MARGIN_S = 5.0

#: Restart delays in seconds: the first and the longest; each is twice the previous one.
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0

#: Seconds after which a worker that starts later is killed and started anew.
_START_S = 1800.0

#: Seconds of service after which the restart delay is reset: the process did not fail at its start.
_STABLE_S = 10.0


class Cluster:
    """Prefill workers, decode workers and gateways as children of this process.

    `async with Cluster(options) as cluster` starts them, waits until the gateway serves, and stops
    them on exit: first the gateways, then the workers. A child that ends early is restarted on its
    port. If this process is killed, the children read the end of a pipe and stop.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        programs: Programs = PROGRAMS,
        on_line: Callable[[str, str], None] = forward_to_stderr,
        on_phase: Callable[[str, str], None] = lambda _name, _phase: None,
        wait_serving: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """on_line: receives a child's name and each line of its log.
        on_phase: receives a child's name and each phase of its start; the last is "ready".
        wait_serving: returns once a gateway at the address takes requests, or raises StartupError;
        by default, polls its health."""
        self._options = options
        self._programs = programs
        self._on_line = on_line
        self._on_phase = on_phase
        #: The workers' addresses, for the gateways.
        self._feed = Feed()
        self._listed: dict[str, str] = {}
        """Lines of the feed by worker."""
        self._refused: tuple[str, ...] = ()
        self._wait_serving = wait_serving or functools.partial(wait_until_serving, tls=options.tls)
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._scalings: dict[str, Scaling] = {}
        """By model."""
        self._specs: dict[str, ChildSpec] = {}
        """Of all workers that there may be."""
        self._stopping = asyncio.Event()
        self._lifeline = (-1, -1)
        self._phases: dict[str, float] = {}

    @property
    def address(self) -> str:
        """host:port of the gateways."""
        return self.address_of("gateway")

    @property
    def http_address(self) -> str:
        """host:port of the gateways' HTTP; empty without HTTP."""
        return self.report_of("gateway").http_address

    @property
    def phases(self) -> Mapping[str, float]:
        """Duration of each part of the start in seconds: per child from spawn to ready, its own
        phases, and the total."""
        return self._phases

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the children: prefill-N, decode-N, gateway, and gateway-N for further ones."""
        return tuple(self._children)

    @property
    def refused_models(self) -> tuple[str, ...]:
        """Names of the models that could not be started, of several."""
        return self._refused

    def report_of(self, name: str) -> ReadyReport:
        """The report of a ready child. Raises RuntimeError before it is ready."""
        report = self._children[name].report
        if report is None:
            raise RuntimeError(f"{name} is not ready")
        return report

    def address_of(self, name: str) -> str:
        """host:port of a ready child. Raises RuntimeError before it is ready."""
        return self.report_of(name).address

    def pid_of(self, name: str) -> int:
        """Process id of a child; it changes with each restart."""
        return self._children[name].pid

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all children. Raises StartupError; call `stop` in that case, too."""
        begin = time.monotonic()
        # Sockets that share a port do not detect that it is taken.
        check_ports(self._options)
        self._lifeline = os.pipe()
        # Known only to these workers, so that no other process can use their KV ports.
        kv_secret = secrets.token_hex(32)
        cores = os.sched_getaffinity(0)
        num_gpus = num_visible_gpus(os.environ)
        planned = plan_workers(self._options, len(cores), self._programs, kv_secret, num_gpus)
        workers, by_node = kept_to_nodes(planned, usable_nodes(cores))
        if by_node:
            logger.info("%s", by_node)
        if who_is_where := describe_gpus(self._options, num_gpus):
            logger.info("%s", who_is_where)
        first, *others = plan_gateways(self._options, self._programs)
        first_workers = tuple(spec for spec in workers if not spec.starts_later)
        self._specs = {spec.name: spec for spec in workers}
        for each in self._options.each_model():
            if each.max_workers is not None:
                own = [spec for spec in workers if spec.model == each.model_name]
                self._scalings[each.model_name] = Scaling(
                    [spec.name for spec in own],
                    [spec.name for spec in own if not spec.starts_later],
                    self._begin_later,
                    self._let_go,
                )
        await self._start_all(first_workers, (first,))
        if others:  # they share ports that the first one may have chosen
            ports = self.report_of("gateway").ports
            await self._start_all((), tuple(other.at_ports(ports) for other in others))
        before = time.monotonic()
        await self._serving()
        self._phases["serving"] = time.monotonic() - before
        self._phases["total"] = time.monotonic() - begin
        self._keepers = {
            child.name: asyncio.create_task(self._keep(child), name=f"keep {child.name}")
            for child in self._children.values()
        }
        for model, scaling in self._scalings.items():
            name = f"scale {model}"
            self._keepers[name] = asyncio.create_task(scaling.run(), name=name)

    async def stop(self) -> None:
        """Drain and stop all children, first the gateways, then the workers. No process is left.
        Idempotent."""
        self._stopping.set()
        keepers, self._keepers = [*self._keepers.values()], {}
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        grace_s = self._options.drain_timeout_s + _KILL_MARGIN_S
        gateways = [child for name, child in self._children.items() if name.startswith("gateway")]
        await asyncio.gather(*(gateway.stop(grace_s) for gateway in gateways))
        self._feed.end()
        await asyncio.gather(*(child.stop(grace_s) for child in self._children.values()))
        for fd in self._lifeline:
            if fd >= 0:
                os.close(fd)
        self._lifeline = (-1, -1)

    async def _start_all(
        self, workers: tuple[ChildSpec, ...], gateways: tuple[ChildSpec, ...]
    ) -> None:
        """Start children concurrently; with several models, without those whose workers or
        tokenizers fail. Raises the first other failure and leaves the rest to stop()."""
        tasks = self._start_tasks((*workers, *gateways))
        models = {spec.model for spec in workers}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = tasks.pop(task, None)
                    failure = None if child is None else task.exception()
                    if failure is None:
                        continue
                    model = failure.model if isinstance(failure, ChildFailed) else ""
                    if model not in models or len(models) == 1:
                        raise failure
                    models.remove(model)
                    await self._leave_out(model, failure, tasks)
                    tasks |= self._start_tasks(gateways)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._children.values():
            self._phases[child.name] = child.start_s
            for phase, seconds in (child.report.phases if child.report else {}).items():
                self._phases[f"{child.name} {phase}"] = seconds

    def _new_child(self, spec: ChildSpec) -> Child:
        variables = {**child_environment(os.environ), **spec.environment}
        feed = None if spec.model else self._feed
        own = spec.without_models(self._refused) if feed else spec
        # The first gateway plans.
        want = self._want if self._scalings and spec.name == "gateway" else None
        return Child(own, self._on_line, variables, self._on_phase, feed, want)

    def _want(self, model: str, number: int) -> None:
        """Have so many workers of a model."""
        if scaling := self._scalings.get(model):
            scaling.want(number)

    def _start_tasks(self, specs: Iterable[ChildSpec]) -> dict[asyncio.Task[None], Child]:
        children = [*map(self._new_child, specs)]
        self._children |= {child.name: child for child in children}
        return {asyncio.create_task(self._start_one(child)): child for child in children}

    async def _start_one(self, child: Child) -> None:
        report = await child.start(self._lifeline[0])
        if child.spec.model:
            tier = child.name.partition("-")[0]
            address = await self._address_for_gateways(child.name, report.address)
            self._listed[child.name] = json.dumps({"address": address, "tier": tier})
            self._feed.add(self._listed[child.name])
            self._end_complete_feed()

    def _end_complete_feed(self) -> None:
        if all(name in self._listed for name, c in self._children.items() if c.spec.model):
            self._feed.add(json.dumps({"complete": True}))

    def _begin_later(self, name: str) -> None:
        """Start a worker that was not there at first, or not any more, and keep it."""
        child = self._children[name] = self._new_child(self._specs[name])
        self._keepers[name] = asyncio.create_task(self._keep_later(child), name=f"keep {name}")

    async def _keep_later(self, child: Child) -> None:
        delay_s = 0.0
        while True:
            try:
                async with asyncio.timeout(_START_S):
                    await self._start_one(child)
            except (ChildFailed, TimeoutError) as failure:
                await child.kill()
                delay_s = restart_delay_s(delay_s, 0.0)
                why = str(failure) or f"not ready within {_START_S:.0f} s"
                logger.warning("%s: starting it again in %.1f s: %s", child.name, delay_s, why)
                if await self._stopped_within(delay_s):
                    return
            else:
                logger.info("%s is ready", child.name)
                await self._keep(child)
                return

    async def _let_go(self, name: str) -> None:
        """Take a worker off the list, drain it, and wait until its process has ended."""
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if line := self._listed.pop(name, None):
            address = json.loads(line)["address"]
            self._feed.remove(line, json.dumps({"address": address, "removed": True}))
        child = self._children[name]
        await child.stop(self._options.drain_timeout_s + _KILL_MARGIN_S)
        del self._children[name]

    async def _leave_out(
        self, model: str, failure: BaseException, tasks: dict[asyncio.Task[None], Child]
    ) -> None:
        """Stop what serves a failed model, and the gateways, which are to start without it."""
        logger.error("serving without model %s: %s", model, failure)
        self._refused += (model,)
        self._scalings.pop(model, None)
        gone = [c for c in self._children.values() if c.spec.model in ("", model)]
        starts = [task for task, child in tasks.items() if child in gone]
        for task in starts:
            del tasks[task]
            task.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(child.kill() for child in gone))
        self._feed = Feed()
        for child in gone:
            del self._children[child.name]
            self._listed.pop(child.name, None)
        for line in self._listed.values():
            self._feed.add(line)
        self._end_complete_feed()

    async def _address_for_gateways(self, name: str, address: str) -> str:  # noqa: ARG002
        """host:port by which gateways reach this worker; by default, where it listens."""
        return address

    async def _serving(self) -> None:
        """Wait until the gateway serves. Raises ChildFailed if a child ends first."""
        serving = asyncio.ensure_future(self._wait_serving(self.address))
        ends = {asyncio.create_task(child.wait()): child for child in self._children.values()}
        try:
            await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for ended, child in ends.items():
                if ended.done():
                    raise child.failure()
            serving.result()
        finally:
            for task in (serving, *ends):
                task.cancel()
            await asyncio.gather(serving, *ends, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        """Restart the child at each end, until the cluster stops."""
        delay_s = 0.0
        while True:
            began = time.monotonic()
            how = describe_exit(await child.wait())
            delay_s = restart_delay_s(delay_s, time.monotonic() - began)
            logger.error("%s ended (%s): starting it again in %.1f s", child.name, how, delay_s)
            if await self._stopped_within(delay_s):
                return
            try:
                report = await child.start(self._lifeline[0])
            except ChildFailed as failure:
                logger.warning("%s", failure.message)
            else:
                logger.info("%s is back at %s", child.name, report.address)

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def restart_delay_s(last_s: float, served_s: float) -> float:
    """Seconds from a process's end to its next start. last_s: the previous delay, 0 for the first.
    served_s: how long the process served."""
    if served_s >= _STABLE_S:
        return _FIRST_DELAY_S
    return min(max(2 * last_s, _FIRST_DELAY_S), _LAST_DELAY_S)


def check_ports(options: ServeOptions) -> None:
    """Raise ConfigError, naming the option, if a port of the gateways is taken."""
    check_bindable(options.host, options.port)
    if options.bound_http_port is not None:
        check_bindable(options.host, options.bound_http_port, port_option="http_port")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child: without our own variables, which it gets as flags. The level of CPU
    kernels has no flag and is kept."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(ENV_PREFIX) or name == CPU_LEVEL_VARIABLE
    }
    return {**GRPC_ENVIRONMENT, **kept}
