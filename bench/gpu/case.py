"""A case: one kernel with random inputs, and a measure of its error. Cases: see cases.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Input sizes. half: the 16-bit dtype, float16 in the interpreter (its bfloat16 products are
    wrong). lengths: (cached, new) tokens."""

    half: torch.dtype
    num_tokens: int
    hidden: int
    vocab_size: int
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]


#: For the compiler and the interpreter: every tile and branch, little work.
TINY = Sizes(torch.bfloat16, 3, 256, 500, (8, 2), ((520, 1), (20, 3), (9, 33)))
#: For a GPU: layers of an 8B Llama.
LARGE = Sizes(
    torch.bfloat16, 1000, 4096, 128256, (32, 8),
    ((0, 1), (4000, 1), (1500, 5), (700, 600), (0, 900)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One run on fixed inputs. error: of the result of `run`; above `tolerance`, or NaN, is
    wrong."""

    run: Callable[[], Any]
    error: Callable[[Any], float]
    tolerance: float


@dataclass(frozen=True, slots=True)
class Case:
    """min_arch: minimum arch for which the kernel compiles. is_interpretable: whether the
    interpreter computes it correctly."""

    name: str
    build: Callable[[torch.Generator, Sizes], Trial]
    min_arch: int = 80
    is_interpretable: bool = True


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted| over the whole tensor, in float64."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def share_unequal(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of elements that differ."""
    return float((got != wanted).double().mean())


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random numbers, float32, on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)
