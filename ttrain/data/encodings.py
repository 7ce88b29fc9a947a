"""Which encoding the first bytes of a text are in, where it is not UTF-8: said only where they decode as it."""

from __future__ import annotations

import codecs

# The 32-bit marks first: one of them begins like a 16-bit one.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
# A text that begins with two ASCII characters, as JSON does, tells its encoding by where its first four bytes are zero
# (RFC 4627, section 3).
ZEROS = {"000x": "UTF-32BE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "x0x0": "UTF-16LE"}
# The characters that make up a fifth of running Chinese text: random bytes, and other languages' encodings, lack them.
FREQUENT = frozenset("，。的一是不了在人有我他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生")
FREQUENT_SHARE, GB2312_SHARE = 0.05, 0.9


def is_utf8(head: bytes) -> bool:
    """Whether the bytes are UTF-8; a character may be cut at their end."""
    return _decoded(head, "utf-8") is not None


def wide_encoding(head: bytes) -> str | None:
    """The name of UTF-16 or UTF-32, with a byte order mark or without; None where the bytes do not decode as such text."""
    for mark, name in MARKS.items():
        if head.startswith(mark) and _is_text(_decoded(head, name)):
            return name
    name = ZEROS.get("".join("x" if byte else "0" for byte in head[:4]), "")
    return name if name and _is_text(_decoded(head, name)) else None


def is_gb18030(head: bytes) -> bool:
    """Whether bytes that are not UTF-8 are Chinese in GB18030 (or its parts, GBK and GB2312)."""
    text = _decoded(head, "gb18030")
    if not _is_text(text):
        return False
    wide = [character for character in text or "" if not character.isascii()]
    common = sum(bool(character.encode("gb2312", "ignore")) for character in wide)
    frequent = sum(character in FREQUENT for character in wide)
    return bool(wide) and common >= GB2312_SHARE * len(wide) and frequent >= FREQUENT_SHARE * len(wide)


def _decoded(head: bytes, encoding: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _is_text(text: str | None) -> bool:
    return bool(text) and text is not None and "\0" not in text and not text.isspace()
