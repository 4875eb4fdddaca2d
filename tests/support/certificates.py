"""Certificate authorities of a test's own, and files of the certificates that they sign."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import trustme

from baton.rpc.tls import TlsFiles


class Authority:
    """Signs certificates, and keeps all files in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_certs = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_certs))

    def files(self, *names: str, **dates: datetime) -> TlsFiles:
        """A new certificate made out to these hosts, with this authority as the one to trust.
        dates: not_before and not_after."""
        cert = self._ca.issue_cert(*names, **dates)
        stem = self._folder / names[0]
        certfile, keyfile = stem.with_suffix(".crt"), stem.with_suffix(".key")
        certfile.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
        keyfile.write_bytes(cert.private_key_pem.bytes())
        return TlsFiles(self.ca_certs, certfile, keyfile)

    def anonymous(self) -> TlsFiles:
        """This authority to trust, and no certificate to show."""
        return TlsFiles(self.ca_certs)


def as_options(files: TlsFiles) -> dict[str, Any]:
    """The files as options of a process."""
    return {
        "ssl_ca_certs": str(files.ca_certs),
        "ssl_certfile": str(files.certfile),
        "ssl_keyfile": str(files.keyfile),
    }
