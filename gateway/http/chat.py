"""/v1/chat/completions: a conversation in, the next message out."""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count, groupby
from typing import Annotated, Any

from pydantic import WithJsonSchema

from baton.errors import FieldViolation, InvalidRequest
from baton.v1 import inference_pb2
from gateway.chat.harmony import THINKING, HarmonyParser
from gateway.chat.reasoning import BEGIN as THINK
from gateway.chat.reasoning import ReasoningSplitter
from gateway.chat.style import ChatStyle, free_text_of, schema_of_calls
from gateway.chat.tools import REQUIRED_FORMAT, CallBegins, Content, Part, Thought, ToolParser
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
from gateway.http.logprobs import BytesOf, chat_logprobs, prompt_logprobs
from gateway.http.requests import (
    GenerationBody,
    NumTokens,
    generate_request,
    is_whole_structured,
    json_text,
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
    add_generation_prompt: Annotated[bool | None, Fills("prompt.chat.add_generation_prompt")] = None
    """false: do not begin the assistant's message."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    reasoning_effort: str | None = None
    """Variable of the chat template, if it has one of this name."""
    include_reasoning: bool | None = None
    """false: leave reasoning out of the answer."""

    refused = (
        *GenerationBody.refused,
        *("functions", "function_call", "audio", "chat_template", "documents"),
    )
    ignored = (*GenerationBody.ignored, "modalities", "verbosity", "prediction")


class ChatFormat(OpenAiFormat):
    """Chat requests and answers (format.Format)."""

    id_prefix = "chatcmpl"
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
        self._is_reasoning = False
        """Whether the prompt ends with the begin mark of reasoning."""
        self._num_top = body.top_logprobs or 0
        self._choice_of_tools = choice_of_tools(body.tools, body.tool_choice)
        self._style = style.for_choice(self._choice_of_tools)
        with in_words_of(self.field_names):
            self.requests = [self._request()]
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
        moved = {} if structure_field(self.body) else {"sampling.structured_output": "tools"}
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
        if (
            not chosen.is_forced
            and (self._has_calls or self._style.is_harmony)
            and "skip_special_tokens" not in body.model_fields_set
        ):
            sampling.skip_special_tokens = False  # some families' marks are special tokens
        request = generate_request(body, sampling)
        self._put_prompt(request.prompt.chat)
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
        chat.continue_final_message = bool(body.continue_final_message)
        if body.add_generation_prompt is not None and not (
            body.continue_final_message and not body.add_generation_prompt
        ):
            chat.add_generation_prompt = body.add_generation_prompt

    @property
    def _has_calls(self) -> bool:
        return bool(self._choice_of_tools.tools)

    def begin(self, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        super().begin(answer, prompt_token_ids)
        self._prompt_token_ids = prompt_token_ids
        if self._style.has_thoughts:
            begin = THINKING if self._style.is_harmony else THINK
            self._is_reasoning = ends_with(self._bytes_of, prompt_token_ids, begin)

    def event(self, prompt: int, chunk: Chunk, usage: str) -> str:  # noqa: ARG002, there is one
        index, role = chunk.choice, ""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self.new_choice(index)
        if index not in self._begun:
            self._begun.add(index)
            role = (
                f'{self._head}{index},"delta":{{"role":"assistant","content":""}},'
                f'"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'
            )
        if self._is_plain and not chunk.finish_reason:
            return (
                f'{role}{self._head}{index},"delta":{{"content":{quoted(chunk.text)}}},'
                f'"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'
            )
        text = chunk.text
        if self._num_chars_to_replay:
            earlier, text = self.split_replay(index, text)
            choice.delta(earlier, is_last=False)
        delta = choice.delta(text, is_last=bool(chunk.finish_reason))
        entry: dict[str, Any] = {
            "delta": delta,
            "logprobs": self._logprobs([chunk]),
            "finish_reason": self._finish(choice, chunk),
            "stop_reason": stop_reason(chunk),
        }
        if self.body.return_token_ids:
            entry |= {"token_ids": list(chunk.token_ids), "num_chars": len(text)}
        elif not delta and not chunk.finish_reason and not self.body.logprobs:
            return role
        return f"{role}{self._head}{index},{json.dumps(entry)[1:]}]{usage}}}\n\n"

    def split_replay(self, index: int, text: str) -> tuple[str, str]:
        """Split a choice's text into the part that an earlier stream sent and the new part."""
        num = self._num_chars_to_replay.get(index, 0)
        earlier, new = text[:num], text[num:]
        if num:
            self._num_chars_to_replay[index] = num - len(earlier)
        return earlier, new

    def new_choice(self, index: int) -> ChatChoice:
        """Parser state of a choice without text."""
        chosen, new_id = self._choice_of_tools, self.ids(index, "call")
        most = 1 if self.body.parallel_tool_calls is False else None
        wants_thoughts = self.body.include_reasoning is not False
        if self._style.is_harmony:
            harmony = HarmonyParser(
                new_id, has_calls=self._has_calls, is_thinking=self._is_reasoning
            )
            return ChatChoice(harmony, None, most, wants_thoughts)
        form = REQUIRED_FORMAT if chosen.is_forced else self._style.tool_format
        form = form if self._has_calls else None
        tools = ToolParser(form, new_id, chosen.name, chosen.schemas)
        thoughts = None
        if self._style.has_thoughts:
            thoughts = ReasoningSplitter(
                is_reasoning=self._is_reasoning or self._style.begins_with_thoughts
            )
        return ChatChoice(tools, thoughts, most, wants_thoughts)

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
        document = {**self._fields(self.kind), "choices": choices, "usage": usage}
        if self.body.prompt_logprobs is not None:
            positions = [position for chunk in chunks[0] for position in chunk.prompt_logprobs]
            document["prompt_logprobs"] = prompt_logprobs(positions, self._bytes_of)
        return document

    def _choice(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        last = chunks[-1]
        choice = self.new_choice(index)
        delta = choice.delta("".join(chunk.text for chunk in chunks), is_last=True)
        content = delta.get("content", "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        if "tool_calls" in delta:
            message["content"] = content or None
            message["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")}
                for call in delta["tool_calls"]
            ]
        document: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(chunks),
            "finish_reason": self._finish(choice, last),
            "stop_reason": stop_reason(last),
        }
        if self.body.return_token_ids:
            document["token_ids"] = [t for chunk in chunks for t in chunk.token_ids]
        return document

    def _logprobs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        positions = [position for chunk in chunks for position in chunk.logprobs]
        return chat_logprobs(positions, self._num_top, self._bytes_of)


class ChatChoice:
    """Parser state of one choice."""

    def __init__(
        self,
        tools: ToolParser | HarmonyParser,
        thoughts: ReasoningSplitter | None,
        max_calls: int | None,
        has_thoughts: bool,
    ) -> None:
        self.tools = tools
        self._thoughts = thoughts
        self._max_calls = max_calls
        self._has_thoughts = has_thoughts

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The delta of the next text, in OpenAI's form; calls have an index."""
        thought, parts = self._read(text, is_last=is_last)
        delta: dict[str, Any] = {"reasoning_content": thought} if thought else {}
        content = "".join(part.text for part in parts if isinstance(part, Content))
        if content:
            delta["content"] = content
        calls = self._calls(parts)
        if calls:
            delta["tool_calls"] = calls
        return delta

    def deltas(self, text: str, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """As `delta`, split wherever content and calls alternate."""
        thought, parts = self._read(text, is_last=is_last)
        if thought:
            yield {"reasoning_content": thought}
        for is_content, run in groupby(parts, lambda part: isinstance(part, Content)):
            if is_content:
                yield {"content": "".join(part.text for part in run if isinstance(part, Content))}
            elif calls := self._calls(list(run)):
                yield {"tool_calls": calls}

    def _read(self, text: str, *, is_last: bool) -> tuple[str, list[Part]]:
        """The reasoning in the next text, if the client wants it, and the other parts."""
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
            if is_last:
                more_thought, more_text = self._thoughts.end()
                thought, text = thought + more_thought, text + more_text
        parts = self.tools.feed(text) if text else []
        if is_last:
            parts += self.tools.end()
        thought += "".join(part.text for part in parts if isinstance(part, Thought))
        parts = [part for part in parts if not isinstance(part, Thought)]
        return thought if self._has_thoughts else "", parts

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, Content | Thought):
                continue
            if self._max_calls is not None and part.index >= self._max_calls:
                continue
            call = calls.setdefault(
                part.index, {"index": part.index, "function": {"arguments": ""}}
            )
            if isinstance(part, CallBegins):
                call |= {"id": part.id, "type": "function"}
                call["function"] = {"name": part.name, "arguments": ""}
            else:
                call["function"]["arguments"] += part.text
        return list(calls.values())


ROUTE = Route(
    "/v1/chat/completions",
    "post",
    "A conversation in, the next message out: text, calls of tools, thoughts.",
    ChatBody,
    make=ChatFormat,
)
