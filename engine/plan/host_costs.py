"""Measures what the host takes in a step besides reading weights and computing products: by steps
of Baton's own engine, with a model that has next to nothing to read or to compute.

Where ranks share the layers, this holds what they wait for each other, in steps as the engine takes
them: an exchange alone, of processes that do nothing else, takes less.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from baton.types import Sampling
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.load import load_engine
from engine.plan.degrees import NUM_GATHERS
from engine.plan.devices import HostCosts
from engine.ranks.mesh import Degrees
from engine.torch.engine import TorchEngine

_HEAD_DIM, _VOCAB, _BLOCK_SIZE = 32, 256, 16
#: Layers of both models, and sequences of both steps: each cost is a difference.
_FEW_LAYERS, _MANY_LAYERS = 1, 9
_MANY_SEQS = 8
_NUM_STEPS = 20


class HostProbe:
    """Two engines of `num_ranks` ranks, with one thread each, that differ in their layers."""

    def __init__(
        self,
        engines: Sequence[TorchEngine],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """engines: of _FEW_LAYERS and of _MANY_LAYERS. clock: in seconds."""
        self._few, self._many = engines
        self._clock = clock

    def measure(self) -> HostCosts:
        """The best of some steps of each kind."""
        few, many, batch = float("inf"), float("inf"), float("inf")
        for _ in range(_NUM_STEPS):
            few = min(few, self._step_s(self._few, 1))
            many = min(many, self._step_s(self._many, 1))
            batch = min(batch, self._step_s(self._many, _MANY_SEQS))
        layer_s = max(0.0, many - few) / (_MANY_LAYERS - _FEW_LAYERS)
        return HostCosts(
            max(0.0, few - _FEW_LAYERS * layer_s),
            max(0.0, batch - many) / (_MANY_SEQS - 1),
            layer_s,
        )

    def _step_s(self, engine: TorchEngine, num_seqs: int) -> float:
        row = SampleRow(0, Sampling(), (), 1)
        batch = Batch(tuple(SequenceSlice((7,), 1, (i,), (row,), 2) for i in range(num_seqs)))
        started = self._clock()
        engine.forward(batch)
        return self._clock() - started


@contextmanager
def host_probe(
    num_ranks: int, dtype: str, clock: Callable[[], float] = time.perf_counter
) -> Iterator[HostProbe]:
    """A probe; its ranks end with the context. Sets torch's threads to one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for num_layers in (_FEW_LAYERS, _MANY_LAYERS):
            own = _write_model(folder / str(num_layers), num_layers, num_ranks, dtype)
            config = EngineConfig(
                ModelChoice(str(own), dtype=dtype),
                CacheConfig(_BLOCK_SIZE, num_blocks=_MANY_SEQS),
                device=DeviceConfig(num_threads=num_ranks, degrees=Degrees(num_ranks)),
            )
            engine = load_engine(config, lambda _: None, lambda _: None)
            stack.callback(engine.close)
            engines.append(engine)
        yield HostProbe(engines, clock)


def measure_hosts(ranks: Sequence[int], dtype: str) -> Mapping[int, HostCosts]:
    """Costs by number of ranks, one among them. Takes some seconds for the start of each."""
    measured, num_threads = {}, torch.get_num_threads()
    try:
        for num_ranks in ranks:
            with host_probe(num_ranks, dtype) as probe:
                measured[num_ranks] = probe.measure()
    finally:
        torch.set_num_threads(num_threads)
    return host_costs(measured)


def _write_model(folder: Path, num_layers: int, num_ranks: int, dtype: str) -> Path:
    """Write a Llama with one head for each rank."""
    width = num_ranks * _HEAD_DIM
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": dtype,
        "vocab_size": _VOCAB,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_ranks,
        "num_key_value_heads": num_ranks,
        "max_position_embeddings": _BLOCK_SIZE,
    }
    square, norm = torch.zeros(width, width), torch.ones(width)
    tensors = {"model.norm.weight": norm}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.zeros(_VOCAB, width)
    for index in range(num_layers):
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            for name in names:
                tensors[f"model.layers.{index}.{part}.{name}_proj.weight"] = square
        for name in ("input", "post_attention"):
            tensors[f"model.layers.{index}.{name}_layernorm.weight"] = norm
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    of_type = {name: tensor.to(getattr(torch, dtype)).clone() for name, tensor in tensors.items()}
    save_file(of_type, folder / "model.safetensors")
    return folder


def host_costs(measured: Mapping[int, HostCosts]) -> Mapping[int, HostCosts]:
    """Costs by number of ranks, of those that HostProbe measured, one rank's among them: what
    several ranks take more for a layer is of its exchanges."""
    one = measured[1].layer_s

    def of(found: HostCosts) -> HostCosts:
        exchange_s = max(0.0, found.layer_s - one) / NUM_GATHERS
        return replace(found, layer_s=one, exchange_s=exchange_s)

    return MappingProxyType({num_ranks: of(found) for num_ranks, found in measured.items()})
