"""A worker refuses unsupported features of an adapter by name at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import AdapterError, ConfigError
from tests.support.adapters import make_adapter
from tests.support.architectures import make_checkpoint
from tests.support.engines import load_engine
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def load(model: Path, adapter: Path, **options: Any) -> None:
    load_engine(str(model), num_blocks=8, lora_modules={"mine": str(adapter)}, **options)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all'"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern="),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA': only LORA"),
        ({"r": 32}, "r=32 is above --max-lora-rank=16"),
        ({"r": 0}, "r=0: must be"),
        ({"lora_alpha": "much"}, "lora_alpha='much'"),
        ({"r": 3}, "none of rank r=3"),
    ],
)
def test_a_setting_that_changes_what_is_computed_is_named(
    model: Path, tmp_path: Path, setting: dict[str, Any], text: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter", model, rank=4)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **setting}))
    with pytest.raises(AdapterError) as caught:
        load(model, adapter)
    assert text in str(caught.value)


Tensors = dict[str, torch.Tensor]
_Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t | {f"{_Q}.lora_magnitude_vector": torch.ones(3)}, "lora_magnitude_vector"),
        (lambda t: t | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lora_B"),
        (
            lambda t: (
                t
                | {
                    "base_model.model.model.norm.lora_A.weight": torch.ones(4, 64),
                    "base_model.model.model.norm.lora_B.weight": torch.ones(64, 4),
                }
            ),
            "changes 'model.norm'",
        ),
        (lambda t: t | {f"{_Q}.lora_A.weight": torch.ones(4, 63)}, "is [4, 63], but"),
        (lambda t: t | {f"{_Q}.lora_B.weight": torch.ones(65, 4)}, "is [65, 4], but"),
        (lambda _: {}, "it changes nothing"),
    ],
)
def test_tensors_that_have_no_place_are_named(
    model: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], text: str
) -> None:
    adapter = make_adapter(tmp_path / "adapter", model)
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(AdapterError) as caught:
        load(model, adapter)
    assert text in str(caught.value)


def test_what_is_no_adapter_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        load(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="not a JSON object"):
        load(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: cannot be read"):
        load(model, tmp_path)


def test_routers_take_none(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    adapter = make_adapter(tmp_path / "adapter", model, targets=("mlp.gate",))
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.gate'.*not routers"):
        load(model, adapter)


def test_stacks_of_another_shape_are_named(tmp_path: Path) -> None:
    """As older PEFT wrote them, with outputs and inputs exchanged; and for other experts."""
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    stacks = ("gate_up_proj", "down_proj")
    adapter = make_adapter(tmp_path / "adapter", model, targets=(), stacks=stacks)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.mlp.experts.lora_{}.weight".format
    a, b = tensors[name("A")], tensors[name("B")]
    save_file({**tensors, name("A"): b.T.contiguous(), name("B"): a.T.contiguous()}, path)
    with pytest.raises(AdapterError, match=r"layers\.1\.mlp\.experts' changes experts of \[40, 64"):
        load(model, adapter)
    save_file({**tensors, name("A"): a[4:]}, path)
    with pytest.raises(AdapterError, match="none of rank r=4"):
        load(model, adapter)


def test_transformers_code_and_several_ranks_take_none(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", model)
    foreign = make_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(AdapterError, match="runs by transformers' code"):
        load(foreign, adapter)
    with pytest.raises(ConfigError, match=r"lora_modules=.*: adapters run on one rank only, not 2"):
        load(model, adapter, tensor_parallel_size=2)
