"""Connection options of client commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from baton.client import Client
    from baton.rpc.tls import TlsFiles

DEFAULT_ADDRESS = "127.0.0.1:50051"

_NAME = "connection"


@dataclass(frozen=True, slots=True)
class Connection:
    """Server address, credentials and TLS."""

    address: str
    api_key: str | None = field(repr=False)
    tls: TlsFiles | None

    def client(self, *, timeout_s: float | None = None) -> Client:
        """Create a client, which the caller closes. timeout_s: per call, in seconds."""
        from baton.client import DEFAULT_TIMEOUT_S, Client

        return Client(
            self.address,
            timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
            max_retries=0,
            tls=self.tls,
            api_key=self.api_key,
        )


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer, with one option per field in place of its parameter `connection`."""

    @wraps(command)
    def run(**given: Any) -> None:
        connection = _connection_of(**{name: given.pop(name) for name in _OPTIONS})
        command(**given, **{_NAME: connection})

    parameters = list(_parameters(command))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(command: Callable[..., None]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if name == _NAME:
            yield from _OPTIONS.values()
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield parameter.replace(kind=kind, annotation=hints[name])


def _connection_of(
    address: str,
    api_key: str | None,
    ssl_ca_certs: str,
    ssl_certfile: str,
    ssl_keyfile: str,
    ssl_server_name: str,
) -> Connection:
    from baton.rpc.tls import TlsFiles

    tls = TlsFiles(ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_server_name)
    # A gateway's variable may hold several keys, separated by commas; any is valid.
    key = api_key.partition(",")[0] if api_key else None
    return Connection(address, key, None if tls == TlsFiles() else tls)


def _option(name: str, default: str | None, metavar: str, text: str) -> inspect.Parameter:
    info = typer.Option(
        metavar=metavar,
        envvar=f"BATON_{name.upper()}",
        help=text,
        show_default=bool(default),
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    annotation: object = Annotated[str | None, info] if default is None else Annotated[str, info]
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_OPTIONS = {
    option.name: option
    for option in (
        _option("address", DEFAULT_ADDRESS, "HOST:PORT", "Gateway to talk to."),
        _option(
            "api_key",
            None,
            "KEY",
            "Key that the gateway wants; "
            "better given by the environment, which others cannot read.",
        ),
        _option(
            "ssl_ca_certs",
            "",
            "FILE",
            "PEM file of the certificates that the server's must come from: "
            "the connection uses TLS then.",
        ),
        _option("ssl_certfile", "", "FILE", "PEM file of the certificate to show to the server."),
        _option("ssl_keyfile", "", "FILE", "PEM file of the private key of --ssl-certfile."),
        _option(
            "ssl_server_name",
            "",
            "NAME",
            "Name that the server's certificate is made out to, "
            "where it is not the host of the address.",
        ),
    )
}
