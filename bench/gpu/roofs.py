"""Measured maximum speeds (roofs) of the machine; other items are reported as shares of them."""

from __future__ import annotations

import shutil
import subprocess

import torch

from bench.gpu.setting import Result, Setting, time_ms

_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit"


def copy_roof(setting: Setting) -> Result:
    """Bytes read plus bytes written, by torch's copy of a tensor far larger than any cache."""
    source = setting.randn(setting.pick(1 << 30, 1 << 10))
    target = source.clone()
    ms = time_ms(lambda: target.copy_(source), setting)
    return {"ms": ms, "bytes": 2.0 * source.numel() * source.element_size()}


def matmul_roof(setting: Setting) -> Result:
    """A product of two square random matrices (zeros would run faster), and the clocks during
    it."""
    size = setting.pick(8192, 32)
    left, right = setting.randn(size, size), setting.randn(size, size)
    ms = time_ms(lambda: left @ right, setting)
    return {"ms": ms, "flops": 2.0 * size**3, "clocks": _clocks_during(left, right, setting)}


def _clocks_during(left: torch.Tensor, right: torch.Tensor, setting: Setting) -> str:
    """nvidia-smi's report during about a second of products."""
    program = shutil.which("nvidia-smi")
    if setting.is_dry or program is None:
        return "unknown"
    for _ in range(800):
        left @ right
    command = [program, f"--query-gpu={_CLOCKS}", "--format=csv"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    torch.cuda.synchronize()
    return " ; ".join(output.splitlines())
