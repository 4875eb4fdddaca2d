"""Free text around constrained output: reasoning and tool calls, before the answer or instead of
it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer

from engine.grammar.grammar import Grammar


@dataclass(frozen=True, slots=True)
class FreeText:
    """Free text delimited by a model's marker strings; see FreeText in sampling.proto. Empty
    strings mean no marker. max_tokens: before the end marker; None for any number."""

    begin: str = ""
    end: str = ""
    has_begun: bool = False
    may_be_all: bool = False
    instead: tuple[str, ...] = ()
    max_tokens: int | None = None

    def around(self, answer: Grammar, tokenizer: LLTokenizer) -> Grammar:
        """The grammar of a whole output, with `answer` for its constrained part. Valid for this
        tokenizer only, because markers are token ids. Raises ValueError if max_tokens is given and
        the end marker is not one token."""
        then = ["@answer", *(f"{_mark(text, tokenizer)} rest" for text in self.instead)]
        rules = ["rest: (/(?s:.+)/ | <[*]>)*", f"then: {' | '.join(then)}"]
        starts = ["then"]
        if self.end:
            breaks = r"/\n{0,2}/"
            end = _ids(self.end, tokenizer)
            if self.max_tokens is not None:
                end = tokenizer.tokenize_str(self.end, parse_special=True)
                if len(end) != 1:
                    raise ValueError(f"{self.end!r} is not one token of this model: set no budget")
                rules.append(f"free: {_all_but(end, self.max_tokens)}")
                ended = f"free {_tokens(end)} {breaks} then"
            elif end is None:
                rules.append(f"free[suffix={json.dumps(self.end)}]: /(?s:.*)/")
                ended = f"free {breaks} then"
            else:
                rules.append(f"free: {_all_but(end)}")
                ended = f"free {_tokens(end)} {breaks} then"
            starts = (
                [ended] if self.has_begun else [f"{_mark(self.begin, tokenizer)} {ended}", "then"]
            )
            if self.may_be_all:
                starts.append("free" if end is not None else "rest")
        rules.append(f"start: {' | '.join(starts)}")
        return answer.within("\n".join(rules))


def _ids(text: str, tokenizer: LLTokenizer) -> Sequence[int] | None:
    """Tokens of a marker; None unless the first is a special token, which ordinary text cannot
    contain."""
    ids: list[int] = tokenizer.tokenize_str(text, parse_special=True)
    return ids if ids and tokenizer.is_special_token(ids[0]) else None


def _tokens(ids: Sequence[int]) -> str:
    return " ".join(f"<[{i}]>" for i in ids)


def _mark(text: str, tokenizer: LLTokenizer) -> str:
    ids = _ids(text, tokenizer)
    return json.dumps(text) if ids is None else _tokens(ids)


def _all_but(end: Sequence[int], most: int | None = None) -> str:
    """Lark expression for tokens without the marker: its first token may occur only if its second
    one does not follow. most: maximum tokens, for a marker of one."""
    first = end[0]
    if most is not None:
        return f"<[^{first}]>{{0,{most}}}" if most else '""'
    if len(end) == 1:
        return f"<[^{first}]>*"
    return f"<[^{first}]>* (<[{first}]> <[^{first},{end[1]}]> <[^{first}]>*)*"
