"""Bytes of each token. A token may be an incomplete character, which has no text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

#: Byte tokens of SentencePiece vocabularies.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

#: Maximum tokens searched for a mark.
_NUM_TAIL_TOKENS = 16


def text_of(raw: bytes) -> str:
    """Text of a single token; incomplete characters become U+FFFD."""
    return raw.decode("utf-8", "replace")


def ends_with(bytes_of: Callable[[int], bytes], token_ids: Sequence[int], mark: str) -> bool:
    """Whether a prompt ends with a mark, ignoring white space."""
    tail = b"".join(map(bytes_of, token_ids[-_NUM_TAIL_TOKENS:]))
    return tail.rstrip().endswith(mark.encode())


class TokenBytes:
    """Bytes by token id, from the tokenizer's decoder. Bytes of consecutive tokens join to the
    bytes of their text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added: Mapping[int, str] = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._read = _reader(tokenizer)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of an id; empty if the tokenizer lacks it."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._read(token)


def _reader(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Function from a token's spelling in the vocabulary to its bytes."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder else b"{}"
    config = json.loads(state)
    steps = config.get("decoders", [config])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _of_byte_level
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _of_pieces(steps)
    return lambda token: (
        tokenizer.decoder.decode([token]).encode() if tokenizer.decoder else (token.encode())
    )


def _of_byte_level(token: str) -> bytes:
    """One byte per character (GPT-2's bytes_to_unicode); others keep their own bytes."""
    return b"".join(bytes((_BYTES[char],)) if char in _BYTES else char.encode() for char in token)


def _of_pieces(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """SentencePiece: \u2581 for a space, <0x..> for bytes."""
    spaces = [step.get("replacement", "▁") for step in steps if step.get("type") == "Metaspace"]
    spaces += [
        step["pattern"]["String"]
        for step in steps
        if step.get("type") == "Replace" and "String" in step.get("pattern", {})
    ]
    space = spaces[0] if spaces else "▁"

    def read(token: str) -> bytes:
        byte = _BYTE.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else token.replace(space, " ").encode()

    return read


def _byte_chars() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, others to code points from 256, in
    order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_chars()
