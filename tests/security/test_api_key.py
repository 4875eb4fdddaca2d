"""The gateway's API keys: who is served, who is refused and how, and that no key is seen
anywhere."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.client import AsyncClient, InvalidRequest, SamplingParams, Unauthenticated
from baton.config import DecodeOptions, GatewayOptions, ServeOptions
from baton.config.command import private_environment, to_arguments
from baton.config.load import build_options, load_options
from baton.errors import ConfigError
from baton.rpc.api_key import ApiKeyInterceptor
from baton.supervisor.plan import plan_gateways, plan_workers
from gateway.intake.api_keys import KeySettings, read_api_keys
from tests.support.live_tiers import decode_worker, gateway

KEY, OTHER = "sk-one-4711", "sk-two-0815"
KEYS = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters=","), min_size=1
)


class _Details:
    """What an interceptor sees of a call."""

    def __init__(self, method: str, *metadata: tuple[str, str | bytes]) -> None:
        self.method = method
        self.invocation_metadata = metadata


async def is_let_in(keys: list[str], method: str, *metadata: tuple[str, str | bytes]) -> bool:
    handler: Any = object()

    async def go_on(_: Any) -> Any:
        return handler

    details: Any = _Details(method, *metadata)
    return await ApiKeyInterceptor(keys).intercept_service(go_on, details) is handler


@given(st.lists(KEYS, min_size=1, max_size=4), KEYS)
@example(["abc"], "ab")
@example(["abc"], "abcd")
@example(["abc"], "ABC")
@settings(max_examples=50, deadline=None)
def test_a_call_is_let_in_if_and_only_if_it_shows_one_of_the_keys(
    keys: list[str], shown: str
) -> None:
    entry = ("authorization", f"Bearer {shown}")
    assert asyncio.run(is_let_in(keys, "/a/B", entry)) is (shown in keys)
    for key in keys:
        assert asyncio.run(is_let_in(keys, "/a/B", ("authorization", f"Bearer {key}")))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {KEY}".encode()),),
        (("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")),
        (("x-api-key", KEY),),
    ],
)
async def test_anything_else_is_refused(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert not await is_let_in([KEY], "/baton.v1.InferenceService/Generate", *metadata)
    assert await is_let_in([KEY], "/grpc.health.v1.Health/Check", *metadata)
    assert not await is_let_in([KEY], "/grpc.health.v1.HealthX/Check", *metadata)


async def test_the_gateway_serves_who_shows_a_key_and_nobody_else(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text(f"\n{OTHER}\n\n")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    async with (
        decode_worker(worker_id="d0") as decode,
        gateway([], [decode], api_key=(KEY,), api_key_file=str(file)) as front,
    ):
        for key in (KEY, OTHER):
            async with AsyncClient(front, api_key=key) as client:
                assert len((await client.generate([1, 2, 3], params)).token_ids) == 3
                assert (await client.model()).name == "oracle"
        for wrong in (None, "sk-one-471", KEY + OTHER):
            async with AsyncClient(front, api_key=wrong) as client:
                with pytest.raises(Unauthenticated, match="API key"):
                    await client.generate([1, 2, 3], params)
                with pytest.raises(Unauthenticated):
                    await client.models()
                assert await client.health(), "health is everybody's"
    assert KEY not in caplog.text
    assert OTHER not in caplog.text


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_other_services_of_the_port_are_behind_the_key_too(version: str) -> None:
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    async with (
        gateway([], [], api_key=(KEY,)) as front,
        grpc.aio.insecure_channel(front) as channel,
    ):
        assert await channel.stream_stream(method)().code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
async def test_a_long_prompt_is_refused_for_its_key_like_any_other() -> None:
    """Though the answer comes before all of it is sent."""
    prompt = [100_000] * 1_000_000
    async with gateway([], [], api_key=(KEY,)) as front, AsyncClient(front) as client:
        for _ in range(5):
            with pytest.raises(Unauthenticated):
                await client.generate(prompt)
            with pytest.raises(Unauthenticated):
                await client.detokenize(prompt)


def test_keys_come_from_flag_environment_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n")
    monkeypatch.setenv("BATON_API_KEY", "a,b")
    flags = {"model": "m", "api_key_file": str(file)}
    assert [*read_api_keys(load_options(GatewayOptions, flags))] == ["a", "b", "from-file"]
    flagged = load_options(GatewayOptions, {**flags, "api_key": ["c", "d"]})
    assert [*read_api_keys(flagged)] == ["c", "d", "from-file"]


def test_a_weight_stands_beside_its_key_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("light\n heavy   weight=3 \nthird weight=0.5\n")
    options = GatewayOptions(model="m", api_key=(KEY,), api_key_file=str(file))
    weights = {key: settings.weight for key, settings in read_api_keys(options).items()}
    assert weights == {KEY: 1.0, "light": 1.0, "heavy": 3.0, "third": 0.5}


def test_a_class_stands_beside_its_key_and_is_one_of_the_gateways(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("chat class=interactive weight=2\nother\n")
    options = GatewayOptions(
        model="m",
        api_key_file=str(file),
        slo_ttft_ms=1000,
        slo_classes=("interactive=300:", "batch=9000:"),
    )
    assert read_api_keys(options) == {
        "chat": KeySettings(2.0, "interactive"),
        "other": KeySettings(),
    }
    file.write_text("secret-471 class=interactiv\n")
    with pytest.raises(ConfigError, match="class=interactiv: give one of interactive, batch"):
        read_api_keys(options)
    with pytest.raises(ConfigError, match="there are no --slo-classes"):
        read_api_keys(GatewayOptions(model="m", api_key_file=str(file)))


@pytest.mark.parametrize(
    "rest", ["weight=0", "weight=-1", "weight=nan", "weight=inf", "weight=1e9", "weight=much"]
)
def test_a_bad_weight_stops_the_gateway_by_name(tmp_path: Path, rest: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good weight=2\nsecret-471 {rest}\n")
    with pytest.raises(ConfigError, match=f"api_key_file.*line 2: {rest}: .*from 0.001") as caught:
        read_api_keys(GatewayOptions(model="m", api_key_file=str(file)))
    assert "secret-471" not in str(caught.value)


@pytest.mark.parametrize(
    "rest", ["weight", "weight=", "share=3", "weight=2 more", "weight=2 weight=3", "words"]
)
def test_what_else_follows_a_key_stops_the_gateway(tmp_path: Path, rest: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"secret-471 {rest}\n")
    with pytest.raises(ConfigError, match=r"line 1: .*after spaces weight=N") as caught:
        read_api_keys(GatewayOptions(model="m", api_key_file=str(file)))
    assert "secret-471" not in str(caught.value)


def test_a_key_that_is_there_twice_stops_the_gateway(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret-471 weight=2\nsecret-471\n")
    with pytest.raises(ConfigError, match="line 2: a key is there twice") as caught:
        read_api_keys(GatewayOptions(model="m", api_key_file=str(file)))
    assert "secret-471" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n", "two words\n", "a,b\n", "schlüssel\n"])
def test_a_file_without_good_keys_stops_the_gateway(tmp_path: Path, content: str) -> None:
    """Above all an empty one, which would let everybody in."""
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file") as caught:
        read_api_keys(GatewayOptions(model="m", api_key_file=str(file)))
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_file_that_is_not_there_stops_the_gateway(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(GatewayOptions(model="m", api_key_file=str(tmp_path / "none")))


def test_no_command_line_and_no_text_shows_a_key() -> None:
    options = build_options(ServeOptions, {"model": "m", "api_key": f"{KEY},{OTHER}"})
    shown = [repr(options), str(options), *to_arguments(options)]
    gateways = plan_gateways(options)
    workers = plan_workers(options, 2)
    for spec in (*gateways, *workers):
        shown += [repr(spec), *spec.arguments]
    assert not [text for text in shown if KEY in text or OTHER in text]
    assert private_environment(options) == {"BATON_API_KEY": f"{KEY},{OTHER}"}
    assert [dict(spec.environment) for spec in gateways] == [private_environment(options)]
    assert not any(spec.environment for spec in workers), "workers have no use for it"


@pytest.mark.parametrize("cls", [GatewayOptions, DecodeOptions])
def test_a_registrys_password_is_on_no_command_line_either(cls: Any) -> None:
    url = "redis://me:pass-4711@here:1/0"
    options = build_options(cls, {"model": "m", "registry": url})
    assert not [text for text in to_arguments(options) if "pass-4711" in text]
    assert private_environment(options) == {"BATON_REGISTRY": url}


@pytest.mark.parametrize("source", ["flag", "environment", "misspelt"])
def test_a_wrong_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    wrong = "my secret"
    flags: dict[str, object] = {"model": "m"}
    if source == "flag":
        flags["api_key"] = [wrong]
    else:
        monkeypatch.setenv("BATON_API_KEY" if source == "environment" else "BATON_API_KEYS", wrong)
    with pytest.raises(ConfigError) as caught:
        load_options(GatewayOptions, flags)
    assert wrong not in str(caught.value)
    assert wrong not in caught.value.metadata.values()


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "a\nb"])
def test_a_client_refuses_a_key_that_no_header_carries(key: str) -> None:
    with pytest.raises(InvalidRequest, match="api_key") as caught:
        AsyncClient(api_key=key)
    assert not key or key not in str(caught.value)


def test_a_client_has_one_authorization() -> None:
    with pytest.raises(InvalidRequest, match="authorization"):
        AsyncClient(api_key=KEY, metadata={"authorization": "Bearer other"})


@pytest.mark.slow
async def test_a_gateway_process_has_no_key_on_its_command_line() -> None:
    """`baton gateway` becomes `python -m gateway`: seen as others see it, in /proc."""
    ours, theirs = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "baton",
        "gateway",
        f"--api-key={KEY}",
        "--port=0",
        f"--ready-fd={theirs}",
        str(Path(__file__).parents[2] / "models" / "baton-py-6m"),
        pass_fds=(theirs,),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        os.close(theirs)
        line = b""
        while b"address" not in line:  # what it reports of its start comes before
            line = await asyncio.to_thread(os.read, ours, 4096)
            assert line
        seen = await asyncio.to_thread(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        assert b"gateway" in seen
        assert KEY.encode() not in seen
    finally:
        os.close(ours)
        process.terminate()
        _, log = await process.communicate()
    assert KEY.encode() not in log
