"""Standard output and error whose reader is gone, whose disk is full, or which were closed before the program began."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.core.files import ProgressWriter
from ttrain.core.terminal import READER_IS_GONE

PRELUDE = "import os, sys\nfrom ttrain.core.terminal import guard_streams, outlast_output\nguard_streams()\n"
MANY_LINES = "for number in range(20_000): print('line', number)\n"
WORKS = f"outlast_output()\n{MANY_LINES}os.write(int(sys.argv[1]), b'to the end')\n"
NOTE = "standard output cannot be written ({}); the command goes on without it\n"


def output_of(code: str, **streams: Any) -> tuple[int, str, str]:
    """(exit code, what the program wrote into a pipe of its own, its standard error)."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as result:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(writer)],
            pass_fds=(writer,), stderr=streams.pop("stderr", subprocess.PIPE), text=True, **streams,
        )  # fmt: skip
        os.close(writer)
        _, error = process.communicate(timeout=60)
        return process.returncode, result.read().decode(), error or ""


def pipe_without_a_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_run_goes_on_when_the_reader_of_its_output_is_gone() -> None:
    assert output_of(WORKS, stdout=pipe_without_a_reader()) == (0, "to the end", NOTE.format("Broken pipe"))


def test_a_run_goes_on_when_the_disk_of_its_output_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        assert output_of(WORKS, stdout=full) == (0, "to the end", NOTE.format("No space left on device"))


def test_a_run_goes_on_when_both_streams_are_gone() -> None:
    gone = pipe_without_a_reader()
    code = f"outlast_output()\nimport logging, warnings\nlogging.warning('unread')\nwarnings.warn('unread')\n{WORKS}"
    assert output_of(code, stdout=gone, stderr=gone)[:2] == (0, "to the end")


def test_a_program_whose_streams_were_closed_opens_its_files_elsewhere(tmp_path: Path) -> None:
    code = f"{WORKS}file = open('data', 'wb'); assert file.fileno() > 2\nprint('lost'); print('lost', file=sys.stderr)"
    command = f'exec {sys.executable} -c "$CODE" 9 <&- >&- 2>&- 9>{tmp_path / "result"}'
    environment = {**os.environ, "CODE": PRELUDE + code}
    done = subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "to the end" and (tmp_path / "data").read_bytes() == b""


def test_a_command_that_prints_ends_quietly_without_its_reader() -> None:
    assert output_of(MANY_LINES, stdout=pipe_without_a_reader()) == (READER_IS_GONE, "", "")
    few = "from ttrain.cli.main import main\nmain(['--help'])"  # what fails is the last flush
    assert output_of(few, stdout=pipe_without_a_reader()) == (READER_IS_GONE, "", "")


def test_a_command_that_prints_onto_a_full_disk_fails_with_a_message() -> None:
    with Path("/dev/full").open("w") as full:
        ended = output_of("from ttrain.cli.main import main\nmain(['--help'])", stdout=full)
    assert ended == (1, "", "error: standard output cannot be written: No space left on device\n")


def test_a_guarded_stream_is_what_libraries_expect() -> None:
    code = (
        "import io; assert type(sys.stdout) is io.TextIOWrapper and sys.stdout.fileno() == 1\n"
        "print('é \\ud800', flush=True); sys.stdout.buffer.write(b'bytes\\n')\n"
        "guard_streams(); print('again')"  # as where an agent becomes a worker
    )
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("é ?\nbytes\nagain\n", "")


def test_a_stage_outlives_a_full_disk_below_its_log() -> None:
    code = (
        f"from ttrain.pipeline.stage_worker import log, set_up\nset_up()\nlog.info('unread')\n{WORKS.partition(chr(10))[2]}"
    )
    with Path("/dev/full").open("w") as full:
        assert output_of(code, stdout=full, stderr=full)[:2] == (0, "to the end")


def test_a_log_of_a_flow_run_outlives_the_runner_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.flows import deployments  # with Prefect, which a process of its own would take 3 s to load

    lines: list[str] = []
    logger = SimpleNamespace(info=lambda form, line: lines.append(form % line))
    monkeypatch.setattr(deployments, "get_run_logger", lambda: logger)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.dup2(pipe_without_a_reader(), 1)
            sys.stdout = sys.__stdout__
            deployments.set_up_logging()
            console = deployments.flow_run_console()
            console.print("[green]✓[/] pretrain: 3 s")
            console.print("> sft")
            os.write(writer, "|".join(lines).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as result:
        assert result.read().decode() == "✓ pretrain: 3 s|> sft"
    os.waitpid(child, 0)


def test_progress_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    ProgressWriter(tmp_path / "gone" / "progress.json").update(1, 2, "tokens")
    assert not any(tmp_path.iterdir())
