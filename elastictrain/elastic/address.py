"""``HOST`` or ``HOST:PORT``, as people write it. Imports no torch: the command line is checked before that."""

from __future__ import annotations

import re


def parse_address(text: str) -> tuple[str, int | None] | None:
    """Host, without the brackets of an IPv6 address, and port, if there is one; None: it is no such thing."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^/:\[\]]+)(?::(\d{1,5}))?", text)
    return None if found is None else (found[1].strip("[]"), int(found[2]) if found[2] else None)
