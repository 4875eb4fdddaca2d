"""A page whose tables are generated, between marks; what stands around them is written by hand.
Pure."""

from __future__ import annotations

import re

_MARKED = re.compile(r"^<!-- begin: (\S+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


class PageError(ValueError):
    """A page has not the marks that it should have."""


def names_in(page: str) -> list[str]:
    """Of the generated parts, in order."""
    return [match[1] for match in _MARKED.finditer(page)]


def part_of(page: str, name: str) -> str:
    """What stands between one pair of marks. Raises PageError if there is none, or more than
    one."""
    found = [match[2] for match in _MARKED.finditer(page) if match[1] == name]
    if len(found) != 1:
        raise PageError(f"{len(found)} parts are marked {name!r}; there has to be one")
    return found[0]


def replaced(page: str, name: str, body: str) -> str:
    """The page with another body between one pair of marks, and else the same. Raises PageError."""
    part_of(page, name)
    return _MARKED.sub(
        lambda m: f"<!-- begin: {name} -->\n{body.strip()}\n<!-- end -->" if m[1] == name else m[0],
        page,
    )
