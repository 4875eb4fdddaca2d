"""What a gateway remembers of the decode workers: who has an answer's KV, and who failed a
sequence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.types import SequenceSpec
from gateway.routing.dispatcher import OnPlace
from gateway.routing.router import Need
from tests.support.gateway_world import Client, World, in_world, make_spec


def test_who_goes_on_from_an_answer_is_sent_where_it_was_made() -> None:
    """The prompt alone is too short to be remembered."""

    async def test(world: World) -> None:
        prompt = (1, 2, 3)
        first = await world.generate(make_spec("r0", prompt, max_tokens=140))
        for number in range(1, 6):
            await asyncio.sleep(0.1)
            said = [*prompt, *first.token_ids, number]
            again = await world.generate(make_spec(f"r{number}", said, arrival_ns=number))
            assert again.last.timing.decode_worker == first.last.timing.decode_worker

    in_world(test, num_prefills=0, num_decodes=3, num_blocks=500)


def test_who_failed_a_sequence_is_avoided_when_it_is_placed_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(world: World) -> None:
        client = Client()
        avoided: list[frozenset[str]] = []
        place = world.dispatcher.place

        def place_and_note(
            spec: SequenceSpec, need: Need, on_place: OnPlace, **options: Any
        ) -> object:
            avoided.append(need.avoid)
            return place(spec, need, on_place, **options)

        def fail_all(_chunk: object) -> None:
            if len(client.chunks) == 2:
                for decode in world.decodes:
                    decode.fail("HANDOFF_FAILED", is_retriable=True)

        monkeypatch.setattr(world.dispatcher, "place", place_and_note)
        client.on_chunk = fail_all
        done = await world.generate(make_spec("a"), client)
        assert done.last.timing.num_resumes == 1
        (first,) = (i for i, decode in enumerate(world.decodes) if decode.specs[0].num_tokens == 5)
        assert avoided == [frozenset(), {f"d{first}:1"}]
        assert [len(decode.specs) for decode in world.decodes] == [1, 1]

    in_world(test, num_prefills=0, num_decodes=2)
