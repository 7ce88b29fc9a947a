"""Upload an export to the Hugging Face Hub."""

from ttrain.core.machine import VERSION
from ttrain.core.text import first_line
from ttrain.errors import TTrainError, UsageError
from ttrain.export.export import Export


def check_repository(name: str) -> None:
    """Raise UsageError unless the name is OWNER/NAME, as of a repository on the Hub."""
    from huggingface_hub.utils import validate_repo_id

    try:
        _, _ = name.split("/")
        validate_repo_id(name)
    except ValueError:
        raise UsageError(
            f"--push is {name!r} but must be OWNER/NAME of a repository on the Hugging Face Hub"
        ) from None


def push(exported: Export, repository: str, *, public: bool = False) -> str:
    """Upload the files of an export in one commit, in place of a model's earlier weights.

    Returns the commit's address.
    Raises TTrainError where the Hub refuses or does not answer.
    """
    # A new repository is private unless `public`. The token is that of HF_TOKEN or `hf auth login`.
    import httpx2  # what the library talks with
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=not public, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=exported.directory,
            allow_patterns=list(exported.files),
            # Of an earlier upload in other parts: loaders would read them. An adapter has none.
            delete_patterns=["model*.safetensors*"] if exported.kind == "model" else None,
            commit_message=f"Upload a model of ttrain {VERSION}",
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, httpx2.HTTPError, OSError) as error:
        raise TTrainError(
            f"{repository} could not be uploaded: {first_line(error)}; "
            f"the export is in {exported.directory}; "
            "set HF_TOKEN to a token that may write there, or run `hf auth login`"
        ) from None
    return str(commit.commit_url)
