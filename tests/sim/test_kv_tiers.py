"""Workers with tiers of KV, under the oracle engine: a wrong block in a tier's answer changes the
output."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort
from baton.events import Failed, LocalPrefill, Offered, Tokens, is_last
from baton.types import KvSource, Sampling, SequenceSpec
from engine.interface import Engine
from engine.kv.tiers.host import HostTier
from engine.kv.tiers.interface import Record, Tier
from engine.oracle import OracleLayers, oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.kv_tiers import disk_tier, host_tier, record_format
from tests.support.sim_system import History, System
from tests.support.sim_tiers import SimDecode, SimShape
from tests.support.virtual_loop import run_virtual
from worker_core.commands import StreamCommand
from worker_core.sequence import Stage

VOCAB, NUM_OUTPUT = 1000, 3
SAMPLING = Sampling(max_tokens=NUM_OUTPUT)
#: Of 12 blocks of 4 tokens: two prompts of 16 at a time.
SMALL = SimShape(num_blocks=12, max_num_seqs=4, max_num_launches=1)
WINDOWS = SimShape(
    num_blocks=18,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    layers=OracleLayers(6),
    has_window_slots=True,
)

MakeTiers = Callable[[Engine], Sequence[Tier]] | None


def prompt_of(number: int, num_tokens: int = 17) -> tuple[int, ...]:
    return tuple((number * 31 + place * 7) % (VOCAB - 1) for place in range(num_tokens))


@dataclass
class World:
    """A worker that computes prompts itself. Time passes when the test says."""

    make_tiers: MakeTiers
    shape: SimShape = SMALL
    now_s: float = 0.0
    said: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, tuple[tuple[int, ...], bytes, str]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.worker = SimDecode(
            LoopbackHub(), lambda: self.now_s, self.shape, make_tiers=self.make_tiers
        )

    def open(self, prompt: tuple[int, ...], tenant: bytes = b"", adapter: str = "") -> int:
        handle = len(self.prompts) + 1
        self.prompts[handle] = prompt, tenant, adapter
        self.said[handle] = []
        spec = SequenceSpec(
            f"r{handle}", prompt, SAMPLING, tenant=tenant, arrival_ns=handle, adapter=adapter
        )
        self.worker.open(0, handle, spec, KvSource.LOCAL)
        return handle

    def abort(self, handle: int) -> None:
        self.gone.add(handle)
        self.worker.submit(StreamCommand(0, handle, Abort()))

    def step(self) -> bool:
        """Returns whether the worker was idle."""
        result = self.worker.step()
        self.worker.pool.check_integrity()
        assert result.load.num_orphan_blocks == 0
        for _, handle, event in result.events:
            if isinstance(event, LocalPrefill):
                self.cached[handle] = event.num_cached_tokens
            if isinstance(event, Tokens):
                self.said[handle] += [sample.token_id for sample in event.samples]
            if is_last(event):
                self.over.add(handle)
                if not isinstance(event, Tokens):
                    assert not isinstance(event, Failed), event
                    self.gone.add(handle)  # no room
        return result.is_idle

    def run_jobs(self) -> bool:
        return sum(runner.run() for runner in self.worker.runners) > 0

    def settle(self) -> None:
        """Until nothing happens by itself."""
        while not self.step() or self.run_jobs() or self.worker.inbox:
            pass

    def ask(self, prompt: tuple[int, ...], tenant: bytes = b"", adapter: str = "") -> int:
        """Ask, wait for the answer, and check it. Returns the number of cached tokens."""
        handle = self.open(prompt, tenant, adapter)
        self.settle()
        assert handle not in self.gone
        self.check()
        return self.cached[handle]

    def check(self) -> None:
        for handle, (prompt, _, adapter) in self.prompts.items():
            expected = oracle_tokens(
                prompt, SAMPLING, VOCAB, adapter=adapter, layers=self.shape.layers
            )
            said = self.said[handle]
            assert said == (expected[: len(said)] if handle in self.gone else expected)

    def close(self) -> None:
        assert self.worker.tiers is not None
        self.worker.tiers.close()


def host_only(engine: Engine) -> Sequence[Tier]:
    return [host_tier(engine, 100)]


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    world = World(host_only)
    for number in range(6):
        assert world.ask(prompt_of(number)) == 0
    # The device has room for two or three; the others come from the host.
    assert [world.ask(prompt_of(number)) for number in range(6)] == [16] * 6
    (load,) = world.worker.step().load.kv_tiers
    assert load.name == "host"
    assert load.num_hits >= 3 * 4
    assert load.num_misses >= 5 * 4
    assert load.saved_ms > 0
    assert load.lost_ms == 0


def test_without_tiers_an_evicted_prefix_is_computed_again() -> None:
    world = World(None)
    for number in range(6):
        world.ask(prompt_of(number))
    assert world.ask(prompt_of(0)) == 0


def test_other_tenants_and_adapters_have_prefixes_of_their_own() -> None:
    world = World(host_only)
    owners = [(b"", ""), (b"t" * 16, ""), (b"u" * 16, ""), (b"", "red"), (b"", "blue")]
    for tenant, adapter in owners:
        assert world.ask(prompt_of(0), tenant, adapter) == 0
    for tenant, adapter in owners:
        assert world.ask(prompt_of(0), tenant, adapter) == 16


def test_a_full_host_hands_its_oldest_records_to_the_disk(tmp_path: Path) -> None:
    world = World(lambda engine: [host_tier(engine, 8), disk_tier(engine, tmp_path, 100)])
    for number in range(8):
        world.ask(prompt_of(number))
    assert [world.ask(prompt_of(number)) for number in range(8)] == [16] * 8
    host, disk = world.worker.step().load.kv_tiers
    assert host.num_evictions > 0
    assert disk.num_hits > 0
    assert host.num_bytes <= 8 * world.worker.tiers.max_record_bytes  # type: ignore[union-attr]


def test_a_restart_finds_what_is_on_the_disk(tmp_path: Path) -> None:
    def make_tiers(engine: Engine) -> Sequence[Tier]:
        return [disk_tier(engine, tmp_path, 100)]

    world = World(make_tiers)
    for number in range(8):
        world.ask(prompt_of(number))
    on_disk = world.worker.step().load.kv_tiers[0].num_bytes
    assert on_disk == 8 * 4 * 4096
    world.close()
    world = World(make_tiers)
    assert world.worker.step().load.kv_tiers[0].num_bytes == on_disk
    assert [world.ask(prompt_of(number)) for number in range(8)] == [16] * 8


def test_a_decode_worker_asks_for_less_of_a_prompt_whose_beginning_is_in_a_tier() -> None:
    world = World(host_only)
    for number in range(6):
        world.ask(prompt_of(number))
    spec = SequenceSpec("other", prompt_of(0), SAMPLING)
    world.worker.open(0, 99, spec, KvSource.PREFILL)
    events = []
    while not events:
        events = [found.event for found in world.worker.step().events]
        world.run_jobs()
    (offered,) = events
    assert isinstance(offered, Offered)
    assert offered.num_cached_tokens == 16


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_a_fetch_for_a_prompt_with_few_blocks_leaves_those_that_running_ones_need(
    num_left: int,
) -> None:
    world = World(host_only, replace(SMALL, swap_bytes=1 << 20))
    for number in range(6):
        world.ask(prompt_of(number))
    pool, state = world.worker.pool, world.worker.core._state
    filler = pool.lease(b"", range(900, 960), pool.block_size * (pool.num_blocks - num_left))
    assert filler is not None
    state.served_prefixes["filler"] = filler
    assert pool.num_available == num_left
    world.worker.open(0, 99, SequenceSpec("other", prompt_of(0), SAMPLING), KvSource.PREFILL)
    world.step()
    # One is for the growth of each sequence.
    assert pool.num_available == min(num_left, state.num_growing_places) == min(num_left, 1)
    world.settle()
    assert state.groups[0, 99].stage is Stage.AWAITING_KV


def test_a_tier_that_does_not_answer_is_switched_off_and_the_prompt_computed() -> None:
    world = World(host_only)
    for number in range(6):
        world.ask(prompt_of(number))
    handle = world.open(prompt_of(0))
    for _ in range(20):
        world.step()
    assert handle not in world.over
    world.now_s += 200.0  # the test's prompts take a second a token: 2 s are not too late there
    while handle not in world.over:
        world.step()
    (load,) = world.worker.step().load.kv_tiers
    assert load.off_reason == "no answer within 200.0 s"
    world.settle()
    world.check()
    assert world.cached[handle] == 0
    # It answers again, and is measured.
    for _ in range(2):
        world.now_s += 20.0
        world.settle()
    assert not world.worker.step().load.kv_tiers[0].off_reason
    assert world.ask(prompt_of(1)) == 16


class SlowHost(HostTier):
    """Each read takes time. The test's prompts take a second a token to compute."""

    pass_s: Callable[[float], None]
    block_s = 20.0

    def get(self, keys: Sequence[bytes]) -> Sequence[Record | None]:
        self.pass_s(len(keys) * self.block_s)
        return super().get(keys)


def test_a_tier_slower_than_computing_is_not_used_until_it_is_faster() -> None:
    now_s = [0.0]
    size = record_format(SimDecode(LoopbackHub(), lambda: 0.0, SMALL).engine).max_bytes
    tier = SlowHost(100 * size, size)
    tier.pass_s = lambda seconds: now_s.__setitem__(0, now_s[0] + seconds)
    world = World(lambda _engine: [tier])
    world.worker.core._tiers._clock = lambda: now_s[0]  # type: ignore[union-attr]
    world.worker.tiers._clock = lambda: now_s[0]  # type: ignore[union-attr]
    for level in world.worker.core._tiers._costs.reads:  # type: ignore[union-attr]
        for num_blocks in (1, 8):
            level.observe(num_blocks * size, num_blocks * tier.block_s)
    for number in (*range(6), *range(6)):
        world.ask(prompt_of(number))
    (load,) = world.worker.step().load.kv_tiers
    assert (load.pays, load.num_bytes, load.num_hits, load.num_misses) == (False, 0, 0, 0)
    tier.block_s = 0.1
    for _ in range(200):
        now_s[0] += 2000.0
        world.settle()
    for number in range(6):
        world.ask(prompt_of(number))
    (load,) = world.worker.step().load.kv_tiers
    assert load.pays
    assert load.num_bytes > 0


def test_blocks_of_an_aborted_fetch_are_anothers_at_once() -> None:
    """The tier's thread is late: it comes to the fetch when its blocks have others' KV."""
    world = World(host_only)
    for number in range(6):
        world.ask(prompt_of(number))
    aborted = world.open(prompt_of(0))
    world.step()
    assert world.worker.core._state.groups[0, aborted].stage is Stage.FETCHING
    world.abort(aborted)
    # Prompts of which nothing is in a tier, and that need all blocks.
    others = [world.open(prompt_of(number, 19)) for number in (20, 21)]
    world.step()
    assert world.worker.core._state.groups[0, others[0]].num_computed_tokens > 16
    world.run_jobs()
    world.settle()
    world.check()
    assert aborted not in world.cached
    assert world.worker.pool.counts().leased == 0


def test_a_cancelled_fetch_says_nothing_of_its_tier() -> None:
    world = World(host_only)
    for number in range(6):
        world.ask(prompt_of(number))
    before = world.worker.step().load.kv_tiers[0].lost_ms
    aborted = world.open(prompt_of(0))
    world.step()
    world.abort(aborted)
    world.step()
    world.now_s += 1.0
    world.settle()
    assert world.worker.step().load.kv_tiers[0].lost_ms == before
    assert not world.worker.core._tiers._fetching  # type: ignore[union-attr]


def test_what_was_cached_while_no_tier_was_used_is_saved_later() -> None:
    world = World(host_only)
    costs = world.worker.core._tiers._costs  # type: ignore[union-attr]
    costs.pays = lambda _level: False  # type: ignore[method-assign]
    for number in range(3):
        world.ask(prompt_of(number))
    assert world.worker.step().load.kv_tiers[0].num_bytes == 0
    costs.pays = lambda _level: True  # type: ignore[method-assign]
    world.settle()
    assert world.worker.step().load.kv_tiers[0].num_bytes > 0


def window_world() -> World:
    """Of windowed layers with fewer slots than a prompt has blocks: its first records have the KV
    of the other layers alone."""
    world = World(host_only, WINDOWS)
    for number in range(4):
        world.ask(prompt_of(number, 61))
    return world


def test_windowed_layers_resume_where_their_window_is_whole() -> None:
    world = window_world()
    (level,) = world.worker.tiers.levels if world.worker.tiers else ()
    kinds = {key[-1] for key in level.tier._records}  # type: ignore[attr-defined]
    assert kinds == {0, 1}
    assert world.ask(prompt_of(0, 61)) == 60
    # Of a short prefix, the records at the end lack the windowed layers.
    assert world.ask(prompt_of(1, 10)) == 0


@pytest.mark.parametrize("num_shared", range(0, 61, 5))
def test_layers_of_two_kinds_get_their_own_kv_for_each_shared_prefix(num_shared: int) -> None:
    """As LMCache#4247: prompts of a hybrid model that share a prefix were answered from KV that was
    stored in one form for layers of both kinds. Models with states are refused tiers."""
    world = window_world()
    for number in range(2):
        tail = prompt_of(70 + number, 61 - num_shared)
        world.ask((*prompt_of(number, 61)[:num_shared], *tail))
    assert world.ask(prompt_of(0, 61)) > 0


def test_a_prompt_that_was_to_be_computed_here_still_is_after_its_fetch() -> None:
    """The threshold may fall meanwhile, but there are no windowed layers' slots for a ticket."""
    world = window_world()
    costs = world.worker.core._costs
    costs.policy = replace(costs.policy, default_threshold=60)
    spec = SequenceSpec("other", (*prompt_of(0, 61)[:41], *range(8)), SAMPLING)
    world.worker.open(0, 99, spec, KvSource.PREFILL)
    world.step()
    assert world.worker.core._state.groups[0, 99].stage is Stage.FETCHING
    costs.policy = replace(costs.policy, default_threshold=0)
    events = []
    while not events:
        world.run_jobs()
        events = [found.event for found in world.worker.step().events]
    assert isinstance(events[0], LocalPrefill)


@pytest.mark.parametrize("place", [0, 14])
def test_windowed_layers_take_all_of_a_fetch_or_nothing(place: int) -> None:
    world = window_world()
    handle = world.open(prompt_of(0, 61))
    world.step()
    fetch = world.worker.core._state.groups[0, handle].fetch  # type: ignore[union-attr]
    assert fetch is not None
    (level,) = world.worker.tiers.levels if world.worker.tiers else ()
    level.tier.remove(fetch.blocks[place].record_key)
    world.settle()
    world.check()
    assert world.cached[handle] == 0


def test_long_sessions_that_return_beside_others_get_their_own_kv(tmp_path: Path) -> None:
    """As LMCache#4385: sessions were paged to the disk while short requests ran, and answered with
    others' facts when they returned. No record is evicted there."""
    shape = replace(SMALL, num_blocks=24)
    world = World(lambda engine: [host_tier(engine, 12), disk_tier(engine, tmp_path, 999)], shape)
    rng = random.Random(4385)
    sessions = [list(prompt_of(number, 21)) for number in range(5)]
    for _ in range(3):
        for session in sessions:
            handles = [world.open(prompt_of(rng.randrange(50, 90), 5)) for _ in range(2)]
            handle = world.open(tuple(session))
            while not {handle, *handles} <= world.over:
                world.step()
                world.run_jobs()
            session.extend((*world.said[handle], *([rng.randrange(VOCAB - 1)] * 3)))
            world.settle()
            world.check()
    host, disk = world.worker.step().load.kv_tiers
    assert disk.num_hits > 0
    assert host.num_hits + disk.num_hits > 60


def test_blocks_that_are_used_again_before_they_are_copied_are_not_kept() -> None:
    """As vllm#45704 and vllm#29870: copies ran while the blocks already had others' KV."""
    world = World(host_only)
    for number in range(12):
        handle = world.open(prompt_of(number))
        while handle not in world.over:
            world.step()
    world.settle()
    for number in range(12):
        world.ask(prompt_of(number))


@pytest.mark.parametrize("num_tokens", range(14, 19))
def test_a_turn_whose_end_is_the_end_of_a_block_is_kept_without_its_last_token(
    num_tokens: int,
) -> None:
    """As vllm#54193: the KV of the last token of an answer was never computed, and was kept."""
    world = World(host_only)
    turn = prompt_of(0, num_tokens)
    world.ask(turn)
    said = world.said[1]
    for number in range(1, 6):
        world.ask(prompt_of(number))
    num_cached = world.ask((*turn, *said, 5, 6, 7))
    assert num_cached == (num_tokens + NUM_OUTPUT - 1) // 4 * 4


def test_wrong_records_in_host_memory_are_not_used() -> None:
    """Each record is swapped with that of another prompt, under the same key."""
    world = World(host_only)
    for number in range(6):
        world.ask(prompt_of(number))
    (level,) = world.worker.tiers.levels if world.worker.tiers else ()
    records = level.tier._records  # type: ignore[attr-defined]
    values = list(records.values())
    records.update(zip(list(records), values[4:] + values[:4], strict=True))
    assert world.ask(prompt_of(0)) == 0
    assert level.num_bad_records == 1


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(6)]
)
def test_streams_over_both_tiers_are_right_whatever_happens_to_workers_and_clients(
    seed: int,
) -> None:
    async def main() -> None:
        system = System(
            seed,
            num_prefill=2,
            num_decode=2,
            prefill_shape=SimShape(block_size=4, num_blocks=30, host_blocks=200),
            decode_shape=SimShape(num_blocks=40, host_blocks=100),
        )
        rng = system.rng
        specs, histories = [], []

        async def client(number: int) -> None:
            said = [number % 4] * 20
            for turn in range(4):
                spec = SequenceSpec(f"r{number}-{turn}", tuple(said), SAMPLING, arrival_ns=number)
                history = History()
                specs.append(spec)
                histories.append(history)
                await system.request(spec, history)
                said += [*history.token_ids(), rng.randrange(VOCAB), number % 4]
                await asyncio.sleep(rng.uniform(0, 0.5))

        clients = [asyncio.create_task(client(number)) for number in range(16)]
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        for cancelled in rng.sample(clients, 3):
            cancelled.cancel()
        if seed % 2:
            await system.prefills[1].kill()
            await system.decodes[1].kill()
        await asyncio.gather(*clients, return_exceptions=True)
        await system.close()
        nodes = [node for node in (*system.prefills, *system.decodes) if not node.is_dead]
        loads = [tier for node in nodes for tier in node.worker.step().load.kv_tiers]
        assert sum(load.num_hits for load in loads) > 0
        for spec, history in zip(specs, histories, strict=True):
            history.check([oracle_tokens(spec.prompt_token_ids, SAMPLING, VOCAB)])

    run_virtual(main())


@pytest.mark.parametrize("shape", [SMALL, WINDOWS], ids=["full", "windows"])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_of_saves_fetches_and_aborts_keeps_blocks_and_tokens(
    seed: int, shape: SimShape, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("tiers")
    num_host, num_disk = rng.randint(1, 20), rng.randint(1, 60)
    world = World(
        lambda engine: [host_tier(engine, num_host), disk_tier(engine, path, num_disk)], shape
    )
    tenants = (b"", b"t" * 16)
    for _ in range(60):
        match rng.choice(("open", "step", "step", "job", "job", "abort", "late")):
            case "open":
                prompt = prompt_of(rng.randrange(6), rng.randint(1, 26))
                world.open(prompt, rng.choice(tenants), rng.choice(("", "", "red")))
            case "step":
                world.step()
            case "job":
                rng.choice(world.worker.runners).run()
            case "abort" if world.prompts.keys() - world.over:
                world.abort(rng.choice(sorted(world.prompts.keys() - world.over)))
            case "late":
                world.now_s += rng.choice((0.1, 1.0, 5.0))
    world.settle()
    world.check()
    assert world.worker.pool.counts().leased == 0
    world.close()
