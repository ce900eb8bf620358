"""Names for a terminal: control characters are escaped."""

from __future__ import annotations


def escape(text: object) -> str:
    """``text`` with control and invisible characters written as escapes.

    A name in an untrusted file may clear the screen, or overwrite itself with another name.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in str(text))


def escape_name(text: str) -> str:
    """A tensor's name, escaped; an empty one is ``""`` in quotes."""
    return escape(text) or '""'


def escape_lines(text: str) -> str:
    """``escape`` for a text of several lines."""
    return "\n".join(map(escape, text.split("\n")))


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
