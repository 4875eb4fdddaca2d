"""Several models in one command: syntax and per-model options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from baton.config.fields import Names, split_commas
from baton.config.options import ModelOptions

#: Separates a model from its own options.
_OPTION = re.compile(r":(?=[a-z][a-z0-9_-]*=)")

_FORM = "NAME=MODEL, with options of its own as :OPTION=VALUE behind it"

#: Options of MODEL that other models do not inherit.
_OF_ONE = frozenset(
    {
        *("model", "revision", "served_model_name", "tokenizer", "lora_modules"),
        *("rope_scaling", "hf_overrides"),
        *("more_models", "served_model_aliases"),
    }
)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One of several models. name: used by requests. model: a directory or Hub id. options: its
    own, by name, as text."""

    name: str
    model: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        options = (f":{name}={value}" for name, value in self.options.items())
        return f"{self.name}={self.model}{''.join(options)}"

    def with_options(self, is_kept: Callable[[str], bool]) -> NamedModel:
        """The options with those of this model alone."""
        kept = {name: value for name, value in self.options.items() if is_kept(name)}
        return NamedModel(self.name, self.model, kept)


def named_model(text: str) -> NamedModel:
    """Parse [NAME=]MODEL[:OPTION=VALUE]...; the name defaults to the model. Raises ValueError."""
    head, *parts = _OPTION.split(text)
    name, is_named, model = head.partition("=")
    if not is_named:
        model = name
    options = {
        option.replace("-", "_"): value
        for option, _, value in (part.partition("=") for part in parts)
    }
    if not (name.strip() and model.strip() and all(options.values())):
        raise ValueError(f"{text!r} is no model with a name; give {_FORM}")
    if len(options) < len(parts):
        raise ValueError(f"{text!r}: give each option once")
    return NamedModel(name, model, options)


def _normalized(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(named_model(text)) for text in texts)


#: Repeated option or comma-separated.
NamedModels = Annotated[
    tuple[str, ...],
    BeforeValidator(split_commas),
    AfterValidator(_normalized),
    Field(json_schema_extra={"metavar": "NAME=MODEL[:OPTION=VALUE]..."}),
]


class SeveralModelsOptions(ModelOptions):
    """Models in addition to MODEL."""

    own_options: ClassVar[frozenset[str]] = frozenset({"revision"})
    """Options that each model may set for itself."""

    more_models: NamedModels = ()
    """Further models, as additional MODEL arguments, each with workers of its own: a name for
    requests, and a directory or Hub id. Repeat the option or separate with commas. With several
    models, requests must name one. All options apply to all models, except those of MODEL itself:
    --revision, --tokenizer, --lora-modules, --rope-scaling, --hf-overrides, --speculative-model and
    names. A model's own options
    follow it, as in chat=org/chat:revision=v2:tool_call_parser=mistral."""
    served_model_aliases: Names = ()
    """Further names of MODEL in requests, or ALIAS=NAME for one of --more-models; repeat the option
    or separate with commas."""

    def each_model(self) -> tuple[Self, ...]:
        """The options of each model, this one first."""
        first = self.model_copy(update={"more_models": ()})
        return (first, *(self._further(named_model(text)) for text in self.more_models))

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """Further names of the model `name`."""
        pairs = (alias.partition("=")[::2] for alias in self.served_model_aliases)
        return tuple(alias for alias, of in pairs if (of or self.model_name) == name)

    def _further(self, named: NamedModel) -> Self:
        inherited = {
            name: getattr(self, name) for name in self.model_fields_set if name not in _OF_ONE
        }
        if inherited.pop("speculative_model", None) is not None:
            inherited.pop("speculative_method", None)
        own = {"model": named.model, "served_model_name": named.name, **named.options}
        return type(self)(**{**inherited, **own})

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        further = [named_model(text) for text in self.more_models]
        for each in further:
            unknown = sorted(each.options.keys() - self.own_options)
            if unknown:
                fix = (
                    f"no option of one model alone; there are {', '.join(sorted(self.own_options))}"
                )
                raise ValueError(f"--more-models={each}: {unknown[0]!r}: {fix}")
            try:
                self._further(each)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                where = ".".join(map(str, fault["loc"][:1]))
                raise ValueError(f"--more-models={each}: {where}: {fault['msg']}") from None
        aliases = [alias.partition("=")[::2] for alias in self.served_model_aliases]
        names = [self.model_name, *(each.name for each in further)]
        for alias, name in aliases:
            if name and name not in names:
                raise ValueError(
                    f"--served-model-aliases={alias}={name}: {name!r} is no model of this command; "
                    "give the name of one of --more-models"
                )
        names += (alias for alias, _ in aliases)
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        if twice:
            raise ValueError(
                f"--more-models: {twice[0]!r} is the name of two models; give each its own name"
            )
        return self
