"""A process that tokenizes long texts, so that one which takes too long can be killed: python -m
gateway.intake.text_tokenizer

It is made with {"path": str}, of a tokenizer.json, and answers {"text": str, "add_special_tokens":
bool, "max_tokens": int} with {"num_tokens": int, "text": str}. The latter text is the token ids as
32-bit integers, in hexadecimal digits, or empty if they are more than max_tokens: JSON takes who
asked ten times as long to read, and holds up other requests. See gateway.intake.child. It dies
of a text that takes more memory than tokenizing should.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import tokenizers

from gateway.intake.child import Answer, address_space_bytes, limit_memory, serve

#: Address space that tokenizing may take, in bytes, beyond what the process has when it is ready.
_MAX_MORE_BYTES = 2 * 2**30


def read_tokenizer(path: str) -> tokenizers.Tokenizer:
    """The tokenizer of a file, which neither cuts nor pads texts. Raises what the library does."""
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def make_answer(start: Mapping[str, Any]) -> Answer:
    """See the module's text."""
    tokenizer = read_tokenizer(start["path"])
    limit_memory(address_space_bytes() + _MAX_MORE_BYTES)

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        adds = question["add_special_tokens"]
        ids = tokenizer.encode(question["text"], add_special_tokens=adds).ids
        is_kept = len(ids) <= question["max_tokens"]
        return {"num_tokens": len(ids), "text": array("I", ids).tobytes().hex() if is_kept else ""}

    return answer


if __name__ == "__main__":
    serve(make_answer)
