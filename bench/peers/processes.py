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
from bench.peers.models import PeerMissing, checkpoint, gguf_file, peers_python
from bench.peers.task import Answer, Task

#: Contenders with quantised weights.
INT8 = ("baton", "llama.cpp")
CONTENDERS = ("baton", "llama.cpp", "transformers", "continuous-batching", "vllm")
_ROOT = Path(__file__).resolve().parents[2]
_VLLM_PYTHON = Path(__file__).with_name(".venv-vllm") / "bin" / "python"


class ContenderFailed(Exception):
    """The process ended; has its last line of output."""


def command_of(contender: str, model: str, dtype: str, num_threads: int) -> list[str]:
    """Command of a contender for a model of bench.peers.models.NAMES. Raises PeerMissing,
    KeyError."""
    threads = str(num_threads)
    if contender == "llama.cpp":
        path = gguf_file(model, dtype)
        return [str(peers_python()), "-m", "bench.peers.llama_cpp", str(path), threads]
    folder = str(checkpoint(model, dtype))
    # Quantised weights define their own dtypes; the remaining computation uses bfloat16.
    loaded_as = "bfloat16" if dtype == "int8" else dtype
    if contender == "vllm":
        if not _VLLM_PYTHON.exists():
            raise PeerMissing("vLLM is not installed: run WITH_VLLM=1 bench/peers/setup.sh")
        return [str(_VLLM_PYTHON), "-m", "bench.peers.vllm_peer", folder, loaded_as, threads]
    return [sys.executable, "-m", "bench.peers.contender", contender, folder, loaded_as, threads]


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
