"""What the host holds of a quantised checkpoint while it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_kernels.quantized_linear import Float8Linear
from engine.families.read import parse_config, read_config
from engine.quantization.weight import Float8Weight, StoredWeight
from engine.torch import weights
from engine.torch.packed import Packing, pack_parameters
from engine.torch.parameters import Parameters, empty_parameters
from engine.torch.weights import StoredTensor, load_weights
from tests.support.quantized_models import (
    float8_in_blocks,
    in_blocks,
    is_projection,
    make_quantized,
    quantize,
)
from tests.support.tiny_models import make_tiny_model

GIB = 1 << 30
META = torch.device("meta")
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "quantization_config": in_blocks(128, 128),
}


class CountedPacking(Packing):
    """Notes how much is held as it is stored. num_layers, num_bytes: the most at once."""

    def __init__(self, device: torch.device, parameters: Parameters) -> None:
        linears = [linear for layer in parameters.layers for linear in layer.linears]
        super().__init__(device, [*linears, parameters.lm_head])
        self.num_layers = self.num_bytes = 0

    def keep(self, layer: str, weight: StoredWeight) -> None:
        super().keep(layer, weight)
        numbers = {re.findall(r"\d+", name)[0] for name in self.kept}
        self.num_layers = max(self.num_layers, len(numbers))
        self.num_bytes = max(self.num_bytes, sum(map(bytes_of, self.kept.values())))


def bytes_of(weight: StoredWeight) -> int:
    assert isinstance(weight, Float8Weight)
    return weight.codes.nbytes + weight.scales.nbytes


def stored_tensors(parameters: Parameters) -> Iterator[StoredTensor]:
    """A checkpoint of these parameters, all linear layers but the output in float8, in shards of
    whole layers, of no memory."""
    quantized = parameters.linear_names() - {"lm_head"}
    for name, target in parameters.targets():
        layer, shape = name.removesuffix(".weight"), tuple(target.shape)
        if layer not in quantized:
            tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device=META)}
        else:
            blocks = [-(-size // 128) for size in shape]
            codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=META)
            tensors = {name: codes, f"{name}_scale_inv": torch.empty(blocks, device=META)}
        for each, tensor in tensors.items():
            yield StoredTensor(0, Path("shard"), each, tensor)


def test_float8_of_70_billion_weights_loads_within_16_gib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Counted by sizes: what is read ahead into page-locked memory, in which torch rounds up to
    powers of two; what waits to be packed; and dense linear layers, which wait in the host's."""
    config = parse_config(LLAMA_70B)
    parameters = empty_parameters(config, torch.bfloat16, META)
    packing = CountedPacking(META, parameters)
    stored = list(stored_tensors(parameters))
    path = tmp_path / "model.safetensors"
    save_file({}, path)
    monkeypatch.setattr(weights, "_stored_tensors", lambda _: iter(stored))
    monkeypatch.setattr(weights, "_read", lambda mapped, **_: (mapped, ""))
    load_weights(tmp_path, parameters, None, config.quantization, packing)
    whole = sum(each.tensor.nbytes for each in stored)
    assert whole > 65 * GIB
    dense = parameters.lm_head.weight.nbytes
    assert packing.num_layers == 1
    assert 0 < packing.num_bytes < GIB
    assert 2 * weights._AHEAD_BYTES + packing.num_bytes + dense < 16 * GIB
    assert len(pack_parameters(parameters, packing).layers) == 80


@pytest.mark.parametrize("shuffled", [False, True])
def test_layers_are_packed_as_they_are_read_whatever_their_order(
    tmp_path: Path, shuffled: bool
) -> None:
    """Shards of whole layers: one layer is held at most. Pieces of layers in any shard: all are
    packed in the end, with the same weights."""
    path, _ = make_quantized(tmp_path, float8_in_blocks(16, 16), in_blocks(16, 16))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: (name.endswith("_inv"), name) if shuffled else name)
    for index in range(0, len(names), 5):
        part = {name: tensors[name] for name in names[index : index + 5]}
        save_file(part, path / f"model-{index:05}.safetensors")
    config = read_config(path)
    parameters = empty_parameters(config, torch.bfloat16, torch.device("cpu"))
    specs: list[Any] = [[each.spec.names for each in layer.linears] for layer in parameters.layers]
    packing = CountedPacking(torch.device("cpu"), parameters)
    load_weights(path, parameters, None, config.quantization, packing)
    assert packing.num_layers == 1
    assert not packing.kept
    for names, layer in zip(specs, pack_parameters(parameters, packing).layers, strict=True):
        for own, linear in zip(names, layer.linears, strict=True):
            codes = torch.cat([tensors[f"{name}.weight"].view(torch.uint8) for name in own])
            assert isinstance(linear, Float8Linear)
            assert torch.equal(linear.codes.view(torch.uint8), codes)


def test_a_part_of_a_weight_does_not_keep_the_whole() -> None:
    codes = torch.zeros(8, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    part = Float8Weight(codes, torch.ones(8, 1), 4).part(lambda rows: rows[:2])
    assert part.codes.untyped_storage().nbytes() == 2 * 4
    assert part.scales.untyped_storage().nbytes() == 2 * 4


def test_of_layers_that_run_as_one_and_are_quantised_in_part_all_are_dense(tmp_path: Path) -> None:
    path = quantize(
        make_tiny_model(tmp_path / "dense"),
        tmp_path / "quantized",
        float8_in_blocks(16, 16),
        in_blocks(16, 16),
        lambda name, _: is_projection(name) and "k_proj" not in name,
    )
    config = read_config(path)
    parameters = empty_parameters(config, torch.bfloat16, torch.device("cpu"))
    packing = CountedPacking(torch.device("cpu"), parameters)
    load_weights(path, parameters, None, config.quantization, packing)
    for layer in pack_parameters(parameters, packing).layers:
        first, *_ = layer.linears
        assert not isinstance(first, Float8Linear)
        assert isinstance(layer.mlp.down, Float8Linear)
