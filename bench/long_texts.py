"""How long others are silent while the gateway is given a text of a megabyte, or of ten, or as many
token ids as its model takes.

    python -m bench.long_texts [--num-streams 8]

A gateway before a token source, which emits a token of each stream every 5 ms; the model takes a
million tokens. Each prompt is sent by a process of its own, by gRPC and by HTTP: words, one word
without end, and ids. The longest silence of any of the streams until it was answered, and for half
a second more, is printed, beside that of some seconds without such a prompt; and the longest that
the gateway's event loop computed in one go meanwhile, which others' load on the machine hardly
changes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

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

TEXTS = {"words": "a word and another one, ", "one word": "x"}


@dataclass(frozen=True, slots=True)
class Long:
    """A prompt. text: of `TEXTS`, repeated to so many characters; "" for so many token ids."""

    text: str
    size: int

    def __str__(self) -> str:
        return f"{self.size / 1e6:g} MB, {self.text}" if self.text else f"{self.size:,} token ids"

    def made(self) -> str | list[int]:
        if not self.text:
            return [i % 1000 for i in range(self.size)]
        unit = TEXTS[self.text]
        return unit * (self.size // len(unit))


PROMPTS = (
    *(Long(text, size) for size in (1_000_000, 10_000_000) for text in TEXTS),
    *(Long("", size) for size in (100_000, 1_000_000)),
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


def send(door: str, address: str, prompt: str | list[int]) -> str:
    """What became of a prompt of which one token is asked for."""
    if door == "gRPC":
        request = inference_pb2.GenerateRequest()
        if isinstance(prompt, str):
            request.prompt.text = prompt
        else:
            request.prompt.token_ids.ids.extend(prompt)
        request.sampling.max_tokens = 1
        with sync_channel(address) as channel:
            try:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                chunks = list(stub.Generate(request, timeout=_TIMEOUT_S))
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
        return f"answered, {chunks[-1].usage.prompt_tokens:,} tokens"
    import http.client  # of the process that sends alone

    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({"prompt": prompt, "max_tokens": 1}),
        {"content-type": "application/json"},
    )
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    if answer.status == 200:
        return f"answered, {body['usage']['prompt_tokens']:,} tokens"
    return f"{answer.status}: {body['error']['message']}"


async def send_elsewhere(door: str, address: str, prompt: Long) -> tuple[str, float]:
    """As `send`, by another process; and how many seconds it took."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.long_texts", "--send", door, address),
        *(prompt.text, str(prompt.size)),
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
    cluster: Cluster, num_streams: int, prompts: Sequence[Long], turns: Turns
) -> None:
    """Prints a row for each prompt and door. turns: of the cluster's gateway."""
    silences = Silences()
    async with aio_channel(cluster.address) as channel, asyncio.TaskGroup() as group:
        listeners = [group.create_task(silences.listen(channel)) for _ in range(num_streams)]
        await asyncio.sleep(1.0)
        silences.take_ms()
        turns.take_ms()
        await asyncio.sleep(_ALONE_S)
        print("| Prompt | Door | Longest silence, ms | Longest turn, ms | Seconds | Outcome |")
        alone = f"{silences.take_ms():.0f} | {turns.take_ms():.0f} | {_ALONE_S:.1f}"
        print(f"|---|---|---|---|---|---|\n| none | | {alone} | |")
        doors = {"gRPC": cluster.address, "HTTP": cluster.http_address}
        for prompt, (door, address) in itertools.product(prompts, doors.items()):
            silences.take_ms()
            turns.take_ms()
            outcome, seconds = await send_elsewhere(door, address, prompt)
            await asyncio.sleep(_AFTER_S)
            print(
                f"| {prompt} | {door} | {silences.take_ms():.0f} | {turns.take_ms():.0f} "
                f"| {seconds:.1f} | {outcome} |",
                flush=True,
            )
        for listener in listeners:
            listener.cancel()


async def _run(num_streams: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns()
        async with gateway_of_a_long_model(Path(folder), turns) as cluster:
            await measure(cluster, num_streams, PROMPTS, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--send", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        door, address, text, size = arguments.send
        prompt = Long(text, int(size)).made()
        begin_s = time.perf_counter()
        outcome = send(door, address, prompt)
        print(json.dumps([outcome, time.perf_counter() - begin_s]))
        return
    asyncio.run(_run(arguments.num_streams))


if __name__ == "__main__":
    main()
