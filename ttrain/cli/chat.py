"""The `ttrain chat`, `ttrain generate` and `ttrain serve` commands."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ttrain.cli.options import (
    MODEL_HELP,
    AdapterBase,
    AsJson,
    Output,
    RunName,
    Table,
    app,
    argument,
    check_output_file,
    command,
    option,
    resolved_models,
)
from ttrain.core.hashing import sha256_file
from ttrain.core.signals import handling_signals
from ttrain.core.terminal import bar, encodable, outlast_output, print_escaped, print_json_text
from ttrain.errors import UsageError
from ttrain.store.layout import usable_home
from ttrain.store.model_files import Reference

if TYPE_CHECKING:
    from ttrain.inference.chat import ModelSelector
    from ttrain.inference.loading import LoadedModel
    from ttrain.inference.sampling import Sampling

DEFAULT_MODEL = (
    f"{MODEL_HELP}; without one, the newest finished run's SFT model, else its last model"
)
System = Annotated[str, option("a system prompt", callback=encodable)]
Temperature = Annotated[float, option("0: always the most likely token")]
TopP = Annotated[float, option("keep the likeliest tokens that together have this share; 1: all")]


@dataclass(frozen=True)
class LoadingOptions:
    run: RunName = None
    base: AdapterBase = None
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"], option("auto: cuda, then mps, then cpu")
    ] = "auto"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], option("number format of the weights")] = (
        "fp32"
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How a model's tokens are drawn."""

    temperature: Temperature = 0.7
    top_p: TopP = 0.95
    top_k: Annotated[int, option("keep that many of the likeliest tokens; 0: all")] = 0
    repetition_penalty: Annotated[
        float, option("above 1, tokens that the answer already contains become less likely")
    ] = 1.0
    max_tokens: Annotated[int, option("longest answer, in tokens")] = 256
    seed: Annotated[int, option("the same seed, the same answers")] = 1

    def settings(self) -> Sampling:
        """The checked settings. Raises UsageError."""
        from ttrain.inference.sampling import sampling

        return sampling(**asdict(self))


@dataclass(frozen=True)
class GreedyOptions(SamplingOptions):
    """The same, greedy where nothing is set."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0


@command(
    app,
    "Examples:  ttrain chat\n\nttrain chat sft --temperature 0\n\nttrain chat pretrain "
    "--versus sft\n\n"
    "echo 'What is a list?' | ttrain chat sft --json",
    "Use",
)
def chat(
    model: Annotated[str | None, argument(DEFAULT_MODEL, metavar="MODEL")] = None,
    versus: Annotated[
        str | None, option("a second model, which answers after the first", metavar="MODEL")
    ] = None,
    gate: Annotated[
        Path | None, option("a gate's directory: it picks the expert for each question")
    ] = None,
    system: System = "",
    as_json: Annotated[bool, option("a line of JSON for each answer", "--json")] = False,
    *,
    sampling: SamplingOptions,
    loading_options: LoadingOptions,
) -> None:
    """Chat with a model: answers stream in a terminal; in a pipe each line is a question."""
    settings = sampling.settings()
    if (
        model is not None
        and (" " in model.strip() or model.endswith("?"))
        and not Path(model).is_dir()
    ):
        raise UsageError(
            f"'{model}' names no model; to ask it: echo {shlex.quote(model)} | ttrain chat sft"
        )
    if gate is not None and any((model, versus, loading_options.run)):
        raise UsageError(
            "--gate picks the model by itself; give neither MODEL nor --versus nor --run with it"
        )
    models = [] if gate else [model, *([versus] if versus else [])]
    references = _resolved(models, loading_options) if models else []

    before_torch()
    from ttrain.cli import chat_screen
    from ttrain.inference import gate_router
    from ttrain.inference.chat import Chat

    selectors: list[ModelSelector] = (
        [gate_router.GateSelector(gate, device=loading_options.device, dtype=loading_options.dtype)]
        if gate
        else []
    )
    selectors += map(gate_router.single_model, _load(references, loading_options))
    chats = [Chat(selector, settings, system=system) for selector in selectors]
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        identities = {reference.text: _identity(reference) for reference in references}
        chat_screen.talk_in_pipe(chats, identities, as_json=as_json)
        return
    chat_screen.talk_in_terminal(
        chats,
        [reference.text for reference in references] or [str(gate)],
        f"{settings}\n/help lists the commands",
    )


@command(
    app,
    "Examples:  ttrain generate questions.txt --model sft --out answers.jsonl\n\n"
    "ttrain generate beginnings.txt --model pretrain --raw --temperature 0.8",
    "Use",
)
def generate(
    prompts: Annotated[
        Path, argument("a file: lines of text, or JSON lines (.jsonl)", metavar="FILE")
    ],
    model: Annotated[str | None, option(DEFAULT_MODEL, "--model", "-m")] = None,
    out: Annotated[
        Path | None, option("JSON lines with the answers; without it they are printed")
    ] = None,
    raw: Annotated[
        bool, option("continue the lines as texts instead of answering them", "--raw")
    ] = False,
    system: System = "",
    batch_size: Annotated[int, option("prompts that are answered together", min=1)] = 16,
    force: Annotated[bool, option("replace the file of --out", "--force")] = False,
    as_json: AsJson = False,
    *,
    sampling: GreedyOptions,
    loading_options: LoadingOptions,
) -> Output | None:
    """Answer the prompts of a file, in batches; the same command continues where it was stopped."""
    settings = sampling.settings()
    if as_json and out is None:
        raise UsageError("--json prints the summary as JSON; give --out for the answers")
    if out is not None:
        check_output_file(out)
        if out.exists() and not force:
            raise UsageError(
                f"{out} exists; name another file with --out, or replace it with --force"
            )
    [reference] = _resolved([model], loading_options)
    if not prompts.is_file():
        raise UsageError(f"FILE is '{prompts}' but there is no such file; name one with prompts")

    before_torch()
    from ttrain.inference import batch

    rows = batch.read(prompts, raw=raw, system=system)
    [loaded_model] = _load([reference], loading_options)
    tally = batch.AnswerCounts()
    with bar("answering", "prompts", len(rows)) as progress:

        def make(start: int) -> Any:
            return batch.answers(
                loaded_model,
                rows[start:],
                settings,
                batch_size=batch_size,
                tally=tally,
                progress=progress,
            )

        if out is None:
            for row in itertools.chain.from_iterable(make(0)):
                print_json_text(batch.line_of(row).decode(), flush=True)
            return None
        header = {
            "prompts": sha256_file(prompts),
            "model": batch.identity(reference),
            "raw": raw,
            "system": system,
            "dtype": loading_options.dtype,
            **settings.model_dump(),
        }
        done = batch.write_answers(out, header, make)
    summary = {"out": str(out), "prompts": len(rows), "answered before": done, **tally.summary()}
    cells = [
        ("model", reference.text),
        *((name, value) for name, value in summary.items() if value is not None),
    ]
    return Output({**_identity(reference), **summary}, [Table(("property", "value"), cells)])


@command(app, "Examples:  ttrain serve\n\nttrain serve dpo --port 0 --json", "Servers")
def serve(
    model: Annotated[str | None, argument(DEFAULT_MODEL, metavar="MODEL")] = None,
    port: Annotated[int, option("on 127.0.0.1; 0: a free one", min=0, max=65535)] = 8000,
    max_requests: Annotated[
        int, option("requests answered or waiting at once; further ones get 429", min=1)
    ] = 32,
    as_json: Annotated[
        bool, option("print address and model as JSON when it answers", "--json")
    ] = False,
    *,
    loading_options: LoadingOptions,
) -> None:
    """Serve the home's models on 127.0.0.1 until Ctrl-C: OpenAI's interface, and a chat page.

    MODEL is loaded at the start; others when a request names them.
    """
    from ttrain.store import server_records

    outlast_output()
    [reference] = _resolved([model], loading_options)
    root = usable_home()
    token = server_records.make_token(root)
    key = server_records.token_file(root)
    try:
        listener = socket.create_server((server_records.HOST, port))
    except OSError as error:
        raise UsageError(
            f"--port is {port}, which is taken ({error.strerror}); --port 0 finds a free one"
        ) from None
    host, port = listener.getsockname()
    before_torch()
    import uvicorn

    from ttrain.flows.guard import Guard
    from ttrain.inference.answer_queue import AnswerQueue
    from ttrain.inference.serve import PAIRS, Endpoint
    from ttrain.lineage import lookup
    from ttrain.tasks import STAGES

    def load(name: str) -> LoadedModel:
        run = loading_options.run if name in STAGES else None
        models = [reference] if name == reference.text else resolved_models([name], run=run)
        return _load(models, loading_options)[0]

    queue = AnswerQueue(load, max_requests)
    endpoint = Endpoint(
        queue, lambda: [*dict.fromkeys([reference.text, *lookup.with_models(root)])], root / PAIRS
    )
    app = Guard(endpoint.application(), port, token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    queue.open(reference.text)
    address = f"http://{host}:{port}"
    shown = [
        f"{reference.text} is served at {address}/v1; Ctrl-C ends it",
        f"talk to it, or compare two models: {address}/?token={token}",
        f"clients need a key: export OPENAI_API_KEY=$(cat {shlex.quote(str(key))})",
    ]
    value = {"url": f"{address}/v1", "model": reference.text, "api_key_file": str(key)}
    with contextlib.closing(queue), contextlib.suppress(KeyboardInterrupt), handling_signals(_end):
        Output({**_identity(reference), **value}, shown).print(as_json=as_json)
        sys.stdout.flush()
        server.run(sockets=[listener])


# As Ctrl-C does, so that the server ends, too.
def _end(signum: int) -> None:
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def _resolved(models: Sequence[str | None], options: LoadingOptions) -> list[Reference]:
    if not options.base or len(models) == 1:
        return resolved_models(models, base=options.base, run=options.run)
    first, *others = models  # `--versus` has a base of its own
    return [
        *resolved_models([first], base=options.base, run=options.run),
        *resolved_models(others, run=options.run),
    ]


def _identity(reference: Reference) -> dict[str, Any]:
    from ttrain.lineage import lookup

    return lookup.to_json(reference)


def _load(references: list[Reference], options: LoadingOptions) -> list[LoadedModel]:
    """Load models, and print a line about each on standard error."""
    from ttrain.inference import loading

    loaded_models = [
        loading.load(reference, device=options.device, dtype=options.dtype)
        for reference in references
    ]
    for loaded_model in loaded_models:
        print_escaped(loaded_model.describe(), stderr=True)
    return loaded_models


def before_torch() -> None:
    """Prepare the environment before torch is loaded; silence transformers."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Turns of an idle OpenMP thread before it sleeps: a token has dozens of short parallel
        # parts. The quickstart's model beside busy processes: 6 tokens/s with libgomp's default, 70
        # to 110 with 10,000 turns, 370 to 470 with this.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import warnings

    from transformers.utils import logging

    warnings.simplefilter("ignore", FutureWarning)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
