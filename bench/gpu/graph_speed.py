"""Decode steps of the engine of bench.gpu.engine_speed, replayed and eager: equality and speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from baton_kernels.linear import has_float8
from bench.gpu.engine_speed import Model, load_model
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_eager_ms
from engine.cuda.graph_device import CalledGraphs, CudaGraphs, Graph, GraphDevice
from engine.cuda.recorded_decoder import RecordedDecoder
from engine.cuda.step_graphs import ReplayedSteps, plan_graphs
from engine.interface import Batch
from engine.quantization.weight import Float8Weight
from engine.ranks.followers import NoFollowers
from engine.torch.decoder import Decoder
from engine.torch.device_tables import DeviceTables, table_width
from engine.torch.engine import TorchEngine
from engine.torch.packed import Packing, pack_parameters
from engine.torch.parameters import empty_parameters
from engine.torch.step import NO_ADAPTERS
from engine.torch.step_adapters import StepAdapters
from engine.torch.step_runner import EagerSteps, FirstStage, StepModel, StepRunner

#: Relative difference of logits between padded and unpadded batches: cuBLAS chooses kernels by the
#: number of rows, which changes rounding.
_TOLERANCE = 0.03


class _LastGraphs:
    """A device's graphs, and the one that was replayed last."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self.last: Graph | None = None

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """See GraphDevice."""
        return self._device.host_buffer(num_words)

    def fence(self) -> Callable[[], None]:
        """See GraphDevice."""
        return self._device.fence()

    def record(self, run: Callable[[], None]) -> Graph:
        """See GraphDevice."""
        return _Noted(self._device.record(run), self)


class _Noted:
    def __init__(self, graph: Graph, graphs: _LastGraphs) -> None:
        self._graph = graph
        self._graphs = graphs

    def replay(self) -> None:
        """See Graph."""
        self._graphs.last = self._graph
        self._graph.replay()


class Replayed:
    """A model with an engine that replays decode steps, besides its eager one."""

    def __init__(
        self,
        setting: Setting,
        model: Model,
        decoder: Decoder,
        largest: int,
        max_len: int,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> None:
        """decoder: of the model's config. largest, max_len: maximum sequences of a step and tokens
        per sequence that graphs support. adapters: of the worker."""
        self.model = model
        make = CalledGraphs if setting.is_dry else CudaGraphs
        self.graphs = _LastGraphs(make(setting.device))
        parts = StepModel(model.config, decoder, model.rope, model.kv, adapters)
        recorded = RecordedDecoder(parts)
        plan = plan_graphs(recorded.sizes, model.kv.tensor, setting.half, largest, max_len)
        width = table_width(max_len, model.kv.layout.block_size)
        tables = DeviceTables(largest, width, setting.device)
        self.eager = EagerSteps(parts, NoFollowers(), tables)
        start = time.perf_counter()
        self.steps = ReplayedSteps(recorded, tables, plan, self.graphs, self.eager, NoFollowers())
        self.capture_s = time.perf_counter() - start
        self.num_graphs = len(plan.shapes)
        self.engine = self.engine_of(self.steps, 1)
        self.eager_engine = self.engine_of(self.eager, 1)

    def engine_of(self, steps: StepRunner, max_num_launches: int) -> TorchEngine:
        """steps: one of this object's runners."""
        spec = replace(self.model.engine.spec, max_num_launches=max_num_launches)
        return TorchEngine(spec, self.model.kv, steps, 4, NoFollowers(), torch.cuda.synchronize)


@cache
def load_replayed(setting: Setting) -> Replayed:
    """The model of this process with its graphs, loaded once."""
    model = load_model(setting)
    return Replayed(setting, model, model.decoder, setting.pick(256, 2), setting.pick(2048, 64))


def _float8_decoder(model: Model, setting: Setting) -> Decoder:
    """Random weights by the model's config, with float8 linear layers."""
    meta = torch.device("meta")
    parameters = empty_parameters(model.config, setting.half, setting.device, of_linears=meta)
    packing = Packing(setting.device)
    for name, target in parameters.targets():
        if target.tensor.is_meta:
            codes = setting.randn(*target.shape).to(torch.float8_e4m3fn)
            num_out, num_in = target.shape
            scales = torch.full((num_out, 1), 0.02, device=setting.device)
            packing.keep(name.removesuffix(".weight"), Float8Weight(codes, scales, num_in))
        else:
            target.tensor.normal_(std=0.02, generator=setting.generator())
    return Decoder(model.config, pack_parameters(parameters, packing))


def _decode(num_seqs: int, setting: Setting) -> Result:
    """See _step_times."""
    with on_kernels(setting):
        return _step_times(load_replayed(setting), num_seqs, 2, setting)


def _float8_decode(num_seqs: int, setting: Setting) -> Result:
    """See _step_times. Two float8 products count as one on the 16-bit roof, but bytes are the floor
    of these steps."""
    if not (setting.is_dry or has_float8(setting.device, setting.half)):
        return {"skipped": f"{torch.cuda.get_device_name()} has no float8 products"}
    with on_kernels(setting):
        model, largest = load_model(setting), setting.pick(num_seqs, 2)
        decoder = _float8_decoder(model, setting)
        found = Replayed(setting, model, decoder, largest, setting.pick(2048, 64))
        return _step_times(found, num_seqs, 1, setting)


def replayed_step(found: Replayed, batch: Batch) -> tuple[Graph, Callable[[], torch.Tensor]]:
    """The graph of a step, run once, and a function that launches the same step eagerly."""
    found.steps.run(batch, None)
    replayed = found.graphs.last
    if replayed is None:
        raise RuntimeError("the step was not replayed")

    def eager() -> torch.Tensor:
        step = found.eager.run(batch, None)
        if isinstance(step, FirstStage):
            step = step.collect()
        return step.logits(range(step.num_rows))

    return replayed, eager


def _step_times(found: Replayed, num_seqs: int, weight_bytes: int, setting: Setting) -> Result:
    """Sequences of 1K tokens. ms: replay of a padded step. eager_ms: the same launched by Python.
    engine_ms: Engine.forward: planning, copying, replaying and sampling; eager_engine_ms: without
    graphs."""
    cached = setting.pick(1023, 20)
    batch = found.model.batch(setting.pick(num_seqs, 2), cached, 1)
    replayed, eager = replayed_step(found, batch)
    return {
        "ms": time_eager_ms(replayed.replay, setting),
        "eager_ms": time_eager_ms(eager, setting),
        "engine_ms": time_eager_ms(lambda: found.engine.forward(batch), setting),
        "eager_engine_ms": time_eager_ms(lambda: found.eager_engine.forward(batch), setting),
        **found.model.step_floor(len(batch.slices), cached, 1, weight_bytes),
    }


def _check(setting: Setting) -> Result:
    """Compare the logits of replayed steps of several shapes with those of eager steps. worst: the
    row with the largest error of its own."""
    with on_kernels(setting):
        found = load_replayed(setting)
        largest = setting.pick(256, 2)
        steps: list[float] = []
        rows: list[tuple[float, int, int]] = []
        for num_seqs in (1, max(1, largest - 1), largest, 1):
            batch = found.model.batch(num_seqs, setting.pick(700, 20), 1)
            found.graphs.last = None
            got = found.engine.logits(batch).double().clone()
            if found.graphs.last is None:
                raise RuntimeError("the step was not replayed")
            wanted = found.model.engine.logits(batch).double()
            steps.append(float((got - wanted).norm() / wanted.norm()))
            errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
            # NaN counts as the worst.
            error, row = errors.nan_to_num(nan=torch.inf).max(dim=0)
            rows.append((float(error), int(row), num_seqs))
    worst, worst_row, num_seqs = max(rows)
    # Written before it is judged, so that it is there whatever becomes of the judgement.
    place = f"row {worst_row} of {num_seqs}"
    print(f"check decode graphs: worst is {place}, error {worst:.3g}", file=sys.stderr, flush=True)
    return {
        "error": max(steps),
        "worst": place,
        "worst_error": worst,
        "tolerance": _TOLERANCE,
        "num_graphs": float(found.num_graphs),
        "capture_s": found.capture_s,
        "verdict": "right" if all(error <= _TOLERANCE for error in steps) else "WRONG",
    }


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "check decode graphs": _check,
    "engine decode 1 x 1K": partial(_decode, 1),
    "engine decode 8 x 1K": partial(_decode, 8),
    "engine decode 64 x 1K": partial(_decode, 64),
    "engine decode 256 x 1K": partial(_decode, 256),
    "engine decode 1 x 1K, fp8 weights": partial(_float8_decode, 1),
    "engine decode 64 x 1K, fp8 weights": partial(_float8_decode, 64),
}
