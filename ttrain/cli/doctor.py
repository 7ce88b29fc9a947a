"""The `ttrain doctor` command: arguments and output."""

from __future__ import annotations

import os
import time
import warnings
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from ttrain.cli.options import AsJson, SettingsOptions, with_option_groups
from ttrain.core.terminal import console, escaped, print_json, print_spans
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.doctor.parts import Check

READ_BY_C = ("GLIBC_", "GOMP_")  # variables of a stage's process that are read when OpenMP is loaded, or a rank starts
NAME_WIDTH, LINE_WIDTH, SHOWN_LINES = 22, 100, 12


@with_option_groups
def doctor(
    settings_options: SettingsOptions,
    stage: Annotated[
        str | None, Option(metavar="STAGE", help="the training stage to check, such as sft; default: the first")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check, before a long run, that training works and fits: with these settings and data, on this machine."""
    from ttrain.config.training import TRAININGS
    from ttrain.flows import api
    from ttrain.pipeline.processes import environment_of
    from ttrain.store import references

    began = time.monotonic()
    loaded = settings_options.load()
    examined = stage or loaded.settings.trainings[0]
    if examined not in TRAININGS:
        raise references.unknown("training stage", examined, TRAININGS)
    for name, value in environment_of(loaded.settings).items():
        if name.startswith(READ_BY_C):
            os.environ.setdefault(name, value)
    planned = (
        api.plan("full", loaded.settings).stages if (home() / "store").is_dir() else []
    )  # no need to read all data to find nothing
    artifacts = {
        planned_stage.stage.name: planned_stage.artifact
        for planned_stage in planned
        if planned_stage.artifact and planned_stage.state == "cached"
    }
    from ttrain.data.inspect import lines
    from ttrain.doctor.run import Doctor  # loads torch, which now finds the variables

    examination = Doctor(examined, loaded.settings, artifacts, home())
    checks: list[Check] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for check in examination.checks():
            checks.append(check)
            if not as_json:
                _print(check)
    failures = [check for check in checks if not check.ok]
    if as_json:
        print_json({"checks": checks})
    else:
        if examination.shown is not None:
            row, special = examination.shown
            print(f"\nthe first row of {examined}; tokens that count in the loss are marked:")
            of_records = (lines(row, record, special, LINE_WIDTH) for record in range(1 + max(row.segments)))
            print_spans(islice(chain.from_iterable(of_records), SHOWN_LINES))
            print()
        verdict = f"{len(failures)} of {len(checks)} checks are not ok" if failures else f"all {len(checks)} checks are ok"
        print(f"{examined}: {verdict}, in {time.monotonic() - began:.0f} s")
    if failures:
        raise Exit(1)


def _print(check: Check) -> None:
    from rich.text import Text

    mark = ("ok  ", "green") if check.ok else ("BAD ", "bold red")
    fix = f"; fix: {check.cure}" if check.cure else ""
    console().print(
        Text.assemble(mark, f"{check.name:{NAME_WIDTH}}{escaped(str(check.figure))}{escaped(fix)}"), soft_wrap=True
    )
