"""Diagnosis of addresses that cannot be listened on, before or after gRPC has failed."""

from __future__ import annotations

import errno
import socket

from baton.errors import ConfigError


def bind_fault(
    host: str, port: int, host_option: str = "host", port_option: str = "port"
) -> ConfigError | None:
    """The error that prevents a TCP socket from listening at host:port; None if there is none. The
    port stays free.

    A port in use with SO_REUSEPORT counts as taken.
    """
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        return _host_fault(host_option, host, error)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC does: connections of a server that has just ended do not block its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return _fault(error, host, port, host_option, port_option)
    return None


def check_bindable(
    host: str, port: int, host_option: str = "host", port_option: str = "port"
) -> None:
    """Raise ConfigError now, instead of a failure after the model has been loaded."""
    fault = bind_fault(host, port, host_option, port_option)
    if fault is not None:
        raise fault


def _fault(error: OSError, host: str, port: int, host_option: str, port_option: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        fix = (
            "is in use; end the process that listens there, or give another port (port 0 takes any)"
        )
        return ConfigError.of(port_option, port, fix)
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = "is not allowed to this user; give a port from 1024 on (port 0 takes any)"
        return ConfigError.of(port_option, port, fix)
    return _host_fault(host_option, host, error)


def _host_fault(option: str, host: str, error: OSError) -> ConfigError:
    return ConfigError.of(
        option,
        host,
        f"cannot listen there ({error.strerror}); give an address of this machine, "
        "such as 127.0.0.1, or 0.0.0.0 for all",
    )
