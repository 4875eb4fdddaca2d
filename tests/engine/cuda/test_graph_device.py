"""How decode steps are captured on a CUDA device, seen on a stub of torch's interface to it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import load as load_engine
from engine.cuda import graph_device
from engine.cuda.graph_device import CudaGraphs

DEVICE = torch.device("cuda", 1)


def test_capture_is_of_the_calling_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfer threads allocate and wait while graphs are captured: by CUDA's default that would
    end the capture. The call before it compiles, and shares the graphs' stream and memory."""
    events: list[str] = []
    captures: list[dict[str, Any]] = []
    stream = SimpleNamespace(wait_stream=lambda _: None)

    class Capture(nullcontext[None]):
        def __init__(self, graph: object, **options: Any) -> None:
            super().__init__()
            captures.append({"graph": graph, **options})
            events.append("capture")

    cuda = SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        Stream=lambda _: stream,
        device=lambda _: nullcontext(),
        current_stream=lambda: stream,
        stream=lambda _: nullcontext(),
        CUDAGraph=object,
        graph=Capture,
    )
    monkeypatch.setattr(graph_device.torch, "cuda", cuda)
    graphs = CudaGraphs(DEVICE)
    graphs.record(lambda: events.append("run"))
    graphs.record(lambda: events.append("run"))
    assert events == ["run", "capture", "run"] * 2
    for capture in captures:
        assert capture["capture_error_mode"] == "thread_local"
        assert (capture["pool"], capture["stream"]) == ("pool", stream)


@pytest.mark.parametrize(
    ("free", "share", "available"), [(80, 0.8, 64), (80, 1.0, 80), (50, 0.8, 50), (0, 0.8, 0)]
)
def test_a_share_is_of_all_memory_of_a_gpu_as_far_as_it_is_free(
    free: int, share: float, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's --gpu-memory-utilization: of two workers with 0.4 each gets 32 of 80 GB, though the
    second finds 48 free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80))
    assert load_engine._gpu_bytes(DEVICE, share) == available
