"""All items of the benchmark, in the order in which they run: what is wrong should be known before
what is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.gpu import (
    ahead_speed,
    attention_speed,
    checks,
    engine_speed,
    graph_speed,
    kv_speed,
    linear_speed,
    op_speed,
    peers,
    roofs,
)
from bench.gpu.setting import Result, Setting

ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    **checks.ITEMS,
    **ahead_speed.CHECKS,
    "roof copy": roofs.copy_roof,
    "roof matmul": roofs.matmul_roof,
    **attention_speed.ITEMS,
    **op_speed.ITEMS,
    **linear_speed.ITEMS,
    **kv_speed.ITEMS,
    **engine_speed.ITEMS,
    **graph_speed.ITEMS,
    **ahead_speed.ITEMS,
    **peers.ITEMS,
}
