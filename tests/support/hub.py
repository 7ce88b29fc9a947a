"""A Hugging Face Hub of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_templates import CHATML, make
from support.web import FakeHub, served_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache(home: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    repository = home / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, data in files.items():
        (snapshot / name).write_bytes(data)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """The Hub with the model `someone/small`."""
    files = {path.name: path.read_bytes() for path in make(tmp_path / "source", CHATML).iterdir()}
    with served_hub(
        FakeHub({"someone/small": {"main": COMMIT}}, {COMMIT: {**files, "model.safetensors": b"weights"}})
    ) as opened:
        yield opened


def use_hub(patch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Let the Hub's library, which has read its environment, ask this server and keep what it fetches in this home."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{template[template.index('{') :]}")
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
