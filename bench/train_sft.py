"""Fine-tuning on chats: useful tokens a second of the packed stage, against padding to the maximum and dynamic padding.

    python bench/train_sft.py [--path 'FOLDER/*.jsonl']          about 7 minutes on two cores
    python bench/train_sft.py --rounds 1 --steps 4               a quick try, 2 minutes

The model has hidden size 256 and 4 layers, rows have 512 tokens. Chats are those of --path, or made: from Python's own
source, of log-normal lengths. A useful token is one of a chat, whether learnt or context; padding is not. Ours is `ttrain
stage run sft`, as it is. The other sides are bare loops with the stage's allocator setting, the same model, optimizer and
pieces of chats, shuffled, 8 in a micro-batch with the attention mask that a collator makes. They accumulate as many
micro-batches as make a step of about as many chats as ours has, so that an epoch is as many steps.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import train_common
from train_common import PEERS, Size

LEAST_PADDED, LEAST_DYNAMIC, LEAST_FILL = 3.0, 1.9, 0.99
SIZE = Size(256, 4, 512, rows_per_step=8, warmup_steps=4, measured_steps=20)
CHATS_PER_BATCH = 8
STEPS_SHARE = {"maximum": 1 / 6, "dynamic": 1 / 3}  # of our steps: theirs take longer
MADE_CHATS, MEDIAN_CHARACTERS, SIGMA, QUESTION_FRACTION = 8000, 400, 0.8, 0.3
MADE_CHARACTERS = (60, 2000)


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = train_common.parser(__doc__).parse_args()
    size = dataclasses.replace(SIZE, measured_steps=options.steps) if options.steps else SIZE
    table = common.Table()
    with common.workplace() as directory:
        chats, texts = directory / "chats.jsonl", directory / "texts.jsonl"
        made = "" if options.path else common.material(options, directory)
        counts = train_common.side(__file__, "material", options.path or "", made, chats, texts).found
        print(
            f"{counts['chats']} chats, {counts['bytes'] / common.MEGABYTE:.1f} MB; the tokenizer learns from the same text"
        )
        steps = size.warmup_steps + size.measured_steps
        # A base of one step: what it has learnt does not change how fast the next stage is.
        settings = [f"data.pretrain={texts}", f"data.sft={chats}", f"tokenizer.vocab_size={size.vocab_size}",
                    *train_common.training("pretrain", size, 1), *train_common.training("sft", size, steps)]  # fmt: skip
        built = {name: train_common.stage(name, directory, settings, keep=True).found["artifact"]
                 for name in ("tokenizer", "shards-pretrain", "shards-sft", "pretrain")}  # fmt: skip
        alone = [*settings, "sft.packing=none"]
        rows = train_common.export("sft", directory, alone, built["shards-sft"], built["tokenizer"])
        measure(size, options, directory, settings, rows, table)
    return int(table.failed)


def measure(size: Size, options: Any, directory: Path, settings: list[str], rows: Path, table: common.Table) -> None:
    """Interleaved rounds and the table; each round of a padded side takes other chats."""
    steps = size.warmup_steps + size.measured_steps
    costs: dict[str, list[common.Cost]] = {"packed": [], "maximum": [], "dynamic": []}
    for number in range(options.rounds):
        costs["packed"].append(train_common.stage("sft", directory, settings))
        result = costs["packed"][0].found["result"]
        accumulated = max(1, round(size.rows_per_step * result["rows"]["pieces"] / result["rows"]["rows"] / CHATS_PER_BATCH))
        for side, share in STEPS_SHARE.items():
            count = max(2, round(steps * share))
            arguments = (rows, directory / "config", CHATS_PER_BATCH, accumulated, count, side, number)
            costs[side].append(train_common.side(PEERS, "padded", *arguments, **train_common.allocator()))
    fill = 1 - costs["packed"][0].found["result"]["rows"]["pad_fraction"]
    useful = {"packed": statistics.median(train_common.rate(cost, size) * fill for cost in costs["packed"])}
    useful |= {side: statistics.median(map(padded_rate, costs[side])) for side in ("maximum", "dynamic")}
    print(f"  about {accumulated * CHATS_PER_BATCH} chats a step; {result['rows']}")
    for side in ("maximum", "dynamic"):
        tokens, positions = (sum(sum(cost.found[name]) for cost in costs[side]) for name in ("useful", "positions"))
        print(f"  {side}: {tokens / positions:.3f} of all positions useful; {common.median(costs[side], 'memory'):,.0f} MB")
    print(f"  packed: {common.median(costs['packed'], 'memory'):,.0f} MB")
    table.add("useful tokens/s, padding to the maximum", f"{useful['packed']:,.0f}", f"{useful['maximum']:,.0f}",
              useful["packed"] / useful["maximum"], least=LEAST_PADDED)  # fmt: skip
    table.add("useful tokens/s, dynamic padding", f"{useful['packed']:,.0f}", f"{useful['dynamic']:,.0f}",
              useful["packed"] / useful["dynamic"], least=LEAST_DYNAMIC)  # fmt: skip
    table.claim(f"fill of the packed rows {fill:.4f}, at least {LEAST_FILL}", fill >= LEAST_FILL)
    train_common.write_json(options.json, table, costs)


def padded_rate(cost: common.Cost) -> float:
    """Useful tokens a second after the first third of the steps."""
    stamps, useful = cost.found["stamps"], cost.found["useful"]
    begin = max(1, len(stamps) // 3)
    return sum(useful[begin * cost.found["accumulated"] :]) / (stamps[-1][1] - stamps[begin - 1][1])


def side_material(path: str, documents: str, chats: str, texts: str) -> dict[str, int]:
    """Chats as `messages`, read from files of any shape that ttrain knows or made from documents; and their text alone."""
    found = list(read_chats(path) if path else made_chats(documents))
    with Path(chats).open("w") as file, Path(texts).open("w") as text_file:
        for messages in found:
            file.write(json.dumps({"messages": messages}) + "\n")
            text_file.write(json.dumps({"text": "\n".join(message["content"] for message in messages)}) + "\n")
    return {"chats": len(found), "bytes": Path(chats).stat().st_size}


def read_chats(path: str) -> Any:
    """The conversations of all files that a pattern names."""
    import glob

    from ttrain.data import records
    from ttrain.data.records import Tally

    for record in records.read(sorted(glob.glob(path)), records.parse_conversation, Tally(), 32 << 20):
        assert isinstance(record, records.Conversation), "the parser is that of conversations"
        yield record.to_json()["messages"]


def made_chats(documents: str) -> Any:
    """A question and an answer cut out of the documents."""
    import numpy as np

    generator = np.random.default_rng(1)
    text = "\n".join(common.texts_of(documents))
    lengths = np.exp(generator.normal(np.log(MEDIAN_CHARACTERS), SIGMA, MADE_CHATS)).clip(*MADE_CHARACTERS).astype(int)
    for length in lengths.tolist():
        start = int(generator.integers(0, len(text) - length))
        middle, end = start + int(QUESTION_FRACTION * length), start + length
        yield [{"role": "user", "content": text[start:middle].strip() or "?"},
               {"role": "assistant", "content": text[middle:end].strip() or "?"}]  # fmt: skip


if __name__ == "__main__":
    if not common.requested_side({"material": side_material}):
        sys.exit(main())
