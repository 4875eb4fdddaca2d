"""Every sampling option, once. SamplingParams is the table: callers of the SDK write it, and the
command line's flags, the message, the validator and the oracle engine follow from its fields.

To add an option: a field here, in SamplingParams and in SamplingOptions; its numbers on the wire in
protos/baton/v1/sampling.proto; if the tiers are to know it, a field of the same name in
baton.types.Sampling; what it does, in engine/sampling/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack


@dataclass(frozen=True, slots=True)
class Range:
    """low <= value <= high, without low itself if `is_open`."""

    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        is_above = value > self.low if self.is_open else value >= self.low
        return is_above and value <= self.high  # both false for NaN

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.is_open else f"{self.low:g} or more"
        return f"{low}, and at most {self.high:g}"


@dataclass(frozen=True, slots=True)
class Texts:
    """At most `max_num` texts, each of 1..max_chars characters. unit: what they are called."""

    max_num: int
    max_chars: int
    unit: str

    def __str__(self) -> str:
        return f"at most {self.max_num} {self.unit}, each of 1 to {self.max_chars} characters"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """At most `max_num` ids of the vocabulary."""

    max_num: int

    def __str__(self) -> str:
        return f"at most {self.max_num} ids"


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """At most `max_num` ids of the vocabulary, each with a number within `bias`."""

    max_num: int
    bias: Range

    def __str__(self) -> str:
        return f"at most {self.max_num} entries; each bias {self.bias}"


Limits = Range | Texts | TokenIds | TokenBiases


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """A sampling option.

    help: help text. limits: bounds of each value, for all models and other options; None if there
    are none, or if gateway/intake/rules has a rule for it. default: value that the tiers get if it
    is not set; None for the default of Sampling, or if it depends on the request, as `unset` says.
    with_beams: whether it applies to a beam search. changes_draw: a number that the chosen token
    depends on, besides logits, seed and history.
    """

    name: str
    help: str
    limits: Limits | None = None
    default: float | bool | None = None
    unset: str = ""
    with_beams: bool = True
    changes_draw: bool = False

    def describe(self, default: object = None) -> str:
        """Help, limits, and what comes if it is not set: "Divides the logits. [0 or more, and at
        most 100; default: 1]". default: a caller's own."""
        default = self.default if default is None else default
        match default:
            case None:
                shown = self.unset
            case bool():
                shown = "yes" if default else "no"
            case float():
                shown = f"{default:g}"
            case _:
                shown = str(default)
        notes = [str(self.limits)] if self.limits else []
        notes += [f"default: {shown}"] if shown else []
        return f"{self.help} [{'; '.join(notes)}]" if notes else self.help


def _option(help: str, limits: Limits | None = None, **known: Any) -> Any:
    """A field of SamplingParams; None is not set. known: see SamplingOption."""
    return field(default=None, metadata={"help": help, "limits": limits, **known})


#: Choices of one request, beams of one search, and alternatives of one position unless a gateway
#: has another --max-logprobs; ALL_LOGPROBS asks for the whole vocabulary.
MAX_CHOICES, MAX_BEAM_WIDTH, MAX_LOGPROBS = 128, 64, 20
ALL_LOGPROBS = 2**32 - 1
#: Entries of logit_bias.
MAX_BIASES = 1024
LENGTH_PENALTY = Range(-10, 10)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Searches for the most probable outputs instead of sampling, with transformers' names and
    meanings.

    width: beams kept at each step, 1..64. length_penalty: -10..10; above 0 favours long outputs.
    early_stopping: with as many finished outputs as beams, end when none is likely to be beaten
    (False), at once (True), or when none can be ("never").
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the output's text: exactly one of these. The server checks it, and names what
    is wrong with it."""

    json_schema: Mapping[str, Any] | str | None = None
    """A JSON document that this JSON Schema describes, its properties in the schema's order. A str
    is JSON, too."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A text that this regular expression, in Rust's syntax, matches as a whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text that the rule `start` of this grammar, in Lark's syntax, derives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop, with vLLM's names. None takes the server's default.

    Limits are checked by the server, which names every value that does not keep to them.
    """

    n: int | None = _option("Number of choices to return.", Range(1, MAX_CHOICES), default=1)
    temperature: float | None = _option(
        "Divides the logits; 0 is greedy.",
        Range(0, 100),
        default=1.0,
        with_beams=False,
        changes_draw=True,
    )
    top_k: int | None = _option(
        "Keep the k most probable tokens; 0 keeps all.",
        default=0,
        with_beams=False,
        changes_draw=True,
    )
    top_p: float | None = _option(
        "Keep the smallest set of most probable tokens with this total probability.",
        Range(0, 1, is_open=True),
        default=1.0,
        with_beams=False,
        changes_draw=True,
    )
    min_p: float | None = _option(
        "Drop tokens less probable than this share of the most probable one.",
        Range(0, 1),
        default=0.0,
        with_beams=False,
        changes_draw=True,
    )
    repetition_penalty: float | None = _option(
        "Divides positive, and multiplies negative, logits of tokens in the prompt or the output; "
        "1 is neutral.",
        Range(0, 100, is_open=True),
        default=1.0,
        with_beams=False,
        changes_draw=True,
    )
    presence_penalty: float | None = _option(
        "Subtracted once from the logit of each token in the output; 0 is neutral.",
        Range(-2, 2),
        default=0.0,
        with_beams=False,
        changes_draw=True,
    )
    frequency_penalty: float | None = _option(
        "Subtracted from a token's logit for each time that it is in the output; 0 is neutral.",
        Range(-2, 2),
        default=0.0,
        with_beams=False,
        changes_draw=True,
    )
    logit_bias: Mapping[int, float] | None = _option(
        "Added to the logits of these token ids.",
        TokenBiases(MAX_BIASES, Range(-100, 100)),
        with_beams=False,
    )
    min_tokens: int | None = _option(
        "Minimum tokens before a stop token may end the output.", default=0
    )
    max_tokens: int | None = _option(
        "Maximum tokens to produce, at least 1.", unset="what the model's context leaves"
    )
    stop: str | Sequence[str] | None = _option(
        "Texts that end the output.", Texts(16, 1024, "strings"), with_beams=False
    )
    stop_token_ids: Sequence[int] | None = _option("Tokens that end the output.", TokenIds(64))
    ignore_eos: bool | None = _option(
        "Continue after the model's end-of-sequence tokens.", default=False
    )
    seed: int | None = _option(
        "Same seed, same request, same tokens. 0 to 2**64 - 1.",
        unset="drawn by the server",
        with_beams=False,
    )
    logprobs: int | None = _option(
        "Alternatives with log probabilities per position.",
        Range(0, MAX_LOGPROBS),
        unset="none are reported",
        with_beams=False,
    )
    include_stop_str_in_output: bool | None = _option(
        "Keep the stop text in the output.", default=False, with_beams=False
    )
    skip_special_tokens: bool | None = _option(
        "Leave special tokens out of the text.", default=True
    )
    best_of: int | None = _option(
        f"Choices to produce; the n most probable per token are returned. n to {MAX_CHOICES}.",
        unset="n",
        with_beams=False,
    )
    prompt_logprobs: int | None = _option(
        "Alternatives with log probabilities per position of the prompt.",
        Range(0, MAX_LOGPROBS),
        unset="none are reported",
        with_beams=False,
    )
    echo: bool | None = _option("Begin the text with the prompt's.", default=False)
    bad_words: Sequence[str] | None = _option(
        "Words that must not appear in the output, matched by their tokens.",
        Texts(128, 256, "words"),
        with_beams=False,
    )
    beam_search: BeamSearch | None = _option(  # noqa: RUF009, it gives a field
        "Search for the most probable outputs; n is at most its width then."
    )
    structured_output: StructuredOutput | None = _option(  # noqa: RUF009
        "Form of the output, which ends when it is complete, or at max_tokens."
    )
    allowed_token_ids: Sequence[int] | None = _option(
        "Tokens that the output may consist of, end tokens among them.", TokenIds(1024)
    )
    logprob_token_ids: Sequence[int] | None = _option(
        "Tokens reported at each position instead of the most probable ones; need logprobs.",
        TokenIds(128),
    )

    @property
    def given(self) -> Mapping[str, Any]:
        """The options that are set, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """A copy with these fields changed."""
        return replace(self, **options)


class SamplingOptions(TypedDict, total=False):
    """SamplingParams as keyword arguments: the same names and types, for type checkers."""

    n: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None
    logprobs: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    best_of: int | None
    prompt_logprobs: int | None
    echo: bool | None
    bad_words: Sequence[str] | None
    beam_search: BeamSearch | None
    structured_output: StructuredOutput | None
    allowed_token_ids: Sequence[int] | None
    logprob_token_ids: Sequence[int] | None


#: All options, by name.
OPTIONS: Mapping[str, SamplingOption] = MappingProxyType(
    {each.name: SamplingOption(each.name, **each.metadata) for each in fields(SamplingParams)}
)


def describe_values(values: Mapping[str, float]) -> str:
    """Numbers of options as people read them: "temperature 0.7, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
