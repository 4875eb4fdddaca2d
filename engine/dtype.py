"""The type that an engine computes in, where nobody names one: as fast as the device has it,
without a loss of quality."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.errors import ConfigError
from baton_kernels.cpu.library import NO_LEVEL
from engine.families.config import DTYPES
from engine.numerics import cpu_level, has_bfloat16_products


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A type's name, and for people why it is this one."""

    name: str
    reason: str


def choose_dtype(asked: str, stored: str, device: torch.device) -> DtypeChoice:
    """asked: a type, or auto; stored: the checkpoint's. Raises ConfigError, and StartupError as
    cpu_level does.

    On a CPU, auto takes the checkpoint's type where that has kernels of its own, and else float32,
    which holds all values of the others: native kernels read all types at their own size at every
    level; torch, without them, multiplies those of 16 bits several times slower than float32,
    bfloat16 unless the CPU has instructions for it.
    """
    if asked != "auto":
        if asked not in DTYPES:
            raise ConfigError.of("dtype", asked, f"use auto, {', '.join(DTYPES)}")
        return DtypeChoice(asked, "as asked for")
    own = DtypeChoice(stored, "the checkpoint's type")
    if device.type != "cpu" or stored == "float32":
        return own
    if cpu_level() != NO_LEVEL or (stored == "bfloat16" and has_bfloat16_products()):
        return own
    return DtypeChoice("float32", f"without native kernels {stored} would be slower")
