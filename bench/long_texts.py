"""How long others are silent while the gateway is given a text of a megabyte, or of eight, or as
many token ids as its model takes, as a prompt or as what an earlier stream sent.

    python -m bench.long_texts [--num-streams 8]

A gateway before a token source, which emits a token of each stream every 5 ms; the model takes a
million tokens. Each request is sent by a process of its own, by gRPC and by HTTP: words, one word
without end, ids, and ids behind which the answer goes on. The longest silence of any of the streams
until it was answered, and for half a second more, is printed, beside that of some seconds without
such a request; and the longest that the gateway's event loop computed in one go meanwhile, which
others' load on the machine hardly changes.
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
    """What a request has much of. what: one of `TEXTS`, repeated to so many characters; or so many
    token ids, of the prompt or of an answer so far."""

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
        """Of the answer."""
        return self._ids if self.what == IDS_SO_FAR else []

    @property
    def _ids(self) -> list[int]:
        return [i % 1000 for i in range(self.size)]


#: Each with the doors that take it.
REQUESTS = (
    *(
        (Long(what, size), door)
        for size in (1_000_000, 8_000_000)
        for what in ("words", "one word")
        for door in DOORS
    ),
    # As long as a message, or a body, may be: in JSON a character is an escape, or a pair of them.
    *((Long("line ends", 8_000_000), door) for door in DOORS),
    *((Long("emoji", size), door) for size, door in ((2_000_000, "gRPC"), (1_300_000, "HTTP"))),
    *((Long(IDS, size), door) for size in (100_000, 1_000_000) for door in DOORS),
    *((Long(IDS_SO_FAR, 100_000), door) for door in DOORS),
    (Long(IDS_SO_FAR, 1_000_000), "gRPC"),
)
STEP_MS = 5.0
_GATEWAY = (sys.executable, "-m", "bench.timed_gateway")
#: Tokens that the model takes, and of each stream: none ends within a measurement.
_MODEL_LEN = 1 << 20
_AFTER_S, _ALONE_S = 0.5, 5.0
_TIMEOUT_S = 300.0


@dataclass
class Turns:
    """The gateway's longest turn of its event loop, in CPU time; see bench.timed_gateway."""

    longest_ms: float = 0.0

    def on_line(self, name: str, line: str) -> None:
        if line.startswith(PREFIX):
            self.longest_ms = max(self.longest_ms, float(line.removeprefix(PREFIX)))
        else:
            forward_to_stderr(name, line)

    def take_ms(self) -> float:
        """The longest until now; another begins."""
        longest_ms, self.longest_ms = self.longest_ms, 0.0
        return longest_ms


@dataclass
class Silences:
    """Of streams without end: when each was last heard, and the longest time between two chunks."""

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
        """The longest until now; another begins."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s * 1e3


def send(door: str, address: str, asked: Long) -> str:
    """What became of a request for one token more."""
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
    import http.client  # of the process that sends alone

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
        text = text.split(b"data: ")[-2]  # the last but the end's mark
    document = json.loads(text)
    if answer.status == 200:
        usage = document["usage"]
        return f"answered, {max(usage['prompt_tokens'], usage['completion_tokens']):,} tokens"
    return f"{answer.status}: {document['error']['message']}"


async def send_elsewhere(door: str, address: str, asked: Long) -> tuple[str, float]:
    """As `send`, by another process; and how many seconds it took."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.long_texts", "--send", door, address),
        *(asked.what, str(asked.size)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    outcome, seconds = json.loads(output)
    return outcome, seconds


@asynccontextmanager
async def gateway_of_a_long_model(folder: Path, turns: Turns) -> AsyncIterator[Cluster]:
    """folder: for the model's files."""
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
    programs = Programs(PROGRAMS.prefill, SOURCE, _GATEWAY)
    async with Cluster(options, programs=programs, on_line=turns.on_line) as cluster:
        yield cluster


async def measure(
    cluster: Cluster, num_streams: int, requests: Sequence[tuple[Long, str]], turns: Turns
) -> None:
    """Prints a row for each request and door. turns: of the cluster's gateway."""
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
