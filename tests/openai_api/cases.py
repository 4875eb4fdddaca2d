"""What the `openai` package does against the gateway's HTTP: one line of docs/openai.md each.

A case is a call, and what must hold of its result: an object, the list of a stream's chunks, or the
error that the package raised. Each runs by the sync and by the async client.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from baton.types import Sampling
from engine.oracle import oracle_tokens
from tests.openai_api.world import GREEDY, MESSAGES, MODEL, PROMPT, World
from tests.support.oracle_model import VOCAB_SIZE


def _tokens(prompt: Sequence[int], **sampling: Any) -> list[int]:
    return oracle_tokens(prompt, Sampling(temperature=0.0, max_tokens=8, **sampling), VOCAB_SIZE)


END_TOKEN, SPECIAL_TOKEN = VOCAB_SIZE - 3, VOCAB_SIZE - 2
#: Prompts with these tokens in their outputs, not at the beginning.
ENDING, SPECIAL = [141, 141], [195, 195]
assert END_TOKEN in _tokens(ENDING)[2:-2]
assert SPECIAL_TOKEN in _tokens(SPECIAL)[2:-2]

Check = Callable[[Any, World], None]


@dataclass(frozen=True)
class Case:
    """call: of the client, e.g. "chat.completions.create". error: that the package must raise; the
    check is then of it. parser: the gateway's --tool-call-parser."""

    section: str
    name: str
    call: str
    kwargs: Mapping[str, Any]
    check: Check
    error: type[openai.APIError] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the client."""
    parser: str = "auto"


_CASES: list[Case] = []


def case(
    section: str,
    name: str,
    call: str,
    error: type[openai.APIError] | None = None,
    options: Mapping[str, Any] | None = None,
    parser: str = "auto",
    **kwargs: Any,
) -> Callable[[Check], Check]:
    """Adds the case that the function checks."""

    def add(check: Check) -> Check:
        _CASES.append(Case(section, name, call, kwargs, check, error, options or {}, parser))
        return check

    return add


def completion(section: str, name: str, **kwargs: Any) -> Callable[[Check], Check]:
    return case(
        section,
        name,
        "completions.create",
        **{"model": MODEL, "prompt": PROMPT, **GREEDY, **kwargs},
    )


def chat(section: str, name: str, **kwargs: Any) -> Callable[[Check], Check]:
    return case(
        section,
        name,
        "chat.completions.create",
        **{"model": MODEL, "messages": MESSAGES, **GREEDY, **kwargs},
    )


def bad(name: str, param: str, call: Any = completion, **kwargs: Any) -> None:
    """A request that is refused with 400, naming the field."""

    def check(error: openai.BadRequestError, world: World) -> None:
        assert error.param == param, error.message
        assert param.partition("[")[0] in error.message
        assert error.type == "invalid_request_error"
        assert error.request_id

    call("Errors", name, error=openai.BadRequestError, **kwargs)(check)


def joined(chunks: Sequence[Any]) -> str:
    return "".join(c.choices[0].text for c in chunks if c.choices)


def said(chunks: Sequence[Any], index: int = 0) -> str:
    parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
    return "".join(part.delta.content or "" for part in parts)


# Completions


@completion("Completions", "text in, text out, with usage and a reason for the end")
def _(result: Any, world: World) -> None:
    assert result.object == "text_completion"
    assert result.id.startswith("cmpl-")
    assert result.model == MODEL
    assert result.system_fingerprint.startswith("fp_")
    assert result.choices[0].text == world.completion(PROMPT)
    assert result.choices[0].finish_reason == "length"
    assert result.usage.prompt_tokens == len(world.ids(PROMPT))
    assert result.usage.completion_tokens == 8
    assert result.usage.total_tokens == result.usage.prompt_tokens + 8


@completion("Completions", "a stream, whose pieces add up", stream=True)
def _(chunks: Any, world: World) -> None:
    assert joined(chunks) == world.completion(PROMPT)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


@completion("Completions", "several prompts", prompt=["one day", "two days", "three"])
def _(result: Any, world: World) -> None:
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    for prompt, choice in zip(["one day", "two days", "three"], result.choices, strict=True):
        assert choice.text == world.completion(prompt)
    assert result.usage.completion_tokens == 24


@completion("Completions", "several prompts, streamed", prompt=["one day", "two"], stream=True)
def _(chunks: Any, world: World) -> None:
    for index, prompt in enumerate(["one day", "two"]):
        text = "".join(c.choices[0].text for c in chunks if c.choices[0].index == index)
        assert text == world.completion(prompt)


@completion("Completions", "token ids as the prompt", prompt=[5, 6, 7, 8])
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.text(world.tokens([5, 6, 7, 8]))
    assert result.usage.prompt_tokens == 4


@completion("Completions", "lists of token ids as prompts", prompt=[[5, 6], [7, 8, 9]])
def _(result: Any, world: World) -> None:
    texts = [world.text(world.tokens(ids)) for ids in ([5, 6], [7, 8, 9])]
    assert [choice.text for choice in result.choices] == texts


@completion("Completions", "16 tokens if max_tokens is not given", max_tokens=openai.NOT_GIVEN)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, 16)


@completion("Completions", "`echo` gives the prompt first", echo=True)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == PROMPT + world.completion(PROMPT)


@completion("Completions", "`echo` in a stream", echo=True, stream=True)
def _(chunks: Any, world: World) -> None:
    assert joined(chunks) == PROMPT + world.completion(PROMPT)


@completion("Completions", "`echo` with `logprobs`: the prompt's, too", echo=True, logprobs=2)
def _(result: Any, world: World) -> None:
    logprobs, ids = result.choices[0].logprobs, world.ids(PROMPT)
    assert len(logprobs.tokens) == len(ids) + 8
    assert "".join(logprobs.tokens[: len(ids)]) == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[: len(ids)] == [
        len("".join(logprobs.tokens[:i])) for i in range(len(ids))
    ]


@completion("Completions", "`logprobs` by token text", logprobs=3)
def _(result: Any, world: World) -> None:
    logprobs = result.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert value <= 0
        assert 3 <= len(top) <= 4 or "\ufffd" in top
        assert token in top


@completion("Completions", "`logprobs` in a stream", logprobs=1, stream=True)
def _(chunks: Any, world: World) -> None:
    given = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert sum(len(part.tokens) for part in given) == 8
    offsets = [offset for part in given for offset in part.text_offset]
    assert offsets == sorted(offsets)


@completion("Completions", "`logprobs: 0`: the chosen tokens' alone", logprobs=0)
def _(result: Any, world: World) -> None:
    logprobs = result.choices[0].logprobs
    assert all(
        list(top) == [token]
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )


# Chat


@chat("Chat", "a conversation in, a message out")
def _(result: Any, world: World) -> None:
    assert result.object == "chat.completion"
    assert result.id.startswith("chatcmpl-")
    message = result.choices[0].message
    assert (message.role, message.content) == ("assistant", world.reply(MESSAGES))
    assert message.refusal is None
    assert message.tool_calls is None
    assert result.choices[0].finish_reason == "length"
    assert result.usage.prompt_tokens == len(world.chat_ids(MESSAGES))
    assert result.usage.prompt_tokens_details.cached_tokens >= 0


@chat("Chat", "a stream: the role first, then the text", stream=True)
def _(chunks: Any, world: World) -> None:
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert said(chunks) == world.reply(MESSAGES)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"


@chat(
    "Chat",
    "roles system, user and assistant",
    messages=[
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ],
)
def _(result: Any, world: World) -> None:
    given = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "again")]
    messages = [{"role": role, "content": content} for role, content in given]
    assert result.choices[0].message.content == world.reply(messages)


@chat(
    "Chat",
    "content as parts of text",
    messages=[
        {
            "role": "user",
            "content": [{"type": "text", "text": "say"}, {"type": "text", "text": "it"}],
        }
    ],
)
def _(result: Any, world: World) -> None:
    expected = world.reply([{"role": "user", "content": "say\nit"}])
    assert result.choices[0].message.content == expected


@chat("Chat", "`max_completion_tokens`", max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content == world.reply(MESSAGES, 3)


@chat("Chat", "`max_completion_tokens` before `max_tokens`", max_completion_tokens=3)
def _(result: Any, world: World) -> None:
    assert result.usage.completion_tokens == 3


@chat("Chat", "`logprobs` with `top_logprobs`, text and bytes", logprobs=True, top_logprobs=2)
def _(result: Any, world: World) -> None:
    content = result.choices[0].logprobs.content
    assert len(content) == 8
    raw = b"".join(bytes(entry.bytes) for entry in content)
    assert raw.decode("utf-8", "replace") == result.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


@chat("Chat", "`logprobs` in a stream", logprobs=True, top_logprobs=1, stream=True)
def _(chunks: Any, world: World) -> None:
    given = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert sum(len(part.content) for part in given) == 8


@chat("Chat", "`logprobs` without `top_logprobs`", logprobs=True)
def _(result: Any, world: World) -> None:
    assert all(entry.top_logprobs == [] for entry in result.choices[0].logprobs.content)


# Sampling


@completion("Sampling", "`n` choices", n=3, temperature=1.0, seed=7)
def _(result: Any, world: World) -> None:
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert len({choice.text for choice in result.choices}) == 3
    assert result.usage.completion_tokens == 24


@chat("Sampling", "`n` choices of a streamed chat", n=2, temperature=1.0, seed=7, stream=True)
def _(chunks: Any, world: World) -> None:
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role]
    assert sorted(roles) == [0, 1]
    assert said(chunks, 0) != said(chunks, 1)
    assert sum(bool(c.choices[0].finish_reason) for c in chunks) == 2


@completion("Sampling", "`n` of several prompts", prompt=["a day", "a night"], n=2, temperature=1.0)
def _(result: Any, world: World) -> None:
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]


@completion("Sampling", "`best_of`", n=2, best_of=4, temperature=1.0, seed=1)
def _(result: Any, world: World) -> None:
    assert len(result.choices) == 2
    assert result.usage.completion_tokens == 32


@completion("Sampling", "`seed`: the tokens that it stands for", seed=42, temperature=0.9)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=0.9, seed=42)


@completion("Sampling", "a negative `seed`", seed=-5, temperature=0.9)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=0.9, seed=2**64 - 5)


@completion("Sampling", "`top_p`", top_p=0.5, temperature=0.9, seed=3)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=0.9, seed=3, top_p=0.5)


@completion("Sampling", "penalties", presence_penalty=1.5, frequency_penalty=-0.5)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(
        PROMPT, presence_penalty=1.5, frequency_penalty=-0.5
    )


@completion("Sampling", "`logit_bias`, token ids as strings", logit_bias={"301": 100, "302": -100})
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, logit_bias={301: 100.0, 302: -100.0})


_COUNT = {"extra_body": {"guided_choice": ["one two three"]}}


@completion("Sampling", "`stop`, a string", stop="two", **_COUNT)
def _(result: Any, world: World) -> None:
    assert (result.choices[0].text, result.choices[0].finish_reason) == ("one ", "stop")
    assert result.choices[0].model_extra["stop_reason"] == "two"


@chat("Sampling", "`stop` in a stream", stop="two", stream=True, **_COUNT)
def _(chunks: Any, world: World) -> None:
    assert said(chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"


@completion("Sampling", "`stop`, a list", stop=["zzz", "t"], **_COUNT)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == "one "
    assert result.choices[0].model_extra["stop_reason"] == "t"


@completion("Sampling", "`stop: null`", stop=None)
def _(result: Any, world: World) -> None:
    assert result.choices[0].finish_reason == "length"


@chat("Sampling", "fields that are null mean nothing", stop=None, seed=None, top_p=None, n=None)
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content == world.reply(MESSAGES)


def extra(section: str, name: str, call: Any = completion, **body: Any) -> Callable[[Check], Check]:
    """A case of fields that the package has no arguments for."""
    kwargs = body.pop("kwargs", {})
    decorator: Callable[[Check], Check] = call(
        section, name, extra_body={"ignore_eos": True, **body}, **kwargs
    )
    return decorator


# vLLM's fields


@extra("vLLM's fields", "`top_k`", top_k=3, kwargs={"temperature": 1.0, "seed": 9})
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=1.0, seed=9, top_k=3)


@extra("vLLM's fields", "`top_k: -1` for all", top_k=-1, kwargs={"temperature": 1.0, "seed": 9})
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=1.0, seed=9)


@extra("vLLM's fields", "`min_p`", min_p=0.3, kwargs={"temperature": 1.0, "seed": 9})
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, temperature=1.0, seed=9, min_p=0.3)


@extra("vLLM's fields", "`repetition_penalty`", repetition_penalty=1.3)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT, repetition_penalty=1.3)


@extra("vLLM's fields", "`ignore_eos`", kwargs={"prompt": ENDING})
def _(result: Any, world: World) -> None:
    assert result.choices[0].finish_reason == "length"
    assert result.choices[0].text == world.text(_tokens(ENDING))


@completion("vLLM's fields", "without it the end token ends", prompt=ENDING, extra_body={})
def _(result: Any, world: World) -> None:
    token_ids = _tokens(ENDING, stop_token_ids=frozenset({END_TOKEN}))
    assert result.choices[0].finish_reason == "stop"
    assert result.choices[0].text == world.text(token_ids[:-1])
    assert result.usage.completion_tokens == len(token_ids) < 8


@completion("vLLM's fields", "`min_tokens`", prompt=ENDING, extra_body={"min_tokens": 7})
def _(result: Any, world: World) -> None:
    token_ids = _tokens(ENDING, stop_token_ids=frozenset({END_TOKEN}), min_tokens=7)
    assert result.usage.completion_tokens == len(token_ids) >= 7


_THIRD = _tokens([5, 6, 7])[2]


@extra("vLLM's fields", "`stop_token_ids`", stop_token_ids=[_THIRD], kwargs={"prompt": [5, 6, 7]})
def _(result: Any, world: World) -> None:
    assert result.choices[0].model_extra["stop_reason"] == _THIRD
    assert result.usage.completion_tokens == 3


@extra("vLLM's fields", "`prompt_logprobs`", prompt_logprobs=2)
def _(result: Any, world: World) -> None:
    given, ids = result.choices[0].model_extra["prompt_logprobs"], world.ids(PROMPT)
    assert len(given) == len(ids)
    assert given[0] is None
    for token_id, entries in zip(ids[1:], given[1:], strict=True):
        assert entries[str(token_id)]["rank"] >= 1
        assert all(math.isfinite(entry["logprob"]) for entry in entries.values())


@extra("vLLM's fields", "`return_token_ids`", return_token_ids=True)
def _(result: Any, world: World) -> None:
    given = result.choices[0].model_extra
    assert given["token_ids"] == world.tokens(world.ids(PROMPT))
    assert given["prompt_token_ids"] == world.ids(PROMPT)


@completion(
    "vLLM's fields",
    "`return_token_ids` of several prompts, streamed",
    prompt=["one day", "two days"],
    stream=True,
    extra_body={"return_token_ids": True, "ignore_eos": True},
)
def _(chunks: Any, world: World) -> None:
    for index, prompt in enumerate(["one day", "two days"]):
        first, *rest = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert first.model_extra["prompt_token_ids"] == world.ids(prompt)
        assert all("prompt_token_ids" not in each.model_extra for each in rest)


@chat(
    "vLLM's fields",
    "`return_token_ids` of a streamed chat: the prompt's with the role",
    stream=True,
    extra_body={"return_token_ids": True, "ignore_eos": True},
)
def _(chunks: Any, world: World) -> None:
    first, *rest = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.model_extra["prompt_token_ids"] == world.chat_ids(MESSAGES)
    assert all("prompt_token_ids" not in chunk.model_extra for chunk in rest)


@chat(
    "vLLM's fields",
    "what a chat has not is null",
)
def _(result: Any, world: World) -> None:
    assert result.model_extra["prompt_token_ids"] is None
    assert result.model_extra["prompt_logprobs"] is None
    (choice,) = result.choices
    assert choice.model_extra["token_ids"] is None
    assert choice.message.model_extra["reasoning"] is None


@extra(
    "vLLM's fields", "`allowed_token_ids`", allowed_token_ids=[5, 300, 301], return_token_ids=True
)
def _(result: Any, world: World) -> None:
    ids = result.choices[0].model_extra["token_ids"]
    assert len(ids) == 8
    assert set(ids) <= {5, 300, 301}


@chat(
    "vLLM's fields",
    "`logprob_token_ids`: these, and the chosen one",
    logprobs=True,
    top_logprobs=1,
    extra_body={"logprob_token_ids": [5, 300], "allowed_token_ids": [42]},
)
def _(result: Any, world: World) -> None:
    for position in result.choices[0].logprobs.content:
        assert position.bytes == list(b"K")
        assert {bytes(each.bytes) for each in position.top_logprobs} == {
            world.text([token]).encode() for token in (5, 300, 42)
        }


@extra("vLLM's fields", "`truncate_prompt_tokens`: the last ones", truncate_prompt_tokens=3)
def _(result: Any, world: World) -> None:
    kept = world.ids(PROMPT)[-3:]
    assert result.usage.prompt_tokens == 3
    assert result.choices[0].text == world.text(world.tokens(kept))


@extra(
    "vLLM's fields",
    "`truncation_side: right`: the first ones",
    truncate_prompt_tokens=3,
    truncation_side="right",
)
def _(result: Any, world: World) -> None:
    kept = world.ids(PROMPT)[:3]
    assert result.choices[0].text == world.text(world.tokens(kept))


@extra(
    "vLLM's fields",
    "`truncate_prompt_tokens: -1`: as many as the model takes",
    prompt=[5] * 40_000,
    truncate_prompt_tokens=-1,
)
def _(result: Any, world: World) -> None:
    assert result.usage.prompt_tokens == 4096 - 8
    assert result.choices[0].text == world.text(world.tokens([5] * 4088))


bad(
    "`thinking_token_budget` where the end of thoughts is not one token",
    "thinking_token_budget",
    chat,
    extra_body={"thinking_token_budget": 5},
)
bad(
    "`logprob_token_ids` without `logprobs`",
    "logprob_token_ids",
    extra_body={"logprob_token_ids": [5]},
)


@completion(
    "vLLM's fields",
    "`return_tokens_as_token_ids`",
    logprobs=1,
    extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
)
def _(result: Any, world: World) -> None:
    ids = world.tokens(world.ids(PROMPT))
    assert result.choices[0].logprobs.tokens == [f"token_id:{token_id}" for token_id in ids]


@extra("vLLM's fields", "`use_beam_search`", kwargs={"n": 2}, use_beam_search=True)
def _(result: Any, world: World) -> None:
    first, second = result.choices
    assert first.text != second.text
    assert result.usage.completion_tokens == 16


bad(
    "`length_penalty` without `use_beam_search`",
    "length_penalty",
    extra_body={"length_penalty": 0.5},
)


@chat(
    "vLLM's fields",
    "`kv_transfer_params.prompt_token_ids`: the prompt, from a router that has tokenized it",
    extra_body={
        "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]},
        "return_token_ids": True,
        "ignore_eos": True,
    },
)
def _(result: Any, world: World) -> None:
    assert result.model_extra["prompt_token_ids"] == [5, 6, 7]
    assert result.choices[0].model_extra["token_ids"] == world.tokens([5, 6, 7])


bad(
    "`kv_transfer_params.prompt_token_ids` that are none",
    "kv_transfer_params.prompt_token_ids[1]",
    chat,
    extra_body={"kv_transfer_params": {"prompt_token_ids": [5, VOCAB_SIZE]}},
)
bad(
    "an empty list of them",
    "kv_transfer_params.prompt_token_ids",
    chat,
    extra_body={"kv_transfer_params": {"prompt_token_ids": []}},
)


@extra("vLLM's fields", "Baton's `return_timing`", return_timing=True)
def _(result: Any, world: World) -> None:
    timing = result.model_extra["timing"]
    parts = timing["first_token_ms"]
    assert sum(parts.values()) == pytest.approx(timing["time_to_first_token_ms"], abs=0.01)
    assert timing["decode_worker"]
    assert result.choices[0].text == world.completion(PROMPT)


@extra("vLLM's fields", "Baton's `return_receipt`", return_receipt=True)
def _(result: Any, world: World) -> None:
    receipt = result.model_extra["receipt"]
    assert receipt["sampling"]["temperature"] == 0
    assert int(receipt["sampling"]["seed"]) >= 0
    (choice,) = receipt["choices"]
    assert len(choice["token_ids"]) == result.usage.completion_tokens
    assert receipt["digest"]
    assert receipt["workers"]


@extra("vLLM's fields", "`priority` and `cache_salt`", priority=-3, cache_salt="mine")
def _(result: Any, world: World) -> None:
    assert result.choices[0].text == world.completion(PROMPT)


@extra(
    "vLLM's fields",
    "`skip_special_tokens: false`",
    skip_special_tokens=False,
    kwargs={"prompt": SPECIAL},
)
def _(result: Any, world: World) -> None:
    assert "<|im_start|>" in result.choices[0].text


# Streams


@completion(
    "Streams",
    "`include_usage`: a last chunk with nothing else",
    stream=True,
    stream_options={"include_usage": True},
)
def _(chunks: Any, world: World) -> None:
    *pieces, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert all(c.usage is None for c in pieces)


@chat("Streams", "`include_usage` of a chat", stream=True, stream_options={"include_usage": True})
def _(chunks: Any, world: World) -> None:
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len(world.chat_ids(MESSAGES)) + 8


@chat(
    "Streams",
    "`continuous_usage_stats`: usage so far in every chunk",
    stream=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True},
)
def _(chunks: Any, world: World) -> None:
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-2:]) == (0, [8, 8]), "the role's; the last piece's, the usage alone"
    assert {c.usage.prompt_tokens for c in chunks} == {len(world.chat_ids(MESSAGES))}


@completion(
    "Streams",
    "`continuous_usage_stats` without `include_usage`: no usage",
    stream=True,
    stream_options={"include_usage": False, "continuous_usage_stats": True},
)
def _(chunks: Any, world: World) -> None:
    assert all(c.usage is None for c in chunks)


bad("`stream_options` without `stream`", "stream_options", stream_options={"include_usage": True})


# Structured output


_SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "w": {"enum": ["red", "blue"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}


def _check_schema(document: Any) -> None:
    assert isinstance(document["n"], int)
    assert document["w"] in ("red", "blue")


_LONG: dict[str, Any] = {
    "max_tokens": 400,
    "extra_body": {"chat_template_kwargs": {"is_brief": True}},  # it has ended its thoughts
}


@chat(
    "Structured output",
    "`response_format: json_schema`, strict",
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
    },
    **_LONG,
)
def _(result: Any, world: World) -> None:
    if result.choices[0].finish_reason == "stop":
        _check_schema(json.loads(result.choices[0].message.content))
    assert result.choices[0].message.content.lstrip().startswith("{")


@chat(
    "Structured output",
    "`response_format: json_object`",
    response_format={"type": "json_object"},
    **_LONG,
)
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content.lstrip().startswith("{")


@chat(
    "Structured output",
    "`response_format` is for the answer: thoughts come before it",
    response_format={"type": "json_object"},
    max_tokens=40,
    extra_body={"chat_template_kwargs": {"enable_thinking": True}},
)
def _(result: Any, world: World) -> None:
    message = result.choices[0].message
    assert message.model_extra["reasoning_content"]
    assert result.choices[0].finish_reason == "length"
    assert not message.content


@chat(
    "Structured output",
    "`response_format: json_object` with a schema, as for llama.cpp",
    response_format={"type": "json_object", "schema": {"enum": ["x", "y"]}},
    extra_body={},
    max_tokens=40,
)
def _(result: Any, world: World) -> None:
    assert json.loads(result.choices[0].message.content) in ("x", "y")


@chat(
    "Structured output",
    "`json_schema`, as for llama.cpp",
    extra_body={"json_schema": {"enum": ["x", "y"]}},
    max_tokens=40,
)
def _(result: Any, world: World) -> None:
    assert json.loads(result.choices[0].message.content) in ("x", "y")


bad(
    "a schema beside `json_object` that is none",
    "response_format.schema",
    chat,
    response_format={"type": "json_object", "schema": "x"},
)

bad("llama.cpp's `grammar`", "grammar", chat, extra_body={"grammar": "root ::= x"})


@chat("Structured output", "`response_format: text`", response_format={"type": "text"})
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content == world.reply(MESSAGES)


@completion("Structured output", "`guided_choice`", extra_body={"guided_choice": ["yes", "no"]})
def _(result: Any, world: World) -> None:
    assert result.choices[0].text in ("yes", "no")
    assert result.choices[0].finish_reason == "stop"


@completion("Structured output", "`guided_regex`", extra_body={"guided_regex": "[ab]{3}"})
def _(result: Any, world: World) -> None:
    assert len(result.choices[0].text) == 3
    assert set(result.choices[0].text) <= set("ab")


@completion(
    "Structured output",
    "`guided_json`",
    max_tokens=400,
    extra_body={"guided_json": {"enum": ["x", "y"], "type": "string"}},
)
def _(result: Any, world: World) -> None:
    assert json.loads(result.choices[0].text) in ("x", "y")


@completion(
    "Structured output",
    "`guided_grammar`, in Lark's syntax",
    extra_body={"guided_grammar": 'start: "ab" | "cd"'},
)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text in ("ab", "cd")


@completion(
    "Structured output",
    "`structured_outputs`",
    extra_body={"structured_outputs": {"choice": ["left", "right"]}},
)
def _(result: Any, world: World) -> None:
    assert result.choices[0].text in ("left", "right")


# Tools


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


def _writing(text: str) -> dict[str, Any]:
    """What makes the model write a text, whatever it means."""
    return {"structured_outputs": {"choice": [text], "enable_in_reasoning": True}}


def tools(name: str, text: str = "", **kwargs: Any) -> Callable[[Check], Check]:
    """text: what the model is made to write; in Hermes' format unless a `parser` is given."""
    return chat(
        "Tools",
        name,
        **{
            "tools": [WEATHER, CLOCK],
            "max_tokens": 400,
            "extra_body": _writing(text) if text else {},
            **kwargs,
        },
    )


def calls_of(chunks: Sequence[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call of a stream, which come once, and piece by piece."""
    calls: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in calls:
                assert call.id
                assert call.type == "function"
                calls[call.index] = (call.function.name, "")
            name, text = calls[call.index]
            calls[call.index] = (name, text + (call.function.arguments or ""))
    return [calls[index] for index in sorted(calls)]


def _check_weather(name: str, arguments: str) -> None:
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")


@tools("a call in the model's own format", f"Let me see.<tool_call>{_CALL}</tool_call>")
def _(result: Any, world: World) -> None:
    message = result.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )
    assert call.id.startswith("call_")
    assert message.content == "Let me see."
    assert result.choices[0].finish_reason == "tool_calls"


@tools("its arguments, streamed", f"Well.<tool_call>{_CALL}</tool_call>", stream=True)
def _(chunks: Any, world: World) -> None:
    assert said(chunks) == "Well."
    ((name, arguments),) = calls_of(chunks)
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


_TWO_CALLS = (
    f'<tool_call>{_CALL}</tool_call><tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>'
)


@tools("parallel calls", _TWO_CALLS)
def _(result: Any, world: World) -> None:
    message = result.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "clock"]
    assert message.content is None
    assert len({call.id for call in message.tool_calls}) == 2


@tools("parallel calls, streamed", _TWO_CALLS, stream=True)
def _(chunks: Any, world: World) -> None:
    assert [name for name, _ in calls_of(chunks)] == ["get_weather", "clock"]


@tools("`parallel_tool_calls: false`", _TWO_CALLS, parallel_tool_calls=False)
def _(result: Any, world: World) -> None:
    assert len(result.choices[0].message.tool_calls) == 1


@tools("an answer without a call", "It is warm.")
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content == "It is warm."
    assert result.choices[0].message.tool_calls is None
    assert result.choices[0].finish_reason == "stop"


@tools("what only looks like a call is text", "<tool_call>no</tool_call>")
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.content == "<tool_call>no</tool_call>"


REMIND = {
    "type": "function",
    "function": {
        "name": "remind",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "minutes": {"type": "integer"}},
        },
    },
}
#: What says of an argument without quotes whether it is text or a number: the tool's schema.
_REMINDER = {"text": "5", "minutes": 5}
_GLM_CALL = (
    "<tool_call>remind\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n"
    "<arg_key>minutes</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
)
_CODER_CALL = (
    "<tool_call>\n<function=remind>\n<parameter=text>\n5\n</parameter>\n"
    "<parameter=minutes>\n5\n</parameter>\n</function>\n</tool_call>"
)


def _call_of_format(writer: str, parser: str, text: str) -> None:
    """A call in the format of a parser that the gateway was told to use, whole and streamed."""
    given: dict[str, Any] = {"parser": parser, "tools": [REMIND]}

    @tools(f"a call as {writer} writes it: `--tool-call-parser {parser}`", f"Ok.{text}", **given)
    def _(result: Any, world: World) -> None:
        message = result.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("remind", _REMINDER)
        assert message.content.strip() == "Ok."
        assert result.choices[0].finish_reason == "tool_calls"

    @tools(f"two of {writer}'s, streamed", f"Ok.{text}\n{text}", **given, stream=True)
    def _(chunks: Any, world: World) -> None:
        calls = [(name, json.loads(arguments)) for name, arguments in calls_of(chunks)]
        assert calls == [("remind", _REMINDER)] * 2
        assert said(chunks).strip() == "Ok."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


_call_of_format("GLM", "glm45", _GLM_CALL)
_call_of_format("Qwen3-Coder", "qwen3_coder", _CODER_CALL)


_ONLY_WEATHER = {"tools": [WEATHER], "max_tokens": 800}


@tools("`tool_choice: required`, by a grammar", tool_choice="required", **_ONLY_WEATHER)
def _(result: Any, world: World) -> None:
    choice = result.choices[0]
    calls = choice.message.tool_calls
    if choice.finish_reason == "tool_calls":
        for call in calls:
            _check_weather(call.function.name, call.function.arguments)
    assert calls is None or calls[0].function.name == "get_weather"


@tools(
    "the name of a tool as `tool_choice`, by a grammar",
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    **_ONLY_WEATHER,
)
def _(result: Any, world: World) -> None:
    choice = result.choices[0]
    (call,) = choice.message.tool_calls
    if choice.finish_reason == "stop":
        _check_weather(call.function.name, call.function.arguments)
    assert call.function.arguments.startswith("{")


@tools(
    "the same, streamed",
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    stream=True,
    **_ONLY_WEATHER,
)
def _(chunks: Any, world: World) -> None:
    ((name, arguments),) = calls_of(chunks)
    assert said(chunks) == ""
    if chunks[-1].choices[0].finish_reason == "stop":
        _check_weather(name, arguments)


@tools("`tool_choice: none`", f"<tool_call>{_CALL}</tool_call>", tool_choice="none")
def _(result: Any, world: World) -> None:
    assert result.choices[0].message.tool_calls is None
    assert _CALL in result.choices[0].message.content


@chat(
    "Tools",
    "a conversation with a call and its answer",
    messages=[
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
)
def _(result: Any, world: World) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    given = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": "rain"},
    ]
    assert result.choices[0].message.content == world.reply(given)


TRIP = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "$defs": {
                "City": {"enum": ["Oslo", "Rome"]},
                "Leg": {
                    "type": "object",
                    "properties": {"to": {"$ref": "#/$defs/City"}},
                    "required": ["to"],
                    "additionalProperties": False,
                },
            },
            "properties": {"leg": {"$ref": "#/$defs/Leg"}},
            "required": ["leg"],
            "additionalProperties": False,
        },
    },
}


@tools(
    "`tool_choice: required` of a tool with `$defs`",
    tools=[TRIP],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=800,
)
def _(result: Any, world: World) -> None:
    choice = result.choices[0]
    if choice.finish_reason == "tool_calls":
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments)["leg"]["to"] in ("Oslo", "Rome")


def _cut_call(name: str, **kwargs: Any) -> None:
    @tools(f"{name} cut off by `max_tokens`: no call", tools=[WEATHER], max_tokens=1, **kwargs)
    def _(result: Any, world: World) -> None:
        (choice,) = result.choices
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is None
        assert not choice.message.content


_cut_call("`tool_choice: required`", tool_choice="required")
_cut_call(
    "a named tool",
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
)


# Templates and thoughts


@tools(
    "a call that is required, in spite of a `response_format`",
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    response_format={"type": "json_object"},
    extra_body={"chat_template_kwargs": {"is_brief": True}},
)
def _(result: Any, world: World) -> None:
    (call,) = result.choices[0].message.tool_calls
    assert call.function.name == "get_weather"


@chat(
    "Templates and thoughts",
    "role `developer`, as the template calls it",
    messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}],
)
def _(result: Any, world: World) -> None:
    given = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert result.choices[0].message.content == world.reply(given)


@chat(
    "Templates and thoughts",
    "`continue_final_message`",
    messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}],
    extra_body={"continue_final_message": True, "ignore_eos": True},
)
def _(result: Any, world: World) -> None:
    ids = world.ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am")
    assert result.usage.prompt_tokens == len(ids)
    assert result.choices[0].message.content == world.text(world.tokens(ids))


@chat(
    "Templates and thoughts",
    "`chat_template_kwargs`, here one that has the prompt begin the thoughts",
    extra_body={
        "chat_template_kwargs": {"enable_thinking": True},
        **_writing("hm, well</think>yes"),
    },
    max_tokens=40,
)
def _(result: Any, world: World) -> None:
    message = result.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("yes", "hm, well")
    assert message.model_extra["reasoning"] == "hm, well"
    num_tokens = result.usage.completion_tokens_details.reasoning_tokens
    assert 1 < num_tokens < result.usage.completion_tokens - 1


@chat(
    "Templates and thoughts",
    "tokens of thoughts that the client leaves out are in the usage",
    extra_body={"include_reasoning": False, **_writing("<think>hm, well</think>yes")},
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
def _(chunks: Any, world: World) -> None:
    assert said(chunks) == "yes"
    details = chunks[-1].usage.completion_tokens_details
    assert 1 < details.reasoning_tokens < chunks[-1].usage.completion_tokens - 1


@chat(
    "Templates and thoughts",
    "`echo`: the assistant's last message first",
    messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}],
    extra_body={"continue_final_message": True, "echo": True, "ignore_eos": True},
)
def _(result: Any, world: World) -> None:
    ids = world.ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am")
    assert result.choices[0].message.content == "I am" + world.text(world.tokens(ids))


@chat(
    "Templates and thoughts",
    "`reasoning_content`, streamed",
    extra_body=_writing("<think>hm, well</think>yes"),
    max_tokens=40,
    stream=True,
)
def _(chunks: Any, world: World) -> None:
    deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        thought = "".join(delta.get(name, "") for delta in deltas)
        assert (said(chunks), thought) == ("yes", "hm, well")


# Responses


def responses(name: str, **kwargs: Any) -> Callable[[Check], Check]:
    return case(
        "Responses",
        name,
        "responses.create",
        **{
            "model": MODEL,
            "input": "say a thing",
            "temperature": 0,
            "max_output_tokens": 8,
            **kwargs,
        },
    )


@responses("text in, text out")
def _(result: Any, world: World) -> None:
    assert result.object == "response"
    assert result.output_text == world.reply(MESSAGES)
    assert result.status in ("completed", "incomplete")
    assert result.usage.output_tokens == 8
    assert result.usage.input_tokens == len(world.chat_ids(MESSAGES))


@responses("the options of the answer, as they were resolved")
def _(result: Any, world: World) -> None:
    assert (result.temperature, result.top_p, result.truncation) == (0, 1, "disabled")
    assert result.model_extra["presence_penalty"] == 0
    assert result.completed_at is None  # max_output_tokens cut it off


@responses(
    "`enable_response_messages`: the prompt and the output as the model's text and tokens",
    extra_body={"enable_response_messages": True},
)
def _(result: Any, world: World) -> None:
    (asked,), (said_,) = (result.model_extra[f"{side}_messages"] for side in ("input", "output"))
    assert asked["tokens"] == world.chat_ids(MESSAGES)
    assert asked["message"].endswith("<|im_start|>assistant\n")
    assert world.text(said_["tokens"]) == result.output_text


@responses("a stream of events", stream=True)
def _(events: Any, world: World) -> None:
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == world.reply(MESSAGES) == events[-1].response.output_text


@responses(
    "`instructions`, and a conversation as items",
    instructions="be brief",
    input=[
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": "hello"},
        {"type": "message", "role": "user", "content": "again"},
    ],
)
def _(result: Any, world: World) -> None:
    given = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "again")]
    messages = [{"role": role, "content": content} for role, content in given]
    assert result.output_text == world.reply(messages)


@responses(
    "a call of a function, and thoughts, streamed",
    tools=[{"type": "function", **WEATHER["function"]}],
    input="weather?",
    extra_body={"temperature": 0},
    tool_choice={"type": "function", "name": "get_weather"},
    max_output_tokens=800,
    stream=True,
)
def _(events: Any, world: World) -> None:
    (item,) = events[-1].response.output
    assert item.type == "function_call"
    assert item.call_id
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    assert arguments == item.arguments
    if events[-1].type == "response.completed":
        _check_weather(item.name, arguments)


@responses(
    "tools that OpenAI's own servers run are left out",
    tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}],
)
def _(result: Any, world: World) -> None:
    assert result.output_text == world.reply(MESSAGES)


@responses(
    "`text.format`, a schema",
    text={"format": {"type": "json_schema", "name": "w", "schema": {"enum": ["x", "y"]}}},
)
def _(result: Any, world: World) -> None:
    assert json.loads(result.output_text) in ("x", "y")


@responses(
    "`include` of log probabilities, with `top_logprobs`, streamed",
    include=["message.output_text.logprobs"],
    top_logprobs=2,
    extra_body={"ignore_eos": True},
    stream=True,
)
def _(events: Any, world: World) -> None:
    ids = world.tokens(world.chat_ids(MESSAGES))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    found = [entry for event in deltas for entry in event.logprobs]
    assert [entry.token for entry in found] == [world.text([i]) for i in ids]
    assert all(len(entry.top_logprobs) == 2 for entry in found)
    (item,) = events[-1].response.output
    assert [entry.token for entry in item.content[0].logprobs] == [e.token for e in found]


@responses(
    "log probabilities are of the text, not of thoughts",
    include=["message.output_text.logprobs"],
    extra_body=_writing("<think>hm, well</think>yes"),
    max_output_tokens=40,
)
def _(result: Any, world: World) -> None:
    thought, message = result.output
    assert (thought.type, result.output_text) == ("reasoning", "yes")
    logged = "".join(entry.token for entry in message.content[0].logprobs)
    assert logged.replace("<|endoftext|>", "") == "yes", logged
    num_tokens = result.usage.output_tokens_details.reasoning_tokens
    assert 1 < num_tokens < 9, num_tokens


@responses(
    "vLLM's sampling fields, and `chat_template_kwargs`",
    extra_body={
        "stop": ["</think>"],
        "include_stop_str_in_output": True,
        "top_k": 1,
        "min_p": 0.5,
        "presence_penalty": 1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"enable_thinking": True},
        **_writing("hm</think>yes"),
    },
    max_output_tokens=40,
)
def _(result: Any, world: World) -> None:
    (thought,) = result.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")


@responses(
    "items of reasoning reach the template",
    input=[
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ],
)
def _(result: Any, world: World) -> None:
    given = [("user", "hi"), ("assistant", "<think>hm</think>hello"), ("user", "again")]
    messages = [{"role": role, "content": content} for role, content in given]
    assert result.usage.input_tokens == len(world.chat_ids(messages))


@case(
    "Responses",
    "`previous_response_id` is refused where nothing is kept",
    "responses.create",
    openai.BadRequestError,
    model=MODEL,
    input="x",
    previous_response_id="resp_1",
)
def _(error: Any, world: World) -> None:
    assert error.param == "previous_response_id"


@case(
    "Responses",
    "a wrong field, by its name there",
    "responses.create",
    openai.BadRequestError,
    model=MODEL,
    input="x",
    max_output_tokens=9999,
)
def _(error: Any, world: World) -> None:
    assert error.param == "max_output_tokens"


# Models


@case("Models", "the list of models", "models.list")
def _(result: Any, world: World) -> None:
    (model,) = result.data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "baton")
    assert model.model_extra["max_model_len"] == 4096


@case("Models", "one model", "models.retrieve", model=MODEL)
def _(result: Any, world: World) -> None:
    assert result.id == MODEL


@case(
    "Models",
    "a model that is not there: 404",
    "models.retrieve",
    openai.NotFoundError,
    model="gpt-9",
)
def _(error: Any, world: World) -> None:
    assert (error.code, error.param) == ("model_not_found", "model")


# Errors


@completion("Errors", "another model: 404", model="gpt-9", error=openai.NotFoundError)
def _(error: Any, world: World) -> None:
    assert error.code == "model_not_found"


@completion(
    "Errors",
    "no key, or a wrong one: 401",
    error=openai.AuthenticationError,
    options={"api_key": "wrong"},
)
def _(error: Any, world: World) -> None:
    assert error.code == "invalid_api_key"


@case(
    "Errors",
    "what no model here does: 404",
    "embeddings.create",
    openai.NotFoundError,
    model=MODEL,
    input="x",
)
def _(error: Any, world: World) -> None:
    assert "embeddings are not served here" in error.message


@case(
    "Errors",
    "batches: 404",
    "batches.create",
    openai.NotFoundError,
    completion_window="24h",
    endpoint="/v1/completions",
    input_file_id="x",
)
def _(error: Any, world: World) -> None:
    assert "batches are not served here" in error.message


bad("a range that is left", "temperature", temperature=-1)
bad("of a chat, too", "top_p", chat, top_p=7)
bad("max_tokens of 0", "max_tokens", max_tokens=0)
bad("max_tokens beyond the model's", "max_tokens", max_tokens=9999)
bad(
    "max_completion_tokens beyond it",
    "max_completion_tokens",
    chat,
    max_completion_tokens=9999,
)
bad("a negative number", "n", n=-1)
bad("a number that is text", "max_tokens", extra_body={"max_tokens": "8"})
bad("text that is a number", "stop", extra_body={"stop": 5})
bad("an entry of a list", "prompt[1]", prompt=["a", {"b": 1}])
bad("a token id that is none", "prompt[2]", prompt=[1, 2, "x"])
bad("a token id beyond the vocabulary", "prompt[1]", prompt=[1, 5000])
bad("an empty prompt", "prompt", prompt="")
bad("no prompt at all", "prompt", prompt=None)
bad("a prompt that is too long", "prompt", prompt=[7] * 5000)
bad("no messages", "messages", chat, messages=[])
bad("a message without a role", "messages[0].role", chat, messages=[{"content": "x"}])
bad(
    "a picture",
    "messages[0].content[1].type",
    chat,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
            ],
        }
    ],
)
bad(
    "a conversation that the template refuses",
    "messages",
    chat,
    messages=[{"role": "user", "content": "bad"}],
)
bad("a key of logit_bias that is no token", "logit_bias", logit_bias={"a": 1})
bad("top_logprobs without logprobs", "top_logprobs", chat, top_logprobs=2)
bad("too many top_logprobs", "top_logprobs", chat, logprobs=True, top_logprobs=50)
bad("best_of below n", "best_of", n=3, best_of=2)
bad("a tool without a name", "tools[0]", chat, tools=[{"type": "function", "function": {}}])
bad("tool_choice without tools", "tool_choice", chat, tool_choice="required")
bad(
    "a tool that is not there",
    "tool_choice.function.name",
    chat,
    tools=[CLOCK],
    tool_choice={"type": "function", "function": {"name": "other"}},
)
bad(
    "a variable that the template has already",
    "chat_template_kwargs.messages",
    chat,
    extra_body={"chat_template_kwargs": {"messages": []}},
)
bad("suffix, which is not served", "suffix", suffix="end")
bad(
    "a schema that is none",
    "response_format.json_schema",
    chat,
    extra_body={},
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
    },
)
bad(
    "a response_format that is not known",
    "response_format.type",
    chat,
    response_format={"type": "yaml"},
)

CASES: Sequence[Case] = tuple(_CASES)
