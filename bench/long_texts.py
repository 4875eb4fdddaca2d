"""Longest stall of other streams while the gateway processes a very long request.

The request has a text of one or eight megabytes, or as many token ids as the model takes, as a
prompt or as output so far.

    python -m bench.long_texts [--num-streams 8]

A gateway before a token source with one token per stream each 5 ms, and a context of a million
tokens. Each request is sent by another process, by gRPC and by HTTP: words, one endless word, ids,
and ids to continue. Printed are the longest gap of any stream until 0.5 s after the answer, beside
that of some seconds without such a request, and the longest CPU time of one turn of the gateway's
event loop, which hardly depends on other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.config import ServeOptions
from baton.rpc.channel import aio_channel, sync_channel
from baton.supervisor import Cluster
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.plan import PROGRAMS, Programs
from baton.v1 import inference_pb2, inference_pb2_grpc
from bench.host_gateway import SOURCE
from bench.machine import BUNDLED_MODEL
from bench.timed_gateway import PREFIX

DOORS = ("gRPC", "HTTP")
TEXTS = {
    "words": "a word and another one, ",
    "one word": "x",
    "line ends": "\n",
    "emoji": "\U0001f600",
}


IDS, IDS_SO_FAR = "token ids", "token ids so far"


@dataclass(frozen=True, slots=True)
class Long:
    """Content of a long request. what: one of `TEXTS`, repeated to a number of characters; or a
    number of token ids, of the prompt or of the output so far."""

    what: str
    size: int

    def __str__(self) -> str:
        if self.what in TEXTS:
            return f"{self.size / 1e6:g} M characters, {self.what}"
        return f"{self.size:,} {self.what}"

    @property
    def prompt(self) -> str | list[int]:
        if self.what in TEXTS:
            unit = TEXTS[self.what]
            return unit * (self.size // len(unit))
        return self._ids if self.what == IDS else [1]

    @property
    def so_far(self) -> list[int]:
        """Output so far, as token ids."""
        return self._ids if self.what == IDS_SO_FAR else []

    @property
    def _ids(self) -> list[int]:
        return [i % 1000 for i in range(self.size)]


#: Each request with the protocols that accept it.
REQUESTS = (
    *(
        (Long(what, size), door)
        for size in (1_000_000, 8_000_000)
        for what in ("words", "one word")
        for door in DOORS
    ),
    # Maximum size of a message or body: in JSON a character is one or two escapes.
    *((Long("line ends", 8_000_000), door) for door in DOORS),
    *((Long("emoji", size), door) for size, door in ((2_000_000, "gRPC"), (1_300_000, "HTTP"))),
    *((Long(IDS, size), door) for size in (100_000, 1_000_000) for door in DOORS),
    *((Long(IDS_SO_FAR, 100_000), door) for door in DOORS),
    (Long(IDS_SO_FAR, 1_000_000), "gRPC"),
)
STEP_MS = 5.0
_GATEWAY = (sys.executable, "-m", "bench.timed_gateway")
#: Context of the model and length of each stream, in tokens: no stream ends during a measurement.
_MODEL_LEN = 1 << 20
_AFTER_S, _ALONE_S = 0.5, 5.0
_TIMEOUT_S = 300.0


@dataclass
class Turns:
    """Longest turn of the gateway's event loop, in CPU time; see bench.timed_gateway."""

    longest_ms: float = 0.0

    def on_line(self, name: str, line: str) -> None:
        if line.startswith(PREFIX):
            self.longest_ms = max(self.longest_ms, float(line.removeprefix(PREFIX)))
        else:
            forward_to_stderr(name, line)

    def take_ms(self) -> float:
        """The longest so far, in milliseconds; then starts anew."""
        longest_ms, self.longest_ms = self.longest_ms, 0.0
        return longest_ms


@dataclass
class Silences:
    """Gaps of endless streams: last arrival per stream, and the longest gap between two chunks."""

    longest_s: float = 0.0

    async def listen(self, channel: grpc.aio.Channel) -> None:
        request = inference_pb2.GenerateRequest()
        request.prompt.token_ids.ids.extend(range(20))
        request.sampling.max_tokens = _MODEL_LEN // 2
        request.sampling.ignore_eos = True
        last_s: float | None = None
        async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s if last_s else 0.0)
            last_s = now_s

    def take_ms(self) -> float:
        """The longest so far, in milliseconds; then starts anew."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s * 1e3


def send(door: str, address: str, asked: Long) -> str:
    """Send a request for one more token; returns its result."""
    prompt, so_far = asked.prompt, asked.so_far
    max_tokens = len(so_far) + 1
    if door == "gRPC":
        request = inference_pb2.GenerateRequest()
        if isinstance(prompt, str):
            request.prompt.text = prompt
        else:
            request.prompt.token_ids.ids.extend(prompt)
        request.sampling.max_tokens = max_tokens
        if so_far:
            request.sampling.seed = 1
            request.resume_from.add(token_ids=so_far)
        with sync_channel(address) as channel:
            try:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                chunks = list(stub.Generate(request, timeout=_TIMEOUT_S))
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
        usage = chunks[-1].usage
        return f"answered, {max(usage.prompt_tokens, usage.completion_tokens):,} tokens"
    import http.client  # in the sending process only

    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens}
    if so_far:
        entry = {"choice": 0, "token_ids": so_far, "num_chars": 0}
        body |= {"resume_from": [entry], "seed": 1, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status == 200 and so_far:
        text = text.split(b"data: ")[-2]  # the last line before the end mark
    document = json.loads(text)
    if answer.status == 200:
        usage = document["usage"]
        return f"answered, {max(usage['prompt_tokens'], usage['completion_tokens']):,} tokens"
    return f"{answer.status}: {document['error']['message']}"


async def send_elsewhere(door: str, address: str, asked: Long) -> tuple[str, float]:
    """`send` in another process; returns the result and its seconds."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.long_texts", "--send", door, address),
        *(asked.what, str(asked.size)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    outcome, seconds = json.loads(output)
    return outcome, seconds


@asynccontextmanager
async def gateway_of_a_long_model(
    folder: Path, turns: Turns, command: tuple[str, ...] = _GATEWAY
) -> AsyncIterator[Cluster]:
    """folder: receives the model's files. command: of the gateway."""
    shutil.copy(Path(BUNDLED_MODEL) / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": _MODEL_LEN}))
    options = ServeOptions.model_validate(
        {
            "model": str(folder),
            "engine": "oracle",
            "oracle_step_ms": STEP_MS,
            "num_speculative_tokens": 1,
            "colocated": True,
            "num_decode_workers": 1,
            "port": 0,
            "log_level": "error",
        }
    )
    programs = Programs(PROGRAMS.prefill, SOURCE, command)
    async with Cluster(options, programs=programs, on_line=turns.on_line) as cluster:
        yield cluster


async def measure(
    cluster: Cluster, num_streams: int, requests: Sequence[tuple[Long, str]], turns: Turns
) -> None:
    """Print a row per request and protocol. turns: of the cluster's gateway."""
    silences = Silences()
    async with aio_channel(cluster.address) as channel, asyncio.TaskGroup() as group:
        listeners = [group.create_task(silences.listen(channel)) for _ in range(num_streams)]
        await asyncio.sleep(1.0)
        silences.take_ms()
        turns.take_ms()
        await asyncio.sleep(_ALONE_S)
        print("| Request | Door | Longest silence, ms | Longest turn, ms | Seconds | Outcome |")
        alone = f"{silences.take_ms():.0f} | {turns.take_ms():.0f} | {_ALONE_S:.1f}"
        print(f"|---|---|---|---|---|---|\n| none | | {alone} | |")
        doors = {"gRPC": cluster.address, "HTTP": cluster.http_address}
        for asked, door in requests:
            silences.take_ms()
            turns.take_ms()
            outcome, seconds = await send_elsewhere(door, doors[door], asked)
            await asyncio.sleep(_AFTER_S)
            print(
                f"| {asked} | {door} | {silences.take_ms():.0f} | {turns.take_ms():.0f} "
                f"| {seconds:.1f} | {outcome} |",
                flush=True,
            )
        for listener in listeners:
            listener.cancel()


async def _run(num_streams: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns()
        async with gateway_of_a_long_model(Path(folder), turns) as cluster:
            await measure(cluster, num_streams, REQUESTS, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--send", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        door, address, what, size = arguments.send
        begin_s = time.perf_counter()
        outcome = send(door, address, Long(what, int(size)))
        print(json.dumps([outcome, time.perf_counter() - begin_s]))
        return
    asyncio.run(_run(arguments.num_streams))


if __name__ == "__main__":
    main()
