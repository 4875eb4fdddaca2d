"""The engine alone on the CPU, beside the machine's roof: time of a decode step and of a prompt.

    python -m bench.engine [--model NAME ...] [--dtype NAME ...] [--rounds 5] [--threads N]
        [--json FILE]

The floor is the minimum time of a step or prompt according to the roof measured in this run:
reading weights and KV once at the read roof, or its operations at the roof of products of the CPU
level, whichever is longer. A model that fits in the cache can be faster. Rounds alternate with
those of the roof; times are medians over all steps of all rounds. Models: see
bench/peers/models.py. Peers: see bench.peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.machine import document_of, now, publish
from bench.peers.comparison import Case, Result, data_of, parser_of, run_cases
from bench.peers.models import checkpoint
from bench.peers.task import Task
from bench.roof import Roof
from bench.suite.engine_tables import engine_table
from engine.families.config import ModelConfig
from engine.families.read import read_config
from engine.memory_plan import num_parameters

_TOKENS = 16
_TASKS = {
    "tiny": (Task(1, 20, 6), Task(3, 10, 6)),
    "box": (Task(1, 512, _TOKENS), Task(8, 512, _TOKENS), Task(32, 512, _TOKENS)),
    "125m": (Task(1, 512, _TOKENS), Task(8, 128, _TOKENS)),
    "1.1b": (Task(1, 512, _TOKENS), Task(8, 16, _TOKENS)),
}
#: No float32: the roof does not cover its products with bfloat16 weights.
_DTYPES = ("bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Floors:
    """Milliseconds, for the figure with the same index. prompt_ms: None without a roof of
    operations (int8)."""

    step_ms: float
    prompt_ms: float | None


def floor_s(config: ModelConfig, dtype: str, batch: int, context: int, roof: Roof) -> float:
    """Minimum seconds of a step of `batch` sequences with `context` tokens each, KV in bfloat16.

    int8: one byte per weight; bounded by reads only, as the roof of int8 operations is not
    measured.
    """
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    weight_bytes = _used_parameters(config) * (1 if dtype == "int8" else 2)
    read_s = (weight_bytes + batch * context * per_token) / roof.read_bytes_per_s
    if dtype == "int8":
        return read_s
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * batch * context
    products = 2 * _used_parameters(config) * batch
    return max(read_s, (products + attention) / roof.flops_per_s)


def prompt_floor_s(config: ModelConfig, context: int, roof: Roof) -> float:
    """Minimum seconds of a prompt by its operations: causal attention, and logits of the last token
    only."""
    embeddings = config.vocab_size * config.hidden_size
    in_layers = _used_parameters(config) - embeddings
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * context**2
    return (2 * in_layers * context + attention + 2 * embeddings) / roof.flops_per_s


def _used_parameters(config: ModelConfig) -> int:
    """Parameters that a step reads; untied embeddings are excluded, as only some rows are read."""
    embeddings = config.vocab_size * config.hidden_size
    return num_parameters(config) - (0 if config.is_tied else embeddings)


def floors_of(result: Result) -> Iterator[Floors]:
    """Floors in the order of the figures."""
    for f in result.figures:
        config = read_config(checkpoint(f.model, "bfloat16"))
        # A sequence grows while it is timed: on average by half of its new tokens.
        context = f.context + f.num_tokens // 2
        step_s = floor_s(config, f.dtype, f.batch, context, result.roof)
        has_roof = f.dtype == "bfloat16"
        prompt_s = prompt_floor_s(config, f.context, result.roof) if has_roof else None
        yield Floors(step_s * 1e3, None if prompt_s is None else prompt_s * 1e3)


def floors_data(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """Floors as plain values, in the order of the figures."""
    return {"floors": [dataclasses.asdict(f) for result in results for f in floors_of(result)]}


def main() -> None:
    """Measure and print."""
    given = parser_of(__doc__, ("box", "125m", "1.1b"), _DTYPES).parse_args()
    started = now()
    cases = {
        Case(model, dtype, ("baton",), _TASKS[model]): given.rounds
        for model in given.model
        for dtype in given.dtype
    }
    results = run_cases(cases, given.threads)
    data = {"num_threads": given.threads, **data_of(results), **floors_data(results)}
    publish(document_of("bench.engine", started, data), given.json, engine_table)


if __name__ == "__main__":
    main()
