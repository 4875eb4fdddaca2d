"""From one list to the next: changes that lead there, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.registry import Registration, WorkerAdded, WorkerRemoved
from baton.registry.redis import View, changes_between
from baton.types import Tier, WorkerLoad
from tests.support.fake_workers import make_info

ENTRIES = st.lists(
    st.builds(
        lambda number, tier, model, is_draining: Registration(
            f"w{number}:1",
            replace(make_info(f"w{number}", tier), model=model),
            ("tcp",),
            WorkerLoad(is_draining=is_draining),
        ),
        st.integers(0, 5),
        st.sampled_from(Tier),
        st.sampled_from(["m", "m", "m", "other"]),
        st.booleans(),
    ),
    unique_by=lambda entry: entry.address,
)


@given(lists=st.lists(ENTRIES, max_size=4))
def test_changes_lead_to_the_list(lists: list[list[Registration]]) -> None:
    view = View("m")
    known: dict[str, Tier] = {}
    for entries in lists:
        new = view.after(entries)
        for change in changes_between(view, new):
            match change:
                case WorkerAdded(address, tier):
                    assert address not in known, "it left before it joined as something else"
                    known[address] = tier
                case WorkerRemoved(address):
                    del known[address]
        view = new
        assert changes_between(view, view) == ()
        assert known == {
            entry.address: entry.info.tier
            for entry in entries
            if entry.info.model == "m" and not entry.load.is_draining
        }
        assert view.others == {e.address: "other" for e in entries if e.info.model == "other"}
