"""The stages `shards-*` and `tokenizer` agree on which rows of the user's files are held out."""

from pathlib import Path

from support.shard_sets import write_lines
from support.tiny_data import make_tokenizer

from ttrain.config import Reading, Runtime, Settings, Tokenizer
from ttrain.core.files import ProgressWriter
from ttrain.data.pool import Processes
from ttrain.data.shards import ShardSet
from ttrain.tasks import shards, tokenizer
from ttrain.tasks.common.job import StageContext


def test_the_tokenizer_learns_from_the_rows_that_the_model_learns_from(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    rows = [{"text": f"{number}: a text of a few words"} for number in range(200)]
    path = str(write_lines(tmp_path / "train.jsonl", rows))
    inputs, files = {"tokenizer": tmp_path / "tokenizer"}, {"train": [path]}
    arguments = {"kind": "documents", "dataset": "pretrain"}
    options = (arguments, tmp_path / "out", Runtime(device="cpu"), ProgressWriter(None))
    job = StageContext(inputs, files, *options, lambda: False, groups={"train": [0]})
    shards.build(Settings(), job, Processes(1))
    made = tokenizer.train_directory([path], tmp_path / "tok", Tokenizer(vocab_size=300), Reading())
    assert made["documents_seen"] == len(ShardSet(tmp_path / "out" / "train")) < 200
