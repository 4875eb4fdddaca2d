"""A program as `make bench` runs them: writes the given text as its result, or fails before it
writes anything."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> int:
    """The status to end with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tell", default="")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.fail:
        return 1
    given.json.write_text(json.dumps({"told": given.tell}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
