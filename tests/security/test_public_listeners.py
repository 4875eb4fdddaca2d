"""Nobody listens beyond this machine by accident: without what says who may call it takes
--insecure."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config import DecodeOptions, GatewayOptions, Options, PrefillOptions, ServeOptions
from baton.config.load import build_options
from baton.errors import ConfigError

HERE = ("127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]")
BEYOND = ("0.0.0.0", "::", "[::]", "10.0.0.7", "gateway.example")
CERTIFICATES = {"ssl_certfile": "c.pem", "ssl_keyfile": "k.pem", "ssl_ca_certs": "ca.pem"}
EVERY = (GatewayOptions, PrefillOptions, DecodeOptions, ServeOptions)
WORKERS = (PrefillOptions, DecodeOptions)
DOORS = (GatewayOptions, ServeOptions)


def refusal(kind: type[Options], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_options(kind, {"model": "m", **options})
    return caught.value.message


@pytest.mark.parametrize("kind", EVERY)
def test_loopback_needs_nothing(kind: type[Options]) -> None:
    for host in HERE:
        build_options(kind, {"model": "m", "host": host, "metrics_port": 9464})


@pytest.mark.parametrize("host", BEYOND)
@pytest.mark.parametrize("kind", EVERY)
def test_other_addresses_are_refused_with_option_value_and_fix(
    kind: type[Options], host: str
) -> None:
    message = refusal(kind, host=host)
    assert f"--host={host}: " in message
    assert "--insecure" in message
    assert "--ssl-" in message
    build_options(kind, {"model": "m", "host": host, "insecure": True})


@pytest.mark.parametrize("kind", DOORS)
def test_clients_are_let_in_by_keys_or_certificates(kind: type[Options]) -> None:
    for way in ({"api_key": ("k" * 32,)}, {"api_key_file": "keys"}, CERTIFICATES):
        build_options(kind, {"model": "m", "host": "0.0.0.0", **way})
    # A certificate of the gateway's own says who it is, and nothing of its clients.
    of_its_own = {**CERTIFICATES, "ssl_cert_reqs": "none"}
    assert "--api-key-file" in refusal(kind, host="0.0.0.0", **of_its_own)


@pytest.mark.parametrize("kind", WORKERS)
def test_workers_take_certificates_and_kv_a_secret_or_certificates(kind: type[Options]) -> None:
    build_options(kind, {"model": "m", "host": "10.0.0.7", "kv_host": "10.0.0.7", **CERTIFICATES})
    build_options(kind, {"model": "m", "kv_host": "10.0.0.7", "kv_secret_file": "secret"})
    assert "--kv-host=10.0.0.7: " in refusal(kind, kv_host="10.0.0.7")
    assert "--host=10.0.0.7: " in refusal(kind, host="10.0.0.7", kv_secret_file="secret")


@pytest.mark.parametrize("kind", EVERY)
def test_no_key_guards_metrics(kind: type[Options]) -> None:
    message = refusal(kind, host="10.0.0.7", metrics_port=9464, **CERTIFICATES)
    assert "--metrics-port=9464" in message
    options = {"model": "m", "host": "10.0.0.7", "metrics_port": 9464, **CERTIFICATES}
    build_options(kind, {**options, "insecure": True})
