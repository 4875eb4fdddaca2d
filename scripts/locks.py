"""Write deploy/locks: exact versions, with hashes, of all that the images install. `make locks`

Versions are resolved for every Python and platform that pyproject.toml allows, so one file serves
all; pip checks the hashes. torch comes in two builds, so it has files of its own: torch-cuda.txt
with what the package index has, and torch-cpu.txt with the version alone, since the index of the
CPU builds keeps other files under the same version.
"""

from __future__ import annotations

import re
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "locks"
TOOLS = ROOT / "build" / "locks"
RESOLVER = "uv==0.13.9"
_HEAD = "# Made by `make locks`; do not edit.\n"
#: What only the CUDA build of torch brings.
_CUDA = re.compile(r"(torch|triton|nvidia-.+|cuda-.+)==")
#: The distribution beside this one, which is not in any index yet: from its folder, and not in a
#: lock.
_CLIENT = "baton-serve-client"
#: Speeds up the Hub's large files; the small ones of a tokenizer come without it.
_NO_XET = "--no-emit-package=hf-xet"
_BUILD_BACKEND = "hatchling>=1.27"
#: To be installed beside the rest, without what they would require: the image has CUDA by way of
#: torch.
_NIXL = ("nixl", "nixl-cu13")


def resolver() -> Path:
    """The program that resolves, in an environment of its own."""
    program = TOOLS / "bin" / "uv"
    if not program.is_file():
        venv.create(TOOLS, with_pip=True)
        pip = [str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", RESOLVER]
        subprocess.run(pip, check=True)
    return program


def resolved(program: Path, sources: Iterable[str], *options: str, stdin: str = "") -> list[str]:
    """One block of text per package, its hashes with it, in order of names."""
    command = [str(program), "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", *options, *sources]
    done = subprocess.run(
        command, cwd=ROOT, input=stdin, stdout=subprocess.PIPE, text=True, check=True
    )
    return [f"{block}\n" for block in re.split(r"\n(?=[a-z0-9])", done.stdout.rstrip("\n"))]


def write(name: str, blocks: Iterable[str]) -> None:
    """A lock file; its blocks may be none."""
    (LOCKS / f"{name}.txt").write_text(_HEAD + "".join(blocks))


def main() -> None:
    """Resolve everything together once, so that the images agree on the versions that they
    share."""
    program = resolver()
    LOCKS.mkdir(parents=True, exist_ok=True)
    extras = ("gateway", "worker", "gpu", "bench")
    client = TOOLS / "client.txt"
    client.write_text(f"{_CLIENT} @ {(ROOT / 'client').as_uri()}\n")
    beside = (f"--overrides={client}", f"--no-emit-package={_CLIENT}")
    everything = TOOLS / "everything.txt"
    everything.write_text(
        "".join(
            resolved(program, ["pyproject.toml"], *beside, *(f"--extra={name}" for name in extras))
        )
    )
    agreed = f"--constraints={everything}"

    def of(names: Iterable[str], *options: str) -> list[str]:
        extras = [f"--extra={name}" for name in names]
        return resolved(program, ["pyproject.toml"], agreed, *beside, *extras, *options)

    write("gateway", of(("gateway",), _NO_XET))
    write("bench", of(("gateway", "bench"), _NO_XET))
    worker = of(("worker", "gpu"))
    write("worker", (block for block in worker if not _CUDA.match(block)))
    cuda = [block for block in worker if _CUDA.match(block)]
    write("torch-cuda", cuda)
    (torch,) = (block.split()[0] for block in cuda if block.startswith("torch=="))
    write("torch-cpu", [f"{torch}\n"])
    write("build", resolved(program, ["-"], stdin=_BUILD_BACKEND))
    write("nixl", resolved(program, ["-"], "--no-deps", stdin="\n".join(_NIXL)))


if __name__ == "__main__":
    main()
