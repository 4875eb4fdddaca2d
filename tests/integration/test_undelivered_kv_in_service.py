"""Real services, and a decode worker that KV does not get to: requests are served all the same, at
once."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from baton.client import SamplingParams
from baton.types import Sampling
from engine.oracle import oracle_tokens
from kv_transfer.transport.base import TransportConfig
from tests.support.live_tiers import ONLY_DECODES, has_crossed, live_system

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
ANSWER = tuple(oracle_tokens(PROMPT, Sampling(max_tokens=30), 1000))


@pytest.fixture
def silent_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever sends KV over TCP gets to a port where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        bound: list[socket.socket] = []

        def bind(config: TransportConfig) -> tuple[socket.socket, str]:
            bound.append(socket.create_server((config.host, config.port)))
            return bound[-1], address

        monkeypatch.setattr("kv_transfer.transport.tcp.bind", bind)
        yield


@pytest.fixture
def dead_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends KV over TCP gets to a port that nobody listens at."""

    def bind(config: TransportConfig) -> tuple[socket.socket, str]:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            address = f"127.0.0.1:{gone.getsockname()[1]}"
        return socket.create_server((config.host, config.port)), address

    monkeypatch.setattr("kv_transfer.transport.tcp.bind", bind)


@pytest.mark.parametrize("port", ["dead_port", pytest.param("silent_port", marks=pytest.mark.long)])
async def test_a_request_is_served_though_its_kv_gets_nowhere(
    port: str, request: pytest.FixtureRequest
) -> None:
    """The leases are so long that nothing here can wait for their end."""
    request.getfixturevalue(port)
    async with live_system(
        worker_options={"kv_transport": "tcp"},
        decode_options={
            **ONLY_DECODES,
            "ticket_lease_s": 3600.0,
            "ticket_offer_s": 3600.0,
        },
    ) as system:
        token_ids: list[int] = []
        async for piece in system.client.stream(PROMPT, PARAMS):
            assert piece.token_index == len(token_ids) or not piece.token_ids
            token_ids += piece.token_ids
        assert tuple(token_ids) == ANSWER
        for _ in range(2):
            done = await system.client.generate(PROMPT, PARAMS)
            assert done.token_ids == ANSWER
            assert not has_crossed(done)
        await system.until_quiet()
