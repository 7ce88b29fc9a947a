"""What answers look like, whatever they say: how much of them is repeated, how varied they are. No torch.

Nothing is counted in tokens, so that models with different tokenizers can be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ttrain.evaluate.prompts import UNSPACED

REPEATED_WORDS = 4  # words of what counts as repeated; three are often a phrase
LOOP_TIMES, LOOP_BYTES = 3, 24  # a loop comes so often, and is so long in all: "no, no, no!" is none
CUT = re.compile("(?<!\ufffd)\ufffd{1,3}$")  # how an answer ends that was cut within a character, as most Chinese loops are
# A character of a script without spaces, a word or number of any other, a sign.
WORDS = re.compile(rf"{UNSPACED.pattern}|(?:(?!{UNSPACED.pattern})\w)+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words, numbers and signs; each character by itself where a script has no spaces, as Chinese, Japanese and Thai."""
    return [word for word in WORDS.findall(text) if not word.isspace()]


def phrases(said: Sequence[str], length: int) -> list[tuple[str, ...]]:
    """All runs of so many words, in their order."""
    return [tuple(said[start : start + length]) for start in range(len(said) - length + 1)]


def repeated(said: Sequence[str]) -> tuple[int, int]:
    """(runs of REPEATED_WORDS words that an answer has had before, all its runs): seq-rep-4 of arXiv:1908.04319."""
    found = phrases(said, REPEATED_WORDS)
    return len(found) - len(set(found)), len(found)


def loops(answer: str) -> bool:
    """Whether an answer ends in a loop: bytes that come LOOP_TIMES or more, the last time maybe in part.

    Of 33,879 answers of public training sets, in English and Chinese, none does.
    """
    data = CUT.sub("", answer.strip()).strip().encode("utf-8")
    for period in range(1, len(data) // LOOP_TIMES + 1):
        same = 0  # bytes at the end that are equal to the byte a period before them
        while same + period < len(data) and data[-1 - same] == data[-1 - same - period]:
            same += 1
        if same + period >= max(LOOP_TIMES * period, LOOP_BYTES):
            return True
    return False


def distinct(answers: Sequence[Sequence[str]], length: int) -> list[tuple[float, int]]:
    """Of each answer (its part of the different runs of so many words in all answers, its runs).

    Their quotient over all answers is distinct-n (arXiv:1510.03055): answers that are all alike are told by it, too. A run
    that n answers have is a part of 1/n in each, so that no order counts. The more answers, the smaller it is: compare it on
    the same items only.
    """
    found = [phrases(said, length) for said in answers]
    times = Counter(run for runs in found for run in runs)
    return [(sum(1 / times[run] for run in runs), len(runs)) for runs in found]
