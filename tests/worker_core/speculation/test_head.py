"""A head gets, with each token, the target's state of the position before it, whatever was
accepted, aborted or moved; and the tokens are those of the target alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.commands import Abort, HandOff, Pause
from baton.config import DecodeOptions
from baton.errors import (
    ConfigError,
    MissingTensor,
    ModelError,
    TensorMismatch,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from baton.events import Committed, Deferred, Failed, Offered, Paused, Preempted, Tokens
from baton.types import KvSource, Sampling, SequenceSpec
from engine.checkpoint import HeadFiles
from engine.choose_source import model_source
from engine.grammar import Grammar
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.memory_plan import MemoryPlan, format_bytes
from engine.torch.engine import TorchEngine
from engine.torch.head_runner import open_head
from engine.torch.hidden_states import MAX_IDLE_LAUNCHES, MAX_WAITING, HiddenStates
from engine.torch.medusa import open_medusa
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.engines import load_engine
from tests.support.grammar_walks import allowed_after, ids_of
from tests.support.sim_tiers import SimDecode, SimShape
from tests.support.tiny_heads import (
    MTP_LAYER,
    make_tiny_head,
    make_tiny_medusa,
    make_tiny_mtp_model,
)
from tests.support.tiny_models import Family, make_tiny_model
from worker_core.build import build_decode_engine
from worker_core.commands import Open, StreamCommand
from worker_core.speculation.head import HeadProposer
from worker_core.speculation.interface import NO_PROPOSAL, DraftRequest, Proposal, Proposer
from worker_core.speculation.medusa import MedusaProposer
from worker_core.speculation.speculator import Speculator, build_speculation

KINDS = ("eagle", "eagle3", "medusa")
SHAPE = SimShape(num_blocks=48, block_size=4)


def state_of(token_ids: Sequence[int], position: int) -> float:
    """What a target's state says here: the tokens up to its position."""
    return float(hash(tuple(token_ids[: position + 1])) % 1000003)


class CheckingHead:
    """A head that knows what it should be given. contexts: by block table, the tokens that it has
    KV of."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(
        self, batch: Batch, states: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[tuple[tuple[int, ...], ...], torch.Tensor]:
        drafts = []
        for part, own in zip(batch.slices, states, strict=True):
            (row,) = part.rows
            text = list(row.token_ids)
            assert text[-len(part.token_ids) :] == list(part.token_ids)
            first = len(text) - len(part.token_ids)
            wanted = [state_of(text, position - 1) for position in range(first, len(text))]
            assert own[:, 0].tolist() == wanted
            context = self.texts.setdefault(part.block_table[0], [])
            del context[part.start :]
            assert len(context) == part.start, "what lies before a slice was computed"
            context += part.token_ids
            assert text[len(text) - len(context) :] == context
            drafts.append(tuple((sum(text) + i) % 7 for i in range(num_tokens)))
        own_states = [
            [state_of(part.rows[0].token_ids, len(part.rows[0].token_ids) - 1)]
            for part in batch.slices
        ]
        return tuple(drafts), torch.tensor(own_states, dtype=torch.float64)


class CheckingMedusa:
    """Heads that know what they should be given."""

    num_heads = 4

    def draft(
        self,
        states: Sequence[torch.Tensor],
        rows: Sequence[Sequence[SampleRow]],
        num_tokens: int,
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        drafts = []
        for state, own in zip(states, rows, strict=True):
            text = list(own[0].token_ids)
            assert state.tolist() == [[state_of(text, len(text) - 2)]]
            places = [row.num_output_tokens for row in own]
            first = len(text) - own[0].num_prompt_tokens
            assert places == list(range(first, first + len(own)))
            drafts.append(
                tuple(
                    tuple((sum(text) + place + i) % 7 for i in range(num_tokens))
                    for place in places
                )
            )
        return tuple(drafts)


@pytest.mark.parametrize("is_medusa", [False, True])
@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_each_token_meets_the_state_before_it_whatever_was_accepted(
    is_medusa: bool, seed: int
) -> None:
    rng = random.Random(seed)
    states = HiddenStates(lambda _: None)
    num_blocks = rng.choice((40, 300))  # too few of them, or enough
    pool = BlockPool(num_blocks, whole_blocks(4), secret=bytes(32), enable_prefix_caching=False)
    widths = rng.choice(((), (3, 2), (2,)))
    proposer = (
        MedusaProposer(CheckingMedusa(), states, lambda: 0.0, widths)
        if is_medusa
        else HeadProposer(CheckingHead(), states, pool, lambda: 0.0, widths)
    )
    texts = {key: [rng.randrange(7) for _ in range(5)] for key in range(3)}
    drafts = dict.fromkeys(texts, NO_PROPOSAL)
    num_quiet = 0
    for _ in range(60):
        num_quiet = num_quiet - 1 if num_quiet else (MAX_IDLE_LAUNCHES + 2) * (rng.random() < 0.02)
        # A step of the target computes each sequence's last token, and its drafts.
        parts, rows = [], []
        for key, text in texts.items():
            if rng.random() < 0.2:
                continue  # it rests, or is paused
            chain, alternatives = drafts[key]
            paths = [chain]
            paths += [
                (*chain[:i], other) for i, others in enumerate(alternatives) for other in others
            ]
            for path in paths:
                new = [text[-1], *path]
                first = 0 if path is chain else len(path)
                asked = tuple(SampleRow(i, Sampling(), text, 3) for i in range(first, len(new)))
                parts.append(SequenceSlice(new, len(text) - 1, [0] * 40, asked, 3, key=key))
                along = [*text, *path]
                rows += [[state_of(along, len(text) - 1 + i)] for i in range(first, len(new))]
            right = rng.choice(paths)
            if right is chain:
                right = right[: rng.randint(0, len(right))]
            text += [*right, rng.randrange(7)]
            drafts[key] = NO_PROPOSAL
        if states.is_kept:
            found_states = torch.tensor(rows, dtype=torch.float64).view(-1, 1)
            states.on_states(Batch(tuple(parts)), found_states)
        asked_for = [
            DraftRequest(key, text, 3, rng.randint(1, 4), Sampling())
            for key, text in texts.items()
            if rng.random() < 0.7 and not num_quiet
        ]
        can_draft = states.is_kept
        estimates = proposer.estimate(asked_for)
        for request, estimate, found in zip(
            asked_for, estimates, proposer.propose(asked_for), strict=True
        ):
            assert isinstance(request.key, int)
            wanted = estimate.num_drafts if can_draft else 0
            num_found = len(found.token_ids)
            assert num_found == wanted or (num_blocks == 40 and not num_found)
            assert [1 + len(others) for others in found.alternatives[: len(widths)]] == list(
                widths[:num_found]
            )
            drafts[request.key] = found
        for key in texts:
            if key not in [request.key for request in asked_for]:
                drafts[key] = NO_PROPOSAL
        pool.check_integrity()
        if rng.random() < 0.1:
            proposer.forget(rng.randrange(3))
    for key in texts:
        proposer.forget(key)
    assert pool.counts().leased == 0
    assert len(states) == 0


def test_states_that_nobody_takes_do_not_pile_up() -> None:
    states = HiddenStates(lambda _: None)
    states.start()
    for position in range(3 * MAX_WAITING):
        row = SampleRow(0, Sampling(), (), 1)
        parts = [SequenceSlice((1,), position, [0], (row,), 1, key=key) for key in ("a", "b")]
        states.on_states(Batch(tuple(parts)), torch.full((2, 1), float(position)))
        states.take("b", range(position + 2))
    first, found = states.take("a", range(3 * MAX_WAITING + 1))
    assert (first, found[:, 0].tolist()) == (
        2 * MAX_WAITING,
        list(range(2 * MAX_WAITING, 3 * MAX_WAITING)),
    )


def test_states_are_kept_only_while_somebody_takes_them() -> None:
    watches: list[object] = []
    states = HiddenStates(watches.append)
    proposer = HeadProposer(
        CheckingHead(),
        states,
        BlockPool(8, whole_blocks(4), secret=bytes(32), enable_prefix_caching=False),
        lambda: 0.0,
    )

    def launch(num_tokens: int) -> list[int]:
        text = list(range(num_tokens))
        part = SequenceSlice(
            text[-1:], num_tokens - 1, [0], (SampleRow(0, Sampling(), text, 2),), 2, key="a"
        )
        if watches and watches[-1]:
            own = [[state_of(text, num_tokens - 1)]]
            states.on_states(Batch((part,)), torch.tensor(own, dtype=torch.float64))
        return [*text, num_tokens]

    def drafts_after(num_tokens: int) -> int:
        request = DraftRequest("a", launch(num_tokens), 2, 2, Sampling())
        if not proposer.estimate([request])[0].num_drafts:
            return 0
        return len(proposer.propose([request])[0].token_ids)

    assert watches == []
    # The first demand starts it, and a head that begins in the midst of an output waits.
    assert [drafts_after(length) for length in range(20, 29)] == [0] * 8 + [2]
    assert [drafts_after(length) for length in range(29, 32)] == [2] * 3
    for length in range(32, 32 + MAX_IDLE_LAUNCHES):
        launch(length)
    assert watches[-1] is not None
    launch(32 + MAX_IDLE_LAUNCHES)
    assert watches[-1] is None
    assert len(states) == 0
    # Again, from there on.
    assert [drafts_after(length) for length in range(80, 89)] == [0] * 8 + [2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), "llama")


def engine_of(target: Path, shape: SimShape = SHAPE) -> TorchEngine:
    return load_engine(
        str(target),
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_num_batched_tokens=64,
        on_plan=lambda _: None,
        progress=lambda _: None,
    )


def make_head(folder: Path, target: Path, kind: str) -> HeadFiles:
    """Random heads of any kind for a tiny Llama."""
    if kind == "medusa":
        return HeadFiles("medusa", make_tiny_medusa(folder, target))
    return HeadFiles("eagle", make_tiny_head(folder, target, kind))


def open_proposer(
    engine: TorchEngine, head: HeadFiles, max_num_seqs: int, widths: Sequence[int] = ()
) -> tuple[Proposer, HiddenStates, BlockPool]:
    """What drafts, and what it holds: Medusa heads hold no blocks."""
    if head.method == "medusa":
        heads, states = open_medusa(engine, head)
        pool = BlockPool(
            1, whole_blocks(SHAPE.block_size), secret=bytes(32), enable_prefix_caching=False
        )
        return MedusaProposer(heads, states, lambda: 0.0, widths), states, pool
    runner, states = open_head(engine, head, max_num_seqs)
    pool = BlockPool(
        runner.num_blocks,
        whole_blocks(runner.block_size),
        secret=bytes(32),
        enable_prefix_caching=False,
    )
    return HeadProposer(runner, states, pool, lambda: 0.0, widths), states, pool


class EagerDrafts:
    """Implements Speculation: as many drafts as may be, always; or, if rng is given, often enough
    the target's own tokens in their place, so that drafts of random heads are accepted, too."""

    max_num_drafts = 4

    def __init__(
        self,
        proposer: Proposer,
        right: dict[str, tuple[int, ...]],
        rng: random.Random,
    ) -> None:
        """right: what sequences get in the end, by their prompts' digits."""
        self._proposer, self._right, self._rng = proposer, right, rng
        self._paths: dict[Hashable, tuple[int, ...]] = {}
        """That end in an alternative which alone is right, of sequences that a grammar holds."""
        self.num_drafts = self.num_alternatives = self.num_followed = 0
        """Drafts that were made, right alternatives that were put in, and those of a grammar's
        sequences that the output went on from."""

    def is_due(self, key: Hashable) -> bool:  # noqa: ARG002
        return self._rng.random() < 0.9

    def plan(
        self,
        requests: Sequence[DraftRequest],
        num_rows: int,  # noqa: ARG002
        max_num_drafts: int,  # noqa: ARG002
    ) -> list[Proposal]:
        planned = []
        self._paths.clear()
        for request, proposal in zip(requests, self._proposer.propose(requests), strict=True):
            drafts, others = proposal
            self.num_drafts += len(drafts)
            text = self._right.get(str(list(request.token_ids[: request.num_prompt_tokens])), ())
            at = len(request.token_ids) - request.num_prompt_tokens
            own, place = text[at : at + len(drafts)], self._rng.randrange(5)
            allowed = allowed_after(request.sampling)
            chance = 1.0 if allowed else 0.5
            if place < len(own) and any(others[place : place + 1]) and self._rng.random() < chance:
                # The right token of a place is an alternative alone. At a token that the grammar
                # forbids the chain would end, and no alternative be looked at.
                able = ids_of(allowed(text[: at + place])) if allowed else (*drafts, 0, 1)
                wrong = next(t for t in able if t != own[place])
                if allowed:
                    self._paths[request.key] = own[: place + 1]
                drafts = (*own[:place], wrong, *drafts[place + 1 :])
                others = (*((),) * place, (*others[place][:1], own[place]))
                others = tuple(tuple(t for t in dict.fromkeys(o) if t != wrong) for o in others)
                self.num_alternatives += 1
                planned.append(Proposal(drafts, others))
            else:
                planned.append(Proposal(own) if self._rng.random() < 0.5 else proposal)
        return planned

    def record(self, key: Hashable, token_ids: Sequence[int]) -> None:
        # Without it the step gives what is right of the chain, and the token behind that.
        self.num_followed += key in self._paths and len(token_ids) > len(self._paths[key])

    def on_step_end(self, num_rows: int, num_drafts: int) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        self._proposer.forget(key)


#: What may come is another set of tokens after each one, as far as drafts go.
_FIVE_KINDS = Grammar.regex("([A-F][G-K][L-P][Q-U][V-Z]){6}").to_bytes()

#: Greedy and sampled ones, and one that a grammar holds to few tokens.
SPECS = [
    SequenceSpec(
        f"r{index}",
        tuple(range(3 + index, 12 + 2 * index)),
        Sampling(temperature=0.9 * (index % 2), seed=index, max_tokens=16 + index, grammar=grammar),
        arrival_ns=index,
    )
    for index, grammar in enumerate([b"", b"", b"", b"", _FIVE_KINDS])
]


class Workers:
    """Decode workers that draft by one head, joined by loopback."""

    def __init__(
        self,
        target: Path,
        head: HeadFiles,
        num: int,
        right: dict[str, tuple[int, ...]],
        shape: SimShape = SHAPE,
        widths: Sequence[int] = (),
    ) -> None:
        hub = LoopbackHub()
        self.workers, self.drafts, self.pools, self.states = [], [], [], []
        for index in range(num):
            engine = engine_of(target, shape)
            proposer, states, pool = open_proposer(engine, head, 8, widths)
            drafts = EagerDrafts(proposer, right, random.Random(index))
            worker = SimDecode(
                hub, lambda: 0.0, shape, f"d{index}", speculation=drafts, given_engine=engine
            )
            self.workers.append(worker)
            self.drafts.append(drafts)
            self.pools.append(pool)
            self.states.append(states)

    def check_empty(self) -> None:
        assert [pool.counts().leased for pool in self.pools] == [0] * len(self.pools)
        assert [len(states) for states in self.states] == [0] * len(self.states)


@pytest.fixture(scope="module")
def alone(target: Path) -> dict[int, tuple[int, ...]]:
    """What each sequence gets without drafts, one at a time."""
    worker = SimDecode(LoopbackHub(), lambda: 0.0, SHAPE, given_engine=engine_of(target))
    outputs: dict[int, list[int]] = {}
    for handle, spec in enumerate(SPECS):
        worker.submit(Open(0, handle, spec, KvSource.LOCAL))
        run(worker, outputs, {handle})
    return {handle: tuple(output) for handle, output in outputs.items()}


def run(worker: SimDecode, outputs: dict[int, list[int]], open_handles: set[int]) -> None:
    while open_handles:
        for event in worker.step().events:
            assert not isinstance(event.event, Failed), event.event
            if isinstance(event.event, Tokens):
                outputs.setdefault(event.handle, []).extend(s.token_id for s in event.event.samples)
                if event.event.finish:
                    open_handles.discard(event.handle)
        worker.pool.check_integrity()


def right_of(alone: dict[int, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {str(list(SPECS[handle].prompt_token_ids)): output for handle, output in alone.items()}


MTP_FAMILIES: tuple[Family, ...] = ("glm4_moe", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_a_layer_of_the_checkpoint_drafts_and_changes_no_token(
    tmp_path: Path, family: Family
) -> None:
    """Greedy and sampled, in chains and trees; half of its drafts are replaced by the tokens that
    come, for those of random weights are never right."""
    target = make_tiny_mtp_model(tmp_path / "target", family)
    alone: dict[int, list[int]] = {}
    plain = SimDecode(LoopbackHub(), lambda: 0.0, SHAPE, given_engine=engine_of(target))
    for handle in (0, 1):
        plain.submit(Open(0, handle, SPECS[handle], KvSource.LOCAL))
    run(plain, alone, {0, 1})
    right = right_of({handle: tuple(output) for handle, output in alone.items()})
    rig = Workers(target, HeadFiles("mtp", target), 1, right, widths=(3, 2))
    found: dict[int, list[int]] = {}
    for handle in (0, 1):
        rig.workers[0].submit(Open(0, handle, SPECS[handle], KvSource.LOCAL))
    run(rig.workers[0], found, {0, 1})
    assert found == alone
    assert rig.drafts[0].num_drafts > 10
    assert rig.drafts[0].num_alternatives > 0
    rig.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP_FAMILIES)
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_layer_of_the_checkpoint_says_what_its_weights_say(
    tmp_path: Path, family: Family, is_shared: bool
) -> None:
    """Compared with transformers' layer between norms and products by hand."""
    import transformers
    from safetensors.torch import load_file

    target = make_tiny_mtp_model(tmp_path / "target", family, is_shared=is_shared)
    tensors = load_file(target / "model.safetensors")
    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    own = {name.removeprefix(MTP_LAYER): x for name, x in tensors.items() if MTP_LAYER in name}
    layer = transformers.AutoModelForCausalLM.from_pretrained(
        target.with_name("target-deep"), dtype=torch.float32
    ).model
    layer.layers, layer.norm = layer.layers[-1:], torch.nn.Identity()
    layer.config.num_hidden_layers = 1

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + whole.config.rms_norm_eps)
        return x * scale * own[f"{name}.weight"]

    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    text, drafts = list(tokens), list[int]()
    with torch.no_grad():
        states = whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for _ in range(4):
            embedded = own["embed_tokens.weight"][torch.tensor(text[1:])]
            joined = torch.cat((normed(embedded, "enorm"), normed(states, "hnorm")), -1)
            inputs = joined @ own["eh_proj.weight"].T
            hidden = layer(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1:]
            logits = normed(hidden, "shared_head.norm") @ own["shared_head.head.weight"].T
            drafts.append(int(logits.argmax()))
            text.append(drafts[-1])
            states = torch.cat((states, hidden))
    assert drafts_of(target, HeadFiles("mtp", target), tokens, 4) == tuple(drafts)
    memory = model_source(target, "auto").head_memory(HeadFiles("mtp", target), "float32", 4)
    shared = 2 * whole.config.vocab_size * whole.config.hidden_size if is_shared else 0
    assert memory.weight_bytes == 4 * (sum(x.numel() for x in own.values()) - shared)


@pytest.mark.slow
def test_a_layer_in_float8_is_read_as_the_others(tmp_path: Path) -> None:
    """As DeepSeek publishes it. Scales are powers of two, so that the dense copy has the same
    weights."""
    from safetensors.torch import load_file, save_file

    dense = make_tiny_mtp_model(tmp_path / "dense", "deepseek_v3")
    tensors = load_file(dense / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            continue
        blocks = [part.split(128, 1) for part in weight.split(128)]
        scale = 2.0 ** math.ceil(math.log2(float(weight.abs().max()) / 448))
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored[name] = codes
        stored[f"{name}_scale_inv"] = torch.full((len(blocks), len(blocks[0])), scale)
        tensors[name] = codes.float() * scale
    save_file(tensors, dense / "model.safetensors")
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    save_file({**tensors, **stored}, rounded / "model.safetensors")
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    config = json.loads((dense / "config.json").read_text())
    (rounded / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )
    assert any(name.startswith(MTP_LAYER) for name in stored)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    found = [drafts_of(path, HeadFiles("mtp", path), tokens, 4) for path in (dense, rounded)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_options_name_the_checkpoints_own_layer(tmp_path: Path) -> None:
    target = make_tiny_mtp_model(tmp_path / "target", "glm4_moe")
    options = DecodeOptions.model_validate(
        {
            "model": str(target),
            "speculative_method": "mtp",
            "num_gpu_blocks_override": 16,
            "max_model_len": 64,
        }
    )
    engine = build_decode_engine(options)
    assert isinstance(build_speculation(options, engine, lambda: 0.0), Speculator)


def test_a_checkpoint_without_such_a_layer_is_refused(target: Path) -> None:
    with pytest.raises(ModelError, match="a llama model with num_nextn_predict_layers=0"):
        open_head(engine_of(target), HeadFiles("mtp", target), 4)


def test_memory_is_left_for_a_head(target: Path, tmp_path: Path) -> None:
    head = make_tiny_head(tmp_path / "head", target, "eagle")
    plans: list[MemoryPlan] = []
    for files in (None, HeadFiles("eagle", head)):
        load_engine(
            str(target),
            kv_cache_memory_bytes=1 << 20,
            block_size=16,
            draft_head=files,
            on_plan=plans.append,
            progress=lambda _: None,
        )
    plain, drafting = plans
    size = (head / "model.safetensors").stat().st_size
    assert 0 < size - drafting.head.weight_bytes < 4096  # its header
    # One layer of KV beside the target's two.
    assert drafting.head.block_bytes == plain.block_bytes // 2
    assert drafting.num_blocks == plain.num_blocks * 2 // 3
    assert ("draft head", format_bytes(drafting.head_bytes)) in drafting.rows()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(), (3, 2)], ids=["chain", "tree"])
def test_tokens_are_those_of_the_target_alone(
    target: Path,
    tmp_path: Path,
    alone: dict[int, tuple[int, ...]],
    kind: str,
    widths: tuple[int, ...],
) -> None:
    """All at once; one is aborted in between, and nothing of it stays."""
    head = make_head(tmp_path / "head", target, kind)
    rig = Workers(target, head, 1, right_of(alone), widths=widths)
    (worker,) = rig.workers
    outputs: dict[int, list[int]] = {}
    for handle, spec in enumerate(SPECS):
        worker.submit(Open(0, handle, spec, KvSource.LOCAL))
    worker.submit(Open(0, 9, SequenceSpec("x", (5, 6, 7), Sampling(max_tokens=60)), KvSource.LOCAL))
    for _ in range(4):
        for event in worker.step().events:
            if isinstance(event.event, Tokens):
                outputs.setdefault(event.handle, []).extend(s.token_id for s in event.event.samples)
    worker.submit(StreamCommand(0, 9, Abort()))
    run(worker, outputs, set(range(len(SPECS))))
    assert {handle: tuple(outputs[handle]) for handle in alone} == alone
    assert rig.drafts[0].num_drafts > 20
    assert bool(rig.drafts[0].num_alternatives) == bool(widths)
    assert bool(rig.drafts[0].num_followed) == bool(widths)
    rig.check_empty()
    assert worker.pool.counts().leased == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_after_a_preemption(
    target: Path, tmp_path: Path, alone: dict[int, tuple[int, ...]], kind: str
) -> None:
    """Blocks for less than half of the sequences: others are preempted, and placed anew."""
    shape = replace(SHAPE, num_blocks=16)
    head = make_head(tmp_path / "head", target, kind)
    rig = Workers(target, head, 1, right_of(alone), shape, widths=(3, 2))
    (worker,) = rig.workers
    outputs: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(SPECS)), ())
    for handle, spec in enumerate(SPECS):
        worker.submit(Open(0, handle, spec, KvSource.LOCAL))
    ended, num_preempted = set[int](), 0
    while len(ended) < len(SPECS):
        for event in worker.step().events:
            handle = event.handle
            match event.event:
                case Tokens(_, samples, finish):
                    outputs[handle] += tuple(sample.token_id for sample in samples)
                    ended |= {handle} if finish else set()
                case Preempted() | Deferred():
                    num_preempted += isinstance(event.event, Preempted)
                    again = replace(SPECS[handle], output_token_ids=outputs[handle])
                    worker.submit(Open(0, handle, again, KvSource.LOCAL))
        worker.pool.check_integrity()
    assert outputs == alone
    assert num_preempted > 0
    assert rig.drafts[0].num_drafts > 0
    assert worker.pool.counts().leased == 0
    rig.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_sequence_that_moves_in_midstream_is_drafted_for_there(
    target: Path, tmp_path: Path, alone: dict[int, tuple[int, ...]], kind: str
) -> None:
    """Nothing of the head's crosses: it begins anew with the next token there."""
    check_move(target, make_head(tmp_path / "head", target, kind), alone)


@pytest.mark.slow
def test_a_sequence_with_latent_attention_moves_as_well(tmp_path: Path) -> None:
    target = make_tiny_mtp_model(tmp_path / "target", "deepseek_v3")
    plain = SimDecode(LoopbackHub(), lambda: 0.0, SHAPE, given_engine=engine_of(target))
    plain.submit(Open(0, 2, SPECS[2], KvSource.LOCAL))
    found: dict[int, list[int]] = {}
    run(plain, found, {2})
    check_move(target, HeadFiles("mtp", target), {2: tuple(found[2])})


def check_move(target: Path, head: HeadFiles, alone: dict[int, tuple[int, ...]]) -> None:
    """SPECS[2] gets what it gets alone, and drafts on both workers, the second of which it comes to
    after some tokens."""
    rig = Workers(target, head, 2, right_of(alone))
    here, there = rig.workers
    spec, output = SPECS[2], list[int]()
    here.submit(Open(0, 0, spec, KvSource.LOCAL))
    num_drafts_before, finished, has_paused = 0, False, False
    while not finished:
        for worker in (here, there):
            for event in worker.step().events:
                match event.event:
                    case Tokens(_, samples, finish):
                        output += [sample.token_id for sample in samples]
                        finished = bool(finish)
                        if len(output) >= 5 and not has_paused:
                            has_paused = True
                            here.submit(StreamCommand(0, 0, Pause()))
                    case Paused():
                        moved = SequenceSpec(
                            spec.request_id,
                            spec.prompt_token_ids,
                            spec.sampling,
                            output_token_ids=tuple(output),
                        )
                        there.submit(Open(0, 1, moved, KvSource.HANDOFF))
                    case Offered(ticket):
                        here.submit(StreamCommand(0, 0, HandOff(ticket)))
                    case Committed():
                        num_drafts_before = rig.drafts[1].num_drafts
    assert tuple(output) == alone[2]
    assert rig.drafts[1].num_drafts > num_drafts_before
    for _ in range(3):
        here.step()
    rig.check_empty()


def drafts_of(
    target: Path, head: HeadFiles, token_ids: Sequence[int], num_drafts: int
) -> tuple[int, ...]:
    """After a target that computed all tokens but the last one by one, from the second on."""
    engine = engine_of(target)
    proposer, states, _ = open_proposer(engine, head, 4)
    states.start()
    blocks = list(range(16))
    for position, token in enumerate(token_ids[:-1]):
        row = SampleRow(0, Sampling(), token_ids[: position + 1], 1)
        engine.forward(Batch((SequenceSlice((token,), position, blocks, (row,), 1, key="a"),)))
    (found,) = proposer.propose([DraftRequest("a", token_ids, 1, num_drafts, Sampling())])
    return found.token_ids


@pytest.mark.slow
def test_an_eagle_head_says_what_its_layer_says(target: Path, tmp_path: Path) -> None:
    """Compared with transformers' layer without its first norm, which EAGLE's has not."""
    import transformers
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaModel

    head = make_tiny_head(tmp_path / "head", target, "eagle")
    tensors = load_file(head / "model.safetensors")
    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = LlamaModel(LlamaConfig.from_pretrained(head)).float()
    model.layers[0].input_layernorm = torch.nn.Identity()
    model.norm = torch.nn.Identity()
    wanted = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    missing, unexpected = model.load_state_dict(wanted, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        states = whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        text, drafts = list(tokens), []
        for _ in range(4):
            embedded = whole.get_input_embeddings()(torch.tensor(text[1:]))
            inputs = torch.cat((embedded, states), -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
            hidden = model(inputs_embeds=inputs[None]).last_hidden_state[0, -1:]
            drafts.append(int(whole.lm_head(hidden).argmax()))
            text.append(drafts[-1])
            states = torch.cat((states, hidden))
    assert drafts_of(target, HeadFiles("eagle", head), tokens, 4) == tuple(drafts)


@pytest.mark.slow
def test_an_eagle3_head_says_what_it_was_trained_to_say(target: Path, tmp_path: Path) -> None:
    """Compared with the training's own forward, which unrolls all places at once."""
    import transformers

    from distill.eagle import EagleStudent, shape_for, write_eagle

    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    shape = replace(shape_for(whole), intermediate_size=48)
    kept = torch.arange(0, whole.config.vocab_size, 2)
    student = EagleStudent(shape, 3, kept, seed=1)
    for parameter in student.parameters():
        parameter.data = (parameter.data + 0.3 * torch.randn_like(parameter)).bfloat16().float()
    layers = (0, 1, 2)
    write_eagle(student, shape, layers, tmp_path / "head")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    last: list[torch.Tensor] = []
    whole.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    drafts: list[int] = []
    with torch.no_grad():
        found = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat((found[0], found[1], last[0]), -1)
        for step in range(3):
            text = torch.tensor([[*tokens, *drafts][1:]])
            embedded = whole.get_input_embeddings()(text)
            padded = torch.cat((states, states.new_zeros(1, step, states.shape[2])), 1)
            logits = student.unroll(embedded, padded, 4096, step + 1)[step]
            drafts.append(int(kept[logits[0, -1].argmax()]))
    assert drafts_of(target, HeadFiles("eagle", tmp_path / "head"), tokens, 3) == tuple(drafts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"num_layers": 2, "has_bias": False, "num_tokens": 60},
        {"is_published": True},
        {"is_published": True, "num_layers": 2},
        {"one_output": "own", "num_tokens": 60},
        {"one_output": "target"},
    ],
    ids=str,
)
def test_medusa_heads_say_what_their_layers_say(
    target: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Compared with products by hand, of the states of transformers' model."""
    import transformers
    from safetensors.torch import load_file

    heads = make_tiny_medusa(tmp_path / "heads", target, **layout)
    tensors = load_file(heads / "model.safetensors")
    whole = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    num_layers, drafts = layout.get("num_layers", 1), []
    with torch.no_grad():
        state = whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        for head in range(3):
            hidden = state
            for layer in range(num_layers):
                name = f"{head}.{layer}.linear"
                if "is_published" not in layout:
                    name = f"blocks.{head}.layers.{layer}"
                y = tensors[f"{name}.weight"] @ hidden + tensors.get(f"{name}.bias", 0)
                hidden = hidden + y * torch.sigmoid(y)
            own = 0 if layout.get("one_output") else head
            output = tensors.get(f"lm_heads.{own}.weight", whole.lm_head.weight)
            if "is_published" in layout:
                output = tensors[f"{head}.{num_layers}.weight"]
            likeliest = int((output @ hidden).argmax())
            drafts.append(
                int(tensors["token_map"][likeliest]) if "token_map" in tensors else likeliest
            )
    assert drafts_of(target, HeadFiles("medusa", heads), tokens, 3) == tuple(drafts)
    # Four heads give no more drafts.
    assert len(drafts_of(target, HeadFiles("medusa", heads), tokens, 9)) == 4


def test_medusa_heads_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    engine = engine_of(target)
    other = make_tiny_model(
        tmp_path / "other", "llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    with pytest.raises(ModelError, match="hidden_size=32, vocab_size="):
        open_medusa(engine, HeadFiles("medusa", make_tiny_medusa(tmp_path / "small", other)))
    with pytest.raises(UnsupportedModel, match=r"model_type=llama.*Medusa heads have medusa"):
        open_medusa(engine, HeadFiles("medusa", target))
    folder = make_tiny_medusa(tmp_path / "heads", target, num_tokens=60)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "token_map": tensors["token_map"] - 1000}, folder / "model.safetensors")
    with pytest.raises(TensorMismatch, match="'token_map' names tokens"):
        open_medusa(engine, HeadFiles("medusa", folder))
    del tensors["lm_heads.3.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingTensor, match=r"lm_heads\.3\.weight"):
        open_medusa(engine, HeadFiles("medusa", folder))
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(UnsafeCheckpoint, match="pickles only"):
        open_medusa(engine, HeadFiles("medusa", folder))


def test_transformers_code_keeps_no_states(target: Path, tmp_path: Path) -> None:
    engine = load_engine(
        str(target), model_impl="transformers", num_blocks=8, on_plan=lambda _: None
    )
    with pytest.raises(ConfigError, match="speculative_method=eagle"):
        open_head(engine, HeadFiles("eagle", make_tiny_head(tmp_path / "head", target, "eagle")), 4)


def test_heads_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    engine = engine_of(target)
    other = make_tiny_model(
        tmp_path / "other", "llama", hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    with pytest.raises(ModelError, match="hidden_size=32, vocab_size="):
        open_head(engine, HeadFiles("eagle", make_tiny_head(tmp_path / "small", other, "eagle")), 4)
    with pytest.raises(ModelError, match="heads are LlamaForCausalLMEagle"):
        open_head(engine, HeadFiles("eagle", target), 4)
    head = make_tiny_head(tmp_path / "head", target, "eagle3")
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] - 1000}, head / "model.safetensors")
    with pytest.raises(TensorMismatch, match="'d2t' names tokens"):
        open_head(engine, HeadFiles("eagle", head), 4)
    del tensors["fc.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(MissingTensor, match=r"fc\.weight"):
        open_head(engine, HeadFiles("eagle", head), 4)
