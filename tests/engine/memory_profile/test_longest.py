"""The longest prompt in a memory."""

from __future__ import annotations

import pytest

from engine.memory_profile.longest import WEIGHT_BITS, longest_prompt
from engine.plan.memory import sequence_bytes
from engine.ranks.mesh import ONE_RANK
from tests.support.planned import LLAMA_8B, sizes_of


def activation_bytes(num_tokens: int) -> int:
    return 1000 * num_tokens


@pytest.mark.parametrize("gib", [6, 24, 80])
def test_smaller_weights_leave_room_for_longer_prompts(gib: int) -> None:
    model = sizes_of(LLAMA_8B)
    memory = gib << 30
    found = [longest_prompt(model, name, activation_bytes, memory) for name in WEIGHT_BITS]
    lengths = [each.num_tokens for each in found]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1
    for each in found:
        if each.num_tokens:
            bytes_of = [
                each.weight_bytes
                + activation_bytes(n)
                + sequence_bytes(model, ONE_RANK, n, keeps_windows_apart=True)[0]
                for n in (each.num_tokens, each.num_tokens + 1)
            ]
            assert bytes_of[0] <= memory < bytes_of[1]


def test_int4_is_a_quarter_of_the_linear_weights() -> None:
    model = sizes_of(LLAMA_8B)
    plain, int8, int4 = (
        longest_prompt(model, name, activation_bytes, 1).weight_bytes for name in WEIGHT_BITS
    )
    assert plain == pytest.approx(16.06e9, rel=0.01)
    assert (plain - int8) / (plain - int4) == pytest.approx(2 / 3, rel=0.02)
    assert longest_prompt(model, "int4", activation_bytes, 1).num_tokens == 0
