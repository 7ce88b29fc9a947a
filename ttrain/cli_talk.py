"""`ttrain chat`, `ttrain generate` and `ttrain serve`: talking to models."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttrain.cli_settings import AsJson
from ttrain.terminal import encodable

if TYPE_CHECKING:
    from ttrain.references import Reference
    from ttrain.talk.chat import Choice

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
    gate: Annotated[Path | None, typer.Option(help="a gate's directory: it picks the expert for each question")] = None,
    system: System = "",
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 1,
    speculative: Annotated[bool, typer.Option("--speculative", help="the model's second head guesses ahead")] = False,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each answer")] = False,
) -> None:
    """Talk to a model. In a terminal it streams; in a pipe each line is a question, and each answer is printed."""
    from ttrain.errors import UsageError
    from ttrain.talk.sampling import sampling

    settings = sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty,
                        max_tokens=max_tokens, seed=seed)  # fmt: skip
    if gate is not None and (model is not None or versus is not None):
        raise UsageError("--gate picks the model by itself; give neither MODEL nor --versus with it")
    references = [] if gate else [_reference(model, base), *([_reference(versus, None)] if versus else [])]

    before_torch()
    from ttrain.talk import choosing, screen
    from ttrain.talk.chat import Chat
    from ttrain.talk.loading import need_second_head

    choices: list[Choice] = []
    if gate is not None:
        choices.append(choosing.ByGate(gate, device=device, dtype=dtype))
    for reference in references:
        speaker = _load(reference, device, dtype)
        if speculative:
            need_second_head(speaker)
        choices.append(choosing.always(speaker))
    names = [reference.text for reference in references] or [str(gate)]
    chats = [Chat(choice, settings, system=system, draft=speculative) for choice in choices]
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    shown: screen.Screen = screen.Terminal(names) if in_terminal else screen.Pipe(names, as_json=as_json)
    if in_terminal:
        shown.say(f"{settings}\n/help lists the commands")
    screen.run(shown, chats)


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
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: AsJson = False,
) -> None:
    """Answer the prompts of a file, in batches; the same command goes on where it was stopped."""
    from ttrain.digests import sha256_file
    from ttrain.errors import Interrupted, UsageError
    from ttrain.talk.sampling import sampling
    from ttrain.terminal import bar, print_json, table

    settings = sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty,
                        max_tokens=max_tokens, seed=seed)  # fmt: skip
    if as_json and out is None:
        raise UsageError("--json prints the summary as JSON; give --out for the answers")
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists; name another file with --out, or replace it with --force")
    reference = _reference(model, base)

    before_torch()
    from ttrain.talk import answering
    from ttrain.talk.prompts import read

    rows = read(prompts, raw=raw, system=system)
    speaker = _load(reference, device, dtype)
    tally = answering.Tally()
    with bar("answering", "prompts", len(rows)) as progress:

        def make(start: int) -> Any:
            return answering.answers(speaker, rows[start:], settings, batch_size=batch_size, tally=tally, progress=progress)

        if out is None:
            done = 0
            for window in make(0):
                for row in window:
                    print_json(row, indent=None)
        else:
            header = {"prompts": sha256_file(prompts), "model": answering.identity(reference), "raw": raw, "system": system,
                      "dtype": dtype, **settings.model_dump()}  # fmt: skip
            try:
                done = answering.write(out, header, make)
            except KeyboardInterrupt:
                partial = answering.partial_of(out)
                raise Interrupted(f"stopped; what is answered lies in {partial}, and the same command goes on") from None
    summary = {"model": reference.text, "out": out and str(out), "prompts": len(rows), "answered before": done,
               **tally.summary()}  # fmt: skip
    if as_json:
        print_json(summary)
    elif out is not None:
        table(("what", "value"), [(name, value) for name, value in summary.items() if value is not None])


def serve(
    context: typer.Context,
    model: Model = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0: a free one")] = 8000,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="print address and model as JSON when it answers")] = False,
) -> None:
    """Serve a model on 127.0.0.1 to clients of OpenAI's interface, through `transformers serve`, until Ctrl-C.

    What stands after -- goes to that command, for example -- --continuous-batching.
    """
    from ttrain.talk import serving
    from ttrain.terminal import print_json

    serving.check()
    reference = _reference(model, base)
    before_torch()  # the server gets the variable too
    with (
        _ending_on_sigterm(),
        serving.served(reference, port=port, device=device, dtype=dtype, options=context.args) as (address, name, process),
    ):
        try:  # who reads that it is served may send Ctrl-C at once
            if as_json:
                print_json({"url": address, "model": name, "pid": process.pid})
            else:
                print(f"{name} is served at {address}; Ctrl-C ends it\ntry:\n  {_curl(address, name)}")
            sys.stdout.flush()
            code = process.wait()
        except KeyboardInterrupt:
            code = 0
    if code:
        raise typer.Exit(code)


def _curl(address: str, name: str) -> str:
    import json

    body = {"model": name, "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 64}
    return f"curl {address}/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that the server ends too."""

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reference(text: str | None, base: str | None) -> Reference:
    from ttrain import references

    return references.newest() if text is None else references.resolve(text, base=base)


def _load(reference: Reference, device: str, dtype: str) -> Any:
    """The model, and a line about it on standard error."""
    from ttrain.talk import loading
    from ttrain.terminal import escaped

    speaker = loading.load(reference, device=device, dtype=dtype)
    print(escaped(speaker.describe()), file=sys.stderr)
    return speaker


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
