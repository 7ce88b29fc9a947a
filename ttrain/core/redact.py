"""Hides secrets before anything is recorded or shown: in URLs, and in settings by their names or their looks.

A URL of a data source loses user, password, query and fragment, where signed addresses keep their secrets; `***` stands for
each, so that a reader of the record sees that something is missing. Standard library only: everything may import it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"

# A setting is secret by its last words: `hub.token` and `api_key` are, `tokens_per_step` and `tokenizer` are not.
SECRET_WORDS = frozenset(
    ["apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd",
     "password", "pat", "pw", "pwd", "secret", "secrets", "signature", "webhook"]
)  # fmt: skip
SECRET_ENDS = (("access", "key"), ("account", "key"), ("api", "key"), ("private", "key"), ("secret", "key"),
                      ("ssh", "key"), ("signing", "key"), ("encryption", "key"), ("webhook", "url"))  # fmt: skip
SECRET_GROUPS = frozenset(["credentials", "passwords", "secrets"])  # all that stands below these
SECRET_TOKENS = frozenset(["access", "api", "auth", "hub", "refresh"])  # `api_tokens`; other tokens are counted
# "token" is the word for a secret, and for a piece of text: those of a tokenizer are not secrets.
TOKENIZER_WORDS = frozenset(
    ["bos", "cls", "end", "eos", "first", "last", "mask", "multi", "new", "next", "pad", "sep", "special", "start", "stop",
     "unk"]
)  # fmt: skip
# What the services' own secrets look like, under whatever name: Hugging Face, GitHub, OpenAI, AWS, Slack, GitLab
NO_SECRETS = frozenset(["servers.auth"])  # of ttrain's own settings; the tests read each of them back
LOOKS_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}"  # all lengths are bounded: a text that a file brings takes linear time
LOCAL = ("file", "local")  # their "?" and "#" belong to the names of files
CONTAINERS = ("abfs", "abfss", "adl", "az", "wasb", "wasbs")  # what stands before their "@" is a container
# User and password end with the last "@" of the host's part. A password that nobody encoded may hold a "/": what follows a
# ":" that begins no port is taken for one.
_HOST = r"(?:\[|localhost\b|[\w-][\w.-]{0,250}(?:\.[A-Za-z][\w-]{1,62}|\.\d{1,3}|:\d{1,5})[/?#\s])"
# Nor may a password have both unencoded: what follows its first "@" is a part of it where it looks like no host.
_MORE_PASSWORD = rf"(?:(?!{_HOST})[^/?#\s@]{{1,200}}/[^?#\s@]{{0,300}}@)*"
_USER = rf"(?=[^/?#\s@]{{1,200}}:)[^/?#\s]{{0,400}}@{_MORE_PASSWORD}|"
_USER += r"[^/?#\s]{0,400}@|[^/\s:@\[]{1,200}:(?!:|\d{1,5}(?:[/?#\s]|$))[^@]{0,300}@(?:[^/?#\s@]{0,300}@)*"
_USER_OF_URL = re.compile(_USER)
_USER_IN_TEXT = re.compile(rf"({_SCHEME}://)({_USER})".replace("[^@]", r"[^@\s]"))
_CONTAINER = re.compile(r"[^/?#\s:@]*@")
# Away from HTTP "?" is a letter of a glob, unless a name and "=" follow it, and "#" one of a path that goes on.
HTTP = ("http", "https", "webdav", "webdavs", "dav", "davs")
_FRAGMENT_OF_HTTP, _FRAGMENT = re.compile(r"#.*", re.DOTALL), re.compile(r"#[^./*?\[\]]*$|#[^/*=]*=.*", re.DOTALL)
_QUERY_OF_HTTP, _QUERY = re.compile(r"\?[^#]*"), re.compile(r"\?[^/?#=*\[\]\s]*=[^#]*")
_CHAIN = re.compile(rf"::(?={_SCHEME}(?:://|::|$))")  # fsspec's: simplecache::https://host/file
_IN_TEXT = re.compile(rf"{_SCHEME}://[^\s'\"<>`]*")
_HAS_URL = re.compile(rf"(?:{_SCHEME}::)*{_SCHEME}://")
_HIDDEN_PART = re.compile(r"://\*\*\*@|[?#]\*\*\*")
# Parameters of signed URLs: those that must be there, and those that a renewed signature changes. What else a query holds
# says which file is meant. Names in small letters; Azure's are too short to go by one of them alone.
_SIGNATURE_V4 = ("algorithm", "credential", "date", "expires", "signature", "signedheaders")
_SIGNED = tuple(
    (frozenset(required.split()), frozenset(dropped.split()))
    for required, dropped in (
        # docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html; and version 2, which CloudFront resembles
        ("x-amz-signature", " ".join(f"x-amz-{name}" for name in (*_SIGNATURE_V4, "security-token"))),
        ("signature awsaccesskeyid", "signature awsaccesskeyid expires x-amz-security-token"),
        ("signature key-pair-id", "signature key-pair-id expires policy hash-algorithm"),
        # cloud.google.com/storage/docs/access-control/signed-urls
        ("x-goog-signature", " ".join(f"x-goog-{name}" for name in _SIGNATURE_V4)),
        ("signature googleaccessid", "signature googleaccessid expires"),
        # learn.microsoft.com/rest/api/storageservices/create-service-sas, and those of an account and of a user
        ("sig sv", "sig sv se st sp sr spr sip ss srt ses sdd skoid sktid skt ske sks skv saoid suoid scid"),
    )
)
# Parameters of a query whose values are secret, wherever a text has them; what may also be a word of a sentence or of a
# setting counts only where it stands in a query.
_PLAIN_NAMES = (
    "sig|signature|password|passwd|pwd|secret|client_secret|api[_-]?key|access[_-]?token|x-(?:amz|goog)-[a-z-]{1,30}"
)
_QUERY_NAMES = "token|key|auth|credential|awsaccesskeyid|googleaccessid|key-pair-id|policy"
_PARAMETER = re.compile(
    rf"((?:(?<![\w.-])(?:{_PLAIN_NAMES})|(?<=[?&])(?:{_QUERY_NAMES}))=)[^\s&#'\"<>`,;)\]}}]+", re.IGNORECASE
)
_ROUTE = "#/"  # begins the fragment of a page, as those of MLflow's: an address to click on, not a source of data


@lru_cache(maxsize=1024)  # asked for each rejected row, which takes half as long with it
def url(location: str) -> str:
    """A location without the user, password, query and fragment of its URL; a path of this machine as it is."""
    return "::".join(_link(link) for link in _CHAIN.split(location))


def without_signature(location: str) -> str:
    """A location without what grants access and is renewed: the password of its URL, the user too over HTTP (a token may
    stand there), and the signature in its query. A location that has none of these stays as it is."""
    return "::".join(_unsigned(link) for link in _CHAIN.split(location))


def text(message: str) -> str:
    """A text whose URLs are as `url` gives them, without what looks like a service's secret, and without the values of
    secret parameters, also of a URL that a space cut in two."""
    message = _USER_IN_TEXT.sub(lambda match: _without_user(match[1], match[2], f"{HIDDEN}@"), message)
    message = LOOKS_SECRET.sub(HIDDEN, _IN_TEXT.sub(lambda match: _in_text(match[0]), message))
    return _PARAMETER.sub(rf"\1{HIDDEN}", message)


def without_user(address: str) -> str:
    """A text whose URLs have no user and no password: the address of a server, to be shown, recorded and opened."""
    return _USER_IN_TEXT.sub(lambda match: _without_user(match[1], match[2], ""), address)


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their names as they may be shown: what is secret by its name or its look, or in a URL, is `***`."""
    return {key: _masked(key, value) for key, value in values.items()}


def is_hidden(location: str) -> bool:
    """Whether `url` has taken something from this location, so that it cannot be opened."""
    return bool(_HIDDEN_PART.search(location)) and url(location) == location


def has_hidden(value: Any) -> bool:
    """Whether any location in a tree of settings is hidden."""
    if isinstance(value, Mapping):
        return any(map(has_hidden, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_hidden, value))
    return isinstance(value, str) and is_hidden(value)


def restored(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings, with the locations of the current ones where these, once masked, are what is on record.

    What no current location fits, or several do, stays hidden.
    """
    return {key: _restored(value, current.get(key)) for key, value in recorded.items()}


def is_secret(key: str) -> bool:
    """Whether a setting of this name holds a secret."""
    if key in NO_SECRETS:
        return False
    *above, last = re.split(r"[./\[\]]", key.rstrip("]0123456789["))
    name_words = _words(last)
    if not name_words or name_words[-1] in ("file", "path"):  # the name of a place where the secret is
        return False
    if any(SECRET_GROUPS & set(_words(name)) for name in above):
        return True
    if name_words[-1] == "token":
        return not TOKENIZER_WORDS & set(name_words)
    if name_words[-1] == "tokens" and SECRET_TOKENS & set(name_words):
        return True
    return bool(SECRET_WORDS & set(name_words)) or name_words[-2:] in SECRET_ENDS


def _words(name: str) -> tuple[str, ...]:
    """The words of one part of a name, in small letters: api, key of `apiKey` and of `api_key`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return tuple(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def _masked(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(key, inner) for inner in value]
    if value not in (None, "", True, False) and is_secret(key):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return LOOKS_SECRET.sub(HIDDEN, url(value)) if _HAS_URL.match(value) and _ROUTE not in value else text(value)


def _link(link: str) -> str:
    """One URL of a chain."""
    scheme, colon, remainder = link.partition("://")
    if not colon or scheme.lower() in LOCAL or not re.fullmatch(_SCHEME, scheme):
        return link
    if user := _USER_OF_URL.match(remainder):
        remainder = _without_user(scheme, user[0], f"{HIDDEN}@").removeprefix(scheme) + remainder[user.end() :]
    is_http = scheme.lower() in HTTP
    remainder = (_FRAGMENT_OF_HTTP if is_http else _FRAGMENT).sub(f"#{HIDDEN}", remainder, count=1)
    return f"{scheme}://{(_QUERY_OF_HTTP if is_http else _QUERY).sub(f'?{HIDDEN}', remainder, count=1)}"


def _unsigned(link: str) -> str:
    """One URL of a chain, for `without_signature`."""
    scheme, colon, remainder = link.partition("://")
    if not colon or scheme.lower() in LOCAL or not re.fullmatch(_SCHEME, scheme):
        return link
    is_http = scheme.lower() in HTTP
    if user := _USER_OF_URL.match(remainder):
        name, has_password, _ = user[0].partition(":")
        kept_user = "" if is_http else f"{name}@" if has_password else user[0]
        remainder = kept_user + remainder[user.end() :]
    if is_http:
        remainder = _QUERY_OF_HTTP.sub(lambda match: _unsigned_query(match[0]), remainder, count=1)
    return f"{scheme}://{remainder}"


def _unsigned_query(query: str) -> str:
    """A query, which begins with "?", without the parameters of a signature; "" where it holds nothing else."""
    parameters = query[1:].split("&")
    names = [parameter.partition("=")[0].lower() for parameter in parameters]
    dropped = {name for required, family in _SIGNED if required.issubset(names) for name in family}
    if dropped.isdisjoint(names):
        return query
    kept_parameters = [parameter for parameter, name in zip(parameters, names, strict=True) if name not in dropped]
    return "?" + "&".join(kept_parameters) if kept_parameters else ""


def _without_user(scheme: str, user: str, instead: str) -> str:
    """Scheme and user with `instead` in place of the latter, unless that is a container and not a user."""
    kind = scheme.lower().removesuffix("://")
    return scheme + (user if kind in LOCAL or (kind in CONTAINERS and _CONTAINER.fullmatch(user)) else instead)


def _in_text(address: str) -> str:
    """A URL in a text: an address of a page keeps its fragment, one that is masked already keeps what follows it."""
    if _ROUTE in address:
        page, _, route = address.partition(_ROUTE)
        return f"{url(page)}{_ROUTE}{_QUERY.sub(f'?{HIDDEN}', route)}"
    ended = re.match(rf"(.*?[?#]{re.escape(HIDDEN)})(?=[^\w&=%#-]|$)", address)
    return address if ended and is_hidden(ended[1]) else url(address)


def _restored(value: Any, now: Any) -> Any:
    if isinstance(value, Mapping):
        return restored(value, now if isinstance(now, Mapping) else {})
    if isinstance(value, list | tuple):
        options: Sequence[Any] = now if isinstance(now, list | tuple) else ()
        if [_location_of(item) for item in value] == [url(_location_of(option)) for option in options]:
            return [_with_location(item, _location_of(option)) for item, option in zip(value, options, strict=True)]
        return [_matching(item, options) for item in value]
    return _matching(value, (now,)) if isinstance(now, str) else value


def _matching(item: Any, options: Sequence[Any]) -> Any:
    """The item, with the location of the only option that equals it once it is masked."""
    if not has_hidden(item):
        return item
    places = {_location_of(option) for option in options if url(_location_of(option)) == _location_of(item)}
    return _with_location(item, places.pop()) if len(places) == 1 else item


def _location_of(source: Any) -> str:
    """The location of a source, which may have a weight beside it."""
    return str(source.get("path", "") if isinstance(source, Mapping) else source)


def _with_location(source: Any, location: str) -> Any:
    if isinstance(source, Mapping):
        return {**source, "path": location} if "path" in source else source
    return location if isinstance(source, str) else source
