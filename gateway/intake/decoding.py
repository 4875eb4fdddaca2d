"""Conversion of token ids to text, such that streamed text equals text decoded at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

import tokenizers

#: Decodes token ids; special tokens and unknown ids give no text.
Decode = Callable[[Sequence[int]], str]

#: Kinds of ids for a decoder with byte fallback. Ids beyond Decoding.kinds are SILENT.
TEXT, BYTE, SILENT = range(3)

#: Byte tokens of byte-fallback decoders.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

#: Number of single ids with cached text (LRU).
_NUM_KEPT = 65_536

#: SentencePiece's space.
_SPACE = "\u2581"


class Decoding:
    """text_of: decodes any ids. text_of_one: decodes a tuple of one id, cached.

    kinds: TEXT, BYTE or SILENT by id, for decoders with byte fallback. Such a decoder decodes a run
    of BYTE tokens, SILENT ones included, as a whole, and gives U+FFFD for every byte if any is not
    part of a character. Empty for other decoders, for which text before a complete character is
    final.

    lead: ids to prepend so that the text keeps its leading space; empty if the decoder does not
    strip it.
    """

    def __init__(self, text_of: Decode, kinds: bytes = b"", lead: tuple[int, ...] = ()) -> None:
        self.text_of = text_of
        self.kinds = kinds
        self.lead = lead
        self.text_of_one: Callable[[tuple[int]], str] = lru_cache(_NUM_KEPT)(text_of)


def decoding_of(tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> Decoding:
    """The decoding of a tokenizer, with or without special tokens."""
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    kinds = b""
    if '"ByteFallback"' in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        added = tokenizer.get_added_tokens_decoder().values()
        left_out = {token.content for token in added if token.special and skip_special_tokens}
        num_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
        kinds = bytes(_kind_of(tokenizer.id_to_token(i), left_out) for i in range(num_ids))
    return Decoding(decode, kinds, _lead(tokenizer))


def _kind_of(token: str | None, left_out: Collection[str]) -> int:
    if token is None or token in left_out:
        return SILENT
    return BYTE if _BYTE_TOKEN.fullmatch(token) else TEXT


def _lead(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    vocab = tokenizer.get_vocab().items()
    word = next((i for text, i in vocab if text[:1] == _SPACE and text.strip(_SPACE)), None)
    if word is None or tokenizer.decode([word, word]) == 2 * tokenizer.decode([word]):
        return ()
    return (word,)
