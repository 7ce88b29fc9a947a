"""A tokenizer that exists, taken instead of training one: a folder, or a name on the Hugging Face Hub.

Only its JSON is read, never code. What ttrain needs and it lacks (begin and end of a document, padding apart from that end,
the tokens of a chat template of ttrain) is added at the end of the vocabulary.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.files import parse_json
from ttrain.data import jinja_templates
from ttrain.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

JSON = "tokenizer.json"
FILES = (JSON, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
ON_HUB = re.compile(r"(?:hf://)?(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")
NAMES = ("pad_token", "bos_token", "eos_token", "unk_token")
CONVERT = "AutoTokenizer.from_pretrained(...).save_pretrained(folder) makes one"
log = logging.getLogger("ttrain")


def files(existing: str) -> list[Path]:
    """The files of `tokenizer.existing` that count, on this machine; fetched from the Hub where its cache lacks them.

    Raises UsageError where there is no such tokenizer, or none with tokenizer.json.
    """
    directory = Path(existing).expanduser()
    named = ON_HUB.fullmatch(existing)
    if not directory.is_dir():
        if named is None or directory.exists():
            raise UsageError(
                f"tokenizer.existing is '{existing}' but no such folder is there; "
                "name a folder that holds tokenizer.json, or owner/name[@revision] on the Hub"
            )
        directory = from_hub(existing, "tokenizer.existing", FILES, lambda cached: (cached / JSON).is_file())
    if not (directory / JSON).is_file():
        raise UsageError(f"tokenizer.existing is '{existing}', which has no tokenizer.json; {CONVERT}")
    return [directory / name for name in FILES if (directory / name).is_file()]


def from_hub(text: str, setting: str, patterns: Sequence[str], is_whole: Callable[[Path], bool]) -> Path:
    """The folder in the Hub's cache with the files that match `patterns`; fetched where `is_whole` finds some missing there.

    `text` is owner/name[@revision], which `setting` gives. Raises UsageError where it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    named = ON_HUB.fullmatch(text)
    assert named is not None, f"{text} is no name on the Hub"
    name, revision = named.groups()

    def fetch(*, local_files_only: bool) -> Path:
        found = snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=local_files_only)
        return Path(str(found))

    try:
        cached = fetch(local_files_only=True)
        if is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, ValueError):
        pass
    try:
        return fetch(local_files_only=False)
    except Exception as error:  # of the network, of the Hub, of the name
        reason = str(error).strip().splitlines()
        raise UsageError(
            f"{setting} is '{text}', which is neither a folder nor in the Hub's cache, and fetching it failed: "
            f"{reason[0] if reason else type(error).__name__}; fetch it elsewhere and name the folder"
        ) from None


def take(found: Sequence[Path], directory: Path, template: str) -> None:
    """Write the tokenizer of these files under `directory`, with all that ttrain needs.

    `template`: "auto" is its own chat template, or ttrain's where it has none.

    Raises UsageError where it cannot be used, and says what could.
    """
    from ttrain.data.encoder import END_OF_TURN, Encoder, open_tokenizer
    from ttrain.data.tokenizer import MODEL_MAX_LENGTH, write

    paths = {path.name: path for path in found}
    try:
        tokenizer = open_tokenizer(paths[JSON])
    except ArtifactError as error:
        raise UsageError(f"tokenizer.existing: {error}; {CONVERT}") from None
    config = _config(paths)
    if template == "auto":
        template = "own" if _found_template(paths, config) else "ttrain"
    tokens = _tokens(tokenizer, config)
    needed = [*tokens.values(), *(jinja_templates.SPECIAL_TOKENS[template][4:] if template != "own" else ())]
    added = _add(tokenizer, needed)
    source = tokenizer.to_str(pretty=True) if added else paths[JSON].read_bytes().decode("utf-8")
    jinja = jinja_templates.JINJA[template] if template != "own" else _own_template(paths, config)
    others = [token for token in special_tokens(tokenizer) if token not in tokens.values()]
    length = config.get("model_max_length")
    max_length = int(length) if isinstance(length, int) and 0 < length < 10**9 else MODEL_MAX_LENGTH

    def save(end: str) -> Encoder:
        write(directory, source, {**tokens, END_OF_TURN: end}, others, jinja, max_length)
        return Encoder(directory)

    encoder = save(jinja_templates.END_TOKENS[template] if template != "own" else tokens["eos_token"])
    if template == "own":
        from ttrain.data.chat_templates import Message
        from ttrain.data.custom_template import ForeignTemplate

        own = ForeignTemplate(encoder)
        question = (Message("user", "Q"),)
        whole = own.segments((*question, Message("assistant", "A")))
        save(str(tokenizer.id_to_token(own.end_id)))
        if _flat(own.prompt(question)) != _flat(whole)[: len(_flat(own.prompt(question)))]:
            log.warning("the chat template asks for an answer with another text than stands before the answers in training")
    if added:
        log.info("added to the tokenizer: %s", ", ".join(added))


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """The special tokens, in the order of their ids."""
    return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]


def _flat(segments: Sequence[Any]) -> list[Any]:
    return [part for content, _ in segments for part in ([content] if isinstance(content, str) else content)]


def _config(paths: dict[str, Path]) -> dict[str, Any]:
    """tokenizer_config.json over the older special_tokens_map.json."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in paths:
            try:
                value = parse_json(paths[name].read_bytes())
            except ValueError as error:
                raise UsageError(f"tokenizer.existing: cannot read {paths[name]}: {error}") from None
            merged.update({key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {})
    return merged


def _tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, str]:
    """Names and strings of pad, bos, eos and, where it has one, unk; padding is neither the end nor unknown."""

    tokens = dict(zip(NAMES, (jinja_templates.PAD, jinja_templates.BOS, jinja_templates.EOS), strict=False))
    for name in NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str) and token and (name != "unk_token" or tokenizer.token_to_id(token) is not None):
            tokens[name] = token
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_token")
    if unknown is None and model.get("unk_id") is not None:
        unknown = tokenizer.id_to_token(model["unk_id"])
    if unknown is not None and tokenizer.token_to_id(unknown) is not None:
        tokens["unk_token"] = unknown
    elif missing := _missing_bytes(tokenizer):
        raise UsageError(
            f"tokenizer.existing has no unknown token in its model and no token for {missing} of the 256 bytes, so that "
            "text would vanish; take another, or train one"
        )
    if tokens["pad_token"] in (tokens["eos_token"], tokens.get("unk_token")):
        tokens["pad_token"] = jinja_templates.PAD
    return tokens


def _missing_bytes(tokenizer: Tokenizer) -> int:
    """How many bytes have no token; all, where it does not work on bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    spec = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if spec["model"].get("byte_fallback"):
        return sum(f"<0x{byte:02X}>" not in vocabulary for byte in range(256))
    if '"ByteLevel"' in json.dumps([spec["pre_tokenizer"], spec["normalizer"]]):
        return sum(letter not in vocabulary for letter in ByteLevel.alphabet())
    return 256


def _add(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[str]:
    """Make each of the tokens special; returns those that were not."""
    special = set(special_tokens(tokenizer))
    added = [token for token in dict.fromkeys(tokens) if token not in special]
    taken = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokenizer.add_special_tokens(added)
    for token in added:
        number = int(tokenizer.token_to_id(token) or 0)
        if taken.get(number, token) != token:
            raise UsageError(f"tokenizer.existing has unused ids, so that {token} cannot be added: its id {number} is taken")
    return added


def _own_template(paths: dict[str, Path], config: dict[str, Any]) -> str:
    """The text of its chat template. Raises UsageError where it has none."""
    found = _found_template(paths, config)
    if found is None:
        raise UsageError(
            "tokenizer.template is 'own' but tokenizer.existing has no chat template; set tokenizer.template=ttrain"
        )
    return found


def brings_template(directory: Path) -> bool:
    """Whether the tokenizer in the directory has a chat template of its own."""
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        return bool(parse_json((directory / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _found_template(paths: dict[str, Path], config: dict[str, Any]) -> str | None:
    """The text of its chat template, wherever it keeps it; None where it has none."""
    if "chat_template.jinja" in paths:
        return paths["chat_template.jinja"].read_bytes().decode("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found.strip() else None
