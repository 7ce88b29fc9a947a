"""A pipeline on a full disk, with room again, and on a disk that cannot be written."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.pipeline_home import Cli, write_corpus

# A stage of a second; the others are made in the same way.
ALONE = ("--engine", "none", "tracking.enabled=false")
TOKENIZER = ("pipeline", "run", "full", "--until", "tokenizer", *ALONE)

# In a mount namespace of its own: a home on a disk of so many kilobytes; then of 64 MB; then one
# that cannot be written.
DISK = """
set -u
mount -t tmpfs -o size=$1k none "$TTRAIN_HOME" || exit 99
shift
"$@" > small.txt 2>&1; echo "small $?"
mount -o remount,size=64m "$TTRAIN_HOME"
"$@" > large.txt 2>&1; echo "large $?"
mount -o remount,ro "$TTRAIN_HOME"
"$@" > cached.txt 2>&1; echo "cached $?"
"$@" tokenizer.vocab_size=390 > refused.txt 2>&1; echo "refused $?"
%s artifacts verify > verify.txt 2>&1; echo "verify $?"
%s artifacts list --json > list.txt 2>&1; echo "list $?"
""".replace("%s", f"{sys.executable} -P -c 'from ttrain.cli.main import main; main()'")
pytestmark = pytest.mark.soak  # in short: tests/store/test_integrity.py, test_store.py


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    write_corpus(tmp_path / "data")
    return Cli(tmp_path / "home", tmp_path / "data")


def own_mounts() -> list[str]:
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        with contextlib.suppress(OSError):
            if not subprocess.call([*command, "mount", "-t", "tmpfs", "none", "/mnt"]):
                return command
    pytest.skip("this machine lets no process mount a disk of its own")


def test_a_full_disk_ends_a_run_in_order_and_with_room_it_goes_on_and_a_cached_one_needs_none(
    cli: Cli,
) -> None:
    cli.home.mkdir()
    command = [*own_mounts(), "sh", "-c", DISK, "sh", "4", *cli.command(*TOKENIZER)]
    output = subprocess.check_output(command, env=cli.environment, cwd=cli.data, text=True)
    texts = {path.stem: path.read_text() for path in cli.data.glob("*.txt")}
    codes = {name: int(code) for name, code in map(str.split, output.splitlines())}
    assert "Traceback" not in "".join(texts.values())
    expected = {"small": 1, "large": 0, "cached": 0, "refused": 2, "verify": 0, "list": 0}
    assert codes == expected, texts
    assert os.strerror(errno.ENOSPC) in texts["small"]
    assert "cached" in texts["cached"]
    assert "set TTRAIN_HOME" in texts["refused"]
    assert Counter(row["state"] for row in json.loads(texts["list"])) == {"finished": 1}
