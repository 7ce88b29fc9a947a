"""Settings of speed, machine and tracking; none is part of an artifact's key."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ttrain.config.base import (
    Listed,
    Location,
    Section,
    TimeOfDay,
    TimeZone,
    as_tuple,
    need,
    setting,
)


class QuietHours(Section):
    """Hours in which training takes half of the machine: micro-batches and threads.

    The weights stay the same, up to the order of summation.
    """

    start: TimeOfDay = setting("22:00", "hour:minute; included")
    end: TimeOfDay = setting("08:00", "hour:minute; not included. The same as start: all day")
    timezone: TimeZone | None = setting(None, "such as Europe/Berlin; empty: the machine's own")
    memory_share: float | None = setting(
        None, "of a GPU's memory; a rank keeps what it has used before", gt=0, le=1
    )


class Runtime(Section):
    """How fast and where the stages run. No setting here changes an artifact's key."""

    device: Literal["auto", "cpu", "cuda", "mps"] = setting(
        "auto", "auto: cuda, then mps, then cpu"
    )
    devices: int = setting(
        1, "ranks of a training stage, and of the evaluation, on this machine", ge=1
    )
    gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Listed] = setting(
        (),
        "which GPUs of this machine, by their numbers; empty: all that CUDA_VISIBLE_DEVICES leaves",
    )
    nodes: int = setting(1, "machines that train together; all need the same TTRAIN_HOME", ge=1)
    node_rank: int = setting(0, "number of this machine; 0 publishes", ge=0)
    rendezvous: str | None = setting(
        None, "host:port of node 0, where nodes meet", pattern=r"^\S+:\d{1,5}$"
    )
    rank_timeout_seconds: float = setting(
        600.0,
        "a rank that waits for another for so long ends the stage: torch's timeout of collectives",
        gt=0,
    )
    threads: int | None = setting(
        None, "threads of a rank; empty: the cores divided by the ranks", ge=1
    )
    rows_per_device: int = setting(16, "rows of one micro-batch on one rank", ge=1)
    memory_limit_gb: float | None = setting(
        None,
        "of a rank, in 1e9 bytes: of its GPU, or of its process; more ends the stage",
        gt=0,
    )
    quiet_hours: QuietHours | None = setting(
        None, "hours in which less of the machine is taken; empty: none"
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "ranks hold whole models, or shards of one (FSDP2)"
    )
    deterministic: bool = setting(
        True, "the same run gives the same bits; false: the fastest kernels"
    )
    compile: bool | None = setting(
        None,
        "torch.compile; pays for long runs only. Empty: on CUDA, from 500 steps on, with rows "
        "of one width",
    )
    attention: Literal["auto", "records", "masked"] = setting(
        "auto",
        "records: one by one, by native kernels or flash attention; masked: torch's, with a "
        "mask; auto: records",
    )
    tune: Literal["off", "auto"] = setting(
        "off",
        "auto: where deterministic is false, measure for the time of some six steps which "
        "rows_per_device is fastest, "
        "and remember it",
    )
    loss_chunk_tokens: int | None = setting(
        None,
        "tokens whose logits are in memory at once; empty: chosen, 0: all of a micro-batch",
        ge=0,
    )
    gradient_checkpointing: bool = setting(
        False,
        "keep only what goes into each layer, and compute it again for the gradient: a "
        "third slower",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        "what the logs of stages and the terminal show: debug adds each step and the logs of "
        "all ranks, and the terminal "
        "shows the stages' logs; warning and error leave out progress",
    )
    log_every_steps: int = setting(10, "steps between two points of the curves", ge=1)
    quick_validations: int = setting(
        8,
        "while a stage trains, on a few held-out rows, where a stage validates at its end "
        "only; 0: none",
        ge=0,
    )
    system_metrics_seconds: int = setting(
        10,
        "between samples of what the machine does: CPU, memory, disk, network, GPUs; 0: none",
        ge=0,
    )
    sample_every_steps: int = setting(
        0, "steps between texts that the model writes for you; 0: none", ge=0
    )
    sample_prompts: Annotated[tuple[str, ...] | None, Listed] = setting(
        None,
        "beginnings of documents, or what a user asks; empty: two of the rows that the stage "
        "holds out",
        min_length=1,
    )
    eval_every_steps: int = setting(
        0, "steps between evaluations on a small suite, the last step among them; 0: none", ge=0
    )
    eval_suite: Location | None = setting(
        None,
        "the suite: a name or a YAML file; empty: what the stage itself holds out",
        min_length=1,
    )
    eval_limit: int = setting(32, "items of each of its tasks, which bounds the time", ge=1)
    checkpoint_every_steps: int = setting(100, "steps between two checkpoints", ge=1)
    checkpoint_every_epochs: int | None = setting(
        None, "also with the step that ends every so many passes over the rows; empty: none", ge=1
    )
    keep_checkpoints: int = setting(2, "newest checkpoints that stay, beside the best one", ge=1)
    keep_every_steps: int = setting(0, "checkpoints of these steps stay for good; 0: none", ge=0)
    guards: Literal["warn", "off"] = setting(
        "warn", "look out for spikes of the loss and overfitting"
    )
    loggers: Annotated[
        tuple[Literal["tensorboard", "wandb", "swanlab"], ...], BeforeValidator(as_tuple)
    ] = setting((), "where the curves go beside MLflow; each needs its extra: tb, wandb, swanlab")
    workers: int | None = setting(None, "processes that make shards; empty: the cores", ge=1)
    sharding: Literal["processes", "dask"] = setting(
        "processes", "where shards are made; dask: on its cluster"
    )
    dask_address: str | None = setting(
        None, "scheduler of the Dask cluster; empty: a local one of `workers`"
    )
    retries: int = setting(
        0,
        "how often Prefect runs a failed stage again; a mistake of settings or data fails at once",
        ge=0,
        le=50,
    )
    timeout_seconds: float | None = setting(None, "of one stage; empty: none", gt=0)

    def check_values(self) -> None:
        need(
            self.node_rank < self.nodes,
            f"runtime.node_rank is {self.node_rank} but must be below runtime.nodes, which is "
            f"{self.nodes}; "
            f"nodes count from 0",
        )
        need(
            self.nodes == 1 or self.rendezvous is not None,
            f"runtime.nodes is {self.nodes} but runtime.rendezvous is empty; set it to "
            "host:port of node 0, on all nodes",
        )


class TaskRuntime(Section):
    """Runtime settings of a task; a step is one micro-batch of up to `rows_per_device` rows."""

    runtime: Runtime = Runtime(rows_per_device=1024)


class Tracking(Section):
    """MLflow."""

    enabled: bool = setting(True, "false: nothing is sent to MLflow, nor looked up there")
    experiment: str = setting("ttrain", "MLflow's experiment", min_length=1)
