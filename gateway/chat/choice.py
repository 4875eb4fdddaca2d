"""Parser state of one choice: from its text to deltas in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gateway.chat.harmony import ENDS, THINKING, HarmonyParser
from gateway.chat.reasoning import BEGIN, END, ReasoningCounter, ReasoningSplitter
from gateway.chat.style import ChatStyle, ChoiceOfTools
from gateway.chat.tools import REQUIRED_FORMAT, CallBegins, Content, Part, Thought, ToolParser


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What a request says of its choices. style: of this answer, see ChatStyle.for_choice. tools:
    those that it may call. max_calls: None for any number. wants_thoughts: whether deltas have
    reasoning. is_reasoning: whether the output begins inside reasoning."""

    style: ChatStyle
    tools: ChoiceOfTools
    max_calls: int | None = None
    wants_thoughts: bool = True
    is_reasoning: bool = False


class ChatChoice:
    """Parser state of one choice."""

    def __init__(self, options: ChoiceOptions, new_id: Callable[[], str]) -> None:
        """new_id: generates ids of calls."""
        self._options = options
        style, tools, is_reasoning = options.style, options.tools, options.is_reasoning
        self._thoughts: ReasoningSplitter | None = None
        self._counter: ReasoningCounter | None = None
        if style.is_harmony:
            self.tools: ToolParser | HarmonyParser = HarmonyParser(
                new_id, has_calls=bool(tools.tools), is_thinking=is_reasoning
            )
            self._counter = ReasoningCounter(THINKING, ENDS, is_reasoning=is_reasoning)
            return
        form = REQUIRED_FORMAT if tools.is_forced else style.tool_format
        self.tools = ToolParser(form if tools.tools else None, new_id, tools.name, tools.schemas)
        if style.has_thoughts:
            is_reasoning = is_reasoning or style.begins_with_thoughts
            self._thoughts = ReasoningSplitter(is_reasoning=is_reasoning)
            self._counter = ReasoningCounter(BEGIN, (END,), is_reasoning=is_reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """Among the tokens counted so far."""
        return self._counter.num_tokens if self._counter else 0

    def count(self, tokens: Iterable[bytes]) -> list[bool]:
        """Count the next tokens, given as bytes. Returns which are part of the answer."""
        return self._counter.feed(tokens) if self._counter else [True for _ in tokens]

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The delta of the next text, in OpenAI's form; calls have an index. Reasoning has vLLM's
        name, and DeepSeek's."""
        thought, parts = self._read(text, is_last=is_last)
        delta = {"reasoning": thought, "reasoning_content": thought} if thought else {}
        content = "".join(part.text for part in parts if isinstance(part, Content))
        if content:
            delta["content"] = content
        calls = self._calls(parts)
        return {**delta, "tool_calls": calls} if calls else delta

    def deltas(self, text: str, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """As `delta`, split wherever reasoning, content and calls alternate."""
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
        # What max_tokens leaves of a forced call is no content.
        left_out = Content | Thought if self._options.tools.is_forced else Thought
        parts = [part for part in parts if not isinstance(part, left_out)]
        return thought if self._options.wants_thoughts else "", parts

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        calls: dict[int, dict[str, Any]] = {}
        most = self._options.max_calls
        for part in parts:
            if isinstance(part, Content | Thought) or (most is not None and part.index >= most):
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
