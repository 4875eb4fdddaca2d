"""Today's protos are understood by peers of release 0.1.0: `make check` compares them with its
image, and a change that would break a peer fails it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
IMAGE = ROOT / "tests" / "frozen" / "0.1.0" / "protos.binpb"


def breaks(protos: Path) -> str:
    """What buf has against the protos; nothing if they fit the image."""
    command = [BUF, "breaking", protos, "--against", IMAGE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not found.stderr
    assert bool(found.returncode) == bool(found.stdout)
    return found.stdout


@pytest.mark.slow
def test_todays_protos_fit_the_release():
    assert not breaks(ROOT / "protos")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "changed"),
    [
        (
            "uint32 num_tokens = 3;\n  // The token after",
            "uint32 num_tokens = 9;\n  // The token after",
        ),
        ("uint64 exposed_us = 6;", "string exposed_us = 6;"),
        ("KV_TRANSPORT_TCP = 3;", "KV_TRANSPORT_UDP = 3;"),
    ],
    ids=["renumbered", "another type", "renamed"],
)
def test_a_change_that_breaks_a_peer_is_found(tmp_path, frozen, changed):
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos)
    file = protos / "baton" / "v1" / "kv.proto"
    text = file.read_text()
    assert text.count(frozen) == 1
    file.write_text(text.replace(frozen, changed))
    assert "kv.proto" in breaks(protos)


@pytest.mark.slow
def test_a_field_more_breaks_nobody(tmp_path):
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos)
    file = protos / "baton" / "v1" / "kv.proto"
    file.write_text(file.read_text() + "\n// New.\nmessage KvNews {}\n")
    assert not breaks(protos)
