"""Generate baton/v1 from protos/baton/v1, or with --check say whether the committed stubs are
current."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = Path("baton") / "v1"
PATTERN = "*_pb2*.py*"


def main() -> int:
    """0: done, or current. 1: not current, or protoc failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        if not generate(Path(folder)):
            return 1
        fresh, committed = Path(folder) / STUBS, ROOT / STUBS
        if is_check:
            return report(differences(fresh, committed))
        for old in committed.glob(PATTERN):
            old.unlink()
        shutil.copytree(fresh, committed, dirs_exist_ok=True)
    return 0


def generate(out: Path) -> bool:
    """Write the stubs of all our protos under `out`; false if protoc refuses one."""
    # The plugins are installed next to this interpreter, which need not be on PATH.
    plugins = Path(sys.executable).parent
    protos = sorted(PROTOS.rglob("*.proto"))
    with_services = [path for path in protos if "\nservice " in path.read_text()]
    messages = ("--python_out={out}", "--mypy_out=readable_stubs:{out}")
    services = ("--grpc_python_out={out}", "--mypy_grpc_out={out}")
    return not any(
        protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
                *(output.format(out=out) for output in outputs),
                *map(str, files),
            ]
        )
        for outputs, files in ((messages, protos), (services, with_services))
    )


def differences(fresh: Path, committed: Path) -> list[str]:
    """Names of stubs that are missing, left over, or differ."""
    names = {path.name for folder in (fresh, committed) for path in folder.glob(PATTERN)}
    _, changed, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted(changed + missing)


def report(names: list[str]) -> int:
    """Say which stubs are not current."""
    if names:
        sys.stderr.write(f"baton/v1 is not current; run `make protos`: {', '.join(names)}\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
