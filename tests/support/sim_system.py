"""The whole of Baton in one virtual loop: the gateway's relays and dispatcher, both tiers' cores, the channel.

Nothing here is a fake but the clock, the model (the oracle engine), gRPC (links call the cores) and text. Workers can be
killed; what a worker's death does to its connections is done to them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.engine.loop import HEARTBEAT_S
from baton.errors import WorkerLost
from baton.events import Failed, SequenceEvent, is_last
from baton.types import KvLayout, KvSource, SequenceSpec, Tier, WorkerIdentity, WorkerInfo
from baton.v1 import inference_pb2
from decode_svc import commands as decode
from gateway.dispatcher import Dispatcher
from gateway.fleet import Fleet, WorkerState
from gateway.links import First, OnFirst, PrefillResult, Sink
from gateway.mover import Mover
from gateway.relay import Relay, RelayContext
from gateway.request import TextOptions, ValidatedRequest
from kv_transfer.transport.loopback import LoopbackHub
from prefill_svc import commands as prefill
from tests.support.random_speculation import RandomSpeculation
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape
from worker_core.speculation.interface import NoSpeculation


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


class _Node:
    """A worker's loop under the virtual clock: as EngineLoop turns, with a step that takes time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self, turn: Callable[[], bool]) -> None:
        self.task = asyncio.create_task(self._run(turn))

    async def _run(self, turn: Callable[[], bool]) -> None:
        while True:
            is_idle = turn()
            await asyncio.sleep(self.rng.uniform(0.001, 0.03))
            if is_idle:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self.woken.wait()
            self.woken.clear()

    async def stop(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class PrefillNode(_Node):
    """A prefill worker and the gateway's link to it."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system.rng)
        self.name = name
        self.system = system
        loop = asyncio.get_running_loop()
        self.worker = SimPrefill(
            system.hub_of(system.hub, name),
            loop.time,
            system.prefill_shape,
            name,
            on_command=self.woken.set,
        )
        self.calls: dict[str, asyncio.Queue[prefill.PrefillEvent | WorkerLost]] = {}
        self.num_keys = 0
        spec = self.worker.engine.spec
        info = info_of(name, Tier.PREFILL, system.prefill_shape, spec.layout, spec.max_model_len)
        system.fleet.join_prefill(name, info, self)
        self.start(self.turn)

    def turn(self) -> bool:
        step = self.worker.step()
        self.worker.pool.check_integrity()
        assert step.load.num_orphan_blocks == 0
        for event in step.events:
            if call := self.calls.get(event.key):
                call.put_nowait(event)
        self.system.fleet.report(self.name, step.load)
        return step.is_idle

    async def prefill(
        self, spec: SequenceSpec, ticket: bytes, timeout_s: float, on_first: OnFirst
    ) -> None:
        self.num_keys += 1
        key = str(self.num_keys)
        events = self.calls[key] = asyncio.Queue()
        num_held = prefill_ticket_held(ticket)
        self.worker.accept(prefill.Submit(key, spec, ticket, num_held))
        is_over = False
        try:
            async with asyncio.timeout(timeout_s):
                while not is_over:
                    event = await events.get()
                    is_over = not isinstance(event, prefill.Prefilled) or not ticket
                    if isinstance(event, prefill.Prefilled):
                        is_over |= event.is_over
                        on_first(result_of(event))
                    elif isinstance(event, WorkerLost):
                        raise event
                    elif event.error:
                        raise event.error
        finally:
            del self.calls[key]
            if not is_over:
                self.worker.submit(prefill.Abort(key))

    async def kill(self) -> None:
        await self.stop()
        self.worker.listener.close()
        self.worker.sender.close()
        self.system.fleet.leave(self.name, WorkerState.UNREACHABLE, "killed")
        for call in self.calls.values():
            call.put_nowait(WorkerLost(f"{self.name} was killed"))


def result_of(event: prefill.Prefilled) -> PrefillResult:
    return PrefillResult(
        tuple(First(first.sample, first.finish) for first in event.firsts),
        event.num_cached_tokens,
        event.queue_s * 1e3,
        event.compute_s * 1e3,
        event.prompt_logprobs,
    )


def prefill_ticket_held(ticket: bytes) -> int:
    from kv_transfer.kv_ticket import parse_ticket

    return parse_ticket(ticket).num_cached_tokens if ticket else 0


class DecodeNode(_Node):
    """A decode worker and the gateway's link to it."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system.rng)
        self.name = name
        self.system = system
        loop = asyncio.get_running_loop()
        self.worker = SimDecode(
            system.hub,
            loop.time,
            system.decode_shape,
            name,
            speculation=(
                RandomSpeculation(system.rng.getrandbits(32))
                if system.speculates
                else NoSpeculation()
            ),
            on_command=self.woken.set,
        )
        self.sinks: dict[int, Sink] = {}
        self.num_handles = 0
        self.is_dead = False
        spec = self.worker.engine.spec
        info = info_of(name, Tier.DECODE, system.decode_shape, spec.layout, spec.max_model_len)
        system.fleet.join_decode(name, info, self)
        self.start(self.turn)

    def turn(self) -> bool:
        # More often than a gateway does, so that what it forgets is found in the step after.
        self.worker.inbox.append(decode.Known(0, frozenset(self.sinks)))
        step = self.worker.step()
        self.worker.pool.check_integrity()
        assert step.load.num_orphan_blocks == step.load.num_orphan_sequences == 0
        for addressed in step.events:
            self.tell(addressed.handle, addressed.event)
        self.system.fleet.report(self.name, step.load)
        return step.is_idle

    def tell(self, handle: int, event: SequenceEvent) -> None:
        self.system.seen.add(type(event).__name__)
        sink = self.sinks.get(handle)
        if sink is None:
            return
        if is_last(event):
            del self.sinks[handle]
        sink(event)

    def open(self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink]) -> int:
        first = self.num_handles + 1
        self.num_handles += len(sinks)
        if self.is_dead:
            lost = Failed("WORKER_LOST", f"{self.name} was killed", is_retriable=True)
            for sink in sinks:
                asyncio.get_running_loop().call_soon(sink, lost)
            return first
        self.sinks.update(enumerate(sinks, start=first))
        self.worker.submit(decode.Open(0, first, spec, source))
        return first

    def abort(self, handle: int) -> None:
        if self.sinks.pop(handle, None) is not None:
            self.worker.submit(decode.Abort(0, handle))

    def pause(self, handle: int) -> None:
        self.worker.submit(decode.Pause(0, handle))

    def hand_off(self, handle: int, ticket: bytes) -> None:
        self.worker.submit(decode.HandOff(0, handle, ticket))

    def resume(self, handle: int) -> None:
        self.worker.submit(decode.Resume(0, handle))

    def drain(self) -> None:
        self.worker.submit(decode.Drain())

    async def kill(self) -> None:
        self.is_dead = True
        await self.stop()
        self.worker.listener.close()
        self.system.fleet.leave(self.name, WorkerState.UNREACHABLE, "killed")
        for handle in list(self.sinks):
            self.tell(handle, Failed("WORKER_LOST", f"{self.name} was killed", is_retriable=True))


@dataclass
class History:
    """What one client saw."""

    chunks: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    error: BaseException | None = None
    is_cancelled: bool = False

    def token_ids(self, choice: int = 0) -> list[int]:
        return [t for chunk in self.chunks if chunk.choice == choice for t in chunk.token_ids]

    def check(self, expected: Sequence[list[int]]) -> None:
        """Each choice's indices exactly once and in order, the tokens expected, and one end after which nothing comes."""
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
        """speculates: decode workers draft at random. hub_of: how the prefill worker of that name sees the hub."""
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
        mover = Mover(self.fleet, self.dispatcher)
        self.moving = asyncio.create_task(mover.run())
        self.context = RelayContext(
            self.fleet, self.dispatcher, lambda ids, _: "".join(f"{i} " for i in ids), 30.0, mover
        )

    async def request(
        self,
        spec: SequenceSpec,
        history: History,
        *,
        timeout_s: float = 600.0,
        num_returned: int | None = None,
    ) -> None:
        """Serve one request into `history`; its error, if any, stays there. num_returned: all choices if not given."""
        loop = asyncio.get_running_loop()

        async def write(chunk: inference_pb2.GenerateResponse) -> None:
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.uniform(0, 0.05))
            history.chunks.append(chunk)

        request = ValidatedRequest(
            spec, TextOptions(), loop.time(), num_returned=num_returned or spec.num_choices
        )
        try:
            await Relay(self.context, request, write, loop.time() + timeout_s).run()
        except asyncio.CancelledError:
            history.is_cancelled = True
        except Exception as error:  # noqa: BLE001 - the test looks at it
            history.error = error

    async def close(self) -> None:
        """Wait until all is quiet, check that nothing is held by anyone alive, and end all tasks."""
        await asyncio.sleep(60.0)
        for node in (*self.prefills, *self.decodes):
            if node.task and not node.task.done():
                assert node.worker.pool.counts().leased == 0, node.name
        for node in self.decodes:
            assert node.is_dead or node.worker.tickets.num_open == 0
        assert self.dispatcher.num_waiting == 0
        assert all(worker.num_in_flight == 0 for worker in self.fleet.workers.values())
        assert all(worker.outstanding_tokens == 0 for worker in self.fleet.workers.values())
        for node in (*self.prefills, *self.decodes):
            await node.stop()
        for task in (self.dispatching, self.moving):
            task.cancel()
        await asyncio.gather(self.dispatching, self.moving, return_exceptions=True)
