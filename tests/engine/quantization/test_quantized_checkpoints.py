"""Checkpoints that tests and benchmarks quantise are smaller, whole, and mean nearly the same."""

from __future__ import annotations

import heapq
import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.errors import UnsupportedModel
from baton.types import NO_LEVEL, Sampling
from baton_kernels.cpu.library import level
from baton_kernels.sparse_linear import is_sparse
from bench.quantized_checkpoints import SCHEMES, Scheme, _choose_group_size, quantize_checkpoint
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.memory_plan import num_quantized_weights
from engine.torch import load
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model

BOX_MODEL = Path(__file__).parents[3] / "models" / "baton-py-6m"
#: What the bundled model's loss may rise by on Python text, in nats per token: weights rounded, and
#: with `bfloat16` on some CPUs activations too. Half of the weights cannot go without training:
#: sparse24 is only kept from getting worse.
BOUNDS: dict[Scheme, float] = {"int8": 0.015, "int4": 0.05, "fp8": 0.03, "sparse24": 0.7}


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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_box_model_keeps_its_likelihood(
    scheme: Scheme, tmp_path: Path, text_ids: list[int]
) -> None:
    quantize_checkpoint(BOX_MODEL, tmp_path / "new", scheme)
    original = loss(BOX_MODEL, text_ids, "float32")
    assert original < 4
    for dtype in ("float32", "bfloat16"):
        assert loss(tmp_path / "new", text_ids, dtype) < original + BOUNDS[scheme]


@pytest.mark.slow
def test_the_box_model_keeps_its_likelihood_in_float8(
    tmp_path: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and activations, as on a GPU that multiplies float8."""
    quantize_checkpoint(BOX_MODEL, tmp_path / "new", "fp8")
    monkeypatch.setattr(load, "keeps_float8", lambda *_: True)
    original = loss(BOX_MODEL, text_ids, "float32")
    assert loss(tmp_path / "new", text_ids, "float32") < original + BOUNDS["fp8"]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    shards = folder.glob("*.safetensors")
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") or name.startswith("lm_head.")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written(model: Path, tmp_path: Path, scheme: Scheme) -> None:
    output = tmp_path / "new"
    before, after = quantize_checkpoint(model, output, scheme)
    assert after == before if scheme == "sparse24" else after < before
    # Everything but the linear layers is as it was, and so are the tokenizer's files.
    old, new = tensors_of(model), tensors_of(output)
    for name in set(old) & set(new):
        if not is_linear(name):
            assert torch.equal(old[name], new[name])
    if scheme == "sparse24":
        assert torch.equal(old["lm_head.weight"], new["lm_head.weight"])
        assert read_config(output).quantization is None
    else:
        assert new["lm_head.weight"].itemsize == 1
        assert "lm_head.weight_scale" in new
    assert (output / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == new.keys()


@pytest.mark.parametrize(
    ("scheme", "dtype", "name", "is_said"),
    [
        ("int8", "bfloat16", "avx2", True),
        ("int8", "bfloat16", "avx512_bf16", False),
        ("int8", "float32", "avx2", False),
        ("int4", "bfloat16", "avx2", False),
    ],
)
def test_int8_that_widens_bytes_is_said_to_be_slow_in_batches(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scheme: Scheme,
    dtype: str,
    name: str,
    is_said: bool,
) -> None:
    """By a level other than this machine's in name alone."""
    if level() == NO_LEVEL:
        pytest.skip("without native kernels nothing runs in int8")
    quantize_checkpoint(model, tmp_path / "new", scheme)
    monkeypatch.setattr(load, "level", lambda: name)
    caplog.set_level("INFO", "engine.torch.load")
    load_engine(str(tmp_path / "new"), num_blocks=4, dtype=dtype)
    said = [line for line in caplog.messages if "int8 weights at level" in line]
    assert len(said) == is_said


def test_pruned_weights_run_as_transformers_runs_them(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantize_checkpoint(model, tmp_path / "new", "sparse24")
    for name, tensor in tensors_of(tmp_path / "new").items():
        if name.endswith("_proj.weight"):
            assert is_sparse(tensor)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float64)
    ids = list(range(5, 60))
    logits = pruned(torch.tensor([ids])).logits[0, :-1].detach()
    wanted = float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))
    assert loss(tmp_path / "new", ids, "float32") == pytest.approx(wanted, abs=1e-4)
    assert loss(model, ids, "float32") != pytest.approx(wanted, abs=1e-2)


def test_a_tied_output_layer_becomes_one_of_its_own(tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    embeddings = tensors_of(tied)["model.embed_tokens.weight"]
    # Nobody reads it: the embeddings are what the output layer is made of.
    stray = {"lm_head.weight": torch.zeros(1, 1)}
    save_file(tensors_of(tied) | stray, tied / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(tied, tmp_path / "new", "int8")
    assert not read_config(tmp_path / "new").is_tied
    new = tensors_of(tmp_path / "new")
    assert torch.equal(new["model.embed_tokens.weight"], embeddings)
    meant = new["lm_head.weight"].float() * new["lm_head.weight_scale"].float()
    assert (meant - embeddings.float()).norm() < 0.01 * embeddings.float().norm()


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_layer_can_be_kept(tmp_path: Path, is_tied: bool) -> None:
    source = make_tiny_model(tmp_path / "old", tie_word_embeddings=is_tied)
    quantize_checkpoint(source, tmp_path / "new", "int8", keeps_output=True)
    old, new = tensors_of(source), tensors_of(tmp_path / "new")
    assert ("lm_head.weight" in new) != is_tied
    assert all(
        torch.equal(old[name], new[name]) for name in old if not name.endswith("proj.weight")
    )
    config = read_config(tmp_path / "new")
    assert config.is_tied == is_tied
    assert config.quantization is not None
    assert config.quantization.output_layer is None
    assert loss(tmp_path / "new", list(range(5, 60)), "float32") > 0


def test_the_memory_plan_knows_a_quantised_output_layer(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "old", intermediate_size=96)
    for name, keeps in (("whole", False), ("kept", True)):
        quantize_checkpoint(source, tmp_path / name, "int4", keeps_output=keeps)
    whole, kept = (read_config(tmp_path / name) for name in ("whole", "kept"))
    output_layer = whole.vocab_size * whole.hidden_size
    assert num_quantized_weights(whole) == num_quantized_weights(kept) + output_layer


def test_layers_without_a_group_size_are_refused(tmp_path: Path) -> None:
    odd = make_tiny_model(tmp_path / "odd", intermediate_size=40)
    with pytest.raises(UnsupportedModel, match="multiple of 32"):
        quantize_checkpoint(odd, tmp_path / "other", "int4")
    assert not (tmp_path / "other").exists()


def test_the_group_is_the_largest_that_fits() -> None:
    assert _choose_group_size([256, 1024]) == 128
    assert _choose_group_size([256, 672]) == 32
    assert _choose_group_size([100]) is None
