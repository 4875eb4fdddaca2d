"""Baton's engine as a contender, without service or scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from baton.types import Sampling
from bench.peers.task import Answer, Task, prompts_of
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.load import load_engine
from engine.ranks.mesh import Degrees
from engine.torch.engine import TorchEngine

_BLOCK_TOKENS = 16


class BatonContender:
    """dtype: of weights and KV; auto takes the checkpoint's. num_ranks: that share torch's threads;
    with several, tasks must not grow, for their engine cannot be made anew. clock: in seconds."""

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
        num_ranks: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._num_ranks = num_ranks
        self._clock = clock
        self._engine: TorchEngine | None = None

    def _fitting(self, num_blocks: int) -> TorchEngine:
        if self._engine is None or self._engine.spec.num_blocks < num_blocks:
            self._engine = load_engine(
                EngineConfig(
                    ModelChoice(self._model, dtype=self._dtype),
                    CacheConfig(num_blocks=num_blocks, block_size=_BLOCK_TOKENS),
                    device=DeviceConfig(degrees=Degrees(self._num_ranks)),
                ),
                progress=lambda _: None,
            )
        return self._engine

    def close(self) -> None:
        """End all ranks."""
        if self._engine is not None:
            self._engine.close()

    def run(self, task: Task) -> Answer:
        """Prompts one after the other. Blocks are shuffled, as after some time of serving."""
        per_sequence = -(-(task.context + task.num_tokens) // _BLOCK_TOKENS)
        engine = self._fitting(per_sequence * task.batch)
        blocks = random.Random(0).sample(
            range(per_sequence * task.batch), per_sequence * task.batch
        )
        tables = [blocks[i :: task.batch] for i in range(task.batch)]
        sequences = prompts_of(task, engine.spec.vocab_size)
        started = self._clock()
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.append(next_tokens(engine, [(sequence, 0, table)])[0])
        prefill_s = self._clock() - started
        times = []
        for _ in range(task.num_tokens - 1):
            started = self._clock()
            parts = [
                (sequence, len(sequence) - 1, table)
                for sequence, table in zip(sequences, tables, strict=True)
            ]
            chosen = next_tokens(engine, parts)
            times.append(self._clock() - started)
            for sequence, token in zip(sequences, chosen, strict=True):
                sequence.append(token)
        written = tuple(tuple(sequence[task.context :]) for sequence in sequences)
        return Answer(prefill_s, tuple(times), written)


def next_tokens(
    engine: TorchEngine, parts: Sequence[tuple[list[int], int, Sequence[int]]]
) -> list[int]:
    """From (tokens, cached tokens, block table) of each sequence to the next token of each."""
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
