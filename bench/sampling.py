"""CPU cost of choosing a step's tokens: native code and torch.

    python -m bench.sampling [--num-threads 1] [--rounds 7] [--rows 1 8 32] [--vocab 4096 128256]

Logits are normal. "text": about two thousand of 128,256 tokens have 90 percent of the probability
at temperature 0.7; "flat": nearly all. Both variants in turns; medians of CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from baton_kernels.cpu.library import library
from baton_kernels.sampling import Draw, draw_rows

WAYS = {
    "temperature 1": Draw(1.0, 0, 1.0, 0.0, (1, 2)),
    "temperature 0.7, top_p 0.9": Draw(0.7, 0, 0.9, 0.0, (1, 2)),
    "temperature 0.7, top_k 50, top_p 0.9": Draw(0.7, 50, 0.9, 0.0, (1, 2)),
}
WIDTHS = {"text": 2.5, "flat": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 128_256])
    arguments = parser.parse_args()
    if library() is None:
        parser.error("no native library here: see docs/kernels.md")
    torch.set_num_threads(arguments.num_threads)
    generator = torch.Generator().manual_seed(0)
    print("| Rows x vocabulary | Logits | Drawn by | native, ms | torch, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for vocab_size in arguments.vocab:
        for num_rows in arguments.rows:
            for width, scale in WIDTHS.items():
                logits = scale * torch.randn(num_rows, vocab_size, generator=generator)
                for name, draw in WAYS.items():
                    native, twin = times(logits, [draw] * num_rows, arguments.rounds)
                    print(
                        f"| {num_rows} x {vocab_size:,} | {width} | {name} "
                        f"| {native:.3f} | {twin:.3f} | {twin / native:.0f} |",
                        flush=True,
                    )


def times(logits: torch.Tensor, draws: list[Draw], num_rounds: int) -> tuple[float, float]:
    """Median milliseconds of both variants."""
    taken = []
    for _ in range(num_rounds + 1):
        start_s = time.process_time()
        draw_rows(logits, draws)
        middle_s = time.process_time()
        draw_rows.twin(logits, draws)
        taken.append((middle_s - start_s, time.process_time() - middle_s))
    native, twin = (1e3 * statistics.median(each) for each in zip(*taken[1:], strict=True))
    return native, twin


if __name__ == "__main__":
    main()
