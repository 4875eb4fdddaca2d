"""The two tiers' cores and the channel between them, stepped in random order over many seeds, against the oracle."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from baton.engine.oracle import oracle_tokens
from baton.events import (
    Committed,
    Deferred,
    Failed,
    Offered,
    Preempted,
    PrefillsHere,
    Tokens,
)
from baton.types import FinishReason, Sampling, SequenceSpec
from decode_svc import core as decode
from kv_transfer.transport.loopback import LoopbackHub
from prefill_svc import core as prefill
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape

VOCAB = 1000


@dataclass
class Client:
    """A minimal gateway: places each request, again and again until it has ended."""

    rng: random.Random
    prefills: list[SimPrefill]
    decodes: list[SimDecode]
    now: float = 0.0
    waiting: list[SequenceSpec] = field(default_factory=list)
    live: dict[int, SequenceSpec] = field(default_factory=dict)
    home: dict[int, SimDecode] = field(default_factory=dict)
    outputs: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    finished: dict[str, FinishReason] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    next_handle: int = 0

    def place(self, spec: SequenceSpec) -> None:
        worker = self.rng.choice(self.decodes)
        self.next_handle += 1
        self.live[self.next_handle] = spec
        self.home[self.next_handle] = worker
        worker.submit(decode.Open(0, self.next_handle, spec, prefill_here=False))

    def cancel(self) -> None:
        handle = self.rng.choice(sorted(self.live))
        spec = self.live.pop(handle)
        self.finished[spec.request_id] = FinishReason.NONE
        self.home[handle].submit(decode.Abort(0, handle))
        for worker in self.prefills:
            worker.submit(prefill.Abort(str(handle)))

    def step_decode(self, worker: SimDecode) -> None:
        for addressed in worker.step().events:
            self.seen.add(type(addressed.event).__name__)
            if addressed.handle in self.live:
                self.take(addressed.handle, addressed.event)

    def take(self, handle: int, event: object) -> None:
        spec = self.live[handle]
        match event:
            case Offered(ticket, num_cached):
                self.rng.choice(self.prefills).submit(
                    prefill.Submit(str(handle), spec, ticket, num_cached)
                )
            case Tokens(token_index, samples, finish):
                for index, sample in enumerate(samples, start=token_index):
                    self.put(spec, index, sample.token_id)
                if finish is not FinishReason.NONE:
                    self.finished[spec.request_id] = finish
                    del self.live[handle]
            case Deferred() | Preempted():
                del self.live[handle]
                self.waiting.append(self.resumed(spec))
            case Failed():
                del self.live[handle]
                self.failed[spec.request_id] = event
            case Committed() | PrefillsHere():
                pass

    def step_prefill(self, worker: SimPrefill) -> None:
        for event in worker.step().events:
            self.seen.add(type(event).__name__)
            spec = self.live.get(int(event.key))
            if spec is None:
                continue
            if isinstance(event, prefill.PrefillFailed):
                self.failed[spec.request_id] = Failed(
                    event.error.reason, event.error.message, False
                )
                self.home[int(event.key)].submit(decode.Abort(0, int(event.key)))
                del self.live[int(event.key)]
                continue
            self.put(spec, len(spec.output_token_ids), event.sample.token_id)
            if event.finish is not FinishReason.NONE:
                self.finished[spec.request_id] = event.finish
                del self.live[int(event.key)]
                self.home[int(event.key)].submit(decode.Abort(0, int(event.key)))

    def put(self, spec: SequenceSpec, index: int, token_id: int) -> None:
        assert self.outputs[spec.request_id].setdefault(index, token_id) == token_id

    def resumed(self, spec: SequenceSpec) -> SequenceSpec:
        output = self.outputs[spec.request_id]
        known = tuple(output[i] for i in range(len(output)))
        return spec.extended(known[len(spec.output_token_ids) :])

    def check_integrity(self) -> None:
        for worker in (*self.prefills, *self.decodes):
            worker.pool.check_integrity()

    def run(self, num_cancels: int = 0, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            self.now += 0.01
            if not self.live and not self.waiting:
                break
            if self.waiting and self.rng.random() < 0.5:
                self.place(self.waiting.pop(0))
            if num_cancels and self.live and self.rng.random() < 0.02:
                num_cancels -= 1
                self.cancel()
            if self.rng.random() < 0.6:
                self.step_decode(self.rng.choice(self.decodes))
            else:
                self.step_prefill(self.rng.choice(self.prefills))
            self.check_integrity()
        else:
            pytest.fail(f"no end: {len(self.live)} live, {len(self.waiting)} waiting")

    def quiet(self) -> None:
        """A few more rounds for aborts to settle; then nothing may be held by anyone."""
        for _ in range(4):
            for decoder in self.decodes:
                self.step_decode(decoder)
            for prefiller in self.prefills:
                self.step_prefill(prefiller)
        for worker in (*self.prefills, *self.decodes):
            assert worker.pool.counts().leased == 0
            worker.pool.check_integrity()
        assert all(prefiller.sender.num_open == 0 for prefiller in self.prefills)
        assert all(decoder.tickets.num_open == 0 for decoder in self.decodes)


def draw_spec(rng: random.Random, index: int) -> SequenceSpec:
    prefix = [[1] * 20, [2] * 9, []][rng.randrange(3)]
    prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))))
    is_greedy = rng.random() < 0.5
    sampling = Sampling(
        temperature=0.0 if is_greedy else 0.7,
        seed=rng.getrandbits(64),
        presence_penalty=rng.choice([0.0, 0.5]),
        max_tokens=rng.randint(1, 30),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=frozenset(rng.sample(range(VOCAB), 20)),
    )
    return SequenceSpec(
        f"r{index}",
        prompt,
        sampling,
        tenant=rng.choice([b"", b"t"]),
        priority=rng.choice([0, 0, 1]),
        arrival_ns=index,
    )


def make(seed: int, *, decode_shape: SimShape, prefill_shape: SimShape, num: int) -> Client:
    hub = LoopbackHub()
    client = Client(random.Random(seed), [], [])
    client.prefills += [
        SimPrefill(hub, lambda: client.now, prefill_shape, f"p{i}") for i in range(num)
    ]
    client.decodes += [
        SimDecode(hub, lambda: client.now, decode_shape, f"d{i}", seed=i) for i in range(num)
    ]
    return client


SHAPES = [
    pytest.param(SimShape(), SimShape(), id="roomy"),
    pytest.param(SimShape(num_blocks=24), SimShape(block_size=7), id="decode-full"),
    pytest.param(SimShape(block_size=3), SimShape(num_blocks=18), id="prefill-full"),
    pytest.param(
        SimShape(num_blocks=30, max_local_prefill_tokens=12, max_num_batched_tokens=8),
        SimShape(max_num_batched_tokens=5),
        id="small-chunks-local-prefill",
    ),
    pytest.param(
        SimShape(enable_prefix_caching=False, max_num_seqs=3),
        SimShape(block_size=16),
        id="no-cache",
    ),
]


def expected(specs: list[SequenceSpec]) -> Iterator[tuple[str, list[int]]]:
    for spec in specs:
        yield spec.request_id, oracle_tokens(spec.prompt_token_ids, spec.sampling, VOCAB)


@pytest.mark.parametrize(("decode_shape", "prefill_shape"), SHAPES)
@pytest.mark.parametrize("seed", range(12))
def test_two_tiers_give_what_one_request_alone_gives(
    seed: int, decode_shape: SimShape, prefill_shape: SimShape
) -> None:
    client = make(seed, decode_shape=decode_shape, prefill_shape=prefill_shape, num=1 + seed % 2)
    specs = [draw_spec(client.rng, index) for index in range(20)]
    client.waiting += specs
    client.run()
    client.quiet()
    assert not client.failed
    for request_id, tokens in expected(specs):
        output = client.outputs[request_id]
        assert [output[i] for i in range(len(output))] == tokens


@pytest.mark.parametrize("seed", range(20))
def test_cancels_at_any_moment_leave_no_block_behind_and_disturb_nobody(seed: int) -> None:
    client = make(
        seed, decode_shape=SimShape(num_blocks=40), prefill_shape=SimShape(block_size=8), num=2
    )
    specs = [draw_spec(client.rng, index) for index in range(24)]
    client.waiting += specs
    client.run(num_cancels=10)
    client.quiet()
    assert not client.failed
    for request_id, tokens in expected(specs):
        output = client.outputs[request_id]
        got = [output[i] for i in range(len(output))]
        if client.finished[request_id] is FinishReason.NONE:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens


def test_memory_pressure_preempts() -> None:
    seen: set[str] = set()
    for seed in range(6):
        client = make(seed, decode_shape=SimShape(num_blocks=24), prefill_shape=SimShape(), num=1)
        client.waiting += [draw_spec(client.rng, index) for index in range(20)]
        client.run()
        seen |= client.seen
    assert {"Preempted", "Deferred", "Committed", "Offered", "Tokens", "Prefilled"} <= seen


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_a_fault_in_a_step_is_charged_to_its_request_alone(tier: str) -> None:
    poison = 777
    shape = SimShape(poison_token_id=poison)
    client = make(
        3,
        decode_shape=shape if tier == "decode" else SimShape(),
        prefill_shape=shape if tier == "prefill" else SimShape(),
        num=1,
    )
    specs = [draw_spec(client.rng, index) for index in range(10)]
    specs = [s for s in specs if poison not in s.prompt_token_ids]
    sampling = Sampling(max_tokens=8)
    prompt = (
        (5, poison, 6)
        if tier == "prefill"
        else next(
            (5, n) for n in range(VOCAB) if oracle_tokens((5, n), sampling, VOCAB)[1] == poison
        )
    )
    client.waiting += [*specs[:5], SequenceSpec("bad", prompt, sampling), *specs[5:]]
    client.run()
    client.quiet()
    assert client.failed["bad"].reason == "ENGINE_FAULT"
    for request_id, tokens in expected(specs):
        if poison in tokens[:-1]:
            continue
        output = client.outputs[request_id]
        assert [output[i] for i in range(len(output))] == tokens
