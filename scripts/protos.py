"""Generate baton/v1 and gateway/openengine/v1 from protos/, or with --check say whether the
committed stubs are current."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
#: Where stubs go, by the folder of protos that they are of.
STUBS = {
    Path("baton/v1"): Path("baton/v1"),
    Path("openengine/v1"): Path("gateway/openengine/v1"),
}
PATTERN = "*_pb2*.py*"


def main() -> int:
    """0: done, or current. 1: not current, or protoc failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    is_check = parser.parse_args().check
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for protos, stubs in STUBS.items():
            if not generate(PROTOS / protos, stubs, Path(folder)):
                return 1
            fresh, committed = Path(folder) / stubs, ROOT / stubs
            if is_check:
                wrong += [f"{stubs}/{name}" for name in differences(fresh, committed)]
                continue
            for old in committed.glob(PATTERN):
                old.unlink()
            shutil.copytree(fresh, committed, dirs_exist_ok=True)
    return report(wrong)


def generate(protos: Path, stubs: Path, out: Path) -> bool:
    """Write the stubs of a folder of protos to `stubs` under `out`; false if protoc refuses one."""
    # The plugins are installed next to this interpreter, which need not be on PATH.
    plugins = Path(sys.executable).parent
    files = sorted(protos.glob("*.proto"))
    with_services = [path for path in files if "\nservice " in path.read_text()]
    messages = ("--python_out={out}", "--mypy_out=readable_stubs:{out}")
    services = ("--grpc_python_out={out}", "--mypy_grpc_out={out}")
    return not any(
        protoc.main(
            [
                "protoc",
                # What a file is called says where its stubs go, and what they import.
                f"--proto_path={stubs}={protos}",
                f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
                f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
                *(output.format(out=out) for output in outputs),
                *(f"{stubs}/{path.name}" for path in some),
            ]
        )
        for outputs, some in ((messages, files), (services, with_services))
    )


def differences(fresh: Path, committed: Path) -> list[str]:
    """Names of stubs that are missing, left over, or differ."""
    names = {path.name for folder in (fresh, committed) for path in folder.glob(PATTERN)}
    _, changed, missing = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted(changed + missing)


def report(names: list[str]) -> int:
    """Say which stubs are not current."""
    if names:
        sys.stderr.write(f"stubs are not current; run `make protos`: {', '.join(names)}\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
