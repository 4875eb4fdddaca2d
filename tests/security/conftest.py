"""Certificates that tests of one session share: making keys takes time."""

from __future__ import annotations

import pytest

from baton.rpc.tls import TlsFiles
from tests.support.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Nobody trusts it."""
    return Authority(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="session")
def own(authority: Authority) -> TlsFiles:
    """A good certificate of this host."""
    return authority.files("127.0.0.1", "localhost")
