"""What a message of ours can carry, and how it is told if it cannot."""

from __future__ import annotations

from baton.errors import FieldViolation, InvalidRequest


def checked_text(field: str, text: str) -> str:
    """`text`, if UTF-8 can hold it. Raises InvalidRequest naming the field, the position and the
    fix if not."""
    if not isinstance(text, str):
        raise wrong(field, text, "must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.of(
            FieldViolation(
                field,
                f"lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
                "it is half a character, often from bytes decoded with errors='surrogateescape': "
                "decode them as UTF-8, or replace it, as "
                "text.encode('utf-8', 'replace').decode() does",
            )
        ) from None
    return text


def wrong(field: str, value: object, fix: str) -> InvalidRequest:
    """A field that a message cannot carry."""
    return InvalidRequest.of(FieldViolation(field, f"{value!a:.80}: {fix}"))
