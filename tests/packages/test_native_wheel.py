"""A wheel brings the kernels' libraries where they can be built, says that it is for one platform
then, and is built without them else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton_kernels.cpu.library import LEVELS, build_all, file_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(
    hook: ModuleType, version: str, build: Callable[[Path], list[Path]], monkeypatch: Any
) -> tuple[dict[str, Any], list[str]]:
    """What the hook changed, and its warnings."""
    warnings: list[str] = []
    monkeypatch.setattr(hook, "_library", lambda _: SimpleNamespace(build_all=build))
    app = SimpleNamespace(display_warning=warnings.append)
    kernels = hook.NativeKernels(str(ROOT), {}, None, None, "", "wheel", app)
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    kernels.initialize(version, data)
    return data, warnings


def write_one(folder: Path) -> list[Path]:
    path = folder / "kernels-avx2-0.so"
    path.write_bytes(b"")
    return [path]


def test_libraries_lie_beside_their_sources(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, warnings = built(hook, "standard", write_one, monkeypatch)
    assert list(data["force_include"].values()) == ["baton_kernels/cpu/kernels-avx2-0.so"]
    assert not data["pure_python"]
    assert data["tag"].startswith("py3-none-")
    assert not warnings


def test_without_a_compiler_the_wheel_is_for_any_machine(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> list[Path]:
        raise FileNotFoundError("no C++ compiler")

    data, warnings = built(hook, "standard", fail, monkeypatch)
    assert data == {"force_include": {}, "pure_python": True}
    assert "no C++ compiler" in warnings[0]


def test_an_editable_installation_builds_nothing(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = built(hook, "editable", write_one, monkeypatch)
    assert data == {"force_include": {}, "pure_python": True}


def test_every_level_of_the_architecture_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    # Writes its arguments to the file that the last one names.
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")
    for architecture, flag in (("x86_64", "-mavx2"), ("aarch64", "")):
        monkeypatch.setattr("platform.machine", lambda name=architecture: name)
        folder = tmp_path / architecture
        folder.mkdir()
        paths = build_all(folder)
        names = [name for name, level in LEVELS.items() if level.architecture == architecture]
        assert [path.name for path in paths] == list(map(file_name, names))
        assert all(flag in path.read_text() for path in paths)
        before = [path.stat().st_mtime_ns for path in paths]
        assert build_all(folder) == paths
        assert before == [path.stat().st_mtime_ns for path in paths]
