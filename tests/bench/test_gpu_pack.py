"""Files carried to a GPU machine: wheels of the installed versions, within the limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from bench.gpu.pack import (
    LEAVE_OUT,
    NEEDED,
    OF_SERVICE,
    PLATFORMS,
    TAKE_BACK,
    TREE_LIMIT_MIB,
    check_tree,
    download_command,
    pack,
    tree_files,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """1000 bytes that git knows, 100 that it does not yet, and some that it ignores."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "known").write_bytes(bytes(1000))
    (tmp_path / "new").write_bytes(bytes(100))
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "old.whl").write_bytes(bytes(5000))
    subprocess.run(["git", "add", "known"], cwd=tmp_path, check=True)
    return tmp_path


def test_wheels_are_those_of_the_versions_that_are_installed(tmp_path: Path) -> None:
    packages = (*NEEDED, *OF_SERVICE)
    command = download_command(packages, tmp_path, "3.12", PLATFORMS)
    assert {f"{name}=={metadata.version(name)}" for name in packages} < set(command)
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.12"} < set(command)
    assert {"--platform=manylinux2014_x86_64", "--platform=manylinux_2_28_x86_64"} < set(command)


def test_what_travels_is_the_checkout_and_fresh_wheels(checkout: Path) -> None:
    ignored = len(b"build/\n")
    tree = 1100 + ignored
    assert check_tree(checkout, tree) == tree
    folder = checkout / "build"

    def download(command: Sequence[str], *, check: bool) -> None:
        assert check
        assert command == ["pip"]
        (folder / "one.whl").write_bytes(bytes(300))

    limit = 1100 + ignored + 300
    assert pack(["pip"], folder, tree, limit, download) == [folder / "one.whl"]
    with pytest.raises(ValueError, match="wheels of 300 are more than"):
        pack(["pip"], folder, tree, limit - 1, download)


def test_a_large_file_in_the_checkout_is_named(checkout: Path) -> None:
    (checkout / "accident.whl").write_bytes(bytes(3000))
    with pytest.raises(ValueError, match=r"the largest files are accident.whl \(3000\), known"):
        check_tree(checkout, 4000)


def test_the_tree_that_travels_is_small() -> None:
    """What git knows of this checkout, without the bundled models' weights."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    weights = set(ROOT.glob("models/*/model.safetensors"))
    sizes = [path.stat().st_size for path in paths if path.is_file() and path not in weights]
    assert 1 << 20 < sum(sizes) <= TREE_LIMIT_MIB << 20


def test_weights_of_models_stay_behind_and_come_back(checkout: Path) -> None:
    """Only these leave the working tree, and git sees no change."""
    folder = checkout / "models" / "small"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(bytes(3000))

    def git(*command: str) -> str:
        done = subprocess.run(command, cwd=checkout, capture_output=True, check=True, text=True)
        return done.stdout

    git("git", "add", "--all")
    git("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "-m", "all")
    whole = set(tree_files(checkout))
    with pytest.raises(ValueError, match=r"'!/models/\*/model.safetensors'"):
        check_tree(checkout, 5000)
    git(*LEAVE_OUT)
    assert whole - set(tree_files(checkout)) == {folder / "model.safetensors"}
    assert check_tree(checkout, 5000) < 5000
    assert not git("git", "status", "--porcelain")
    git(*TAKE_BACK)
    assert set(tree_files(checkout)) == whole
    assert (folder / "model.safetensors").read_bytes() == bytes(3000)
