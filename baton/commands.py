"""What a gateway asks a worker to do with a sequence that it has opened there, or with one choice
of it. The handle that names it travels beside the command, as with baton.events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abort:
    """End the sequence in any stage. No event of it follows.

    Before the choices fork, the sequence continues for the choices that were not aborted, but the
    first choice alone gets events: abort it after the fork, or together with all others.
    """


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop where it is, to be handed off; Paused follows its last tokens. Ignored if it is not
    there any more."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """Send the KV of the paused sequence to the owner of `ticket`: HandedOff or NotHandedOff
    answers."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Resume:
    """Let the paused sequence go on."""


SequenceCommand = Abort | Pause | HandOff | Resume
