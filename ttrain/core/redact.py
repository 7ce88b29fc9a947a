"""Hide secrets before anything is recorded or shown: in URLs, and in settings by name or look.

A data source's URL loses user, password, query and fragment; `***` stands for each. Only the
standard library, since everything may import it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"

# A setting is secret by its last words: `hub.token` and `api_key` are, `tokens_per_step` and
# `tokenizer` are not.
SECRET_NAME = re.compile(
    r"""
    (?:^|[./_])
    (?: (?:access|account|api|encryption|private|secret|signing|ssh)_?key
      | (?:access|api|auth|hub|refresh)_tokens
      | auth | authorization | bearer | cookie | credentials? | pass(?:phrase|wd|words?)
      | pat | pwd? | secrets? | signature
      | webhook
    ) (?:_\w+)?$
    | (?:^|[./_]) token$
    | (?:^|[./_]) (?:credentials|passwords|secrets) [./\[]  # all that stands below these
    """,
    re.VERBOSE,
)
# Names of places where a secret is, and of the tokens of a tokenizer, which are pieces of text.
OPEN_NAME = re.compile(
    r"(?:^|[./_])(?:file|path"
    r"|(?:bos|cls|end|eos|first|last|mask|multi|new|next|pad|sep|special|start|stop|unk)_token)$"
)
# What the services' own secrets look like, under whatever name: Hugging Face, GitHub, OpenAI, AWS,
# Slack, GitLab
LOOKS_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)

# All lengths are bounded: a text that a file brings takes linear time.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}"
LOCAL = ("file", "local")  # their "?" and "#" belong to the names of files
# What stands before their "@" is a container.
CONTAINERS = ("abfs", "abfss", "adl", "az", "wasb", "wasbs")
# User and password end with the last "@" of the host's part. A password that nobody encoded may
# hold a "/": what follows a ":" that begins no port is taken for one.
_HOST = r"(?:\[|localhost\b|[\w-][\w.-]{0,250}(?:\.[A-Za-z][\w-]{1,62}|\.\d{1,3}|:\d{1,5})[/?#\s])"
# Nor may a password have both unencoded: what follows its first "@" is a part of it where it looks
# like no host.
_MORE_PASSWORD = rf"(?:(?!{_HOST})[^/?#\s@]{{1,200}}/[^?#\s@]{{0,300}}@)*"
_USER = (
    rf"(?=[^/?#\s@]{{1,200}}:)[^/?#\s]{{0,400}}@{_MORE_PASSWORD}|"
    r"[^/?#\s]{0,400}@"
    r"|[^/\s:@\[]{1,200}:(?!:|\d{1,5}(?:[/?#\s]|$))[^@]{0,300}@(?:[^/?#\s@]{0,300}@)*"
)
_USER_OF_URL = re.compile(_USER)
_USER_IN_TEXT = re.compile(rf"({_SCHEME}://)({_USER})".replace("[^@]", r"[^@\s]"))
_CONTAINER = re.compile(r"[^/?#\s:@]*@")
# Away from HTTP "?" is a letter of a glob, unless a name and "=" follow it, and "#" one of a path
# that goes on.
HTTP = ("http", "https", "webdav", "webdavs", "dav", "davs")
_FRAGMENT_OF_HTTP = re.compile(r"#.*", re.DOTALL)
_FRAGMENT = re.compile(r"#[^./*?\[\]]*$|#[^/*=]*=.*", re.DOTALL)
_QUERY_OF_HTTP = re.compile(r"\?[^#]*")
_QUERY = re.compile(r"\?[^/?#=*\[\]\s]*=[^#]*")
_CHAIN = re.compile(rf"::(?={_SCHEME}(?:://|::|$))")  # fsspec's: simplecache::https://host/file
_IN_TEXT = re.compile(rf"{_SCHEME}://[^\s'\"<>`]*")
_HAS_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_HIDDEN_PART = re.compile(r"://\*\*\*@|[?#]\*\*\*")
# Parameters of the signed URLs of S3, CloudFront, Google and Azure: the signature, and what a
# renewed one changes. What else a query holds says which file is meant.
_SIGNATURE = re.compile(r"[?&](?:x-amz-signature|x-goog-signature|signature|sig)=", re.IGNORECASE)
_RENEWED = re.compile(
    r"[?&](?:x-(?:amz|goog)-[a-z-]{1,30}|signature|expires|policy|hash-algorithm|key-pair-id"
    r"|awsaccesskeyid|googleaccessid"
    r"|sig|s[vetpri]|spr|sip|ss|srt|ses|sdd|sk(?:oid|tid|t|e|s|v)|saoid|suoid|scid)=[^&#]*",
    re.IGNORECASE,
)
# Parameters of a query whose values are secret, wherever a text has them; what may also be a word
# of a sentence or of a setting counts only where it stands in a query.
_PLAIN_NAMES = (
    "sig|signature|password|passwd|pwd|secret|client_secret|api[_-]?key|access[_-]?token"
    "|x-(?:amz|goog)-[a-z-]{1,30}"
)
_QUERY_NAMES = "token|key|auth|credential|awsaccesskeyid|googleaccessid|key-pair-id|policy"
_PARAMETER = re.compile(
    rf"((?:(?<![\w.-])(?:{_PLAIN_NAMES})|(?<=[?&])(?:{_QUERY_NAMES}))=)[^\s&#'\"<>`,;)\]}}]+",
    re.IGNORECASE,
)
_ROUTE = "#/"  # begins the fragment of a page, such as MLflow's, which is no source of data


@lru_cache(maxsize=1024)  # asked for each rejected row, which takes half as long with it
def url(location: str) -> str:
    """A location without user, password, query and fragment; a local path as it is."""
    return "::".join(map(_shown_link, _CHAIN.split(location)))


def without_signature(location: str) -> str:
    """A location without what is renewed: user, password and signature of its URL."""
    location = without_user(location)
    if not _SIGNATURE.search(location):
        return location
    address, _, query = _RENEWED.sub("&", location).partition("&")
    parameters = "&".join(filter(None, query.split("&")))
    return f"{address}?{parameters}" if parameters else address


def text(message: str) -> str:
    """A text with masked URLs, tokens of services and secret parameters.

    A space may have cut a URL in two.
    """
    message = _USER_IN_TEXT.sub(
        lambda match: _without_user(match[1], match[2], f"{HIDDEN}@"), message
    )
    message = LOOKS_SECRET.sub(HIDDEN, _IN_TEXT.sub(lambda match: _in_text(match[0]), message))
    return _PARAMETER.sub(rf"\1{HIDDEN}", message)


def without_user(address: str) -> str:
    """A text whose URLs have no user and password, as for a server's address."""
    return _USER_IN_TEXT.sub(lambda match: _without_user(match[1], match[2], ""), address)


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with `***` for what is secret by name, look or URL."""
    return {key: _masked(key, value) for key, value in values.items()}


def is_hidden(location: str) -> bool:
    """Whether `url` has removed something, so that the location cannot be opened."""
    return bool(_HIDDEN_PART.search(location)) and url(location) == location


def has_hidden(value: Any) -> bool:
    """Whether any location in a tree of settings is hidden."""
    if isinstance(value, Mapping):
        return any(map(has_hidden, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_hidden, value))
    return isinstance(value, str) and is_hidden(value)


def restored(recorded: Any, current: Any) -> Any:
    """Recorded settings with current locations where these equal the record once masked.

    Without a match, or with several, a location stays hidden.
    """
    if isinstance(recorded, Mapping):
        values = current if isinstance(current, Mapping) else {}
        return {name: restored(value, values.get(name)) for name, value in recorded.items()}
    if isinstance(recorded, list | tuple):
        return [
            _restored_entry(entry, current if isinstance(current, list | tuple) else ())
            for entry in recorded
        ]
    is_same = isinstance(current, str) and has_hidden(recorded) and url(current) == recorded
    return current if is_same else recorded


def _restored_entry(recorded: Any, current: Sequence[Any]) -> Any:
    restorations = [restored(recorded, entry) for entry in current]
    fitting = [entry for entry in restorations if not has_hidden(entry)]
    return fitting[0] if len(fitting) == 1 else recorded


def is_secret(key: str) -> bool:
    """Whether a setting of this name holds a secret."""
    words = re.sub(
        r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9./\[\]]", "_", key.rstrip("]0123456789[_- ")
    ).lower()
    return bool(SECRET_NAME.search(words)) and not OPEN_NAME.search(words)


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(key, inner) for inner in value]
    if value not in (None, "", True, False) and is_secret(key):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return (
        LOOKS_SECRET.sub(HIDDEN, url(value))
        if _HAS_URL.match(value) and _ROUTE not in value
        else text(value)
    )


def _shown_link(link: str) -> str:
    scheme, colon, remainder = link.partition("://")
    if not colon or scheme.lower() in LOCAL or not re.fullmatch(_SCHEME, scheme):
        return link
    if user := _USER_OF_URL.match(remainder):
        shown = _without_user(f"{scheme}://", user[0], f"{HIDDEN}@")
        remainder = shown.partition("://")[2] + remainder[user.end() :]
    is_http = scheme.lower() in HTTP
    remainder = (_FRAGMENT_OF_HTTP if is_http else _FRAGMENT).sub(f"#{HIDDEN}", remainder, count=1)
    query = _QUERY_OF_HTTP if is_http else _QUERY
    return f"{scheme}://{query.sub(f'?{HIDDEN}', remainder, count=1)}"


def _without_user(scheme: str, user: str, instead: str) -> str:
    kind = scheme.lower().removesuffix("://")
    return scheme + (
        user if kind in LOCAL or (kind in CONTAINERS and _CONTAINER.fullmatch(user)) else instead
    )


# An address of a page keeps its fragment; what is masked already keeps what follows it.
def _in_text(address: str) -> str:
    if _ROUTE in address:
        page, _, route = address.partition(_ROUTE)
        return f"{url(page)}{_ROUTE}{_QUERY.sub(f'?{HIDDEN}', route)}"
    ended = re.match(rf"(.*?[?#]{re.escape(HIDDEN)})(?=[^\w&=%#-]|$)", address)
    return address if ended and is_hidden(ended[1]) else url(address)
