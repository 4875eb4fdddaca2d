"""Fairness between accounts whose requests come by several gateways."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import pytest

from baton.errors import BatonError
from baton.types import BlockCounts, Rank, Sampling, SequenceSpec, Tier, WorkerLoad
from gateway.routing.admission import AdmissionQueue
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet
from gateway.routing.placement import Outcome, Placement, plan
from gateway.routing.rivals import HOLD_S, MAX_ACCOUNTS, Rivals, Share, Shares, share_counters
from gateway.routing.router import Need, Plan, Verdict
from gateway.routing.spare_place import MIN_PLACES
from tests.support.fake_workers import make_info
from tests.support.stub_link import StubLink
from tests.support.virtual_loop import run_virtual

HEAVY, LIGHT, THIRD = b"heavy", b"light", b"third"
WEIGHTS = {HEAVY: 4.0, LIGHT: 1.0, THIRD: 2.0}
_numbers = itertools.count()


@dataclass(frozen=True)
class Item:
    """Implements admission.Queued."""

    account: bytes
    rank: Rank
    width: int = 1
    is_return: bool = False
    ttft_s: float = inf
    late_s: float = inf
    until_s: float = inf


class Gateways:
    """Queues that take the places of one fleet as these get free, and exchange notes now and
    then."""

    def __init__(self, number: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queues = [AdmissionQueue[Item](10_000, WEIGHTS) for _ in range(number)]
        self.rivals = [Rivals() for _ in range(number)]
        self.is_there = [True] * number
        self.served: Counter[bytes] = Counter()
        self.now_s = 0.0

    def send(self, gateway: int, account: bytes, number: int = 1) -> None:
        for _ in range(number):
            self.queues[gateway].add(Item(account, (0, next(_numbers), "", 0)))

    def exchange(self) -> None:
        """By way of the text of the notes."""
        notes = {
            str(i): queue.shares().to_note()
            for i, queue in enumerate(self.queues)
            if self.is_there[i]
        }
        for i, (queue, rivals) in enumerate(zip(self.queues, self.rivals, strict=True)):
            others = {
                name: Shares.from_note(note) for name, note in notes.items() if name != str(i)
            }
            charges, waiting = rivals.update(others)
            floor = max((shares.floor for shares in others.values()), default=0.0)
            queue.share(floor, charges, waiting)

    def give_place(self) -> bytes | None:
        """To the first gateway that wants it; if none does, to the first that would."""
        self.now_s += 0.01
        order = [i for i in range(len(self.queues)) if self.is_there[i]]
        self.rng.shuffle(order)
        for ignores_rivals in (False, True):
            for i in order:
                self.queues[i].ignores_rivals = ignores_rivals
                if item := self.queues[i].pop(self.now_s):
                    self.queues[i].charge(item)
                    self.served[item.account] += 1
                    return item.account
        return None

    def run(self, num_places: int, per_exchange: int) -> None:
        for number in range(num_places):
            if per_exchange and number % per_exchange == 0:
                self.exchange()
            self.give_place()


SKEWS = [
    pytest.param({(0, HEAVY): 2000, (1, LIGHT): 2000}, id="apart"),
    pytest.param({(0, HEAVY): 1800, (1, HEAVY): 200, (1, LIGHT): 2000}, id="mostly apart"),
    pytest.param({(0, HEAVY): 1000, (1, HEAVY): 1000, (2, LIGHT): 2000}, id="three gateways"),
]


def world(skew: dict[tuple[int, bytes], int], seed: int = 0) -> Gateways:
    made = Gateways(1 + max(gateway for gateway, _ in skew), seed)
    for (gateway, account), number in skew.items():
        made.send(gateway, account, number)
    return made


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("per_exchange", [1, 10, 40])
def test_weights_hold_across_gateways(
    skew: dict[tuple[int, bytes], int], per_exchange: int
) -> None:
    gateways = world(skew)
    gateways.run(1000, per_exchange)
    assert sum(gateways.served.values()) == 1000, "no place is left empty"
    assert 3.2 <= gateways.served[HEAVY] / gateways.served[LIGHT] <= 4.8


def test_without_notes_gateways_share_evenly() -> None:
    gateways = world({(0, HEAVY): 2000, (1, LIGHT): 2000})
    gateways.run(1000, 0)
    assert gateways.served[HEAVY] / gateways.served[LIGHT] < 1.5


def test_an_account_that_comes_late_saves_no_credit() -> None:
    gateways = world({(0, HEAVY): 4000, (1, THIRD): 2000})
    gateways.run(600, 10)
    gateways.send(1, LIGHT, 2000)
    gateways.served.clear()
    gateways.run(700, 10)
    assert gateways.served[LIGHT] == pytest.approx(100, rel=0.25)
    assert gateways.served[HEAVY] / gateways.served[THIRD] == pytest.approx(2.0, rel=0.25)


def test_a_gateway_that_is_gone_holds_nobody_up() -> None:
    gateways = world({(0, HEAVY): 2000, (1, LIGHT): 2000})
    gateways.run(100, 10)
    gateways.is_there[0] = False
    gateways.exchange()
    before = gateways.served[LIGHT]
    gateways.run(100, 10)
    assert gateways.served[LIGHT] == before + 100


@pytest.mark.parametrize(
    "note",
    [
        "",
        "1",
        "[]",
        "{}",
        '{"floor": NaN, "accounts": {}}',
        '{"floor": 1, "accounts": {"zz": [1, 1, 1]}}',
        pytest.param(f'{{"floor": 1{"0" * 400}, "accounts": {{}}}}', id="too large for a float"),
        '{"floor": 1, "accounts": {"aa": [-1, 1, 1]}}',
        pytest.param("[" * 100_000, id="too deep"),
        pytest.param(
            json.dumps(
                {"floor": 1, "accounts": {f"{i:04x}": [1, 1, 1] for i in range(MAX_ACCOUNTS + 1)}}
            ),
            id="too many",
        ),
    ],
)
def test_what_is_no_note_is_a_value_error(note: str) -> None:
    with pytest.raises(ValueError, match=r"note|value|hex|unpack"):
        Shares.from_note(note)


def test_a_note_of_many_accounts_tells_first_who_waits() -> None:
    accounts = {bytes([1, *divmod(i, 256)]): Share(5.0, 5.0, False) for i in range(MAX_ACCOUNTS)}
    told = Shares(1.0, {**accounts, LIGHT: Share(0.0, 1.0, True)})
    read = Shares.from_note(told.to_note())
    assert len(read.accounts) == MAX_ACCOUNTS
    assert read.accounts[LIGHT] == told.accounts[LIGHT]


class Room:
    """A board in memory."""

    def __init__(self, notes: dict[str, str], name: str) -> None:
        self.notes, self.name = notes, name

    async def exchange(self, note: str) -> Mapping[str, str]:
        self.notes[self.name] = note
        return {name: other for name, other in self.notes.items() if name != self.name}

    async def close(self) -> None:
        pass


class SharedWorker:
    """A decode worker of several gateways; each sequence takes it 0.1 s."""

    def __init__(self, num_gateways: int, max_num_seqs: int) -> None:
        self.max_num_seqs, self.num_running = max_num_seqs, 0
        self.served: Counter[bytes] = Counter()
        info = replace(
            make_info("d", Tier.DECODE),
            max_num_seqs=max_num_seqs,
            num_blocks=1000,
            max_local_prefill_tokens=100,
        )
        self.fleets = [Fleet([], ["d"]) for _ in range(num_gateways)]
        for fleet in self.fleets:
            fleet.join("d", info, StubLink())
        self.report()
        self.dispatchers = [
            Dispatcher(fleet, max_queue_size=10_000, key=bytes(16), weights=WEIGHTS)
            for fleet in self.fleets
        ]

    def report(self) -> None:
        load = WorkerLoad(
            num_running=self.num_running,
            blocks=BlockCounts(1000, 0, 0),
            local_prefill_threshold=100,
        )
        for fleet in self.fleets:
            fleet.report("d", load)

    def send(self, gateway: int, account: bytes, *, spec: SequenceSpec | None = None) -> None:
        number = next(_numbers)
        sent = spec or SequenceSpec(f"r{number}", (1,), Sampling(max_tokens=4), arrival_ns=number)

        def on_place(place: Placement | BatonError) -> None:
            assert isinstance(place, Placement)
            if self.num_running == self.max_num_seqs:
                place.record(Outcome.REFUSED)
                place.release()
                self.send(gateway, account, spec=sent)
                return
            place.record(Outcome.RESERVED)
            self.num_running += 1
            self.report()
            asyncio.get_running_loop().call_later(0.1, self.end, place, account)

        need, dispatcher = Need.of(sent), self.dispatchers[gateway]
        dispatcher.place(sent, need, on_place, is_return=spec is not None, account=account)

    def end(self, place: Placement, account: bytes) -> None:
        self.num_running -= 1
        self.served[account] += 1
        place.release()
        self.report()


@pytest.mark.slow
@pytest.mark.parametrize("has_notes", [True, False])
def test_two_gateways_keep_weights_of_accounts_that_come_by_one_each(has_notes: bool) -> None:
    """Open loop at twice the capacity."""

    async def main() -> Counter[bytes]:
        worker, notes = SharedWorker(2, max_num_seqs=8), dict[str, str]()
        tasks = [asyncio.create_task(dispatcher.run()) for dispatcher in worker.dispatchers]
        for number, each in enumerate(worker.dispatchers if has_notes else ()):
            board = Room(notes, str(number))
            tasks.append(asyncio.create_task(share_counters(each.shares, each.take_shares, board)))
        for _ in range(1500):
            worker.send(0, HEAVY)
            worker.send(1, LIGHT)
            await asyncio.sleep(0.0125)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return worker.served

    served = run_virtual(main())
    assert sum(served.values()) >= 0.95 * 80 * 1500 * 0.0125, "no place is left empty"
    ratio = served[HEAVY] / served[LIGHT]
    assert 3.0 <= ratio <= 5.0 if has_notes else ratio < 1.5


def test_a_place_is_left_to_others_for_a_moment_each_time() -> None:
    """Also if it was while others waited before, and these went away."""

    async def main() -> None:
        (fleet,) = SharedWorker(1, 100).fleets
        dispatcher = Dispatcher(fleet, max_queue_size=100, key=bytes(16))
        given_s = list[float]()
        loop = asyncio.get_running_loop()

        def place() -> None:
            number = next(_numbers)
            spec = SequenceSpec(f"r{number}", (1,), Sampling(max_tokens=4), arrival_ns=number)
            dispatcher.place(
                spec, Need.of(spec), lambda _: given_s.append(loop.time()), account=b"held up"
            )

        run = asyncio.create_task(dispatcher.run())
        others = {"other": Shares(0.0, {LIGHT: Share(0.0, 0.0, True)})}
        dispatcher.take_shares(others)
        while dispatcher.num_waiting == 0:
            place()
        await asyncio.sleep(HOLD_S / 2)
        dispatcher.take_shares({})
        await asyncio.sleep(1.0)
        assert dispatcher.num_waiting == 0
        dispatcher.take_shares(others)
        began_s = loop.time()
        place()
        await asyncio.sleep(1.0)
        assert given_s[-1] == pytest.approx(began_s + HOLD_S)
        run.cancel()

    run_virtual(main())


def test_a_place_kept_for_an_account_that_is_expected_is_not_tried_again_and_again() -> None:
    """One account is held up for another that waits elsewhere; the last place is kept for a third.
    Nothing is tried before something changes."""
    num_tries = 0

    def counting(
        need: Need, fleet: Fleet, matched: Mapping[str, int], key: bytes
    ) -> Plan | Verdict:
        nonlocal num_tries
        num_tries += 1
        return plan(need, fleet, matched, key)

    async def main() -> None:
        (fleet,) = SharedWorker(1, MIN_PLACES).fleets
        dispatcher = Dispatcher(fleet, max_queue_size=100, key=bytes(16), placing=counting)
        given = list[Placement]()

        def place(account: bytes) -> None:
            number = next(_numbers)
            spec = SequenceSpec(f"r{number}", (1,), Sampling(max_tokens=4), arrival_ns=number)
            dispatcher.place(spec, Need.of(spec), on_place, account=account)

        def on_place(place: Placement | BatonError) -> None:
            assert isinstance(place, Placement)
            given.append(place)

        run = asyncio.create_task(dispatcher.run())
        place(THIRD)
        given.pop().release()
        dispatcher.take_shares({"other": Shares(0.0, {LIGHT: Share(0.0, 0.0, True)})})
        for _ in range(MIN_PLACES + 1):
            place(b"held up")
        await asyncio.sleep(1.0)
        assert len(given) == MIN_PLACES - 1, "all but the last place are given, after a moment each"
        tried = num_tries
        await asyncio.sleep(1.0)
        assert num_tries == tried
        given.pop().release()
        await asyncio.sleep(1.0)
        assert len(given) == MIN_PLACES - 1, "a place that got free is given"
        run.cancel()

    run_virtual(main())
