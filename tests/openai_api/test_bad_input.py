"""Whatever a body holds, the answer is what was asked for, or a fault of the client's, named by its
field: never a fault of ours, and streams of others go on."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest

from gateway.http.chat import ChatBody
from gateway.http.completions import CompletionBody
from gateway.http.json_body import MAX_FIELDS, MAX_MEMBERS, MAX_NODES, MAX_VALUES
from gateway.http.messages import MessagesBody
from gateway.http.requests import Body
from gateway.http.responses import ResponsesBody
from gateway.intake.validator import MAX_MESSAGES
from tests.support.http_connection import Answer, Connection
from tests.support.live_tiers import LiveSystem

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

TALK: list[dict[str, Any]] = [{"role": "user", "content": "x"}]

#: By path, a body that is answered.
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHATS: {"messages": TALK, "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": TALK, "max_tokens": 1},
    f"{MESSAGES}/count_tokens": {"messages": TALK},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}

BODIES: dict[str, type[Body]] = {
    COMPLETIONS: CompletionBody,
    CHATS: ChatBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
}

#: As JSON.
VALUES = (
    "null",
    "true",
    "-1",
    "4294967296",
    "1" * 4000,
    "1.5",
    "1e999",
    "NaN",
    '"x"',
    r'"\u0000"',
    "[[]]",
    '[{"type": []}]',
    '[{"role": {}, "content": [{"type": {}}]}]',
    '[{"role": "assistant", "content": "", "tool_calls": [{"function": 5}]}]',
    '{"a": 1}',
    '{"type": {}}',
    '{"type": "json_schema", "json_schema": 5}',
    '{"type": "function", "function": {"name": 5}}',
    '{"format": 5, "effort": [], "type": []}',
)


def refused(path: str, answer: Answer) -> str:
    """The message of an answer that must be an error in the path's form."""
    assert 400 <= answer.status < 500, answer
    if path.startswith(MESSAGES):
        assert answer.body["type"] == "error"
        assert set(answer.body["error"]) == {"type", "message"}
    else:
        assert set(answer.body["error"]) == {"message", "type", "param", "code"}
        assert answer.body["error"]["type"] == "invalid_request_error"
    return str(answer.body["error"]["message"])


def check(path: str, body: str, answer: Answer) -> None:
    """An answer, or the client's fault."""
    assert answer.status < 500, f"{path} {body[:300]}: {answer}"
    if answer.status != 200:
        assert refused(path, answer)


@pytest.mark.parametrize("path", BODIES)
async def test_any_value_of_any_field(path: str, connection: Connection) -> None:
    good = GOOD[path]
    of = BODIES[path]
    for field in (*of.model_fields, *of.refused, *of.ignored):
        for value in VALUES:
            given = {name: json.dumps(known) for name, known in good.items()} | {field: value}
            body = "{" + ",".join(f'"{name}": {text}' for name, text in given.items()) + "}"
            answer = await connection.post(path, body.encode())
            check(path, body, answer)
            if answer.status == 400:
                faults = refused(path, answer).split("; ")
                names = (f"{field}:", f"{field}.", f"{field}[")
                assert any(fault.startswith(names) for fault in faults), (body[:300], answer)


async def test_an_unknown_class_is_refused_alike_at_every_door(connection: Connection) -> None:
    said = set()
    for path in BODIES:
        body = json.dumps({**GOOD[path], "slo_class": "urgent"})
        said.add(refused(path, await connection.post(path, body.encode())))
    (message,) = said
    assert message.startswith("slo_class: 'urgent'")


def listed(part: str, count: int) -> str:
    return ",".join([part] * count)


def tool(parameters: str, description: str = "x") -> str:
    function = f'{{"name": "t", "description": "{description}", "parameters": {parameters}}}'
    return f'"tools": [{{"type": "function", "function": {function}}}]'


CHAT = '{"messages": [{"role": "user", "content": "x"}], '
ASKED = '{"max_tokens": 1, "messages": [{"role": "user", "content": '
CALL = '{"type": "function_call", "name": "t", "arguments": ""}'
CALLED = '{"function": {"name": "t", "arguments": "{}"}}'

#: Path, body, and the beginning of the error message.
STRANGE: dict[str, tuple[str, str | bytes, str]] = {
    "nothing": (COMPLETIONS, "", "body: is not JSON"),
    "no JSON": (CHATS, "{", "body: is not JSON"),
    "no object": (RESPONSES, "[]", "body: a list of 0: must be an object"),
    "invalid UTF-8": (MESSAGES, b'{"system": "\xff"}', "body: is not JSON"),
    "a lone surrogate": (COMPLETIONS, r'{"prompt": "\ud800"}', "body: is not JSON"),
    "a number of 10 MB": (COMPLETIONS, '{"seed": ' + "1" * 10**7 + "}", "body: is not JSON"),
    "deep JSON": (CHATS, '{"messages": ' + "[" * 10**4 + "]" * 10**4 + "}", "body: is not JSON"),
    "a deep schema": (
        CHATS,
        f'{CHAT}"response_format": {{"type": "json_schema", "json_schema": {{"schema": '
        + '{"items": ' * 150
        + "{}"
        + "}" * 153,
        "response_format",
    ),
    "a body of 17 MB": (COMPLETIONS, '{"prompt": "' + "x" * 2**24 + '"}', "the body has more than"),
    "a text of 15 MB": (COMPLETIONS, '{"prompt": "' + "x" * 15 * 2**20 + '"}', "prompt: "),
    "a million messages": (CHATS, f'{{"messages": [{listed("{}", 10**6)}]}}', "body: more than"),
    "too many messages": (
        CHATS,
        f'{{"messages": [{listed("{}", MAX_MESSAGES + 1)}]}}',
        f"messages: {MAX_MESSAGES + 1} messages",
    ),
    "too many of Anthropic's messages": (
        MESSAGES,
        f'{{"max_tokens": 1, "messages": [{listed("1", MAX_MESSAGES + 1)}]}}',
        "messages: give at most",
    ),
    "too many items": (RESPONSES, f'{{"input": [{listed(CALL, 5000)}]}}', "input: a list of 5000"),
    "too many calls": (
        CHATS,
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{listed(CALLED, 2000)}]}}]}}',
        "messages: 2000 calls",
    ),
    "too many objects": (
        COMPLETIONS,
        f'{{"prompt": "x", "metadata": [{listed("{}", MAX_NODES)}]}}',
        "body: more than",
    ),
    "too many members": (
        COMPLETIONS,
        f'{{"prompt": "x", "logit_bias": {{{listed(chr(34) * 2 + ":1", 2 * MAX_MEMBERS)}}}}}',
        "body: more than",
    ),
    "too many values": (
        COMPLETIONS,
        f'{{"prompt": "x", "metadata": [{listed("1", 2 * MAX_VALUES)}]}}',
        "body: 524288 values; send at most",
    ),
    "too many token ids": (
        COMPLETIONS,
        f'{{"prompt": [{listed("1", 2 * MAX_VALUES)}]}}',
        "prompt: 524288 token ids: the model takes 4096",
    ),
    "tokens that are no list": (
        "/detokenize",
        '{"tokens": 7}',
        "tokens: 7: give a list of token ids",
    ),
    "too many tokens": (
        "/detokenize",
        f'{{"tokens": [{listed("1", 2 * MAX_VALUES)}]}}',
        "tokens: 524288 token ids: the model takes 4096",
    ),
    "too many fields": (
        RESPONSES,
        json.dumps({"input": "x", **{f"f{i}": i for i in range(MAX_FIELDS)}}),
        f"body: {MAX_FIELDS + 1} fields",
    ),
    "too many biases": (
        COMPLETIONS,
        json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}}),
        "logit_bias: 2000 entries",
    ),
    # Each as many as may be, and all of them wrong: reported once, not 200,000 times.
    "wrong words": (
        COMPLETIONS,
        f'{{"prompt": "x", "bad_words": [{listed("1", 2 * 10**5)}]}}',
        "bad_words[0]: 1",
    ),
    "wrong token ids": (
        COMPLETIONS,
        f'{{"prompt": "x", "stop_token_ids": [{listed("-1", 2 * 10**5)}]}}',
        "stop_token_ids[0]: -1",
    ),
    "wrong blocks": (MESSAGES, f"{ASKED}[{listed('1', 2 * 10**5)}]}}]}}", "messages[0].content[0]"),
    "wrong parts": (
        CHATS,
        f'{{"messages": [{{"role": "user", "content": [{listed("1", 2 * 10**5)}]}}]}}',
        "messages[0].content[0].type",
    ),
    "a tool of 10 MB": (
        CHATS,
        CHAT + tool(f'{{"a": "{"x" * 10**7}"}}') + "}",
        "tools[0].function.parameters: more than",
    ),
    "a tool that is described in 10 MB": (
        CHATS,
        CHAT + tool("{}", "x" * 10**7) + "}",
        "tools: 1 tools of 10000000 characters",
    ),
    "a tool of many numbers": (
        CHATS,
        CHAT + tool(f'{{"a": [{listed("1", 2 * 10**5)}]}}') + "}",
        "tools[0].function.parameters: more than",
    ),
    "a tool with a number that JSON has not": (
        CHATS,
        CHAT + tool('{"maximum": NaN}') + "}",
        "tools[0].function.parameters: has a number",
    ),
    "a tool of Anthropic's that is too long": (
        MESSAGES,
        f'{ASKED}"x"}}], "tools": [{{"name": "t", "input_schema": {{"a": "{"x" * 10**5}"}}}}]}}',
        "tools[0].input_schema: more than",
    ),
    "a wrong item after instructions": (
        RESPONSES,
        '{"instructions": "x", "input": [{"role": "user", "content": 5}]}',
        "input[0].content: 5",
    ),
    "too many tools": (CHATS, f'{CHAT}"tools": [{listed("{}", 200)}]}}', "tools: 200 tools"),
    "arguments of 10 MB": (
        MESSAGES,
        '{"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", '
        f'"id": "t", "name": "t", "input": {{"a": "{"x" * 10**7}"}}}}]}}]}}',
        "messages[0].content[0].input: more than",
    ),
    "variables of a template of 10 MB": (
        CHATS,
        f'{CHAT}"chat_template_kwargs": {{"a": "{"x" * 10**7}"}}}}',
        "chat_template_kwargs: more than",
    ),
    "tokens that are none": ("/detokenize", '{"tokens": [1, -1, "x"]}', "tokens[1]: -1"),
    "a token of 10 KB": ("/detokenize", '{"tokens": [' + "1" * 4000 + "]}", "tokens[0]: a huge"),
    "no messages of a count": (f"{MESSAGES}/count_tokens", "{}", "messages: is missing"),
    "words of a prompt": ("/tokenize", '{"prompt": {"a": 1}}', "prompt: an object of 1"),
}


@pytest.mark.parametrize("name", STRANGE)
async def test_strange_bodies(name: str, connection: Connection) -> None:
    path, body, message = STRANGE[name]
    answer = await connection.post(path, body if isinstance(body, bytes) else body.encode())
    assert refused(path, answer).startswith(message), answer.body


def some_value(rng: random.Random) -> Any:
    kinds: list[Any] = [None, True, 0, -(2**40), 1.5, "", "text", "\x00é😀", [], {}, [{}], [None]]
    kinds += [{"type": kind} for kind in ("text", "function", "json_schema", "tool_result", 5)]
    kinds += [{"role": "assistant", "content": [], "tool_calls": [{}]}, "a" * 300, list(range(40))]
    return copy.deepcopy(rng.choice(kinds))


def changed(value: Any, rng: random.Random) -> Any:
    """The value with something in it replaced, added or left out."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return some_value(rng)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(6):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.append(some_value(rng))
        case _:
            value[key] = changed(value[key], rng)
    return value


WEATHER = {"name": "t", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}}
#: A body with many fields, by path.
RICH: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        **GOOD[COMPLETIONS],
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "structured_outputs": {"choice": ["a", "b"]},
        "prompt": [[5, 6], [7]],
    },
    CHATS: {
        **GOOD[CHATS],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "t", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": {"type": "function", "function": {"name": "t"}},
        "chat_template_kwargs": {"a": [1]},
    },
    RESPONSES: {
        **GOOD[RESPONSES],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "t", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
        ],
        "tools": [{"type": "function", **WEATHER}],
        "text": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
        "reasoning": {"effort": "low"},
    },
    MESSAGES: {
        **GOOD[MESSAGES],
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "t", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}],
            },
        ],
        "tools": [{"name": "t", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
        "thinking": {"type": "enabled"},
    },
}


@pytest.mark.parametrize("path", RICH)
async def test_changes_of_good_bodies(
    path: str, keyless: LiveSystem, connection: Connection
) -> None:
    """While they are refused, a stream beside them comes whole."""
    options: Any = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    others = [asyncio.ensure_future(keyless.client.generate([5] * 40, **options)) for _ in range(4)]
    statuses = set()
    for seed in range(100):
        rng = random.Random(f"{path} {seed}")
        body = copy.deepcopy(RICH[path])
        for _ in range(rng.randrange(1, 4)):
            body = changed(body, rng)
        # What has no bound is generated to the model's length: test_any_value_of_any_field does.
        if path in (COMPLETIONS, CHATS) and isinstance(body, dict):
            body = {**body, "max_tokens": 1 if (most := body.get("max_tokens")) is None else most}
        answer = await connection.post(path, json.dumps(body).encode())
        check(path, json.dumps(body), answer)
        statuses.add(answer.status)
    assert statuses == {200, 400}
    first, *rest = [done.token_ids for done in await asyncio.gather(*others)]
    assert len(first) == 200
    assert all(token_ids == first for token_ids in rest)
