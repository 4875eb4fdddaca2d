"""Quality cost of KV transfer and cache dtypes: perplexity and logits of a model.

    python -m bench.kv_quality models/baton-py-6m --windows 24

Text is cut into windows. The first half of each is prefilled; its KV is packed, converted to each
dtype and unpacked into other blocks; then the model scores the second half. A second measurement
transfers nothing, and keeps all KV of the window in each dtype (--kv-cache-dtype). Text: files of
the Python standard library that were held out from the training of the bundled models.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.types import Sampling
from bench.machine import document_of, now, publish
from bench.suite.markdown import table
from engine.checkpoint import resolve_checkpoint
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.load import load_engine
from engine.torch.engine import TorchEngine
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import wire_format
from models.corpus import encode_documents, read_corpus

KV_DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8")
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one dtype. Logits are compared with those on KV of the engine's own dtype.

    bytes_share: size relative to bfloat16. divergence: mean KL, in nats. same_top: share of
    positions with the same likeliest token.
    """

    dtype: str
    bytes_share: float
    perplexity: float
    mean_error: float
    max_error: float
    divergence: float
    same_top: float


class Handoffs:
    """Transferred KV: an engine with blocks for one prompt and its copy."""

    def __init__(self, model: str, dtype: str, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        self._engine: TorchEngine = load_engine(
            EngineConfig(
                ModelChoice(model, dtype=dtype),
                CacheConfig(block_size=_BLOCK_SIZE, num_blocks=2 * num_blocks),
                device=DeviceConfig(num_threads=2),
            )
        )
        self._source = tuple(range(num_blocks))
        self._target = tuple(range(num_blocks, 2 * num_blocks))

    def prefill(self, prompt: Sequence[int]) -> None:
        self._engine.logits(Batch((SequenceSlice(prompt, 0, self._source),)))

    def logits_after(self, dtype: str, window: Sequence[int], num_sent: int) -> torch.Tensor:
        """Logits [tokens, vocab] of the tokens of `window` after the first `num_sent`, with the KV
        of these transferred as `dtype`."""
        self._send(dtype, num_sent)
        return _logits_after(self._engine, window, num_sent, self._target)

    def num_bytes(self, dtype: str, num_tokens: int) -> int:
        layout = self._engine.spec.layout
        return wire_format(dtype, layout).num_bytes(KvRange(0, num_tokens, 0, layout.num_layers))

    def _send(self, dtype: str, num_tokens: int) -> None:
        pool = self._engine.kv
        codec = ChunkCodec(pool, wire_format(dtype, pool.layout))
        piece = KvRange(0, num_tokens, 0, pool.layout.num_layers)
        payload = memoryview(bytearray(codec.wire.num_bytes(piece)))
        codec.pack(self._source, piece, payload)
        codec.unpack(self._target, piece, payload)


class Caches:
    """Cached KV: an engine per dtype, with blocks for one window."""

    def __init__(self, model: str, dtype: str, num_tokens: int, kv_dtypes: Sequence[str]) -> None:
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        self._engines = {
            kv_dtype: load_engine(
                EngineConfig(
                    ModelChoice(model, dtype=dtype),
                    CacheConfig(_BLOCK_SIZE, kv_dtype, num_blocks),
                    device=DeviceConfig(num_threads=2),
                )
            )
            for kv_dtype in kv_dtypes
        }
        self._table = tuple(range(num_blocks))

    def prefill(self, prompt: Sequence[int]) -> None:
        for engine in self._engines.values():
            engine.logits(Batch((SequenceSlice(prompt, 0, self._table),)))

    def logits_after(self, dtype: str, window: Sequence[int], num_sent: int) -> torch.Tensor:
        return _logits_after(self._engines[dtype], window, num_sent, self._table)

    def num_bytes(self, dtype: str, num_tokens: int) -> int:
        return num_tokens * self._engines[dtype].spec.layout.token_bytes


def _logits_after(
    engine: TorchEngine, window: Sequence[int], num_sent: int, table: Sequence[int]
) -> torch.Tensor:
    rest = window[num_sent:]
    rows = tuple(SampleRow(i, Sampling(), window, num_sent) for i in range(len(rest)))
    return engine.logits(Batch((SequenceSlice(rest, num_sent, table, rows),)))


def measure(
    subject: Handoffs | Caches, windows: Sequence[Sequence[int]], dtypes: Sequence[str], own: str
) -> list[Quality]:
    """Quality of each dtype, relative to `own`."""
    sums = {dtype: torch.zeros(4, dtype=torch.float64) for dtype in dtypes}
    largest = dict.fromkeys(dtypes, 0.0)
    num_tokens = 0
    for window in windows:
        num_sent = len(window) // 2
        subject.prefill(window[:num_sent])
        expected = torch.tensor(window[num_sent + 1 :])
        num_tokens += len(expected)
        exact = subject.logits_after(own, window[:-1], num_sent)
        for dtype in dtypes:
            logits = subject.logits_after(dtype, window[:-1], num_sent)
            off = (logits - exact).abs()
            largest[dtype] = max(largest[dtype], float(off.max()))
            sums[dtype] += torch.stack(_figures(logits, exact, expected)).double()
    block = _BLOCK_SIZE * 8
    return [
        Quality(
            dtype,
            subject.num_bytes(dtype, block) / subject.num_bytes("bfloat16", block),
            math.exp(nats / num_tokens),
            error / num_tokens,
            largest[dtype],
            divergence / num_tokens,
            same / num_tokens,
        )
        for dtype, (nats, error, divergence, same) in ((d, sums[d].tolist()) for d in dtypes)
    ]


def _figures(
    logits: torch.Tensor, exact: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Sums over positions: loss in nats, mean error of the logits, divergence, same likeliest
    token."""
    scores, exact_scores = logits.log_softmax(-1), exact.log_softmax(-1)
    return (
        -scores.gather(1, expected[:, None]).sum(),
        (logits - exact).abs().mean(-1).sum(),
        (exact_scores.exp() * (exact_scores - scores)).sum(),
        (logits.argmax(-1) == exact.argmax(-1)).sum(),
    )


def windows_of(model: str, num_windows: int, num_tokens: int) -> list[list[int]]:
    """Windows of held-out files, one from each file that is long enough; at most num_windows."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    documents = encode_documents(tokenizer, read_corpus().validation)
    return [ids[:num_tokens].tolist() for ids in documents if len(ids) >= num_tokens][:num_windows]


def table_of(found: Sequence[Quality], what: str) -> str:
    """Markdown. what: use of the dtype, "travels as" or "is kept in"."""
    headings = (
        *(f"KV {what} as", "Bytes, of bfloat16's", "Perplexity", "Mean error of a logit"),
        *("Largest", "KL, nats", "Same likeliest token"),
    )
    rows = [
        [
            *(q.dtype, f"{q.bytes_share:.3f}", f"{q.perplexity:.4f}", f"{q.mean_error:.5f}"),
            *(f"{q.max_error:.3f}", f"{q.divergence:.2e}", f"{q.same_top:.2%}"),
        ]
        for q in found
    ]
    return table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder, or GGUF file")
    parser.add_argument("--dtype", default="float32", help="of weights, and of KV that travels")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = now()
    options.model = str(resolve_checkpoint(options.model))
    windows = windows_of(options.model, options.windows, options.tokens)
    handoffs = Handoffs(options.model, options.dtype, options.tokens)
    sent = measure(handoffs, windows, KV_DTYPES, options.dtype)
    caches = Caches(options.model, options.dtype, options.tokens, KV_DTYPES)
    kept = measure(caches, windows, KV_DTYPES, options.dtype)
    body = (
        f"{len(windows)} windows of {options.tokens} tokens, engine in {options.dtype}.\n\n"
        f"{table_of(sent, 'travels')}\n\n{table_of(kept, 'is kept')}"
    )
    data = {name: [asdict(q) for q in some] for name, some in (("sent", sent), ("kept", kept))}
    publish(document_of("bench.kv_quality", started, data), options.json, lambda _: body)


if __name__ == "__main__":
    main()
