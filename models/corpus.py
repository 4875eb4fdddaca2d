"""The training text: the source of the running interpreter's standard library.

Files are read in a fixed order and split by a hash of their relative path, so the same interpreter
always gives the same corpus and the same held-out files.
"""

import ast
import io
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.tokenizer import END_OF_TEXT, IM_END, IM_START

SKIPPED_DIRS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "lib2to3"}
SKIPPED_STEMS = ("_sysconfigdata", "config-")
VALIDATION_PERCENT = 2.0
MAX_CHAT_ANSWER_CHARS = 1000
SPLIT_SPACE_RATE = 0.02
SPACE = "Ġ"  # a space in byte-level BPE


@dataclass(frozen=True)
class Corpus:
    """Documents as text; `train` and `validation` share no file."""

    train: list[str]
    validation: list[str]


def is_source(path: Path) -> bool:
    """`path` is relative to the library root."""
    skipped_dir = any(part in SKIPPED_DIRS for part in path.parts[:-1])
    return not skipped_dir and not path.name.startswith(SKIPPED_STEMS)


def is_held_out(path: Path) -> bool:
    """Whether a hash of `path`, relative to the library root, is among the lowest."""
    digest = blake2b(path.as_posix().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32 < VALIDATION_PERCENT / 100


def read_corpus() -> Corpus:
    """Read the standard library of this interpreter."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    kept = [p for p in paths if is_source(p)]
    text = {p: (root / p).read_text(encoding="utf-8") for p in kept}
    return Corpus(
        train=[text[p] for p in kept if text[p].strip() and not is_held_out(p)],
        validation=[text[p] for p in kept if text[p].strip() and is_held_out(p)],
    )


def chat_examples(source: str) -> Iterator[str]:
    """Yield one exchange per documented function: the docstring's first line asks, the source
    answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    lines = io.StringIO(source).readlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        asked = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        answer = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if asked and len(answer) <= MAX_CHAT_ANSWER_CHARS:
            yield (
                f"{IM_START}user\nWrite the Python function `{node.name}`. {asked}{IM_END}\n"
                f"{IM_START}assistant\n{answer}{IM_END}\n"
            )


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[torch.Tensor]:
    """Token ids of each document with END_OF_TEXT at both ends, int64 [tokens]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [torch.tensor([end, *e.ids, end]) for e in tokenizer.encode_batch(documents)]


def split_leading_spaces(
    tokenizer: Tokenizer, ids: torch.Tensor, rate: float, generator: torch.Generator
) -> torch.Tensor:
    """Replace a share `rate` of the tokens " word" by " " + "word" (ids: [tokens]).

    The text does not change. The model thus learns prompts that end with a space.
    """
    vocab = tokenizer.get_vocab()
    tail = torch.full([tokenizer.get_vocab_size()], -1)
    for token, index in vocab.items():
        tail[index] = vocab.get(token[1:], -1) if token.startswith(SPACE) else -1
    chosen = (tail[ids] >= 0) & (torch.rand(ids.shape, generator=generator) < rate)
    split = torch.stack([torch.where(chosen, vocab[SPACE], ids), tail[ids]], dim=1)
    return split[torch.stack([torch.ones_like(chosen), chosen], dim=1)]


def training_stream(tokenizer: Tokenizer, documents: list[str], seed: int) -> torch.Tensor:
    """All documents and their chat examples, shuffled, as one stream of ids, int64 [tokens]."""
    generator = torch.Generator().manual_seed(seed)
    chats = [example for source in documents for example in chat_examples(source)]
    encoded = encode_documents(tokenizer, documents + chats)
    order = torch.randperm(len(encoded), generator=generator).tolist()
    ids = torch.cat([encoded[i][1:] for i in order])
    return split_leading_spaces(tokenizer, ids, SPLIT_SPACE_RATE, generator)
