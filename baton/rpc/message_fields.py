"""How many fields a message has, seen in its bytes: what is made of each takes far more time and
memory than the two bytes that it may be."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor


def has_more_fields(raw: bytes, kind: Descriptor, most: int) -> bool:
    """Whether a message and those within it have more than so many; seen after a look at as many.
    Packed numbers are one field. Where bytes are no message, what follows them in it is not
    counted: nor does a parser read it."""
    num_fields = 0
    spans = [(0, len(raw), kind)]
    while spans:
        at, end, kind = spans.pop()
        while at < end:
            num_fields += 1
            if num_fields > most:
                return True
            tag, at = _varint(raw, at, end)
            match tag & 7:  # how long its value is
                case 0:
                    _, at = _varint(raw, at, end)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(raw, at, end)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        spans.append((at, min(at + size, end), field.message_type))
                    at += size
                case 3 | 4:  # of a group, which no message of ours has
                    pass
                case _:
                    break
    return False


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends; where there is none, the end."""
    number = shift = 0
    while at < end:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            break
    return 7, end
