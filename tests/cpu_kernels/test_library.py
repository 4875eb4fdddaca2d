"""The library is built where it may be, found again, and done without where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_kernels.cpu import library as module
from baton_kernels.cpu.library import is_supported, library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path / "baton"
    library.cache_clear()


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
    monkeypatch.setattr(module, "is_supported", lambda: False)
    assert library() is None
    assert not cache.exists()
    with pytest.raises(RuntimeError, match="no native"):
        module.loaded()


def test_all_instructions_are_asked_for(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert not is_supported(info)
    names = ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"]
    info.write_text(f"processor : 0\nflags : sse {' '.join(names)}\n")
    assert is_supported(info)
    for name in names:
        others = [other for other in names if other != name]
        info.write_text(f"processor : 0\nflags : {' '.join(others)}\n")
        assert not is_supported(info)
