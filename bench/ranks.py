"""Ranks of one engine beside one rank with as many threads: a prompt's time, and a decode step's.

    python -m bench.ranks context [--tokens 4096] [--ranks 2] [--threads 2] [--rounds 3]
    python -m bench.ranks experts
    python -m bench.ranks cuts

`context`: ranks that share a prompt's tokens, on a small Llama. `experts`: ranks that share a
mixture of many small experts, each with a part of every expert or with some as a whole. `cuts`:
ranks that share the outputs of linear layers or their sums, on a Llama of 125 million parameters.
Contenders take turns, and the first one runs twice in each round: what its two times differ by is
noise. Times are medians; ratios are medians over the rounds. Exchanges, and bytes that rank 0
receives in them, are counted. Logits and KV of all have to be equal to the bit, except where ranks
share sums.
On a machine with other work, OMP_WAIT_POLICY=passive keeps threads from spinning while they wait.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.types import Sampling
from bench.counted_ranks import Counts, count_exchanges
from bench.peers.models import checkpoint
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice, StepLimits
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.load import load_engine
from engine.ranks.mesh import ONE_RANK, Degrees
from engine.torch.engine import TorchEngine

BLOCK_SIZE = 16
_MAX_SEQS = 16
_VOCAB = 256
_COMMON: Mapping[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Contender:
    """An engine, and the threads of each of its ranks. counts: of all contenders' exchanges.
    has_own_sums: its bits are not those of one rank."""

    name: str
    engine: TorchEngine
    num_threads: int
    counts: Counts
    has_own_sums: bool = False

    def run(self, batch: Batch) -> float:
        """Seconds until the tokens are there."""
        torch.set_num_threads(self.num_threads)
        self.counts.reset()
        begin = time.perf_counter()
        self.engine.forward(batch)
        return time.perf_counter() - begin

    def check(self, batch: Batch, wanted: torch.Tensor) -> None:
        """Raise AssertionError for other logits."""
        logits = self.engine.logits(batch)
        is_near = (logits - wanted).norm() < 0.03 * wanted.norm()
        is_equal = is_near if self.has_own_sums else torch.equal(logits, wanted)
        assert is_equal, f"{self.name}: other logits"

    def kv(self, num_tokens: int) -> bytes:
        """KV of the first tokens of the first blocks."""
        layout = self.engine.spec.layout
        blocks = range(-(-num_tokens // BLOCK_SIZE))
        out = bytearray(num_tokens * layout.num_layers * layout.token_layer_bytes)
        self.engine.kv.pack(blocks, KvRange(0, num_tokens, 0, layout.num_layers), memoryview(out))
        return bytes(out)


def slice_of(start: int, num_tokens: int, first_block: int) -> SequenceSlice:
    """New tokens after `start` others, with a row after the last."""
    end = start + num_tokens
    tokens = tuple((37 * i + i // 7) % _VOCAB for i in range(start, end))
    table = range(first_block, first_block - (-end // BLOCK_SIZE))
    return SequenceSlice(tokens, start, table, (SampleRow(num_tokens - 1, Sampling(), (), 0),), end)


def decode_batch(num_seqs: int, num_tokens: int) -> Batch:
    """One token each, after as many others; KV of all in the blocks of a prompt of num_tokens."""
    start = num_tokens // num_seqs - 1
    blocks = -(-(start + 1) // BLOCK_SIZE)
    return Batch(tuple(slice_of(start, 1, i * blocks) for i in range(num_seqs)))


@contextmanager
def contenders(
    model: Path, degrees: Mapping[str, Degrees], num_tokens: int, num_threads: int, dtype: str
) -> Iterator[list[Contender]]:
    """Engines of these degrees, one rank first."""
    blocks = -(-num_tokens // BLOCK_SIZE) + _MAX_SEQS
    with ExitStack() as stack, count_exchanges() as counts:
        made = []
        for name, own in {"one rank": ONE_RANK, **degrees}.items():
            config = EngineConfig(
                ModelChoice(str(model), dtype=dtype, max_model_len=num_tokens),
                CacheConfig(num_blocks=blocks, block_size=BLOCK_SIZE),
                StepLimits(max_num_batched_tokens=num_tokens),
                DeviceConfig(num_threads=num_threads, degrees=own),
            )
            engine = load_engine(config, lambda _: None, lambda _: None)
            stack.callback(engine.close)
            threads = max(1, num_threads // own.num_ranks)
            title = f"{name}, {threads} {'thread' if threads == 1 else 'threads'} each"
            made.append(Contender(title, engine, threads, counts, own.num_summands > 1))
        yield made


def compare(title: str, given: list[Contender], batch: Batch, rounds: int) -> None:
    """Print the times of a batch by contender. Raises AssertionError for unequal logits."""
    first = given[0]
    turns = [*given, replace(first, name="one rank again")]
    wanted = first.engine.logits(batch)
    for each in given[1:]:
        each.check(batch, wanted)
    times = [[each.run(batch) for each in turns] for _ in range(rounds)]
    print(f"\n{title}\n")
    print("| ranks | ms | of one rank's | exchanges | bytes |\n|---|---|---|---|---|")
    for index, each in enumerate(turns):
        ms = statistics.median(row[index] for row in times) * 1e3
        ratio = statistics.median(row[index] / row[0] for row in times)
        each.run(batch)
        received = f"{each.counts.num_exchanges} | {each.counts.num_bytes:,}"
        print(f"| {each.name} | {ms:.1f} | {ratio:.2f} | {received} |", flush=True)


def _dense(folder: Path) -> Path:
    """A random Llama: 6 layers of 512."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=6, intermediate_size=1536, **_COMMON)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _mixture(folder: Path) -> Path:
    """A random mixture: 4 layers, 64 experts of 128, 8 of them chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=4,
        intermediate_size=1024,
        moe_intermediate_size=128,
        num_experts=64,
        num_experts_per_tok=8,
        **_COMMON,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Kind:
    """make: writes a checkpoint into a folder. degrees: contenders beside one rank, from the number
    of ranks. batches: numbers of sequences of the decode steps that are measured."""

    make: Callable[[Path], Path]
    degrees: Callable[[int], dict[str, Degrees]]
    batches: Sequence[int] = ()


KINDS: Mapping[str, Kind] = {
    "context": Kind(_dense, lambda size: {f"{size} ranks by tokens": Degrees(context=size)}),
    "experts": Kind(
        _mixture,
        lambda size: {
            f"{size} ranks, parts of experts": Degrees(size),
            f"{size} ranks, whole experts": Degrees(size, whole_experts=True),
        },
        (1, _MAX_SEQS),
    ),
    "cuts": Kind(
        lambda folder: checkpoint("125m", "bfloat16", folder),
        lambda size: {
            f"{size} ranks, by outputs": Degrees(size),
            f"{size} ranks, by sums": Degrees(size, cut="sums"),
        },
        (1, _MAX_SEQS),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of the prompts")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    longest, kind = max(given.tokens), KINDS[given.kind]
    with tempfile.TemporaryDirectory() as folder:
        model, degrees = kind.make(Path(folder)), kind.degrees(given.ranks)
        with contenders(model, degrees, longest, given.threads, given.dtype) as made:
            for num_tokens in sorted(given.tokens):
                prompt = Batch((slice_of(0, num_tokens, 0),))
                compare(f"A prompt of {num_tokens} tokens", made, prompt, given.rounds)
                kv = [each.kv(num_tokens) for each in made if not each.has_own_sums]
                assert kv.count(kv[0]) == len(kv), "KV differs"
            for num_seqs in kind.batches:
                title = f"A decode step of {num_seqs} sequences"
                compare(title, made, decode_batch(num_seqs, longest), given.rounds)
    print("\nEqual logits and KV, except by sums.")


if __name__ == "__main__":
    main()
