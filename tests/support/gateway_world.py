"""A gateway without gRPC over fake workers, and clients of it: what the tests of driver and
dispatcher share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.errors import BatonError
from baton.types import (
    NO_SLO,
    UNKNOWN_NUMERICS,
    NumericsClass,
    Sampling,
    SequenceSpec,
    Slo,
    Tier,
)
from baton.v1 import inference_pb2
from gateway.intake.decoding import Decoding
from gateway.intake.request import ChoiceSoFar, TextOptions, ValidatedRequest
from gateway.request.driver import (
    RequestDeps,
    RequestDriver,
    resumed_outputs_of,
    starting_specs_of,
)
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet
from gateway.routing.migrator import Migrator
from gateway.routing.numerics import NumericsPolicy
from gateway.routing.placement import Placement
from gateway.routing.router import Need
from tests.support.fake_workers import FakeDecode, FakePrefill, make_info, text_of
from tests.support.virtual_loop import run_virtual

Chunk = inference_pb2.GenerateResponse


def make_spec(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    *,
    arrival_ns: int = 0,
    num_choices: int = 1,
    **sampling: Any,
) -> SequenceSpec:
    return SequenceSpec(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        arrival_ns=arrival_ns,
        num_choices=num_choices,
    )


@dataclass
class Client:
    """Collects the chunks of one request. `read_s`: how long it takes to read one."""

    chunks: list[Chunk] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    read_s: float = 0.0
    is_reading: bool = False
    on_chunk: Callable[[Chunk], None] | None = None

    async def write(self, chunk: Chunk) -> None:
        assert not self.is_reading, "a stream is written by one at a time"
        self.is_reading = True
        try:
            self.chunks.append(chunk)
            self.times_s.append(asyncio.get_running_loop().time())
            if self.on_chunk:
                self.on_chunk(chunk)
            if self.read_s:
                await asyncio.sleep(self.read_s)
        finally:
            self.is_reading = False

    @property
    def token_ids(self) -> list[int]:
        """All tokens; checks that the chunks' indices are without gap or overlap."""
        token_ids: list[int] = []
        for chunk in self.chunks:
            assert chunk.token_index == len(token_ids)
            token_ids.extend(chunk.token_ids)
        return token_ids

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def of_choice(self, choice: int) -> Client:
        """What came of one choice."""
        return Client([chunk for chunk in self.chunks if chunk.choice == choice])

    def outputs(self) -> list[list[int]]:
        """The tokens of each choice; checks that each has one end, and that the stream's end is the
        last one's."""
        num_choices = 1 + max(chunk.choice for chunk in self.chunks)
        parts = [self.of_choice(choice) for choice in range(num_choices)]
        assert all(part.last.finish_reason for part in parts)
        assert [chunk.HasField("usage") for chunk in self.chunks[:-1]] == [False] * (
            len(self.chunks) - 1
        )
        usage = self.chunks[-1].usage
        assert self.chunks[-1].HasField("timing")
        outputs = [part.token_ids for part in parts]
        assert usage.completion_tokens >= sum(map(len, outputs))
        return outputs

    @property
    def last(self) -> Chunk:
        """The last chunk; checks that no other has a finish reason."""
        assert [c.finish_reason for c in self.chunks[:-1]] == [0] * (len(self.chunks) - 1)
        return self.chunks[-1]


@dataclass
class World:
    """The running gateway."""

    fleet: Fleet
    dispatcher: Dispatcher
    decodes: list[FakeDecode]
    prefills: list[FakePrefill]
    deps: RequestDeps

    async def generate(
        self,
        spec: SequenceSpec,
        client: Client | None = None,
        *,
        timeout_s: float = 600.0,
        text: TextOptions | None = None,
        num_returned: int | None = None,
        echo_text: str | None = None,
        resume_from: Mapping[int, ChoiceSoFar] | None = None,
        account: bytes = b"",
    ) -> Client:
        """num_returned: outputs sent, all of them if not given."""
        client = client or Client()
        now_s = asyncio.get_running_loop().time()
        request = ValidatedRequest(
            spec,
            text or TextOptions(),
            num_returned=num_returned or spec.num_choices,
            echo_text=echo_text,
            resume_from=resume_from or {},
            account=account,
        )
        outputs = await resumed_outputs_of(request, self.deps.decodings)
        await self.dispatcher.prepare(starting_specs_of(request))
        await RequestDriver(self.deps, request, outputs, client.write, now_s + timeout_s).run()
        return client

    async def place(self, spec: SequenceSpec) -> Placement:
        """Wait for a place, which the caller releases."""
        places: list[Placement | BatonError] = []
        is_placed = asyncio.Event()

        def on_place(place: Placement | BatonError) -> None:
            places.append(place)
            is_placed.set()

        place = self.dispatcher.place(spec, Need.of(spec), on_place)
        try:
            await is_placed.wait()
        except asyncio.CancelledError:
            self.dispatcher.cancel(place)
            for given in places:
                assert isinstance(given, Placement)
                given.release()
            raise
        (given,) = places
        if isinstance(given, BatonError):
            raise given
        return given

    async def settle(self) -> None:
        """Let whatever is under way come to its end."""
        await asyncio.sleep(1.0)

    def check_empty(self) -> None:
        """Nothing is left of any request, anywhere."""
        assert self.dispatcher.num_waiting == 0
        for decode in self.decodes:
            assert decode.num_sequences == 0
            assert decode.num_free_blocks == decode.info.num_blocks
        for prefill in self.prefills:
            assert prefill.num_in_flight == 0
        for worker in self.fleet.workers.values():
            assert worker.num_in_flight == 0
            assert worker.outstanding_tokens == 0
            assert not worker.unreported_blocks


def in_world(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    """Run `test` in a fresh world, and see that nothing is left in it."""

    async def main() -> None:
        async with gateway_world(**options) as world:
            await test(world)
            await world.settle()
            world.check_empty()

    run_virtual(main())


@contextlib.asynccontextmanager
async def gateway_world(
    *,
    num_prefills: int = 1,
    num_decodes: int = 1,
    max_queue_size: int = 1000,
    client_stall_timeout_s: float = 30.0,
    numerics_policy: NumericsPolicy = "mixed",
    prefill_numerics: Sequence[NumericsClass] = (UNKNOWN_NUMERICS,),
    decode_numerics: Sequence[NumericsClass] = (UNKNOWN_NUMERICS,),
    weights: Mapping[bytes, float] | None = None,
    slo: Slo = NO_SLO,
    **decode_options: Any,
) -> AsyncIterator[World]:
    """A gateway over fresh fake workers. At its end no task of the gateway is left.

    prefill_numerics, decode_numerics: of the workers, over and over. weights: of accounts.
    slo: of the fleet."""
    prefill_addresses = [f"p{i}:1" for i in range(num_prefills)]
    decode_addresses = [f"d{i}:1" for i in range(num_decodes)]
    fleet = Fleet(prefill_addresses, decode_addresses, numerics_policy=numerics_policy, slo=slo)
    dispatcher = Dispatcher(fleet, max_queue_size=max_queue_size, key=b"k" * 16, weights=weights)
    decodes = [
        FakeDecode(
            fleet, address, make_info(address, Tier.DECODE, numerics=numerics, **decode_options)
        )
        for address, numerics in zip(decode_addresses, itertools.cycle(decode_numerics))
    ]
    prefills = [
        FakePrefill(fleet, address, make_info(address, Tier.PREFILL, numerics=numerics), decodes)
        for address, numerics in zip(prefill_addresses, itertools.cycle(prefill_numerics))
    ]
    for decode in decodes:
        decode.peers = decodes
    migrator = Migrator(fleet, dispatcher)
    deps = RequestDeps(
        fleet,
        dispatcher,
        dict.fromkeys((False, True), Decoding(text_of)),
        client_stall_timeout_s,
        migrator,
    )
    running = [asyncio.create_task(job) for job in (dispatcher.run(), migrator.run())]
    try:
        await asyncio.sleep(0.1)
        yield World(fleet, dispatcher, decodes, prefills, deps)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


def with_output(spec: SequenceSpec, token_ids: Sequence[int]) -> SequenceSpec:
    return replace(spec, output_token_ids=tuple(token_ids))
