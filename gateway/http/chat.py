"""/v1/chat/completions: a conversation in, the next message out."""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Annotated, Any

from pydantic import WithJsonSchema

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.chat.choice import ChatChoice, ChoiceOptions
from gateway.chat.harmony import THINKING
from gateway.chat.reasoning import BEGIN as THINK
from gateway.chat.style import ChatStyle, free_text_of, schema_of_calls
from gateway.http.conversation import MESSAGES, TOOL_CHOICE, TOOLS, choice_of_tools, put_messages
from gateway.http.errors import FieldNames, Fills, in_words_of, invalid, names_in, shown_value
from gateway.http.format import (
    FINISHES,
    Answer,
    Chunk,
    OpenAiFormat,
    Route,
    by_choice,
    quoted,
    stop_reason,
)
from gateway.http.logprobs import BytesOf, Positions, chat_logprobs, prompt_logprobs
from gateway.http.requests import (
    GenerationBody,
    NumTokens,
    ThinkingBudget,
    generate_request,
    is_json,
    is_whole_structured,
    json_text,
    put_budget,
    put_token_ids,
    sampling_message,
    structure_field,
)
from gateway.intake.rules import MAX_KWARGS_CHARS
from gateway.intake.token_bytes import ends_with


class ChatBody(GenerationBody):
    """Fields of a chat request."""

    messages: Annotated[
        list[Any],
        WithJsonSchema(MESSAGES),
        *(Fills(path) for path in ("prompt.chat.messages", "prompt.chat", "prompt")),
    ]
    """The conversation, oldest message first."""
    max_completion_tokens: Annotated[NumTokens, Fills("sampling.max_tokens")] = None
    """OpenAI's newer name of max_tokens; takes precedence."""
    logprobs: bool | None = None
    """Return the log probability of each output token."""
    top_logprobs: Annotated[int | None, Fills("sampling.logprobs")] = None
    """Alternatives per token; needs logprobs."""
    tools: Annotated[list[Any] | None, WithJsonSchema(TOOLS), Fills("prompt.chat.tools")] = None
    """Functions that the model may call."""
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    """Whether the model must call, and which function: none, auto, required, or a name."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, Fills("prompt.chat.template_kwargs")] = (
        None
    )
    """Variables of the model's chat template."""
    add_special_tokens: bool | None = None
    """true: add the tokenizer's special tokens to what the chat template writes."""
    kv_transfer_params: dict[str, Any] | None = None
    """prompt_token_ids: the prompt as token ids, from a router that has tokenized it; used instead
    of the messages."""
    add_generation_prompt: Annotated[bool | None, Fills("prompt.chat.add_generation_prompt")] = None
    """false: do not begin the assistant's message."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    reasoning_effort: str | None = None
    """Variable of the chat template, if it has one of this name."""
    thinking_token_budget: ThinkingBudget = None
    """Maximum tokens of reasoning, which its end mark then ends; -1: any number."""
    include_reasoning: bool | None = None
    """false: leave reasoning out of the answer."""
    echo: bool | None = None
    """Begin the answer with the last message, if that is the assistant's."""

    refused = (
        *GenerationBody.refused,
        *("functions", "function_call", "audio", "chat_template", "documents"),
    )
    ignored = (*GenerationBody.ignored, "modalities", "verbosity", "prediction")


_PROMPT_IDS = "prompt_token_ids"

_TOLD_OTHERWISE = "tools: the chat template has no place for them; the system message has them"

#: Members of a message, in OpenAI's order; vLLM's are behind them.
_MESSAGE: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "reasoning": None,
    "reasoning_content": None,
}


class ChatFormat(OpenAiFormat):
    """Chat requests and answers (format.Format)."""

    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, bytes_of: BytesOf, style: ChatStyle) -> None:
        """Raises InvalidRequest."""
        super().__init__(body, bytes_of)
        self.body = body
        self._choices: dict[int, ChatChoice] = {}
        """Choices that have begun."""
        self._begun = {entry.choice for entry in body.resume_from or ()}
        """Choices of a stream that have sent their role."""
        self._num_chars_to_replay: dict[int, int] = {}
        """By choice: characters of text to replay, already sent by an earlier stream."""
        self._prompt_token_ids: Sequence[int] = ()
        self._id_key = b""
        """Key of the ids of tool calls, computed from the seed and the prompt on first use."""
        self._num_top = body.top_logprobs or 0
        """Alternatives that the client wants; negative for all that come."""
        if body.logprob_token_ids:
            self._num_top = -1
        self._choice_of_tools = choice_of_tools(body.tools, body.tool_choice)
        self._style = style.for_choice(self._choice_of_tools)
        self._options = ChoiceOptions(
            self._style,
            self._choice_of_tools,
            1 if body.parallel_tool_calls is False else None,
            wants_thoughts=body.include_reasoning is not False,
        )
        with in_words_of(self.field_names):
            self.requests = [self._request()]
        if self._has_calls and not style.has_place_for_tools:
            self.warning = _TOLD_OTHERWISE
        self._is_plain = not (
            body.logprobs or body.return_token_ids or self._has_calls or self._style.has_thoughts
        )
        """Whether stream pieces contain only text."""
        if body.resume_from and (self._has_calls or self._style.has_thoughts):
            self.replay()

    def replay(self) -> None:
        """Regenerate the text of an earlier stream to restore the parser's state, without sending
        it. Raises InvalidRequest."""
        resume_from = self.body.resume_from or ()
        if resume_from and not self.body.is_streamed:
            fault = "given for what has parts, calls or thoughts: goes with stream; set it to true"
            raise invalid("resume_from", fault)
        self._num_chars_to_replay = {entry.choice: entry.num_chars for entry in resume_from}
        for entry in self.requests[0].resume_from:
            entry.num_chars = 0

    @property
    def field_names(self) -> FieldNames:
        """Client field names for errors."""
        # A forced call is a structured output; report its faults under `tools`.
        moved = {}
        if not structure_field(self.body):
            moved["sampling.structured_output"] = "tools"
            if not self._choice_of_tools.is_forced:
                moved["sampling.structured_output.grammar"] = "thinking_token_budget"
        moved["prompt.token_ids.ids"] = f"kv_transfer_params.{_PROMPT_IDS}"
        return names_in(self.body, moved)

    def _request(self) -> inference_pb2.GenerateRequest:
        body, chosen = self.body, self._choice_of_tools
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_message(body, logprobs=logprobs, max_tokens=max_tokens)
        violations = []
        if body.top_logprobs is not None and not body.logprobs:
            fault = f"{shown_value(body.top_logprobs)}: goes with logprobs; set it to true"
            violations.append(FieldViolation("top_logprobs", fault))
        if chosen.is_forced and structure_field(body) not in ("", "response_format"):
            fault = "a call of a tool has its own form; leave out one of them"
            violations.append(FieldViolation("tool_choice", fault))
        if violations:
            raise InvalidRequest.of(*violations)
        if chosen.is_forced:  # no text remains that response_format could apply to
            schema = schema_of_calls(chosen, is_parallel=body.parallel_tool_calls is not False)
            sampling.structured_output.json_schema = json.dumps(schema)
        if sampling.HasField("structured_output") and not is_whole_structured(body):
            free_text = free_text_of(self._style, chosen)
            if free_text is not None:
                sampling.structured_output.free_text.CopyFrom(free_text)
        put_budget(body.thinking_token_budget, self._style, sampling)
        if (
            not chosen.is_forced
            and (self._has_calls or self._style.is_harmony)
            and "skip_special_tokens" not in body.model_fields_set
        ):
            sampling.skip_special_tokens = False  # some families' marks are special tokens
        request = generate_request(body, sampling)
        chat = request.prompt.chat
        self._put_prompt(chat)
        last = chat.messages[-1]
        self._echo = last.content if body.echo and last.role == "assistant" else ""
        if (token_ids := (body.kv_transfer_params or {}).get(_PROMPT_IDS)) is not None:
            field, given = f"kv_transfer_params.{_PROMPT_IDS}", request.prompt.token_ids.ids
            put_token_ids(field, token_ids, given)
            if not given:
                raise invalid(field, "is empty; give the prompt's token ids, or leave it out")
        return request

    def _put_prompt(self, chat: inference_pb2.ChatPrompt) -> None:
        body = self.body
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        put_messages(body.messages, self._style.developer_role, chat)
        chat.tools.extend(self._choice_of_tools.tools)
        if kwargs:
            field = "chat_template_kwargs"
            chat.template_kwargs = json_text(field, kwargs, MAX_KWARGS_CHARS)
        chat.add_special_tokens = bool(body.add_special_tokens)
        chat.continue_final_message = bool(body.continue_final_message)
        if body.add_generation_prompt is not None and not (
            body.continue_final_message and not body.add_generation_prompt
        ):
            chat.add_generation_prompt = body.add_generation_prompt

    @property
    def _has_calls(self) -> bool:
        return bool(self._choice_of_tools.tools)

    def begin(self, prompt: int, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        super().begin(prompt, answer, prompt_token_ids)
        self._prompt_token_ids = prompt_token_ids
        if self._style.has_thoughts:
            begin = THINKING if self._style.is_harmony else THINK
            is_reasoning = ends_with(self._bytes_of, prompt_token_ids, begin)
            self._options = replace(self._options, is_reasoning=is_reasoning)

    def event(self, prompt: int, chunk: Chunk, usage: str, earlier: str) -> str:  # noqa: ARG002, there is one prompt
        index, role = chunk.choice, ""
        choice = self._choices.get(index) or self.new_choice(index)
        if index not in self._begun:
            if self.body.return_token_ids and not self._begun:
                earlier += f',"prompt_token_ids":{list(self._prompt_token_ids)}'
            self._begun.add(index)
            role = (
                f'{self._head}{index},"delta":{{"role":"assistant","content":{quoted(self._echo)}}},'
                f'"logprobs":null,"finish_reason":null}}]{earlier}}}\n\n'
            )
        if self._is_plain and not chunk.finish_reason:
            return (
                f'{role}{self._head}{index},"delta":{{"content":{quoted(chunk.text)}}},'
                f'"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'
            )
        text = chunk.text
        if self._num_chars_to_replay:
            replayed, text = self.split_replay(index, text)
            choice.delta(replayed, is_last=False)
        choice.count(map(self._bytes_of, chunk.token_ids))
        delta = choice.delta(text, is_last=bool(chunk.finish_reason))
        entry: dict[str, Any] = {
            "delta": delta,
            "logprobs": self.logprobs(chunk.logprobs),
            "finish_reason": self._finish(choice, chunk),
            "stop_reason": stop_reason(chunk),
        }
        if self.body.return_token_ids:
            entry |= {"token_ids": list(chunk.token_ids), "num_chars": len(text)}
        elif not delta and not chunk.finish_reason and not self.body.logprobs:
            return role
        return f"{role}{self._head}{index},{json.dumps(entry)[1:]}]{usage}}}\n\n"

    def usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        """The usage of the whole answer, with the tokens of its reasoning."""
        if not self._style.has_thoughts:
            return usage
        num_tokens = sum(choice.num_reasoning_tokens for choice in self._choices.values())
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def end(self, usage: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        return super().end(self.usage(usage), metrics)

    def split_replay(self, index: int, text: str) -> tuple[str, str]:
        """Split a choice's text into the part that an earlier stream sent and the new part."""
        num = self._num_chars_to_replay.get(index, 0)
        earlier, new = text[:num], text[num:]
        if num:
            self._num_chars_to_replay[index] = num - len(earlier)
        return earlier, new

    def new_choice(self, index: int) -> ChatChoice:
        """Parser state of a choice, after the tokens of an earlier stream."""
        choice = ChatChoice(self._options, self.ids(index, "call"))
        for entry in self.body.resume_from or ():
            if entry.choice == index:
                choice.count(map(self._bytes_of, entry.token_ids))
        self._choices[index] = choice
        return choice

    def ids(self, index: int, prefix: str) -> Callable[[], str]:
        """Generator of ids for the parts of a choice. Deterministic for a given seed and prompt, so
        that a resumed stream continues the ids of the earlier one."""
        numbers = count()

        def new_id() -> str:
            self._id_key = self._id_key or self._key_of_ids()
            part = f"{prefix} {index} {next(numbers)}".encode()
            return f"{prefix}_{blake2b(part, key=self._id_key, digest_size=12).hexdigest()}"

        return new_id

    def _key_of_ids(self) -> bytes:
        sampling = self.requests[0].sampling
        if not sampling.HasField("seed"):
            return secrets.token_bytes(32)
        seed, prompt = sampling.seed.to_bytes(8, "little"), array("I", self._prompt_token_ids)
        return blake2b(prompt.tobytes(), key=seed, digest_size=32).digest()

    def _finish(self, choice: ChatChoice, chunk: Chunk) -> str | None:
        finish = FINISHES[chunk.finish_reason]
        has_called = choice.tools.num_calls > 0 and self._choice_of_tools.name is None
        return "tool_calls" if finish == "stop" and has_called else finish

    def document(self, chunks: Sequence[Sequence[Chunk]], usage: Mapping[str, Any]) -> Any:
        choices = [self._choice(i, pieces) for i, pieces in by_choice(chunks[0]).items()]
        document = {**self._fields(self.kind), "choices": choices, "usage": self.usage(usage)}
        document |= {"service_tier": None, "prompt_logprobs": None, "prompt_token_ids": None}
        if self.body.prompt_logprobs is not None:
            positions = [position for chunk in chunks[0] for position in chunk.prompt_logprobs]
            document["prompt_logprobs"] = prompt_logprobs(positions, self._bytes_of)
        if self.body.return_token_ids:
            document["prompt_token_ids"] = list(self._prompt_token_ids)
        return document

    def _choice(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        last = chunks[-1]
        choice = self.new_choice(index)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        choice.count(map(self._bytes_of, token_ids))
        delta = choice.delta("".join(chunk.text for chunk in chunks), is_last=True)
        finish = self._finish(choice, last)
        message: dict[str, Any] = {**_MESSAGE, **delta}
        message["content"] = self._echo + delta.get("content", "")
        calls = delta.get("tool_calls", ())
        if finish == "length" and self._choice_of_tools.name is not None:
            calls = [call for call in calls if is_json(call["function"]["arguments"])]
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")} for call in calls
            ]
        else:
            message.pop("tool_calls", None)
        positions = [position for chunk in chunks for position in chunk.logprobs]
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(positions),
            "finish_reason": finish,
            "stop_reason": stop_reason(last),
            "token_ids": token_ids if self.body.return_token_ids else None,
        }

    def logprobs(self, positions: Positions) -> dict[str, Any] | None:
        """Log probabilities of some tokens, if the client wants them."""
        if not self.body.logprobs:
            return None
        return chat_logprobs(positions, self._num_top, self._name_of)


ROUTE = Route(
    "/v1/chat/completions",
    "post",
    "A conversation in, the next message out: text, calls of tools, thoughts.",
    ChatBody,
    make=ChatFormat,
)
