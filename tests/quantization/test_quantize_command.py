"""`baton quantize` writes checkpoints that are smaller, whole, and mean nearly the same."""

from __future__ import annotations

import heapq
import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from baton.cli.main import app
from baton.engine.interface import Batch, SampleRow, SequenceSlice
from baton.engine.load_engine import load_engine
from baton.errors import ConfigError, UnsupportedModel
from baton.model.quantize import quantize_checkpoint
from baton.quantization.scheme import SCHEMES, Scheme, choose_group_size
from baton.types import Sampling
from tests.support.tiny_models import make_tiny_model

BOX_MODEL = Path(__file__).parents[2] / "models" / "baton-py-6m"
#: What the box model's loss may rise by on Python text, in nats per token: weights rounded, and with `bfloat16` on some
#: CPUs activations too.
BOUNDS: dict[Scheme, float] = {"int8": 0.01, "int4": 0.1, "fp8": 0.03}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, "qwen2", intermediate_size=96, max_shard_size="60KB")


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json"))
    return tokenizer.encode(inspect.getsource(heapq)).ids[:600]


def loss(path: Path, ids: list[int], dtype: str) -> float:
    """Nats per token."""
    engine = load_engine(str(path), num_blocks=40, dtype=dtype)
    rows = tuple(SampleRow(i, Sampling(), ids[: i + 1], len(ids)) for i in range(len(ids) - 1))
    logits = engine.logits(Batch((SequenceSlice(ids, 0, range(40), rows, len(ids)),)))
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_box_model_keeps_its_likelihood(
    scheme: Scheme, tmp_path: Path, text_ids: list[int]
) -> None:
    quantize_checkpoint(BOX_MODEL, tmp_path / "new", scheme)
    original = loss(BOX_MODEL, text_ids, "float32")
    assert original < 4
    for dtype in ("float32", "bfloat16"):
        assert loss(tmp_path / "new", text_ids, dtype) < original + BOUNDS[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written(model: Path, tmp_path: Path, scheme: Scheme) -> None:
    output = tmp_path / "new"
    before, after = quantize_checkpoint(model, output, scheme)
    assert after < before
    # Everything but the linear layers is as it was, and so are the tokenizer's files.
    old, new = (
        {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}
        for folder in (model, output)
    )
    for name in set(old) & set(new):
        if not name.endswith("_proj.weight"):
            assert torch.equal(old[name], new[name])
    assert "lm_head.weight" in new
    assert (output / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == new.keys()


def test_what_is_refused(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "new"
    quantize_checkpoint(model, output, "int8")
    with pytest.raises(ConfigError, match="already"):
        quantize_checkpoint(model, output, "int8")
    with pytest.raises(UnsupportedModel, match="quantised already"):
        quantize_checkpoint(output, tmp_path / "other", "int4")
    odd = make_tiny_model(tmp_path / "odd", intermediate_size=40)
    with pytest.raises(UnsupportedModel, match="multiple of 32"):
        quantize_checkpoint(odd, tmp_path / "other", "int4")
    assert not (tmp_path / "other").exists()


def test_the_group_is_the_largest_that_fits() -> None:
    assert choose_group_size([256, 1024]) == 128
    assert choose_group_size([256, 672]) == 32
    assert choose_group_size([100]) is None


def test_the_command(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(model), "--scheme", "int4", "--output", str(tmp_path / "new")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "of weights instead of" in capfd.readouterr().out
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert "is there already" in capfd.readouterr().err
