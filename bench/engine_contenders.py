"""What bench.engine compares, each in a process of its own: `python -m bench.engine_contenders NAME MODEL THREADS`.

The process reads one JSON task a line from stdin, runs it and answers with one JSON line. Between tasks it waits.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args
from unittest.mock import patch

import torch

from baton.engine.interface import Batch, SampleRow, SequenceSlice
from baton.engine.torch_engine import TorchEngine, load_engine
from baton.types import Sampling

Name = Literal["baton", "baton-twins", "transformers", "continuous-batching"]
NAMES: tuple[Name, ...] = get_args(Name)

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """Run prompts of `context` tokens in a batch, then `num_steps` steps of one token each."""

    batch: int
    context: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Answer:
    """prefill_s: all prompts; steps_s: each step after that, or one mean of all."""

    prefill_s: float
    steps_s: tuple[float, ...]


class Contender(Protocol):
    """One way to run a model."""

    def run(self, task: Task) -> Answer: ...


def prompts_of(task: Task, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same for every contender."""
    rng = random.Random(task.batch * 1_000_003 + task.context)
    return [[rng.randrange(10, vocab_size) for _ in range(task.context)] for _ in range(task.batch)]


class BatonContender:
    """The engine by itself, greedy."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._engine: TorchEngine | None = None

    def _fitting(self, num_blocks: int) -> TorchEngine:
        if self._engine is None or self._engine.spec.num_blocks < num_blocks:
            self._engine = load_engine(
                self._model,
                num_blocks=num_blocks,
                block_size=_BLOCK_TOKENS,
                progress=lambda _: None,
            )
        return self._engine

    def run(self, task: Task) -> Answer:
        """Blocks are shuffled: as they are after a while of serving."""
        per_sequence = -(-(task.context + task.num_steps) // _BLOCK_TOKENS)
        engine = self._fitting(per_sequence * task.batch)
        blocks = random.Random(0).sample(
            range(per_sequence * task.batch), per_sequence * task.batch
        )
        tables = [blocks[i :: task.batch] for i in range(task.batch)]
        sequences = prompts_of(task, engine.spec.vocab_size)
        started = time.perf_counter()
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.append(_step(engine, [(sequence, 0, table)])[0])
        prefill_s = time.perf_counter() - started
        times = []
        for _ in range(task.num_steps - 1):
            started = time.perf_counter()
            parts = [
                (sequence, len(sequence) - 1, table)
                for sequence, table in zip(sequences, tables, strict=True)
            ]
            chosen = _step(engine, parts)
            times.append(time.perf_counter() - started)
            for sequence, token in zip(sequences, chosen, strict=True):
                sequence.append(token)
        return Answer(prefill_s, tuple(times))


def _step(engine: TorchEngine, parts: Sequence[tuple[list[int], int, Sequence[int]]]) -> list[int]:
    """(tokens, how many of them are in the KV cache, block table) of each sequence -> the next token of each."""
    sampling = Sampling()
    slices = tuple(
        SequenceSlice(
            tokens[start:],
            start,
            table,
            (SampleRow(len(tokens) - start - 1, sampling, tokens, len(tokens)),),
        )
        for tokens, start, table in parts
    )
    return [samples[0].token_id for samples in engine.forward(Batch(slices))]


class TransformersContender:
    """transformers' model, all prompts in one batch of equal lengths, greedy."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    @torch.inference_mode()
    def run(self, task: Task) -> Answer:
        """One forward for all prompts, then one a step."""
        ids = torch.tensor(prompts_of(task, self._model.config.vocab_size))
        started = time.perf_counter()
        result = self._model(ids, use_cache=True, logits_to_keep=1)
        chosen = result.logits[:, -1].argmax(-1, keepdim=True)
        prefill_s = time.perf_counter() - started
        times = []
        for _ in range(task.num_steps - 1):
            started = time.perf_counter()
            result = self._model(chosen, past_key_values=result.past_key_values, use_cache=True)
            chosen = result.logits[:, -1].argmax(-1, keepdim=True)
            chosen.tolist()
            times.append(time.perf_counter() - started)
        return Answer(prefill_s, tuple(times))


class ContinuousBatchingContender:
    """transformers' generate_batch: prompts and answers together, so that only the mean of all steps is known."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def run(self, task: Task) -> Answer:
        """The whole time is told as that of the steps."""
        from transformers import GenerationConfig

        settings: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=task.num_steps, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        prompts = prompts_of(task, self._model.config.vocab_size)
        started = time.perf_counter()
        self._model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return Answer(0.0, ((time.perf_counter() - started) / task.num_steps,))


@contextmanager
def without_native_kernels() -> Iterator[None]:
    """Baton as it runs where no native library can be had."""
    places = ("dispatch", "cpu.linear", "cpu.int_linear")
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch(f"baton_kernels.{place}.library", lambda: None))
        yield


_MAKERS: dict[Name, Callable[[str], Contender]] = {
    "baton": BatonContender,
    "baton-twins": BatonContender,
    "transformers": TransformersContender,
    "continuous-batching": ContinuousBatchingContender,
}


def main() -> None:
    """Serve tasks until stdin ends."""
    name, model, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    with ExitStack() as stack:
        if name == "baton-twins":
            stack.enter_context(without_native_kernels())
        contender = _MAKERS[next(known for known in NAMES if known == name)](model)
        for line in sys.stdin:
            answer = contender.run(Task(**json.loads(line)))
            told = {"prefill_s": answer.prefill_s, "steps_s": answer.steps_s}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
