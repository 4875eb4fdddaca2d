"""Workers that start together see what each other has planned."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.memory_reservations import Reservations

MIB = 1 << 20


def process(proc: Path, pid: int, anon_kb: int, children: str = "") -> None:
    (proc / f"{pid}/task/{pid}").mkdir(parents=True, exist_ok=True)
    (proc / f"{pid}/status").write_text(f"RssAnon:\t{anon_kb} kB\nRssFile:\t77 kB\n")
    (proc / f"{pid}/task/{pid}/children").write_text(children)


def test_what_was_touched_since_is_not_pending(tmp_path: Path) -> None:
    folder, proc, pid = tmp_path / "memory", tmp_path / "proc", os.getpid()
    process(proc, pid, 100)
    reservations = Reservations(folder, proc)
    assert reservations.pending_bytes() == 0
    kept = reservations.reserve(4 * MIB)
    assert reservations.pending_bytes() == 4 * MIB
    process(proc, pid, 100 + 1024, "99")
    assert reservations.pending_bytes() == 3 * MIB
    process(proc, 99, 2048)  # a rank
    assert reservations.pending_bytes() == MIB
    process(proc, 99, 9999)
    assert reservations.pending_bytes() == 0
    kept.close()
    assert not list(folder.glob("*-*"))


def test_a_killed_process_reserves_nothing(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from engine.memory_reservations import Reservations\n"
        f"kept = Reservations(Path({str(tmp_path)!r})).reserve(1 << 40); print(flush=True)\ninput()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        reservations = Reservations(tmp_path)
        assert reservations.pending_bytes() > 1 << 39
        child.kill()
    assert reservations.pending_bytes() == 0
    assert not list(tmp_path.glob("*-*"))


def test_another_users_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        Reservations(tmp_path / "link")


@pytest.mark.parametrize("name", ["7-x", "other-x"])
@pytest.mark.parametrize("text", ["", "1", "many 2", "1 2 3", "\xff"])
def test_a_foreign_file_is_skipped(tmp_path: Path, name: str, text: str) -> None:
    reservations = Reservations(tmp_path)
    reservations.reserve(MIB)
    with (tmp_path / name).open("w", encoding="latin-1") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        foreign.write(text)
        foreign.flush()
        (tmp_path / "a-folder").mkdir()
        assert reservations.pending_bytes() <= MIB
    assert (tmp_path / "a-folder").is_dir()


def test_a_full_disk_leaves_no_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    reservations = Reservations(tmp_path)
    monkeypatch.setattr(os, "write", is_full)
    with pytest.raises(OSError, match="full"):
        reservations.reserve(MIB)
    assert not list(tmp_path.glob("*-*"))
