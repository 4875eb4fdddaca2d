"""A wheel has the native CPU kernels of every level of the architecture that it is built on: see
baton_kernels.cpu.library.

Without a compiler it has none, and is for any machine: there they are compiled on first use.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE_FOLDER = "baton_kernels/cpu"


class NativeKernels(BuildHookInterface[Any]):
    """Builds the libraries, and puts them beside their sources in the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        # Read after this returns, when the wheel is written.
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        try:
            built = _library(Path(self.root)).build_all(folder)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"no native CPU kernels in this wheel: {error}")
            return
        for path in built:
            build_data["force_include"][str(path)] = f"{_PACKAGE_FOLDER}/{path.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def _library(root: Path) -> ModuleType:
    """baton_kernels.cpu.library, which imports the standard library alone, from its file: nothing
    is installed yet."""
    path = root / "kernels" / _PACKAGE_FOLDER / "library.py"
    spec = importlib.util.spec_from_file_location("baton_kernels_library", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
