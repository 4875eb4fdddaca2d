"""Counts a message's fields in its bytes, before parsing: a parsed field takes far more time and
memory than its minimum of two bytes."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor


def has_more_fields(raw: bytes, kind: Descriptor, most: int) -> bool:
    """Whether a message, including nested ones, has more than `most` fields; stops counting there.
    Packed numbers are one field. Malformed bytes end the count of their message, as they end a
    parser."""
    num_fields = 0
    spans = [(0, len(raw), kind)]
    while spans:
        at, end, kind = spans.pop()
        while at < end:
            num_fields += 1
            if num_fields > most:
                return True
            tag, at = _varint(raw, at, end)
            match tag & 7:  # wire type
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
                case 3 | 4:  # groups, which our messages do not use
                    pass
                case _:
                    break
    return False


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """Decode a varint. Return its value and its end; at malformed bytes, `end`."""
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
