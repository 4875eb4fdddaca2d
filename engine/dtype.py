"""Chooses the dtype of an engine if the user names none: the fastest without loss of quality."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.errors import ConfigError
from baton_kernels.cpu.library import NO_LEVEL
from engine.families.config import DTYPES
from engine.numerics import cpu_level, has_bfloat16_products


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype's name, and the reason for the choice, for people."""

    name: str
    reason: str


def choose_dtype(asked: str, stored: str, device: torch.device) -> DtypeChoice:
    """Choose the dtype. asked: a dtype or auto; stored: the checkpoint's. Raises ConfigError, and
    StartupError as cpu_level does.

    On a CPU, auto selects the checkpoint's dtype if it has native kernels, else float32, which
    represents all values of the others. Native kernels read every dtype at its own size. Without
    them, torch multiplies 16-bit numbers several times slower than float32, except bfloat16 on CPUs
    with instructions for it.
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
