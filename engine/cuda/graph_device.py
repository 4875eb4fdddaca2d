"""Recording and replay of device work: CUDA graphs, or plain calls on other devices.

Recorded work reads and writes tensors at fixed addresses and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Recorded device work."""

    def replay(self) -> None:
        """Queue the work behind the current stream's. Does not wait for it."""
        ...


class GraphDevice(Protocol):
    """A device that records and replays graphs. Called by one thread."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """Pinned int32 host memory, for asynchronous copies to the device."""
        ...

    def fence(self) -> Callable[[], None]:
        """Return a function that waits for all work queued on the current stream before this
        call."""
        ...

    def record(self, run: Callable[[], None]) -> Graph:
        """Record the device work of `run`, which is called at least once, with effect."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: only one may run at a time, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """See GraphDevice: page-locked."""
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def fence(self) -> Callable[[], None]:
        """See GraphDevice."""
        make_event: Any = torch.cuda.Event
        event = make_event()
        event.record(torch.cuda.current_stream(self._device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def record(self, run: Callable[[], None]) -> Graph:
        """See GraphDevice. The first call is not captured: it compiles kernels and initialises
        libraries."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph: Any = torch.cuda.CUDAGraph()
            # Transfer threads may allocate and synchronise during capture; these are not captured.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                run()
        return CudaGraph(graph, self._device)


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """See Graph."""

    graph: Any
    device: torch.device

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


class CalledGraphs:
    """Graphs for devices without CUDA: replay calls the function again."""

    def __init__(self, device: torch.device) -> None:
        """device: any device."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """See GraphDevice."""
        return torch.empty(num_words, dtype=torch.int32)

    def fence(self) -> Callable[[], None]:
        """See GraphDevice: what was called is done."""
        return lambda: None

    def record(self, run: Callable[[], None]) -> Graph:
        """See GraphDevice."""
        run()
        return CalledGraph(run)


@dataclass(frozen=True, slots=True)
class CalledGraph:
    """See Graph."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()
