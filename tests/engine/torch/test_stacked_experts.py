"""Experts that a checkpoint has in one tensor, in mxfp4 or not, become linear layers of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import MissingTensor, TensorMismatch, UnsupportedModel, UnsupportedSetting
from baton.types import Sampling
from baton_kernels.gated_activation import ALPHA, LIMIT
from baton_kernels.mxfp4_linear import Mxfp4Linear, pack_mxfp4
from bench.quantized_checkpoints import quantize_checkpoint
from engine.families.gpt_oss import CLAMPED_SILU
from engine.families.layers import Columns, Source
from engine.families.read import parse_config
from engine.memory_plan import weight_bytes
from engine.quantization.weight import Mxfp4Weight
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine

MakeModel = Callable[..., Path]

PROMPT = list(range(5, 40))


def bytes_of(*shape: int, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    """All bytes, and powers of two far from one."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    scales = torch.tensor([[118, 127, 130, 140]] * 4, dtype=torch.uint8)[None]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(Mxfp4Weight(blocks[0].flatten(1), scales[0]).dequantize(), theirs[0].T)


@pytest.fixture
def packed(tiny_model: MakeModel, tmp_path: Path) -> tuple[Path, Path]:
    """A model with experts in mxfp4, and the same one dequantised."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = tiny_model("gpt_oss", intermediate_size=64)
    folder = tmp_path / "packed"
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if not name.endswith("_proj") or ".experts." not in name:
            stored[name] = tensor
            continue
        experts, num_in, num_out = tensor.shape
        blocks = bytes_of(experts, num_out, num_in // 32, 16, seed=seed)
        scales = bytes_of(experts, num_out, num_in // 32, seed=seed, low=122, high=126)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


def tokens_of(path: Path) -> list[list[int]]:
    return token_ids(generate(load_engine(str(path), num_blocks=16), [PROMPT], Sampling(), 12))


def test_a_checkpoint_in_mxfp4_is_what_its_experts_mean(packed: tuple[Path, Path]) -> None:
    stored, plain = packed
    assert tokens_of(stored) == tokens_of(plain)


def test_experts_run_packed_where_a_kernel_reads_them(
    packed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: packed once all their tensors are read, gates and ups in the order of the
    product."""
    made: list[Mxfp4Linear] = []

    def pack(*parts: torch.Tensor) -> Mxfp4Linear:
        made.append(pack_mxfp4(*parts))
        return made[-1]

    monkeypatch.setattr("engine.torch.load.keeps_mxfp4", lambda *_: True)
    monkeypatch.setattr("engine.torch.packed.pack_mxfp4", pack)
    stored, plain = packed
    assert tokens_of(stored) == tokens_of(plain)
    experts = parse_config(json.loads((stored / "config.json").read_text())).traits.experts
    assert experts is not None
    assert len(made) == 2 * experts.num_experts * sum(experts.layers)


def test_a_part_within_a_block_is_dequantised() -> None:
    weight = Mxfp4Weight(torch.zeros(4, 96, dtype=torch.uint8), torch.zeros(4, 6).byte())
    assert weight.has_whole_blocks
    assert not Mxfp4Weight(weight.codes[:, 24:48], weight.powers[:, 1:3]).has_whole_blocks


def test_a_part_of_whole_blocks_is_that_part_of_the_weight() -> None:
    """Of rows and of columns, as a rank has it that is cut by sums."""
    weight = Mxfp4Weight(bytes_of(6, 48, seed=1), bytes_of(6, 3, seed=2, low=122, high=130))
    source = Source("experts", range(1, 6, 2), 6, columns=Columns(range(32, 96), 96))
    part = weight.part(source.take)
    assert part.has_whole_blocks
    assert torch.equal(part.dequantize(), weight.dequantize()[1:6:2, 32:96])


def test_the_experts_of_120b_fit_80_gb() -> None:
    """Only where they stay packed; attention and embeddings are in 16 bits."""
    raw = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    config = parse_config(raw)
    assert 60e9 < weight_bytes(config, "bfloat16", keeps_levels=True) < 67e9
    assert weight_bytes(config, "bfloat16", keeps_levels=False) > 230e9


def test_half_of_a_tensor_is_missed_by_its_name(packed: tuple[Path, Path]) -> None:
    path = packed[0] / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        load_engine(str(packed[0]), num_blocks=4)


def test_halves_that_do_not_fit_are_refused(packed: tuple[Path, Path]) -> None:
    path = packed[0] / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"down_proj_scales.*16 with each scale"):
        load_engine(str(packed[0]), num_blocks=4)


def test_configs_know_the_gate_that_kernels_have() -> None:
    assert CLAMPED_SILU == {"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}


def test_other_gates_and_forms_are_refused_by_name(tiny_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="swiglu_limit=5"):
        parse_config({"model_type": "gpt_oss", "swiglu_limit": 5})
    with pytest.raises(UnsupportedModel, match="quant_method=mxfp4"):
        parse_config({"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(UnsupportedModel, match="in one tensor"):
        quantize_checkpoint(tiny_model("gpt_oss"), tmp_path / "out", "int8")
