"""Contenders in processes of their own, which take turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from bench.machine import forced_level, level_environment
from bench.peers.figures import AGAIN
from bench.peers.models import (
    QUANTIZED_DTYPES,
    PeerMissing,
    checkpoint,
    gguf_file,
    peers_python,
)
from bench.peers.task import Answer, Task

CONTENDERS = ("baton", AGAIN, "llama.cpp", "vllm", "openvino", "transformers")
#: Those that read quantised weights.
QUANTIZED = ("baton", AGAIN, "llama.cpp")
#: Tokens of a chunk of a prompt that a peer is tried with; the fastest is measured.
CHUNKS: Mapping[str, Sequence[int]] = {
    "llama.cpp": (512, 128),
    "vllm": (512, 2048),
    "openvino": (256, 2048),
}
_ROOT = Path(__file__).resolve().parents[2]
_PEERS = Path(__file__).parent


class ContenderFailed(Exception):
    """The process ended; has its last line of output."""


def command_of(
    contender: str, model: str, dtype: str, num_threads: int, chunk: int = 0
) -> list[str]:
    """Command of a contender for a model of bench.peers.models.NAMES. chunk: of CHUNKS; 0: the
    first of them. Raises PeerMissing, KeyError."""
    threads = str(num_threads)
    sizes = [str(chunk or CHUNKS[contender][0])] if contender in CHUNKS else []
    if contender == "llama.cpp":
        path = gguf_file(model, dtype)
        return [str(peers_python()), "-m", "bench.peers.llama_cpp", str(path), threads, *sizes]
    folder = str(checkpoint(model, dtype))
    # Quantised weights define their own dtypes; the remaining computation uses bfloat16.
    loaded_as = "bfloat16" if dtype in QUANTIZED_DTYPES else dtype
    if contender in ("vllm", "openvino"):
        python = installed_python(contender)
        module = f"bench.peers.{contender}_peer"
        return [str(python), "-m", module, folder, loaded_as, threads, *sizes]
    name = "baton" if contender == AGAIN else contender
    return [sys.executable, "-m", "bench.peers.contender", name, folder, loaded_as, threads]


def installed_python(peer: str) -> Path:
    """Python of an environment that bench/peers/setup.sh makes for one peer. Raises PeerMissing."""
    python = _PEERS / f".venv-{peer}" / "bin" / "python"
    if not python.exists():
        raise PeerMissing(f"it is not installed: run WITH_{peer.upper()}=1 bench/peers/setup.sh")
    return python


@dataclass(frozen=True, slots=True)
class ContenderProcess:
    """A process that answers tasks."""

    process: subprocess.Popen[str]
    log: IO[bytes]

    def ask(self, task: Task) -> Answer:
        """Raises ContenderFailed."""
        if self.process.stdin is None or self.process.stdout is None:
            raise ContenderFailed("it has no pipes")
        try:
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ContenderFailed(self._last_line()) from None
        line = self.process.stdout.readline()
        if not line:
            raise ContenderFailed(self._last_line())
        answer = json.loads(line)
        return Answer(
            answer["prefill_s"], tuple(answer["steps_s"]), tuple(map(tuple, answer["token_ids"]))
        )

    def _last_line(self) -> str:
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self.process.returncode}"


@contextmanager
def contender_process(command: Sequence[str]) -> Iterator[ContenderProcess]:
    """A running contender; the end of its input stops it."""
    with (
        TemporaryFile() as log,
        subprocess.Popen(
            command,
            cwd=_ROOT,
            env=level_environment(forced_level()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        yield ContenderProcess(process, log)
        if process.stdin:
            process.stdin.close()


def orders(names: Sequence[str], num_rounds: int) -> Iterator[tuple[str, ...]]:
    """Order of names in each round, rotated by one each time."""
    for index in range(num_rounds):
        first = index % len(names)
        yield (*names[first:], *names[:first])


@dataclass(frozen=True, slots=True)
class Asked:
    """answers: by contender and task, in order of the rounds. failures: reason for missing
    answers."""

    answers: Mapping[str, Mapping[Task, Sequence[Answer]]]
    failures: Mapping[str, str]


def ask_all(
    commands: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    num_rounds: int,
    before_round: Callable[[], None] = lambda: None,
) -> Asked:
    """Run each task in `num_rounds` rounds after an uncounted warm-up. A failed contender is
    skipped from then on."""
    answers: dict[str, dict[Task, list[Answer]]] = {
        name: {task: [] for task in tasks} for name in commands
    }
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(contender_process(command))
            for name, command in commands.items()
        }
        for task in tasks:
            for index, order in enumerate(orders(tuple(commands), num_rounds + 1)):
                before_round()
                for name in order:
                    if name in failures:
                        continue
                    try:
                        answer = processes[name].ask(task)
                    except ContenderFailed as error:
                        failures[name] = str(error)
                    else:
                        if index:
                            answers[name][task].append(answer)
    return Asked(answers, failures)
