"""--kv-secret-file of whole systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.client import SamplingParams
from baton.errors import ConfigError
from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.support.live_tiers import decode_worker, live_system, prefill_worker

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
ANSWER = tuple(oracle_tokens(PROMPT, Sampling(max_tokens=6), 1000))


def secret_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(f"{name}-0123456789abcdef\n")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_tiers_that_share_a_secret_serve(tmp_path: Path, transport: str) -> None:
    common = {"kv_secret_file": secret_file(tmp_path, "one"), "kv_transport": transport}
    decode = {"max_local_prefill_tokens": 0}
    async with live_system(worker_options=common, decode_options=decode) as system:
        done = await system.client.generate(PROMPT, PARAMS)
        assert done.token_ids == ANSWER
        assert done.timing.transfer_bytes > 0
        await system.until_quiet()


async def test_a_decode_worker_of_another_secret_computes_prompts_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the end of a ticket: the prefill worker says that it cannot deliver."""
    async with live_system(
        worker_options={"kv_secret_file": secret_file(tmp_path, "one")},
        decode_options={
            "kv_secret_file": secret_file(tmp_path, "two"),
            "max_local_prefill_tokens": 0,
            "ticket_lease_s": 3600.0,
            "ticket_offer_s": 3600.0,
        },
    ) as system:
        for _ in range(3):
            done = await system.client.generate(PROMPT, PARAMS)
            assert done.token_ids == ANSWER
        await system.until_quiet()
    assert caplog.text.count("no KV to d0: peer d0: kv_secret") == 1
    assert caplog.text.count("could not deliver KV to d0") == 1


@pytest.mark.parametrize("worker", [prefill_worker, decode_worker])
async def test_a_file_that_is_not_there_stops_the_worker(tmp_path: Path, worker: object) -> None:
    assert callable(worker)
    with pytest.raises(ConfigError, match="kv_secret_file"):
        async with worker(kv_secret_file=str(tmp_path / "none")):
            pass


async def test_a_secret_may_be_given_itself() -> None:
    common = {"kv_secret": "0123456789abcdef" * 2, "kv_transport": "tcp"}
    decode = {"max_local_prefill_tokens": 0}
    async with live_system(worker_options=common, decode_options=decode) as system:
        done = await system.client.generate(PROMPT, PARAMS)
        assert done.token_ids == ANSWER
        assert done.timing.transfer_bytes > 0


@pytest.mark.parametrize("worker", [prefill_worker, decode_worker])
async def test_a_secret_that_is_too_short_stops_the_worker(worker: object) -> None:
    assert callable(worker)
    with pytest.raises(ConfigError, match=r"kv_secret.*16 bytes") as caught:
        async with worker(kv_secret="short"):
            pytest.fail("it started")
    assert "short" not in caught.value.message
