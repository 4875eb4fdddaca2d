"""When Python looks for garbage that counting references does not free."""

from __future__ import annotations

import gc

#: Objects that a step makes for each of its sequences and that live until it is over, or until the next one is: grant, slice,
#: row, samples, event, and the tuples around them; and as many again for a step launched ahead.
_OBJECTS_PER_SEQUENCE = 32


def look_less_often(max_num_seqs: int) -> None:
    """Have the youngest generation hold what steps of so many sequences make.

    Python looks at all objects of a generation each time it has grown by so many, 700 if nobody tells it otherwise. A step of
    thousands of sequences makes tens of thousands, and none of them is garbage before it ends.
    """
    youngest, *others = gc.get_threshold()
    gc.set_threshold(max(youngest, _OBJECTS_PER_SEQUENCE * max_num_seqs), *others)
