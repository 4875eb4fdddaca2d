"""Decode steps of the engine of bench.gpu.engine_speed, replayed and eager: are they the same, and how long do they take?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from baton.engine.followers import NoFollowers
from baton.engine.graph_device import CalledGraphs, CudaGraphs, Graph, GraphDevice
from baton.engine.step_graphs import ReplayedSteps, plan_graphs
from baton.engine.step_runner import EagerSteps, StepModel
from baton.engine.torch_engine import TorchEngine
from bench.gpu.engine_speed import Model, load_model
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting, time_eager_ms

#: Logits of a padded batch differ from those of the batch by rounding: cuBLAS chooses its kernels by the number of rows.
_TOLERANCE = 0.03


class _LastGraphs:
    """A device's graphs, and which of them was replayed last."""

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
    """The benchmark's model with an engine that replays decode steps, beside its own, which does not."""

    def __init__(self, setting: Setting) -> None:
        self.model: Model = load_model(setting)
        model, followers = self.model, NoFollowers()
        make = CalledGraphs if setting.is_dry else CudaGraphs
        self.graphs = _LastGraphs(make(setting.device))
        pool = model.kv.tensor
        plan = plan_graphs(
            model.config, pool, setting.half, setting.pick(256, 2), setting.pick(2048, 64)
        )
        parts = StepModel(model.config, model.decoder, model.rope, model.kv)
        self.eager = EagerSteps(parts, followers)
        start = time.perf_counter()
        self.steps = ReplayedSteps(parts, plan, self.graphs, self.eager)
        self.capture_s = time.perf_counter() - start
        self.num_graphs = len(plan.shapes)
        self.engine = TorchEngine(model.engine.spec, model.kv, self.steps, 4, followers)


@cache
def _replayed(setting: Setting) -> Replayed:
    return Replayed(setting)


def _decode(num_seqs: int, cached: int, setting: Setting) -> Result:
    """ms: a replay, all operations of a step padded to its shape. eager_ms: the same as Python launches it. engine_ms: Engine.forward, that
    is, planning, copying, replaying and sampling; eager_engine_ms: without graphs."""
    with on_kernels(setting):
        found = _replayed(setting)
        batch = found.model.batch(setting.pick(num_seqs, 2), setting.pick(cached, 20), 1)
        found.steps.run(batch, None)
        replayed = found.graphs.last
        if replayed is None:
            raise RuntimeError("the step was not replayed")

        def eager() -> torch.Tensor:
            step = found.eager.run(batch, None)
            return step.logits(range(step.num_rows))

        return {
            "ms": time_eager_ms(replayed.replay, setting),
            "eager_ms": time_eager_ms(eager, setting),
            "engine_ms": time_eager_ms(lambda: found.engine.forward(batch), setting),
            "eager_engine_ms": time_eager_ms(lambda: found.model.engine.forward(batch), setting),
            **found.model.step_floor(len(batch.slices), setting.pick(cached, 20), 1),
        }


def _check(setting: Setting) -> Result:
    """Logits of steps of several shapes, one after the other, beside those of the same steps run eagerly."""
    with on_kernels(setting):
        found = _replayed(setting)
        largest = setting.pick(256, 2)
        errors: list[float] = []
        for num_seqs in (1, max(1, largest - 1), largest, 1):
            batch = found.model.batch(num_seqs, setting.pick(700, 20), 1)
            found.graphs.last = None
            got = found.engine.logits(batch).double().clone()
            if found.graphs.last is None:
                raise RuntimeError("the step was not replayed")
            wanted = found.model.engine.logits(batch).double()
            errors.append(float((got - wanted).norm() / wanted.norm()))
    worst = max(errors)
    return {
        "error": worst,
        "tolerance": _TOLERANCE,
        "num_graphs": float(found.num_graphs),
        "capture_s": found.capture_s,
        "verdict": "right" if all(error <= _TOLERANCE for error in errors) else "WRONG",
    }


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "check decode graphs": _check,
    "engine decode 1 x 1K": partial(_decode, 1, 1023),
    "engine decode 8 x 1K": partial(_decode, 8, 1023),
    "engine decode 64 x 1K": partial(_decode, 64, 1023),
    "engine decode 256 x 1K": partial(_decode, 256, 1023),
}
