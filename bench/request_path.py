"""Files, functions and threads of this project that one plain request crosses.

python -m bench.request_path [--list] [--drafts]: gateway, prefill and decode worker run in this
process, with a profile function in every thread. After a warm-up request, the next one is recorded,
with handoff: once by gRPC from SDK to SDK, and once as a chat by HTTP from socket to socket. Files
between the socket and a worker's step are also counted separately. Work that runs without requests
(heartbeats, load reports) is recorded for a second and counted separately.

A function is a `def` or a lambda. Generator expressions, and before Python 3.12 comprehensions,
have their own frames: they count as part of the enclosing function.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
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
#: Places of a request between its client's socket and a worker's step.
_TO_A_STEP = (
    *("gateway/", "baton/"),
    *(f"worker_core/{name}.py" for name in ("sequence_service", "worker", "loop", "core")),
)
_IDLE_S = 1.0
#: Code with its own frames that a reader does not see as a function.
_NO_FUNCTIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"})


class Function(NamedTuple):
    """One of ours that ran. file: below the repository's root."""

    file: str
    name: str


class Watch:
    """Records the functions that run while it is on. Set it before any thread starts."""

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
        """Functions and threads recorded since the last call."""
        taken = self.functions, self.threads
        self.functions, self.threads = set(), set()
        return taken


@asynccontextmanager
async def serving(
    serve: Callable[[Any, asyncio.Event, Callable[[ReadyReport], None]], Awaitable[None]],
    options: object,
) -> AsyncIterator[ReadyReport]:
    """Run a service in this process; yields what it reports when it is ready."""
    stop = asyncio.Event()
    ready: asyncio.Future[ReadyReport] = asyncio.get_running_loop().create_future()
    task: asyncio.Future[None] = asyncio.ensure_future(serve(options, stop, ready.set_result))
    try:
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result()
    finally:
        stop.set()
        await task


_PROMPT = "def fibonacci(n):\n    " * 4


class Path(NamedTuple):
    """Record of one request. num_idle: functions that also run without a request."""

    functions: frozenset[Function]
    num_threads: int
    num_idle: int


async def generate(client: AsyncClient, prompt: str) -> None:
    """One request by gRPC."""
    done = await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))
    if not done.timing.transfer_bytes:
        raise RuntimeError("the request was not handed over")


async def chat(address: str, prompt: str) -> None:
    """One streamed chat by HTTP/1.1, with a connection of its own."""
    message = {"role": "user", "content": prompt}
    asked = {"messages": [message], "max_tokens": 8, "temperature": 0, "stream": True}
    body = json.dumps(asked)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    if b" 200 " not in answer[:16] or b"[DONE]" not in answer:
        raise RuntimeError(f"the chat failed: {answer[:400]!r}")


async def watch_requests(watch: Watch, *, has_drafts: bool) -> Mapping[str, Path]:
    """Record the path of each kind of request."""
    options: dict[str, Any] = {
        "model": BUNDLED_MODEL,
        "max_model_len": 256,
        "num_gpu_blocks_override": 256,
        "num_threads": 1,
        "drain_timeout_s": 1.0,
    }
    of_decode: dict[str, Any] = {"max_local_prefill_tokens": 0}
    if not has_drafts:
        of_decode["speculative_method"] = "none"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(serving(serve_prefill, PrefillOptions(**options)))
        decode = await enter(serving(serve_decode, DecodeOptions(**options, **of_decode)))
        front = await enter(
            serving(
                serve_gateway,
                GatewayOptions(
                    model=BUNDLED_MODEL,
                    port=0,
                    enable_http=True,
                    http_port=0,
                    prefill_workers=(prefill.address,),
                    decode_workers=(decode.address,),
                    drain_timeout_s=1.0,
                ),
            )
        )
        client = await enter(AsyncClient(front.address, max_retries=0))
        kinds: Mapping[str, Callable[[str], Awaitable[None]]] = {
            "gRPC": functools.partial(generate, client),
            "HTTP chat": functools.partial(chat, front.http_address),
        }
        ran: dict[str, tuple[frozenset[Function], int]] = {}
        for kind, ask in kinds.items():
            await ask(_PROMPT)
            watch.is_on = True
            await ask(f"import os\n{_PROMPT}")
            watch.is_on = False
            functions, threads = watch.take()
            ran[kind] = (frozenset(functions), len(threads))
        watch.is_on = True
        await asyncio.sleep(_IDLE_S)
        watch.is_on = False
        idle, _ = watch.take()
        return {
            kind: Path(functions - idle, num_threads, len(idle & functions))
            for kind, (functions, num_threads) in ran.items()
        }


def _mean_lines(files: Collection[str]) -> int:
    """Mean number of lines."""
    return round(statistics.fmean((ROOT / file).read_text().count("\n") for file in files))


def main() -> None:
    """Prints the counts; with --list the functions, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function, by file")
    parser.add_argument("--drafts", action="store_true", help="with drafts by n-grams")
    arguments = parser.parse_args()
    watch = Watch()
    threading.setprofile(watch)
    sys.setprofile(watch)
    paths = asyncio.run(watch_requests(watch, has_drafts=arguments.drafts))
    sys.setprofile(None)
    threading.setprofile(None)
    for kind, path in paths.items():
        if arguments.list:
            for function in sorted(path.functions):
                print(kind, *function, sep="\t")
        files = {function.file for function in path.functions}
        to_a_step = [file for file in files if file.startswith(_TO_A_STEP)]
        print(
            f"{kind}: {len(files)} files of {_mean_lines(files)} lines, {len(to_a_step)} of them, "
            f"of {_mean_lines(to_a_step)}, between socket and step; {len(path.functions)} "
            f"functions, {path.num_threads} threads; {path.num_idle} further functions run without "
            "a request, too"
        )


if __name__ == "__main__":
    main()
