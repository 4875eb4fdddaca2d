"""The model's own tokenizer, and what its files say: end tokens, special tokens, chat template.
Imports no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import BatonError, ConfigError, FieldViolation, InvalidRequest, Overloaded
from gateway.intake.child import ChildDied, ChildProcess, ChildSpec
from gateway.intake.decoding import Decoding, decoding_of
from gateway.intake.text_tokenizer import read_tokenizer
from gateway.intake.token_bytes import TokenBytes
from gateway.long_work import as_tuple, let_others_run

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)

ENCODE_TIMEOUT_S = 10.0

#: Long texts that may wait to be tokenized.
MAX_WAITING = 64

#: Characters of text from which on tokenizing would hold up the event loop, and goes to a process.
_LONG_TEXT_CHARS = 8_192

#: Tokens from which on their text is made in a thread.
_LONG_TEXT_TOKENS = 4_096

#: Characters of many short texts, each of which costs more by itself, for a thread.
_LONG_WORDS_CHARS = 1_024

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What the files say besides the tokenizer. max_model_len: of config.json; None if it does not
    say.

    folder: where they are. generation_config: as it is in its file; empty if there is none.
    """

    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    max_model_len: int | None
    folder: Path
    generation_config: Mapping[str, Any] = field(default_factory=dict)


class TooManyTokens(Exception):
    """A text has more tokens than its caller takes. num_tokens: as many."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """Text to token ids and back. Belongs to one event loop.

    No text holds up the loop: the library keeps the interpreter to itself while it encodes or
    decodes one text, so that long ones are encoded by another process, one at a time, which is
    killed when it takes too long; and decoded in a thread, as a batch, for which the library lets
    go of the interpreter.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        facts: TokenizerFacts,
        *,
        encode_timeout_s: float = ENCODE_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """tokenizer: as read_tokenizer makes it of the file in facts.folder."""
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self.decodings: Mapping[bool, Decoding] = {
            is_skipping: decoding_of(tokenizer, skip_special_tokens=is_skipping)
            for is_skipping in (False, True)
        }
        """How a stream of token ids becomes text: with special tokens, and without them."""
        self._encode_timeout_s = encode_timeout_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self.facts = facts
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        """No token is of more characters of text."""
        start_line = {"path": str(facts.folder / "tokenizer.json")}
        self.process = ChildProcess(
            ChildSpec("tokenizer", "gateway.intake.text_tokenizer", start_line, encode_timeout_s)
        )
        """Started with the first long text."""

    @property
    def vocab_size(self) -> int:
        """Ids that have text. A model's vocabulary may be padded to more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def close(self) -> None:
        """End the process."""
        await self.process.close()

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int
    ) -> tuple[int, ...]:
        """Token ids of `text`; with the special tokens that the tokenizer's post-processor adds, if
        wanted.

        Raises TooManyTokens if they are more than `max_tokens`, InvalidRequest if tokenizing takes
        too much time or memory, and Overloaded while too many other long texts wait.
        """
        if len(text) < _LONG_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            ids = tuple(encoding.ids)
            if len(ids) > max_tokens:
                raise TooManyTokens(len(ids))
            return ids
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._num_waiting} long prompts wait to be tokenized")
        self._num_waiting += 1
        try:
            await let_others_run(len(text))
            return await self._encode_elsewhere(text, add_special_tokens, max_tokens)
        finally:
            self._num_waiting -= 1

    async def encode_word_variants(
        self, words: Sequence[str]
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Of each word, its token ids as a text begins with it, and those of the word after a space
        if they do not end with the former. Empty ids where no token comes of a word."""
        if sum(map(len, words)) < _LONG_WORDS_CHARS:
            return self._encode_word_variants(words)
        return await asyncio.to_thread(self._encode_word_variants, words)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids; ids that the tokenizer does not know have none."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_all(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As decode, for any number of ids."""
        if len(token_ids) < _LONG_TEXT_TOKENS:
            return self.decode(token_ids, skip_special_tokens)
        texts = await asyncio.to_thread(
            self._tokenizer.decode_batch, [token_ids], skip_special_tokens=skip_special_tokens
        )
        return texts[0]

    def bytes_of(self, token_id: int) -> bytes:
        """What a token alone stands for: a part of a character, perhaps; empty for ids that the
        tokenizer does not know."""
        return self._bytes[token_id]

    def _encode_word_variants(
        self, words: Sequence[str]
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        bare = [word.lstrip() or word for word in words]
        texts = [*bare, *(f" {word}" for word in bare)]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [tuple(encoding.ids) for encoding in encodings]
        return tuple(
            (alone,)
            if after_space[len(after_space) - len(alone) :] == alone
            else (alone, after_space)
            for alone, after_space in zip(ids[: len(words)], ids[len(words) :], strict=True)
        )

    async def _encode_elsewhere(
        self, text: str, add_special_tokens: bool, max_tokens: int
    ) -> tuple[int, ...]:
        question = {
            "text": text,
            "add_special_tokens": add_special_tokens,
            "max_tokens": max_tokens,
        }
        try:
            answer = await self.process.ask(question)
        except TimeoutError:
            raise _refusal(text, f"take more than {self._encode_timeout_s:g} s") from None
        except ChildDied as death:
            if not death.is_of_its_question:
                raise
            raise _refusal(text, "take too much memory") from None
        if answer["num_tokens"] > max_tokens:
            raise TooManyTokens(answer["num_tokens"])
        return await as_tuple(memoryview(bytes.fromhex(answer["text"])).cast("I"))


def _refusal(text: str, why: str) -> BatonError:
    return InvalidRequest.of(
        FieldViolation("prompt", f"{len(text)} characters {why} to tokenize; shorten them")
    )


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer in a directory or at a Hub id. Blocks. Raises ConfigError if there is none."""
    folder = _folder_of(name, revision)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError.of(
            "tokenizer", name, "has no tokenizer.json; name a directory or Hub id that has one"
        )
    try:
        tokenizer = read_tokenizer(str(path))
    except BaseException as error:
        # A panic of the library's, which some files bring about, is no Exception; and its class is
        # made when it happens.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError.of(
            "tokenizer", name, f"tokenizer.json cannot be read: {error}"
        ) from error
    return Tokenizer(tokenizer, _facts_of(folder, tokenizer))


def _folder_of(name: str, revision: str | None) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError.of("tokenizer", name, "no such folder; give one, or a Hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError.of(
            "tokenizer", name, f"is neither a directory nor a Hub id that can be had: {error}"
        ) from error


def _facts_of(folder: Path, tokenizer: tokenizers.Tokenizer) -> TokenizerFacts:
    config = _read_json(folder / "config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(
        {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    )
    generation_config = _read_json(folder / "generation_config.json")
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    max_model_len = text_config.get("max_position_embeddings")
    return TokenizerFacts(
        eos_token_ids=_eos_token_ids(
            generation_config,
            text_config,
            tokenizer.token_to_id(special_tokens.get("eos_token", "")),
        ),
        special_tokens=special_tokens,
        chat_template=_chat_template(folder, tokenizer_config),
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        folder=folder,
        generation_config=generation_config,
    )


def _eos_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], eos_token_id: int | None
) -> frozenset[int]:
    """Those of the first file that names any, as transformers' generate does."""
    for found in (generation_config.get("eos_token_id"), config.get("eos_token_id"), eos_token_id):
        if isinstance(found, int):
            return frozenset((found,))
        if isinstance(found, list) and found:
            return frozenset(each for each in found if isinstance(each, int))
    return frozenset()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; each is a string, or an object with its `content`."""
    named = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    return named


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own, or in a config; alone, or the one named "default" of
    several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template")
    found = found or tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict)]
        found = next((t.get("template") for t in named if t.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            "model", path, f"is not JSON ({error}); mend or fetch it anew"
        ) from error
    return value if isinstance(value, dict) else {}
