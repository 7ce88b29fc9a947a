"""Numbers in the text of an answer, as exact fractions. Of English and Chinese writing; number words of English are text.

    #### 1,234      after the last `####`, as gsm8k marks its results (arXiv:2110.14168), the first number
    \\boxed{3/4}     else within the last `\\boxed{}`, the last number
    … so 12 apples  else the last number of the text

A number is digits with a decimal point, with commas between groups of three, with an exponent, a sign (- or 负) or a
currency before it; `3/4`, `\\frac{3}{4}`, `2 1/2`, `3×10^5` and `2^10` are one number each, and 千, 万, 亿, 百万 after
digits multiply. The power of a unit (m², cm^2, m3) is none, nor is the 千 of 千克 or 千米. Full-width forms count as their
plain ones. A percent sign changes nothing. Chinese numerals (三百二十, 负二点五, 三分之二) count where the text has no
digits, since 一 is part of many words.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import pairwise

MARK = "####"
LONGEST = 400  # characters of a number; a model that repeats a digit for ever gives no result
PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]])-|负\s?)?(?:[$€£¥]\s?(?P<inner>-)?)?"
    rf"(?:(?P<whole>\d+) (?=\d+/\d))?(?P<number>{PLAIN})(?:[eE](?P<exponent>[+-]?\d{{1,3}})(?![\w.]))?"
    rf"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?)(?![\d/]))?\s?(?P<unit>百万|千万|万亿|[百千](?![克米瓦卡帕赫伏安焦升字])|[万亿])?"
)
FRACTION = re.compile(r"\\[dt]?frac(?:\s*{([^{}]{,99})}\s*{([^{}]{,99})}|\s?(\d)\s?(\d))")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})")  # as LaTeX writes them: 1{,}000 and 1\,000
SCIENTIFIC = re.compile(r"(?<=\d)\s?(?:×|\*|x|\\times|\\cdot)\s?10\^{?([+-]?\d{1,3})}?")
UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^{?\d+}?|(?<=\dm)[23]\b|(?<=[ckmd ]m)[23]\b")
POWER = re.compile(r"(?<![\d.,])(\d{1,9})\^{?(\d{1,2})}?(?!\d)")
BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{[^{}]*})*)}")
SIMPLE = str.maketrans("−﹣⁄∕", "--//")
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
TRADITIONAL = str.maketrans("萬億點負壹贰叁肆伍陆柒捌玖拾佰仟〇两兩貳參陸", "万亿点负一二三四五六七八九十百千零二二二三六")
DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")}
UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8, "百万": 10**6, "千万": 10**7, "万亿": 10**12}
HAN = "零一二三四五六七八九十百千万亿"
HAN_NUMBER = re.compile(rf"负?(?:[{HAN}]+分之)?[{HAN}]+(?:点[零一二三四五六七八九]+)?")


def answer_in(text: str) -> Fraction | None:
    """The number that a text gives as its result; None where it has none."""
    if MARK in text:
        found = numbers(text.rsplit(MARK, 1)[1])
        if found:
            return found[0]
    boxed = BOXED.findall(text)
    return next((found[-1] for part in [*reversed(boxed[-1:]), text] if (found := numbers(part))), None)


def numbers(text: str) -> list[Fraction]:
    """All numbers of a text, in their order; but none that is longer than any result."""
    plain = FRACTION.sub(_fraction, _plain(text))
    found = [value for match in NUMBER.finditer(plain) if len(match[0]) <= LONGEST for value in _values(match)]
    if found or any(character.isdigit() for character in plain):
        return found
    han = HAN_NUMBER.finditer(plain)
    return [_of_han(match[0]) for match in han if len(match[0]) <= LONGEST]


def _plain(text: str) -> str:
    """Full-width, traditional and other forms as plain ones, and what is written smaller apart: 2½ as 2 1/2, 10³ as 1000."""
    spaced = "".join(_apart(before, one) for before, one in pairwise(" " + text))
    plain = unicodedata.normalize("NFKC", spaced).translate(SIMPLE).translate(TRADITIONAL)
    plain = SCIENTIFIC.sub(r"e\1", THOUSANDS.sub(",", plain))
    return POWER.sub(lambda match: str(int(match[1]) ** int(match[2])), UNIT_POWER.sub("", plain))


def _apart(before: str, one: str) -> str:
    """A character and what parts it from the one before: NFKC alone would make 21/2 of 2½ and 103 of 10³."""
    if unicodedata.decomposition(one).startswith("<fraction>"):
        return f" {one}"
    return f"^{one}" if one in RAISED and before not in RAISED else one


def _fraction(match: re.Match[str]) -> str:
    above, below = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    mixed = match.start() and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{above.strip()}/{below.strip()}"


def _values(match: re.Match[str]) -> list[Fraction]:
    sign = -1 if match["sign"] or match["inner"] else 1
    value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
    below = Fraction(match["below"] or 1)
    if not below:  # 3/0 is two numbers
        return [sign * value, below]
    return [sign * (int(match["whole"] or 0) + value / below) * UNITS.get(match["unit"] or "", 1)]


def _of_han(text: str) -> Fraction:
    """三百二十, 二〇二四, 负二点五, 三分之二."""
    sign, text = (-1, text[1:]) if text.startswith("负") else (1, text)
    if "分之" in text:
        below, above = text.split("分之")
        divisor = Fraction(1) if below == "百" else _of_han(below)  # 百分之五十 as 50 %
        return sign * _of_han(above) / divisor if divisor else Fraction(0)
    whole, _, decimals = text.partition("点")
    tail = Fraction(int("".join(str(DIGITS[one]) for one in decimals)), 10 ** len(decimals)) if decimals else Fraction(0)
    if not any(one in UNITS for one in whole):  # digit after digit, as years are read
        return sign * (int("".join(str(DIGITS[one]) for one in whole) or 0) + tail)
    total = section = digit = 0
    for one in whole:
        unit = UNITS.get(one, 0)
        if not unit:
            digit = DIGITS[one]
        elif unit < 10**4:
            section, digit = section + (digit or 1) * unit, 0
        elif unit == 10**4 or not total:
            total, section, digit = total + (section + digit or 1) * unit, 0, 0
        else:
            total, section, digit = (total + section + digit) * unit, 0, 0
    return sign * (total + section + digit + tail)
