"""What signals to stop mean to a process that waits for others, by real processes that get them."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

PROGRAM = """
import sys, time
from ttrain.errors import Interrupted
from ttrain.core.signals import catching_signals, handling_signals
asked = []

def end_at_once(signum):
    print("ended at once"); sys.exit(1)

try:
    with handling_signals(end_at_once):
        with catching_signals(lambda signum: (asked.append(signum), print("asked", flush=True))):
            print("ready", flush=True)
            line = sys.stdin.readline()
        sys.stdin.readline()  # what closes the record, after the stages
        if asked:
            raise Interrupted("stopped", asked[0])
except Interrupted as error:
    print(error)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def program(*prefix: str) -> Iterator[subprocess.Popen[str]]:
    command = [*prefix, sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def end_of(process: subprocess.Popen[str], text: str) -> tuple[str, int]:
    said, _ = process.communicate(text, timeout=60)
    return said, process.returncode


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_gives_the_exit_code(signum: int, code: int) -> None:
    with program() as process:
        process.send_signal(signum)
        assert end_of(process, "\n\n") == ("asked\nstopped\n", code)


@pytest.mark.parametrize("signums", [(signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP)])
def test_a_hangup_is_no_second_signal_also_while_the_record_is_closed(signums: Sequence[int]) -> None:
    with program() as process:
        process.send_signal(signums[0])
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        process.send_signal(signums[1])
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.send_signal(signums[1])
        assert end_of(process, "\n") == ("stopped\n", 128 + signums[0])


def test_a_second_signal_ends_at_once() -> None:
    with program() as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGTERM)
        said, code = end_of(process, "")
        assert "interrupted twice" in said and code == 143


def test_nohup_is_obeyed() -> None:
    with program("nohup") as process:
        process.send_signal(signal.SIGHUP)
        assert end_of(process, "\n\n") == ("", 0)


def test_a_handler_may_print_in_the_middle_of_what_was_being_printed() -> None:
    code = (
        "import signal, time\nfrom ttrain.core.terminal import guard_streams\nguard_streams()\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('handled', flush=True))\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "print('x' * 1_000_000, flush=True)"  # far more than a pipe holds
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert select.select([process.stdout], [], [], 60)[0]
        time.sleep(0.3)  # so that the signal finds it writing
        said = process.stdout.read()
        assert said.count("x") == 1_000_000 and "handled" in said and process.stderr.read() == ""
