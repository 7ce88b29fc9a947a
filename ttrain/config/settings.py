"""The whole tree of settings."""

from collections.abc import Collection, Mapping

from ttrain.config.base import Section, need, setting
from ttrain.config.data import Data, PythonDocs, Reading, Shards, Tokenizer
from ttrain.config.evaluate import Evaluate
from ttrain.config.model import Model
from ttrain.config.nightly import Nightly, Notify, Promotion
from ttrain.config.runtime import Runtime, Tracking
from ttrain.config.training import NONE, TRAINING_STAGES, TRAININGS, Dpo, Lora, Pretrain, Sft

# Stages without data of their own by default, which are trained wherever they have some.
OPTIONAL = tuple(name for name in TRAININGS if not Data.model_fields[name].default)
# Sections that shape no result, and so are part of no key.
SHAPE_NO_RESULT = ("runtime", "tracking", "nightly", "promotion", "notify")
# Sections that shape the models, in the order of the pipeline.
SHAPING = ("reading", "tokenizer", "model", *TRAININGS, "evaluate", "source")
# Sections and settings that name code, a command, a file with code, or a machine that sends code:
# who may start a flow run through Prefect's API or UI cannot set them, since all that they name
# runs as the account that serves.
NAMES_CODE = (
    "notify",  # a command; addresses that are notified
    "runtime.loggers",  # third-party programs, which send curves elsewhere
    "runtime.dask_address",  # sends pickles, which are code
    "runtime.rendezvous",  # as do the ranks of other nodes
    "runtime.eval_suite",  # which may name task files of lm-evaluation-harness with code
    "evaluate.suites",
    "shards.decontaminate",  # suites, too
)


def root_of(name: str, starts: Mapping[str, str]) -> tuple[str, str]:
    """The first training stage on the way to a stage, and its start."""
    for _ in TRAININGS:  # of which a wrong setting may make a circle
        name = starts[name] if starts[name] in TRAININGS else name
    return name, starts[name]


def last_of(present: Collection[str]) -> str:
    return next((name for name in reversed(TRAININGS) if name in present), TRAININGS[-1])


def first_start(starts: Mapping[str, str], present: Collection[str]) -> tuple[str, str | None]:
    """(the first stage on the way to the last one with data, its existing start or None)."""
    first, start = root_of(last_of(present), starts)
    return first, None if start in (NONE, *TRAININGS) else start


def by_weight(name: str) -> tuple[int, str]:
    """Sort key of a setting: what shapes models first, what concerns the machine last."""
    group = name.partition(".")[0]
    return (
        SHAPING.index(group)
        if group in SHAPING
        else len(SHAPING) + (group in (*SHAPE_NO_RESULT, "name"))
    ), name


class Settings(Section):
    """The whole tree."""

    name: str = setting(
        "quickstart", "prefix of registered models", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
    )
    data: Data = Data()
    python_docs: PythonDocs = PythonDocs()
    reading: Reading = Reading()
    tokenizer: Tokenizer = Tokenizer()
    shards: Shards = Shards()
    model: Model = Model()
    pretrain: Pretrain = Pretrain()
    sft: Sft = Sft()
    dpo: Dpo = Dpo()
    lora: Lora = Lora()
    evaluate: Evaluate = Evaluate()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()
    nightly: Nightly = Nightly()
    promotion: Promotion = Promotion()
    notify: Notify = Notify()

    @property
    def starts(self) -> dict[str, str]:
        return {name: getattr(self, name).start_from for name in TRAININGS}

    @property
    def trainings(self) -> tuple[str, ...]:
        """The stages that train, in order: those with data, and their starts."""
        needed: set[str] = set()
        for name in (last_of(self.present), *filter(self.exists, OPTIONAL)):
            while name in TRAININGS and name not in needed:
                needed.add(name)
                name = self.starts[name]
        return tuple(name for name in TRAININGS if name in needed)

    def exists(self, name: str) -> bool:
        return bool(getattr(self.data, name))

    @property
    def present(self) -> list[str]:
        return [name for name in TRAININGS if self.exists(name)]

    @property
    def existing_model(self) -> str | None:
        """The existing model that the first training starts from; None if new."""
        return first_start(self.starts, self.present)[1]

    def reads(self, dataset: str) -> bool:
        """Whether the data set is used. An existing tokenizer needs no documents."""
        if dataset == "tokenizer":
            return (
                self.tokenizer.existing is None
                or bool(self.data.tokenizer)
                or "pretrain" in self.trainings
            )
        return dataset in self.trainings

    def reads_python_docs(self, dataset: str) -> bool:
        """Whether the data set is used and is the documentation of Python."""
        return self.reads(dataset) and self.data.uses_python_docs(dataset)

    def virtual_tokens(self, stage: str) -> int:
        """Positions that an adapter takes before every record of the stage."""
        stages = self.trainings if stage == "evaluate" else (stage,)
        return self.lora.virtual_tokens if self.lora.kind == "prefix" and "lora" in stages else 0

    def check_values(self) -> None:
        need(
            bool(self.present),
            f"{', '.join(f'data.{name}' for name in TRAININGS)} are none, but a pipeline trains "
            f"on one of them; set one, such as data.{TRAININGS[0]}=FILE",
        )
        for name in self.trainings:
            later = next((key for key in self.trainings if self.starts[key] == name), name)
            need(
                self.exists(name)
                or not TRAINING_STAGES[name].starts,  # of the first one the plan says it
                f"{later}.start_from is {name} but data.{name} names no files, without which "
                f"there is no stage {name}; "
                f"set data.{name}, or {later}.start_from={self.starts[name]}",
            )
        roots = {root_of(name, self.starts) for name in self.trainings}
        existing = {start for start in self.starts.values() if start not in (NONE, *TRAININGS)}
        begins = [
            f"{name}.start_from is {start}"
            for name, start in self.starts.items()
            if {start, (name, start)} & (existing | roots)
        ]
        need(
            len(roots) == 1 and len(existing) <= 1,
            f"{', '.join(begins)}: a pipeline starts from one model, since all its stages share "
            "one tokenizer; choose one",
        )
        model = self.existing_model
        need(
            model is None or self.tokenizer.existing is not None,
            f"tokenizer.existing is not set, but {self.trainings[0]}.start_from is {model}, whose "
            f"embeddings belong to one tokenizer; set tokenizer.existing to it, or leave it out",
        )
        # The plan checks an existing model's length.
        for name in (*self.present, "evaluate") if model is None else ():
            length = getattr(self, name).row_length
            virtual = self.virtual_tokens(name)
            after = f", after lora.virtual_tokens {virtual}," if virtual else ""
            need(
                length + virtual <= self.model.max_length,
                f"{name}.row_length is {length}{after} but model.max_length is "
                f"{self.model.max_length}; "
                f"set model.max_length={length + virtual}",
            )
