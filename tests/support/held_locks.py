"""Locks of the store that another process holds."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

HOLD = """
import sys
from pathlib import Path
from ttrain.store.artifacts import ArtifactStore
with ArtifactStore(Path(sys.argv[1])).lock(sys.argv[2], sys.argv[3]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def held_elsewhere(home: Path, stage: str, key: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", HOLD, str(home), stage, key]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
