"""One request's way through the gateway, over fake workers, under a virtual clock."""

from __future__ import annotations

from baton.v1 import sampling_pb2
from tests.support.fake_workers import expected_output, text_of
from tests.support.gateway_world import gateway_world, make_spec
from tests.support.virtual_loop import run_virtual


def test_a_request_passes_both_tiers_and_comes_out_whole() -> None:
    async def main() -> None:
        async with gateway_world() as world:
            spec = make_spec("a")
            client = await world.generate(spec)
            assert client.token_ids == expected_output(spec)
            assert client.text == text_of(expected_output(spec))
            assert client.last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
            assert client.last.usage.prompt_tokens == 5
            assert client.last.usage.completion_tokens == 8
            timing = client.last.timing
            assert (timing.prefill_worker, timing.decode_worker) == ("p0:1", "d0:1")
            assert timing.transfer_bytes == 100
            assert timing.num_resumes == 0
            # The first token comes from the prefill worker, before the KV is there.
            assert list(client.chunks[0].token_ids) == expected_output(spec)[:1]
            await world.settle()
            world.check_empty()

    run_virtual(main())
