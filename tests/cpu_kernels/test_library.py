"""The library is built where it may be, found again, and done without where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_kernels.cpu import library as module
from baton_kernels.cpu.library import library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield tmp_path / "baton"
    library.cache_clear()


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
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert library() is None
    assert not cache.exists()


def test_loaded_says_so_where_there_is_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cache.exists()
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(RuntimeError, match="no native"):
        module.loaded()
