"""`ttrain export --push`, with the client of the Hub replaced by one of the same methods."""

from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from ttrain.errors import TTrainError, UsageError
from ttrain.export import hub as uploads
from ttrain.export.export import Export

FILES = {"model.safetensors": 7, "README.md": 6}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    client = create_autospec(HfApi, instance=True)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: client)
    return client


def push(directory: Path) -> str:
    return uploads.push(Export(directory, "model", "bfloat16", 7, FILES, ()), "me/mine")


def test_an_upload_has_the_files_of_the_export_and_a_new_repository_is_private(
    tmp_path: Path, hub: Mock
) -> None:
    hub.upload_folder.return_value.commit_url = "https://hub.example/me/mine/commit/1"
    assert push(tmp_path) == "https://hub.example/me/mine/commit/1"
    hub.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["folder_path"], sent["allow_patterns"]) == (tmp_path, [*FILES])
    assert sent["delete_patterns"] == ["model*.safetensors*"]  # none of subdirectories


@pytest.mark.parametrize("error", [LocalTokenNotFoundError("token"), ConnectionError("route")])
def test_a_refused_upload_has_a_fix(tmp_path: Path, hub: Mock, error: Exception) -> None:
    hub.create_repo.side_effect = error
    with pytest.raises(TTrainError, match=rf"me/mine .*{error}.*HF_TOKEN"):
        push(tmp_path)
    assert not hub.upload_folder.called


@pytest.mark.parametrize("name", ["mine", "a/b/c", "", "me/mine!", "me/my--model"])
def test_a_name_of_no_repository_is_refused_first(name: str) -> None:
    with pytest.raises(UsageError, match=r"--push .*OWNER/NAME"):
        uploads.check_repository(name)
