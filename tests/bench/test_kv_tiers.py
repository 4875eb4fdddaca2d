"""What the bench of KV tiers sends, and what it makes of the answers."""

from __future__ import annotations

import pytest

from bench.kv_tiers import Pass, Restart, conversations, num_prefix_blocks, section, unique
from bench.workload import prompt_of
from engine.plan.trace import TraceEntry


def entry(at_s: float, *names: int) -> TraceEntry:
    return TraceEntry(at_s, 8 * len(names), 2, names, block_tokens=8)


ENTRIES = [
    entry(0, 1, 2),
    entry(1, 9),
    entry(2, 5, 6),
    entry(3, 1, 2, 3),
    entry(4, 5, 6, 7),
    entry(5, 1, 2, 3, 4),
    entry(6, 5, 6, 8),
]


def test_whole_conversations_are_chosen_in_the_order_of_the_trace() -> None:
    assert conversations(ENTRIES, 2) == (ENTRIES[0], ENTRIES[3], ENTRIES[5])
    assert conversations(ENTRIES, 4) == tuple(each for each in ENTRIES if each is not ENTRIES[1])
    with pytest.raises(ValueError, match="the trace has 6 requests"):
        conversations(ENTRIES, 7)


def test_blocks_are_those_of_all_different_prefixes() -> None:
    assert num_prefix_blocks(conversations(ENTRIES, 6)) == 8 * 8 // 16


def test_unique_prompts_have_nothing_in_common() -> None:
    prompts = [prompt_of(each, n, 1000, 1) for n, each in enumerate(unique(ENTRIES))]
    assert [len(prompt) for prompt in prompts] == [each.num_input_tokens for each in ENTRIES]
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)


def test_the_table_has_ratios_to_the_worker_without_tiers() -> None:
    passes = [
        Pass("short", "without", 0.3, 5.0, 3.0, (80.0, 100.0, 120.0)),
        Pass("short", "with", 0.6, 9.0, 2.0, (40.0, 80.0, 30.0)),
        Pass("short", "without, again", 0.3, 5.0, 3.0, (80.0, 100.0, 150.0)),
    ]
    text = section(passes, Restart(100, 95, 0.9))
    assert "| short | with | 0.60 | 50.0 | 2.00 | 0.50 | 1.80 | 1.50 | 0.50 |" in text
    assert "| short | without, again | 0.30 | 110.0 | 1.00 | 1.10 | 1.00 | 1.00 | 1.00 |" in text
    assert "kept 0.95 of the bytes" in text
