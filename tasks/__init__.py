"""The stages of pipelines: a file for each, and their table here.

The rows are together, since the planner reads them and must not load torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ttrain import config
from ttrain.config.training import MOST_TEACHERS
from ttrain.core.files import JsonDict
from ttrain.store.model_files import PLATEAU


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline.

    sees          prefixes of the settings in its key, and the only ones its process gets
    inputs        artifacts that it reads, and which of their files (none: all that others may read)
    dataset       the entry of `data` whose files it reads itself
    uses_ranks    it trains
    uses_model    it loads what a training made
    reads_model   its files are those of the existing model
    reads_suites  its files are the suites of the evaluation, and what these read
    spreads       does not train, but has a process on each of `runtime.devices`
    """

    name: str
    module: str
    sees: tuple[str, ...] = ()
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dataset: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    uses_ranks: bool = False
    uses_model: bool = False
    reads_model: bool = False
    reads_suites: bool = False
    spreads: bool = False
    reads_python_docs: bool = False  # the text that ships with ttrain is its input
    memory: tuple[str, ...] = ()  # settings that lower the memory of its processes, for a message
    about: str = ""  # what it does, in a line for people
    reuses_parts: bool = (
        False  # what unfinished work and earlier artifacts hold is taken where it fits
    )
    keeps_output: bool = False  # continues after the files that a killed attempt left
    job: type[config.Section] = config.Settings  # what its process gets

    def part_of(self, settings: config.Settings) -> JsonDict:
        """The settings that it sees, as JSON for its key and its process."""
        sections = {prefix.partition(".")[0] for prefix in self.sees}
        return config.part_of(settings.model_dump(mode="json", include=sections), self.sees)

    @property
    def loads_torch(self) -> bool:
        """Whether its start would spend seconds on imports."""
        return self.uses_ranks or self.uses_model


# Reading of stages that do not compare documents.
EXACT_READING = tuple(
    f"reading.{name}" for name in config.Reading.model_fields if name != "near_duplicates"
)
EARLIER_HELDOUT = "earlier"  # among the inputs of stages: the held-out documents of earlier nights


SOURCE = Stage(
    "source",
    "ttrain.tasks.source",
    ("python_docs",),
    reads_python_docs=True,
    about="Write documents, chats and a domain from the text that ships with ttrain",
)
TOKENIZER = Stage(
    "tokenizer",
    "ttrain.tasks.tokenizer",
    (*EXACT_READING, "tokenizer"),
    inputs={"source": ("pretrain.jsonl",)},
    dataset="tokenizer",
    memory=("tokenizer.max_bytes",),
    about="Train a byte-level BPE with a chat template, or take an existing tokenizer",
)
ROWS = config.TRAINING_STAGES.values()  # of the table in `ttrain/config/training.py`
SHARDS: Mapping[str, Stage] = {
    row.name: Stage(
        name=f"shards-{row.name}",
        module="ttrain.tasks.shards",
        sees=("reading", "shards")
        if row.rows == "documents"
        else (*EXACT_READING, "shards", "sft.learn_reasoning"),
        inputs={
            "tokenizer": (),
            "source": (f"{row.name}.jsonl", f"{row.name}_heldout.jsonl"),
            **(
                {EARLIER_HELDOUT: ("heldout",)} if row.name == "pretrain" else {}
            ),  # and, in a night, what was learnt before
        },
        dataset=row.name,
        arguments={"kind": row.rows, "dataset": row.name},
        about=(
            f"Tokenize the {row.rows} of data.{row.name} into Arrow files, and hold a part of "
            "them out"
        ),
        reuses_parts=True,
        memory=("runtime.workers", "reading.max_line_bytes"),
    )
    for row in ROWS
}
SHARDS_PRETRAIN = SHARDS["pretrain"]
EXISTING_MODEL = Stage(
    "base-model",
    "ttrain.tasks.base_model",
    inputs={"tokenizer": ()},
    uses_model=True,
    reads_model=True,
    about="Take the existing model that a training starts from",
)
NEW_MODEL = Stage(
    "new-model",
    "ttrain.tasks.new_model",
    ("model", "pretrain.seed"),
    {"tokenizer": ()},
    uses_model=True,
    about="Make a model of random weights, where nothing is pretrained",
)


REFERENCE = Stage(
    "reference",
    "ttrain.tasks.reference",
    ("dpo.row_length", "dpo.packing", "dpo.stride", "dpo.mask_intervals", "dpo.precision"),
    {"base": (), "shards": ()},
    uses_model=True,
    spreads=True,
    memory=("runtime.rows_per_device",),
    keeps_output=True,
    about="Score the answers of the pairs with the model that preference tuning starts from",
)
TAUGHT_BY = "by-"  # before the number of a teacher, among the inputs
TEACHER = Stage(
    "teacher",
    "ttrain.tasks.teacher",
    tuple(
        f"pretrain.{name}"
        for name in ("row_length", "packing", "stride", "mask_intervals", "precision")
    ),
    {
        "tokenizer": (),
        "shards": (),
        "replay": (),
        **{f"{TAUGHT_BY}{number}": ("model",) for number in range(MOST_TEACHERS)},
    },
    uses_model=True,
    spreads=True,
    memory=("runtime.rows_per_device",),
    keeps_output=True,
    about="Note the likeliest next tokens of an earlier model at every position of the rows",
)
# What a training stage reads besides the model that it starts from and its shards.
OF_ROLE: Mapping[str, dict[str, tuple[str, ...]]] = {
    "base": {"tokenizer": (), "plateau": (PLATEAU,), TEACHER.name: ()}
}
OF_ROWS: Mapping[str, dict[str, tuple[str, ...]]] = {"pairs": {REFERENCE.name: ()}}


# The table itself is in `ttrain/config/training.py`, since settings, tracking and evaluation read
# it, too.
TRAINING_STAGES: Mapping[str, Stage] = {
    row.name: Stage(
        row.name,
        f"ttrain.tasks.{row.name}",
        (row.name, "model") if row.name == "pretrain" else (row.name,),
        {
            **OF_ROLE.get(row.role, {}),
            **OF_ROWS.get(row.rows, {}),
            **dict.fromkeys(("replay", "base", "shards"), ()),
        },
        uses_ranks=True,
        memory=("runtime.rows_per_device",),
        about=row.about,
    )
    for row in ROWS
}
PRETRAIN, SFT, LORA = (TRAINING_STAGES[name] for name in ("pretrain", "sft", "lora"))
# before an adapter's name, among the inputs of the evaluation: its base, if that is not tonight's
# model
BASE_OF = "base_of_"
EVALUATE = Stage(
    "evaluate",
    "ttrain.tasks.evaluate",
    ("evaluate",),
    inputs={
        **{row.model: () for row in ROWS},
        **{row.part: ("heldout",) for row in ROWS},
        **{f"{BASE_OF}{row.model}": ("model",) for row in ROWS if row.role == "adapter"},
    },
    uses_model=True,
    reads_suites=True,
    spreads=True,
    about="Measure the models on held-out data and on the suites of the evaluation",
)
# Stages of nights only: documents learnt before, the held-out set that a night's models are
# evaluated on, and the champion's evaluation on it.
LEARNT_BEFORE = "learnt-"
SHARE = "share"  # in the index of documents learnt before: of all tokens of the night
REPLAY = Stage(
    "replay",
    "ttrain.tasks.replay",
    (
        *("nightly.replay", "pretrain.tokens", "pretrain.epochs", "pretrain.seed"),
        *("pretrain.row_length", "pretrain.mask_intervals"),
    ),
    # And those of each earlier night, by names that begin with LEARNT_BEFORE; the tokenizer beside
    # what is held out.
    {"documents": (), "tokenizer": (), EARLIER_HELDOUT: ("heldout",)},
    about="Sample documents that the champion has learnt before",
)
REPLAY_SFT = replace(
    REPLAY,
    name="replay-sft",
    sees=("nightly.replay", "sft.tokens", "sft.epochs", "sft.seed"),
    about="Sample chats that the champion has learnt before",
)
HELDOUT = Stage(
    "heldout",
    "ttrain.tasks.heldout",
    ("evaluate.max_bytes",),
    {EARLIER_HELDOUT: ("heldout",), "documents": ("heldout",)},
    about="Collect the held-out documents of all nights",
)
EVALUATE_CHAMPION = replace(
    EVALUATE, name="evaluate-champion", about="Measure the champion on the same data, in a night"
)
OF_NIGHTS = frozenset(stage.name for stage in (REPLAY, REPLAY_SFT, HELDOUT, EVALUATE_CHAMPION))

STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        *(SOURCE, TOKENIZER, *SHARDS.values(), EXISTING_MODEL, NEW_MODEL),
        *(
            REPLAY,
            REPLAY_SFT,
            TEACHER,
            REFERENCE,
            *TRAINING_STAGES.values(),
            HELDOUT,
            EVALUATE,
            EVALUATE_CHAMPION,
        ),
    )
}

# What `ttrain train` and `ttrain gate train` run is not part of a pipeline, but runs like a stage.
TASK = Stage(
    "task",
    "ttrain.tasks.user_task",
    job=config.TaskJob,
    uses_ranks=True,
    memory=("runtime.rows_per_device",),
)
GATE = Stage("gate", "ttrain.tasks.gate", job=config.GateJob, uses_ranks=True)
RUNNABLE: Mapping[str, Stage] = {**STAGES, TASK.name: TASK, GATE.name: GATE}
