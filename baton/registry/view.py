"""The list as one gateway sees it: snapshots in, joins and leaves out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.registry.interface import Change, WorkerAdded, WorkerRemoved
from baton.registry.registration import Registration
from baton.types import Tier


@dataclass(frozen=True, slots=True)
class View:
    """Who is listed. `model`: the name that this gateway serves; workers of others are not its own.

    others: addresses of workers that serve another model, and the name they serve it by.
    """

    model: str
    listed: dict[str, Tier] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def after(self, entries: Iterable[Registration]) -> View:
        """The view once `entries` are all there is. One that drains is as good as gone: it takes no
        more work."""
        listed: dict[str, Tier] = {}
        others: dict[str, str] = {}
        for entry in entries:
            if entry.info.model != self.model:
                others[entry.address] = entry.info.model
            elif not entry.load.is_draining:
                listed[entry.address] = entry.info.tier
        return View(self.model, listed, others)


def changes_between(old: View, new: View) -> tuple[Change, ...]:
    """What leads from `old` to `new`, leaves first. An address whose tier changed leaves and
    joins."""
    left = sorted(a for a, tier in old.listed.items() if new.listed.get(a) is not tier)
    joined = sorted(a for a, tier in new.listed.items() if old.listed.get(a) is not tier)
    return (
        *map(WorkerRemoved, left),
        *(WorkerAdded(address, new.listed[address]) for address in joined),
    )
