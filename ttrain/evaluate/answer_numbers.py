"""Numbers in the text of an answer, as exact fractions. Of English and Chinese writing; number words of English are text.

    #### 1,234      after the last `####`, as gsm8k marks its results (arXiv:2110.14168), the first number
    \\boxed{3/4}     else within the last `\\boxed{}`, the last number
    … so 12 apples  else the last number of the text

A number is digits with a decimal point, with commas between groups of three, with an exponent, a sign or a currency before
it; `3/4`, `\\frac{3}{4}`, `2 1/2`, `3又1/2`, `3分之2`, `3×10^5` and `2^10` are one number each. The power of a unit (m²,
cm^2, m3) is none. Full-width forms count as their plain ones. A percent sign changes nothing, nor does 百分之.

signs    负, 零下 and a hyphen: but no hyphen between two numbers (3-5, 2020-11, 5%-10%), after Latin letters, or after at
         most two characters behind a digit, as units are (5年-10年, 3千克-5千克). After other Chinese text it is one
         (气温-5度), and after words such as 是, 为, 等于, 到, 和, 或 always (3或-3).
groups   12 000 is one number: any groups of three behind a thin or unbreakable space; behind a plain one where the first
         group has at most two digits or all others are 000, since 100 200 is a list, and no third number stands beside.
words    thousand, million, billion, trillion, 百, 千, 万, 亿, 百万, 千万 and 万亿 after digits multiply. 1万2千, 1万2500 and
         1万2 (12,000, as one says it) are one number each.
units    千 before 克, 米, 瓦 and their like is part of the unit, after Chinese numerals too: 3千克, 三千克 and 三千米 are 3
         (somebody may mean 3,000 metres by the last), but 一万三千米 is 13,000. So is 百 in 百帕.

Chinese numerals (三百二十, 负二点五, 三分之二, 三又二分之一, 一万二 for 12,000) count where the text has no digits: 一 is
part of many words.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import pairwise

MARK = "####"
LONGEST = 400  # characters of a number; a model that repeats a digit for ever gives no result
PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
HAN = "零一二三四五六七八九十百千万亿"
IN_UNIT = "(?:[克米瓦卡帕赫伏安焦升牛]|字节|比特|分之)"  # what 千 makes another unit of
ENGLISH = "(?i:thousand|million|billion|trillion)(?=s?(?![A-Za-z]))"
WORD = rf"百万|千万|万亿|百(?!帕|分之)|千(?!{IN_UNIT})|[万亿]|{ENGLISH}"
MINUS = (
    r"(?:(?<![\w.)\]%°])|(?<=[是为為于於得到至和与與及或者加减減乘以])"
    rf"|(?<=[\u4e00-\u9fff])(?<![{HAN}])(?<!\d\w)(?<!\d\w\w))-"
)
NUMBER = re.compile(
    rf"(?P<sign>{MINUS}|负\s?)?(?:[$€£¥]\s?(?P<inner>-)?)?"
    rf"(?:(?P<whole>\d+)(?: |\s?又\s?)(?=\d+/\d))?(?P<number>{PLAIN})(?:[eE](?P<exponent>[+-]?\d{{1,3}})(?![\w.]))?"
    rf"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?)(?![\d/]))?\s?(?P<unit>{WORD})?"
)
FRACTION = re.compile(r"\\[dt]?frac(?:\s*{([^{}]{,99})}\s*{([^{}]{,99})}|\s?(\d)\s?(\d))")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})")  # as LaTeX writes them: 1{,}000 and 1\,000
SCIENTIFIC = re.compile(r"(?<=\d)\s?(?:×|\*|x|\\times|\\cdot)\s?10\^{?([+-]?\d{1,3})}?")
UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^{?[+-]?\d+}?|(?<=\dm)[23](?![0-9A-Za-z])|(?<=[ckmd ]m)[23](?![0-9A-Za-z])")
THIN = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")
SPACED = re.compile(  # no part of a telephone number, of GPT-3 175B or of 12 200-kilobyte videos
    r"(?<![\dA-Za-z.,])(?<!\d )(?<![A-Za-z]-)(?:\d{1,2}(?: \d{3})+|\d{3}(?: 000)+)(?![\d/]|-\d+-|-[A-Za-z]| [\d/])"
)
TAEL = re.compile(
    rf"(?<=[{HAN}萬億])[两兩](?![百千万亿萬億])"
)  # a weight, as in 五千两; no numeral ends in this form of two
OF = re.compile(r"(?<!\d)(\d{1,9})分之(\d{1,9})(?!\d)")
BELOW_ZERO = re.compile(rf"零下\s?(?=[\d{HAN}])")
POWER = re.compile(r"(?<![\d.,])(\d{1,9})\^{?(\d{1,2})}?(?!\d)")
BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{[^{}]*})*)}")
SIMPLE = str.maketrans("−﹣⁄∕", "--//")
RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
TRADITIONAL = str.maketrans("萬億點負壹贰叁肆伍陆柒捌玖拾佰仟〇两兩貳參陸", "万亿点负一二三四五六七八九十百千零二二二三六")
DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")}
UNITS = {
    "十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8, "百万": 10**6, "千万": 10**7, "万亿": 10**12,
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
SPOKEN = "百千万亿"  # a digit behind one is the next smaller power of ten: 一百二 is 120, 一万二 is 12,000
COUNTED = re.compile("[个個首人名位岁歲年月日天次篇卷章回条條件本匹家户口只隻]")  # what that short form never stands before
HAN_NUMBER = re.compile(rf"负?(?:(?:[{HAN}]{{1,40}}又)?[{HAN}]{{1,40}}分之)?[{HAN}]+(?:点[零一二三四五六七八九]+)?")
UNIT_OF_THOUSANDS = re.compile(rf"(?<=千){IN_UNIT}|(?<=百)帕")
BESIDE = " .。%\\$€£¥"  # what may stand beside a number that is all of an answer
Located = tuple[int, int, Fraction]  # where a number begins and ends in a text, and the number


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
    return [value for _, _, value in _located(_plain(text))]


def is_number(text: str) -> bool:
    """Whether a text is one number and nothing else, but for a currency, a percent sign or a full stop beside it."""
    plain = _plain(text).strip()
    found = _located(plain)
    return len(found) == 1 and not (plain[: found[0][0]] + plain[found[0][1] :]).strip(BESIDE)


def _plain(text: str) -> str:
    """Full-width, traditional and other forms as plain ones, and what is written smaller apart: 2½ as 2 1/2, 10³ as 1000."""
    bare = TAEL.sub(" ", THIN.sub(",", text))
    spaced = "".join(_apart(before, one) for before, one in pairwise(" " + bare))
    plain = unicodedata.normalize("NFKC", spaced).translate(SIMPLE).translate(TRADITIONAL)
    plain = SCIENTIFIC.sub(r"e\1", THOUSANDS.sub(",", plain))
    plain = SPACED.sub(lambda match: match[0].replace(" ", ""), plain)
    plain = BELOW_ZERO.sub("负", OF.sub(r"\2/\1", plain))
    plain = POWER.sub(lambda match: str(int(match[1]) ** int(match[2])), UNIT_POWER.sub("", plain))
    return FRACTION.sub(_fraction, plain)


def _apart(before: str, one: str) -> str:
    """A character and what parts it from the one before: NFKC alone would make 21/2 of 2½ and 103 of 10³."""
    if unicodedata.decomposition(one).startswith("<fraction>"):
        return f" {one}"
    return f"^{one}" if one in RAISED and before not in RAISED else one


def _fraction(match: re.Match[str]) -> str:
    above, below = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    mixed = match.start() and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{above.strip()}/{below.strip()}"


def _located(plain: str) -> list[Located]:
    """The numbers of a text that `_plain` made, in their order."""
    found = _with_digits(plain)
    if found or any(character.isdigit() for character in plain):
        return found
    for match in HAN_NUMBER.finditer(plain):
        numeral = match[0][:-1] if _ends_in_unit(match) else match[0]
        if len(numeral) <= LONGEST and numeral.strip("负"):
            spoken = not COUNTED.match(plain, match.end())
            found.append((match.start(), match.start() + len(numeral), _of_han(numeral, spoken=spoken)))
    return found


def _ends_in_unit(match: re.Match[str]) -> bool:
    """十千克 is 10 of a unit; but 千 continues 一万三千米."""
    return not set(match[0]) & set("万亿") and UNIT_OF_THOUSANDS.match(match.string, match.end()) is not None


def _with_digits(plain: str) -> list[Located]:
    found: list[Located] = []
    unit, unit_end, sign = 0, -1, 1  # of the number before
    for match in NUMBER.finditer(plain):
        if len(match[0]) > LONGEST:
            continue
        more = _part(match, unit) if match.start() == unit_end else None
        if more is None:
            sign = -1 if match["sign"] or match["inner"] else 1
            found += [(match.start(), match.end(), sign * value) for value in _values(match)]
        else:
            begin, _, value = found[-1]
            found[-1] = begin, match.end(), value + sign * more
        unit, unit_end = _unit(match), match.end("unit")
    return found


def _values(match: re.Match[str]) -> list[Fraction]:
    value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
    below = Fraction(match["below"] or 1)
    if not below:  # 3/0 is two numbers
        return [value, below]
    return [(int(match["whole"] or 0) + value / below) * _unit(match)]


def _unit(match: re.Match[str]) -> int:
    return UNITS.get((match["unit"] or "").lower(), 1)


def _part(match: re.Match[str], unit: int) -> int | None:
    """What a number adds to the one with this unit right before it: the 2千 of 1万2千; None where it is one of its own."""
    own = _unit(match)
    if not (match["number"] + (match["unit"] or "") == match[0].rstrip() and match["number"].isdecimal()):
        return None
    count = int(match["number"]) * own
    spoken = not COUNTED.match(match.string, match.end())
    if own == 1 and spoken and len(match["number"]) == 1 and unit in map(UNITS.__getitem__, SPOKEN):
        return count * unit // 10
    return count if count < unit and (own > 1 or count * 10 >= unit) else None


def _of_han(text: str, *, spoken: bool = False) -> Fraction:
    """三百二十, 二〇二四, 负二点五, 三分之二, 三又二分之一; where it is `spoken`, 一万二 is 12,000."""
    sign, text = (-1, text[1:]) if text.startswith("负") else (1, text)
    if "又" in text:
        whole, text = text.split("又")
        return sign * (_of_han(whole) + _of_han(text))
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
    if spoken and len(whole) > 2 and whole[-2] in SPOKEN and not decimals:
        digit *= UNITS[whole[-2]] // 10
    return sign * (total + section + digit + tail)
