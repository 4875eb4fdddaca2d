"""Quality and speed of quantised weights: `python -m bench.quantization [MODEL] [--tokens N]
[--rounds N]`.

Writes each scheme of bench.quantized_checkpoints to a temporary folder. Shows, for each and for the
original: bytes of weights; perplexity on held-out text as served (bfloat16) and with weights
rounded only (float32); and the time of decode steps, measured in turns. The text is held out by
models.corpus: files of this interpreter's standard library.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.types import Sampling
from bench.peers.ours import BatonContender
from bench.peers.task import Task
from bench.quantized_checkpoints import SCHEMES, quantize_checkpoint
from engine.config import CacheConfig, EngineConfig, ModelChoice
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.load import load_engine
from engine.torch.engine import TorchEngine
from models.corpus import read_corpus

_BOX_MODEL = Path(__file__).parents[1] / "models" / "baton-py-6m"
_WINDOW_TOKENS = 512
_BATCHES = (1, 8)
_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One scheme. step_ms: median milliseconds by batch size of _BATCHES."""

    scheme: str
    weight_bytes: int
    perplexity_served: float
    perplexity_float32: float
    step_ms: tuple[float, ...]


def windows(model: Path, num_tokens: int) -> list[list[int]]:
    """Pieces of held-out text of at most _WINDOW_TOKENS, `num_tokens` in all."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces: list[list[int]] = []
    for text in read_corpus().validation:
        ids = tokenizer.encode(text).ids
        pieces += [ids[i : i + _WINDOW_TOKENS] for i in range(0, len(ids), _WINDOW_TOKENS)]
        if sum(map(len, pieces)) >= num_tokens:
            break
    return [piece for piece in pieces if len(piece) > 1]


def perplexity(engine: TorchEngine, pieces: Sequence[Sequence[int]]) -> float:
    """exp of the mean loss over each token but a piece's first."""
    nats, num_tokens = 0.0, 0
    table = range(-(-_WINDOW_TOKENS // engine.spec.layout.block_size))
    for ids in pieces:
        rows = tuple(SampleRow(i, Sampling(), ids[: i + 1], len(ids)) for i in range(len(ids) - 1))
        logits = engine.logits(Batch((SequenceSlice(ids, 0, table, rows, len(ids)),)))
        expected = torch.tensor(ids[1:])
        nats += float(torch.nn.functional.cross_entropy(logits, expected, reduction="sum"))
        num_tokens += len(expected)
    return math.exp(nats / num_tokens)


def quantized(model: Path, scratch: Path) -> dict[str, Path]:
    """Each scheme's checkpoint, in a folder of its name in `scratch`."""
    for scheme in SCHEMES:
        quantize_checkpoint(model, scratch / scheme, scheme)
    return {scheme: scratch / scheme for scheme in SCHEMES}


def measure(model: Path, num_tokens: int, num_rounds: int) -> Iterator[Row]:
    """The original first."""
    pieces = windows(model, num_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"original": model} | quantized(model, Path(scratch))
        runners = {name: BatonContender(str(folder)) for name, folder in folders.items()}
        times: dict[tuple[str, int], list[float]] = {}
        for turn in range(num_rounds + 1):
            for batch in _BATCHES:
                for name, runner in runners.items():
                    steps = runner.run(Task(batch, _CONTEXT, 12)).steps_s
                    # The first round warms up.
                    times.setdefault((name, batch), []).extend(steps if turn else ())
        for name, folder in folders.items():
            served, exact = (
                perplexity(
                    load_engine(
                        EngineConfig(
                            ModelChoice(str(folder), dtype=dtype), CacheConfig(num_blocks=64)
                        ),
                        progress=lambda _: None,
                    ),
                    pieces,
                )
                for dtype in ("bfloat16", "float32")
            )
            num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            medians = tuple(statistics.median(times[name, batch]) * 1e3 for batch in _BATCHES)
            yield Row(name, num_bytes, served, exact, medians)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, default=_BOX_MODEL)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    steps = " | ".join(f"step ms, B = {batch}" for batch in _BATCHES)
    sys.stdout.write(
        f"| scheme | weights MB | perplexity as served | weights rounded only | {steps} |\n"
        f"|---|---|---|---|{'---|' * len(_BATCHES)}\n"
    )
    for row in measure(given.model, given.tokens, given.rounds):
        times = " | ".join(f"{ms:.2f}" for ms in row.step_ms)
        sys.stdout.write(
            f"| {row.scheme} | {row.weight_bytes / 1e6:.2f} | {row.perplexity_served:.3f} "
            f"| {row.perplexity_float32:.3f} | {times} |\n"
        )


if __name__ == "__main__":
    main()
