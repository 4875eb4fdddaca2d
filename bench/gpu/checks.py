"""Correctness of every kernel on this device: see cases.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.case import LARGE, TINY, Case
from bench.gpu.cases import all_cases
from bench.gpu.setting import Result, Setting


def _check(case: Case, setting: Setting) -> Result:
    sizes = replace(TINY if setting.is_dry else LARGE, half=setting.half)
    if setting.is_dry and not case.is_interpretable:
        return {"skipped": "the interpreter rounds float8 wrongly"}
    if not setting.is_dry:
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor < case.min_arch:
            return {"skipped": f"needs sm_{case.min_arch}"}
    trial = case.build(setting.generator(), sizes)
    error = trial.error(trial.run())
    # This comparison is false for NaN.
    verdict = "right" if error <= trial.tolerance else "WRONG"
    return {"error": error, "tolerance": trial.tolerance, "verdict": verdict}


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    f"check {case.name}": partial(_check, case) for case in all_cases()
}
