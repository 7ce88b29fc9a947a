"""Data sets on the Hugging Face Hub, `hf://owner/name[@revision][/path]`: listed and fetched at a commit, or from its cache.

The layout of the cache (`refs`, `snapshots`): https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from ttrain.core.files import read_json, write_json
from ttrain.data.remote import reason, retried, status_of
from ttrain.errors import DataError, UsageError

PREFIX = "hf://"
TIMEOUT_SECONDS = 10.0
FORM = "write hf://owner/name, hf://owner/name@revision or hf://owner/name/path, where the path may be a glob"
# `datasets/` is how fsspec and pandas spell it. Revisions with a slash are those of converted files and of pull requests.
_LOCATION = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Named:
    """The parts of a location. An empty path is the whole data set; no revision is its main branch."""

    repo: str
    revision: str | None
    path: str

    @property
    def is_pinned(self) -> bool:
        """Whether it names one file of one commit, which never changes."""
        return bool(self.path and self.revision and _COMMIT.fullmatch(self.revision))


def parse(location: str) -> Named:
    """The parts of `hf://...`. UsageError where it has another form."""
    found = _LOCATION.fullmatch(location)
    if found is None:
        raise UsageError(f"it is not the name of a data set on the Hub; {FORM}")
    repo, revision, path = found.groups()
    return Named(repo, unquote(revision) if revision else None, (path or "").strip("/"))


@cache
def listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """(commit, paths of all its files), asked once a process, so that a whole run sees the same commit.

    Where the Hub cannot be reached, what its cache knows of the revision. UsageError where that is nothing either.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()
    try:
        commit = str(api.dataset_info(repo, revision=revision, timeout=TIMEOUT_SECONDS).sha)
        files = tuple(api.list_repo_files(repo, repo_type="dataset", revision=commit))
    except GatedRepoError:
        link = f"{api.endpoint}/datasets/{repo}"
        raise UsageError(f"{repo} is gated; accept its conditions at {link} and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UsageError(f"the Hub shows no data set {repo}; correct its name, or log in with `hf auth login`") from None
    except RevisionNotFoundError:
        raise UsageError(f"{repo} has no branch, tag or commit '{revision}'; correct it, or leave it out") from None
    except HFValidationError:
        raise UsageError(f"the Hub allows no such name; {FORM}") from None
    except Exception as error:  # of requests, httpx or httpx2, as the version is; or no JSON, from a captive portal
        if 400 <= (status_of(error) or 500) < 500:
            raise UsageError(f"the Hub refuses {repo}: {reason(error)}") from None
        found = _cached_listing(repo, revision)
        if found is None:
            raise UsageError(
                f"the Hub cannot be reached ({reason(error)}) and its cache does not hold {repo}; "
                f"connect, or fetch it elsewhere with `hf download --repo-type dataset {repo}` and copy the cache"
            ) from None
        return found
    _keep(repo, revision, commit, files)
    return commit, files


def fetch(location: str) -> Path:
    """The file of a pinned location on this machine, from the cache or into it. DataError where it cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    named = parse(location)
    assert named.is_pinned, f"{location} is not a pinned file: what names inputs goes through locations.expand"

    def download() -> str:
        try:
            return str(hf_hub_download(named.repo, named.path, repo_type="dataset", revision=named.revision))
        except LocalEntryNotFoundError as error:  # the library has tried several times by itself, unless it is told not to
            cause = error.__cause__ or error
            wanted = f"{named.repo} {named.path} --revision {named.revision}"
            raise DataError(
                f"cannot read {location}: it is not in the cache of the Hub, which cannot be reached ({reason(cause)}); "
                f"connect, unset HF_HUB_OFFLINE, or run `hf download --repo-type dataset {wanted}`"
            ) from None

    try:
        return Path(retried(download))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot read {location}: {reason(error)}") from None


def _cached_listing(repo: str, revision: str | None) -> tuple[str, tuple[str, ...]] | None:
    """What the cache knows: the files of the whole commit where a listing was kept, else those that lie there."""
    ref = _folder(repo) / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = _folder(repo) / "snapshots" / commit
    lying = ((Path(at) / name).relative_to(snapshot).as_posix() for at, _, names in os.walk(snapshot) for name in names)
    files = read_json(_kept(repo, commit)) or sorted(lying)
    return (commit, tuple(files)) if files else None


def _keep(repo: str, revision: str | None, commit: str, files: tuple[str, ...]) -> None:
    """Note in the cache which commit the revision is and what it holds, for a day without a network.

    A download by commit leaves no such note, and after a part of the files it would be taken for the whole.
    """
    ref, kept = _folder(repo) / "refs" / (revision or "main"), _kept(repo, commit)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, files)
        if revision != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, encoding="utf-8")
    except OSError:
        return  # a cache that is shared and read-only serves all the same


def _kept(repo: str, commit: str) -> Path:
    return _folder(repo) / "ttrain" / f"{commit}.json"


def _folder(repo: str) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}"
