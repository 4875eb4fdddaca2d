"""/v1/completions: one or several prompts in, as text or tokens, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from baton.v1 import inference_pb2, sampling_pb2
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
from gateway.http.json_body import MAX_PROMPTS
from gateway.http.logprobs import BytesOf, completion_logprobs, prompt_logprobs
from gateway.http.requests import (
    GenerationBody,
    generate_request,
    put_token_ids,
    sampling_message,
)

#: Default of OpenAI and vLLM.
DEFAULT_MAX_TOKENS = 16

#: Schema of token ids, for /openapi.json.
TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        TOKEN_IDS,
        {
            "type": "array",
            "maxItems": MAX_PROMPTS,
            "items": {"anyOf": [{"type": "string", "minLength": 1}, TOKEN_IDS]},
        },
    ]
}

#: Paths of a text or token prompt in a request message.
OF_PROMPT = tuple(Fills(f"prompt.{path}") for path in ("text", "token_ids", "token_ids.ids"))


class CompletionBody(GenerationBody):
    """Fields of a completion request."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT), *OF_PROMPT] = None
    """Text, token ids, or a list of either. Required."""
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    """false: tokenize a text prompt without adding special tokens."""

    refused = (*GenerationBody.refused, "suffix", "thinking_token_budget")
    id_fields = ("prompt",)


class CompletionFormat(OpenAiFormat):
    """Completion requests and answers (format.Format)."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, bytes_of: BytesOf) -> None:
        """Raises InvalidRequest."""
        super().__init__(body, bytes_of)
        self.body = body
        self._offsets = {entry.choice: entry.num_chars for entry in body.resume_from or ()}
        """Text offset by stream choice, in characters."""
        self._prompt_logprobs: dict[int, Sequence[sampling_pb2.PositionLogprobs]] = {}
        """By prompt; received with the prompt's first choice."""
        self._prompt_token_ids: dict[int, list[int]] = {}
        """By prompt, if the client wants them."""
        self._begun = {entry.choice for entry in body.resume_from or ()}
        """Choices of a stream that have sent a piece."""
        self._is_plain = body.logprobs is None and not body.return_token_ids
        """Whether stream pieces contain only text."""
        with in_words_of(self.field_names):
            self.requests = _requests(body)
        self._num_choices = max(1, self.requests[0].sampling.n)

    @property
    def field_names(self) -> FieldNames:
        """Client field names for errors."""
        return names_in(self.body)

    def begin(self, prompt: int, answer: Answer, prompt_token_ids: Sequence[int]) -> None:
        super().begin(prompt, answer, prompt_token_ids)
        if self.body.return_token_ids:
            self._prompt_token_ids[prompt] = list(prompt_token_ids)

    def event(self, prompt: int, chunk: Chunk, usage: str, earlier: str) -> str:  # noqa: ARG002
        index = prompt * self._num_choices + chunk.choice
        if self._is_plain and not chunk.finish_reason:
            return (
                f'{self._head}{index},"text":{quoted(chunk.text)},"logprobs":null,'
                f'"finish_reason":null,"stop_reason":null}}]{usage}}}\n\n'
            )
        choice = {
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": FINISHES[chunk.finish_reason],
            "stop_reason": stop_reason(chunk),
            **self._more(prompt, index, chunk),
        }
        return f"{self._head}{index},{json.dumps(choice)[1:]}]{usage}}}\n\n"

    def _more(self, prompt: int, index: int, chunk: Chunk) -> dict[str, Any]:
        """Optional members of a stream piece."""
        more: dict[str, Any] = {}
        if self.body.logprobs is not None:
            offset = self._offsets.get(index, 0)
            positions = self._positions(prompt, [chunk])
            more["logprobs"], self._offsets[index] = completion_logprobs(
                positions, self._name_of, offset
            )
        if self.body.return_token_ids:
            more["token_ids"] = list(chunk.token_ids)
            if index not in self._begun:
                self._begun.add(index)
                more["prompt_token_ids"] = self._prompt_token_ids.get(prompt)
        return more

    def document(self, chunks: Sequence[Sequence[Chunk]], usage: Mapping[str, Any]) -> Any:
        choices = [
            self._choice(prompt, prompt * self._num_choices + number, pieces)
            for prompt, of_prompt in enumerate(chunks)
            for number, pieces in by_choice(of_prompt).items()
        ]
        fields = self._fields(self.kind)
        return {**fields, "choices": choices, "usage": usage, "service_tier": None}

    def _choice(self, prompt: int, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        last = chunks[-1]
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(chunk.text for chunk in chunks),
            "logprobs": None,
            "finish_reason": FINISHES[last.finish_reason],
            "stop_reason": stop_reason(last),
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_token_ids.get(prompt),
        }
        positions = self._positions(prompt, chunks)
        if self.body.logprobs is not None:
            choice["logprobs"], _ = completion_logprobs(positions, self._name_of, 0)
        if self.body.prompt_logprobs is not None:
            of_prompt = self._prompt_logprobs.get(prompt, ())
            choice["prompt_logprobs"] = prompt_logprobs(of_prompt, self._bytes_of)
        if self.body.return_token_ids:
            choice["token_ids"] = [t for chunk in chunks for t in chunk.token_ids]
        return choice

    def _positions(
        self, prompt: int, chunks: Sequence[Chunk]
    ) -> list[sampling_pb2.PositionLogprobs | int]:
        """Log probabilities of the echoed prompt and the output."""
        positions: list[sampling_pb2.PositionLogprobs | int] = []
        for chunk in chunks:
            if chunk.prompt_logprobs:
                self._prompt_logprobs[prompt] = chunk.prompt_logprobs
            if chunk.prompt_token_ids:
                positions.append(chunk.prompt_token_ids[0])
                positions += self._prompt_logprobs.get(prompt, ())
            positions += chunk.logprobs
        return positions


def _requests(body: CompletionBody) -> list[inference_pb2.GenerateRequest]:
    prompts = _prompts(body.prompt)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_message(body, logprobs=body.logprobs, max_tokens=max_tokens)
    if body.resume_from and len(prompts) > 1:
        fault = f"given with {len(prompts)} prompts; give the one that it is of"
        raise invalid("resume_from", fault)
    if body.echo:
        sampling.echo = True
        if sampling.HasField("logprobs") and body.prompt_logprobs is None:
            sampling.prompt_logprobs = sampling.logprobs
    requests = []
    for field, value in prompts.items():
        request = generate_request(body, sampling)
        put_text_prompt(field, value, request.prompt)
        request.prompt.omit_special_tokens = body.add_special_tokens is False
        requests.append(request)
    return requests


def _prompts(value: Any) -> dict[str, Any]:
    """Prompts by field path: a text, a list of texts, token ids, or a list of lists of ids."""
    is_list = isinstance(value, list) and value and not isinstance(value[0], int)
    if not is_list:
        return {"prompt": value}
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"{len(value)} prompts; give at most {MAX_PROMPTS}")
    return {f"prompt[{index}]": part for index, part in enumerate(value)}


def put_text_prompt(field: str, value: Any, prompt: inference_pb2.Prompt) -> None:
    """Write a text or token ids into an empty prompt. Raises InvalidRequest."""
    if isinstance(value, str):
        prompt.text = value
    elif value and isinstance(value, list | inference_pb2.TokenIds):
        put_token_ids(field, value, prompt.token_ids.ids)
    else:
        raise invalid(field, f"{shown_value(value)}: give text, token ids, or a list of either")


ROUTE = Route(
    "/v1/completions",
    "post",
    "Text or token ids of one or several prompts in, text out.",
    CompletionBody,
    make=lambda body, bytes_of, _style: CompletionFormat(body, bytes_of),
)
