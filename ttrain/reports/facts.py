"""Facts from manifests and settings of a run, for terminal, pages, cards and MLflow."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ttrain.config import Settings, flatten, rules
from ttrain.config.training import BITS_PER_BYTE, model_order
from ttrain.core.hashing import digest_of
from ttrain.core.text import ABSENT, short_digest
from ttrain.reports.summary import Result
from ttrain.store.layout import Manifest
from ttrain.store.results import EvaluationResult

MAIN_SETTINGS = frozenset(
    {
        "model.kind",
        "model.hidden_size",
        "model.layers",
        "tokenizer.vocab_size",
        "pretrain.tokens",
        "pretrain.optim.lr",
        "sft.epochs",
        "sft.optim.lr",
        "lora.rank",
        "lora.optim.lr",
    }
)
REFERENCE = "in the data"  # title of the data's own continuation, next to the models'
# The sign of the better direction by names of metrics; the first pattern that matches counts.
BETTER = (
    # Metrics of the data, not of a model: the size of the held-out text, also compressed.
    (
        r"[_/](xz|zlib|order\d)$|/(items|left_out)$"
        r"|^eval/(.*_)?(bytes|tokens|documents|chats|domain)$|/tokens$|^champion/",
        0,
    ),
    (
        r"tokens_per_second|mfu|bytes_per_token|accuracy|margin|fill$"
        r"|/(ended|clean|distinct_\d)(/|$)",
        1,
    ),
    (
        rf"loss|perplexity|{BITS_PER_BYTE.name}|seconds|hours|unk_rate|pad_fraction|data_wait"
        r"|time_share|/(repeated|loops|empty)(/|$)",
        -1,
    ),
)
# The order of metrics in tables: those that decide come first.
FIRST = (
    rf"^{BITS_PER_BYTE.of_run}$",
    rf"^{BITS_PER_BYTE.of_run}_(sft|lora)$",
    r"^eval/.*loss",
    r"validation_loss$",
    r"/loss$",
    r"tokens_per_second|^total/",
    r"^tok/",
)


def changed_settings(settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{dotted name: (value, default)} of settings that are neither default nor by rule."""
    defaults = dict(flatten(Settings().model_dump(mode="json")))
    automatic = _automatic(settings)
    changed: dict[str, tuple[Any, Any]] = {}
    for name, value in settings.items():
        usual = defaults.get(name, ABSENT)
        if value == usual:
            usual = automatic.get(name, usual)
        if value != usual:
            changed[name] = value, usual
    return changed


def _automatic(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in rules.automatic(settings).items()
    }


def as_yaml(value: Any) -> str:
    """The value of a setting as in a settings file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are MLflow parameters: not defaults, or of the ten most compared.

    Values of rules are left out.
    """
    shown = {*changed_settings(settings), *MAIN_SETTINGS} - set_by_rule(settings).keys()
    return {name: value for name, value in settings.items() if name in shown}


def set_by_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in _automatic(settings).items() if settings.get(name) == value
    }


def files_of(manifest: Manifest) -> Iterable[tuple[str, str, str]]:
    """(role, name, short digest) of files that a stage read."""
    for role, files in manifest.get("ingredients", {}).get("files", {}).items():
        for file in files:
            yield role, file["name"], short_digest(file["sha256"])


def code_of(manifest: Manifest) -> str:
    return short_digest(digest_of(manifest["ingredients"].get("code", {})))


def versions_of(manifests: Iterable[Manifest]) -> dict[str, list[str]]:
    """{python, platform or library: versions}; stages may differ."""
    versions = dict[str, list[str]]()
    for manifest in manifests:
        provenance = manifest.get("provenance", {})
        recorded = {name: provenance.get(name) for name in ("ttrain", "python", "platform")}
        for name, version in {**recorded, **provenance.get("libraries", {})}.items():
            if version and version not in versions.setdefault(name, []):
                versions[name].append(version)
    return versions


def samples_of(evaluation: Manifest) -> dict[tuple[str, str], Result]:
    """{(model, prompt): sample} of an evaluation's manifest, in the order of models."""
    by_model = EvaluationResult.of(evaluation.get("result", {})).samples
    return {
        (model, sample["prompt"]): sample
        for model in sorted(by_model, key=model_order)
        for sample in by_model[model]
    }


def better(name: str) -> int:
    """-1 if lower is better, 1 if higher is, else 0."""
    return next((sign for pattern, sign in BETTER if re.search(pattern, name)), 0)


def rank(name: str) -> tuple[int, str]:
    """Sort key for names of metrics: deciding ones first."""
    return next(
        (position for position, pattern in enumerate(FIRST) if re.search(pattern, name)), len(FIRST)
    ), name


def ranked(values: Sequence[float | None], sign: int) -> list[int]:
    """Indices of finite values, the best first; `sign` -1: the lowest."""
    signed = {
        number: -sign * value
        for number, value in enumerate(values)
        if value is not None and math.isfinite(value)
    }
    return sorted(signed, key=lambda number: signed[number])


def letter(number: int) -> str:
    """Short name of a compared run: A, B, ...; R27, ... after Z."""
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def short(value: float) -> str:
    """A large count in short form: "950", "12.8k", "1.5M"."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    shown = (f"{value / size:.4g}{unit}" for size, unit in units if abs(value) >= size)
    return next(shown, f"{value:,.6g}")


def change(value: float | None, base: float | None) -> str:
    """The relative change as "+2.4 %"; "" if undefined."""
    if value is None or not base or not math.isfinite(value - base):
        return ""
    percent = 100 * (value - base) / abs(base)
    if abs(percent) < 0.005:
        return "±0 %"
    return f"{percent:+.2f} %" if abs(percent) < 10 else f"{percent:+,.0f} %"
