"""What the machine can do at most, as measured: the roofs that all else is a share of."""

from __future__ import annotations

from bench.gpu.setting import Result, Setting, time_ms


def copy_roof(setting: Setting) -> Result:
    """Bytes read plus bytes written, by torch's copy of a tensor far larger than any cache."""
    source = setting.randn(setting.pick(1 << 30, 1 << 10))
    target = source.clone()
    ms = time_ms(lambda: target.copy_(source), setting)
    return {"ms": ms, "bytes": 2.0 * source.numel() * source.element_size()}


def matmul_roof(setting: Setting) -> Result:
    """A product of two square matrices of random numbers: zeros would run faster."""
    size = setting.pick(8192, 32)
    left, right = setting.randn(size, size), setting.randn(size, size)
    ms = time_ms(lambda: left @ right, setting)
    return {"ms": ms, "flops": 2.0 * size**3}
