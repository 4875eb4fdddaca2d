"""Training text: documents from a file, as one stream of token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.errors import ConfigError


def read_documents(path: Path) -> list[str]:
    """Read the file as one document, or one document per line if it is JSON lines. Raises
    ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("data", path, f"give a readable file of text ({error})") from None
    if path.suffix != ".jsonl":
        return [text]
    return [_text_of(path, number, line) for number, line in enumerate(text.splitlines(), 1)]


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError.of("data", path, f"line {number} is no JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise ConfigError.of("data", path, f'line {number} has no field "text" that is a text')
    return str(found["text"])


def token_stream(tokenizer: Tokenizer, documents: Sequence[str], end_id: int | None) -> Tensor:
    """Tokenise and concatenate the documents, each followed by `end_id` if given: int64
    [tokens]."""
    ends = [] if end_id is None else [end_id]
    encoded = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    ids = [token for document in encoded for token in (*document.ids, *ends)]
    return torch.tensor(ids, dtype=torch.int64)
