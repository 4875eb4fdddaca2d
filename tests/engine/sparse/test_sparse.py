"""Decode steps that read some blocks are attention over the tokens of these blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.types import Sampling
from baton_kernels.attention_backends import REFERENCE, AttentionBackend
from baton_kernels.paged_attention import AttentionSlice
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.memory_plan import MemoryPlan
from engine.sparse.kinds import choose_sparse
from engine.torch.engine import TorchEngine
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
CPU = torch.device("cpu")
SCALE = DIM**-0.5


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama")


def backend(model: Path, name: str) -> AttentionBackend:
    return choose_sparse(name, read_config(model), BLOCK, is_scaled=False, device=CPU)


class Step:
    """One new token at position `start` of a sequence in scattered blocks, in the last layer."""

    def __init__(self, start: int, num_layers: int = 2) -> None:
        torch.manual_seed(start)
        num_blocks = start // BLOCK + 1
        self.start, self.table = start, torch.randperm(2 * num_blocks)[:num_blocks].tolist()
        self.pool = torch.randn(2 * num_blocks, num_layers, 2, KV_HEADS, BLOCK, DIM)
        self.layer = num_layers - 1
        self.query = torch.randn(1, HEADS, DIM)

    def attend(self, by: AttentionBackend) -> torch.Tensor:
        part = AttentionSlice(0, 1, self.start, self.table)
        plan = by.plan([part], self.pool, HEADS, SCALE, None, torch.float32)
        key, value = self.kv(range(self.start, self.start + 1))
        return by.attend(self.query, key, value, self.pool, self.layer, plan)

    def kv(self, positions: range | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, dim]."""
        rows = [self.pool[self.table[p // BLOCK], self.layer, :, :, p % BLOCK] for p in positions]
        key, value = torch.stack(rows, 1)
        return key, value

    def over(self, positions: list[int]) -> torch.Tensor:
        """Attention over these positions."""
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in self.kv(positions))
        weights = (torch.einsum("hd,jhd->hj", self.query[0], key) * SCALE).softmax(-1)
        return torch.einsum("hj,jhd->hd", weights, value)[None]


@pytest.mark.parametrize("start", [40, 41, 43])
def test_sink_and_window_read_the_first_and_the_last_blocks(model: Path, start: int) -> None:
    step = Step(start)
    kept = [*range(BLOCK), *range(start // BLOCK * BLOCK - BLOCK, start + 1)]
    torch.testing.assert_close(
        step.attend(backend(model, f"sink-window:{3 * BLOCK}")), step.over(kept)
    )


def test_pages_read_the_blocks_that_the_query_looks_for(model: Path) -> None:
    step = Step(41)
    wanted = 5
    # The keys of one block point where each head's query does.
    directions = step.query[0].unflatten(0, (KV_HEADS, -1)).mean(1)
    step.pool[step.table[wanted], step.layer, 0] = 20 * directions[:, None]
    kept = [*range(wanted * BLOCK, (wanted + 1) * BLOCK), 40, 41]
    torch.testing.assert_close(step.attend(backend(model, f"pages:{2 * BLOCK}")), step.over(kept))


def test_pages_read_two_rows_of_a_block_until_it_holds_other_tokens(model: Path) -> None:
    step, pages = Step(41), backend(model, f"pages:{3 * BLOCK}")
    first = step.attend(pages)
    assert torch.equal(first, step.attend(backend(model, f"pages:{3 * BLOCK}")))
    # What is chosen is read from the pool, and what is not chosen is not looked at again.
    keys = step.pool[:, step.layer, 0]
    keys[:, :, :-1] *= 100
    stale = [step.attend(pages), step.attend(backend(model, f"pages:{3 * BLOCK}"))]
    assert not torch.equal(*stale)
    # Others' tokens: the last keys of the blocks differ, too.
    keys += torch.randn_like(keys)
    assert torch.equal(step.attend(pages), step.attend(backend(model, f"pages:{3 * BLOCK}")))


def test_keys_of_a_single_layer_are_no_sign_of_other_tokens(model: Path) -> None:
    step, pages = Step(41, num_layers=1), backend(model, f"pages:{3 * BLOCK}")
    step.attend(pages)
    step.pool[:, 0, 0, :, :-1] *= 100
    assert torch.equal(step.attend(pages), step.attend(backend(model, f"pages:{3 * BLOCK}")))


@pytest.mark.slow
def test_what_pages_keep_is_in_the_memory_plan(model: Path) -> None:
    plans: list[MemoryPlan] = []
    for name in ("auto", "sink-window:8", "pages:8"):
        load_engine(
            str(model),
            num_blocks=24,
            block_size=BLOCK,
            attention_backend=name,
            dtype="float32",
            on_plan=plans.append,
        )
    full, window, pages = plans
    assert full.rank_bytes == window.rank_bytes
    assert pages.rank_bytes - full.rank_bytes == full.kv_bytes * 3 // (2 * BLOCK)
    assert "summaries of keys" in dict(pages.rows())


@pytest.mark.parametrize("kind", ["sink-window", "pages"])
def test_short_sequences_and_prompts_are_read_whole(model: Path, kind: str) -> None:
    step = Step(43)
    own = backend(model, f"{kind}:{11 * BLOCK}")
    assert torch.equal(step.attend(own), step.attend(REFERENCE))
    few = backend(model, f"{kind}:{2 * BLOCK}")
    prompt = [AttentionSlice(0, 4, 40, step.table)]
    planned = few.plan(prompt, step.pool, HEADS, SCALE, None, torch.float32)
    expected = REFERENCE.plan(prompt, step.pool, HEADS, SCALE, None, torch.float32)
    assert type(planned) is type(expected)
    query = torch.randn(4, HEADS, DIM)
    key, value = step.kv(range(40, 44))
    results = [
        by.attend(query, key, value, step.pool, 0, plan)
        for by, plan in ((few, planned), (REFERENCE, expected))
    ]
    assert torch.equal(*results)


def generate(engine: TorchEngine, prompt: list[int], num_new: int) -> list[int]:
    tokens, table = list(prompt), tuple(range(engine.spec.num_blocks))
    start = 0
    while len(tokens) < len(prompt) + num_new:
        row = SampleRow(len(tokens) - start - 1, Sampling(), tokens, len(prompt))
        part = SequenceSlice(tokens[start:], start, table, (row,), len(prompt))
        ((sample,),) = engine.forward(Batch((part,)))
        start = len(tokens)
        tokens.append(sample.token_id)
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sink-window", "pages"])
def test_an_engine_decodes_sparsely(model: Path, kind: str) -> None:
    prompt = [7 * i % 90 for i in range(61)]

    def run(name: str) -> tuple[list[int], object]:
        engine = load_engine(
            str(model), num_blocks=24, block_size=BLOCK, attention_backend=name, dtype="float32"
        )
        return generate(engine, prompt, 16), engine.spec.numerics

    (full, own), (same, other), (sparse, _) = (
        run(name) for name in ("auto", f"{kind}:96", f"{kind}:8")
    )
    assert full == same
    assert sparse[0] == full[0]
    assert sparse != full
    # KV of the two must not be mixed.
    assert own != other


@pytest.mark.parametrize(
    ("name", "says"), [("pages:7", "give more tokens"), ("sink-window:4", "less than 2 blocks")]
)
def test_too_few_tokens_are_refused(model: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend=.*{says}"):
        backend(model, name)
