"""The library is built where it may be, found again, and done without where it cannot be had."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_kernels.cpu import library as module
from baton_kernels.cpu.library import (
    LEVELS,
    LevelError,
    choose_level,
    chosen_level,
    find_or_build,
    levels_of_machine,
    library,
)


@pytest.fixture(scope="module")
def built() -> Path:
    """The library that all other tests run."""
    return find_or_build(chosen_level())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, nothing beside the sources, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    _forget()
    yield tmp_path / "baton"
    _forget()


def _forget() -> None:
    library.cache_clear()
    module.loaded.cache_clear()
    chosen_level.cache_clear()


def test_it_is_built_once_and_found_again(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles it here is a copy: the whole folder stands on what a compiler made of it."""
    asked: list[str] = []

    def build(level: str, path: Path) -> None:
        asked.append(level)
        shutil.copy(built, path)

    monkeypatch.setattr(module, "build", build)
    assert library() is not None
    assert [path.name for path in cache.iterdir()] == [built.name]
    library.cache_clear()
    assert library() is not None
    assert asked == [chosen_level()]


def test_of_processes_that_start_at_once_one_builds_it(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    lock = fcntl.flock

    def build(level: str, path: Path) -> None:
        asked.append(level)
        folder = os.open(cache, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        shutil.copy(built, path)

    monkeypatch.setattr(module, "build", build)
    path = find_or_build(chosen_level())
    assert len(asked) == 1

    def lock_after_another(folder: int, how: int) -> None:
        lock(folder, how)
        shutil.copy(built, path)

    path.unlink()
    monkeypatch.setattr(fcntl, "flock", lock_after_another)
    assert find_or_build(chosen_level()) == path
    assert len(asked) == 1


def test_a_cache_that_others_may_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert library() is None
    assert not list(cache.iterdir())


def test_without_a_compiler_there_is_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert library() is None
    assert not list(cache.iterdir())


def test_a_compiler_that_fails_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")
    assert library() is None
    assert not list(cache.iterdir())


def test_another_cpu_has_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CPU_LEVEL", raising=False)
    monkeypatch.setattr(module, "levels_of_machine", lambda: ())
    assert library() is None
    assert module.level() == "none"
    assert not cache.exists()
    with pytest.raises(RuntimeError, match="no native"):
        module.loaded()


def test_no_level_runs_the_twins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    assert library() is None
    assert not cache.exists()


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_needs_all_of_its_instructions(name: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    level = LEVELS[name]
    own, needed = level.architecture, level.instructions
    (other,) = {"x86_64", "aarch64"} - {own}
    field = {"x86_64": "flags", "aarch64": "Features"}[own]
    assert levels_of_machine(info, own) == ()
    info.write_text(f"processor : 0\n{field} : crc32 {' '.join(needed)}\n")
    assert levels_of_machine(info, own)[0] == name
    assert levels_of_machine(info, other) == ()
    for missing in needed:
        info.write_text(f"processor : 0\n{field} : {' '.join(needed - {missing})}\n")
        assert name not in levels_of_machine(info, own)


def test_the_best_level_is_chosen_unless_another_is_forced() -> None:
    available = ("avx512", "avx2")
    assert choose_level(None, available) == "avx512"
    assert choose_level("avx2", available) == "avx2"
    assert choose_level("none", available) == "none"
    assert choose_level(None, ()) == "none"
    with pytest.raises(
        LevelError, match="this machine lacks it; this machine has avx512, avx2, none"
    ):
        choose_level("avx512_bf16", available)
    with pytest.raises(LevelError, match="there is no such level"):
        choose_level("sse9", available)
