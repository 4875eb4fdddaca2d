"""Collects wheels for a GPU machine without a network, in one folder to copy with the checkout.

    python -m bench.gpu.pack [--service] [--out build/gpu-wheels] [--package NAME ...]

Wheels have the versions installed here and come without dependencies; by default they are the
packages that `bench.gpu` and the workers' KV channel import besides torch, Triton and transformers.
Install them there with `python3 -m pip install --no-index --no-deps FOLDER/*.whl`. The folder is
ignored by git; checkout and folder together must not exceed --limit-mib, and the checkout alone
--tree-limit-mib. Items of bench.gpu have random weights, so that the bundled models' need not
travel: LEAVE_OUT takes them from the working tree, and TAKE_BACK returns them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

NEEDED = ("protobuf", "blake3", "xxhash")
#: Further imports of `baton serve` and the SDK that such machines usually lack.
OF_SERVICE = (
    *("annotated-types", "pydantic", "pydantic-core", "pydantic-settings", "python-dotenv"),
    *("typing-extensions", "typing-inspection", "typer", "rich", "httptools", "llguidance"),
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "googleapis-common-protos"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
    *("opentelemetry-proto", "opentelemetry-exporter-prometheus"),
    *(f"opentelemetry-exporter-otlp-{part}" for part in ("common", "proto-common")),
    *(f"opentelemetry-exporter-otlp-proto-{part}" for part in ("grpc", "http")),
    *("opentelemetry-exporter-http-transport", "prometheus-client", "redis", "uvloop"),
)
#: Platform tags of wheels that run on glibc 2.39.
PLATFORMS = tuple(
    f"manylinux{tag}_x86_64" for tag in (*(f"_2_{minor}" for minor in range(39, 16, -1)), 2014, 1)
)
LIMIT_MIB = 64
#: Bound of a checkout without the bundled models' weights; that has 11 MiB.
TREE_LIMIT_MIB = 16
#: git commands; while the files are left out, git's status is that of a whole checkout.
LEAVE_OUT = (
    *("git", "sparse-checkout", "set", "--no-cone"),
    *("/*", "!/models/*/model.safetensors"),
)
TAKE_BACK = ("git", "sparse-checkout", "disable")
_ROOT = Path(__file__).resolve().parents[2]


def download_command(
    packages: Sequence[str], folder: Path, python_version: str, platforms: Sequence[str]
) -> list[str]:
    """The pip command. Raises PackageNotFoundError for a package that is not installed here."""
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", f"--python-version={python_version}"),
        *(f"--platform={platform}" for platform in platforms),
        *("--dest", str(folder)),
        *(f"{name}=={metadata.version(name)}" for name in packages),
    ]


def tree_files(root: Path) -> dict[Path, int]:
    """A working tree's files that git does not ignore, with their bytes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    paths = (root / name.decode() for name in listed.split(b"\0") if name)
    return {path: path.stat().st_size for path in paths if path.is_file()}


def check_tree(root: Path, limit_bytes: int) -> int:
    """Bytes of the checkout's files. Raises ValueError above limit_bytes, with the largest."""
    files = tree_files(root)
    if (total := sum(files.values())) > limit_bytes:
        largest = sorted(files, key=lambda path: -files[path])[:3]
        names = ", ".join(f"{path.relative_to(root)} ({files[path]})" for path in largest)
        raise ValueError(
            f"a checkout of {total} bytes is more than {limit_bytes}: leave out the models' weights"
            f" ({shlex.join(LEAVE_OUT)}; {shlex.join(TAKE_BACK)} takes them back) and what does not"
            f" belong there; the largest files are {names}"
        )
    return total


def pack(
    command: Sequence[str],
    folder: Path,
    num_tree: int,
    limit_bytes: int,
    run: Callable[..., object],
) -> list[Path]:
    """Empty `folder`, run `command`, which puts wheels there, and return them. Raises ValueError if
    they and a checkout of num_tree bytes together exceed limit_bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    run(command, check=True)
    wheels = sorted(folder.glob("*.whl"))
    num_wheels = sum(wheel.stat().st_size for wheel in wheels)
    if num_tree + num_wheels > limit_bytes:
        raise ValueError(
            f"a checkout of {num_tree} bytes and wheels of {num_wheels} are more than {limit_bytes}"
            " together: leave packages out"
        )
    return wheels


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack, and print the files to carry."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu-wheels")
    parser.add_argument("--package", nargs="+", default=list(NEEDED), help="instead of these")
    parser.add_argument("--service", action="store_true", help="and what the service needs")
    parser.add_argument(
        "--python-version", default=f"3.{sys.version_info.minor}", help="over there"
    )
    parser.add_argument(
        "--platform", nargs="+", default=list(PLATFORMS), help="as pip names them: it guesses none"
    )
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB)
    parser.add_argument("--tree-limit-mib", type=int, default=TREE_LIMIT_MIB)
    options = parser.parse_args(arguments)
    packages = [*options.package, *(OF_SERVICE if options.service else ())]
    command = download_command(packages, options.out, options.python_version, options.platform)
    num_tree = check_tree(_ROOT, options.tree_limit_mib << 20)
    wheels = pack(command, options.out, num_tree, options.limit_mib << 20, subprocess.run)
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size} bytes")
    print(f"carry {options.out}; there: python3 -m pip install --no-index --no-deps FOLDER/*.whl")


if __name__ == "__main__":
    main()
