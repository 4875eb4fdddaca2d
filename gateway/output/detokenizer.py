"""Turns the token ids of one output into text, as they come. Pure.

Not by tokenizers' DecodeStream: it has no flush, waits for ever on bytes that never become a
character, and gives out the characters of a run of byte tokens that a later byte of the run makes
invalid (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.intake.decoding import BYTE, SILENT, TEXT, Decoding

_REPLACEMENT = "\ufffd"

#: Tokens that a new window begins with at least, if more came at once and it may begin among them.
_NUM_CONTEXT = 4

#: Tokens kept undecided before the window is cut inside what looks like one endless broken
#: character.
_MAX_WINDOW = 64


class Detokenizer:
    """The pieces, with the flush, are the text of all ids, however the ids were cut into feeds, and
    what was released after some ids does not depend on the cuts either, but for broken characters.

    Text is decoded in a window of ids that begins at a clean border (where the text before it ended
    in a whole character) some ids before those that are new, so that decoders which look to the
    left see what they need. Replacement characters at the end may be a character that lacks bytes:
    they wait. So does a run of byte tokens until it has ended.
    """

    def __init__(self, decoding: Decoding, *, is_continuation: bool = False) -> None:
        """is_continuation: the text keeps a space that it begins with."""
        self._decoding = decoding
        self._decode = decoding.text_of
        self._window: list[int] = list(decoding.lead) if is_continuation else []
        self._num_context = len(self._window)
        """Leading ids of the window whose text was all released."""
        self._num_released = len(self._decode(self._window)) if self._window else 0
        """Characters of the window's text that were released."""
        self._is_whole = True
        """Whether nothing of the window waits."""
        self._open_run: list[int] = []
        """Ids after the window's: a run of byte tokens that may go on."""

    def copy(self) -> Detokenizer:
        """A detokenizer in the same state."""
        other = Detokenizer(self._decoding)
        other._window = list(self._window)
        other._open_run = list(self._open_run)
        other._num_context, other._num_released = self._num_context, self._num_released
        other._is_whole = self._is_whole
        return other

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._decoding.kinds:
            self._extend(token_ids, self._decoding.kinds)
        else:
            self._window.extend(token_ids)
        text = self._decode(self._window)
        # In runs that have ended nothing is unfinished.
        whole = text if self._decoding.kinds else text.rstrip(_REPLACEMENT)
        piece = whole[self._num_released :]
        self._is_whole = len(whole) == len(text)
        if not self._is_whole:
            self._num_released = max(self._num_released, len(whole))
            return piece + self._cut_window(text) if len(self._window) > _MAX_WINDOW else piece
        if piece:
            self._begin_window(self._num_context, text)
        elif len(self._window) > _MAX_WINDOW:
            del self._window[self._num_context :]  # these had no text, and will have none
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come: the replacement characters of an unfinished
        character."""
        self._window += self._open_run
        is_whole = self._is_whole and not self._open_run
        piece = "" if is_whole else self._decode(self._window)[self._num_released :]
        self._open_run.clear()
        self._window.clear()
        self._num_context = self._num_released = 0
        self._is_whole = True
        return piece

    def _extend(self, token_ids: Sequence[int], kinds: bytes) -> None:
        """Add ids to the window, and to the run behind it those that more bytes may follow."""
        for token_id in token_ids:
            kind = kinds[token_id] if token_id < len(kinds) else SILENT
            if kind == TEXT:
                self._window += self._open_run
                self._open_run.clear()
            if kind == BYTE or self._open_run:
                self._open_run.append(token_id)
            else:
                self._window.append(token_id)

    def _begin_window(self, num_old: int, text: str) -> None:
        """Begin it behind its first `num_old` ids, or later if that is a clean border, too. text:
        of the whole window."""
        window = self._window
        if len(window) - num_old > _NUM_CONTEXT:
            tail = window[-_NUM_CONTEXT:]
            tail_text = self._decode(tail)
            # What decodes to whole characters by itself begins with one.
            if tail_text and _REPLACEMENT not in tail_text and text.endswith(tail_text):
                self._window, self._num_context = tail, _NUM_CONTEXT
                self._num_released = len(tail_text)
                return
        if num_old:
            del window[:num_old]
            text = self._decode(window)
        self._num_context = len(window)
        self._num_released = len(text)

    def _cut_window(self, text: str) -> str:
        """Release the front of a window that is broken throughout, where cutting it changes
        nothing."""
        for num_kept in range(4, 12):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text and head_text + self._decode(tail) == text:
                piece = head_text[self._num_released :]
                self._window = tail
                self._num_released = max(0, self._num_released - len(head_text))
                self._num_context = 0
                return piece
        return ""
