"""Tasks of kind `generation`: the model answers questions freely; its answer is compared as a number or as text."""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ttrain.config.evaluate import GenerationTask
from ttrain.core.files import JsonDict
from ttrain.data.chat import lead_text, prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import UsageError
from ttrain.evaluate import items as wording
from ttrain.evaluate.choices import cut_figure
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.items import BadRow, Items, SuiteFiles
from ttrain.evaluate.task_result import TaskResult, mean

ROW_FORMAT = '{"question": text, "answer": text or number, "final" (optional): the result alone}'

log = logging.getLogger("ttrain")

PIECE = 64  # tokens to generate before looking for a stop text

AT_ONCE = 64  # prompts of like length per call of `generate`, so that progress can be reported

EDGE_CATEGORIES = ("P", "Z", "Cc", "Cf")  # of Unicode: punctuation of every script, separators, and invisible characters

# Punctuation to Unicode, but part of an answer, as are all symbols, such as + < $ °
SIGNS = "#%&*/@\\-_!'\"‰‱§"

SAME_SIGN = str.maketrans({"′": "'", "″": "''", **dict.fromkeys("‘’", "'"), **dict.fromkeys("“”„", '"')})

EN_DASH_AS_MINUS = re.compile(r"(?<![\w)\]])–(?=\.?\d)|(?<=\b[a-z])–(?!\w)")  # –5, a–

# Emphasis, formulas and quotes, where they stand at both ends
MARKS_AROUND = ("**", "__", "~~", "$$", "*", "_", "$", '"', "'")

NO_TEXT = re.compile(r"([-*_=#~])\1{2,}|['\"]+")  # a line across, a fence, quotes alone

# Headings, quotes and items of lists (before a digit - + < > are signs), an equals sign, ! and an
# opening quote
FIRST_MARKS = re.compile(r"^(?:#{1,6} |[*•] |[-+>] (?![\d.])|= ?(?=[\w.+-])|!+(?![\w(])(?=.)|['\"]+(?=.))+")

# A closing quote and !, but for primes and factorials, which follow a digit, a bracket or a single
# letter
LAST_MARKS = re.compile(r"(?<![\d)'\"!])(?<!(?<![^\W_])[a-z])(?<=.)['\"!]+$")

INCHES = re.compile('"$')

SIGN_AND_SPACE = re.compile(r"^([-+<>]) (?=[\d.])")

POINT_BEFORE = re.compile(r"[^.]?(?:\.[0-9a-z]|,\d)")  # .5 and .net, but not ...5

BOUND = r" ?[^\s,;()\[\]]{,20}[\d∞][^\s,;()\[\]]{,20} ?"

# Its brackets are part of it: [0, 1) is not (0, 1)
INTERVAL = re.compile(rf"([\[\](]{BOUND}[,;]{BOUND}[\[\])])[ .,;:!?]*")


@dataclass(frozen=True)
class Problem:
    """A row of the file: worked examples show `answer`; a model's answer is compared with `final`."""

    question: str
    answer: str
    final: str


ProblemWithExamples = tuple[Problem, tuple[Problem, ...]]  # with its worked examples


def parse(record: JsonDict, match: str) -> Problem:
    """Parse a row. Raises BadRow without a right answer of the kind that `match` compares; auto accepts what exact accepts,
    which includes every number."""
    question = wording.text(record, "question")
    texts = {key: _text_or_number(record, key) for key in ("answer", "final")}
    answer = texts["answer"] or texts["final"]
    if answer is None:
        raise BadRow("no answer")
    final = texts["final"] or (answer.rsplit(MARK, 1)[1].strip() if MARK in answer else answer)
    if match == "numeric" and answer_in(final) is None:
        raise BadRow("no number in the answer")
    if match != "numeric" and not normalised(final):
        raise BadRow("nothing but punctuation in the answer")
    return Problem(question, answer, final)


def read(task: str, spec: GenerationTask, files: SuiteFiles) -> Items[ProblemWithExamples]:
    """Read the questions of the file; `spec.match` of the result is resolved from auto. Raises UsageError if the
    file does not exist, DataError if it has no question."""

    def parsed(record: JsonDict) -> Problem:
        return parse(record, spec.match)

    rows = wording.read_file(task, spec.file, files, parsed, ROW_FORMAT)
    if spec.match == "auto":  # worked examples of another file are parsed by this choice
        match = "numeric" if all(is_number(problem.final) for problem, _ in rows[0]) else "exact"
        spec = spec.model_copy(update={"match": match})
    how = spec.model_dump(mode="json", include={"match", "new_tokens", "chat", "template", "stop", "shots_separator"})

    def item_of(problem: Problem, examples: tuple[Problem, ...]) -> tuple[ProblemWithExamples, object]:
        shots = [[shot.question, shot.answer] for shot in examples]
        return (problem, examples), [problem.question, problem.final, shots, how]

    return wording.with_examples(task, spec, rows, files, parsed, item_of)


def run(items: Items[ProblemWithExamples], subject: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Compute `accuracy_exact` or `accuracy_numeric`, by `match`, and `ended`: the share of answers that the model or a text
    of `stop` ended before `new_tokens`."""
    spec = items.spec
    if spec.chat and not subject.can_chat:
        raise UsageError(
            f"tasks.{items.task}.chat is true, but the tokenizer of '{subject.name}' has no chat template; set chat: false, "
            "or evaluate a model that was trained on chats"
        )
    room, longest = subject.room(spec.new_tokens)
    if room < spec.new_tokens:
        log.warning("%s: answers of %s have at most %d tokens, half of its context", items.task, subject.name, room)
    prompts = [_prompt(spec, item, subject, longest) for item in items.items]
    stops, lead = ((), lead_text(subject.encoder)) if spec.chat else (spec.stop, "")
    answered = answers(subject, [ids for ids, _ in prompts], room, stops, progress, lead)
    rows: list[JsonDict] = []
    for (problem, _), (_, answer, ended), (_, cut) in zip(items.items, answered, prompts, strict=True):
        parsed, right = judge_answer(answer, problem.final, spec.match)
        rows.append({
            "question": problem.question, "reference": problem.final, "answer": answer, "found": parsed, "match": spec.match,
            "right": right, "ended": ended, **({"cut": cut} if cut else {}),
        })  # fmt: skip
    figures = [mean(f"accuracy_{spec.match}", (row["right"] for row in rows)), mean("ended", (row["ended"] for row in rows))]
    figures += cut_figure([cut for _, cut in prompts])
    return items.result(subject.name, figures, rows)


class Answer(NamedTuple):
    """The ids of a generated answer, its text up to a stop text, and whether it ended before `new_tokens`."""

    ids: list[int]
    text: str
    ended: bool


def answers(
    subject: EvaluatedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stops: Sequence[str],
    progress: ProgressCallback,
    lead: str = "",
) -> list[Answer]:
    """Generate a greedy answer to each prompt, up to the first of `stops`, without the `lead` that a chat template writes.

    Prompts of like length go together. With `stops` answers are generated in pieces, so that an ended one costs no more.
    """
    answered = [Answer([], "", False)] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for start in range(0, len(order), AT_ONCE):
        going_on, remaining = order[start : start + AT_ONCE], new_tokens
        while going_on and remaining:
            piece = min(remaining, PIECE) if stops else remaining
            remaining -= piece
            generated = subject.generate([[*prompts[number], *answered[number].ids] for number in going_on], piece)
            for number, (new_ids, ended) in zip(going_on, generated, strict=True):
                ids = [*answered[number].ids, *new_ids]
                text, stopped = _until(subject.encoder.decode(ids).removeprefix(lead), stops)
                answered[number] = Answer(ids, text, ended or stopped)
            going_on = [number for number in going_on if not answered[number].ended]
        progress(min(start + AT_ONCE, len(order)), len(order))
    return answered


def judge_answer(answer: str, final: str, match: str) -> tuple[str | None, bool]:
    """(the part of the answer that was compared, whether it is right).

    numeric: the numbers that `answer_in` finds are equal. exact: the texts are equal once
    `normalised`; of the answer the text after the last `####` counts, if any, else its first
    non-empty line, if the right answer has one line.
    """
    if match == "numeric":
        number = answer_in(answer)
        return None if number is None else str(number), number is not None and number == answer_in(final)
    compared = answer.rsplit(MARK, 1)[1] if MARK in answer else answer
    if "\n" not in final.strip():
        compared = next((line for line in compared.splitlines() if normalised(line)), "")
    return compared.strip(), normalised(compared) == normalised(final)


def normalised(text: str) -> str:
    """Normalise to lower case, plain width and single spaces, without what stands around an answer.

    That is the punctuation of sentences, quotes, brackets and Markdown. Signs that are part of an
    answer stay: -5, C++, A*, .5, 5%, 5!, f', [0, 1).
    """
    separated = "".join(_with_raised(previous, character) for previous, character in pairwise(" " + text))
    plain = unicodedata.normalize("NFKC", separated.translate(SAME_SIGN)).casefold().translate(SIMPLE)
    plain = EN_DASH_AS_MINUS.sub("-", re.sub(r"\s+", " ", plain))
    edges = "".join(filter(_is_edge, set(plain)))
    before = None
    while plain != before:
        if interval := INTERVAL.fullmatch(plain):
            return interval[1]
        before = plain
        plain = _without_outer_marks(plain, edges)
    return SIGN_AND_SPACE.sub(r"\1", INCHES.sub("''", plain))


def _without_outer_marks(plain: str, edges: str) -> str:
    """Remove one layer of what stands around an answer."""
    bare = plain.lstrip(edges)
    removed = plain[: len(plain) - len(bare)]
    point = removed[-1:] if POINT_BEFORE.fullmatch(removed[-2:] + bare[:1]) else ""
    plain = point + bare.rstrip(edges)
    for mark in MARKS_AROUND:
        if plain.startswith(mark) and plain.endswith(mark) and len(plain) > 2 * len(mark):
            return plain[len(mark) : -len(mark)]
    if NO_TEXT.fullmatch(plain):
        return ""
    return LAST_MARKS.sub("", FIRST_MARKS.sub("", plain, count=1))


def _with_raised(previous: str, character: str) -> str:
    """As `_separated`, but only behind a digit: 10³ is not 103, m² may be written as m2."""
    return _separated(previous, character) if previous.isdigit() else character


def _is_edge(character: str) -> bool:
    return character == "`" or (character not in SIGNS and unicodedata.category(character).startswith(EDGE_CATEGORIES))


def _text_or_number(record: JsonDict, key: str) -> str | None:
    """Return a text or a number of a row as text, None if it is missing. Raises BadRow for anything else."""
    value = record.get(key)
    if isinstance(value, str):
        return value if value.strip() else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"{key} is neither text nor a number")
    return str(value)


def _prompt(
    spec: GenerationTask, item: ProblemWithExamples, subject: EvaluatedModel, longest: int | None
) -> tuple[list[int], int]:
    """(prompt ids, number of cut tokens): too long a prompt loses its oldest examples first, then its beginning."""
    problem, examples = item

    def render(shots: Sequence[Problem]) -> list[int]:
        if spec.chat:
            turns = [turn for shot in shots for turn in (Message("user", shot.question), Message("assistant", shot.answer))]
            return prompt_ids(subject.encoder, (*turns, Message("user", problem.question)))
        text = ""
        for shot in shots:
            question = spec.template.replace("{question}", shot.question)
            text += question + wording.separator(question, shot.answer) + shot.answer + spec.shots_separator
        text += spec.template.replace("{question}", problem.question)
        return [*subject.begin_ids, *subject.encoder.encode([text])[0]]

    ids = whole = render(examples)
    while longest is not None and len(ids) > longest and examples:
        examples = examples[1:]
        ids = render(examples)
    if longest is not None:
        ids = ids[-longest:]
    return ids, len(whole) - len(ids)


def _until(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(the text up to the first of `stops`, whether there was one)."""
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


MARK = "####"

LONGEST = 400  # characters of a number; the endless digits of a looping model are not a result

PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|\.(?=[eE]-?\d))?|(?<![A-Za-z])\.\d+"  # Rs.500 is no half

HAN = "零一二三四五六七八九十百千万亿"

IN_UNIT = "(?:[克米瓦卡帕赫伏安焦升牛]|字节|比特|分之)"  # units that take 千 as a prefix

ENGLISH = "(?i:thousand|million|billion|trillion)(?=s?(?![A-Za-z]))"

WORD = rf"百万|千万|万亿|百(?!帕|分之)|千(?!{IN_UNIT})|[万亿]|{ENGLISH}"

MINUS = (
    r"(?:(?<![^\W_])(?<![.)\]%°])|(?<=[是为為于於得到至和与與及或者加减減乘以])"
    rf"|(?<=[\u4e00-\u9fff])(?<![{HAN}])(?<!\d\w)(?<!\d\w\w))-"
)

CURRENCY = "$€£¥₹₩₽₺₫₴₪₱₦฿"

NUMBER = re.compile(
    rf"(?:(?<![\w.)\]%°])\+)?(?P<sign>{MINUS}|负\s?)?(?:[A-Z]{{,3}}\\?[{CURRENCY}]\s?(?P<inner>-)?)?"
    rf"(?:(?P<whole>\d+)(?: |\s?又\s?)(?=\d+/\d))?(?P<number>{PLAIN})(?:[eE](?P<exponent>[+-]?\d{{1,3}})(?!\d|\.\d))?"
    rf"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?)(?![\d/]))?\s?(?P<unit>{WORD})?"
)

FRACTION = re.compile(r"\\[dt]?frac(?:\s*{([^{}]{,99})}\s*{([^{}]{,99})}|\s?(\d)\s?(\d))")

THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})")  # as LaTeX writes them: 1{,}000 and 1\,000

SCIENTIFIC = re.compile(r"(?<=\d)\s?(?:×|\*|x|·|⋅|\\times|\\cdot)\s?10\s?\^\s?{?([+-]?\d{1,3})}?")

UNIT_POWER = re.compile(r"(?<=[A-Za-z])\^{?[+-]?\d+}?|(?<=\dm)[23](?![0-9A-Za-z])|(?<=[ckmd ]m)[23](?![0-9A-Za-z])")

DECIMAL_COMMA = re.compile(  # behind groups that are set apart by points or spaces: 1.234,5 and 1 234,5
    r"(?<![\w.,])(?<!\d )([1-9]\d{0,2}([. \u00a0\u2009\u202f])\d{3}(?:\2\d{3})*),(\d+)(?!\d|[.,]\d)"
)

GROUPED = re.compile(  # 1,00,000 in India, 1'234'567 in Switzerland, 1_000 in code, 1.234.567 in Germany
    r"(?<!\d)(?<!\d[.,'’_])(?:\d{1,3}(?:,\d{2})+,\d{3}(?!,\d)|\d{1,3}(?:['’]\d{3})+|\d{1,3}(?:_\d{3})+"
    r"|[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\.\d))(?!\d)"
)

THIN = re.compile(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))")

SPACED = re.compile(  # no part of a telephone number, of GPT-3 175B or of 12 200-kilobyte videos
    r"(?<![\dA-Za-z.,])(?<!\d )(?<![A-Za-z]-)(?:\d{1,2}(?: \d{3})+|\d{3}(?: 000)+)(?![\d/]|-\d+-|-[A-Za-z]| [\d/])"
)

TAEL = re.compile(
    rf"(?<=[{HAN}萬億])[两兩](?![百千万亿萬億])"
)  # a weight, as in 五千两; no numeral ends in this form of two

CHINESE_FRACTION = re.compile(r"(?<!\d)(\d{1,9})分之(\d{1,9})(?!\d)")

BELOW_ZERO = re.compile(rf"零下\s?(?=[\d{HAN}])")

POWER = re.compile(r"(?<![\d.,])(?!0+\^{?-)(\d{1,9})\^{?(-?\d{1,2})}?(?!\d)")

RELATION = re.compile(  # a minus behind one of these is a sign, as in \approx-6, but not in \pi-6
    r"\\(?:approx|simeq|sim|cong|equiv|eq|neq|ne|leqslant|leq|le|geqslant|geq|ge|lt|gt|ll|gg|to|rightarrow|Rightarrow|implies|iff|therefore|in"
    r"|pm|mp|times|cdot|div|quad|qquad)(?=\s?-)"
)

SPACED_MINUS = re.compile(r"(?:(?<=[=<>≈≤≥(]) ?|^\s*+(?=- [\d.][\d.,/ ]*+\W*+$))- (?=[\d.])")  # "- 5 kg" may be an item

BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{[^{}]*})*)}")

SIMPLE = str.maketrans("−﹣‐⁄∕", "---//")

RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"

TRADITIONAL = str.maketrans("萬億點負壹贰叁肆伍陆柒捌玖拾佰仟〇两兩貳參陸", "万亿点负一二三四五六七八九十百千零二二二三六")

DIGITS = {digit: value for value, digit in enumerate("零一二三四五六七八九")}

UNITS = {
    "十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8, "百万": 10**6, "千万": 10**7, "万亿": 10**12,
    "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip

SPOKEN = "百千万亿"  # a digit behind one is the next smaller power of ten: 一百二 is 120, 一万二 is 12,000

COUNTED = re.compile("[个個首人名位岁歲年月日天次篇卷章回条條件本匹家户口只隻]")  # the short form never precedes these

HAN_NUMBER = re.compile(rf"负?(?:(?:[{HAN}]{{1,40}}又)?[{HAN}]{{1,40}}分之)?[{HAN}]+(?:点[零一二三四五六七八九]+)?")

UNIT_OF_THOUSANDS = re.compile(rf"(?<=千){IN_UNIT}|(?<=百)帕")

ALLOWED_AROUND = f" .。%\\{CURRENCY}"  # what may stand beside a number that is all of an answer

Located = tuple[int, int, Fraction]  # (start, end) of a number in a text, and the number


def answer_in(text: str) -> Fraction | None:
    """Return the number that a text gives as its result, or None."""
    if MARK in text:
        values = numbers(text.rsplit(MARK, 1)[1])
        if values:
            return values[0]
    boxed = BOXED.findall(text)
    return next((values[-1] for segment in [*reversed(boxed[-1:]), text] if (values := numbers(segment))), None)


def numbers(text: str) -> list[Fraction]:
    """Return all numbers of a text in order, except those longer than LONGEST characters."""
    return [value for _, _, value in _located(_plain(text))]


def is_number(text: str) -> bool:
    """Whether a text is a single number, apart from a currency, a percent sign or a full stop around it."""
    plain = _plain(text).strip()
    located = _located(plain)
    return len(located) == 1 and not (plain[: located[0][0]] + plain[located[0][1] :]).strip(ALLOWED_AROUND)


def _plain(text: str) -> str:
    """Normalise full-width, traditional and other forms, fractions and superscripts: 2½ as 2 1/2, 10³ as 1000."""
    text = DECIMAL_COMMA.sub(lambda match: f"{re.sub(r'[^0-9]', '', match[1])}.{match[3]}", text)
    bare = TAEL.sub(" ", THIN.sub(",", text))
    spaced = "".join(_separated(previous, character) for previous, character in pairwise(" " + bare))
    plain = unicodedata.normalize("NFKC", spaced).translate(SIMPLE).translate(TRADITIONAL)
    plain = SPACED_MINUS.sub("-", RELATION.sub("=", EN_DASH_AS_MINUS.sub("-", plain)))
    plain = GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), THOUSANDS.sub(",", plain))
    plain = SCIENTIFIC.sub(r"e\1", plain)
    plain = SPACED.sub(lambda match: match[0].replace(" ", ""), plain)
    plain = BELOW_ZERO.sub("负", CHINESE_FRACTION.sub(r"\2/\1", plain))
    plain = POWER.sub(lambda match: str(Fraction(match[1]) ** int(match[2])), UNIT_POWER.sub("", plain))
    return FRACTION.sub(_fraction, plain)


def _separated(previous: str, character: str) -> str:
    """Put a separator before a fraction or superscript character: NFKC alone would make 21/2 of 2½ and 103 of 10³."""
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return f" {character}" if previous.isdigit() else character
    return f"^{character}" if character in RAISED and previous not in RAISED else character


def _fraction(match: re.Match[str]) -> str:
    above, below = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    mixed = match.start() and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{above.strip()}/{below.strip()}"


def _located(plain: str) -> list[Located]:
    """Locate the numbers in a text that `_plain` normalised, in order."""
    located = _with_digits(plain)
    if located or any(character.isdigit() for character in plain):
        return located
    for match in HAN_NUMBER.finditer(plain):
        numeral = match[0][:-1] if _ends_in_unit(match) else match[0]
        if len(numeral) <= LONGEST and numeral.strip("负"):
            spoken = not COUNTED.match(plain, match.end())
            located.append((match.start(), match.start() + len(numeral), _of_han(numeral, spoken=spoken)))
    return located


def _ends_in_unit(match: re.Match[str]) -> bool:
    """Whether the numeral's last character belongs to a unit: in 十千克 it does, in 一万三千米 it does not."""
    return not set(match[0]) & set("万亿") and UNIT_OF_THOUSANDS.match(match.string, match.end()) is not None


def _with_digits(plain: str) -> list[Located]:
    located: list[Located] = []
    unit, unit_end, sign = 0, -1, 1  # of the previous number
    for match in NUMBER.finditer(plain):
        if len(match[0]) > LONGEST:
            continue
        addend = _addend(match, unit) if match.start() == unit_end else None
        if addend is None:
            sign = -1 if match["sign"] or match["inner"] else 1
            located += [(match.start(), match.end(), sign * value) for value in _values(match)]
        else:
            begin, _, value = located[-1]
            located[-1] = begin, match.end(), value + sign * addend
        unit, unit_end = _unit(match), match.end("unit")
    return located


def _values(match: re.Match[str]) -> list[Fraction]:
    value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
    below = Fraction(match["below"] or 1)
    if not below:  # 3/0 is two numbers
        return [value, below]
    return [(int(match["whole"] or 0) + value / below) * _unit(match)]


def _unit(match: re.Match[str]) -> int:
    return UNITS.get((match["unit"] or "").lower(), 1)


def _addend(match: re.Match[str], unit: int) -> int | None:
    """Return what a number adds to the one right before it, as 2千 in 1万2千; None if it is a number of its own."""
    unit_value = _unit(match)
    if not (match["number"] + (match["unit"] or "") == match[0].rstrip() and match["number"].isdecimal()):
        return None
    count = int(match["number"]) * unit_value
    spoken = not COUNTED.match(match.string, match.end())
    if unit_value == 1 and spoken and len(match["number"]) == 1 and unit in map(UNITS.__getitem__, SPOKEN):
        return count * unit // 10
    return count if count < unit and (unit_value > 1 or count * 10 >= unit) else None


def _of_han(text: str, *, spoken: bool = False) -> Fraction:
    """Parse a Chinese numeral: 三百二十, 二〇二四, 负二点五, 三分之二, 三又二分之一; if `spoken`, 一万二 is 12,000."""
    sign, text = (-1, text[1:]) if text.startswith("负") else (1, text)
    if "又" in text:
        whole, text = text.split("又")
        return sign * (_of_han(whole) + _of_han(text))
    if "分之" in text:
        below, above = text.split("分之")
        divisor = Fraction(1) if below == "百" else _of_han(below)  # 百分之五十 as 50 %
        return sign * _of_han(above) / divisor if divisor else Fraction(0)
    whole, _, decimals = text.partition("点")
    tail = Fraction(_digits(decimals), 10 ** len(decimals))
    if not any(han in UNITS for han in whole):  # digit after digit, as years are read
        return sign * (_digits(whole) + tail)
    total = section = digit = 0
    for han in whole:
        unit = UNITS.get(han, 0)
        if not unit:
            digit = DIGITS[han]
        elif unit < 10**4:
            section, digit = section + (digit or 1) * unit, 0
        elif unit == 10**4 or not total:
            total, section, digit = total + (section + digit or 1) * unit, 0, 0
        else:
            total, section, digit = (total + section + digit) * unit, 0, 0
    if spoken and len(whole) > 2 and whole[-2] in SPOKEN and not decimals:
        digit *= UNITS[whole[-2]] // 10
    return sign * (total + section + digit + tail)


def _digits(text: str) -> int:
    """Parse Chinese digits one after the other; none are 0."""
    return int("".join(str(DIGITS[han]) for han in text) or 0)
