"""Which commit of ttrain's own code runs: recorded with every artifact, part of no key (that holds the code itself)."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from ttrain.core.files import parse_json

PACKAGE = Path(__file__).parents[1]
SECONDS = 5.0
CHANGED = "+changes"  # behind the commit of a checkout with changes that are in no commit


@functools.cache  # two processes of git, 5 ms each, for all stages of a run
def commit() -> str | None:
    """In hex, with `+changes` where the checkout has some; None where ttrain is neither in one nor installed from one."""
    if _git("ls-files", "__init__.py"):  # else the repository is somebody's that has this Python's packages inside
        head = _git("rev-parse", "HEAD")
        return head and head + (CHANGED if _git("status", "--porcelain", "--untracked-files=no", "--", ".") else "")
    from importlib import metadata

    try:
        told = metadata.distribution("ttrain").read_text("direct_url.json")  # of `pip install git+https://...`
        return str(parse_json(told or "{}")["vcs_info"]["commit_id"])
    except (metadata.PackageNotFoundError, KeyError, ValueError):
        return None


def _git(*words: str) -> str:
    """What git says; nothing where there is no git, no repository or no answer."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=PACKAGE,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
