"""The store under attack, from the command line: a full disk, a disk that cannot be written, a run that was killed."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.pipeline_home import Cli, write_corpus

# A stage of a second; the others are made in the same way.
TOKENIZER = (
    "pipeline",
    "run",
    "full",
    "--engine",
    "none",
    "--until",
    "tokenizer",
    "tracking.enabled=false",
)

# In a mount namespace of its own: a home on a disk of so many kilobytes; then of 64 MB; then one that cannot be written.
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


pytestmark = (
    pytest.mark.soak
)  # in short: tests/store/test_integrity.py, test_store.py and test_runs.py


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    write_corpus(tmp_path / "data")
    return Cli(tmp_path / "home", tmp_path / "data")


def own_mounts() -> list[str]:
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        try:
            tried = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
            )
        except OSError:
            return []
        if tried.returncode == 0:
            return command
    return []


@pytest.mark.parametrize(
    "kilobytes", [4, *(pytest.param(size, marks=pytest.mark.long) for size in (24, 48, 64))]
)
def test_a_full_disk_ends_a_run_in_order_and_with_room_it_goes_on_and_a_cached_one_needs_none(
    cli: Cli, kilobytes: int
) -> None:
    isolated = own_mounts()
    if not isolated:
        pytest.skip("this machine lets no process mount a disk of its own")
    cli.home.mkdir()
    command = [*isolated, "sh", "-c", DISK, "sh", str(kilobytes), *cli.command(*TOKENIZER)]
    done = subprocess.run(
        command,
        env=cli.environment,
        cwd=cli.data,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    texts = {path.stem: path.read_text() for path in cli.data.glob("*.txt")}
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert "Traceback" not in "".join(texts.values())
    assert codes["small"] == "1" and "No space left on device" in texts["small"], texts["small"]
    assert codes["large"] == "0", texts["large"]
    assert codes["cached"] == "0" and "everything is cached" in texts["cached"], texts["cached"]
    assert (
        codes["refused"] == "2" and "set TTRAIN_HOME to a directory of yours" in texts["refused"]
    ), texts["refused"]
    assert codes["verify"] == "0", texts["verify"]
    assert Counter(row["state"] for row in json.loads(texts["list"])) == {"finished": 1}
