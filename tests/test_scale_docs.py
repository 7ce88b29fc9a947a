"""docs/scale.md: its files are read by what they are for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ttrain.config import Settings
from ttrain.config.loading import load

PAGE = (Path(__file__).parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")


def block(kind: str, beginning: str) -> str:
    found = [text for text in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if text.startswith(beginning)]
    assert len(found) == 1, beginning
    return str(found[0])


def settings_of(words: list[str]) -> Settings:
    """As the command line takes them."""
    return load([word for word in words if re.match(r"[a-z_.]+=", word)], environment={}).settings


@pytest.mark.parametrize(("code", "queued"), [(0, False), (143, True)])
def test_the_batch_file_gives_each_node_its_place_and_goes_back_into_the_queue_when_it_was_stopped(
    tmp_path: Path, code: int, queued: bool
) -> None:
    tools = {
        "srun": f'for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@" || exit; done; exit {code}',
        "scontrol": 'if [ "$1" = requeue ]; then echo "requeue $2" >> said; else echo node7; echo node8; fi',
        "ttrain": 'echo "ttrain $*" >> said',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nexport SLURM_NODEID\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text(block("sh", "#!/bin/bash"))
    given = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    first, second, *rest = (tmp_path / "said").read_text().splitlines()
    assert rest == (["requeue 123456"] if queued else [])
    for number, line in enumerate((first, second)):
        runtime = settings_of(shlex.split(line)).runtime
        assert (runtime.nodes, runtime.node_rank, runtime.devices) == (2, number, 8)
        assert runtime.rendezvous == "node7:23456"


def test_the_job_s_pods_find_each_other_and_have_a_place_each() -> None:
    service, job = yaml.safe_load_all(block("yaml", "apiVersion"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    [script] = container["args"]
    for number in range(spec["completions"]):
        runtime = settings_of(shlex.split(script.replace("$JOB_COMPLETION_INDEX", str(number)))).runtime
        assert (runtime.nodes, runtime.node_rank) == (spec["parallelism"], number)
        assert runtime.devices == container["resources"]["limits"]["nvidia.com/gpu"]
        assert runtime.rendezvous == f"{job['metadata']['name']}-0.{pod['subdomain']}:29500"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [home] = [entry["value"] for entry in container["env"] if entry["name"] == "TTRAIN_HOME"]
    assert any(home.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
