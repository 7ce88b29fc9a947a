"""The harness of the measurements: options, side processes, interleaved rounds, a table.

A command hands `main` its parts: functions that measure and add lines to the table. `measure` runs
a function of a script as a process, so that its CPU seconds and its peak memory are its own, with
those of all processes that it started. What the function returns comes back as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttrain.core.machine import processor

MEGABYTE = 1_000_000
VOCAB_SIZE = 6400
TOKENIZER_BYTES = 10 * MEGABYTE  # of text, that a tokenizer is trained on
TTRAIN = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
# Prefixes of variables of this process that would change a side; the sides that need one set it.
NOT_INHERITED = (
    "GLIBC_",
    "GOMP_",
    "MLFLOW_",
    "OMP_",
    "PREFECT_",
    "PYTHONDONTWRITEBYTECODE",
    "TORCH_",
    "TTRAIN_",
)
LABEL_WIDTH = 64


@dataclass(frozen=True)
class Cost:
    """Seconds, CPU seconds of all processes, MB of the largest one, and the result of a side."""

    wall: float
    cpu: float
    memory: float = 0.0
    result: Mapping[str, Any] = field(default_factory=dict)


Side = Callable[[], Cost]
Costs = dict[str, list[Cost]]


class Table:
    """Lines of measurement with their limits; printed as they come, and kept for `--json`."""

    def __init__(self, machine: str = "") -> None:
        self.processor = machine or processor()
        self.load = os.getloadavg()[0]
        self.lines: list[dict[str, Any]] = []
        self.costs: dict[str, list[dict[str, Any]]] = {}
        print(f"{self.processor}; load before the start {self.load:.1f}")
        print(f"{'':<{LABEL_WIDTH}}{'ours':>12}{'theirs':>12}{'ratio':>12}   limit", flush=True)

    @property
    def missed(self) -> int:
        """How many limits are missed."""
        return sum(line["missed"] for line in self.lines)

    def ratio(
        self,
        label: str,
        ours: float,
        theirs: float,
        *,
        value: float | None = None,
        least: float = 0,
        most: float = 0,
    ) -> None:
        """Ours over theirs, or the value given, such as a median over rounds."""
        self._add(
            label,
            {"ours": ours, "theirs": theirs, "ratio": ours / theirs if value is None else value},
            least,
            most,
        )

    def value(self, label: str, ours: float, *, least: float = 0, most: float = 0) -> None:
        """A figure of ours alone."""
        self._add(label, {"ours": ours}, least, most)

    def check(self, label: str, holds: bool) -> None:
        """A statement that must hold."""
        print(
            f"{label:<{LABEL_WIDTH}}{'yes' if holds else 'NO':>12}{'' if holds else '   MISSED'}",
            flush=True,
        )
        self.lines.append({"label": label, "holds": holds, "limit": "yes", "missed": not holds})

    def interleave(
        self, sides: Mapping[str, Side], rounds: int, *, warmups: int = 0, group: str = ""
    ) -> Costs:
        """Every side once a round; each round begins with another side.

        A disturbance of the machine reaches all sides.

        Every round is kept for `--json`.
        """
        costs: Costs = {name: [] for name in sides}
        names = list(sides)
        for number in range(warmups + rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                cost = sides[name]()
                if number >= warmups:
                    costs[name].append(cost)
                    self.costs.setdefault(f"{group}{name}", []).append(asdict(cost))
        return costs

    def _add(
        self, label: str, figures: Mapping[str, float], least: float = 0, most: float = 0
    ) -> None:
        measured = figures.get("ratio", figures["ours"])
        missed = bool((least and measured < least) or (most and measured > most))
        limit = f"at most {most:g}" if most else ""
        limit = f"at least {least:g}" if least else limit
        cells = [
            f"{shown(figures[name]):>12}" if name in figures else " " * 12
            for name in ("ours", "theirs", "ratio")
        ]
        print(
            f"{label:<{LABEL_WIDTH}}{''.join(cells)}   {limit}{'  MISSED' if missed else ''}",
            flush=True,
        )
        self.lines.append({"label": label, **figures, "limit": limit, "missed": missed})


Part = Callable[[argparse.Namespace, Path, Table], None]


def main(
    description: str,
    parts: Mapping[str, Part],
    *,
    rounds: int = 3,
    default: str = "",
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    ready: Callable[[argparse.Namespace], None] = lambda arguments: None,
    machine: Callable[[argparse.Namespace], str] = lambda arguments: "",
) -> None:
    """Measure the parts, and exit with 1 where a limit is missed; or run a side's function.

    Without `--only`, the parts of `default` run, or all of them. `ready` exits where nothing can be
    measured; `machine` names what is measured, which is the CPU unless it says otherwise.
    """
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(getattr(sys.modules["__main__"], sys.argv[2])(*sys.argv[3:]) or {}))
        return
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--json", type=Path, help="write the lines and every round of every side to this file"
    )
    parser.add_argument("--markdown", type=Path, help="write the lines as a table to this file")
    if len(parts) > 1:
        parser.add_argument(
            "--only",
            default=default or ",".join(parts),
            help=f"parts, with commas: {', '.join(parts)}",
        )
    options(parser)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if len(parts) > 1 else list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(
            f"--only has no part {', '.join(sorted(unknown))}; the parts are {', '.join(parts)}"
        )
    ready(arguments)
    table = Table(machine(arguments))
    with tempfile.TemporaryDirectory(prefix="ttrain-bench-") as directory:
        for name in chosen:
            parts[name](arguments, Path(directory), table)
    limits = sum(bool(line["limit"]) for line in table.lines)
    print(f"{table.missed} of {limits} limits missed on {table.processor}")
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if arguments.json:
        about = {"command": command, "processor": table.processor, "load_before": table.load}
        arguments.json.write_text(
            json.dumps({**about, "lines": table.lines, "sides": table.costs}, indent=1, default=str)
        )
    if arguments.markdown:
        arguments.markdown.write_text(markdown(table, command), encoding="utf-8")
    sys.exit(table.missed > 0)


def markdown(table: Table, command: Sequence[str]) -> str:
    """The lines of a table as a document."""
    rows = ["| measured | ours | theirs | ratio | limit |", "| --- | --- | --- | --- | --- |"]
    for line in table.lines:
        cells = [shown(line[name]) if name in line else "" for name in ("ours", "theirs", "ratio")]
        if "holds" in line:
            cells[0] = "yes" if line["holds"] else "no"
        limit = line["limit"] + (", **missed**" if line["missed"] else "")
        rows.append(f"| {' | '.join([line['label'], *cells, limit])} |")
    day = time.strftime("%Y-%m-%d")
    return f"# {' '.join(command)}\n\n{table.processor}, {day}.\n\n" + "\n".join(rows) + "\n"


def run(
    command: Sequence[object],
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    *,
    check: bool = True,
) -> tuple[Cost, str]:
    """Run a command to its end; its cost and its output.

    Raises RuntimeError where it fails, unless `check` is false.
    """
    words = [str(word) for word in command]
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = time.time()
        began = time.perf_counter()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=directory,
            env={**inherited, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    if check and process.returncode:
        tail = "\n".join("".join(texts).splitlines()[-12:])
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}\n{tail}")
    memory = usage.ru_maxrss * 1024 / MEGABYTE
    return Cost(wall, usage.ru_utime + usage.ru_stime, memory, {"started": started}), texts[0]


def measure(
    side: Callable[..., Mapping[str, Any] | None], *arguments: object, **environment: str
) -> Cost:
    """Run a function of a script, whose arguments are strings, as a process.

    Raises RuntimeError where it fails.
    """
    cost, output = run(
        [sys.executable, side.__code__.co_filename, "--side", side.__name__, *arguments],
        environment,
    )
    return Cost(
        cost.wall, cost.cpu, cost.memory, {**cost.result, **json.loads(output.splitlines()[-1])}
    )


def timed(work: Callable[[], object]) -> Cost:
    """The cost of a function in this process; its result where that is a mapping."""
    wall = time.perf_counter()
    cpu = time.process_time()
    result = work()
    cost = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(*cost, result=result if isinstance(result, Mapping) else {})


def median(costs: Sequence[Cost], figure: str) -> float:
    """Median of `wall`, `cpu`, `memory`, or of a figure of the results."""
    return statistics.median(
        getattr(cost, figure) if hasattr(cost, figure) else cost.result[figure] for cost in costs
    )


def has(module: str) -> bool:
    """Whether a peer is installed; prints how to install it where it is not."""
    if importlib.util.find_spec(module):
        return True
    print(
        f"SKIPPED: the comparison with {module}, which is not installed: pip install {module}",
        flush=True,
    )
    return False


def copy_runs(home: Path, count: int) -> None:
    """Put so many newer runs with other artifacts on record, made from the first one."""
    runs = home / "runs"
    first = min(
        path
        for path in runs.glob("*.json")
        if json.loads(path.read_bytes())["outcome"] == "completed"
    )
    record = json.loads(first.read_bytes())
    for stage in record["stages"]:
        stage["key"] = stage["key"][::-1]
    for number in range(count):
        name = f"full-2099{number // 1440 + 1:04d}-{number % 1440:06d}-0000"
        (runs / f"{name}.json").write_text(
            json.dumps({**record, "run": name}, indent=1, sort_keys=True)
        )


def use_test_support() -> None:
    """Let this process import `support`, what the tests share."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def shown(figure: float) -> str:
    """A figure for people."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


# --- text


def text_options(parser: argparse.ArgumentParser) -> None:
    """The options of commands that work on text."""
    parser.add_argument(
        "--path", help="JSON lines with documents, also .gz or .zst; default: Python's own source"
    )
    parser.add_argument(
        "--megabytes",
        type=int,
        default=100,
        help="of text, in as many passes over it as that takes",
    )


def write_text(options: argparse.Namespace, directory: Path, megabytes: int | None = None) -> Path:
    """Write a plain file of JSON lines, of so many megabytes or as many as the options say.

    Each text comes once a pass; the number of the pass stands before it, so that no document comes
    twice.
    """
    import orjson

    path = directory / "text.jsonl"
    size = (megabytes or options.megabytes) * MEGABYTE
    documents = 0
    passes = 0
    with path.open("wb") as file:
        while file.tell() < size:
            passes += 1
            hashes: set[int] = set()
            for text in _documents(options.path):
                if hash(text) not in hashes and file.tell() < size:
                    hashes.add(hash(text))
                    file.write(orjson.dumps({"text": f"{passes}. {text}"}) + b"\n")
                    documents += 1
    print(
        f"text: {path.stat().st_size / MEGABYTE:.0f} MB, {documents} documents in {passes} passes "
        f"over {options.path or 'the Python standard library'}"
    )
    return path


def train_tokenizer(path: Path, directory: Path) -> Path:
    """A tokenizer directory of VOCAB_SIZE entries, trained on the beginning of the file."""
    from ttrain.data import tokenizer

    tokenizer.save(
        tokenizer.train(read_texts(path, TOKENIZER_BYTES), VOCAB_SIZE), directory / "tokenizer"
    )
    return directory / "tokenizer"


def read_texts(path: str | Path, limit: int = sys.maxsize) -> list[str]:
    """The documents of a file of JSON lines, up to so many bytes."""
    import orjson

    with Path(path).open("rb") as file:
        return [orjson.loads(line)["text"] for line in file.readlines(limit)]


def read_documents(path: str) -> Iterator[Any]:
    """The documents of a file of JSON lines, which may be packed."""
    from ttrain.data import json_rows, records

    return records.read([path], records.document_parser("text"), json_rows.Tally(), 32 << 20)


def _documents(path: str | None) -> Iterator[str]:
    if path:
        yield from (document.text for document in read_documents(path))
        return
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in file.parts:
            with contextlib.suppress(UnicodeDecodeError):
                if (text := file.read_text("utf-8")).strip():
                    yield text
