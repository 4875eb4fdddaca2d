"""What the scripted model says: by the last message of a conversation, its tools, and a grammar. It
stands in for the models that vLLM's tests name, which know the weather of Dallas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.types import Sample, TokenLogprobs
from engine import oracle_choice
from engine.interface import SampleRow
from engine.sampling.restrictions import allowed_mask

#: A text without end, for prompts that are no conversation.
_STORY = (" The river ran past the old mill and the town beyond it, and nobody there asked why.",)
_ENDINGS = ("then", "soon", "now", "later", "again", "perhaps", "today", "here")

#: Arguments by the names of parameters.
_ARGUMENTS: Mapping[str, Any] = {
    "city": "Dallas",
    "state": "TX",
    "unit": "fahrenheit",
    "location": "Boston, MA",
    "product_id": 7355608,
    "inserted": True,
    "latitude": 48.8,
    "longitude": 2.3,
    "options": {"state": "Dallas", "city": "Dallas", "unit": "celsius"},
}
#: Arguments that the message itself says.
_SAID_ARGUMENTS: Sequence[tuple[str, str]] = (
    ("input", r"magic_function\((\d+)\)"),
    ("customer_name", r"named '(.+?)'"),
)
_BY_TYPE: Mapping[str, Any] = {
    "integer": 1,
    "number": 1,
    "boolean": True,
    "array": [],
    "object": {},
}

#: Answers by what the last message says.
_SAID: Sequence[tuple[str, str]] = (
    (r"1\+1.*without any other text", "2"),
    (r'"result"|result field|JSON object', '{"result": 2}'),
    (
        r"science fair",
        '{"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}',
    ),
    (r"13 \* 24", "13 * 24 is 312. QED"),
    (r"Multiply the result by 2", "30. QED"),
    (r"common saying", " the doctor away."),
    (r"Repeat after me: (.*)", r"\1"),
    (r"17 \* 19", "323"),
    (r"pick another one", "Swift"),
    (r"joke", '{"setup": "Why do cats purr?", "punchline": "They are paid by the hour."}'),
    (r"98 degrees", "It is 98 degrees in Dallas now."),
)

#: What ends a JSON document soonest, best first; within a text of it a quote does.
_CLOSING = ("}", "]", '"', ".", ":", ",")


class Script:
    """Replaces the oracle engine's choice of tokens."""

    def __init__(self, folder: Path, *, thinks: bool) -> None:
        """thinks: whether answers begin with thoughts."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._thinks = thinks
        config = json.loads((folder / "config.json").read_text())
        self._end = int(config["eos_token_id"])
        self._think_end = self._tokenizer.token_to_id("</think>")
        ids = range(self._tokenizer.get_vocab_size())
        self._texts = [self._tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        self._closing = [i for text in _CLOSING for i in ids if self._texts[i] == text]
        self._quote = self._texts.index('"')
        letters = [i for i in ids if len(self._texts[i]) == 1 and self._texts[i].isalnum()]
        self._digits = [i for i in letters if self._texts[i].isdigit()]
        self._letters = letters
        self._answers = lru_cache(maxsize=64)(self._written)

    def choose(self, digest: int, row: SampleRow, vocab_size: int) -> Sample:
        """As engine.oracle_choice.choose."""
        if row.scored_token_id is not None:
            return _likely(oracle_choice.choose(digest, row, vocab_size))
        if row.sampling.beam is not None:
            return oracle_choice.choose(digest, row, vocab_size)
        token = self._token(row)
        sampling = replace(row.sampling, allowed_token_ids=(), bad_words=(), min_tokens=0)
        mask = (1 << token).to_bytes(token // 8 + 1, "little")
        return oracle_choice.choose(
            digest, row._replace(sampling=sampling, allowed=mask), vocab_size
        )

    def _token(self, row: SampleRow) -> int:
        sampling = row.sampling
        if sampling.logit_bias and max(sampling.logit_bias.values()) >= 50:
            return max(sampling.logit_bias, key=lambda token: sampling.logit_bias[token])
        mask = allowed_mask(row)
        allowed = None if mask is None else int.from_bytes(mask, "little")
        barred = {token for token, bias in sampling.logit_bias.items() if bias <= -50}
        barred |= {word[-1] for word in sampling.bad_words if len(word) == 1}
        if row.num_output_tokens < sampling.min_tokens:
            barred |= sampling.stop_token_ids

        def may(token: int) -> bool:
            return token not in barred and (allowed is None or bool(allowed >> token & 1))

        if found := next(filter(may, self._wanted(row)), None):
            return found
        if allowed is None:
            return next(token for token in self._letters if token not in barred)
        # Not the same for every prompt: some tests ask for another answer.
        turn = 7 * (self._variant(row) or row.num_prompt_tokens)
        words = [i for i in _turned(self._letters, turn) if i not in self._digits]
        letters = [*words, *_turned(self._digits, turn)]
        written = self._tokenizer.decode(list(row.token_ids[row.num_prompt_tokens :]))
        is_in_text = written.replace('\\"', "").count('"') % 2 == 1
        if is_in_text and written.endswith('"') and may(letters[0]):
            return letters[0]  # no text is empty
        for token in (self._end, *([self._quote] if is_in_text else []), *self._closing, *letters):
            if may(token):
                return token
        return (allowed & -allowed).bit_length() - 1

    def _wanted(self, row: SampleRow) -> Iterator[int]:
        """The next tokens of the scripts that begin with what there is, and of the usual one."""
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        output = tuple(row.token_ids[row.num_prompt_tokens :])
        answers = self._answers(prompt, self._variant(row))
        if self._think_end in output:
            output = output[output.index(self._think_end) + 1 :]
            answers = tuple(self._behind_thoughts(answer) for answer in answers)
        begun = [answer for answer in answers if answer[: len(output)] == output]
        for answer in (*begun, answers[0]):
            if len(output) < len(answer):
                yield answer[len(output)]
        yield self._end if self._end in row.sampling.stop_token_ids else self._letters[0]

    def _behind_thoughts(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        if self._think_end not in answer:
            return answer
        return answer[answer.index(self._think_end) + 1 :]

    def _variant(self, row: SampleRow) -> int:
        """0 for greedy rows; else by seed and choice."""
        if not row.sampling.temperature:
            return 0
        return (row.sampling.seed + 3 * row.choice + 1) % len(_ENDINGS)

    def _written(self, prompt: tuple[int, ...], variant: int) -> tuple[tuple[int, ...], ...]:
        """The usual answer, and those for where a call is forced."""
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        head, mark, _ = text.rpartition("<|im_start|>assistant\n")
        if not mark:
            words = f"{_STORY[0]} {_ENDINGS[variant]}." if variant else _STORY[0]
            return (self._ids(words * 300),)
        thoughts = ""
        if self._thinks and not text.endswith("</think>\n\n"):
            thoughts = (
                "<think>\nThe user asks, and I think about what to say to that.\n</think>\n\n"
            )
        said = thoughts + self._said(head)
        if variant and not said.endswith("</tool_call>"):
            said += f" {_ENDINGS[variant]}"
        return tuple((*self._ids(text), self._end) for text in (said, *self._forced(head)))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _last(self, head: str) -> str:
        return head.rpartition("<|im_start|>")[2].partition(self._texts[self._end])[0]

    def _forced(self, head: str) -> Iterator[str]:
        """A list of a call, and the arguments alone, of each tool."""
        last = self._last(head)
        for tool in _tools(head):
            arguments = _arguments(tool, last)
            yield json.dumps([{"name": tool["name"], "arguments": arguments}], ensure_ascii=False)
            yield json.dumps(arguments, ensure_ascii=False)

    def _said(self, head: str) -> str:
        last = self._last(head)
        for pattern, answer in _SAID:
            if found := re.search(pattern, last, re.S):
                return found.expand(answer)
        names = re.findall(r"my (?:real )?name is (\w+)", head, re.I)
        if names and "name again" in last:
            return str(names[-1])
        tools = _tools(head)
        asks = re.search(r"weather|product|capital|time|tool|customer", last, re.I)
        if tools and asks and last.startswith("user"):
            by_name = {tool["name"]: tool for tool in tools}
            if named := re.findall(r"Call (\w+) for \w+ and (\w+) for", last):
                return "\n".join(_call(by_name[name], last) for name in named[0])
            cities = ["Dallas", "Orlando"] if "Orlando" in last else [""]
            return "\n".join(_call(_tool_for(tools, asks[0]), last, city) for city in cities)
        return "Hello! I can help you with that, and here is what I have to say about it today."


def _turned(ids: Sequence[int], turn: int) -> Sequence[int]:
    turn %= len(ids)
    return [*ids[turn:], *ids[:turn]]


def _likely(sample: Sample) -> Sample:
    """A token of the prompt as the most probable one: the model knows what it is given."""
    found = sample.logprobs
    if found is None or not found.top:
        return sample
    best = found.top[0][1]
    others = [entry for entry in found.top if entry[0] != found.token_id]
    top = ((found.token_id, best), *others)[: len(found.top)]
    return sample._replace(logprobs=TokenLogprobs(found.token_id, best, top, 1))


def _tool_for(tools: Sequence[Mapping[str, Any]], topic: str) -> Mapping[str, Any]:
    return next((tool for tool in tools if topic.lower() in tool["name"]), tools[0])


def _tools(head: str) -> Sequence[Mapping[str, Any]]:
    lines = head.partition("# Tools\n")[2].partition("<|im_end|>")[0].splitlines()
    return [json.loads(line)["function"] for line in lines if line.startswith("{")]


def _arguments(tool: Mapping[str, Any], last: str, city: str = "") -> Mapping[str, Any]:
    """last: the message that asks for the call."""
    parameters = (tool.get("parameters") or {}).get("properties") or {}
    known = dict(_ARGUMENTS)
    for name, pattern in _SAID_ARGUMENTS:
        if found := re.search(pattern, last):
            known[name] = int(found[1]) if found[1].isdecimal() else found[1]
    by_type = {**_BY_TYPE, "integer": 1 + len(last) % 9, "string": f"x{len(last)}"}
    arguments = {
        name: known.get(name, by_type.get(str(schema.get("type")), "x"))
        for name, schema in parameters.items()
    }
    if city and "city" in arguments:
        arguments |= {"city": city, "state": "TX" if city == "Dallas" else "FL"}
    return arguments


def _call(tool: Mapping[str, Any], last: str, city: str = "") -> str:
    call = {"name": tool["name"], "arguments": _arguments(tool, last, city)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
