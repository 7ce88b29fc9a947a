"""Kills at random points of `ttrain data shard`. `make soak` runs it; TTRAIN_SOAK_KILLS says how many kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.tiny_data import documents, make_tokenizer

from ttrain.core.hashing import sha256_file
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError

pytestmark = pytest.mark.soak
TTRAIN = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]


def shard(root: Path, out: str, *files: str) -> subprocess.Popen[bytes]:
    options = f"--tokenizer tokenizer --out {out} --workers 2 --block-bytes 65536 --val-fraction 0.05".split()
    return subprocess.Popen(
        [*TTRAIN, "data", "shard", *files, *options], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()


def digests(out: Path) -> dict[str, str]:
    return {
        path.relative_to(out).as_posix(): sha256_file(path)
        for part in ("train", "heldout")
        for path in sorted((out / part).iterdir())
    }


def orphans(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(root):
            found.append(process)
    return found


def test_any_number_of_kills_leaves_the_same_shards_and_no_worker(tmp_path: Path) -> None:
    kills, chance = int(os.environ.get("TTRAIN_SOAK_KILLS", "5")), random.Random(7)
    make_tokenizer(tmp_path / "tokenizer")
    for name, seed in (("a", 1), ("b", 2)):
        lines = (json.dumps({"text": f"{seed}.{n} {text}"}) for n, text in enumerate(documents(24_000, seed)))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    began = time.monotonic()
    finish(shard(tmp_path, "whole", "a.jsonl", "b.jsonl"))
    whole = time.monotonic() - began
    expected, done, chain = digests(tmp_path / "whole"), 0, 0
    assert len(expected) > 100
    while done < kills:
        out = tmp_path / f"out-{chain}"
        chain += 1
        for files in (["a.jsonl"], ["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"]):  # what is there changes
            process = shard(tmp_path, out.name, *files)
            try:
                process.wait(timeout=chance.uniform(0.3, whole))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                done += 1
            if (out / "train" / "index.json").exists():
                assert len(ShardSet(out / "train").lengths) > 0, "what is shown is whole"
            else:
                with pytest.raises(ArtifactError):
                    ShardSet(out / "train")
        finish(shard(tmp_path, out.name, "a.jsonl", "b.jsonl"))
        assert digests(out) == expected
    time.sleep(1)
    assert orphans(tmp_path) == []
    print(f"{done} kills in {chain} outputs: the shards are those of a run that was never killed")
