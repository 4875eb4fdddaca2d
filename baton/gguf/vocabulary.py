"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as split

from baton.errors import ModelError, UnsupportedModel
from baton.gguf.reader import GgufFile

#: Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level BPE splits texts into words. pattern: of words; empty for GPT-2's.
    has_lone_digits: each digit is a word. ignores_merges: whole words are looked up first."""

    pattern: str = ""
    has_lone_digits: bool = False
    ignores_merges: bool = False
    is_normalised: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> split.PreTokenizer:
        if self.pattern:
            words = split.Split(Regex(self.pattern), "isolated", invert=False)
            return split.Sequence([words, split.ByteLevel(add_prefix_space=False, use_regex=False)])
        whole = split.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.has_lone_digits:
            return split.Sequence([split.Digits(individual_digits=True), whole])
        return whole


_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
#: By tokenizer.ggml.pre.
_SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo"), _Splitting()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Splitting(has_lone_digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "smaug-bpe"),
        _Splitting(_LLAMA3, ignores_merges=True, adds_bos=True),
    ),
    "dbrx": _Splitting(_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Splitting(_QWEN2, is_normalised=True)),
    "tekken": _Splitting(_CASED % ("", "", r"\p{N}"), ignores_merges=True, adds_bos=True),
    "gpt-4o": _Splitting(_CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?", r"\p{N}{1,3}")),
}


def make_tokenizer(file: GgufFile) -> Tokenizer | None:
    """None if the file has no vocabulary. Raises UnsupportedModel."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model={kind!r}: gpt2 (BPE) and llama (SentencePiece) are "
            "read; use the model's safetensors"
        )
    tokenizer = _byte_level(file) if kind == "gpt2" else _sentence_piece(metadata)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
    for token, kind in zip(tokens, types or (), strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    ends = [(name, _token_of(metadata, name)) for name in ("bos", "eos")]
    before, after = (token if _adds(metadata, name) else None for name, token in ends)
    if before or after:
        single = [*filter(None, [before]), "$A", *filter(None, [after])]
        named = [(token, tokens.index(token)) for token in {before, after} if token]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=named
        )
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Named special tokens."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {f"{ours}_token": _token_of(file.metadata, name) for name, ours in names.items()}
    return {name: token for name, token in found.items() if token is not None}


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of tokens that end an answer: of texts, turns and messages."""
    found = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _token_of(metadata: Mapping[str, Any], name: str) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and number < len(tokens) else None


def _adds(metadata: Mapping[str, Any], name: str) -> bool:
    """Whether the token goes around texts, by default as llama.cpp has it."""
    is_piece = metadata.get("tokenizer.ggml.model") == "llama"
    splitting = _SPLITTINGS.get(metadata.get("tokenizer.ggml.pre", "default"), _Splitting())
    default = name == "bos" and (is_piece or splitting.adds_bos)
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))


def _byte_level(file: GgufFile) -> Tokenizer:
    metadata = file.metadata
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITTINGS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre={name!r}: {', '.join(_SPLITTINGS)} are known; use "
            "the model's safetensors"
        )
    splitting = _SPLITTINGS[name]
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pairs = (merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges", ()))
    merges = [(left, right) for left, _, right in pairs]
    for left, right in merges:
        if not {left, right, left + right} <= vocab.keys():
            raise ModelError(
                f"{file.path}: tokenizer.ggml.merges has {left!r} {right!r}, which are no tokens; "
                "fetch it again"
            )
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignores_merges))
    if splitting.is_normalised:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    """A SentencePiece BPE: it merges two pieces if their union is a piece, that of the highest
    score first. Bytes without a piece are <0x..>."""
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    ranked = []
    for token, index in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], (left, right)))
    merges = [pair for *_, pair in sorted(ranked)]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    unknown = tokens[kinds.index(_UNKNOWN)] if _UNKNOWN in kinds else None
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer
