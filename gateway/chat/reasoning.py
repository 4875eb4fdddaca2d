"""Separates reasoning, `<think>...</think>`, from the answer, incrementally, and counts its tokens.
The result does not depend on how the output was divided. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gateway.chat.marks import num_held_back

BEGIN, END = "<think>", "</think>"


class ReasoningSplitter:
    """Splitter for one choice, in the format of DeepSeek R1, Qwen3 and others. With some, the
    prompt ends with the begin mark."""

    def __init__(self, *, is_reasoning: bool) -> None:
        """is_reasoning: whether the output begins inside the marks."""
        self._is_reasoning = is_reasoning
        self._is_over = False
        """Whether the rest is the answer."""
        self._is_at_break = False
        """Whether only newlines have followed the reasoning."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Consume text. Returns (reasoning, answer)."""
        if self._is_over:
            return "", self._answer(text)
        self._held += text
        if not self._is_reasoning:
            stripped = self._held.lstrip()
            if BEGIN.startswith(stripped):  # may become the mark, or is still empty
                if stripped == BEGIN:
                    self._is_reasoning, self._held = True, ""
                return "", ""
            if not stripped.startswith(BEGIN):
                return "", self._finish()
            self._is_reasoning, self._held = True, stripped[len(BEGIN) :]
        before, mark, after = self._held.partition(END)
        if mark:
            self._held, self._is_at_break = after, True
            return before, self._finish()
        cut = len(before) - num_held_back(before, (END,))
        self._held = before[cut:]
        return before[:cut], ""

    def end(self) -> tuple[str, str]:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return (held, "") if self._is_reasoning and not self._is_over else ("", held)

    def _finish(self) -> str:
        held, self._held = self._held, ""
        self._is_over = True
        return self._answer(held)

    def _answer(self, text: str) -> str:
        if self._is_at_break:
            text = text.lstrip("\n")
            self._is_at_break = not text
        return text


class ReasoningCounter:
    """Tells the tokens of one choice that lie between reasoning's marks from others. Tokens of a
    mark are neither reasoning nor answer, as in vLLM's usage."""

    def __init__(self, begin: str, ends: Iterable[str], *, is_reasoning: bool) -> None:
        """is_reasoning: whether the output begins inside the marks."""
        self._begin, self._ends = (begin.encode(),), tuple(end.encode() for end in ends)
        self._longest = max(map(len, (*self._begin, *self._ends)))
        self._is_reasoning = is_reasoning
        self._tail: deque[bytes] = deque(maxlen=self._longest)
        """Last tokens since the last mark."""
        self.num_tokens = 0
        """Reasoning tokens so far."""

    def feed(self, tokens: Iterable[bytes]) -> list[bool]:
        """Which of the next tokens, given as bytes, are part of the answer. The first tokens of a
        mark that comes in several calls may count as answer."""
        of_answer: list[bool] = []
        for token in tokens:
            num_before = self._num_before(token)
            if num_before is None:
                self._tail.append(token)
                of_answer.append(not self._is_reasoning)
                self.num_tokens += self._is_reasoning
                continue
            if self._is_reasoning:
                self.num_tokens -= num_before
            num_here = min(num_before, len(of_answer))
            of_answer[len(of_answer) - num_here :] = [False] * (num_here + 1)
            self._is_reasoning = not self._is_reasoning
            self._tail.clear()
        return of_answer

    def _num_before(self, token: bytes) -> int | None:
        """How many tokens before this one belong to the mark that it completes; None if it
        completes none."""
        tail = b"".join(self._tail)[-self._longest :]
        marks = self._ends if self._is_reasoning else self._begin
        start = max((tail + token).find(mark) for mark in marks)
        if start < 0:
            return None
        num_bytes, num_tokens = len(tail) - start, 0
        while num_bytes > 0:
            num_tokens += 1
            num_bytes -= len(self._tail[-num_tokens])
        return num_tokens
