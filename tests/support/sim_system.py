"""The whole of Baton in one virtual loop: the gateway's requests and dispatcher, both tiers' cores,
the channel.

Nothing here is a fake but the clock, the model (the oracle engine), gRPC (links call the cores) and
text. Workers can be killed; what a worker's death does to its connections is done to them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.commands import Abort, SequenceCommand
from baton.events import Failed, SequenceEvent, is_last
from baton.types import KvLayout, KvSource, SequenceSpec, Tier, WorkerIdentity, WorkerInfo
from baton.v1 import inference_pb2
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.links.worker_link import Sink
from gateway.request.driver import RequestDeps, RequestDriver, outputs_of
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.migrator import Migrator
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape, SimWorker
from worker_core.commands import Drain, KnownSequences, StreamCommand
from worker_core.loop import HEARTBEAT_S
from worker_core.speculation.interface import Speculation


def info_of(name: str, tier: Tier, shape: SimShape, layout: KvLayout, max_len: int) -> WorkerInfo:
    return WorkerInfo(
        WorkerIdentity(name, 1),
        tier,
        "oracle",
        layout,
        1000,
        max_len,
        shape.num_blocks,
        shape.max_num_seqs,
        shape.max_num_batched_tokens,
        shape.max_local_prefill_tokens,
    )


class WorkerNode:
    """A worker, its loop under the virtual clock (as EngineLoop turns, with a step that takes
    time), and the gateway's link to it."""

    def __init__(self, system: System, worker: SimWorker, tier: Tier) -> None:
        self.system = system
        self.worker = worker
        self.name = worker.name
        self.rng = system.rng
        self.woken = asyncio.Event()
        worker.on_command = self.woken.set
        self.sinks: dict[int, Sink] = {}
        self.num_handles = 0
        self.num_opened = 0
        self.is_dead = False
        spec = worker.engine.spec
        info = info_of(self.name, tier, worker.shape, spec.layout, spec.max_model_len)
        system.fleet.join(self.name, info, self)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            is_idle = self.turn()
            await asyncio.sleep(self.rng.uniform(0.001, 0.03))
            if is_idle:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self.woken.wait()
            self.woken.clear()

    def turn(self) -> bool:
        # More often than a gateway does, so that what it forgets is found in the step after.
        self.worker.inbox.append(KnownSequences(0, frozenset(self.sinks)))
        for runner in self.worker.runners:
            # Tiers' threads are ahead of the engine loop, or behind.
            while self.rng.random() < 0.7 and runner.run():
                pass
        step = self.worker.step()
        self.worker.pool.check_integrity()
        assert step.load.num_orphan_blocks == step.load.num_orphan_sequences == 0
        for reported in step.events:
            self.emit(reported.handle, reported.event)
        self.system.fleet.report(self.name, step.load)
        return step.is_idle

    def emit(self, handle: int, event: SequenceEvent) -> None:
        sink = self.sinks.get(handle)
        if sink is None:
            return
        if is_last(event):
            del self.sinks[handle]
        sink(event)

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        first = self.num_handles + 1
        self.num_handles += len(sinks)
        self.num_opened += 1
        if self.is_dead:
            lost = Failed("WORKER_LOST", f"{self.name} was killed", is_retriable=True)
            for sink in sinks:
                asyncio.get_running_loop().call_soon(sink, lost)
            return first
        self.sinks.update(enumerate(sinks, start=first))
        self.worker.open(0, first, spec, source, send_to)
        return first

    def send(self, handle: int, command: SequenceCommand) -> None:
        if not isinstance(command, Abort) or self.sinks.pop(handle, None) is not None:
            self.worker.submit(StreamCommand(0, handle, command))

    def drain(self) -> None:
        self.worker.submit(Drain())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def kill(self) -> None:
        self.is_dead = True
        await self.stop()
        self.worker.listener.close()
        self.worker.sender.close()
        self.system.fleet.leave(self.name, WorkerState.UNREACHABLE, "killed")
        for handle in list(self.sinks):
            self.emit(handle, Failed("WORKER_LOST", f"{self.name} was killed", is_retriable=True))


class PrefillNode(WorkerNode):
    """A prefill worker."""

    def __init__(self, system: System, name: str) -> None:
        hub = system.hub_of(system.hub, name)
        clock = asyncio.get_running_loop().time
        worker = SimPrefill(hub, clock, system.prefill_shape, name)
        super().__init__(system, worker, Tier.PREFILL)


class DecodeNode(WorkerNode):
    """A decode worker."""

    def __init__(self, system: System, name: str) -> None:
        speculation: Speculation | None = None
        if system.speculates:
            layers = system.decode_shape.layers
            speculation = RandomSpeculation(system.rng.getrandbits(32), layers=layers)
        clock = asyncio.get_running_loop().time
        worker = SimDecode(system.hub, clock, system.decode_shape, name, speculation=speculation)
        super().__init__(system, worker, Tier.DECODE)

    def emit(self, handle: int, event: SequenceEvent) -> None:
        self.system.seen.add(type(event).__name__)
        super().emit(handle, event)


@dataclass
class History:
    """What one client saw."""

    chunks: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    error: BaseException | None = None
    is_cancelled: bool = False

    def token_ids(self, choice: int = 0) -> list[int]:
        return [t for chunk in self.chunks if chunk.choice == choice for t in chunk.token_ids]

    def check(self, expected: Sequence[list[int]]) -> None:
        """Each choice's indices exactly once and in order, the tokens expected, and one end after
        which nothing comes."""
        for choice, tokens in enumerate(expected):
            self._check_choice(choice, tokens)
        if not self.is_cancelled and not self.error:
            usages = [chunk.HasField("usage") for chunk in self.chunks]
            assert usages == [False] * (len(usages) - 1) + [True]
            assert self.chunks[-1].usage.completion_tokens >= sum(map(len, expected))

    def _check_choice(self, choice: int, expected: list[int]) -> None:
        position = 0
        chunks = [chunk for chunk in self.chunks if chunk.choice == choice]
        for chunk in chunks:
            assert chunk.token_index == position or not chunk.token_ids
            position += len(chunk.token_ids)
        token_ids = self.token_ids(choice)
        ended = [bool(chunk.finish_reason) for chunk in chunks]
        if self.is_cancelled or self.error:
            assert token_ids == expected[: len(token_ids)]
            return
        assert token_ids == expected
        assert ended == [False] * (len(ended) - 1) + [True]


class System:
    """Everything, to be made inside a virtual loop."""

    def __init__(
        self,
        seed: int,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        prefill_shape: SimShape = SimShape(block_size=8),
        decode_shape: SimShape = SimShape(),
        max_queue_size: int = 256,
        hub: LoopbackHub | None = None,
        hub_of: Callable[[LoopbackHub, str], LoopbackHub] = lambda hub, _: hub,
        speculates: bool = False,
    ) -> None:
        """speculates: decode workers draft at random. hub_of: how the prefill worker of that name
        sees the hub."""
        self.speculates = speculates
        self.rng = random.Random(seed)
        self.prefill_shape, self.decode_shape = prefill_shape, decode_shape
        self.hub = hub or LoopbackHub()
        self.hub_of = hub_of
        prefill_names = [f"p{i}" for i in range(num_prefill)]
        decode_names = [f"d{i}" for i in range(num_decode)]
        self.fleet = Fleet(prefill_names, decode_names)
        self.dispatcher = Dispatcher(self.fleet, max_queue_size=max_queue_size, key=bytes(16))
        self.dispatching = asyncio.create_task(self.dispatcher.run())
        self.seen: set[str] = set()
        self.prefills = [PrefillNode(self, name) for name in prefill_names]
        self.decodes = [DecodeNode(self, name) for name in decode_names]
        migrator = Migrator(self.fleet, self.dispatcher)
        self.migrating = asyncio.create_task(migrator.run())
        self.deps = RequestDeps(
            self.fleet,
            self.dispatcher,
            dict.fromkeys((False, True), Decoding(lambda ids: "".join(f"{i} " for i in ids))),
            30.0,
            migrator,
        )

    async def request(
        self,
        spec: SequenceSpec,
        history: History,
        *,
        timeout_s: float = 600.0,
        num_returned: int | None = None,
    ) -> None:
        """Serve one request into `history`; its error, if any, stays there. num_returned: all
        choices if not given."""
        loop = asyncio.get_running_loop()

        async def write(chunk: inference_pb2.GenerateResponse) -> None:
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.uniform(0, 0.05))
            history.chunks.append(chunk)

        request = ValidatedRequest(
            spec, TextOptions(), num_returned=num_returned or spec.num_choices
        )
        outputs = outputs_of(request, self.deps.decodings)
        try:
            await RequestDriver(self.deps, request, outputs, write, loop.time() + timeout_s).run()
        except asyncio.CancelledError:
            history.is_cancelled = True
        except Exception as error:  # noqa: BLE001 - the test looks at it
            history.error = error

    async def close(self) -> None:
        """Wait until all is quiet, check that nothing is held by anyone alive, and end all
        tasks."""
        await asyncio.sleep(60.0)
        for node in (*self.prefills, *self.decodes):
            if not node.is_dead:
                assert node.worker.pool.counts().leased == 0, node.name
                node.worker.pool.check_integrity()
        for node in self.decodes:
            assert node.is_dead or node.worker.tickets.num_open == 0
        assert self.dispatcher.num_waiting == 0
        assert all(worker.num_in_flight == 0 for worker in self.fleet.workers.values())
        assert all(worker.outstanding_tokens == 0 for worker in self.fleet.workers.values())
        for node in (*self.prefills, *self.decodes):
            await node.stop()
        for task in (self.dispatching, self.migrating):
            task.cancel()
        await asyncio.gather(self.dispatching, self.migrating, return_exceptions=True)
