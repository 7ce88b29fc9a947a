"""An existing tokenizer or model, used instead of training one: a folder, or a name on the Hub.

Only JSON is read, never code. Tokens that a tokenizer lacks come at the end of its vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.config.training import NONE, TRAININGS
from ttrain.core.files import JsonDict, need_object, user_path
from ttrain.core.text import first_line
from ttrain.data import jinja_templates
from ttrain.data.chat_templates import Message
from ttrain.data.custom_template import JinjaTemplate
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.model_files import INDEX_SUFFIX, MODEL, SECOND_HEAD, weight_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer


JSON = "tokenizer.json"
FILES = (JSON, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
HUB_REFERENCE = re.compile(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")
NAMES = ("pad_token", "bos_token", "eos_token", "unk_token")
CONVERT = "AutoTokenizer.from_pretrained(...).save_pretrained(folder) makes one"
CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL_DIRECTORY = "model"  # of an artifact
MODEL_FILES = (CONFIG, GENERATION, "model*.safetensors", MODEL + INDEX_SUFFIX, SECOND_HEAD, *FILES)
# Config keys of architectures for the number of positions that they accept.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_length")
log = logging.getLogger("ttrain")


def tokenizer_files(existing: str) -> list[Path]:
    """Local paths of the files of `tokenizer.existing`; fetches those that the cache lacks.

    Raises UsageError if there is no such tokenizer.
    """
    directory = user_path(existing)
    if not directory.is_dir():
        directory = from_hub(
            existing,
            "tokenizer.existing",
            FILES,
            lambda cached: (cached / JSON).is_file(),
            "name a folder that holds tokenizer.json, or owner/name[@revision] on the Hub",
        )
    if not (directory / JSON).is_file():
        raise UsageError(
            f"tokenizer.existing is '{existing}', which has no tokenizer.json; {CONVERT}"
        )
    return files_in(directory)


def files_in(directory: Path) -> list[Path]:
    """The files of a tokenizer that the directory has."""
    return [directory / name for name in FILES if (directory / name).is_file()]


def from_hub(
    text: str, setting: str, patterns: Sequence[str], is_whole: Callable[[Path], bool], fix: str
) -> Path:
    """The folder in the Hub's cache with the files that match `patterns`; fetched if incomplete.

    `text` is the value of `setting`. Raises UsageError, with the `fix`, if it cannot be fetched.
    """
    hub_name = HUB_REFERENCE.fullmatch(text)
    if hub_name is None or user_path(text).exists():
        raise UsageError(f"{setting} is '{text}' but there is no such folder; {fix}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, revision = hub_name.groups()
    download = partial(snapshot_download, name, revision=revision, allow_patterns=list(patterns))
    try:
        # An ArtifactError: the cache holds a part of the weights.
        with contextlib.suppress(LocalEntryNotFoundError, ValueError, ArtifactError):
            cached = Path(download(local_files_only=True))
            if is_whole(cached):
                return cached
        return Path(download())
    except Exception as error:  # of the network, of the Hub, of the name
        raise UsageError(
            f"{setting} is '{text}', which is neither a folder nor in the Hub's cache, "
            f"and fetching it failed: {first_line(error)}; fetch it elsewhere and name the folder"
        ) from None


def install(tokenizer_files: Sequence[Path], directory: Path, template: str) -> None:
    """Write the tokenizer of these files, with the tokens and the template that ttrain needs.

    `template` "auto": the tokenizer's own, or ttrain's if it has none. Raises UsageError.
    """
    from ttrain.data.encoder import END_OF_TURN, open_tokenizer
    from ttrain.data.tokenizer import MODEL_MAX_LENGTH, write

    paths = {path.name: path for path in tokenizer_files}
    try:
        tokenizer = open_tokenizer(paths[JSON])
    except ArtifactError as error:
        raise UsageError(f"tokenizer.existing: {error}; {CONVERT}") from None
    config = _tokenizer_config(paths)
    needed = tuple[str, ...]()
    jinja = _chat_template(paths, config) if template in ("auto", "own") else None
    if template == "auto":
        template = "own" if jinja else "ttrain"
    if template != "own":
        needed = jinja_templates.SPECIAL_TOKENS[template][4:]
        jinja = jinja_templates.JINJA[template]
    if jinja is None:
        raise UsageError(
            "tokenizer.template is 'own' but tokenizer.existing has no chat template; "
            "set tokenizer.template=ttrain"
        )
    tokens = _tokens(tokenizer, config)
    added = _add(tokenizer, [*tokens.values(), *needed])
    source = tokenizer.to_str(pretty=True) if added else paths[JSON].read_bytes().decode("utf-8")
    special = [
        token.content
        for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if token.special
    ]
    others = [token for token in special if token not in tokens.values()]
    length = config.get("model_max_length")
    max_length = int(length) if isinstance(length, int) and 0 < length < 10**9 else MODEL_MAX_LENGTH
    tokens[END_OF_TURN] = jinja_templates.END_TOKENS.get(template, tokens["eos_token"])
    if template == "own":
        own_template = JinjaTemplate(jinja, tokens, special)
        tokens[END_OF_TURN] = own_template.end
        turns = (Message("user", "Q"), Message("assistant", "A"))
        prompt = own_template.render(turns[:1], prompt=True)
        if not own_template.render(turns).text.startswith(prompt.text):
            log.warning(
                "the chat template's generation prompt differs from the text before the answers "
                "in training"
            )
    write(directory, source, tokens, others, jinja, max_length)
    if added:
        log.info("added to the tokenizer: %s", ", ".join(added))


def _tokenizer_config(paths: dict[str, Path]) -> JsonDict:
    merged: JsonDict = {}
    # The newer file wins.
    names = ("special_tokens_map.json", "tokenizer_config.json")
    for path in (paths[name] for name in names if name in paths):
        try:
            values = need_object(path.read_bytes())
        except ValueError as error:
            raise UsageError(f"tokenizer.existing: cannot read {path}: {error}") from None
        merged |= {key: value for key, value in values.items() if value is not None}
    return merged


def _tokens(tokenizer: Tokenizer, config: JsonDict) -> dict[str, str]:
    tokens = {
        "pad_token": jinja_templates.PAD,
        "bos_token": jinja_templates.BOS,
        "eos_token": jinja_templates.EOS,
    }
    for name in NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if (
            isinstance(token, str)
            and token
            and (name != "unk_token" or tokenizer.token_to_id(token) is not None)
        ):
            tokens[name] = token
    spec = json.loads(tokenizer.to_str())
    unknown = spec["model"].get("unk_token")
    if unknown is None and spec["model"].get("unk_id") is not None:
        unknown = tokenizer.id_to_token(spec["model"]["unk_id"])
    if unknown is not None and tokenizer.token_to_id(unknown) is not None:
        tokens["unk_token"] = unknown
    elif missing := _missing_bytes(tokenizer, spec):
        raise UsageError(
            "tokenizer.existing has no unknown token in its model and no token for "
            f"{missing} of the 256 bytes, so that text would be lost; use another tokenizer, "
            "or train one"
        )
    if tokens["pad_token"] in (tokens["eos_token"], tokens.get("unk_token")):
        tokens["pad_token"] = jinja_templates.PAD
    return tokens


def _missing_bytes(tokenizer: Tokenizer, spec: JsonDict) -> int:
    from tokenizers.pre_tokenizers import ByteLevel

    letters: list[str] = []
    if spec["model"].get("byte_fallback"):
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
    elif '"ByteLevel"' in json.dumps([spec["pre_tokenizer"], spec["normalizer"]]):
        letters = ByteLevel.alphabet()
    return 256 - len(tokenizer.get_vocab(with_added_tokens=False).keys() & letters)


def _add(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    added = [token for token in dict.fromkeys(tokens) if token not in special]
    tokens_by_id = {n: token for token, n in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokenizer.add_special_tokens(added)
    for token in added:
        number = int(tokenizer.token_to_id(token) or 0)
        if tokens_by_id.get(number, token) != token:
            raise UsageError(
                f"tokenizer.existing has unused ids, so that {token} cannot be added: "
                f"its id {number} is taken"
            )
    return added


def brings_template(directory: Path) -> bool:
    """Whether the tokenizer in the directory has a chat template of its own."""
    paths = {path.name: path for path in files_in(directory)}
    return _chat_template(paths, _tokenizer_config(paths)) is not None


def _chat_template(paths: dict[str, Path], config: JsonDict) -> str | None:
    if "chat_template.jinja" in paths:
        return paths["chat_template.jinja"].read_bytes().decode("utf-8")
    chat_template = config.get("chat_template")
    if isinstance(chat_template, list):  # several, by name
        items = (item for item in chat_template if isinstance(item, dict))
        chat_template = next(
            (item.get("template") for item in items if item.get("name") == "default"), None
        )
    return chat_template if isinstance(chat_template, str) and chat_template.strip() else None


def model_files(start_from: str, setting: str) -> dict[str, list[Path]]:
    """Local paths of the model's files by role; fetches files that the Hub's cache lacks.

    The roles: "config", "weights", and "tokenizer" and "second_head" if present. Raises UsageError.
    """
    directory = user_path(start_from).absolute()
    if not directory.is_dir():
        directory = from_hub(
            start_from,
            setting,
            MODEL_FILES,
            lambda cached: (cached / CONFIG).is_file() and bool(weight_files(cached)),
            f"name one of {', '.join((NONE, *TRAININGS))}, a folder that holds config.json, "
            "or owner/name[@revision]",
        )
    elif not (directory / CONFIG).is_file() and (directory / MODEL_DIRECTORY / CONFIG).is_file():
        directory /= MODEL_DIRECTORY  # of an artifact
    if not (directory / CONFIG).is_file():
        raise UsageError(
            f"{setting} is '{start_from}', which has no {CONFIG}; name a folder that "
            "save_pretrained wrote, or merge an adapter into its model first: "
            f"`ttrain export {start_from} --merge --to FOLDER`"
        )
    try:
        weights = weight_files(directory)
    except ArtifactError as error:
        raise UsageError(
            f"{setting} is '{start_from}': {error}; pickles may run code and are not opened; "
            "load them elsewhere and name what save_pretrained writes"
        ) from None
    names = [CONFIG, GENERATION]
    if weights != [directory / MODEL]:  # else an index of shards in the same folder is not read
        names.append(MODEL + INDEX_SUFFIX)
    files_by_role = {
        "config": [directory / name for name in names if (directory / name).is_file()],
        "weights": weights,
        "tokenizer": [directory / JSON],
        "second_head": [directory / SECOND_HEAD],
    }
    return {role: paths for role, paths in files_by_role.items() if paths[0].is_file()}


def max_length(path: Path) -> int | None:
    """Positions that the model with this config accepts, in tokens; None if not in the config.

    Raises UsageError if it is not a JSON object.
    """
    try:
        config = need_object(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    lengths = map(config.get, LENGTHS)
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)
