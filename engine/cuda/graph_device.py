"""Recording what a device is to do, once, and having it done again and again: CUDA graphs, and
calls in their place.

What is recorded reads and writes tensors at fixed addresses and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Something recorded."""

    def replay(self) -> None:
        """Have it done, after what the current stream was given so far. Does not wait for it."""
        ...


class GraphDevice(Protocol):
    """Where graphs are recorded and run. One thread calls it."""

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """int32 in host memory, which copies to the device read without a wait."""
        ...

    def fence(self) -> Callable[[], None]:
        """Waits, when called, until all is done that the current stream was given before the fence
        was made."""
        ...

    def record(self, run: Callable[[], None]) -> Graph:
        """Record what `run` has the device do. It is called, and what it does is done, at least
        once."""
        ...


class CudaGraphs:
    """CUDA graphs, which share one pool of memory: only one of them may run at a time, as on one
    stream."""

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
        """See GraphDevice. The first call, which compiles kernels and lets libraries set themselves
        up, is not captured."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            current.wait_stream(self._stream)
            graph: Any = torch.cuda.CUDAGraph()
            # Transfer threads may allocate and wait meanwhile: that is no part of the capture.
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
        """See Graph."""
        with torch.cuda.device(self.device):
            self.graph.replay()


class CalledGraphs:
    """For devices without graphs: replaying is calling again."""

    def __init__(self, device: torch.device) -> None:
        """device: as CudaGraphs has it; any will do."""

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
        """See Graph."""
        self.run()
