"""Figures, sizes, times and lists as text."""

from __future__ import annotations

import math

from ttrain.core.text import (
    counted,
    first_of,
    format_duration,
    format_number,
    format_size,
    truncated,
)

NUMBERS = {
    (None, "loss"): "–",
    (math.nan, "loss"): "nan",
    (1.40958, "eval/bits_per_byte"): "1.4096",
    (12_829.0, "tokens"): "12,829",
    (7_384.0, "train_seconds"): "2 h 03 min",
    (1.5e9, "memory_bytes"): "1.5 GB",
}
SIZES = {9_999: "9,999 B", 10_000: "10 kB", 999_600: "1 MB", 5e15: "5e+03 TB"}
SECONDS = {None: "–", math.inf: "unknown", 99.6: "1 min 40 s"}


def test_values_are_written_as_a_person_reads_them() -> None:
    assert {given: format_number(*given) for given in NUMBERS} == NUMBERS
    assert {count: format_size(count) for count in SIZES} == SIZES
    assert {seconds: format_duration(seconds) for seconds in SECONDS} == SECONDS
    assert (first_of("abc", 3), first_of("abcd", 2)) == ("a, b, c", "a, b and 2 more")
    assert (truncated("12345", 5), truncated("123456", 5)) == ("12345", "12...")
    assert (counted(1, "row"), counted(1200, "row")) == ("1 row", "1,200 rows")
