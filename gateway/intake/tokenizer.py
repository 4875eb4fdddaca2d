"""The model's tokenizer, and facts of its files: end tokens, special tokens, chat template. Imports
no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import (
    BatonError,
    ConfigError,
    FieldViolation,
    InvalidRequest,
    ModelError,
    Overloaded,
)
from baton.gguf.folder import gguf_folder
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

#: Maximum long texts waiting to be tokenized.
MAX_WAITING = 64

#: Characters above which a text is tokenized in a process, to keep the event loop free.
_LONG_TEXT_CHARS = 8_192

#: Number of tokens above which they are decoded in a thread.
_LONG_TEXT_TOKENS = 4_096

#: Total characters of many short texts above which they are encoded in a thread.
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
    """Facts from a model's files. max_model_len: of config.json; None if absent.

    folder: location of the files. generation_config: content of that file; empty if absent.
    tokenizer_class: transformers' class, as tokenizer_config.json names it.
    """

    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    max_model_len: int | None
    folder: Path
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_class: str = "PreTrainedTokenizerFast"


class TooManyTokens(Exception):
    """A text has more tokens than allowed. num_tokens: their number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """Converts text to token ids and back. Belongs to one event loop.

    The library holds the interpreter lock while it processes one text. Long texts are therefore
    encoded in another process, one at a time, which is killed on timeout, and long outputs are
    decoded in a thread as a batch, for which the library releases the lock.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        facts: TokenizerFacts,
        *,
        encode_timeout_s: float = ENCODE_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """tokenizer: read by read_tokenizer from the file in facts.folder."""
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self.decodings: Mapping[bool, Decoding] = {
            is_skipping: decoding_of(tokenizer, skip_special_tokens=is_skipping)
            for is_skipping in (False, True)
        }
        """Decoding of streams, by whether special tokens are skipped."""
        self._encode_timeout_s = encode_timeout_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self.facts = facts
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        """Bound of any token's text, in characters."""
        start_line = {"path": str(facts.folder / "tokenizer.json")}
        self.process = ChildProcess(
            ChildSpec("tokenizer", "gateway.intake.text_tokenizer", start_line, encode_timeout_s)
        )
        """Started with the first long text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids with text. A model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def close(self) -> None:
        """End the process."""
        await self.process.close()

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int
    ) -> tuple[int, ...]:
        """Tokenize `text`, optionally with the special tokens of the post-processor.

        Raises TooManyTokens if there are more than `max_tokens`, InvalidRequest if tokenizing takes
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
        """Token ids of each word at the beginning of a text, and after a space if they do not end
        with the former. Empty for a word without tokens."""
        if sum(map(len, words)) < _LONG_WORDS_CHARS:
            return self._encode_word_variants(words)
        return await asyncio.to_thread(self._encode_word_variants, words)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids; unknown ids give no text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_all(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As `decode`, for any number of ids."""
        if len(token_ids) < _LONG_TEXT_TOKENS:
            return self.decode(token_ids, skip_special_tokens)
        texts = await asyncio.to_thread(
            self._tokenizer.decode_batch, [token_ids], skip_special_tokens=skip_special_tokens
        )
        return texts[0]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token, possibly an incomplete character; empty for unknown ids."""
        return self._bytes[token_id]

    def name_of(self, token_id: int) -> str:
        """The vocabulary's spelling of a token; empty for unknown ids."""
        return self._tokenizer.id_to_token(token_id) or ""

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


def load_tokenizer(
    name: str, revision: str | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Load the tokenizer of a directory, GGUF file or Hub id. chat_template: file that replaces its
    own. Blocks. Raises ConfigError if there is none."""
    folder = _folder_of(name, revision)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError.of(
            "tokenizer", name, "has no tokenizer.json; name a directory or Hub id that has one"
        )
    try:
        tokenizer = read_tokenizer(str(path))
    except BaseException as error:
        # The library panics on some files; its exception class is created then, and does not derive
        # from Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError.of(
            "tokenizer", name, f"tokenizer.json cannot be read: {error}"
        ) from error
    facts = _facts_of(folder, tokenizer)
    if chat_template is not None:
        facts = replace(facts, chat_template=_read_template(chat_template))
    return Tokenizer(tokenizer, facts)


def _read_template(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError.of(
            "chat_template", name, f"cannot be read ({error}); name a file of Jinja in UTF-8"
        ) from error


def _folder_of(name: str, revision: str | None) -> Path:
    try:
        if unfolded := gguf_folder(name, revision):
            return unfolded
    except ModelError as error:
        raise ConfigError.of("tokenizer", name, error.message) from error
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
    tokenizer_class = tokenizer_config.get("tokenizer_class")
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
        **({"tokenizer_class": tokenizer_class} if isinstance(tokenizer_class, str) else {}),
    )


def _eos_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], eos_token_id: int | None
) -> frozenset[int]:
    """End tokens of the first file that names any, as in transformers' generate."""
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
    """The default template, from its own file or a config: a single one, or the one named
    "default"."""
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
    """The JSON object in a file; empty if the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(
            "model", path, f"is not JSON ({error}); mend or fetch it anew"
        ) from error
    return value if isinstance(value, dict) else {}
