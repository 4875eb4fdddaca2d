"""TLS of gRPC ports and channels: PEM files, checked at the start of a process instead of at its
first connection."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from baton.errors import ConfigError
from baton.rpc.file_watch import MadeOfFiles, PathLike

T = TypeVar("T")

#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_WRONG_DATES = (9, 10)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end. Empty: none.

    ca_certs: authorities of peers' certificates; a client without any uses gRPC's built-in roots.
    certfile: own certificate followed by its chain; optional for a client.
    keyfile: its private key, without a password.
    server_name: name expected in the server's certificate, if it differs from the host.
    """

    ca_certs: PathLike = ""
    certfile: PathLike = ""
    keyfile: PathLike = ""
    server_name: str = ""


def check_files(tls: TlsFiles | None) -> None:
    """Raise ConfigError now, instead of a failure after the model has been loaded."""
    if tls is not None:
        _own_certificate(tls)
        _ca_certs(tls)


def client_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Client credentials from the files. Raises ConfigError, naming option, value and fix."""
    cert, key = _own_certificate(tls)
    return grpc.ssl_channel_credentials(_ca_certs(tls), key, cert)


def server_credentials(tls: TlsFiles, *, requires_client_cert: bool) -> grpc.ServerCredentials:
    """Server credentials from the files, read again on the first connection after a change. Raises
    ConfigError, naming option, value and fix."""
    if requires_client_cert and not tls.ca_certs:
        raise ConfigError.of("ssl_ca_certs", "", "give the file by which to know clients")
    files = watched(tls, lambda: _server_certificates(tls))
    # grpc accepts None for "unchanged", which its stubs omit.
    renewed: Any = files.renewed
    return grpc.dynamic_ssl_server_credentials(files.current(), renewed, requires_client_cert)


def watched(tls: TlsFiles, make: Callable[[], T]) -> MadeOfFiles[T]:
    """The value of `make`, rebuilt when the files change. Raises ConfigError if it cannot be built
    now."""
    paths = [path for path in (tls.ca_certs, tls.certfile, tls.keyfile) if path]
    return MadeOfFiles(paths, make)


def _server_certificates(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key = _own_certificate(tls)
    if cert is None or key is None:
        raise ConfigError.of("ssl_certfile", "", "a server needs one, and --ssl-keyfile")
    return grpc.ssl_server_certificate_configuration([(key, cert)], _ca_certs(tls))


def _own_certificate(tls: TlsFiles) -> tuple[bytes | None, bytes | None]:
    """Certificate and its key, or (None, None)."""
    if not tls.certfile and not tls.keyfile:
        return None, None
    if not tls.certfile or not tls.keyfile:
        lacking, given = ("certfile", "keyfile") if tls.keyfile else ("keyfile", "certfile")
        raise ConfigError.of(f"ssl_{lacking}", "", f"--ssl-{given} is nothing without it")
    cert, key = _read("ssl_certfile", tls.certfile), _read("ssl_keyfile", tls.keyfile)
    _check_certificates("ssl_certfile", tls.certfile, cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password refuses an encrypted key, instead of a prompt on the terminal.
        context.load_cert_chain(tls.certfile, tls.keyfile, password=lambda: b"")
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        fix = (
            f"is not the key of {os.fspath(tls.certfile)}; give the one it was made with"
            if is_other
            else "no private key in PEM without a password; give one"
        )
        raise ConfigError.of("ssl_keyfile", os.fspath(tls.keyfile), fix) from None
    _check_dates(tls.certfile, cert, context)
    return cert, key


def _check_dates(path: PathLike, cert: bytes, server: ssl.SSLContext) -> None:
    """Raise ConfigError if peers would refuse the certificate for its dates. server: has it loaded.
    The handshake stays in memory: the standard library reads dates of trusted certificates only."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=cert.decode("ascii"))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in ends * 2:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _WRONG_DATES:
                fix = f"{error.verify_message}; give one that is valid now"
                raise ConfigError.of("ssl_certfile", os.fspath(path), fix) from None
            return
        except ssl.SSLError:
            return


def _ca_certs(tls: TlsFiles) -> bytes | None:
    if not tls.ca_certs:
        return None
    data = _read("ssl_ca_certs", tls.ca_certs)
    _check_certificates("ssl_ca_certs", tls.ca_certs, data)
    return data


def _check_certificates(option: str, path: PathLike, data: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        fix = "no certificate in PEM; give a file that has BEGIN CERTIFICATE in it"
        raise ConfigError.of(option, os.fspath(path), fix) from None


def _read(option: str, path: PathLike) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        fix = f"cannot be read ({error.strerror}); give a file that this user may read"
        raise ConfigError.of(option, os.fspath(path), fix) from None
