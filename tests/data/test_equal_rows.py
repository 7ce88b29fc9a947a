"""Which rows are kept of those with equal content."""

import numpy as np

from ttrain.data.records import LABEL_CHARACTERS, labels_of
from ttrain.data.selection import is_first


def test_of_rows_with_equal_halves_of_their_hash_the_first_is_kept() -> None:
    rows = [(1, 5, 0, 0), (2, 5, 0, 1), (1, 5, 7, 2), (1, 6, 0, 3), (2, 5, 0, 4), (1, 6, 0, 5)]
    table = np.array(rows, np.uint64)
    assert is_first(table).tolist() == [True, True, False, True, False, False]


def test_a_label_has_at_most_its_number_of_characters() -> None:
    longest = "x" * LABEL_CHARACTERS
    assert labels_of({"source": longest, "lang": longest + "x"}) == (("source", longest),)
    assert labels_of({"source": ""}) == ()
