"""What a GPU machine without a network lacks, as wheels in one folder that travels beside the
checkout.

    python -m bench.gpu.pack [--out build/gpu-wheels] [--package NAME ...]

Wheels of the versions that are installed here, without their dependencies: by default what
`bench.gpu` and the workers' KV channel import beyond torch, Triton and transformers. On the machine
`python3 -m pip install --no-index --no-deps FOLDER/*.whl` installs them. The folder is ignored by
git; with the checkout it must not be larger than --limit-mib.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

NEEDED = ("protobuf", "blake3", "xxhash")
LIMIT_MIB = 64
_ROOT = Path(__file__).resolve().parents[2]


def download_command(
    packages: Sequence[str], folder: Path, python_version: str, platform: str
) -> list[str]:
    """Of pip. Raises PackageNotFoundError for one that is not installed here."""
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", f"--python-version={python_version}", f"--platform={platform}"),
        *("--dest", str(folder)),
        *(f"{name}=={metadata.version(name)}" for name in packages),
    ]


def tree_bytes(root: Path) -> int:
    """Bytes of the files of a checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    paths = (root / name.decode() for name in listed.split(b"\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def pack(
    command: Sequence[str], folder: Path, root: Path, limit_bytes: int, run: Callable[..., object]
) -> list[Path]:
    """Run `command`, which puts wheels into `folder`, emptied of others; the wheels. Raises
    ValueError if they and the checkout at `root` are more than limit_bytes together."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    run(command, check=True)
    wheels = sorted(folder.glob("*.whl"))
    num_tree, num_wheels = tree_bytes(root), sum(wheel.stat().st_size for wheel in wheels)
    if num_tree + num_wheels > limit_bytes:
        raise ValueError(
            f"a checkout of {num_tree} bytes and wheels of {num_wheels} are more than {limit_bytes}"
            " together: leave packages out"
        )
    return wheels


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack, and print what to carry."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu-wheels")
    parser.add_argument("--package", nargs="+", default=list(NEEDED), help="instead of these")
    parser.add_argument(
        "--python-version", default=f"3.{sys.version_info.minor}", help="over there"
    )
    parser.add_argument("--platform", default="manylinux2014_x86_64", help="as pip names it")
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB)
    options = parser.parse_args(arguments)
    command = download_command(
        options.package, options.out, options.python_version, options.platform
    )
    wheels = pack(command, options.out, _ROOT, options.limit_mib << 20, subprocess.run)
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size} bytes")
    print(f"carry {options.out}; there: python3 -m pip install --no-index --no-deps FOLDER/*.whl")


if __name__ == "__main__":
    main()
