"""Settings of how fast and where it runs, and of tracking: none of them is part of a key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ttrain.config.base import Location, Section, TimeOfDay, TimeZone, as_tuple, off_as_a_word
from ttrain.config.data import LEARNT
from ttrain.config.training import CHOSEN_BASE, TRAININGS


class Night(Section):
    """Hours in which training takes half of the machine: micro-batches and threads. The weights stay the same, up to the
    order of summation."""

    start: TimeOfDay = Field("22:00", description="hour:minute; included")
    end: TimeOfDay = Field("08:00", description="hour:minute; not included. The same as start: all day")
    timezone: TimeZone | None = Field(None, description="such as Europe/Berlin; empty: the machine's own")
    memory_limit_gb: float | None = Field(None, gt=0, description="of a rank, as runtime.memory_limit_gb")


# As in the table of stages (`ttrain/stages`), which imports this package.
STAGE_NAMES = (
    *("source", "tokenizer"),
    *(f"shards-{dataset}" for dataset in LEARNT),
    *("base-model", "new-model"),
    *TRAININGS,
    *("reference", "evaluate", "evaluate-champion", "heldout", "replay", "replay-sft"),
    *("average", "evaluate-night", "evaluate-average", CHOSEN_BASE),
)
StageName = Literal[STAGE_NAMES]  # type: ignore[valid-type]  # mypy wants them spelled out


class StageRuntime(Section):
    """The settings that may differ for one stage."""

    retries: int | None = Field(None, ge=0, le=50)
    retry_delay_seconds: float | None = Field(None, ge=0)
    timeout_seconds: float | None = Field(None, gt=0)


class Runtime(Section):
    """How fast and where it runs. Nothing here changes a key."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: cuda, then mps, then cpu")
    devices: int = Field(1, ge=1, description="ranks of a training stage, and of the evaluation, on this machine")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="which GPUs of this machine, by their numbers; empty: all that CUDA_VISIBLE_DEVICES leaves"
    )
    nodes: int = Field(1, ge=1, description="machines that train together, through torchrun; all need the same TTRAIN_HOME")
    node_rank: int = Field(0, ge=0, description="which of them this one is; 0 publishes")
    rendezvous: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description="host:port of node 0, where nodes meet")
    rank_timeout_seconds: float = Field(
        20.0, gt=0, description="ranks that do not answer, or all wait, for so long (or five of their steps) are ended"
    )
    threads: int | None = Field(None, ge=1, description="threads of a rank; empty: the cores divided by the ranks")
    rows_per_device: int = Field(16, ge=1, description="rows of one micro-batch on one rank")
    memory_limit_gb: float | None = Field(
        None, gt=0, description="of a rank, in 1e9 bytes: of the GPU, or of the process on a CPU; more ends the stage"
    )
    night: Night | None = Field(None, description="hours in which less of the machine is taken; empty: none")
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="ranks hold whole models, or shards of one (FSDP2)")
    reduction: Literal["fast", "tree"] = Field(
        "fast", description="tree: gradients are summed in an order that no number of ranks changes, equal to the last bit"
    )
    deterministic: bool = Field(True, description="the same run gives the same bits; false: the fastest kernels")
    compile: bool | None = Field(
        None, description="torch.compile; pays for long runs only. Empty: on CUDA, from 500 steps on, with rows of one width"
    )
    attention: Literal["auto", "records", "masked"] = Field(
        "auto",
        description="records: one by one, by native kernels or flash attention; masked: torch's, with a mask; auto: records",
    )
    tune: Annotated[Literal["off", "auto"], BeforeValidator(off_as_a_word)] = Field(
        "off",
        description="auto: where deterministic is false, measure for at most a minute which rows_per_device, attention, "
        "loss_chunk_tokens and compile are fastest, and remember it",
    )
    loss_chunk_tokens: int | None = Field(
        None, ge=0, description="tokens whose logits are in memory at once; empty: chosen, 0: all of a micro-batch"
    )
    gradient_checkpointing: bool = Field(
        False, description="keep only what goes into each layer, and compute it again for the gradient: a third slower"
    )
    log_every_steps: int = Field(10, ge=1, description="steps between two points of the curves")
    quick_validations: int = Field(
        8, ge=0, description="while a stage trains, on a few held-out rows, where validate_every_steps is 0; 0: none"
    )
    system_metrics_seconds: int = Field(
        10, ge=0, description="between samples of what the machine does: CPU, memory, disk, network, GPUs; 0: none"
    )
    sample_every_steps: int = Field(0, ge=0, description="steps between texts that the model writes for you; 0: none")
    sample_prompts: tuple[str, ...] = Field(
        ("Return the", "Hello! Who are you?"), min_length=1, description="beginnings of documents, or what a user asks"
    )
    eval_every_steps: int = Field(
        0, ge=0, description="steps between evaluations on a small suite, the last step among them; 0: none"
    )
    eval_suite: Location | None = Field(
        None, min_length=1, description="the suite: a name or a YAML file; empty: what the stage itself holds out"
    )
    eval_limit: int = Field(32, ge=1, description="items of each of its tasks, which bounds the time")
    checkpoint_every_steps: int = Field(100, ge=1, description="steps between two checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="the newest so many, beside the best one")
    keep_every_steps: int = Field(0, ge=0, description="checkpoints of these steps stay for good; 0: none")
    keep_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="checkpoints of these steps are made, and stay for good"
    )
    guards: Annotated[Literal["warn", "off"], BeforeValidator(off_as_a_word)] = Field(
        "warn", description="look out for spikes of the loss, overfitting, a dead loader"
    )
    loggers: Annotated[tuple[Literal["tensorboard", "wandb", "swanlab"], ...], BeforeValidator(as_tuple)] = Field(
        (), description="where the curves go beside MLflow; each needs its extra: tb, wandb, swanlab"
    )
    workers: int | None = Field(None, ge=1, description="processes that make shards; empty: the cores")
    sharding: Literal["processes", "dask"] = Field("processes", description="where shards are made; dask: on its cluster")
    dask_address: str | None = Field(None, description="scheduler of the Dask cluster; empty: a local one of `workers`")
    retries: int = Field(
        0,
        ge=0,
        le=50,
        description="how often Prefect runs a failed stage again; a mistake of settings or data fails at once",
    )
    retry_delay_seconds: float = Field(
        10.0, ge=0, description="before the first retry; each further one waits twice as long"
    )
    timeout_seconds: float | None = Field(None, gt=0, description="of one stage; empty: none")
    stages: dict[StageName, StageRuntime] = Field({}, description="what differs for one stage: runtime.stages.sft.retries=2")

    def attempts_of(self, stage: str) -> StageRuntime:
        """Retries and times of a stage: its own where it has some, else those of all stages."""
        own = self.stages.get(stage, StageRuntime()).model_dump(exclude_none=True)
        return StageRuntime(**{**{name: getattr(self, name) for name in StageRuntime.model_fields}, **own})

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Runtime:
        if self.node_rank >= self.nodes:
            raise ValueError(
                f"runtime.node_rank is {self.node_rank} but must be below runtime.nodes, which is {self.nodes}; "
                f"nodes count from 0"
            )
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(
                f"runtime.nodes is {self.nodes} but runtime.rendezvous is empty; set it to host:port of node 0, on all nodes"
            )
        return self


class TaskRuntime(Section):
    """Runtime settings of a task; a step is one micro-batch, unless it has more rows than this."""

    runtime: Runtime = Runtime(rows_per_device=1024)


class Tracking(Section):
    """MLflow."""

    enabled: bool = Field(True, description="false: nothing is sent to MLflow, nor looked up there")
    experiment: str = Field("ttrain", min_length=1, description="MLflow's experiment")


Auth = Literal["token", "off"]


class Servers(Section):
    """Prefect's and MLflow's servers, where ttrain starts them."""

    auth: Annotated[Auth, BeforeValidator(off_as_a_word)] = Field(
        "token", description="who may use them: who shows the token in servers/token of the home; off: every account"
    )


class ServersConfig(Section):
    """The settings of commands that only start servers."""

    servers: Servers = Servers()
