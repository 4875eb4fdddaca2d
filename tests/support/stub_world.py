"""A gateway over workers that do nothing by themselves: the test says what each of them reports,
message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.events import SequenceEvent
from baton.types import BlockCounts, SequenceSpec, WorkerLoad
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.request.assignment import Choice
from gateway.request.driver import RequestDeps, RequestDriver, outputs_of
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet
from gateway.routing.migrator import Migrator
from gateway.routing.placement import Placement
from gateway.telemetry.timing import Timeline
from tests.support.fake_workers import make_info, text_of
from tests.support.gateway_world import Client
from tests.support.stub_link import StubLink
from tests.support.virtual_loop import run_virtual


async def settle() -> None:
    """Let all that is ready run."""
    await asyncio.sleep(1e-9)


@dataclass
class StubWorld:
    """One request, placed at once: on p and d, or where it is left room. Nobody migrates but by the
    test's order."""

    spec: SequenceSpec
    prefills: tuple[str, ...] = ("p",)
    decodes: tuple[str, ...] = ("d",)
    text: TextOptions = field(default_factory=TextOptions)
    client: Client = field(default_factory=Client)
    num_migrations_ended: int = 0

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.prefills, self.decodes)
        self.links = {address: StubLink() for address in self.fleet.workers}
        for address, link in self.links.items():
            tier = self.fleet.workers[address].tier
            self.fleet.join(address, make_info(address, tier), link)
            self.fleet.report(address, WorkerLoad(blocks=BlockCounts(64, 0, 0)))
        self.dispatcher = Dispatcher(self.fleet, max_queue_size=10, key=b"k" * 16)
        migrator = Migrator(self.fleet, self.dispatcher)
        decodings = dict.fromkeys((False, True), Decoding(text_of))
        deps = RequestDeps(self.fleet, self.dispatcher, decodings, 30.0, migrator)
        now_s = asyncio.get_running_loop().time()
        self.timeline = Timeline(now_s)
        request = ValidatedRequest(self.spec, self.text, num_returned=self.spec.num_choices)
        outputs, write = outputs_of(request, decodings), self.client.write
        self.driver = RequestDriver(deps, request, outputs, write, now_s + 1e6, self.timeline)
        self.placing = asyncio.create_task(self.dispatcher.run())
        self.running = asyncio.create_task(self.driver.run())

    @property
    def error(self) -> BaseException | None:
        """What the request ended with."""
        return self.running.exception() if self.running.done() else None

    @property
    def choice(self) -> Choice:
        return self.driver.state.choices[0]

    async def emit(self, address: str, *events: SequenceEvent, handle: int = 1) -> None:
        """Each arrives alone."""
        for event in events:
            self.links[address].emit(event, handle)
            await settle()

    def leave_room_at(self, *addresses: str) -> None:
        """All other decode workers are full."""
        for address in self.decodes:
            num_free = 64 if address in addresses else 0
            self.fleet.report(address, WorkerLoad(blocks=BlockCounts(num_free, 0, 64 - num_free)))

    def tokens_of(self, choice: int) -> list[int]:
        return self.client.of_choice(choice).token_ids

    def claim(self, address: str) -> Placement:
        """For a migration."""
        return Placement(self.fleet, -1, None, self.fleet.workers[address], 1, 1)

    def migrate(self, address: str) -> None:
        self.driver.migrate(self.choice, self.claim(address), self._migration_ended)

    def _migration_ended(self) -> None:
        self.num_migrations_ended += 1

    def check_empty(self) -> None:
        for worker in self.fleet.workers.values():
            assert worker.num_in_flight == 0
            assert worker.outstanding_tokens == 0
            assert not worker.unreported_blocks
        assert not any(link.open_handles for link in self.links.values())
        assert self.dispatcher.num_waiting == 0


def in_stub_world(
    test: Callable[[StubWorld], Awaitable[None]], spec: SequenceSpec, **options: object
) -> None:
    """Run `test`, give the request up if it has not ended, and see that nothing is left of it."""

    async def main() -> None:
        world = StubWorld(spec, **options)  # type: ignore[arg-type]
        try:
            await settle()
            await test(world)
        finally:
            for task in (world.running, world.placing):
                task.cancel()
            ends = await asyncio.gather(world.running, world.placing, return_exceptions=True)
        world.check_empty()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, BatonError):
                raise end

    run_virtual(main())
