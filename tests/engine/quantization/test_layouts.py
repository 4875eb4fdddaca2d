"""Checkpoints of other tools' layouts give the logits of a dense model with the weights that they
mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import MissingTensor, TensorMismatch, UnsupportedModel
from baton.types import Sampling
from baton_kernels.linear import Linear, PlainLinear, pack_float8
from engine.families.read import read_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.quantization.config import parse_quantization
from engine.quantization.weight import Float8Weight, QuantizedWeight, stack
from engine.torch import load
from engine.torch import packed as packed_parameters
from tests.support.engines import load_engine
from tests.support.quantized_models import (
    AWQ,
    GPTQ,
    GROUP,
    Encode,
    awq,
    compressed,
    float8_in_blocks,
    gptq,
    in_blocks,
    int8_pieces,
    make_quantized,
    packed,
    round_weight,
)
from tests.support.tiny_models import Family

PROMPT = [7, 99, 250, 3, 3, 41, 180, 12, 77, 5, 64]


def int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rounded = round_weight(weight, 8, weight.shape[1], symmetric=True)
    return int8_pieces(rounded), rounded.dense()


def float8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = torch.tensor([0.01])
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def float8_by_output(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As a tool leaves it that has calibrated how inputs are rounded, too."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    pieces = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor([0.03])}
    return pieces, numbers.float() * scale


def float8_static(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale, and one calibrated for inputs, by the names of transformers."""
    pieces, dense = float8(weight)
    scales = {"weight_scale_inv": torch.tensor(0.01), "activation_scale": torch.tensor(0.03)}
    return {"weight": pieces["weight"], **scales}, dense


STATIC = {"quant_method": "fp8", "activation_scheme": "static"}

CASES: dict[str, tuple[Encode, dict[str, Any]]] = {
    "gptq-4": (gptq(4, 1, shuffled=False), GPTQ),
    "gptq-8": (gptq(8, 1, shuffled=False), GPTQ | {"bits": 8}),
    "gptq-v2": (gptq(4, 0, shuffled=False), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-reordered": (gptq(4, 1, shuffled=True), GPTQ | {"desc_act": True}),
    "awq": (awq, AWQ),
    "packed-4": (
        packed(4, True),
        compressed("pack-quantized", num_bits=4, symmetric=True, **GROUP),
    ),
    "packed-8": (
        packed(8, True),
        compressed("pack-quantized", num_bits=8, symmetric=True, **GROUP),
    ),
    "packed-4-zeros": (
        packed(4, False),
        compressed("pack-quantized", num_bits=4, symmetric=False, **GROUP),
    ),
    "packed-4-reordered": (
        packed(4, True, shuffled=True),
        compressed("pack-quantized", num_bits=4, symmetric=True, actorder="group", **GROUP),
    ),
    "int8": (
        int8,
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    ),
    "float8": (
        float8,
        compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor"),
    ),
    "float8-by-output": (
        float8_by_output,
        compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
    ),
    "float8-one-scale": (float8, STATIC),
    "float8-static": (float8_static, STATIC | {"weight_block_size": None}),
    "float8-in-blocks": (float8_in_blocks(24, 16), in_blocks(24, 16)),
    "float8-in-blocks-of-any-size": (float8_in_blocks(128, 40), in_blocks(128, 40)),
}


@pytest.fixture(params=CASES)
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    encode, quantization = CASES[request.param]
    return make_quantized(tmp_path, encode, quantization)


def logits_of(path: Path, dtype: str) -> torch.Tensor:
    engine = load_engine(str(path), num_blocks=4, dtype=dtype)
    rows = tuple(SampleRow(i, Sampling(), PROMPT[: i + 1], len(PROMPT)) for i in range(len(PROMPT)))
    return engine.logits(Batch((SequenceSlice(PROMPT, 0, range(4), rows, len(PROMPT)),)))


@pytest.mark.few_cases(3)
def test_logits_are_those_of_the_dense_model(checkpoints: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    quantized, dense = checkpoints
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float64)
    wanted = model(torch.tensor([PROMPT])).logits[0].detach().float()
    torch.testing.assert_close(logits_of(quantized, "float32"), wanted, atol=1e-4, rtol=0)
    # In bfloat16 some CPUs keep the levels and round activations to int8.
    error = (logits_of(quantized, "bfloat16") - wanted).norm() / wanted.norm()
    assert error < 0.15


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("name", "group_size"), [("float8", 0), ("float8-by-output", 0), ("float8-in-blocks", 16)]
)
def test_float8_that_is_kept_is_multiplied_as_it_is(
    name: str, group_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that can; by the kernel's twin. Logits are transformers' with each layer's inputs
    rounded to float8."""
    from transformers import AutoModelForCausalLM

    quantized, dense = make_quantized(tmp_path, *CASES[name])
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: rounded_rows(inputs[0], group_size))
    wanted = model(torch.tensor([PROMPT])).logits[0].detach()
    calls = []

    def float8(*args: Any) -> Linear:
        calls.append(args)
        return pack_float8(*args)

    monkeypatch.setattr(load, "keeps_float8", lambda *_: True)
    monkeypatch.setattr(packed_parameters, "pack_float8", float8)
    got = logits_of(quantized, "float32")
    # qkv, output, gate_up and down of two layers.
    assert len(calls) == 8
    error = (got - wanted).norm() / wanted.norm()
    # An activation between two codes may fall to either side.
    assert error < 0.01
    assert (wanted - logits_of(dense, "float32")).norm() / wanted.norm() > 0.05


def rounded_rows(x: torch.Tensor, group_size: int) -> torch.Tensor:
    runs = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    scales = runs.abs().amax(-1, keepdim=True) / 448
    return ((runs / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_blocks_of_families_that_are_published_so(
    family: Family, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that are reordered, taken apart or stacked keep their blocks' scales, whether weights
    are dequantised as they are read or kept as they are stored."""
    encode = float8_in_blocks(24, 8)
    quantized, dense = make_quantized(tmp_path, encode, in_blocks(24, 8), family=family)

    def pack(
        codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, _: Any
    ) -> Linear:
        return PlainLinear(Float8Weight(codes, scales, 8).dequantize(), bias)

    monkeypatch.setattr(packed_parameters, "pack_float8", pack)
    monkeypatch.setattr(load, "keeps_float8", lambda *_: is_kept)
    wanted = logits_of(dense, "float32")
    got = logits_of(quantized, "float32")
    torch.testing.assert_close(got, wanted, atol=1e-4 if is_kept else 0, rtol=0)


def test_blocks_of_another_size_are_named(tmp_path: Path) -> None:
    quantized, _ = make_quantized(tmp_path, float8_in_blocks(24, 16), in_blocks(16, 16))
    with pytest.raises(TensorMismatch, match="weight_scale_inv is"):
        logits_of(quantized, "float32")


def test_layers_left_out_of_float8_are_read_as_they_are(tmp_path: Path) -> None:
    """modules_to_not_convert: what they are can be seen of their types."""
    encode = float8_in_blocks(24, 16)
    quantized, dense = make_quantized(tmp_path, encode, in_blocks(24, 16))
    plain = load_file(dense / "model.safetensors")
    left_out = "model.layers.1.mlp.down_proj"

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{left_out}.weight_scale_inv"]
        tensors[f"{left_out}.weight"] = plain[f"{left_out}.weight"].bfloat16()

    before = logits_of(quantized, "bfloat16")
    edit_weights(quantized, leave_out)
    assert torch.equal(logits_of(quantized, "bfloat16"), before)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["float8-static", "float8-by-output"])
def test_calibrated_scales_of_kv_change_nothing(name: str, tmp_path: Path) -> None:
    """They are for KV in 8 bits, which has a scale for each row here."""
    quantized, _ = make_quantized(tmp_path, *CASES[name])
    before = logits_of(quantized, "bfloat16")
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    path.write_text(json.dumps(config))
    one = torch.tensor([0.07])
    places = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.k_scale")
    scales = {f"model.layers.1.{place}": one.clone() for place in places}
    edit_weights(quantized, lambda tensors: tensors.update(scales))
    assert torch.equal(logits_of(quantized, "bfloat16"), before)


def test_weights_of_integers_and_floats_are_not_stacked() -> None:
    levels = QuantizedWeight(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1), None, 8)
    codes = Float8Weight(torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.ones(2, 1), 32)
    with pytest.raises(ValueError, match="schemes"):
        stack([levels, codes])


def test_float8_of_another_kind_is_refused(tmp_path: Path) -> None:
    def other(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        pieces, dense = float8(weight)
        return pieces | {"weight": dense.to(torch.float8_e5m2)}, dense

    quantized, _ = make_quantized(tmp_path, other, CASES["float8"][1])
    with pytest.raises(TensorMismatch, match="float8_e5m2"):
        logits_of(quantized, "float32")


@pytest.fixture
def packed_model(tmp_path: Path) -> Path:
    return make_quantized(tmp_path, *CASES["packed-4"])[0]


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def test_a_missing_piece_is_named(packed_model: Path) -> None:
    edit_weights(packed_model, lambda tensors: tensors.pop(SCALE))
    with pytest.raises(MissingTensor, match=r"layers\.1\.mlp\.up_proj.*weight_scale"):
        logits_of(packed_model, "float32")


def test_pieces_that_do_not_fit_are_named(packed_model: Path) -> None:
    edit_weights(packed_model, lambda tensors: tensors.update({SCALE: torch.ones(112, 5)}))
    with pytest.raises(TensorMismatch, match="up_proj"):
        logits_of(packed_model, "float32")


def test_a_weight_of_another_model_is_named(packed_model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_shape"
    edit_weights(packed_model, lambda tensors: tensors.update({name: torch.tensor([112, 48])}))
    with pytest.raises(TensorMismatch, match="up_proj"):
        logits_of(packed_model, "float32")


def test_biases_of_zeros_of_layers_that_have_none_are_passed_over(tmp_path: Path) -> None:
    """GPTQ's older tools wrote one for each layer."""
    path, _ = make_quantized(tmp_path, *CASES["gptq-4"])
    before = logits_of(path, "float32")
    bias = "model.layers.1.mlp.up_proj.bias"
    edit_weights(path, lambda tensors: tensors.update({bias: torch.zeros(112).half()}))
    assert torch.equal(logits_of(path, "float32"), before)
    edit_weights(path, lambda tensors: tensors[bias].fill_(0.5))
    with pytest.raises(TensorMismatch, match=r"up_proj\.bias' has no place"):
        logits_of(path, "float32")


def test_pieces_in_several_files(packed_model: Path) -> None:
    whole = logits_of(packed_model, "float32")
    tensors = load_file(packed_model / "model.safetensors")
    (packed_model / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, packed_model / shard)
    places = {name: shard for shard, part in shards.items() for name in part}
    index = packed_model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(logits_of(packed_model, "float32"), whole)


INT8 = CASES["int8"][1]
INT4_GROUP = CASES["packed-4"][1]["config_groups"]["group_0"] | {"format": "pack-quantized"}
INT8_GROUP = INT8["config_groups"]["group_0"] | {"format": "int-quantized"}


@pytest.mark.parametrize(
    ("raw", "bits"),
    [
        (INT8, None),
        (INT8 | {"ignore": ["re:.*lm_head"]}, None),
        (INT8 | {"ignore": []}, 8),
        (INT8 | {"ignore": ["re:.*layers.0.*"]}, 8),
        (GPTQ, None),
        (GPTQ | {"lm_head": True}, 4),
        (AWQ, None),
        *(
            (INT8 | {"config_groups": {"a": INT4_GROUP, "b": INT8_GROUP | {"targets": [name]}}}, 8)
            for name in ("lm_head", "re:.*lm_head")
        ),
    ],
)
def test_how_the_output_layer_is_stored(raw: dict[str, Any], bits: int | None) -> None:
    config = parse_quantization(raw)
    assert config is not None
    assert (config.output_layer and config.output_layer.bits) == bits


def test_float8_has_two_names() -> None:
    """MiniMax-M2 has torch's."""
    raw = in_blocks(128, 128)
    assert parse_quantization(raw | {"fmt": "float8_e4m3fn"}) == parse_quantization(raw)


def test_scales_of_blocks_may_be_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    """scale_fmt=ue8m0: in torch's type for it, or float32."""
    quantized, dense = make_quantized(tmp_path, powers_of_two, in_blocks(24, 16))
    wanted = logits_of(dense, "float32")
    assert torch.equal(logits_of(quantized, "float32"), wanted)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: x.float() for name, x in tensors.items() if "scale_inv" in name}

    edit_weights(quantized, widen)
    assert torch.equal(logits_of(quantized, "float32"), wanted)


def powers_of_two(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    pieces, _ = float8_in_blocks(24, 16)(weight)
    scales = pieces["weight_scale_inv"].log2().ceil().exp2()
    wide = scales.repeat_interleave(24, 0)[: len(weight)].repeat_interleave(16, 1)
    codes = (weight / wide[:, : weight.shape[1]]).to(torch.float8_e4m3fn)
    dense = codes.float() * wide[:, : weight.shape[1]]
    return {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}, dense


@pytest.mark.parametrize("targets", [["Linear"], ["re:.*"], ["lm_head", "re:.*up_proj"]])
def test_a_second_group_is_for_the_output_layer_alone(targets: list[str]) -> None:
    second = INT8_GROUP | {"targets": targets}
    with pytest.raises(UnsupportedModel, match="config_groups"):
        parse_quantization(INT8 | {"config_groups": {"a": INT4_GROUP, "b": second}})


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (INT8 | {"ignore": ["re:("]}, "cannot be read"),
        (GPTQ | {"bits": 3}, "bits=3"),
        (AWQ | {"version": "gemv"}, "version=gemv"),
        ({"quant_method": "gptq"}, "cannot be read"),
        (in_blocks(128, 128) | {"activation_scheme": "other"}, "activation_scheme=other"),
        (in_blocks(128, 128) | {"fmt": "e5m2"}, "fmt=e5m2"),
        (in_blocks(128), "cannot be read"),
        (compressed("marlin-24", num_bits=4, **GROUP), "marlin-24"),
        (compressed("pack-quantized", num_bits=2, **GROUP), "num_bits=2"),
        (compressed("pack-quantized", num_bits=4, type="int", strategy="block"), "block"),
    ],
)
def test_what_is_not_read_is_refused(
    packed_model: Path, quantization: dict[str, Any], words: str
) -> None:
    path = packed_model / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    with pytest.raises(UnsupportedModel, match=words):
        read_config(packed_model)
