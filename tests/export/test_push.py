"""`ttrain export --push` against a Hub of our own."""

from pathlib import Path

import pytest
from support.hub import Hub

from ttrain.errors import TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Export


@pytest.fixture
def exported(tmp_path: Path) -> Export:
    directory = tmp_path / "out"
    directory.mkdir()
    for name, data in {"model.safetensors": b"weights", "README.md": b"# card", "notes.txt": b"of the user"}.items():
        (directory / name).write_bytes(data)
    return Export(directory, "model", "bfloat16", 7, {"model.safetensors": 7, "README.md": 6}, ())


def test_an_upload_has_the_files_of_the_export_and_a_new_repository_is_private(
    exported: Export, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert exporting.push(exported, "me/mine").startswith(f"{hub}/me/mine/commit/")
    assert Hub.uploaded == {"model.safetensors": b"weights", "README.md": b"# card"}
    assert [request["name"] for request in Hub.created] == ["mine"]
    assert Hub.created[0].get("private") is True or Hub.created[0].get("visibility") == "private"


@pytest.mark.parametrize("token", ["hf_wrong", None])
def test_a_refused_upload_says_what_to_do_and_keeps_the_export(
    exported: Export, hub: str, token: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(TTrainError, match=r"me/mine .*HF_TOKEN") as refused:
        exporting.push(exported, "me/mine")
    assert "hf_wrong" not in str(refused.value) and (exported.directory / "model.safetensors").is_file()
    assert not Hub.uploaded


def test_a_name_that_is_no_repository_is_refused_first() -> None:
    for name in ("mine", "a/b/c", "me/../x", "", "me/mine!"):
        with pytest.raises(UsageError, match=r"--push .*OWNER/NAME"):
            exporting.check_repository(name)
