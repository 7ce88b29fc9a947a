"""About how long a plan takes on this machine, and how often it passes over its data. Imports nothing heavy.

The rate of a training is that of the newest artifact of its stage that this machine made, else of another training, else
the quickstart's. It is scaled by the FLOPs of a token, which grow with the parameters. What is not known is left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ttrain.config import PythonDocs, Settings, Training, rules
from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.machine import cpu_flags, usable_cores
from ttrain.data import locations
from ttrain.engine import resume
from ttrain.engine.graph import Planned
from ttrain.engine.input_files import TRAIN, data_files
from ttrain.engine.provenance import machine
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.results import ShardsResult, TokenizerResult, TrainingResult
from ttrain.tasks import SHARDS

PLENTY_OF_ROWS = 1_000_000  # for a number that is not known
LONG_SECONDS, MANY_PASSES = 86_400, 40  # repeated tokens are worth little after forty passes (arXiv:2305.16264)

# The quickstart on two cores, as README says: what its trainings compute in a second with bf16 and without it, and the
# seconds of its other stages, whose data has so many bytes.
CPU_FLOPS = {True: 1.4e11, False: 0.4e11}
QUICKSTART_FLOPS = 8e6  # of a token
# A larger model uses more of a CPU: 0.7, 1.0 and 1.8e11 FLOP/s of a core were measured at 1, 10 and 25 M parameters.
EFFICIENCY = 0.2  # so FLOP/s grow by this power of a token's FLOPs, at least
MOST_CORES = 8  # to which the speed of so small models grows
START_SECONDS = 5.0  # of a training: to load the libraries, and to validate
OTHER_SECONDS = {"source": 2.0, "tokenizer": 3.0, **dict.fromkeys((stage.name for stage in SHARDS.values()), 2.0)}
EVALUATE, EVALUATED_TOKENS = "evaluate", 375_000  # of a training: what it takes the time of
QUICKSTART_BYTES = {"pretrain": 2_132_016, "sft": 615_705, "lora": 136_234}
SCALED_BYTES = 10  # times as many as an earlier artifact was made of: of less data, most of its time is the start

# UTF-8 bytes of a token with 2048 tokens, and with more: 3.13 of English documents, and a fraction of it where the template
# of chats and the keys of their rows come on top.
BYTES_PER_TOKEN, GROWTH, CHAT_FRACTION = 3.1, 0.15, 0.65
PLAIN = (".jsonl", ".json", ".txt", ".md")  # of others, packed, the size does not tell the text's

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True)
class StageEstimate:
    """Of a stage that will run. `tokens`: that it trains on; `passes`: over its data, of the whole budget."""

    stage: str
    seconds: float | None = None
    tokens: int | None = None
    passes: float | None = None

    def __str__(self) -> str:
        passes = f" ({_two_digits(self.passes)} passes)" if self.passes is not None and self.passes >= 1.05 else ""
        return f"{self.stage} {'?' if self.seconds is None else about(self.seconds)}{passes}"


@dataclass(frozen=True)
class Estimate:
    """Of the stages that will run, in their order; `rate`: by what they were estimated."""

    stages: tuple[StageEstimate, ...]
    rate: str

    @property
    def seconds(self) -> float | None:
        """In all; None where the time of a training is not known."""
        if any(each.seconds is None for each in self.stages if each.stage in TRAINING_STAGES):
            return None
        return sum(each.seconds or 0 for each in self.stages)

    def lines(self) -> list[str]:
        """For a person; [] where nothing is known."""
        shown = [str(each) for each in self.stages if each.seconds is not None or each.passes is not None]
        if not shown:
            return []
        if self.seconds is None:
            return [f"about, as far as it is known: {', '.join(shown)}"]
        return [f"takes about {about(self.seconds)} here, by {self.rate}: {', '.join(shown)}"]

    def remarks(self) -> list[str]:
        """What a person is asked about before it runs."""
        remarks = [
            f"{each.stage} passes about {each.passes:,.0f} times over its data: after some {MANY_PASSES} "
            f"passes more of them teach little; use more data or a smaller {each.stage} budget"
            for each in self.stages
            if (each.passes or 0) > MANY_PASSES
        ]
        if (self.seconds or 0) > LONG_SECONDS:
            remarks.append("this takes over a day here: `ttrain doctor` shows in a minute whether it trains and fits")
        return remarks

    def to_json(self) -> JsonDict:
        """What `plan --json` prints; null where it is not known."""
        return {"seconds": self.seconds, "rate": self.rate, "stages": [asdict(each) for each in self.stages]}


def about(seconds: float) -> str:
    """A duration with two digits: "40 s", "12 min", "3.4 h", "2.1 days"."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(max(seconds, 1))} s"


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"


def estimate(stages: Iterable[Planned], settings: Settings, store: ArtifactStore) -> Estimate:
    """Estimate the stages of a plan that will run."""
    planned = {each.stage.name: each for each in stages}
    estimator = _Estimator(planned, settings, store)
    found = tuple(estimator.of(each) for each in planned.values() if each.state == "run")
    return Estimate(found, estimator.rate)


@dataclass
class _Estimator:
    planned: dict[str, Planned]
    settings: Settings
    store: ArtifactStore
    rate: str = "the quickstart's rate on a similar CPU"

    def of(self, planned: Planned) -> StageEstimate:
        name, dataset = planned.stage.name, planned.stage.dataset or ""
        if name in TRAINING_STAGES:
            return self._training(planned)
        earlier = self._made_here(name)
        if name == EVALUATE:
            return StageEstimate(name, self._evaluation(earlier))
        data = self._bytes(dataset) or 0
        seconds, size = OTHER_SECONDS.get(name), QUICKSTART_BYTES.get(dataset, 0)
        if earlier and data <= SCALED_BYTES * _bytes_of(earlier):
            seconds, size = earlier.manifest.get("seconds"), _bytes_of(earlier)
        return StageEstimate(name, seconds and seconds * max(1.0, data / size if size else 1.0))

    def _training(self, planned: Planned) -> StageEstimate:
        name = planned.stage.name
        section: Training = getattr(self.settings, name)
        data = self._tokens(TRAINING_STAGES[name].dataset)
        section = section.resolved(max(1, data // section.row_length) if data else PLENTY_OF_ROWS)
        tokens = section.token_budget or (data and round(data * (section.passes or 0)))
        passes = section.passes or (data and tokens and tokens / data)
        rest = tokens and max(0, tokens - self._first_step(planned) * section.step_tokens)
        flops = self._flops_per_token(section.row_length)
        rate = self._tokens_per_second(name, flops) if flops else None
        seconds = START_SECONDS + rest / rate if rest is not None and rate else None
        return StageEstimate(name, seconds, tokens or None, passes or None)

    def _first_step(self, planned: Planned) -> int:
        """The step of the checkpoint that a training continues at; 0 where it begins."""
        if planned.partial_run:
            return planned.partial_run.step
        if planned.start_from:
            return int(planned.start_from.name.removeprefix("step-"))
        return resume.saved_step(self.store.work(planned.stage.name, planned.key)) if planned.key else 0

    def _evaluation(self, earlier: Artifact | None) -> float | None:
        if earlier:
            return float(earlier.manifest.get("seconds", 0)) or None
        flops = self._flops_per_token(self.settings.evaluate.row_length)
        rate = self._quickstart_rate(flops) if flops else None
        return START_SECONDS + EVALUATED_TOKENS / rate if rate else None

    def _tokens_per_second(self, stage: str, flops: float) -> float | None:
        for name in (stage, *TRAININGS):
            artifact = self._made_here(name)
            rate = TrainingResult.of(artifact.result).tokens_per_second if artifact else 0.0
            if artifact is None or not rate:
                continue
            settings = artifact.provenance["settings"]
            before = _flops_per_token(settings, settings.get(name, {}).get("row_length", 0))
            if before:
                self.rate = f"the rate of the run {artifact.provenance['run']}"
                return rate * math.pow(before / flops, 1 - EFFICIENCY)
        return self._quickstart_rate(flops)

    def _quickstart_rate(self, flops: float) -> float | None:
        """By the quickstart on a CPU of this kind; None where a GPU may be used, of which it says nothing."""
        runtime = self.settings.runtime
        may_use_gpu = sys.platform == "darwin" or any(Path(file).exists() for file in GPU_FILES)
        if runtime.device not in ("auto", "cpu") or (runtime.device == "auto" and may_use_gpu):
            return None
        has_bf16 = not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16"})
        tokens_per_second = CPU_FLOPS[has_bf16] / QUICKSTART_FLOPS * min(usable_cores(), MOST_CORES) / 2
        return tokens_per_second * math.pow(QUICKSTART_FLOPS / flops, 1 - EFFICIENCY)

    def _made_here(self, stage: str) -> Artifact | None:
        """Its newest artifact that this machine made with the same devices."""
        runtime = self.settings.runtime
        devices = {"device": runtime.device, "devices": runtime.devices, "nodes": runtime.nodes}
        for artifact in self.store.artifacts(stage):
            made = artifact.provenance
            same = made.get("machine") == machine() and devices.items() <= made.get("runtime", {}).items()
            if same and made.get("settings") and made.get("run"):
                return artifact
        return None

    def _flops_per_token(self, row_length: int) -> float | None:
        base = self.planned.get("base-model")
        if self.settings.existing_model is None:
            return _flops_per_token(self.settings.model_dump(mode="json", include={"model", "tokenizer"}), row_length)
        parameters = TrainingResult.of(base.artifact.result).parameters if base and base.artifact else 0
        return 6.0 * parameters if parameters else None

    def _tokens(self, dataset: str) -> int | None:
        """The tokens that a training is trained on: of its shards, else estimated from the bytes of its files."""
        shards = self.planned.get(SHARDS[dataset].name)
        if shards and shards.artifact:
            return ShardsResult.of(shards.artifact.result).train.tokens or None
        size = self._bytes(dataset)
        if not size:
            return None
        per_token = BYTES_PER_TOKEN * math.pow(self.settings.tokenizer.vocab_size / 2048, GROWTH)
        is_documents = any(row.dataset == dataset and row.rows == "documents" for row in TRAINING_STAGES.values())
        return round(size / per_token / (1.0 if is_documents else CHAT_FRACTION))

    def _bytes(self, dataset: str) -> int | None:
        """The bytes of a data set; None where they do not say how much is read, or a server would have to be asked."""
        settings = self.settings
        if dataset == "tokenizer" and not settings.data.tokenizer:
            dataset = "pretrain"
        if dataset not in SHARDS or settings.reading.limit or any(map(locations.is_remote, settings.data.paths(dataset))):
            return None
        if settings.reads_python_docs(dataset):
            return QUICKSTART_BYTES.get(dataset) if settings.python_docs == PythonDocs() else None
        files = data_files(SHARDS[dataset], settings).get(TRAIN, [])
        if any(file.weight is not None or not file.location.endswith(PLAIN) for file in files):
            return None
        return sum(locations.local_path(file.location).stat().st_size for file in files)


def _flops_per_token(settings: JsonObject, row_length: int) -> float | None:
    """Forward and backward (arXiv:2204.02311, appendix B), of a dense model; None where settings do not describe it."""
    try:
        model = settings["model"]
        weights = rules.layer_parameters(model) + int(settings["tokenizer"]["vocab_size"]) * int(model["hidden_size"])
        return 6.0 * weights + 12.0 * int(model["layers"]) * int(model["hidden_size"]) * row_length
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _bytes_of(artifact: Artifact) -> int:
    """The bytes that a stage of data read."""
    return TokenizerResult.of(artifact.result).bytes or ShardsResult.of(artifact.result).train.bytes
