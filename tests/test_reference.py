"""docs/reference.md is what the code says; TTRAIN_WRITE_REFERENCE=1 rewrites it."""

import os

from support import reference


def test_the_reference_is_that_of_the_code() -> None:
    text = reference.page()
    if os.environ.get("TTRAIN_WRITE_REFERENCE"):
        reference.PAGE.write_text(text, encoding="utf-8")
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == text, "docs/reference.md is out of date; write it as above"
