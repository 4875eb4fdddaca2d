"""Errors about a wrong value show no credentials, however malformed it is, and hide nothing
else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import GatewayOptions, load_options
from baton.errors import ConfigError
from baton.redaction import redacted

SECRET = "kestrel"
#: What may stand around a secret in a password.
ODD = st.text("abc/?#@: %[]=&'\"", max_size=4)
SHAPES = st.sampled_from(
    [
        "redis://me:{}@host:6379/0",
        "redis://:{}@host",
        "redis:/me:{}@host:1",
        "rediss://{}@host:99999",
        "http://me:{}@host",
        "redis://me:{}@[::1",
        "redis://me:{}@host:port/0",
    ]
)


@given(shape=SHAPES, before=ODD, after=ODD)
def test_no_password_survives(shape: str, before: str, after: str) -> None:
    shown = redacted(shape.format(before + SECRET + after))
    assert SECRET not in shown
    assert "host" in shown or "[::1" in shown, "where it leads may be seen"


@given(before=st.text("abc#?&='", max_size=3), after=st.text("abc#?&=@", max_size=3))
def test_no_password_survives_without_a_scheme(before: str, after: str) -> None:
    assert SECRET not in redacted(f"me:{before.strip()}{SECRET}{after}@host:6379".replace("'", ""))


@pytest.mark.parametrize("name", ["password", "PASSWORD", "username", "access_token", "api-key"])
def test_no_password_survives_in_a_query(name: str) -> None:
    shown = redacted(f"redis://host:1/0?db=3&{name}={SECRET}&x=7")
    assert SECRET not in shown
    assert "db=3" in shown
    assert "x=7" in shown


@pytest.mark.parametrize(
    "text",
    [
        "redis://host:6379/3",
        "http://[::1]:4317",
        "127.0.0.1:50051",
        "org/model",
        "/a/b.yaml",
        "8",
        "a:1,b:2",
        "user@host",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@here",
        f"me:{SECRET}@here:6379",
        f"redis://me:{SECRET} x@here",
        f"redis:/me:{SECRET}@here",
        f"redis://here:1?password={SECRET}",
    ],
)
def test_a_refusal_of_the_registry_shows_no_password(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, flags in (
        ("BATON_REGISTRY", {}),
        ("BATON_REGISTRI", {}),
        ("", {"registry": url}),
    ):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, url)
            with pytest.raises(ConfigError) as caught:
                load_options(GatewayOptions, {"model": "m", **flags})
            told = str(caught.value) + str(caught.value.metadata)
            assert "here" in told
            assert SECRET not in told


def test_a_broken_file_shows_no_password(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "odd.yaml"
    path.write_text(f"registry: [redis://me:{SECRET}@here:1/0\nport: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_options(GatewayOptions, {"model": "m"}, path)
    assert SECRET not in str(caught.value) + str(caught.value.metadata)
