"""Separates reasoning, `<think>...</think>`, from the answer, incrementally. The result does not
depend on how the text was divided. Pure."""

from __future__ import annotations

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
