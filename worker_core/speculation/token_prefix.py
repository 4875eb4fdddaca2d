"""The beginning of a sequence, without a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class TokenPrefix(Sequence[int]):
    """The first `num_tokens` of `token_ids`, which must not change while this is in use."""

    __slots__ = ("_num_tokens", "_token_ids")

    def __init__(self, token_ids: Sequence[int], num_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        places = range(self._num_tokens)[index]
        if isinstance(places, int):
            return self._token_ids[places]
        if places.step == 1:
            return self._token_ids[places.start : places.stop]
        return [self._token_ids[place] for place in places]
