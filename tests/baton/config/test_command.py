"""Command lines and options classes agree in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.main import app as baton
from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions, ServeOptions
from baton.config.command import ADVANCED, option_command, to_arguments
from baton.config.load import flag_of
from baton.errors import ConfigError

COMMANDS = (DecodeOptions, GatewayOptions, PrefillOptions, ServeOptions)


def parse(cls: type[Options], arguments: list[str]) -> Options:
    """What `cls`'s command makes of a command line."""
    got: list[Options] = []
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(option_command(cls, got.append, "Test."))
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return got[0]


@pytest.mark.parametrize("cls", COMMANDS)
def test_every_field_has_its_flag_and_nothing_else_has(cls: type[Options]) -> None:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(option_command(cls, lambda _options: None, "Test."))
    command: Any = typer.main.get_command(app)
    flags = {flag for param in command.params for flag in param.opts if flag.startswith("--")}
    fields = {flag_of(name) for name in cls.model_fields} - {"MODEL"}
    assert flags - {"--help"} == fields | {"--config", "--help-all"}
    assert all(cls.model_fields[name].description for name in cls.model_fields)


@pytest.mark.parametrize("cls", COMMANDS)
def test_advanced_options_are_shown_by_help_all_alone(cls: type[Options]) -> None:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(option_command(cls, lambda _options: None, "Test."))
    advanced = [flag_of(name) for name in cls.model_fields if name in ADVANCED]
    short, long = (CliRunner().invoke(app, [flag]).output for flag in ("--help", "--help-all"))
    assert advanced
    assert not any(f"{flag} " in short for flag in advanced)
    assert all(f"{flag} " in long for flag in advanced)


def test_help_lists_at_most_60_options() -> None:
    group: Any = typer.main.get_command(baton)
    context = typer.Context(group)
    commands: dict[str, Any] = {
        name: group.get_command(context, name) for name in group.list_commands(context)
    }
    counts = {
        name: sum(not getattr(param, "hidden", False) for param in command.params)
        for name, command in commands.items()
    }
    assert counts.keys() >= {"serve", "gateway", "prefill", "decode"}
    assert max(counts.values()) <= 60, counts


def test_each_advanced_option_is_one_of_ours() -> None:
    assert {name for cls in COMMANDS for name in cls.model_fields} >= ADVANCED


@given(
    st.fixed_dictionaries(
        {"model": st.text("ab/-. ", min_size=1), "speculative_method": st.just("none")},
        optional={
            "async_scheduling": st.booleans(),
            "block_size": st.integers(1, 256),
            "enable_prefix_caching": st.booleans(),
            "colocated": st.booleans(),
            "ticket_lease_s": st.floats(0.001, 1e6),
            "served_model_name": st.text("xy -=", min_size=1),
            "kv_cache_memory_bytes": st.integers(1, 2**40),
            "kv_transport": st.sampled_from(["auto", "shm", "tcp"]),
        },
    )
)
@settings(deadline=None, max_examples=30)
def test_options_survive_the_way_through_a_command_line(values: dict[str, Any]) -> None:
    options = DecodeOptions(**values)
    assert parse(DecodeOptions, to_arguments(options)) == options


def test_addresses_survive_too() -> None:
    options = GatewayOptions(model="m", decode_workers=("a:1", "b:2"), prefill_workers=())
    assert parse(GatewayOptions, to_arguments(options)).decode_workers == ("a:1", "b:2")  # type: ignore[attr-defined]


def test_what_is_left_out_stays_out() -> None:
    assert parse(DecodeOptions, ["m"]).model_fields_set == {"model"}


def test_an_unknown_flag_is_refused() -> None:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(option_command(DecodeOptions, lambda _options: None, "Test."))
    result = CliRunner().invoke(app, ["m", "--blocks", "3"])
    assert result.exit_code == 2
    assert "--blocks" in result.output


def test_a_wrong_value_is_the_options_classes_error() -> None:
    with pytest.raises(ConfigError, match="--block-size=0: give at least 1"):
        parse(DecodeOptions, ["m", "--block-size", "0"])
