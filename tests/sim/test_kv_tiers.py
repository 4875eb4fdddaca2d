"""Workers with tiers of KV, under the oracle engine: a wrong block in a tier's answer changes the
output."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort
from baton.events import Failed, LocalPrefill, Tokens, is_last
from baton.types import KvSource, Sampling, SequenceSpec
from engine.interface import Engine
from engine.kv.tiers.interface import Tier
from engine.oracle import OracleLayers, oracle_tokens
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.kv_tiers import disk_tier, host_tier
from tests.support.sim_tiers import SimDecode, SimShape
from worker_core.commands import StreamCommand

VOCAB, NUM_OUTPUT = 1000, 3
SAMPLING = Sampling(max_tokens=NUM_OUTPUT)
#: Of 12 blocks of 4 tokens: two prompts of 16 at a time.
SMALL = SimShape(num_blocks=12, max_num_seqs=4, max_num_launches=1)
WINDOWS = SimShape(
    num_blocks=16,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    layers=OracleLayers(6),
    has_window_slots=True,
)

MakeTiers = Callable[[Engine], Sequence[Tier]]


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
    world = World(lambda _engine: ())
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
