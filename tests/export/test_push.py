"""`ttrain export --push`, with the client of the Hub replaced by one of the same methods."""

from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from ttrain.errors import TTrainError, UsageError
from ttrain.export import export as exporting
from ttrain.export.export import Export

FILES = {"model.safetensors": 7, "README.md": 6}


@pytest.fixture
def exported(tmp_path: Path) -> Export:
    (tmp_path / "notes.txt").write_text("of the user")
    return Export(tmp_path, "model", "bfloat16", 7, FILES, ())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    client = create_autospec(HfApi, instance=True)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: client)
    return client


def test_an_upload_has_the_files_of_the_export_and_a_new_repository_is_private(
    exported: Export, hub: Mock
) -> None:
    hub.upload_folder.return_value.commit_url = "https://hub.example/me/mine/commit/1"
    assert exporting.push(exported, "me/mine") == "https://hub.example/me/mine/commit/1"
    hub.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["folder_path"], sent["allow_patterns"]) == (exported.directory, [*FILES])


@pytest.mark.parametrize(
    "error", [LocalTokenNotFoundError("no token"), ConnectionError("no route")]
)
def test_a_refused_upload_says_what_to_do_and_keeps_the_export(
    exported: Export, hub: Mock, error: Exception
) -> None:
    hub.create_repo.side_effect = error
    with pytest.raises(TTrainError, match=rf"me/mine .*{error}.*HF_TOKEN"):
        exporting.push(exported, "me/mine")
    assert not hub.upload_folder.called and exported.directory.is_dir()


def test_a_name_that_is_no_repository_is_refused_first() -> None:
    for name in ("mine", "a/b/c", "", "me/mine!"):
        with pytest.raises(UsageError, match=r"--push .*OWNER/NAME"):
            exporting.check_repository(name)
