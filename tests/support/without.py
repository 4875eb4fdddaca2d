"""A machine that lacks something, on one that has it: `pytest --without=compiler --without=nixl`.

It holds for the tests and for all processes that they start, but for those that are given a path of
their own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PROGRAMS = {
    "compiler": re.compile(r"(.+-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)(-[\d.]+)?"),
    "docker": re.compile(r"docker(d|-compose)?"),
    "chromium": re.compile(r"chromium(-browser)?|google-chrome"),
}
MODULES = {"nixl": "nixl"}
THINGS = (*PROGRAMS, *MODULES)

#: Run by every interpreter that starts; what is None there can be neither imported nor found.
_SITE = "import sys\n\nsys.modules.update(dict.fromkeys({names!r}))\n"


def take_away(things: Iterable[str], folder: Path) -> None:
    """From this process and those that it starts, for as long as they run. folder: empty, and kept
    as long."""
    chosen = set(things)
    hidden = [pattern for name, pattern in PROGRAMS.items() if name in chosen]
    if hidden:
        entries = os.environ["PATH"].split(os.pathsep)
        shown = [_without(Path(entry), hidden, folder / str(i)) for i, entry in enumerate(entries)]
        os.environ["PATH"] = os.pathsep.join(map(str, shown))
    if "compiler" in chosen:
        for variable in ("CC", "CXX"):
            os.environ.pop(variable, None)
    if names := [module for name, module in MODULES.items() if name in chosen]:
        (folder / "sitecustomize.py").write_text(_SITE.format(names=names))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), inherited)))
        sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]


def _without(source: Path, hidden: Sequence[re.Pattern[str]], mirror: Path) -> Path:
    """The folder, or one that has the rest of its programs if any is hidden."""
    programs = list(source.iterdir()) if source.is_dir() else []
    kept = [path for path in programs if not any(p.fullmatch(path.name) for p in hidden)]
    if len(kept) == len(programs):
        return source
    mirror.mkdir()
    for path in kept:
        (mirror / path.name).symlink_to(path)
    return mirror
