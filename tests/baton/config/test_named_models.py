"""Several models of one command: how they are written, and which options each has."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.config import GatewayOptions, ServeOptions
from baton.config.command import option_command, to_arguments
from baton.config.load import load_options
from baton.config.named_models import NamedModel, named_model
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chat=org/chat", NamedModel("chat", "org/chat", {})),
        ("org/chat", NamedModel("org/chat", "org/chat", {})),
        (
            "chat=org/chat:revision=v2:tool-call-parser=mistral",
            NamedModel("chat", "org/chat", {"revision": "v2", "tool_call_parser": "mistral"}),
        ),
        ("a=/runs/lr:0.1:revision=x", NamedModel("a", "/runs/lr:0.1", {"revision": "x"})),
        ("a=/runs/lr=0.1", NamedModel("a", "/runs/lr=0.1", {})),
        ("a=m:lora_modules=red=/r", NamedModel("a", "m", {"lora_modules": "red=/r"})),
    ],
)
def test_how_a_model_is_written(text: str, expected: NamedModel) -> None:
    assert named_model(text) == expected
    assert named_model(str(expected)) == expected


def test_each_has_what_is_said_of_all_and_its_own() -> None:
    options = ServeOptions(
        model="a",
        revision="v1",
        dtype="float32",
        num_decode_workers=2,
        speculative_method="draft",
        speculative_model="d",
        tool_call_parser="hermes",
        more_models=("b=org/b:revision=v2:num_decode_workers=3:reasoning_parser=qwen3", "org/c"),
        served_model_aliases=("first", "second=b"),
    )
    first, second, third = options.each_model()
    assert [each.model_name for each in (first, second, third)] == ["a", "b", "org/c"]
    assert [each.model for each in (first, second, third)] == ["a", "org/b", "org/c"]
    assert [each.revision for each in (first, second, third)] == ["v1", "v2", None]
    assert [each.num_decode_workers for each in (first, second, third)] == [2, 3, 2]
    assert {each.dtype for each in (first, second, third)} == {"float32"}
    assert {each.tool_call_parser for each in (first, second, third)} == {"hermes"}
    assert [each.reasoning_parser for each in (first, second, third)] == ["auto", "qwen3", "auto"]
    # A draft model is of one model's vocabulary.
    assert [each.speculative_model for each in (first, second, third)] == ["d", None, None]
    assert [options.aliases_of(each.model_name) for each in (first, second, third)] == [
        ("first",),
        ("second",),
        (),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"more_models": ["b="]}, "'b=' is no model with a name"),
        ({"more_models": ["b=m:revision="]}, "is no model with a name"),
        ({"more_models": ["b=m:revision=x:revision=y"]}, "give each option once"),
        ({"more_models": ["b=m:port=5"]}, "'port': no option of one model alone"),
        ({"more_models": ["b=m:num_decode_workers=0"]}, "b=m:num_decode_workers=0: num_decode"),
        ({"more_models": ["b=m:tool_call_parser=x"]}, "tool_call_parser: "),
        ({"more_models": ["m"]}, "'m' is the name of two models"),
        ({"more_models": ["b=x,b=y"]}, "'b' is the name of two models"),
        ({"more_models": ["b=x"], "served_model_aliases": "b"}, "'b' is the name of two models"),
        ({"served_model_aliases": "c=nonesuch"}, "'nonesuch' is no model of this command"),
    ],
)
def test_mistakes(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_options(ServeOptions, {"model": "m", **flags})
    assert message in caught.value.message


@pytest.mark.parametrize("cls", [ServeOptions, GatewayOptions])
def test_models_on_the_command_line(
    cls: type[ServeOptions | GatewayOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    seen: list[ServeOptions | GatewayOptions] = []
    app = typer.Typer()
    app.command()(option_command(cls, seen.append, "help"))
    further = ["b=org/b:revision=v2", "org/c"]

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments))
        return "" if done.exit_code == 0 else str(done.exception)

    assert run("code=org/a", *further, "--more-models=d=org/d") == ""
    assert run("a=org/a") == run("lr=0.1") == ""
    several, one, folder = seen
    assert (several.model, several.served_model_name) == ("org/a", "code")
    assert several.more_models == ("b=org/b:revision=v2", "org/c=org/c", "d=org/d")
    assert (one.model, one.served_model_name, one.more_models) == ("org/a", "a", ())
    # An existing folder is a path, not NAME=PATH, whatever characters it has.
    assert (folder.model, folder.served_model_name) == ("lr=0.1", None)
    assert run(*to_arguments(several)) == ""
    assert seen[-1] == several
    assert "options of the first MODEL" in run("a=org/a:revision=v1", "b")
