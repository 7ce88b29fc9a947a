"""Ten nights over ten domains, learned one after the other, against all of them at once.

    python bench/nights.py [--path FILE.jsonl]                         hours on two cores
    python bench/nights.py --sizes 1M --seeds 1 --tokens 20k --sides ours  two minutes of one core

A night brings the documents of one domain: modules of Python's standard library by subject, or with
--path the largest sources of a file of JSON lines (books, poems, PEPs), by their key `source`. The
stages are those of a night (shards, replay, pretraining from the champion), called one after the
other, and each night's model becomes champion. The sides:

ours: the profile `continual`, averaged weights with replay. rewarm: the default schedule with the
same replay. new: new documents alone, at the full rate. all: each night continues on all documents,
at the full rate. taught: ours, whose champion teaches what is replayed.

All are compared with a new model that learns everything at once, in bits per byte of the held-out
text of all nights. Its tokens are those of retraining so every night: of the first night, of the
first two, and so on. The tokenizer is that of the first night. The table of nights and domains
shows what each night's model knows of each, and what the one before it knew.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import shutil
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
from common import Table

SIZES = {
    "1M": ["model.hidden_size=128", "model.layers=4", "model.heads=2"],
    "5M": ["model.hidden_size=256", "model.layers=5", "model.heads=4"],
}
SUBJECTS = {
    "tests": (
        "unittest doctest test/test_list.py test/list_tests.py test/string_tests.py "
        "test/test_unicode.py test/test_set.py test/test_dict.py test/seq_tests.py "
        "test/test_bytes.py test/test_float.py test/test_long.py"
    ),
    "windows": "tkinter idlelib turtle.py turtledemo",
    "encodings": "encodings codecs.py stringprep.py",
    "tasks": (
        "asyncio concurrent multiprocessing threading.py queue.py sched.py selectors.py "
        "subprocess.py socketserver.py"
    ),
    "topics": "pydoc_data this.py __hello__.py",
    "mail": (
        "email mailbox.py smtplib.py smtpd.py imaplib.py poplib.py nntplib.py mimetypes.py "
        "base64.py"
    ),
    "compilers": (
        "lib2to3 ast.py tokenize.py token.py dis.py opcode.py symtable.py inspect.py "
        "pickletools.py tabnanny.py"
    ),
    "numbers": (
        "_pydecimal.py statistics.py fractions.py random.py datetime.py _pydatetime.py "
        "calendar.py numbers.py _strptime.py heapq.py bisect.py colorsys.py"
    ),
    "markup": "xml html xmlrpc json plistlib.py configparser.py csv.py tomllib",
    "files": (
        "shutil.py tarfile.py zipfile.py zipfile os.py pathlib.py pathlib tempfile.py glob.py "
        "fnmatch.py posixpath.py ntpath.py genericpath.py gzip.py bz2.py lzma.py _pyio.py "
        "importlib zipimport.py fileinput.py filecmp.py"
    ),
}
PIECE_BYTES = 1500  # of a text, at least, from a definition or paragraph on: a document
HELDOUT_FRACTION = 0.06  # of a domain, at least; more where there is less text
HELDOUT_BYTES = 24_000  # of it that are scored
BYTES_PER_TOKEN = 3.0  # about, by which --tokens cuts the text of a night
RULES = {"overall": 1.01, "worst": 1.03, "tokens": 0.25}
PROFILE = "continual"
AT_ONCE = "everything"  # the side that all others are compared with
# The default schedule and rate; budget and replay stay those of the profile.
REWARM = [
    "pretrain.schedule.kind=linear",
    "pretrain.schedule.decay_fraction=0.5",
    "pretrain.schedule.average=null",
    "nightly.rate=0.5",
]
SIDES = {
    "ours": [],
    "rewarm": REWARM,
    "new": ["nightly.replay=0", "nightly.rate=1"],
    "all": ["nightly.data=all", "nightly.rate=1"],
    "taught": ["pretrain.teacher=champion"],
}
Night = Mapping[str, Sequence[float]]  # (nats, bytes) of the held-out text of each domain
Runs = Sequence[Mapping[str, Any]]  # of a side, one of each seed


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument(
        "--path",
        help="JSON lines with the key `source`, also .gz or .zst; default: Python's own source",
    )
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--sizes", default="1M,5M", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--tokens", default="60k", help="of a night, about; Python's own source has up to 170k"
    )
    parser.add_argument("--sides", default="ours,rewarm,new,all", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--threads", type=int, help="of each training; default: all cores")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="a setting of our side, such as nightly.replay=0.1",
    )


def compare(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Every size, seed and side; then our table of nights and domains, and the metrics."""
    from ttrain.config.base import as_count

    tokens = int(str(as_count(options.tokens)))
    names = write_domains(options.path, options.nights, tokens, directory)
    sides = options.sides.split(",")
    common_settings = [f"reading.heldout_fraction={heldout_fraction(tokens)}"]
    if options.threads:
        common_settings += [f"runtime.threads={options.threads}"]
    for size in options.sizes.split(","):
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in (AT_ONCE, *sides)}
        for seed, (side, results) in itertools.product(range(1, options.seeds + 1), runs.items()):
            own = [*SIDES.get(side, []), *(options.set if side == "ours" else [])]
            settings = [*SIZES[size], *common_settings, *own, f"pretrain.seed={seed}"]
            cost = common.measure(learn, directory, json.dumps(names), json.dumps(settings), side)
            results.append({**cost.result, "cpu": cost.cpu})
            bits = mean_bits(results[-1]["nights"][-1:], names)
            print(
                f"  {size}, seed {seed}, {side}: {bits:.4f} bits per byte after "
                f"{results[-1]['tokens']:,} tokens, {cost.cpu:.0f} CPU s",
                flush=True,
            )
        show(runs[sides[0]], runs[AT_ONCE], names, f"{size}, {sides[0]}")
        for side in sides:
            rules = RULES if side == "ours" else dict.fromkeys(RULES, 0.0)
            report(table, f"{size}, {side}", runs[side], runs[AT_ONCE], names, rules)


def heldout_fraction(tokens: int) -> float:
    """The share of a domain's text that is held out, where so many tokens are learnt."""
    return max(HELDOUT_FRACTION, HELDOUT_BYTES / (HELDOUT_BYTES + tokens * BYTES_PER_TOKEN))


def report(
    table: Table,
    label: str,
    ours: Runs,
    at_once: Runs,
    names: Sequence[str],
    rules: Mapping[str, float],
) -> None:
    """The lines of a side, means over its seeds: all nights, the worst domain, the tokens."""
    our_last = [run["nights"][-1] for run in ours]
    their_last = [run["nights"][-1] for run in at_once]

    def bits(domains: Sequence[str]) -> tuple[float, float]:
        return mean_bits(our_last, domains), mean_bits(their_last, domains)

    table.ratio(f"{label}: bits per byte of all nights", *bits(names), most=rules["overall"])
    domains = {name: bits([name]) for name in names}
    worst = max(names, key=lambda name: domains[name][0] / domains[name][1])
    table.ratio(f"{label}: of the worst domain, {worst}", *domains[worst], most=rules["worst"])
    # A part of the domains in the first night, all in the last
    retrained = (len(names) + 1) / 2 * at_once[0]["tokens"]
    table.ratio(
        f"{label}: tokens, of retraining every night",
        ours[0]["tokens"],
        retrained,
        most=rules["tokens"],
    )


def show(runs: Runs, at_once: Runs, names: Sequence[str], label: str) -> None:
    """The table of nights and domains: bits per byte before and after each night, and at once.

    They are means over the seeds.
    """
    width = max(10, *map(len, names)) + 2
    print(f"\n{label}: bits per byte of each domain before and after each night")
    print(f"{'':<{width}}{''.join(f'{name:>14}' for name in (*names, 'all'))}")
    columns = [*([name] for name in names), names]
    before = [""] * len(columns)
    rows = {}
    for night, name in enumerate(names):
        rows[f"{night + 1} {name}"] = [run["nights"][night] for run in runs]
    rows["at once"] = [run["nights"][-1] for run in at_once]
    for title, nights in rows.items():
        before = [""] * len(columns) if title == "at once" else before
        after = [f"{mean_bits(nights, domains):.3f}" for domains in columns]
        cells = (f"{old} {new}".strip() for old, new in zip(before, after, strict=True))
        print(f"{title:<{width}}{''.join(f'{cell:>14}' for cell in cells)}", flush=True)
        before = after
    print()


def mean_bits(nights: Sequence[Night], names: Sequence[str]) -> float:
    """Bits per byte of these domains together, the mean of some runs."""
    bits = []
    for night in nights:
        nats = sum(night[name][0] for name in names)
        size = sum(night[name][1] for name in names)
        bits.append(nats / size / math.log(2))
    return statistics.mean(bits)


# --- text


def write_domains(path: str | None, nights: int, tokens: int, directory: Path) -> list[str]:
    """Write the documents of each night as NAME.jsonl; returns the names in order."""
    import orjson

    limit = int(tokens * BYTES_PER_TOKEN / (1 - heldout_fraction(tokens)))
    texts = dict(list((sources(path, nights) if path else modules()).items())[:nights])
    for name, documents in texts.items():
        size = 0
        with (directory / f"{name}.jsonl").open("wb") as file:
            for text in documents:
                if size < limit:
                    size += len(text.encode())
                    file.write(orjson.dumps({"text": text}) + b"\n")
        print(f"  night of {name}: {size / 1e6:.2f} MB")
    return list(texts)


def modules() -> dict[str, list[str]]:
    """Pieces of modules of the standard library by subject, shuffled within a subject."""
    root = Path(sysconfig.get_path("stdlib"))
    subjects: dict[str, list[str]] = {}
    for subject, entries in SUBJECTS.items():
        pieces: list[str] = []
        for entry in entries.split():
            path = root / entry
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            for file in filter(Path.is_file, files):
                pieces += pieces_of(file.read_text("utf-8", errors="ignore"))
        subjects[subject] = shuffled(pieces)
    return subjects


def pieces_of(text: str) -> Iterator[str]:
    """Parts of a text of at least PIECE_BYTES, which end before a line that is not indented."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size >= PIECE_BYTES and (not line[:1].isspace() or size >= 2 * PIECE_BYTES):
            yield "".join(lines)
            lines = []
            size = 0
        lines.append(line)
        size += len(line)
    if "".join(lines).strip():
        yield "".join(lines)


def sources(path: str, nights: int) -> dict[str, list[str]]:
    """Pieces of the sources of a file with the most bytes, the largest first.

    Of few long texts none may be held out by its hash. Then the lowest is, where a night reads this
    source alone, and one training on everything would learn it.
    """
    found: dict[str, list[str]] = {}
    for record in common.read_documents(path):
        found.setdefault(dict(record.labels).get("source", "none").replace("/", "-"), []).extend(
            pieces_of(record.text)
        )
    largest = sorted(found, key=lambda name: -sum(len(text.encode()) for text in found[name]))[
        :nights
    ]
    return {name: shuffled(found[name]) for name in largest}


def shuffled(texts: Sequence[str]) -> list[str]:
    """The texts in the order of their digests, so that a cut takes a sample of them."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


# --- sides: processes of their own


def learn(directory: str, names: str, settings: str, side: str) -> dict[str, Any]:
    """Train on all domains at once or one by one; the scores after each night, and the tokens."""
    from ttrain.config.loading import load

    root = Path(directory)
    domains = json.loads(names)
    profiles = [PROFILE] if side in ("ours", "rewarm", "taught") else []
    config = load(
        [*json.loads(settings), "pretrain.tokens=null", "pretrain.epochs=1"], profiles=profiles
    ).settings
    plan = [
        (domains[number : number + 1], domains[:number]) for number in range(len(domains))
    ]  # new, and learnt before
    if side == AT_ONCE:
        plan = [(domains, [])]
    elif config.nightly.data == "all":
        plan = [([*learnt, *new], []) for new, learnt in plan]
    elif not config.nightly.replay:
        plan = [(new, []) for new, _ in plan]
    learner = Learner(root, config)
    nights = []
    tokens = 0
    champion = None
    for new, learnt in plan:
        champion, figures = learner.night(new, learnt, champion)
        tokens += figures["tokens"]
        nights.append(learner.scores(champion, domains))
    shutil.rmtree(root / "models")
    return {"nights": nights, "tokens": tokens}


class Learner:
    """Runs the stages of nights in this process, each under `root`; shards are made once."""

    def __init__(self, root: Path, settings: Any) -> None:
        self.root = root
        self.settings = settings

    def job(
        self,
        output: Path,
        inputs: Mapping[str, Path],
        files: Mapping[str, list[str]] = {},
        **arguments: str,
    ) -> Any:
        """What a stage gets."""
        from ttrain.core.files import ProgressWriter
        from ttrain.tasks.common.job import StageContext

        output.mkdir(parents=True, exist_ok=True)
        groups = {role: [0] * len(paths) for role, paths in files.items()}
        return StageContext(
            inputs,
            files,
            arguments,
            output,
            self.settings.runtime,
            ProgressWriter(None),
            lambda: False,
            groups=groups,
        )

    def shards(self, domains: Sequence[str]) -> Path:
        """The shards of these domains; the tokenizer is that of the first night."""
        from ttrain.tasks import shards, tokenizer

        if not (tokens := self.root / "tokenizer").exists():
            text = str(self.root / f"{domains[0]}.jsonl")
            tokenizer.train_directory(
                [text], tokens, self.settings.tokenizer, self.settings.reading
            )
        output = self.root / "shards" / "-".join(domains)
        if not output.exists():
            files = {"train": [str(self.root / f"{name}.jsonl") for name in domains]}
            job = self.job(
                output, {"tokenizer": tokens}, files, kind="documents", dataset="pretrain"
            )
            shards.run(self.settings, job)
        return output

    def night(
        self, domains: Sequence[str], learnt: Sequence[str], champion: Path | None
    ) -> tuple[Path, dict[str, Any]]:
        """Train on these domains, from a champion if any; the model's artifact and metrics."""
        from ttrain.nightly.inputs import budget_and_schedule
        from ttrain.store.model_files import PLATEAU
        from ttrain.tasks import TAUGHT_BY, pretrain, replay, teacher

        documents = self.shards(domains)
        inputs = {"tokenizer": self.root / "tokenizer", "shards": documents}
        changes: dict[str, Any] = {}
        settings = self.settings
        output = self.root / "models" / f"{len(list(self.root.glob('models/*'))):03}"
        output.mkdir(parents=True)
        if champion:
            has_plateau = (champion / PLATEAU).exists()
            inputs |= {"base": champion, **({"plateau": champion} if has_plateau else {})}
            changes = budget_and_schedule(settings, has_plateau=has_plateau)
        tree = settings.model_dump()
        tonight = settings.model_validate({**tree, "pretrain": {**tree["pretrain"], **changes}})
        if champion and learnt:
            inputs["replay"] = output.with_name(f"{output.name}-replay")
            earlier = {
                f"learnt-{number:04}": self.shards([name]) for number, name in enumerate(learnt)
            }
            replay.run(tonight, self.job(inputs["replay"], {"documents": documents, **earlier}))
            if tonight.pretrain.teacher:
                inputs["teacher"] = output.with_name(f"{output.name}-teacher")
                read = {name: inputs[name] for name in ("tokenizer", "shards", "replay")}
                job = self.job(inputs["teacher"], {**read, f"{TAUGHT_BY}0": champion})
                teacher.run(tonight, job)
        figures = pretrain.run(tonight, self.job(output, inputs))
        return output, figures

    def scores(self, model: Path, domains: Sequence[str]) -> dict[str, tuple[float, int]]:
        """(nats, bytes) of the held-out documents of each domain."""
        import torch

        from ttrain.data.encoder import Encoder
        from ttrain.evaluate import perplexity
        from ttrain.tasks import new_model
        from ttrain.tasks.shards import heldout_records

        encoder = Encoder(self.root / "tokenizer")
        network = new_model.load(model / "model").eval()
        found: dict[str, tuple[float, int]] = {}
        for name in domains:
            texts = []
            size = 0
            for record in heldout_records(self.shards([name])):
                if size < HELDOUT_BYTES:
                    texts.append(record["text"])
                    size += len(record["text"].encode())
            sequences = [
                ([encoder.bos_id, *ids], [False] + [True] * len(ids))
                for ids in encoder.encode(texts)
            ]
            scored = perplexity.score_each(
                network,
                sequences,
                length=256,
                stride=128,
                device=torch.device("cpu"),
                progress=lambda done, total: None,
            )
            found[name] = (sum(score.nats for score in scored), size)
        return found


if __name__ == "__main__":
    common.main(str(__doc__), {"nights": compare}, options=options)
