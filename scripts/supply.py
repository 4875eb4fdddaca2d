"""What the images install, from deploy/locks: `make sbom` lists it as CycloneDX, one file for each
lock in sbom/; `make audit` asks the Python Packaging Advisory Database about all of it.

The tools are installed in an environment of their own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "locks"
TOOLS = ROOT / "build" / "supply"
SBOM = ROOT / "sbom"
_NEEDED = ("pip-audit>=2.9,<3", "cyclonedx-bom>=7,<8")


def tool(name: str) -> str:
    """The path of a program, in an environment of its own."""
    program = TOOLS / "bin" / name
    if not program.is_file():
        venv.create(TOOLS, with_pip=True)
        pip = [str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", *_NEEDED]
        subprocess.run(pip, check=True)
    return str(program)


def write_sboms() -> int:
    SBOM.mkdir(parents=True, exist_ok=True)
    for lock in sorted(LOCKS.glob("*.txt")):
        target = SBOM / f"{lock.stem}.cdx.json"
        command = [tool("cyclonedx-py"), "requirements", str(lock), "--output-file", str(target)]
        subprocess.run([*command, "--output-reproducible"], check=True)
        print(target.relative_to(ROOT))
    return 0


def audit() -> int:
    """1: a lock names a version with a known vulnerability, or one that the index could not be
    asked about."""
    is_sound = True
    for lock in sorted(LOCKS.glob("*.txt")):
        print(lock.relative_to(ROOT), flush=True)
        # The locks are whole: nothing has to be resolved or downloaded.
        options = ("--disable-pip", "--no-deps", "--strict")
        command = [tool("pip-audit"), *options, "--requirement", str(lock)]
        is_sound = subprocess.run(command, check=False).returncode == 0 and is_sound
    return 0 if is_sound else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("what", choices=("sbom", "audit"))
    return write_sboms() if parser.parse_args().what == "sbom" else audit()


if __name__ == "__main__":
    sys.exit(main())
