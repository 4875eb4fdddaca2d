"""Mistakes with certificates are reported before anything is loaded: option, value and fix."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from baton.config import DecodeOptions, GatewayOptions, PrefillOptions, ServeOptions
from baton.config.load import build_options
from baton.errors import ConfigError
from baton.rpc.channel import sync_channel
from baton.rpc.tls import TlsFiles, check_files, server_credentials
from tests.support.certificates import Authority, as_options

ALL = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
COMMANDS = (GatewayOptions, PrefillOptions, DecodeOptions, ServeOptions)


def missing(tmp_path: Path) -> Path:
    return tmp_path / "no-such.pem"


def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty.pem").write_bytes(b"")
    return tmp_path / "empty.pem"


def binary(tmp_path: Path) -> Path:
    (tmp_path / "binary.pem").write_bytes(bytes(range(256)))
    return tmp_path / "binary.pem"


def torn(tmp_path: Path) -> Path:
    text = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    (tmp_path / "torn.pem").write_text(text)
    return tmp_path / "torn.pem"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("broken", [missing, empty, binary, torn])
def test_a_broken_file_is_named_with_its_option(
    own: TlsFiles, tmp_path: Path, name: str, broken: Callable[[Path], Path]
) -> None:
    path = broken(tmp_path)
    tls = DecodeOptions(model="m", **{**as_options(own), name: str(path)}).tls
    with pytest.raises(ConfigError) as caught:
        check_files(tls)
    assert caught.value.metadata["option"] == name
    assert caught.value.metadata["value"] == str(path)


def test_a_key_of_another_certificate_is_told_so(own: TlsFiles, stranger: Authority) -> None:
    other = stranger.files("elsewhere.test")
    with pytest.raises(ConfigError, match=r"ssl_keyfile=.*is not the key of"):
        check_files(TlsFiles(own.ca_certs, own.certfile, other.keyfile))


@pytest.mark.parametrize(
    ("days", "fault"), [((-2, -1), "certificate has expired"), ((1, 2), "not yet valid")]
)
def test_a_certificate_of_another_day_is_told_so(
    authority: Authority, days: tuple[int, int], fault: str
) -> None:
    begins, ends = (datetime.now(UTC) + timedelta(days=day) for day in days)
    files = authority.files("elsewhere.test", not_before=begins, not_after=ends)
    with pytest.raises(ConfigError, match=rf"ssl_certfile=.*{fault}; give one that is valid now"):
        check_files(files)


def test_an_encrypted_key_is_refused_and_not_asked_about(own: TlsFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-in", own.keyfile, "-out", locked], check=True)
    with pytest.raises(ConfigError, match=r"ssl_keyfile=.*without a password"):
        check_files(TlsFiles(own.ca_certs, own.certfile, locked))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told_so(own: TlsFiles, tmp_path: Path) -> None:
    path = tmp_path / "shut.pem"
    path.touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_files(TlsFiles(path, own.certfile, own.keyfile))


@pytest.mark.parametrize("cls", COMMANDS)
@pytest.mark.parametrize("lacking", ALL)
def test_half_of_the_files_is_no_tls(cls: Any, lacking: str) -> None:
    """A gateway may do without the authority: its clients authenticate otherwise, or not at all."""
    values = {name: "some.pem" for name in ALL if name != lacking}
    if cls is GatewayOptions and lacking == "ssl_ca_certs":
        options = build_options(cls, {"model": "m", **values})
        assert not options.requires_client_cert
        assert options.worker_tls is None
        return
    with pytest.raises(ConfigError, match="--" + lacking.replace("_", "-")):
        build_options(cls, {"model": "m", **values})


@pytest.mark.parametrize("cls", COMMANDS)
def test_nothing_given_is_plain_text(cls: Any) -> None:
    assert build_options(cls, {"model": "m"}).tls is None


@pytest.mark.parametrize(
    ("given", "requires"),
    [(None, True), ("required", True), ("2", True), (2, True), ("none", False), ("0", False)],
)
def test_clients_must_show_a_certificate_unless_told_otherwise(given: Any, requires: bool) -> None:
    files = dict.fromkeys(ALL, "some.pem")
    told = {} if given is None else {"ssl_cert_reqs": given}
    options = build_options(GatewayOptions, {"model": "m", **files, **told})
    assert options.requires_client_cert is requires


@pytest.mark.parametrize("told", [{"ssl_cert_reqs": "required"}, {"ssl_server_name": "x.test"}])
def test_what_means_nothing_without_an_authority_is_refused(told: dict[str, str]) -> None:
    files = dict.fromkeys(("ssl_certfile", "ssl_keyfile"), "some.pem")
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        build_options(GatewayOptions, {"model": "m", **files, **told})


def test_a_server_without_a_certificate_is_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="ssl_certfile"):
        server_credentials(authority.anonymous(), requires_client_cert=False)


def test_a_client_is_told_of_its_files_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        sync_channel("127.0.0.1:1", TlsFiles(missing(tmp_path)))
