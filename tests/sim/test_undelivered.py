"""A prefill worker that cannot send KV to a decode worker: the request continues soon, and the pair
is not used for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.types import Sampling, SequenceSpec
from engine.oracle import oracle_tokens
from gateway.routing.history import FIRST_REST_S, REST_S
from kv_transfer.frame import Frame
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.loopback import LoopbackConnection, LoopbackHub, LoopbackListener
from tests.support.sim_system import History, System
from tests.support.sim_tiers import SimShape
from tests.support.virtual_loop import run_virtual

#: A ticket's lease in the simulation, which nobody may wait out.
LEASE_S = 30.0
#: A sender waits so long for a peer that says nothing.
CONNECT_TIMEOUT_S = 5.0
LONG = 40


class CutHub(LoopbackHub):
    """A loopback hub as one worker sees it. refused, mute: peers that refuse connections, or never
    answer."""

    def __init__(
        self,
        hub: LoopbackHub,
        refused: frozenset[str] = frozenset(),
        mute: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._hub = hub
        self._refused = refused
        self._mute = mute

    def listen(self, name: str) -> LoopbackListener:
        return self._hub.listen(name)

    def has(self, name: str) -> bool:
        return self._hub.has(name)

    def forget(self, name: str) -> None:
        self._hub.forget(name)

    def connect(self, name: str) -> LoopbackConnection:
        if name in self._refused:
            raise TransportError(f"{name} refuses")
        connection = self._hub.connect(name)
        return _Mute(connection) if name in self._mute else connection


class _Mute(LoopbackConnection):
    def __init__(self, connection: LoopbackConnection) -> None:
        self._connection = connection

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        pass

    def receive(self) -> Frame | None:
        return None

    def close(self) -> None:
        self._connection.close()


def spec_of(name: str, num_tokens: int = LONG, num_choices: int = 1) -> SequenceSpec:
    draws = random.Random(name)
    prompt = tuple(draws.randrange(1000) for _ in range(num_tokens))
    sampling = Sampling(temperature=0.7, seed=draws.getrandbits(64), max_tokens=20)
    return SequenceSpec(
        name, prompt, sampling, arrival_ns=draws.getrandbits(30), num_choices=num_choices
    )


async def ask(system: System, spec: SequenceSpec) -> float:
    """How long the request took; its tokens are as they should be, each told once."""
    begin_s, history = asyncio.get_running_loop().time(), History()
    await system.request(spec, history)
    assert history.error is None
    history.check(
        [
            oracle_tokens(spec.prompt_token_ids, spec.sampling, 1000, choice)
            for choice in range(spec.num_choices)
        ]
    )
    return asyncio.get_running_loop().time() - begin_s


def cut(how: str, **pairs: str) -> Callable[[LoopbackHub, str], LoopbackHub]:
    """How each worker sees the hub: `pairs` are names of prefill workers, with those that they do
    not get through to."""

    def hub_of(hub: LoopbackHub, name: str) -> LoopbackHub:
        return CutHub(hub, **{how: frozenset(pairs.get(name, "").split())})  # type: ignore[arg-type]

    return hub_of


def in_system(test: Callable[[System], Any], **options: Any) -> None:
    async def main() -> None:
        system = System(1, decode_shape=SimShape(num_blocks=200), **options)
        await asyncio.sleep(0.1)
        await test(system)
        await system.close()

    run_virtual(main())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(("how", "bound_s"), [("refused", 1.5), ("mute", CONNECT_TIMEOUT_S + 1.5)])
def test_the_decode_worker_computes_the_prompt_if_nobody_else_can(
    how: str, bound_s: float, num_choices: int
) -> None:
    """With `mute`, the client has its first tokens long before it is known that the KV goes
    nowhere."""

    async def test(system: System) -> None:
        assert await ask(system, spec_of("a", num_choices=num_choices)) < bound_s
        assert "LocalPrefill" in system.seen
        assert "Committed" not in system.seen

    in_system(test, hub_of=cut(how, p0="d0"))


@pytest.mark.slow
def test_the_pair_is_not_tried_again_for_a_while() -> None:
    async def test(system: System) -> None:
        await ask(system, spec_of("first"))
        assert await ask(system, spec_of("at once")) < 1.5
        assert system.prefills[0].num_opened == 1
        await asyncio.sleep(FIRST_REST_S)
        await ask(system, spec_of("second"))
        for number in range(8):
            assert await ask(system, spec_of(f"then {number}")) < 1.5
        assert system.prefills[0].num_opened == 2
        await asyncio.sleep(REST_S)
        await ask(system, spec_of("last"))
        assert system.prefills[0].num_opened == 3

    in_system(test, hub_of=cut("mute", p0="d0"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "mute"])
def test_others_do_it_if_there_are_others(how: str) -> None:
    """One pair of four is cut: in the end nobody but the tier that should do so has computed a
    prompt."""

    async def test(system: System) -> None:
        specs = [spec_of(f"r{number}") for number in range(24)]
        assert max(await asyncio.gather(*(ask(system, spec) for spec in specs))) < LEASE_S / 2
        assert "Committed" in system.seen
        assert "LocalPrefill" not in system.seen

    in_system(test, num_prefill=2, num_decode=2, hub_of=cut(how, p0="d1"))


@pytest.mark.slow
def test_a_decode_worker_that_nobody_reaches_is_taken_last() -> None:
    async def test(system: System) -> None:
        for number in range(12):
            await ask(system, spec_of(f"r{number}"))
        unreached = system.decodes[1]
        assert unreached.num_handles <= 4, "each prefill worker found it out at most twice"
        assert "LocalPrefill" not in system.seen

    in_system(test, num_prefill=2, num_decode=2, hub_of=cut("refused", p0="d1", p1="d1"))


@pytest.mark.slow
def test_a_request_does_not_try_every_prefill_worker() -> None:
    """Once its KV did not get to the only decode worker, it is computed there: failures are
    counted, and five are too many."""

    async def test(system: System) -> None:
        assert await ask(system, spec_of("a")) < CONNECT_TIMEOUT_S + 1.5
        assert sum(node.num_opened for node in system.prefills) == 1

    pairs = {f"p{number}": "d0" for number in range(6)}
    in_system(test, num_prefill=6, hub_of=cut("mute", **pairs))
