"""The library is built where it may be, found again, and done without where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_kernels.cpu import library as module
from baton_kernels.cpu.library import (
    LEVELS,
    LevelError,
    choose_level,
    chosen_level,
    levels_of_machine,
    library,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _forget()
    yield tmp_path / "baton"
    _forget()


def _forget() -> None:
    library.cache_clear()
    chosen_level.cache_clear()


@pytest.mark.slow
def test_it_is_built_once_and_found_again(cache: Path) -> None:
    assert library() is not None
    (built,) = cache.iterdir()
    before = built.stat()
    library.cache_clear()
    assert library() is not None
    assert built.stat().st_mtime_ns == before.st_mtime_ns


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


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "neon"])
def test_a_level_needs_all_of_its_instructions(name: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert levels_of_machine(info, "x86_64") == ()
    needed = LEVELS[name].instructions
    info.write_text(f"processor : 0\nflags : sse {' '.join(needed)}\n")
    assert levels_of_machine(info, "x86_64")[0] == name
    assert levels_of_machine(info, "aarch64") == ()
    for missing in needed:
        info.write_text(f"processor : 0\nflags : {' '.join(needed - {missing})}\n")
        assert name not in levels_of_machine(info, "x86_64")


def test_an_arm_cpu_describes_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nFeatures : fp asimd crc32\n")
    assert levels_of_machine(info, "aarch64") == ("neon",)


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
