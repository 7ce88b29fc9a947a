"""Estimate how long a plan takes on this machine, and how often it passes over its data.

What was measured for these settings on this machine is remembered in the home, and comes first.
Else a training's rate is that of the newest artifact of its stage made on this machine, else of
another training, else the quickstart's, scaled by the FLOPs of a token. Unknown times are left out.
"""

import math
from dataclasses import asdict, dataclass

from ttrain.config import PythonDocs, Settings, Training, rules
from ttrain.config.data import dataset_read
from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.core.files import JsonDict
from ttrain.core.text import format_duration
from ttrain.data import locations
from ttrain.engine.graph import Plan, Planned
from ttrain.engine.input_files import TRAIN, data_files
from ttrain.engine.provenance import machine
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.results import ShardsResult, TokenizerResult, TrainingResult
from ttrain.tasks import EVALUATE, SHARDS
from ttrain.train.measured_steps import Measure, recall_or_measure
from ttrain.train.rates import QUICKSTART_FLOPS, flops_per_token, quickstart_rate, speed_up
from ttrain.train.schedules import QUICK_SHARE

PLENTY_OF_ROWS = 1_000_000  # assumed where the number of rows is not known
# Repeated tokens are worth as much as new ones for about four passes, and little after forty
# (arXiv:2305.16264).
LONG_SECONDS, FEW_PASSES, MANY_PASSES = 86_400, 4, 40

# Of the quickstart: the seconds of stages that do not train, and the tokens of its data.
START_SECONDS = 5.0  # of a training: to load the libraries, and to validate
EVALUATION_SECONDS = 8.0
QUICKSTART_SECONDS = {
    "source": 2.0,
    "tokenizer": 3.0,
    **dict.fromkeys((stage.name for stage in SHARDS.values()), 2.0),
}
QUICKSTART_TOKENS = {"pretrain": 696_495, "sft": 261_189, "lora": 83_960}  # with 2048 words

# UTF-8 bytes per token of documents with a vocabulary of 2048, and the exponent with which they
# grow with the vocabulary's size.
BYTES_PER_TOKEN = 3.1
GROWTH = 0.15
PLAIN = (".jsonl", ".json", ".txt", ".md")  # other files are compressed: their size says nothing


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of a stage that will run: `tokens` that it is trained on, `passes` over its data."""

    stage: str
    seconds: float | None = None
    tokens: int | None = None
    passes: float | None = None

    def __str__(self) -> str:
        passes = (
            f" ({round(self.passes, 1):,g} passes)" if self.passes and self.passes >= 1.05 else ""
        )
        return f"{self.stage} {'?' if self.seconds is None else _about(self.seconds)}{passes}"


@dataclass(frozen=True)
class Estimate:
    """Estimates of the stages that will run; `rate`: what they are based on."""

    stages: tuple[StageEstimate, ...]
    rate: str

    @property
    def seconds(self) -> float | None:
        """Total of the known times; None if none is known."""
        known = [each.seconds for each in self.stages if each.seconds is not None]
        return sum(known) if known else None

    @property
    def without(self) -> list[str]:
        """The stages whose time is not known."""
        return [each.stage for each in self.stages if each.seconds is None]

    def lines(self) -> list[str]:
        """Lines for the terminal; [] where nothing is known."""
        shown = ", ".join(str(each) for each in self.stages if each.seconds or each.passes)
        if not shown:
            return []
        if self.seconds is None:
            return [f"how long it takes here is not known yet: {shown}"]
        without = f" without {', '.join(self.without)}" if self.without else ""
        many = [
            each.stage for each in self.stages if FEW_PASSES < (each.passes or 0) <= MANY_PASSES
        ]
        after = (
            f"after {FEW_PASSES} passes over the same data more of them teach less: more data "
            f"helps {', '.join(many)}"
        )
        return [
            f"takes about {_about(self.seconds)} here{without}, by {self.rate}: {shown}",
            *([after] if many else []),
        ]

    def remarks(self) -> list[str]:
        """What to ask about before the run."""
        remarks = [
            f"{each.stage} passes about {each.passes:,.0f} times over its data: after some "
            f"{MANY_PASSES} "
            f"passes more of them teach little; use more data or a smaller {each.stage} budget"
            for each in self.stages
            if (each.passes or 0) > MANY_PASSES
        ]
        if (self.seconds or 0) > LONG_SECONDS:
            remarks.append(
                "this takes over a day here: `ttrain doctor` shows in a minute whether it "
                "trains and fits"
            )
        return remarks

    def to_json(self) -> JsonDict:
        """The form of `plan --json`, with null for unknown values."""
        return {
            "seconds": self.seconds,
            "without": self.without,
            "rate": self.rate,
            "stages": [asdict(each) for each in self.stages],
        }


def _about(seconds: float) -> str:
    rounded = float(f"{max(seconds, 1):.2g}")
    return f"{rounded:.0f} s" if rounded < 100 else format_duration(rounded)


def estimate(plan: Plan, measure: Measure | None = None) -> Estimate:
    """Estimate the stages of a plan that will run. `measure`: for what is not measured here yet."""
    estimator = _Estimator(
        {each.name: each.artifact for each in plan}, plan.settings, plan.store, measure
    )
    return Estimate(
        tuple(estimator.of(each) for each in plan if each.state == "run"), estimator.rate
    )


@dataclass
class _Estimator:
    artifacts: dict[str, Artifact | None]
    settings: Settings
    store: ArtifactStore
    measure: Measure | None = None
    rate: str = "the quickstart's rate on a similar CPU"

    def of(self, planned: Planned) -> StageEstimate:
        if planned.name not in TRAINING_STAGES:
            return StageEstimate(planned.name, self._seconds(planned))
        section: Training = getattr(self.settings, planned.name)
        data = self._tokens(planned.name)
        if data is None and section.epochs == rules.AUTO:  # by the number of rows
            return StageEstimate(planned.name)
        data = data and max(data, section.row_length)  # a row counts in full
        section = section.resolved(data // section.row_length if data else PLENTY_OF_ROWS)
        tokens = section.token_budget
        passes = section.passes
        if data:
            tokens = tokens or round(data * (passes or 0))
            passes = passes or tokens / data
        seconds = None
        if tokens:
            rest = max(0, tokens - planned.first_step * section.step_tokens)
            seconds = self._seconds_of(planned.name, section, rest)
        return StageEstimate(planned.name, seconds, tokens, passes)

    def _seconds(self, planned: Planned) -> float | None:
        # A stage that does not train takes as long as before, scaled by the bytes that it reads.
        earlier = self._made_here(planned.name)
        if planned.name == EVALUATE.name:  # longer with a larger model
            row_length = self.settings.evaluate.row_length
            if earlier:
                seconds = float(earlier.manifest["seconds"])
                flops = flops_per_token(earlier.provenance["settings"], row_length)
            elif self.settings.existing_model or not self._is_quickstart("pretrain"):
                return None
            else:
                seconds = EVALUATION_SECONDS
                flops = QUICKSTART_FLOPS
            return START_SECONDS + max(0.0, seconds - START_SECONDS) / speed_up(
                self.settings, flops, row_length
            )
        if earlier is None:
            return QUICKSTART_SECONDS.get(planned.name) if self._is_quickstart("pretrain") else None
        before = (
            TokenizerResult.of(earlier.result).bytes or ShardsResult.of(earlier.result).train.bytes
        )
        size = self._bytes(dataset_read(planned.stage.dataset or "", self.settings.data.tokenizer))
        return float(earlier.manifest["seconds"]) * max(1.0, (size or 0) / (before or math.inf))

    def _seconds_of(self, stage: str, section: Training, tokens: int) -> float | None:
        """Of a training on so many tokens, as measured, or by the rate of another training."""
        if measured := recall_or_measure(
            self.store.root, stage, section, self.settings, self.measure
        ):
            self.rate = "what was measured here"
            return (
                START_SECONDS
                + (1 + QUICK_SHARE) * measured.step * tokens / section.step_tokens
                + measured.row * section.validation_rows
            )
        rate = self._tokens_per_second(stage, section.row_length)
        return START_SECONDS + tokens / rate if rate else None

    def _tokens_per_second(self, stage: str, row_length: int) -> float | None:
        # For an existing model, only the same stage's rate is used.
        is_new = self.settings.existing_model is None
        for name in (stage, *TRAININGS) if is_new else (stage,):
            artifact = self._made_here(name)
            rate = TrainingResult.of(artifact.result).tokens_per_second if artifact else 0.0
            if artifact and rate:
                self.rate = f"the rate of the run {artifact.provenance['run']}"
                settings = artifact.provenance["settings"]
                before = flops_per_token(settings, settings[name]["row_length"])
                return rate * speed_up(self.settings, before, row_length) if is_new else rate
        return quickstart_rate(self.settings, row_length)

    def _made_here(self, stage: str) -> Artifact | None:
        runtime = self.settings.runtime
        devices = {"device": runtime.device, "devices": runtime.devices, "nodes": runtime.nodes}
        return next(
            (
                artifact
                for artifact in self.store.artifacts(stage)
                if artifact.provenance.get("machine") == machine()
                and devices.items() <= artifact.provenance.get("runtime", {}).items()
                and artifact.provenance.get("run")
            ),
            None,
        )

    def _tokens(self, dataset: str) -> int | None:
        if shards := self.artifacts.get(SHARDS[dataset].name):
            return ShardsResult.of(shards.result).train.tokens or None
        words = math.pow(self.settings.tokenizer.vocab_size / 2048, GROWTH)
        if self._is_quickstart(dataset) and dataset in QUICKSTART_TOKENS:
            return round(QUICKSTART_TOKENS[dataset] / words)
        if SHARDS[dataset].arguments["kind"] != "documents":
            return None
        size = self._bytes(dataset)
        return round(size / BYTES_PER_TOKEN / words) if size else None

    def _is_quickstart(self, dataset: str) -> bool:
        settings = self.settings
        return (
            settings.python_docs == PythonDocs()
            and not settings.reading.limit
            and settings.reads_python_docs(dataset)
        )

    def _bytes(self, dataset: str) -> int | None:
        # None where bytes do not say how much is read, or a server would have to be asked.
        settings = self.settings
        if (
            dataset not in SHARDS
            or settings.reading.limit
            or any(map(locations.is_remote, settings.data.paths(dataset)))
        ):
            return None
        files = data_files(SHARDS[dataset], settings).get(TRAIN, [])
        if any(file.weight is not None or not file.location.endswith(PLAIN) for file in files):
            return None
        return sum(locations.local_path(file.location).stat().st_size for file in files)
