"""Rolls a cluster from a release to this checkout and back, under load.

    python -m bench.rolling_upgrade [--release 0.1.0] [--num-streams 12] [--json FILE]

The release's commit (tests/frozen/RELEASE/commit) is checked out into its own worktree; its
processes use this environment's packages and build their own native library. Two prefill workers,
two decode workers and a gateway start from it, on engines that compute nothing (`--engine oracle`):
any KV block that is lost, duplicated or changed shows in the tokens. A fixed number of streams runs
at any time. Then the processes are replaced one by one, workers first: a worker drains and ends,
and one of the other version takes its place and port. A new gateway starts beside the old one,
which ends with its last stream. Then everything is rolled back.

Reported: failed streams, streams with tokens that differ from the first ones of the same prompt,
and streams that ended while both versions served. Exit status 1 unless the first two are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.client import AsyncClient, SamplingParams
from baton.errors import BatonError
from baton.supervisor.child import Child
from baton.supervisor.cluster import child_environment
from baton.supervisor.log_lines import forward_to_stderr
from baton.supervisor.plan import PROGRAMS, ChildSpec
from baton.supervisor.serving import wait_until_serving
from bench.machine import BUNDLED_MODEL, ROOT, document_of, now, publish

FROZEN = ROOT / "tests" / "frozen"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_PROMPTS = 8
#: Seconds for a process to end its streams.
_DRAIN_S = 30.0
#: Seconds for a gateway to find a new worker at a known address.
_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.05
_STEP_MS = 8.0

#: What release 0.1.0 understands, and every later one.
_COMMON = (
    f"--drain-timeout-s={_DRAIN_S:g}",
    "--log-level=error",
    "--",
    BUNDLED_MODEL,
)
_OF_WORKERS = (
    "--engine=oracle",
    f"--oracle-step-ms={_STEP_MS:g}",
    "--max-num-seqs=64",
    "--num-gpu-blocks-override=2000",
    "--kv-transport=auto",
)


@dataclass(frozen=True, slots=True)
class Version:
    """A checkout to start processes from."""

    name: str
    tree: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.tree), str(self.tree / "kernels")))
        return {**child_environment(os.environ), "PYTHONPATH": path}

    def check(self) -> None:
        """Raises RuntimeError unless this is where its processes find their code."""
        program = "import baton, baton_kernels, kv_transfer as k; print(baton.__file__, k.__file__)"
        found = subprocess.run(
            (sys.executable, "-P", "-c", program),
            env=self.environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        if not all(Path(path).is_relative_to(self.tree) for path in found):
            raise RuntimeError(f"processes of {self.name} import {' and '.join(found)}")


@contextmanager
def release(name: str) -> Iterator[Version]:
    """A worktree of the commit that a release was frozen at, removed at the end."""
    commit = (FROZEN / name / "commit").read_text().strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / name
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run((*git, "add", "--quiet", "--detach", str(tree), commit), check=True)
        try:
            yield Version(name, tree)
        finally:
            subprocess.run((*git, "remove", "--force", str(tree)), check=True)


class RollingCluster:
    """Two workers of each tier and a gateway, each of the version that it was last put to."""

    def __init__(self, lifeline: int) -> None:
        """lifeline: read end of a pipe; its end of file stops all children."""
        self._lifeline = lifeline
        self._children: dict[str, Child] = {}
        #: Clients of all gateways so far: the last one takes new streams; others may still be read
        #: from.
        self._clients: list[AsyncClient] = []

    @property
    def client(self) -> AsyncClient:
        """Client of the gateway that takes new streams."""
        return self._clients[-1]

    async def start(self, version: Version) -> None:
        await asyncio.gather(*(self._start_worker(name, version) for name in WORKERS))
        await self.replace_gateway(version)

    async def replace_worker(self, name: str, version: Version) -> None:
        """Drain a worker, start one of `version` in its place, and wait for the gateway to find
        it."""
        address = self._address(name)
        await self._children[name].stop(_DRAIN_S)
        await self._start_worker(name, version, port=int(address.rpartition(":")[2]))
        async with asyncio.timeout(_PATIENCE_S):
            while not await self._is_ready(address):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_EVERY_S)

    async def replace_gateway(self, version: Version) -> None:
        """Start a gateway beside the one there is, which ends when its streams do."""
        addresses = {
            tier: ",".join(self._address(name) for name in WORKERS if name.startswith(tier))
            for tier in ("prefill", "decode")
        }
        arguments = (
            "--port=0",
            f"--prefill-workers={addresses['prefill']}",
            f"--decode-workers={addresses['decode']}",
            *_COMMON,
        )
        child = self._child(ChildSpec("gateway", PROGRAMS.gateway, arguments), version)
        report = await child.start(self._lifeline)
        await wait_until_serving(report.address)
        old, self._children["gateway"] = self._children.get("gateway"), child
        self._clients.append(AsyncClient(report.address, max_retries=0))
        if old:
            await old.stop(_DRAIN_S)

    async def stop(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))
        await asyncio.gather(*(child.stop(_DRAIN_S) for child in self._children.values()))

    async def _start_worker(self, name: str, version: Version, port: int = 0) -> None:
        tier = name.partition("-")[0]
        program = PROGRAMS.prefill if tier == "prefill" else PROGRAMS.decode
        arguments = (f"--port={port}", f"--worker-id={name}", *_OF_WORKERS, *_COMMON)
        self._children[name] = self._child(ChildSpec(name, program, arguments), version)
        await self._children[name].start(self._lifeline)

    def _child(self, spec: ChildSpec, version: Version) -> Child:
        return Child(spec, forward_to_stderr, version.environment)

    def _address(self, name: str) -> str:
        report = self._children[name].report
        if report is None:
            raise RuntimeError(f"{name} is not ready")
        return report.address

    async def _is_ready(self, address: str) -> bool:
        """Whether the gateway gives work to the worker at an address."""
        workers = (await self.client.model()).workers
        return any(w.address == address and w.state == "ready" for w in workers)


@dataclass(slots=True)
class Tally:
    """Results of the streams."""

    num_streams: int = 0
    num_mixed: int = 0
    """Streams that ended while both versions served."""
    num_resumed: int = 0
    failures: list[str] = field(default_factory=list)
    num_unequal: int = 0

    @property
    def is_good(self) -> bool:
        return bool(self.num_mixed) and not self.failures and not self.num_unequal


class Load:
    """A fixed number of concurrent streams, restarted endlessly, with few prompts."""

    def __init__(self, cluster: RollingCluster, vocab_size: int) -> None:
        rng = random.Random(7)
        self._cluster = cluster
        self._prompts = [
            tuple(rng.randrange(vocab_size) for _ in range(rng.randint(20, 400)))
            for _ in range(NUM_PROMPTS)
        ]
        self._expected: dict[int, tuple[int, ...]] = {}
        self._is_over = False
        self.is_mixed = False
        self.tally = Tally()

    @asynccontextmanager
    async def running(self, num_streams: int) -> AsyncIterator[None]:
        """Runs beside the block; at its end the streams that are under way end, too."""
        tasks = [asyncio.create_task(self._run(number)) for number in range(num_streams)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*tasks)

    async def _run(self, number: int) -> None:
        while not self._is_over:
            await self._stream(number % NUM_PROMPTS)

    async def _stream(self, prompt: int) -> None:
        params = SamplingParams(
            temperature=0.8,
            top_p=1.0,  # not the model's own: the older version knows of none
            seed=prompt,
            max_tokens=40 + 10 * prompt,
            ignore_eos=True,
        )
        tally, token_ids = self.tally, list[int]()
        tally.num_streams += 1
        try:
            async with self._cluster.client.stream(self._prompts[prompt], params) as stream:
                async for chunk in stream:
                    token_ids += chunk.token_ids
                    if chunk.timing:
                        tally.num_resumed += chunk.timing.num_resumes > 0
        except BatonError as error:
            tally.failures.append(f"{error.reason}: {error.message}")
            return
        tally.num_mixed += self.is_mixed
        expected = self._expected.setdefault(prompt, tuple(token_ids))
        tally.num_unequal += tuple(token_ids) != expected


async def roll(old: Version, new: Version, num_streams: int) -> Tally:
    """Roll from one version to the other and back, process by process."""
    lifeline, held = os.pipe()
    cluster = RollingCluster(lifeline)
    async with AsyncExitStack() as stack:
        stack.callback(os.close, lifeline)
        stack.callback(os.close, held)
        stack.push_async_callback(cluster.stop)
        await cluster.start(old)
        load = Load(cluster, (await cluster.client.model()).vocab_size)
        async with load.running(num_streams):
            for version in (new, old):
                load.is_mixed = True
                for name in WORKERS:
                    await cluster.replace_worker(name, version)
                await cluster.replace_gateway(version)
                load.is_mixed = False
    return load.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--release", default="0.1.0")
    parser.add_argument("--num-streams", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = now()
    here = Version("this checkout", ROOT)
    with release(options.release) as then:
        for version in (then, here):
            version.check()
        tally = asyncio.run(roll(then, here, options.num_streams))
    print(
        f"{tally.num_streams} streams, {tally.num_mixed} of them while {options.release} and this "
        f"checkout served together: {len(tally.failures)} failed, {tally.num_unequal} had other "
        f"tokens, {tally.num_resumed} were resumed"
    )
    for failure in sorted(set(tally.failures)):
        print(failure)
    data = {"release": options.release, "result": asdict(tally)}
    publish(document_of("bench.rolling_upgrade", started, data), options.json)
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
