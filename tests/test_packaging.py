"""Files for installation: pins, image, services."""

import tomllib
from typing import Any

import yaml
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def content(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_uv_gets_the_pins_of_pip_and_no_lock_file_is_committed() -> None:
    pins = [line for line in content("constraints.txt").split("\n") if line and line[0] != "#"]
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == pins
    assert "uv.lock" in content(".gitignore").split()


def test_services_listen_on_this_machine_alone_and_need_passwords() -> None:
    services: dict[str, Any] = yaml.safe_load(content("compose.yaml"))["services"]
    assert {*services} == {"postgres", "mlflow", "prefect", "worker"}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for name, value in service["environment"].items():
            assert "PASSWORD" not in name or value.startswith("${"), name
    assert "PREFECT_SERVER_API_AUTH_STRING" in services["prefect"]["environment"]
