"""The words of a text, whatever case, punctuation and white space it is written with."""

import re
import unicodedata

# A run of letters and digits, or one Chinese or Japanese character.
WORD = re.compile(r"(?![\W_])[\u3000-\u9fff]|[^\W_\u3000-\u9fff]+")
BETWEEN_WORDS = re.compile(r"[\W_]+")


def words_of(text: str) -> list[str]:
    """The words in lower case, full-width letters as ASCII."""
    return WORD.findall(_folded(text))


def plain(text: str) -> bytes:
    """The words without what stands between them.

    Copies of a text differ in white space, punctuation and symbols, and Chinese has no spaces.
    """
    # As GPT-4's check of its benchmarks (https://arxiv.org/abs/2303.08774, appendix C).
    # Traditional and simplified characters stay different.
    return BETWEEN_WORDS.sub("", _folded(text)).encode("utf-8")


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
