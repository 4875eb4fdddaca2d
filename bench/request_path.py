"""What one plain request crosses, from SDK to SDK: files, functions and threads of this project.

python -m bench.request_path [--list]: gateway, prefill and decode worker run in this process, with
a profile function in every thread. A first request warms them up; the next one is watched, and is
handed over. What also runs without a request, such as heartbeats and load reports, is watched for a
second beside it and counted apart.

A function is what a reader meets as one: a `def` or a lambda. Generator expressions, and before
Python 3.12 comprehensions, run in frames of their own, too: they count as part of the function that
they stand in.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any, NamedTuple

from baton.client import AsyncClient, SamplingParams
from baton.config import DecodeOptions, GatewayOptions, PrefillOptions
from baton.service import ReadyReport
from bench.machine import BUNDLED_MODEL, ROOT
from decode_svc.server import serve_decode
from gateway.server import serve_gateway
from prefill_svc.server import serve_prefill

FOLDERS = [
    "baton",
    "gateway",
    "prefill_svc",
    "decode_svc",
    "worker_core",
    "kv_transfer",
    "engine",
    "kernels",
]
_OURS = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
_IDLE_S = 1.0
#: Code that runs in frames of its own and is no function to a reader.
_NO_FUNCTIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"})


class Function(NamedTuple):
    """One of ours that ran. file: below the repository's root."""

    file: str
    name: str


class Watch:
    """Notes which functions run while it is on. To be set before any thread is started."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: set[Function] = set()
        self.threads: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG002
        code = frame.f_code
        if (
            self.is_on
            and event == "call"
            and code.co_filename.startswith(_OURS)
            and code.co_name not in _NO_FUNCTIONS
        ):
            file = code.co_filename.removeprefix(f"{ROOT}/")
            self.functions.add(Function(file, code.co_qualname))
            self.threads.add(threading.current_thread().name)

    def take(self) -> tuple[set[Function], set[str]]:
        """What ran, and in which threads, since the last call."""
        taken = self.functions, self.threads
        self.functions, self.threads = set(), set()
        return taken


@asynccontextmanager
async def serving(
    serve: Callable[[Any, asyncio.Event, Callable[[ReadyReport], None]], Awaitable[None]],
    options: object,
) -> AsyncIterator[str]:
    """Run a service in this process; yields its address."""
    stop = asyncio.Event()
    ready: asyncio.Future[ReadyReport] = asyncio.get_running_loop().create_future()
    task: asyncio.Future[None] = asyncio.ensure_future(serve(options, stop, ready.set_result))
    try:
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result().address
    finally:
        stop.set()
        await task


async def watch_request(watch: Watch) -> tuple[set[Function], set[str], int]:
    """Functions and threads of one request; and how many functions of those run without one,
    too."""
    options: dict[str, Any] = {
        "model": BUNDLED_MODEL,
        "max_model_len": 256,
        "num_gpu_blocks_override": 256,
        "num_threads": 1,
        "drain_timeout_s": 1.0,
    }
    prompt = "def fibonacci(n):\n    " * 4
    params = SamplingParams(temperature=0.0, max_tokens=8)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(serving(serve_prefill, PrefillOptions(**options)))
        decode = await enter(
            serving(serve_decode, DecodeOptions(**options, max_local_prefill_tokens=0))
        )
        front = await enter(
            serving(
                serve_gateway,
                GatewayOptions(
                    model=BUNDLED_MODEL,
                    port=0,
                    prefill_workers=(prefill,),
                    decode_workers=(decode,),
                    drain_timeout_s=1.0,
                ),
            )
        )
        client = await enter(AsyncClient(front, max_retries=0))
        await client.generate(prompt, params)
        watch.is_on = True
        done = await client.generate(f"import os\n{prompt}", params)
        watch.is_on = False
        functions, threads = watch.take()
        if not done.timing.transfer_bytes:
            raise RuntimeError("the request was not handed over")
        watch.is_on = True
        await asyncio.sleep(_IDLE_S)
        watch.is_on = False
        idle, _ = watch.take()
        return functions - idle, threads, len(idle & functions)


def main() -> None:
    """Prints the counts; with --list the functions, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function, by file")
    arguments = parser.parse_args()
    watch = Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    functions, threads, num_idle = asyncio.run(watch_request(watch))
    sys.setprofile(None)
    threading.setprofile(None)
    if arguments.list:
        for function in sorted(functions):
            print(*function)
    num_files = len({function.file for function in functions})
    print(
        f"{num_files} files, {len(functions)} functions, {len(threads)} threads; "
        f"{num_idle} further functions run without a request, too"
    )


if __name__ == "__main__":
    main()
