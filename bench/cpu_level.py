"""A CPU level that is forced holds for whatever is measured beside Baton, too: torch by its own
settings, llama.cpp by another build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from baton_kernels.cpu.library import LEVEL_VARIABLE

#: What makes torch take no instructions above a level's. oneDNN knows no level between VNNI and
#: BF16: its products of bfloat16 may use VNNI at avx512, which ours do not.
_TORCH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "ATEN_CPU_CAPABILITY": "avx512"},
    }
)


def forced_level() -> str:
    """Empty where the machine's best is measured."""
    return os.environ.get(LEVEL_VARIABLE, "")


def level_environment(level: str) -> dict[str, str]:
    """Of a process that measures at a level; empty: the best."""
    forced = {LEVEL_VARIABLE: level, **_TORCH.get(level, {})} if level else {}
    return {**os.environ, **forced}
