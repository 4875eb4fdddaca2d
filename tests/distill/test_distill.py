"""A distilled draft learns to say what its target says, and is a model that a decode worker can
draft with."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from baton.config.distill_options import DistillOptions
from baton.errors import ConfigError
from baton.types import Sampling
from distill.run import distill
from distill.text import read_documents
from distill.training import Progress, learning_rate_scale, sample_batch
from engine.checkpoint import HeadFiles
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.torch.head_runner import open_head
from engine.torch.medusa import open_medusa
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model
from worker_core.speculation.draft_model import DraftModelProposer, check_specs, check_tokenizers
from worker_core.speculation.interface import DraftRequest

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    words = ["let", "x", "be", "one", "and", "y", "two"]
    rng = random.Random(0)
    path = tmp_path / "data.txt"
    path.write_text(" ".join(rng.choice(words) for _ in range(900)))
    return path


def options_of(tmp_path: Path, data: Path, **values: object) -> DistillOptions:
    return DistillOptions.model_validate(
        {
            "target": str(tmp_path / "target"),
            "data": data,
            "output": tmp_path / "draft",
            "minutes": 1.0,
            "num_layers": 1,
            "hidden_size": 64,
            "context": 16,
            "tokens_per_step": 128,
            **values,
        }
    )


def test_the_loss_falls_and_the_draft_serves(tmp_path: Path, data: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    losses: list[float] = []

    def note(done: Progress, loss: float) -> None:
        assert done.tokens == 128 * done.step
        losses.append(loss)

    ticks = itertools.count()
    # Each look at this clock takes a second: 60 steps.
    figures = distill(options_of(tmp_path, data), lambda: float(next(ticks)), note)
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
    assert 0 < figures["acceptance"] < 1
    record = json.loads((tmp_path / "draft" / "distill.json").read_text())
    assert record["step"] == 60
    assert record["acceptance"] == figures["acceptance"]

    engine = load_engine(str(tmp_path / "draft"), num_blocks=16, on_plan=lambda _: None)
    check_tokenizers(target, tmp_path / "draft")
    full = load_engine(str(target), num_blocks=16, on_plan=lambda _: None)
    check_specs(full.spec, engine.spec)
    pool = BlockPool(16, whole_blocks(16), secret=bytes(32), enable_prefix_caching=False)
    proposer = DraftModelProposer(engine, pool, 64, lambda: 0.0)
    (drafts,) = proposer.propose([DraftRequest(0, [1, 2, 3], 3, 4, Sampling())])
    assert len(drafts.token_ids) == 4


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_learns(tmp_path: Path, data: Path, method: str) -> None:
    target = make_tiny_model(tmp_path / "target", num_hidden_layers=3)
    losses: list[float] = []
    ticks = itertools.count()
    figures = distill(
        options_of(tmp_path, data, method=method),
        lambda: float(next(ticks)),
        lambda _, loss: losses.append(loss),
    )
    assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
    assert 0 < figures["acceptance"] < 1
    engine = load_engine(str(target), num_blocks=16, on_plan=lambda _: None)
    files = HeadFiles(method, tmp_path / "draft")
    if method == "medusa":
        heads, _ = open_medusa(engine, files)
        assert heads.num_heads == 4
    else:
        head, states = open_head(engine, files, 4)
        assert (head.num_blocks, len(states)) == (16, 0)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "target")
    data = tmp_path / "data.txt"
    data.write_text("short")
    with pytest.raises(ConfigError, match="it has 6 tokens"):
        distill(options_of(tmp_path, data), lambda: 0.0, lambda _done, _loss: None)


def test_json_lines_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\\nb"}\n{"text": "c"}\n')
    assert read_documents(path) == ["a\nb", "c"]
    for wrong in ("no json", '{"txt": "a"}', '["text"]', '{"text": 3}'):
        path.write_text(f'{{"text": "a"}}\n{wrong}\n')
        with pytest.raises(ConfigError, match="line 2"):
            read_documents(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data="):
        read_documents(tmp_path / "none.txt")


def test_batches_are_windows_of_the_stream() -> None:
    stream = torch.arange(50)
    inputs, expected = sample_batch(stream, 8, 3, seed=1, step=2)
    assert inputs.shape == expected.shape == (3, 8)
    assert torch.equal(inputs[:, 1:], expected[:, :-1])
    assert torch.equal(expected, inputs + 1)
    again, _ = sample_batch(stream, 8, 3, seed=1, step=2)
    assert torch.equal(inputs, again)


def test_the_learning_rate_rises_holds_and_falls_to_zero() -> None:
    scales = [learning_rate_scale(i / 100) for i in range(101)]
    assert scales[0] < 0.1
    assert scales[10] == scales[30] == 1.0
    assert scales[-1] == 0.0
    assert scales[40:] == sorted(scales[40:], reverse=True)
