"""Signals to stop a command, and output whose reader is gone or whose disk is full."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import sys
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
WORKS = """
import os, sys
from ttrain.core.terminal import guard_streams, outlast_output
guard_streams()
outlast_output()
for number in range(20_000):
    print('line', number)
os.write(int(sys.argv[1]), b'to the end')
"""
NOTE = "standard output cannot be written ({}); the command goes on without it\n"
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def outcome_of(lines: str, *signals: int, under: tuple[str, ...] = ()) -> tuple[str, int]:
    with subprocess.Popen([*under, sys.executable, "-c", PROGRAM], **PIPES) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for number, signum in enumerate(signals):
            process.send_signal(signum)
            if not number and not under:
                assert process.stdout.readline() == "asked\n"
        out, _ = process.communicate(lines, timeout=60)
    return out, process.returncode


def test_signals_ask_to_stop_a_second_one_ends_at_once_and_nohup_is_obeyed() -> None:
    assert outcome_of("\n\n", signal.SIGINT) == ("stopped\n", 130)
    # As `timeout` sends it: to its command, then to the group.
    assert outcome_of("\n\n", signal.SIGTERM, signal.SIGTERM) == ("stopped\n", 143)
    out, code = outcome_of("", signal.SIGHUP, signal.SIGTERM)
    assert "interrupted twice" in out and code == 143
    assert outcome_of("\n\n", signal.SIGHUP, under=("nohup",)) == ("", 0)


def output_of(stdout: Any) -> tuple[int, str, str]:
    """(exit code, what the program wrote into a pipe of its own, its standard error)."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as result:
        command = [sys.executable, "-c", WORKS, str(writer)]
        pipes: Any = {**PIPES, "stdout": stdout, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, pass_fds=(writer,), **pipes)
        os.close(writer)
        _, error = process.communicate(timeout=60)
        return process.returncode, result.read().decode(), error


def test_a_run_continues_when_the_reader_of_its_output_is_gone_or_its_disk_is_full() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert output_of(writer) == (0, "to the end", NOTE.format("Broken pipe"))
    with Path("/dev/full").open("w") as full:
        assert output_of(full) == (0, "to the end", NOTE.format("No space left on device"))
