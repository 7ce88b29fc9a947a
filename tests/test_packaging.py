"""What is beside the code for those who install and contribute: pins, image, services, workflow."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_uv_gets_the_pins_of_pip_and_no_lock_file_is_committed() -> None:
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == pins()
    assert "uv.lock" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


def test_the_image_copies_what_a_wheel_is_made_of_and_runs_as_a_user() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        word
        for line in re.findall(r"^COPY (.*)", text, flags=re.MULTILINE)
        for word in line.split()[:-1]
    }
    sources = {
        path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()
    } | {"ttrain"}
    assert copied >= sources | {
        "constraints.txt",
        "pyproject.toml",
        PROJECT["project"]["readme"],
        "LICENSE",
    }
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
        if line.startswith("!")
    }
    assert copied == allowed and all((ROOT / name).exists() for name in copied)
    assert text.index("\nUSER ttrain") < text.index("ENTRYPOINT")
    (extras,) = re.findall(r"ARG EXTRAS=(.*)", text)
    assert {*extras.split(",")} <= PROJECT["project"]["optional-dependencies"].keys()


def test_services_listen_on_this_machine_alone_and_need_passwords() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    assert {*services} == {"postgres", "mlflow", "prefect", "worker"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for name, value in service["environment"].items():
            assert "PASSWORD" not in name or value.startswith("${"), name
    assert "PREFECT_SERVER_API_AUTH_STRING" in services["prefect"]["environment"]


def test_the_workflow_calls_what_the_makefile_has() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert "make lint test" in commands
    versions = [
        text.rpartition(" :: ")[2]
        for text in PROJECT["project"]["classifiers"]
        if "Python :: 3." in text
    ]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions
    targets = re.findall(
        r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert {"lint", "test", "run", "soak"} <= {*targets}
