"""A GGUF file gives the logits of the checkpoint with the weights that the `gguf` package reads in
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from baton.config.load import build_options
from baton.config.plan_options import PlanOptions
from baton.errors import ModelError, UnsupportedModel
from baton.gguf.block_types import BLOCK_TYPES
from baton.gguf.folder import unfold
from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.checkpoint import check_checkpoint, find_shards, local_folder, resolve_checkpoint
from engine.doctor import check_model
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.memory_plan import quantized_weights
from engine.plan.source import read_model
from engine.quantization.gguf import decode_blocks
from engine.quantization.weight import QuantizedWeight, stack
from tests.support.adapters import make_adapter, merged
from tests.support.engines import load_engine
from tests.support.gguf_files import Type, random_blocks, write_gguf
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

QUANTIZED = [name for name, kind in BLOCK_TYPES.items() if kind.is_quantized]
PROMPT = [7, 99, 250, 3, 3, 41, 180, 12, 77, 5, 64]
#: Every row is a whole number of the largest blocks.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of GGUF files go to the test's own; the kernels' library is loaded before."""
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits(
    model: Path, dtype: str, ids: Sequence[int] = PROMPT, adapter: Path | None = None
) -> torch.Tensor:
    """Logits behind each of the ids, with the adapter if there is one."""
    modules = {} if adapter is None else {"own": str(adapter)}
    engine = load_engine(str(model), dtype=dtype, num_blocks=8, block_size=16, lora_modules=modules)
    rows = tuple(SampleRow(i, Sampling(), ids[: i + 1], len(ids)) for i in range(len(ids)))
    part = SequenceSlice(ids, 0, range(8), rows, len(ids), adapter="own" if adapter else "")
    return engine.logits(Batch((part,)))


def is_linear(name: str) -> bool:
    return not name.startswith("token_embd")


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_decode_to_the_bits_of_the_reference(name: str) -> None:
    raw = random_blocks(name, 6, 768, 0.3, seed=1)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw, Type[name]))
    weight = decode_blocks(torch.from_numpy(raw), name)
    kind = BLOCK_TYPES[name]
    assert torch.equal(weight.dequantize(), wanted)
    assert int(weight.levels.max()) < 1 << weight.bits
    assert (weight.bits, weight.group_size) == (kind.bits, kind.group_size)
    assert (weight.mins is not None) == kind.has_mins
    torch.testing.assert_close(weight.with_zeros().dequantize(), wanted, atol=1e-6, rtol=1e-6)


def test_a_group_of_one_value_has_a_zero_point_too() -> None:
    levels = torch.arange(64, dtype=torch.uint8).view(1, 64) % 16
    scales, mins = torch.tensor([[0.0, 0.5]]), torch.tensor([[-3.0, 1.0]])
    weight = QuantizedWeight(levels, scales, None, 4, mins)
    assert torch.equal(weight.with_zeros().dequantize(), weight.dequantize())
    assert weight.dequantize()[0, :32].eq(-3).all()


def test_layers_of_different_types_are_stacked_without_loss() -> None:
    parts = [
        decode_blocks(torch.from_numpy(random_blocks(name, 3, 256, 0.3, seed)), name)
        for seed, name in enumerate(("Q4_K", "Q6_K", "Q4_0", "Q8_0"))
    ]
    whole = stack(parts)
    wanted = torch.cat([part.dequantize() for part in parts])
    torch.testing.assert_close(whole.dequantize(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", [*QUANTIZED, "F16", "BF16"])
def test_tokens_are_those_of_the_dequantised_weights(tmp_path: Path, name: str) -> None:
    """In float32 transformers' own; in bfloat16, where levels stay and activations are rounded to
    8 bits, near them."""
    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", lambda _: name)
    exact = logits(path, "float32")
    torch.testing.assert_close(exact, logits(folder, "float32"), atol=1e-4, rtol=0)
    (wanted,) = greedy_outputs(folder, [PROMPT], 12)
    ids = list(PROMPT)
    for _ in wanted:
        ids.append(int(logits(path, "float32", ids)[-1].argmax()))
    assert ids[len(PROMPT) :] == wanted
    served = logits(path, "bfloat16")
    assert (served - exact).norm() < 0.1 * exact.norm()


@pytest.mark.skipif(library() is None, reason="no native kernels on this machine")
def test_types_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    """As in files of llama.cpp's mixtures, such as Q4_K_M; one tensor of three is no blocks at
    all."""
    types = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "ffn_up": "F16", "output": "Q8_0"}

    def type_of(name: str) -> str:
        return next((kind for part, kind in types.items() if part in name), "Q4_K")

    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", type_of)
    exact = logits(path, "float32")
    torch.testing.assert_close(exact, logits(folder, "float32"), atol=1e-4, rtol=0)
    assert (logits(path, "bfloat16") - exact).norm() < 0.1 * exact.norm()


@pytest.mark.slow
def test_an_adapter_is_added_to_stored_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", lambda _: "Q4_1")
    adapter = make_adapter(tmp_path / "adapter", folder)
    wanted = logits(merged(tmp_path / "merged", folder, adapter), "float32")
    exact = logits(path, "float32", adapter=adapter)
    torch.testing.assert_close(exact, wanted, atol=1e-3, rtol=0)
    assert (logits(path, "bfloat16", adapter=adapter) - wanted).norm() < 0.1 * wanted.norm()


CASES: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "phi3": ("phi3", {}, {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}, {}),
    "gemma2": (
        "gemma2",
        {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16},
        {},
    ),
    "gemma3": (
        "gemma3_text",
        {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16},
        {"rope__freq_base_swa": 10000.0},
    ),
}


@pytest.mark.slow
@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", CASES)
def test_an_architecture_gives_the_bits_of_its_safetensors(tmp_path: Path, name: str) -> None:
    family, fields, metadata = CASES[name]
    folder = make_tiny_model(tmp_path / "dense", family, num_hidden_layers=3, **fields)
    path = write_gguf(folder, tmp_path / "tiny.gguf", **metadata)
    wanted = logits(folder, "float32")
    tolerance = 1e-5 if family.startswith("gemma") else 0.0  # 1 was added to norms
    torch.testing.assert_close(logits(path, "float32"), wanted, atol=tolerance, rtol=0)
    ours, theirs = read_config(resolve_checkpoint(str(path))), read_config(folder)
    assert ours.windows == theirs.windows
    assert ours.rope == theirs.rope
    assert ours.is_tied == theirs.is_tied


def test_quantised_tied_embeddings_give_an_output_layer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense", tie_word_embeddings=True, **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", lambda _: "Q8_0")
    config = read_config(resolve_checkpoint(str(path)))
    assert not config.is_tied
    torch.testing.assert_close(
        logits(path, "float32"), logits(folder, "float32"), atol=1e-4, rtol=0
    )
    assert sum(count for name, count in quantized_weights(config) if name == "lm_head")


def test_the_memory_plan_knows_the_types(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(
        folder, tmp_path / "tiny.gguf", lambda name: "Q4_1" if is_linear(name) else "F16"
    )
    config = read_config(resolve_checkpoint(str(path)))
    stored = config.quantization
    assert stored is not None
    # Four bits, and a float32 scale and zero point for 32 of them.
    assert {stored.loaded_bytes(name) for name, _ in quantized_weights(config)} == {0.75}


def test_a_file_is_found_by_every_verb(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", lambda _: "Q4_0")
    unfolded = check_checkpoint(str(path))
    assert list(find_shards(unfolded)) == [unfolded / "model.gguf"]
    assert unfold(path) == unfolded
    findings = check_model(str(path), "auto", 16)
    assert not [finding.found for finding in findings if finding.fix]
    options = build_options(PlanOptions, {"model": str(path)})
    assert read_model(options, "cpu", has_float8=False).sizes.storage.levels


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense", **WIDE)
    path = write_gguf(folder, tmp_path / "tiny.gguf", lambda _: "Q4_0")
    before = unfold(path)
    write_gguf(folder, path, lambda _: "Q8_0")
    after = unfold(path)
    assert before != after
    layers = json.loads((after / "config.json").read_text())["quantization_config"]["layers"]
    assert set(layers.values()) == {"Q8_0"}


def damaged(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_what_is_no_whole_file_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "dense")
    whole = write_gguf(folder, tmp_path / "tiny.gguf").read_bytes()
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ModelError, match=r"not a (whole )?GGUF file"):
            unfold(damaged(tmp_path / "cut.gguf", whole[:size]))
    with pytest.raises(ModelError, match="not a GGUF file"):
        unfold(damaged(tmp_path / "other.gguf", b"GGML" + whole[4:]))
    with pytest.raises(UnsupportedModel, match="version 1"):
        unfold(damaged(tmp_path / "old.gguf", b"GGUF\1" + whole[5:]))
    name = b"llama"
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        unfold(damaged(tmp_path / "other.gguf", whole.replace(name, b"mamba", 1)))
    with pytest.raises(ModelError, match="no such file"):
        resolve_checkpoint(str(tmp_path / "absent.gguf"))
    assert local_folder(str(tmp_path / "absent.gguf")) is None
    (finding,) = check_model(str(tmp_path / "cut.gguf"), "auto", 16)
    assert "whole GGUF file" in finding.found + finding.fix
