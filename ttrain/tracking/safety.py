"""What must not reach a tracker: secrets among the parameters, and names that lead out of a run's directory."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from ttrain.tracking.calls import shown

HIDDEN: Final = "***"
NAME_BYTES: Final = 240  # of one part of a path: file systems take 255, and a file that is being written has a longer name
PATH_BYTES: Final = 2000
RUN_NAME_CHARACTERS: Final = 250  # what MLflow's databases take

# A setting is secret by its last words: `hub.token` and `api_key` are, `tokens_per_step` and `tokenizer` are not.
SECRET_WORDS: Final = frozenset(
    ["apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd",
     "password", "pat", "pw", "pwd", "secret", "secrets", "signature", "webhook"]
)  # fmt: skip
SECRET_ENDS: Final = (("access", "key"), ("account", "key"), ("api", "key"), ("private", "key"), ("secret", "key"),
                      ("ssh", "key"), ("signing", "key"), ("encryption", "key"), ("webhook", "url"))  # fmt: skip
SECRET_GROUPS: Final = frozenset(["credentials", "passwords", "secrets"])  # all that stands below these
SECRET_TOKENS: Final = frozenset(["access", "api", "auth", "hub", "refresh"])  # `api_tokens`; other tokens are counted
# "token" is the word for a secret, and for a piece of text: those that a tokenizer calls so are no secrets.
PIECES: Final = frozenset(
    ["bos", "cls", "end", "eos", "first", "last", "mask", "multi", "new", "next", "pad", "sep", "special", "start", "stop",
     "unk"]
)  # fmt: skip
# What the services' own secrets look like, under whatever name: Hugging Face, GitHub, OpenAI, AWS, Slack, GitLab
LOOKS_SECRET: Final = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
QUERY: Final = re.compile(r"([?&;])([^=&;#\s]+)=([^&;#\s]+)")
SECRET_QUERIES: Final = frozenset(["sig", "key", "token", "x-amz-signature", "x-amz-security-token", "x-goog-signature"])


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, as they may be shown: what is secret by its name or its look is `***`."""
    return {key: _without_secrets(key, value) for key, value in values.items()}


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(key, inner) for inner in value]
    if value not in (None, "", True, False) and is_secret(key):
        return HIDDEN
    return without_credentials(value) if isinstance(value, str) else value


def is_secret(key: str) -> bool:
    """Whether a setting of this name holds a secret."""
    *above, last = re.split(r"[./\[\]]", key.rstrip("]0123456789["))
    words = _words(last)
    if not words or words[-1] in ("file", "path"):  # the name of a place where the secret is
        return False
    if any(SECRET_GROUPS & set(_words(name)) for name in above):
        return True
    if words[-1] == "token":
        return not PIECES & set(words)
    if words[-1] == "tokens" and SECRET_TOKENS & set(words):
        return True
    return bool(SECRET_WORDS & set(words)) or words[-2:] in SECRET_ENDS


def _words(name: str) -> tuple[str, ...]:
    """The words of one part of a name, in small letters: api, key of `apiKey` and of `api_key`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return tuple(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def without_credentials(text: str) -> str:
    """A text without passwords and signatures in its URLs, and without what looks like a service's secret."""

    def hide(match: re.Match[str]) -> str:
        mark, name, value = match.groups()
        return f"{mark}{name}={HIDDEN if name.lower() in SECRET_QUERIES or is_secret(name) else value}"

    return QUERY.sub(hide, LOOKS_SECRET.sub(HIDDEN, shown(text)))


def run_name(name: str) -> str:
    """The name as MLflow and terminals take it: no control characters, not too long, not empty."""
    plain = "".join(" " if unicodedata.category(letter)[0] == "C" else letter for letter in name)
    return plain.strip()[:RUN_NAME_CHARACTERS] or "unnamed"


def artifact_path(text: str) -> str:
    """The path below a run's directory, as it was given. Raises ValueError where it could lead out of there.

    Refused is whatever any layer on the way could read so: "..", absolute paths, backslashes and drives, control
    characters, the same after percent-decoding (as often as it changes something) or Unicode's compatibility forms.
    """
    form = text
    for _ in range(5):
        for one in (form, unicodedata.normalize("NFKC", form)):
            _check(one, text)
        decoded = unquote(form, errors="replace")
        if decoded == form:
            break
        form = decoded
    else:
        raise ValueError(f"{_quoted(text)} is no path below a run: it is encoded many times over")
    return text


def below(root: Path, path: str) -> Path:
    """The place of a path below `root`, also where links stand in between. Raises ValueError where that is elsewhere."""
    target = root / artifact_path(path) if path else root
    if not target.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{_quoted(path)} leads out of {root} through a link")
    return target


def _check(form: str, text: str) -> None:
    parts = form.split("/")
    problems = {
        "is too long": len(form.encode(errors="replace")) > PATH_BYTES,
        "is absolute": form.startswith(("/", "~")) or re.match(r"[A-Za-z]:", form) is not None,
        "has a backslash": "\\" in form,
        "has control characters": CONTROLS.search(form) is not None,
        "has an empty part, . or ..": any(part.strip() in ("", ".", "..") for part in parts),
        "has too long a part": any(len(part.encode(errors="replace")) > NAME_BYTES for part in parts),
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(f"{_quoted(text)} is no path below a run: it {problem}")


def _quoted(text: str) -> str:
    return ascii(text[:80])
