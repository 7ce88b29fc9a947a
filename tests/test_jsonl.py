"""JSON Lines: what ends a line, what a bad one costs, and that nothing but a DataError ever comes out."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ttrain.data.jsonl import CHUNK_BYTES, Tally, records
from ttrain.data.sources import document_parser, parse_conversation, read
from ttrain.errors import DataError

HOSTILE = Path(__file__).parents[2] / "shared" / "data" / "hostile"
MIB = 1 << 20


def rows_of(path: Path, *more: Path, limit: int = MIB) -> tuple[list[tuple[int, Any]], Tally]:
    """[(line number, object)] and the tally."""
    tally = Tally()
    found = [(number, value) for _, number, value in records([str(path), *map(str, more)], tally, limit)]
    tally.kept += len(found)
    return found, tally


def written(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def texts(path: Path, **named: Any) -> list[str]:
    return [value["text"] for _, value in rows_of(path, **named)[0]]


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"text":"a"}\n{"text":"b"}\n', ["a", "b"]),
        (b'{"text":"a"}\n{"text":"b"}', ["a", "b"]),
        (b'{"text":"a"}\r\n{"text":"b"}\r\n', ["a", "b"]),
        (b'\xef\xbb\xbf{"text":"a"}\n', ["a"]),
        (b'\n  \n{"text":"a"}\n\t\r\n\n', ["a"]),
        ('{"text":"a\u2028b\u2029c\x85d"}\n{"text":"\u2028"}\n'.encode(), ["a\u2028b\u2029c\x85d", "\u2028"]),
        (b'{"text":"a\\u0000\\n\\u001c"}\n', ["a\0\n\x1c"]),
        (b' {"text":"a"} \n', ["a"]),
        (b'{"text":"1","text":"2"}\n', ["2"]),
        (b'{"text":"\\ud83d\\ude00"}\n', ["\U0001f600"]),
    ],
    ids=["plain", "no last newline", "crlf", "bom", "blank", "u2028", "escaped control", "spaces", "doubled key", "pair"],
)  # fmt: skip
def test_only_a_newline_ends_a_line_and_good_lines_arrive_whole(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    path = written(tmp_path, data)
    found, tally = rows_of(path)
    assert [value["text"] for _, value in found] == expected
    assert tally.rows == len(expected)
    assert not tally.rejected


def test_a_mark_is_stripped_at_the_start_of_a_file_only(tmp_path: Path) -> None:
    found, tally = rows_of(written(tmp_path, '\ufeff{"text":"\ufeffa"}\n\ufeff{"text":"b"}\n'.encode()))
    assert [value["text"] for _, value in found] == ["\ufeffa"]
    assert tally.rejected.total() == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "JSON"),
        (b"not json", "JSON"),
        (b'{"text": NaN}', "JSON"),
        (b'{"text": Infinity}', "JSON"),
        (b'{"text": "\\ud800"}', "JSON"),
        (b'{"text": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b'{"text": "a\x01"}', "JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "JSON"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "JSON"),
        (b"[1, 2]", "list"),
        (b'"text"', "str"),
        (b"1", "int"),
        (b"null", "NoneType"),
        (b'{"text": "a"} {"text": "b"}', "JSON"),
        (b'{"text": "' + b"x" * MIB + b'"}', "max_line_bytes"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_bad_line_is_counted_with_its_place_and_costs_its_neighbours_nothing(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = written(tmp_path, b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    tally = Tally(quarantine=io.StringIO())
    found = [(number, value["text"]) for _, number, value in records([str(path)], tally, MIB)]
    assert found == [(1, "before"), (3, "after")]
    assert (tally.rows, tally.rejected.total()) == (3, 1)
    assert tally.first_rejected.startswith(f"{path}:2: ")
    assert reason in tally.first_rejected
    assert isinstance(tally.quarantine, io.StringIO)
    kept_aside = json.loads(tally.quarantine.getvalue())
    assert (kept_aside["file"], kept_aside["line"]) == (str(path), 2)


def test_a_number_of_any_size_ends_in_a_row_or_a_rejection(tmp_path: Path) -> None:
    data = b'{"text": "a", "n": ' + b"9" * 5000 + b'}\n{"text": "b", "n": 1e999}\n{"text": "c", "n": -0}\n'
    found, tally = rows_of(written(tmp_path, data))
    assert "c" in [value["text"] for _, value in found]
    assert len(found) + tally.rejected.total() == 3


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_the_limit_of_a_line_is_exact_whether_or_not_it_ends(tmp_path: Path, extra: int, end: bytes) -> None:
    line = b'{"text": "xxxx"}'
    found, tally = rows_of(written(tmp_path, line + end), limit=len(line) - extra)
    assert (len(found), tally.rejected.total()) == (1 - extra, extra)


def test_lines_are_whole_wherever_the_chunks_are_cut(tmp_path: Path) -> None:
    """Around the border of the first chunk: a line that ends before it, at it, after it, and one that spans three."""
    for shift in (-2, -1, 0, 1, 2):
        first = json.dumps({"text": "x" * (CHUNK_BYTES - 12 + shift)}).encode()
        long = json.dumps({"text": "y" * (2 * CHUNK_BYTES)}).encode()
        path = written(tmp_path, b"\n".join((first, b'{"text": "a"}', long, b'{"text": "b"}')))
        found = texts(path, limit=4 * CHUNK_BYTES)
        assert [len(text) for text in found] == [CHUNK_BYTES - 12 + shift, 1, 2 * CHUNK_BYTES, 1]
        assert texts(path, limit=100) == ["a", "b"]


GOOD = b'{"text":"a"}\n{"text":"b"}\n'


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        gzip.compress(GOOD),
        gzip.compress(GOOD[:20]) + gzip.compress(GOOD[20:]),
        gzip.compress(b"") + gzip.compress(GOOD),
        zstd(GOOD),
        zstd(GOOD[:20]) + zstd(GOOD[20:]),
    ],
    ids=["plain", "gzip", "two members", "empty member", "zstd", "two frames"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "文件 名 (1) #%20.jsonl"])
def test_compression_is_found_by_content_whatever_the_name(tmp_path: Path, data: bytes, name: str) -> None:
    assert texts(written(tmp_path, data, name)) == ["a", "b"]


LARGE = b"".join(b'{"text":"%d"}\n' % (n * n) for n in range(20_000))


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_cut_archive_names_its_file_and_is_never_taken_for_a_shorter_one(tmp_path: Path, pack: Any, share: float) -> None:
    data = pack(LARGE)
    path = written(tmp_path, data[: max(5, int(len(data) * share))])
    with pytest.raises(DataError, match="truncated") as raised:
        rows_of(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_an_archive_cut_in_its_last_bytes_is_truncated_too(tmp_path: Path, pack: Any) -> None:
    data = pack(LARGE)
    for cut in (1, 2, 3, 4, 7):
        with pytest.raises(DataError, match="truncated"):
            rows_of(written(tmp_path, data[:-cut]))


@pytest.mark.parametrize(
    ("pack", "place"),
    [(gzip.compress, 12), (gzip.compress, 0.3), (gzip.compress, 0.9), (gzip.compress, -5), (zstd, 4), (zstd, 9)],
)
def test_a_flipped_byte_in_an_archive_is_an_error_about_that_file(tmp_path: Path, pack: Any, place: float) -> None:
    """For zstd in its headers, since pyarrow writes no checksum and so a flipped letter stays a letter."""
    data = bytearray(pack(LARGE))
    data[place if isinstance(place, int) else int(place * len(data))] ^= 0xFF
    path = written(tmp_path, bytes(data))
    with pytest.raises(DataError, match=r"corrupt|truncated") as raised:
        rows_of(path)
    assert str(path) in str(raised.value)


def test_a_head_of_an_archive_alone_is_no_empty_file(tmp_path: Path) -> None:
    for head in (gzip.compress(GOOD)[:3], zstd(GOOD)[:4], zstd(GOOD)[:6]):
        with pytest.raises(DataError):
            rows_of(written(tmp_path, head))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_one_clear_error_and_not_one_a_line(tmp_path: Path, encoding: str) -> None:
    text = '{"text":"a"}\n' if encoding == "utf-16" else '\ufeff{"text":"a"}\n'
    with pytest.raises(DataError, match="UTF-16"):
        rows_of(written(tmp_path, text.encode(encoding)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(DataError, match="cannot read") as raised:
            rows_of(path)
        assert str(path) in str(raised.value)


def test_several_files_are_read_in_the_given_order_with_their_own_line_numbers(tmp_path: Path) -> None:
    one, two = written(tmp_path, GOOD, "1"), written(tmp_path, b'\n{"text":"c"}\nbad\n', "2")
    found, tally = rows_of(two, one)
    assert [(number, value["text"]) for number, value in found] == [(2, "c"), (1, "a"), (2, "b")]
    assert tally.first_rejected.startswith(f"{two}:3: ")


@pytest.mark.parametrize("data", [b"", b"\n \n", gzip.compress(b"")], ids=["nothing", "blank", "empty archive"])
def test_an_empty_file_has_no_rows_and_the_check_says_so(tmp_path: Path, data: bytes) -> None:
    found, tally = rows_of(written(tmp_path, data))
    assert (found, tally.rows) == ([], 0)
    with pytest.raises(DataError, match=r"data\.pretrain: no rows are left of 0"):
        tally.check("data.pretrain", 1.0, "the key 'text'")


def test_too_many_bad_rows_name_the_first_the_field_and_the_keys_that_are_there(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"text":"a"}\n' * 99 + b'{"txet":"b", "id": 1}\n')
    tally = Tally()
    assert len(list(read([str(path)], document_parser("text"), tally, MIB))) == 99
    tally.check("data.pretrain", 0.01, "the key 'text'")
    with pytest.raises(DataError) as raised:
        tally.check("data.pretrain", 0.009, "the key 'text'")
    message = str(raised.value)
    for part in ("data.pretrain", "1 of 100", "rejected_fraction=0.009", f"{path}:100", "'text'", "txet", "id"):
        assert part in message


def test_nothing_kept_names_the_keys_although_any_share_of_bad_rows_is_allowed(tmp_path: Path) -> None:
    path, tally = written(tmp_path, b'{"content":"a"}\n'), Tally()
    assert list(read([str(path)], document_parser("text"), tally, MIB)) == []
    with pytest.raises(DataError, match=r"no rows are left of 1.*keys seen: content"):
        tally.check("data.pretrain", 1.0, "the key 'text'")


def assert_adds_up(tally: Tally, kept: int) -> None:
    assert tally.kept == kept
    assert tally.rows == tally.kept + tally.skipped.total() + tally.rejected.total()
    json.dumps(tally.to_json())


SHAPED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["text", "messages", "conversations", "role", "content", "from", "value", "instruction", "output"]
            ),
            inner | st.sampled_from(["user", "assistant", "system", "human", "gpt"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
LINES = st.lists(st.binary(max_size=40) | SHAPED.map(lambda value: json.dumps(value).encode()), max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, packed=st.booleans())
@example(lines=[b"\x1f\x8b\x08"], packed=False)
@example(lines=[b"\x28\xb5\x2f\xfd\x00"], packed=False)
@example(lines=[b"\xff\xfe"], packed=True)
def test_whatever_the_bytes_are_the_rows_add_up_or_a_data_error_says_why(
    tmp_path: Path, lines: list[bytes], packed: bool
) -> None:
    data = b"\n".join(lines)
    path = written(tmp_path, gzip.compress(data) if packed else data)
    for parse in (document_parser("text"), parse_conversation):
        tally = Tally()
        try:
            kept = len(list(read([str(path)], parse, tally, 1024)))
        except DataError as error:
            assert str(path) in str(error)
            continue
        assert_adds_up(tally, kept)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60), head=st.sampled_from([gzip.compress(GOOD)[:10], zstd(GOOD)[:9], zstd(GOOD)[:5]]))
def test_a_broken_archive_never_ends_in_anything_but_a_data_error(tmp_path: Path, data: bytes, head: bytes) -> None:
    path, tally = written(tmp_path, head + data), Tally()
    try:
        kept = len(list(read([str(path)], document_parser("text"), tally, 1024)))
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert_adds_up(tally, kept)


HOSTILE_FILES = sorted(HOSTILE.glob("[0-5]*.jsonl*"))

if HOSTILE_FILES:  # a collection beside some checkouts; where it is missing there is nothing to skip

    @pytest.mark.parametrize("path", HOSTILE_FILES, ids=lambda path: path.name)
    def test_hostile_files_add_up_or_are_refused_by_name(path: Path) -> None:
        for parse in (document_parser("text"), parse_conversation):
            tally = Tally()
            try:
                kept = len(list(read([str(path)], parse, tally, 64 << 20)))
            except DataError as error:
                assert path.name in str(error)
                continue
            assert_adds_up(tally, kept)
