"""A process that tokenizes long texts, killed if one takes too long: python -m
gateway.intake.text_tokenizer

Start line: {"path": str}, a tokenizer.json. Question: {"text": str, "add_special_tokens": bool,
"max_tokens": int}. Answer: {"num_tokens": int, "text": str}, with the token ids as 32-bit integers
in hexadecimal, or empty if there are more than max_tokens; a JSON list would take the parent ten
times as long to parse. See gateway.intake.child_main. The process dies of a text that takes
more memory than tokenizing should.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import tokenizers

from gateway.intake.child_main import Answer, address_space_bytes, limit_memory, serve

#: Address space for tokenizing, in bytes, beyond that of the idle process.
_MAX_MORE_BYTES = 2 * 2**30


def read_tokenizer(path: str) -> tokenizers.Tokenizer:
    """Load a tokenizer, without truncation and padding. Raises the library's errors."""
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def make_answer(start: Mapping[str, Any]) -> Answer:
    """See the module's docstring."""
    tokenizer = read_tokenizer(start["path"])
    limit_memory(address_space_bytes() + _MAX_MORE_BYTES)

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        adds = question["add_special_tokens"]
        # Without the places of tokens in the text, which take longer than all else.
        (encoding,) = tokenizer.encode_batch_fast([question["text"]], add_special_tokens=adds)
        ids = encoding.ids
        is_kept = len(ids) <= question["max_tokens"]
        return {"num_tokens": len(ids), "text": array("I", ids).tobytes().hex() if is_kept else ""}

    return answer


if __name__ == "__main__":
    serve(make_answer)
