"""What of the HTTP door the `openai` package does not show: raw bytes, headers, clients that leave,
and what is full or gone."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from gateway.http.page import LIVE_PATH, PAGE_FILES
from gateway.server import serve_gateway
from tests.support.broken_streams import documents, merged, so_far_of, without_times
from tests.support.certificates import Authority
from tests.support.live_tiers import (
    ONLY_DECODES,
    LiveSystem,
    live_system,
    options_of_gateway,
    reporting,
)
from tests.support.oracle_model import CHAT_TEMPLATE, VOCAB_SIZE, make_oracle_model

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def oracle_system(folder: Path, **options: Any) -> AsyncIterator[LiveSystem]:
    common = {"model": str(make_oracle_model(folder)), "served_model_name": "oracle"}
    worker_options = {**common, **options.pop("worker_options", {})}
    gateway_options = {**common, **options.pop("gateway_options", {})}
    async with live_system(
        worker_options=worker_options, gateway_options=gateway_options, **options
    ) as system:
        yield system


def fetch_now(
    address: str,
    path: str,
    body: Any = None,
    context: ssl.SSLContext | None = None,
    method: str = "",
    **headers: str,
) -> tuple[http.client.HTTPResponse, bytes]:
    host, _, port = address.rpartition(":")
    connection: http.client.HTTPConnection
    if context:
        connection = http.client.HTTPSConnection(host, int(port), context=context)
    else:
        connection = http.client.HTTPConnection(host, int(port))
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, shown)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


async def fetch(*args: Any, **kwargs: Any) -> tuple[http.client.HTTPResponse, bytes]:
    return await asyncio.to_thread(fetch_now, *args, **kwargs)


async def test_special_tokens_are_put_to_text_where_they_are_wanted(tmp_path: Path) -> None:
    """As lm-eval's remote tokenizer asks, and clients that render templates themselves."""
    folder = make_oracle_model(tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    begin, mark = tokenizer.token_to_id("<|endoftext|>"), ("<|endoftext|>", VOCAB_SIZE - 3)
    tokenizer.post_processor = TemplateProcessing(single=f"{mark[0]} $A", special_tokens=[mark])
    tokenizer.save(str(file))
    options = {"model": str(folder), "served_model_name": "oracle"}
    chat = [{"role": "user", "content": "x"}]
    async with live_system(worker_options=options, gateway_options=options) as system:

        async def answer(path: str, **asked: Any) -> Any:
            _, body = await fetch(system.http, path, asked or None)
            return json.loads(body)

        bare = (await answer("/tokenize", prompt="the", add_special_tokens=False))["tokens"]
        assert begin not in bare
        whole = [begin, *bare]
        assert (await answer("/tokenize", prompt="the"))["tokens"] == whole
        for wants, token_ids in ((False, bare), (True, whole)):
            asked = {"prompt": "the", "add_special_tokens": wants, **GREEDY}
            given = await answer("/v1/completions", **asked)
            same = await answer("/v1/completions", **{**asked, "prompt": token_ids})
            assert given["choices"][0]["text"] == same["choices"][0]["text"]
            assert given["usage"]["prompt_tokens"] == len(token_ids)
        opened = (await answer("/tokenize", messages=chat))["tokens"]
        closed = await answer("/tokenize", messages=chat, add_generation_prompt=False)
        assert opened[: closed["count"]] == closed["tokens"] != opened
        added = (await answer("/tokenize", messages=chat, add_special_tokens=True))["tokens"]
        assert added == [begin, *opened]
        asked = {"messages": chat, "add_special_tokens": True, "return_token_ids": True, **GREEDY}
        assert (await answer("/v1/chat/completions", **asked))["prompt_token_ids"] == added
        info = await answer("/tokenizer_info")
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (info["eos_token"], info["chat_template"]) == (mark[0], CHAT_TEMPLATE)


async def test_answers_have_the_name_of_their_request(tmp_path: Path) -> None:
    async with oracle_system(tmp_path) as system:
        for path, asked in (
            ("/v1/models", None),
            ("/v1/models/oracle", None),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/models/other", None),
            ("/v1/models/", None),
        ):
            response, _ = await fetch(system.http, path, asked, x_request_id="mine-6")
            request_id = response.getheader("x-request-id") or ""
            assert request_id.startswith("mine-6-"), path
            is_found = not path.endswith(("/other", "/"))
            assert response.status == (200 if is_found else 404), path


async def test_pages_headers_and_bytes(tmp_path: Path) -> None:
    async with oracle_system(tmp_path) as system:
        response, body = await fetch(system.http, "/health")
        assert (response.status, body) == (200, b"")

        response, body = await fetch(system.http, "/version")
        assert json.loads(body)["version"]

        asked = {"prompt": "the rain", **GREEDY, "no_such": 1, "user": "me"}
        response, body = await fetch(
            system.http, "/v1/completions", asked, x_request_id="mine-7", traceparent="bad"
        )
        assert response.status == 200
        request_id = response.getheader("x-request-id") or ""
        assert request_id.startswith("mine-7-")
        assert json.loads(body)["id"] == f"cmpl-{request_id}"
        warning = response.getheader("warning") or ""
        assert "no_such" in warning
        assert "user" not in warning

        response, body = await fetch(system.http, "/v1/completions", {**asked, "stream": True})
        assert (response.getheader("content-type") or "").startswith("text/event-stream")
        assert response.getheader("x-accel-buffering") == "no"
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert all(event.startswith(b"data: {") for event in events)

        asked = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "stream": True}
        _, body = await fetch(system.http, "/v1/chat/completions", asked)
        first = json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}

        _, body = await fetch(
            system.http, "/tokenize", {"prompt": "the", "return_token_strs": True}
        )
        tokens = json.loads(body)
        assert "".join(tokens["token_strs"]) == "the"
        _, body = await fetch(system.http, "/detokenize", {"tokens": tokens["tokens"]})
        assert json.loads(body) == {"prompt": "the"}
        chat = {"messages": [{"role": "user", "content": "x"}]}
        _, body = await fetch(system.http, "/tokenize", chat)
        assert json.loads(body)["count"] > 3

        timed = {"input": "x", "max_output_tokens": 2, "return_timing": True}
        _, body = await fetch(system.http, "/v1/responses", timed)
        assert json.loads(body)["timing"]["decode_worker"] == "d0"
        _, body = await fetch(system.http, "/v1/responses", {**timed, "stream": True})
        last = json.loads(body.rpartition(b"data: ")[2])
        assert last["response"]["timing"]["decode_worker"] == "d0"

        _, page = await fetch(system.http, "/metrics")
        assert b"gen_ai_server_request_duration_seconds_count" in page

        response, body = await fetch(system.http, "/v1/nothing")
        assert (response.status, json.loads(body)["error"]["code"]) == (404, "unknown_url")
        response, body = await fetch(system.http, "/v1/completions")
        assert (response.status, response.getheader("allow")) == (405, "POST")
        response, body = await fetch(system.http, "/v1/completions", b"{not json")
        assert (response.status, json.loads(body)["error"]["param"]) == (400, "body")
        await system.until_quiet()


async def test_other_names_and_pages_of_other_origins(tmp_path: Path) -> None:
    model = str(make_oracle_model(tmp_path))
    options = options_of_gateway(
        [],
        [],
        model=model,
        served_model_aliases="gpt-4o,other",
        allowed_origins="https://a.example",
        api_key="k",
    )
    async with reporting(serve_gateway, options) as report:
        key = {"authorization": "Bearer k"}
        _, body = await fetch(report.http_address, "/v1/models", **key)
        assert [m["id"] for m in json.loads(body)["data"]] == ["oracle", "gpt-4o", "other"]
        response, _ = await fetch(report.http_address, "/v1/models/gpt-4o", **key)
        assert response.status == 200
        response, _ = await fetch(report.http_address, "/v1/models/gpt-5", **key)
        assert response.status == 503  # it may be an adapter, as long as no worker was reached
        for origin, allowed in (
            ("https://a.example", "https://a.example"),
            ("https://b.example", None),
        ):
            response, _ = await fetch(report.http_address, "/v1/models", origin=origin, **key)
            assert response.getheader("access-control-allow-origin") == allowed
            asked = {"access_control_request_headers": "authorization"}
            response, _ = await fetch(
                report.http_address, "/v1/completions", method="OPTIONS", origin=origin, **asked
            )
            assert response.status == 204
            assert response.getheader("access-control-allow-headers") == (
                allowed and "authorization"
            )
            assert response.getheader("access-control-allow-methods") == (
                allowed and "GET, POST, DELETE"
            )


async def until(is_so: Any) -> None:
    async with asyncio.timeout(60):
        while not await is_so():
            await asyncio.sleep(0.02)


async def test_the_page_is_open_and_what_it_shows_wants_a_key(tmp_path: Path) -> None:
    model = str(make_oracle_model(tmp_path))
    options = options_of_gateway([], [], model=model, api_key="k")
    async with reporting(serve_gateway, options) as report:
        for path in PAGE_FILES:
            response, body = await fetch(report.http_address, path)
            assert response.status == 200
            policy = response.getheader("content-security-policy") or ""
            assert policy.startswith("default-src 'none'; script-src 'self'")
            assert "unsafe" not in policy
            assert response.getheader("x-content-type-options") == "nosniff"
            # Nothing of any other host, and nothing that the policy would stop.
            assert not re.search(rb"https?://(?!www.w3.org/2000/svg)|@import|<style| style=", body)
            assert not re.search(rb"<script>| on[a-z]+=|\beval\(|innerHTML", body)
        response, _ = await fetch(report.http_address, LIVE_PATH)
        assert response.status == 401
        _, body = await fetch(report.http_address, LIVE_PATH, authorization="Bearer k")
        live = json.loads(body)
        assert ([m["name"] for m in live["models"]], live["workers"]) == (["oracle"], [])
        assert live["gateway"] == {"num_waiting": 0, "num_active": 0}


async def test_handoffs_and_timing_are_those_that_happened(tmp_path: Path) -> None:
    expected: list[list[Any]] = []
    async with oracle_system(tmp_path) as system:
        asked = {"prompt": "the rain " * 200, **GREEDY, "return_timing": True}
        for is_streamed in (True, False):
            data = {**asked, "cache_salt": str(is_streamed), "stream": is_streamed}
            _, body = await fetch(system.http, "/v1/completions", data)
            if is_streamed:
                pieces = [json.loads(e[6:]) for e in body.split(b"\n\n") if e[6:7] == b"{"]
                (timing,) = (piece["timing"] for piece in pieces if "timing" in piece)
            else:
                timing = json.loads(body)["timing"]
            assert (timing["prefill_worker"], timing["decode_worker"]) == ("p0", "d0")
            expected.append([len(expected) + 1, "p0", "d0", timing["transfer_bytes"]])

        async def is_shown() -> bool:  # the workers are not listed anew for every look
            _, body = await fetch(system.http, LIVE_PATH)
            return bool(json.loads(body)["handoffs"]["last"] == expected)

        await until(is_shown)
        _, body = await fetch(system.http, LIVE_PATH)
        total_bytes = sum(num_bytes for *_, num_bytes in expected)
        assert json.loads(body)["handoffs"]["total_bytes"] == total_bytes > 0
        workers = {worker["id"]: worker for worker in json.loads(body)["workers"]}
        assert {name: worker["tier"] for name, worker in workers.items()} == {
            "p0": "prefill",
            "d0": "decode",
        }
        assert all(worker["state"] == "ready" for worker in workers.values())


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_a_stream_that_broke_off_anywhere_is_taken_up(tmp_path: Path, kind: str) -> None:
    """Before its last event, too, when every choice has ended."""
    plain = {"reasoning_parser": "none"}
    async with oracle_system(tmp_path, gateway_options=plain) as system:
        talk = [{"role": "user", "content": "x"}]
        asked = {
            **({"prompt": "the rain"} if kind == "completions" else {"messages": talk}),
            **GREEDY,
            "n": 2,
            "seed": 3,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }

        async def events(body: Any) -> list[dict[str, Any]]:
            response, data = await fetch(system.http, f"/v1/{kind}", body)
            *events, done, _ = data.split(b"\n\n")
            assert (response.status, done) == (200, b"data: [DONE]")
            return [json.loads(event.removeprefix(b"data: ")) for event in events]

        def texts(events: list[dict[str, Any]]) -> dict[int, str]:
            found: dict[int, str] = {}
            for choice in (choice for event in events for choice in event["choices"]):
                text = choice.get("text") or choice.get("delta", {}).get("content", "")
                found[choice["index"]] = found.get(choice["index"], "") + text
            return found

        whole = await events(asked)
        for num_events in range(1, len(whole)):
            so_far: dict[int, Any] = {}
            for choice in (choice for event in whole[:num_events] for choice in event["choices"]):
                entry = so_far.setdefault(choice["index"], {"choice": choice["index"]})
                tokens = choice.get("token_ids", [])
                entry["token_ids"] = [*entry.get("token_ids", []), *tokens]
                entry["has_ended"] = choice["finish_reason"] is not None
            for index, text in texts(whole[:num_events]).items():
                so_far[index]["num_chars"] = len(text)
            given = [entry for entry in so_far.values() if entry["token_ids"]]
            rest = await events({**asked, "resume_from": given})
            kept = [
                {
                    **event,
                    "choices": [c for c in event["choices"] if so_far[c["index"]]["token_ids"]],
                }
                for event in whole[:num_events]
            ]
            assert texts([*kept, *rest]) == texts(whole)
            assert rest[-1]["usage"]["completion_tokens"] == 16
            assert rest[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "the rain", "n": 2, "logprobs": 1}),
        ("completions", {"prompt": ["the rain", [5, 6]], "echo": True, "seed": 3}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
    ],
)
async def test_a_stream_goes_on_behind_its_last_event_id(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """Behind any of its events, drawn by the seed that the id names, and with ids of its own."""
    plain = {"reasoning_parser": "none"}
    async with oracle_system(tmp_path, gateway_options=plain) as system:
        options = {"include_event_ids": True, "include_usage": True}
        asked = {"max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options}

        async def events(last: str = "") -> list[tuple[Any, str]]:
            """With their ids; those that have none are the role of a chat, and the usage."""
            names = {"last_event_id": last} if last else {}
            body = {**asked, **fields}
            response, data = await fetch(system.http, f"/v1/{path}", body, **names)
            *events, done, _ = data.decode().split("\n\n")
            assert (response.status, done) == (200, "data: [DONE]"), data
            found = (event.removeprefix("data: ").partition("\nid: ") for event in events)
            return [(json.loads(document), number) for document, _, number in found]

        def choices(events: list[tuple[Any, str]]) -> dict[int, Any]:
            """What came of each, added up."""
            found: dict[int, Any] = {}
            for choice in (choice for event, _ in events for choice in event["choices"]):
                so_far = found.setdefault(choice["index"], ["", [], []])
                so_far[0] += choice.get("text") or choice.get("delta", {}).get("content", "")
                logprobs = choice["logprobs"] or {}
                so_far[1] += zip(
                    logprobs.get("tokens", ()), logprobs.get("text_offset", ()), strict=True
                )
                so_far[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            return found

        whole = await events()

        async def goes_on_behind(index: int) -> None:
            kept, rest = whole[: index + 1], await events(whole[index][1])
            assert choices([*kept, *rest]) == choices(whole)
            assert rest[-1][0]["usage"]["completion_tokens"] == 2 * 6
            if rest[0][1]:  # and breaks off again
                assert choices([*kept, rest[0], *await events(rest[0][1])]) == choices(whole)

        numbered = [index for index, (_, number) in enumerate(whole) if number]
        assert numbered
        await asyncio.gather(*map(goes_on_behind, numbered))


async def test_a_last_event_id_that_is_of_another_answer(tmp_path: Path) -> None:
    """400 with what to do, before anything is sent."""
    async with oracle_system(tmp_path) as system:
        asked = {"prompt": "the rain", **GREEDY, "stream": True}
        options = {"include_event_ids": True}
        _, data = await fetch(system.http, "/v1/completions", {**asked, "stream_options": options})
        (*_, last) = re.findall(r"^id: (.*)$", data.decode(), re.MULTILINE)
        so_far = [{"token_ids": [5], "num_chars": 1}]
        for path, fields, field in (
            ("completions", {"prompt": "the sun"}, "Last-Event-ID"),
            ("completions", {"max_tokens": 4}, "Last-Event-ID"),
            ("completions", {"seed": 3}, "seed"),
            ("completions", {"stream": False}, "Last-Event-ID"),
            ("completions", {"resume_from": so_far, "seed": 3}, "Last-Event-ID"),
            ("completions", {"use_beam_search": True}, "Last-Event-ID"),
            ("responses", {"prompt": None, "input": "x"}, "Last-Event-ID"),
        ):
            response, data = await fetch(
                system.http, f"/v1/{path}", {**asked, **fields}, last_event_id=last
            )
            assert response.status == 400, data
            assert json.loads(data)["error"]["param"] == field, data
        # An event id of a choice that this request does not have.
        more = f"{last};1.1.1.1"
        response, data = await fetch(system.http, "/v1/completions", asked, last_event_id=more)
        assert (response.status, json.loads(data)["error"]["param"]) == (400, "Last-Event-ID")


_FUNCTION = {"name": "f", "parameters": {"type": "object", "required": ["a"]}}
_CALL = '<think>Hm.</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
_TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": _TALK,
                "tools": [{"type": "function", "function": _FUNCTION}],
                "structured_outputs": {"choice": [_CALL], "enable_in_reasoning": True},
            },
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [{"type": "function", **_FUNCTION}],
                "tool_choice": {"type": "function", "name": "f"},
                "max_output_tokens": 30,
            },
        ),
        (
            "/v1/messages",
            {
                "messages": _TALK,
                "tools": [{"name": "f", "input_schema": _FUNCTION["parameters"]}],
                "tool_choice": {"type": "tool", "name": "f"},
                "max_tokens": 30,
            },
        ),
    ],
)
async def test_calls_and_thoughts_of_a_stream_that_broke_off(
    tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    """After any piece. The name of the answer goes on with the x-request-id of its first part."""
    async with oracle_system(tmp_path, worker_options={"oracle_step_ms": 2.0}) as system:
        asked = {**asked, "seed": 3, "stream": True, "return_token_ids": True}

        async def stream(request_id: str = "", **fields: Any) -> tuple[str, list[Any]]:
            names = {"x_request_id": request_id} if request_id else {}
            response, data = await fetch(system.http, path, {**asked, **fields}, **names)
            assert response.status == 200, data
            return response.getheader("x-request-id") or "", documents(data.decode())

        request_id, whole = await stream()
        is_end = [i for i, event in enumerate(whole) if so_far_of([event])["token_ids"]]
        assert is_end

        async def goes_on_after(i: int) -> None:
            kept = whole[: i + 1]
            _, rest = await stream(request_id, resume_from=[so_far_of(kept)])
            assert without_times(merged([*kept, *rest])) == without_times(merged(whole))

        broken = is_end[:-1] if path == "/v1/chat/completions" else is_end
        await asyncio.gather(*(goes_on_after(i) for i in broken))


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(tmp_path: Path, is_streamed: bool) -> None:
    async with oracle_system(
        tmp_path, worker_options={"oracle_step_ms": 5.0}, decode_options=ONLY_DECODES
    ) as system:
        asked = {"prompt": [5] * 40, "max_tokens": 3000, "ignore_eos": True, "stream": is_streamed}
        body = json.dumps(asked).encode()
        host, _, port = system.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if is_streamed:
            assert b"data: " in await reader.readuntil(b"\n\n")

        async def is_running() -> bool:
            return any(w.num_running for w in (await system.client.model()).workers)

        await until(is_running)
        writer.close()
        await system.until_quiet()  # long before its 3000 steps are over


async def test_a_gateway_without_workers_says_when_to_come_again(tmp_path: Path) -> None:
    model = str(make_oracle_model(tmp_path))
    options = options_of_gateway([], [], model=model, request_timeout_s=1.0)

    async with reporting(serve_gateway, options) as report:
        response, _ = await fetch(report.http_address, "/health")
        assert response.status == 503
        asked = {"prompt": "x", **GREEDY}
        response, body = await fetch(report.http_address, "/v1/completions", asked)
        assert response.status == 503
        assert int(response.getheader("retry-after") or "0") >= 1
        assert json.loads(body)["error"]["type"] == "server_error"
        # What lacks its end alone wants no worker.
        so_far = {"token_ids": [5], "num_chars": 1, "has_ended": True}
        ended = {**asked, "seed": 1, "stream": True, "resume_from": [so_far]}
        response, body = await fetch(report.http_address, "/v1/completions", ended)
        assert (response.status, body) == (200, b"data: [DONE]\n\n")


async def test_a_full_queue_and_a_time_that_is_over(tmp_path: Path) -> None:
    async with oracle_system(
        tmp_path,
        worker_options={"oracle_step_ms": 50.0, "max_num_seqs": 1},
        gateway_options={"max_queue_size": 1, "request_timeout_s": 1.0},
    ) as system:
        asked = {"prompt": [5, 6], **GREEDY, "max_tokens": 1000}
        answers = await asyncio.gather(
            *(fetch(system.http, "/v1/completions", asked) for _ in range(8))
        )
        by_status = {response.status: (response, body) for response, body in answers}
        assert set(by_status) == {408, 429}
        hour = {"x_envoy_expected_rq_timeout_ms": "3600000"}  # no more than the gateway gives
        late, _ = await fetch(system.http, "/v1/completions", asked, **hour)
        assert late.status == 408
        response, body = by_status[429]
        assert int(response.getheader("retry-after") or "0") >= 1
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        await system.until_quiet()


async def test_a_proxy_says_how_long_it_waits(tmp_path: Path) -> None:
    async with oracle_system(tmp_path, worker_options={"oracle_step_ms": 50.0}) as system:
        asked = {"prompt": [5, 6], **GREEDY, "max_tokens": 1000}
        header = {"x_envoy_expected_rq_timeout_ms": "300"}
        response, body = await fetch(system.http, "/v1/completions", asked, **header)
        assert response.status == 408
        assert json.loads(body)["error"]["type"] == "timeout_error"
        await system.until_quiet()
        for endless in ("0", "soon", ""):
            header = {"x_envoy_expected_rq_timeout_ms": endless}
            short = {**asked, "max_tokens": 8}
            response, _ = await fetch(system.http, "/v1/completions", short, **header)
            assert response.status == 200


async def test_paths_of_hosts_and_metrics_as_vllm_has_them(tmp_path: Path) -> None:
    options = {"root_path": "/llm", "enable_per_request_metrics": True, "api_key": ("k",)}
    key = {"authorization": "Bearer k"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], **GREEDY}
    text: dict[str, Any] = {"prompt": "x", **GREEDY}
    async with oracle_system(tmp_path, gateway_options=options, api_key="k") as system:

        async def answer(path: str, body: Any = None) -> Any:
            response, data = await fetch(system.http, path, body, **key)
            assert response.status == 200
            return json.loads(data)

        for asked, path in ((chat, "/llm/v1/chat/completions"), (text, "/llm/v1/completions")):
            usual, invoked = await answer(path, asked), await answer("/invocations", asked)
            assert usual["choices"] == invoked["choices"]
            metrics = usual["metrics"]
            decode_ms = metrics["generation_time_ms"]
            assert metrics["mean_itl_ms"] * 7 == pytest.approx(decode_ms, abs=0.01)
            assert metrics["tokens_per_second"] > 0 <= metrics["queue_time_ms"]
        null = await answer("/invocations", {**text, "messages": None})
        assert null["choices"] == (await answer("/v1/completions", text))["choices"]
        assert (await answer("/v1/completions", {"prompt": "x", "n": 2}))["metrics"] is None
        streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        _, data = await fetch(system.http, "/v1/chat/completions", streamed, **key)
        *pieces, last = documents(data.decode())
        assert last["metrics"]["time_to_first_token_ms"] >= 0
        assert not any("metrics" in piece for piece in pieces)
        message = {**chat, "model": "oracle", "max_tokens": 8, "stream": True}
        for path, streamed in (
            ("/v1/messages", message),
            ("/v1/responses", {"input": "x", "stream": True, "max_output_tokens": 8}),
        ):
            _, data = await fetch(system.http, path, streamed, **key)
            assert '"metrics": {"time_to_first_token_ms"' in data.decode()
        assert (await answer("/load")) == {"server_load": 0}
        for path, status in (
            ("/llm/v1/models", 401),
            ("/healthcheck", 200),
            ("/llmv1/models", 401),
            ("/models", 401),
            ("/llm/health", 200),
            ("/llm/load", 401),
            ("/invocations", 401),
            ("/llm/metrics", 401),
            (f"/llm{LIVE_PATH}", 401),
            ("/llm/llm/v1/models", 401),
        ):
            response, _ = await fetch(system.http, path)
            assert response.status == status
        for path, status in (("/llmv1/models", 404), ("/models", 200), ("/llm/models", 200)):
            response, _ = await fetch(system.http, path, **key)
            assert response.status == status


async def test_a_stream_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    async with oracle_system(
        tmp_path,
        worker_options={"oracle_step_ms": 20.0},
        gateway_options={"request_timeout_s": 3.0},
    ) as system:
        asked = {"prompt": [5, 6], **GREEDY, "max_tokens": 3000, "stream": True}
        response, body = await fetch(system.http, "/v1/completions", asked)
        assert response.status == 200
        *_, last, rest = body.split(b"\n\n")
        assert rest == b""
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "timeout_error"


async def test_tls_is_that_of_grpc(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.files("127.0.0.1")
    model = str(make_oracle_model(tmp_path))
    options = options_of_gateway(
        [], [], model=model, ssl_certfile=str(files.certfile), ssl_keyfile=str(files.keyfile)
    )

    async with reporting(serve_gateway, options) as report:
        context = ssl.create_default_context(cafile=str(authority.ca_certs))
        response, _ = await fetch(report.http_address, "/version", context=context)
        assert response.status == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            await fetch(report.http_address, "/version")


async def test_tools_of_a_template_without_a_place_for_them(tmp_path: Path) -> None:
    """The model is told, a forced call is a grammar's, and a header says so."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    options = {"model": str(make_oracle_model(tmp_path, plain)), "served_model_name": "oracle"}
    function = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 200,
        "temperature": 0,
    }
    async with live_system(worker_options=options, gateway_options=options) as system:
        response, body = await fetch(system.http, "/v1/chat/completions", asked)
        assert response.status == 200, body
        assert "system message" in (response.getheader("warning") or "")
        (choice,) = json.loads(body)["choices"]
        if choice["finish_reason"] == "stop":
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {}
        _, body = await fetch(system.http, "/tokenize", {**asked, "return_token_strs": True})
        assert "YouĠmayĠcall" in "".join(json.loads(body)["token_strs"])
        response, _ = await fetch(
            system.http,
            "/v1/chat/completions",
            {**asked, "tools": None, "tool_choice": None, "max_tokens": 1},
        )
        assert response.getheader("warning") is None
