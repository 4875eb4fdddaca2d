"""Models that have layers with a state: the state is that of the sequence's last token, wherever
it runs, whatever runs beside it, and whatever became of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import AdapterError, ConfigError, EngineFault
from baton.types import BeamParams, EarlyStopping, KvLayout, Sampling, SequenceSpec
from engine.cuda.warm_up import warm_up
from engine.interface import Batch, SampleRow, SequenceSlice, forward_guarded
from engine.kv.groups.state import STATE
from engine.kv.layout import groups_of
from engine.kv.tensors.copy_order import CopyOrder
from engine.kv.tensors.device_states import DeviceStates
from engine.ranks import followers
from engine.ranks.mesh import Degrees
from engine.torch.engine import TorchEngine
from engine.torch.sequence_states import SequenceStates
from engine.transformers import states
from kv_transfer.transport.loopback import LoopbackHub
from tests.engine.transformers.conftest import NUM_TOKENS as NUM_EXPECTED
from tests.engine.transformers.conftest import Case, load, prompts
from tests.support.architectures import VOCAB_SIZE
from tests.support.engines import load_engine
from tests.support.sim_client import Choice, SimClient
from tests.support.sim_tiers import SimDecode, SimPrefill, SimShape

CaseOf = Callable[[str], Case]

GREEDY = Sampling()
#: Mamba 2, Mamba 1 and the gated delta rule.
FEW = ("granitemoehybrid", "jamba", "qwen3_next")
QUICK = "jamba"


def of(*names: str) -> pytest.MarkDecorator:
    """Run a test for each of these; all but the quickest are slow."""
    slow = pytest.mark.slow
    found = [name if name == QUICK else pytest.param(name, marks=slow) for name in names]
    return pytest.mark.parametrize("name", found)


each = of(*FEW)
TABLE = range(8, 12)
#: Kinds of which the rest of the model has the same bits in any batch, too.
BATCH_FREE = ("granitemoehybrid", "jamba", "olmo_hybrid")


def logits(
    engine: TorchEngine, new: Sequence[int], start: int, beside: Sequence[SequenceSlice] = ()
) -> torch.Tensor:
    """After each new token of the sequence of TABLE."""
    rows = tuple(SampleRow(offset, GREEDY, (), 0) for offset in range(len(new)))
    return engine.logits(Batch((*beside, SequenceSlice(tuple(new), start, TABLE, rows))))


@of(*BATCH_FREE)
def test_what_runs_beside_a_sequence_changes_no_bit(name: str, case_of: CaseOf) -> None:
    engine, prompt = case_of(name).engine, prompts()[2]
    other = SequenceSlice(tuple(prompt[:9]), 0, range(12, 16))
    for start, end in ((0, 17), (17, 29), (29, 30)):
        alone = logits(engine, prompt[start:end], start)
        assert torch.equal(logits(engine, prompt[start:end], start, [other]), alone)


#: Of these, a layer of each class of code.
KINDS = ("granitemoehybrid", "jamba", "lfm2", "qwen3_next", "olmo_hybrid")


def one_token_each(tokens: Sequence[int], lengths: Sequence[int]) -> Batch:
    """A step of sequences in blocks of their own, of which `lengths` tokens have states."""
    row = SampleRow(0, GREEDY, (), 0)
    return Batch(
        tuple(
            SequenceSlice((token,), length, range(4 * index, 4 * index + 4), (row,))
            for index, (token, length) in enumerate(zip(tokens, lengths, strict=True))
        )
    )


def begun(engine: TorchEngine, texts: Sequence[Sequence[int]]) -> list[int]:
    """After a step for each text; the likeliest next tokens."""
    tokens = []
    for index, text in enumerate(texts):
        table = range(4 * index, 4 * index + 4)
        row = SampleRow(len(text) - 1, GREEDY, (), 0)
        step = Batch((SequenceSlice(tuple(text), 0, table, (row,)),))
        tokens.append(int(engine.logits(step)[0].argmax()))
    return tokens


@of(*KINDS)
def test_rows_of_one_token_go_through_a_layer_together(
    name: str, case_of: CaseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many as are allowed; the tokens are transformers'."""
    case, seen = case_of(name), list[int]()
    advance = states._LayerStates._advance

    def note(layer: Any, hidden: torch.Tensor, part: SequenceStates) -> torch.Tensor:
        seen.append(part.num_sequences)
        return advance(layer, hidden, part)

    monkeypatch.setattr(states, "most_rows", lambda *_: 3)
    engine = load(case.path)
    texts = [prompts()[index] for index in (0, 1, 2, 1)]
    tokens = [[token] for token in begun(engine, texts)]
    monkeypatch.setattr(states._LayerStates, "_advance", note)
    for step in range(NUM_EXPECTED - 1):
        lengths = [len(text) + step for text in texts]
        found = engine.logits(one_token_each([own[-1] for own in tokens], lengths))
        for own, row in zip(tokens, found, strict=True):
            own.append(int(row.argmax()))
    assert tokens == [case.expected[index] for index in (0, 1, 2, 1)]
    assert set(seen) == {3, 1}


@of(*KINDS)
def test_rows_that_go_together_have_the_bits_of_each_alone(
    name: str, case_of: CaseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In layers with a state: the rest of a model sees the same batch in both engines."""
    engine = case_of(name).engine
    monkeypatch.setattr(states, "most_rows", lambda *_: 1)
    one_by_one = load(case_of(name).path)
    texts = [prompts()[2][index : index + 9] for index in range(7)]
    tokens = begun(engine, texts)
    assert tokens == begun(one_by_one, texts)
    whole = one_token_each(tokens, [9] * 7)
    for num_rows in range(2, 8):
        batch = Batch(whole.slices[:num_rows])
        assert torch.equal(engine.logits(batch), one_by_one.logits(batch))


@of(*BATCH_FREE)
def test_rows_of_one_token_have_the_same_bits_in_any_batch(name: str, case_of: CaseOf) -> None:
    engine = case_of(name).engine
    texts = [prompts()[2][index : index + 9] for index in range(7)]
    whole = one_token_each(begun(engine, texts), [9] * 7)
    alone = [engine.logits(Batch((part,)))[0] for part in whole.slices]
    for num_rows in range(2, 8):
        found = engine.logits(Batch(whole.slices[:num_rows]))
        assert torch.equal(found, torch.stack(alone[:num_rows]))


def test_a_layer_gets_no_more_rows_than_have_the_bits_of_each_alone() -> None:
    layer = states.StateLayer("layer", (4, 2), (3,))

    def run(
        worse: int, is_state: bool, hidden: torch.Tensor, cache: states.LayerCache
    ) -> torch.Tensor:
        assert cache.conv is not None
        assert cache.recurrent is not None
        cache.conv += hidden.sum(-1, keepdim=True)
        output = hidden * cache.recurrent[:, None, :1]
        if len(hidden) == worse:
            (cache.recurrent if is_state else output)[1] += 1.0
        return output

    for worse, is_state in ((2, False), (5, True), (8, False), (9, False)):
        forward = partial(run, worse, is_state)
        assert states._most_rows(torch.randn(8, 1, 6), layer, forward) == worse - 1


@each
def test_a_step_that_is_thrown_away_may_be_run_again(name: str, case_of: CaseOf) -> None:
    """Also one of other tokens: what was computed by the first is gone."""
    engine, prompt = case_of(name).engine, prompts()[2]
    logits(engine, prompt[:11], 0)
    expected = logits(engine, prompt[11:20], 11)
    logits(engine, prompt[:5], 11)
    assert torch.equal(logits(engine, prompt[11:20], 11), expected)


@each
def test_a_fault_of_one_sequence_leaves_the_states_of_others(name: str, case_of: CaseOf) -> None:
    """The batch fails when samples are drawn, and is run one by one."""
    case, prompt = case_of(name), prompts()[2]
    tokens = list(prompt)
    logits(case.engine, prompt[:-1], 0)
    while len(tokens) < len(prompt) + 4:
        start = len(tokens) - 1
        row = SampleRow(0, GREEDY, tuple(tokens), len(prompt))
        nothing = SampleRow(0, GREEDY, (3,), 1, allowed=bytes(VOCAB_SIZE // 8))
        faulty = SequenceSlice((3,), 0, range(12, 16), (nothing,))
        fine = SequenceSlice((tokens[-1],), start, TABLE, (row,))
        failed, outcome = forward_guarded(case.engine, Batch((faulty, fine)))
        assert isinstance(failed, EngineFault)
        assert isinstance(outcome, tuple)
        tokens.append(outcome[0].token_id)
    assert tokens[len(prompt) :] == case.expected[2][:4]


@pytest.mark.slow
def test_states_that_are_not_there_are_a_fault(case_of: CaseOf) -> None:
    """Neither a step nor a handoff goes on from the states after another token."""
    engine, prompt = case_of(FEW[0]).engine, prompts()[2]
    layout = engine.spec.layout
    logits(engine, prompt[:11], 0)
    with pytest.raises(EngineFault, match="after 10 tokens"):
        logits(engine, prompt[10:12], 10)
    data = memoryview(bytearray(groups_of(layout).record_bytes))
    with pytest.raises(ValueError, match="after 12 tokens"):
        engine.kv.pack(TABLE, groups_of(layout).records_after(12)[0], data)
    with pytest.raises(ValueError, match="is no state"):
        engine.kv.pack(
            TABLE,
            replace(groups_of(layout).records_after(11)[0], first_token=9, num_tokens=2),
            data,
        )
    engine.kv.pack(TABLE, groups_of(layout).records_after(11)[0], data)
    assert any(data)


NUM_TOKENS = 10
SHAPE = SimShape(
    # Fewer blocks than the sequences want: they are swapped, or placed anew.
    num_blocks=20,
    block_size=4,
    max_num_seqs=9,
    max_num_batched_tokens=16,
    max_local_prefill_tokens=3,
    max_num_launches=1,
    min_fetched_tokens=1,
)


def engine_of(path: Path, shape: SimShape) -> TorchEngine:
    return load_engine(
        str(path),
        model_impl="transformers",
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )


def requests() -> list[SequenceSpec]:
    """Greedy ones of common beginnings; then choices, and beams."""
    generator = random.Random(5)
    common = [generator.randrange(VOCAB_SIZE) for _ in range(21)]
    texts = [*prompts(), common, [*common, 5], [*common[:13], 80, 2, 3]]
    greedy = Sampling(max_tokens=NUM_TOKENS)
    seeded = Sampling(temperature=0.9, seed=5, max_tokens=NUM_TOKENS)
    beams = Sampling(
        max_tokens=NUM_TOKENS, beam=BeamParams(3, 1.0, EarlyStopping.NEVER, num_returned=2)
    )
    return [
        *(SequenceSpec(f"r{i}", tuple(t), greedy, arrival_ns=i) for i, t in enumerate(texts)),
        SequenceSpec("n", tuple(common[3:]), seeded, arrival_ns=7, num_choices=3),
        SequenceSpec("short", (7,), seeded, arrival_ns=8, num_choices=2),
        SequenceSpec("b", tuple(common[:17]), beams, arrival_ns=9, num_choices=2),
    ]


def outputs(client: SimClient, specs: Sequence[SequenceSpec]) -> dict[Choice, list[int]]:
    client.waiting += specs
    client.run()
    client.quiet()
    assert not client.failed
    choices = [Choice(spec.request_id, c) for spec in specs for c in range(spec.num_choices)]
    return {choice: client.output_of(choice) for choice in choices}


def alone(path: Path) -> dict[Choice, list[int]]:
    """What each request gets on one worker, one at a time."""
    client, hub = SimClient(random.Random(0), [], []), LoopbackHub()
    own = SimShape(num_blocks=90, block_size=16, max_local_prefill_tokens=200, max_num_launches=1)
    engine = engine_of(path, own)
    client.decodes.append(SimDecode(hub, lambda: client.now, own, given_engine=engine))
    client.prefills.append(SimPrefill(hub, lambda: client.now))  # of which nothing is asked
    found: dict[Choice, list[int]] = {}
    for spec in requests():
        found |= outputs(client, [spec])
    return found


def tiers(path: Path, seed: int, swap_bytes: int) -> SimClient:
    """A prefill worker and two decode workers, which sequences move between at any token."""
    client = SimClient(random.Random(seed), [], [], move_rate=0.1)
    hub = LoopbackHub()
    shape = SimShape(num_blocks=40, block_size=8, max_num_seqs=6, max_num_launches=1)
    prefill = engine_of(path, shape)
    client.prefills.append(SimPrefill(hub, lambda: client.now, shape, given_engine=prefill))
    for index in range(2):
        own = replace(SHAPE, swap_bytes=swap_bytes)
        engine = engine_of(path, own)
        client.decodes.append(
            SimDecode(hub, lambda: client.now, own, f"d{index}", given_engine=engine)
        )
    return client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swap_bytes", "name"),
    [
        (0, FEW[0]),
        (1 << 20, FEW[0]),
        (1 << 20, FEW[2]),
        pytest.param(1 << 20, FEW[1], marks=pytest.mark.long),
        *(pytest.param(0, name, marks=pytest.mark.long) for name in FEW[1:]),
    ],
)
def test_two_tiers_give_what_one_worker_gives(swap_bytes: int, name: str, case_of: CaseOf) -> None:
    """Handed over after their prompts, moved between tokens, swapped or placed anew where blocks
    are few, forked into choices and beams; no slot is left behind."""
    case = case_of(name)
    expected = alone(case.path)
    assert [expected[Choice(f"r{i}", 0)][:8] for i in range(3)] == case.expected
    client = tiers(case.path, 3, swap_bytes)
    assert outputs(client, requests()) == expected
    assert client.seen >= {"Committed", "HandedOff", "Paused", "Prefilled"}
    num_swaps = sum(worker.swap.num_swaps for worker in client.decodes)
    assert num_swaps if swap_bytes else "Preempted" in client.seen
    for worker in (*client.prefills, *client.decodes):
        assert STATE in worker.engine.kv.slot_tables
        assert set(worker.engine.kv.slot_tables[STATE].of_block) == {-1}


def on_device(
    _device: torch.device, layout: KvLayout, num_blocks: int, num_slots: int, order: CopyOrder
) -> dict[int, DeviceStates]:
    """Records of a pool as on a GPU, with the CPU in its place."""
    return {STATE: DeviceStates(layout, num_blocks, num_slots, torch.device("cpu"), order)}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [FEW[0], FEW[2]])
def test_states_in_a_devices_memory_give_the_same(
    name: str, case_of: CaseOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over, moved, swapped, forked."""
    case = case_of(name)
    expected = alone(case.path)
    monkeypatch.setattr(followers, "records_on", on_device)
    client = tiers(case.path, 3, 1 << 20)
    assert outputs(client, requests()) == expected
    assert client.seen >= {"Committed", "HandedOff", "Paused", "Prefilled"}
    assert sum(worker.swap.num_swaps for worker in client.decodes)
    for worker in client.decodes:
        assert isinstance(worker.engine.kv.records[STATE], DeviceStates)


@pytest.mark.slow
def test_a_worker_on_a_gpu_warms_up_before_sequences_have_states(case_of: CaseOf) -> None:
    engine = load_engine(
        str(case_of(QUICK).path),
        model_impl="transformers",
        num_blocks=10,
        block_size=4,
        max_num_seqs=3,
        progress=lambda _: None,
        on_plan=lambda _: None,
    )
    warm_up(engine, 4, 3, lambda _number, _of: None)
    table = engine.kv.slot_tables[STATE]
    assert not table.is_shared
    assert set(table.of_block) == {-1}


@pytest.mark.slow
def test_sequences_that_are_cancelled_leave_no_slot(case_of: CaseOf) -> None:
    client = tiers(case_of(FEW[0]).path, 4, 0)
    client.waiting += requests()
    client.run(num_cancels=8)
    client.quiet()
    for worker in (*client.prefills, *client.decodes):
        assert STATE in worker.engine.kv.slot_tables
        assert set(worker.engine.kv.slot_tables[STATE].of_block) == {-1}


@pytest.mark.slow
def test_a_prompt_is_found_by_no_other(case_of: CaseOf) -> None:
    """A block without the states at its end cannot be gone on from."""
    assert not load(case_of(FEW[0]).path).spec.shares_prefixes(1)


@pytest.mark.slow
def test_devices_and_ranks_that_such_layers_cannot_use_are_refused(case_of: CaseOf) -> None:
    from engine.transformers.source import TransformersModel

    source = TransformersModel(case_of(FEW[0]).path)
    source.check_ranks(Degrees(1), torch.device("cpu"))
    source.check_ranks(Degrees(1), torch.device("cuda"))
    source.check_ranks(Degrees(2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"device=cuda: 2 ranks share memory of the host"):
        source.check_ranks(Degrees(2), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"context_parallel_size=2: .*; leave it out"):
        source.check_ranks(Degrees(context=2), torch.device("cpu"))


@pytest.mark.slow
def test_an_adapter_is_refused(case_of: CaseOf, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no adapters here; merge the adapter into the model"):
        load(case_of(FEW[0]).path, lora_modules={"red": str(tmp_path)})
