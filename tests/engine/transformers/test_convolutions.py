"""On a CPU without fast convolutions in 16 bits, state layers convolve in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM

from engine.shard import WHOLE
from engine.transformers.convolutions import widen_convolutions
from engine.transformers.devices import kind_of
from engine.transformers.shared import Share

NUM_CHANNELS = 24


class Lfm2ShortConv(nn.Module):
    """A state layer by its name, called in the ways of transformers' code."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            NUM_CHANNELS, NUM_CHANNELS, 4, padding=3, groups=NUM_CHANNELS, dtype=dtype
        )

    def by_module(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x)
        return made

    def by_views(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight.squeeze(1)
        return F.conv1d(x, weight.unsqueeze(1), self.conv.bias, padding=3, groups=NUM_CHANNELS)

    def by_product(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., :4] * self.conv.weight.squeeze(1)).sum(-1)


def layer_of(dtype: torch.dtype) -> Lfm2ShortConv:
    torch.manual_seed(0)
    return Lfm2ShortConv(dtype)


@pytest.mark.parametrize("way", [Lfm2ShortConv.by_module, Lfm2ShortConv.by_views])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_convolution_is_that_of_float32_rounded(
    dtype: torch.dtype,
    way: Callable[[Lfm2ShortConv, torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer, x = layer_of(dtype), torch.randn(2, NUM_CHANNELS, 9).to(dtype)
    wide = layer_of(dtype).float()
    widen_convolutions(layer)
    found = way(layer, x)
    assert type(found) is torch.Tensor
    assert torch.equal(found, way(wide, x.float()).to(dtype))


@torch.inference_mode()
def test_other_uses_of_a_weight_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer, x = layer_of(torch.bfloat16), torch.randn(2, NUM_CHANNELS, 9).bfloat16()
    before = layer.by_product(x)
    widen_convolutions(layer)
    found = layer.by_product(x)
    assert type(found) is torch.Tensor
    assert torch.equal(found, before)


@pytest.mark.parametrize(
    ("capability", "dtype"), [("AVX512", torch.bfloat16), ("AVX2", torch.float32)]
)
def test_weights_that_are_computed_fast_stay(
    capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    layer = layer_of(dtype)
    widen_convolutions(layer)
    assert isinstance(layer.conv.weight, nn.Parameter)


@torch.inference_mode()
def test_a_model_on_a_cpu_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Lfm2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    model = Lfm2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    kind_of(torch.device("cpu")).prepare(model, Share(WHOLE))
    assert not isinstance(model.model.layers[0].conv.conv.weight, nn.Parameter)
