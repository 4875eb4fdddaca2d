"""What streams leave behind is the slope of memory, whatever there was before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from bench import stream_memory
from bench.stream_memory import Kind, new_prompts, retained_by


async def test_the_slope_is_of_the_streams_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts: set[Sequence[int]] = set()

    async def stream(prompt: Sequence[int]) -> None:
        prompts.add(prompt)

    def size(_: int) -> int:
        """100 bytes a stream, and much more for each of the first."""
        return 10**8 + 100 * len(prompts) + 50_000 * min(len(prompts), 200)

    monkeypatch.setattr(stream_memory, "resident_bytes", size)
    left = await retained_by(Kind("any", 1, stream), 2000)
    assert len(prompts) == left.num_streams == 2000
    assert left.bytes_each == pytest.approx(100)


def test_no_prompt_begins_as_another() -> None:
    prompts = [*itertools.islice(new_prompts(70), 5000)]
    assert len({prompt[:64] for prompt in prompts}) == 5000
    assert {len(prompt) for prompt in prompts} == {70}
