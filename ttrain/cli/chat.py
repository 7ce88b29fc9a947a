"""`ttrain chat`, `ttrain generate` and `ttrain serve`: talking to models."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttrain.cli.options import AsJson, RunName
from ttrain.core.signals import handling_signals
from ttrain.core.terminal import encodable
from ttrain.store import layout

if TYPE_CHECKING:
    from ttrain.inference.chat import Choice
    from ttrain.store.model_reference import Reference

MODEL_HELP = "a run, a stage such as sft, a registered NAME@ALIAS, or a directory; without one, the newest run's last model"
Model = Annotated[str | None, typer.Argument(help=MODEL_HELP, metavar="[MODEL]", show_default=False)]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="auto: cuda, then mps, then cpu")]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="numbers that the weights are held in")]
Base = Annotated[str | None, typer.Option(help="the full model of an adapter, where it cannot be found by itself")]
System = Annotated[str, typer.Option(help="a system prompt", show_default=False, callback=encodable)]
TopP = Annotated[float, typer.Option(help="keep the likeliest tokens that together have this share; 1: all")]
TopK = Annotated[int, typer.Option(help="keep that many of the likeliest tokens; 0: all")]
Penalty = Annotated[float, typer.Option(help="above 1, what the answer holds already gets less likely")]
MaxTokens = Annotated[int, typer.Option(help="longest answer, in tokens")]
Seed = Annotated[int, typer.Option(help="the same seed, the same answers")]


def chat(
    model: Model = None,
    versus: Annotated[str | None, typer.Option(metavar="MODEL", help="a second model, answering side by side")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER", help="another adapter on MODEL's base; /adapter NAME switches to it; repeatable"),
    ] = None,
    gate: Annotated[Path | None, typer.Option(help="a gate's directory: it picks the expert for each question")] = None,
    system: System = "",
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 1,
    speculative: Annotated[bool, typer.Option("--speculative", help="the model's second head guesses ahead")] = False,
    run: RunName = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each answer")] = False,
) -> None:
    """Talk to a model. In a terminal it streams; in a pipe each line is a question, and each answer is printed."""
    from ttrain.errors import UsageError
    from ttrain.inference.sampling import sampling

    settings = sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty,
                        max_tokens=max_tokens, seed=seed)  # fmt: skip
    if gate is not None and (model is not None or versus is not None or run is not None or adapter):
        raise UsageError("--gate picks the model by itself; give neither MODEL nor --versus, --adapter nor --run with it")
    models, adapters = [model, *([versus] if versus else [])], adapter or []
    bases = [base, *[None] * (len(models) - 1), *[base] * len(adapters)]
    resolved = [] if gate else _references([*models, *adapters], bases, run)
    references, more_adapters = resolved[: len(models)], resolved[len(models) :]

    before_torch()
    from ttrain.cli import chat_screen
    from ttrain.inference import model_choice
    from ttrain.inference.chat import Chat
    from ttrain.inference.loading import need_second_head

    choices: list[Choice] = []
    if gate is not None:
        choices.append(model_choice.ByGate(gate, device=device, dtype=dtype))
    for number, reference in enumerate(references):
        if more_adapters and number == 0:
            speakers = _load_adapters([reference, *more_adapters], device, dtype)
            choices.append(model_choice.ByAdapter(speakers))
        else:
            speakers = [_load(reference, device, dtype)]
            choices.append(model_choice.always(speakers[0]))
        if speculative:
            need_second_head(speakers[0])
    names = [reference.text for reference in references] or [str(gate)]
    chats = [Chat(choice, settings, system=system, draft=speculative) for choice in choices]
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    shown: chat_screen.Screen = (
        chat_screen.Terminal(names)
        if in_terminal
        else chat_screen.Pipe(names, as_json=as_json, identities=[_identity(reference) for reference in references])
    )
    if in_terminal:
        shown.say(f"{settings}\n/help lists the commands")
    chat_screen.run(shown, chats)


def generate(
    prompts: Annotated[Path, typer.Argument(help="a file: lines of text, or JSON lines (.jsonl)", metavar="FILE")],
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines with the answers; without it they are printed")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the lines as texts instead of answering them")] = False,
    system: System = "",
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts that are answered together")] = 16,
    force: Annotated[bool, typer.Option("--force", help="replace the file of --out")] = False,
    run: RunName = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: AsJson = False,
) -> None:
    """Answer the prompts of a file, in batches; the same command goes on where it was stopped."""
    from ttrain.core.hashing import sha256_file
    from ttrain.core.terminal import bar, print_json, table
    from ttrain.errors import Interrupted, UsageError
    from ttrain.inference.sampling import sampling

    settings = sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty,
                        max_tokens=max_tokens, seed=seed)  # fmt: skip
    if as_json and out is None:
        raise UsageError("--json prints the summary as JSON; give --out for the answers")
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists; name another file with --out, or replace it with --force")
    [reference] = _references([model], [base], run)

    before_torch()
    from ttrain.inference import batch
    from ttrain.inference.prompts import read

    rows = read(prompts, raw=raw, system=system)
    speaker = _load(reference, device, dtype)
    tally = batch.Tally()
    with bar("answering", "prompts", len(rows)) as progress:

        def make(start: int) -> Any:
            return batch.answers(speaker, rows[start:], settings, batch_size=batch_size, tally=tally, progress=progress)

        if out is None:
            done = 0
            for window in make(0):
                for row in window:
                    print_json(row, indent=None)
        else:
            header = {"prompts": sha256_file(prompts), "model": batch.identity(reference), "raw": raw, "system": system,
                      "dtype": dtype, **settings.model_dump()}  # fmt: skip
            try:
                done = batch.write(out, header, make)
            except KeyboardInterrupt:
                partial = batch.partial_of(out)
                raise Interrupted(f"stopped; what is answered lies in {partial}, and the same command goes on") from None
    summary = {"out": out and str(out), "prompts": len(rows), "answered before": done,
               **tally.summary()}  # fmt: skip
    if as_json:
        print_json({**_identity(reference), **summary})
    elif out is not None:
        rows_of_table = {"model": reference.text, **summary}.items()
        table(("what", "value"), [(name, value) for name, value in rows_of_table if value is not None])


def serve(
    context: typer.Context,
    model: Model = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0: a free one")] = 8000,
    max_requests: Annotated[int, typer.Option(min=1, help="answered or waiting at once; one more gets 429")] = 32,
    run: RunName = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="print address and model as JSON when it answers")] = False,
) -> None:
    """Serve a model on 127.0.0.1 to clients of OpenAI's interface, through `transformers serve`, until Ctrl-C.

    What stands after -- goes to that command, for example -- --continuous-batching.
    """
    from ttrain.core.standard_streams import outlast_output
    from ttrain.core.terminal import print_json
    from ttrain.export import serve as serving

    outlast_output()
    serving.check()
    [reference] = _references([model], [base], run)
    key = _api_key()
    before_torch()  # the server gets the variable too
    with (
        _ending_on_signals(),
        serving.served(
            reference,
            program="flows.endpoint",
            port=port,
            device=device,
            dtype=dtype,
            max_requests=max_requests,
            token=key.read_text(encoding="ascii").strip() if key else "",
            options=context.args,
        ) as (address, name, process),  # fmt: skip
    ):
        try:  # who reads that it is served may send Ctrl-C at once
            if as_json:
                served = {"url": address, "model": name, "pid": process.pid, "api_key_file": key and str(key)}
                print_json({**_identity(reference), **served})
            else:
                print(f"{name} is served at {address}; Ctrl-C ends it")
                if key:
                    print(f"clients need a key: export OPENAI_API_KEY=$(cat {shlex.quote(str(key))})")
                print(f"try:\n  {_curl(address, name, key)}")
            sys.stdout.flush()
            code = process.wait()
        except KeyboardInterrupt:
            code = 0
    if code:
        raise typer.Exit(code)


def _api_key() -> Path | None:
    """The file with the key that clients of the endpoint show; None where `servers.auth` is off, which is said."""
    from ttrain.cli.options import server_settings
    from ttrain.store import server_records
    from ttrain.store.layout import usable_home

    if server_settings(None).auth == "off":
        print(f"warning: {server_records.NO_AUTH}", file=sys.stderr)
        return None
    root = usable_home()
    server_records.make_token(root)
    return server_records.token_file(root)


def _curl(address: str, name: str, key: Path | None) -> str:
    import json

    body = {"model": name, "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 64}
    header = f' -H "Authorization: Bearer $(cat {shlex.quote(str(key))})"' if key else ""
    return f"curl {address}/chat/completions{header} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that the server ends too."""

    def end(signum: int) -> None:
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    with handling_signals(end):
        yield


def _references(texts: list[str | None], bases: list[str | None], run: str | None) -> list[Reference]:
    """The models on their bases, all stages among them of one run; a line on standard error says which each is."""
    from ttrain.core.terminal import escaped
    from ttrain.pipeline import identities
    from ttrain.pipeline import names as references
    from ttrain.store import artifacts

    within = references.run_of([*texts, *filter(None, bases)], named=run)
    found = [references.resolve(text, base=base, within=within) for text, base in zip(texts, bases, strict=True)]
    for line in identities.lines_of(found, artifacts.Store(layout.home())):
        print(escaped(line), file=sys.stderr, flush=True)
    return found


def _identity(reference: Reference) -> dict[str, Any]:
    """Which model it is, for scripts."""
    from ttrain.pipeline import identities

    return identities.to_json(reference)


def _load(reference: Reference, device: str, dtype: str) -> Any:
    """The model, and a line about it on standard error."""
    from ttrain.core.terminal import escaped
    from ttrain.inference import loading

    speaker = loading.load(reference, device=device, dtype=dtype)
    print(escaped(speaker.describe()), file=sys.stderr)
    return speaker


def _load_adapters(references: list[Reference], device: str, dtype: str) -> list[Any]:
    """The models of several adapters on one base, and a line about them on standard error."""
    from ttrain.core.terminal import escaped
    from ttrain.inference import loading

    speakers = loading.load_adapters(references, device=device, dtype=dtype)
    names = ", ".join(reference.text for reference in references)
    for line in (speakers[0].describe(), f"adapters: {names}; /adapter NAME switches"):
        print(escaped(line), file=sys.stderr)
    return speakers


def before_torch() -> None:
    """What has to be settled before torch is loaded; and no bars and advice of transformers between the lines of a chat."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Turns of an idle OpenMP thread before it sleeps: a token has dozens of short parallel parts. The quickstart's model
        # beside busy processes: 6 tokens/s with libgomp's default, 70 to 110 with 10,000 turns, 370 to 470 with this.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import warnings

    from transformers.utils import logging

    warnings.simplefilter("ignore", FutureWarning)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
