"""What may be shown of a text that a user gave us: all but credentials."""

from __future__ import annotations

import re

#: Up to the last @ there is: a password may hold any character, though it should not.
_IN_URL = re.compile(r"([A-Za-z][\w+.-]*:/+)[^\n]*@")
_WITHOUT_SCHEME = re.compile(r"[^\s'\"/]+:[^\s'\"]*@")
_IN_QUERY = re.compile(
    r"([?&;][\w.-]*(?:user|pass|pwd|secret|token|key)[\w.-]*=)[^\s&;'\"]*", re.IGNORECASE
)


def redacted(text: str) -> str:
    """`text` with *** for users and passwords of URLs, also of malformed ones. Rather too much is
    hidden than too little."""
    text = _IN_URL.sub(r"\1***@", text)
    text = _WITHOUT_SCHEME.sub("***@", text) if "***@" not in text else text
    return _IN_QUERY.sub(r"\1***", text)
