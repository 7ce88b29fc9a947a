"""A gate over planted experts: each is the unigram model of an alphabet, so that its loss is known, and so is the best."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data_commands import Run, in_process, trains_here
from support.tiny_adapters import save_base
from support.tiny_data import make_tokenizer
from support.tiny_trainers import CPU, tiny_model

from ttrain.cli import gate as cli_gate
from ttrain.config import Expert, Gate, Lora, Runtime
from ttrain.core.files import ProgressWriter
from ttrain.core.hashing import sha256_file
from ttrain.data import chat_templates
from ttrain.data.encoder import Encoder
from ttrain.data.records import Conversation, TextDocument
from ttrain.errors import ArtifactError, DataError, Interrupted, UsageError
from ttrain.inference import gate_files, gate_router
from ttrain.lineage.names import resolve
from ttrain.model import adapters, factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import weights_digest
from ttrain.tasks import gate
from ttrain.tasks.common.job import StageContext

ALPHABETS = ("0123456789", "abcdefghijklm", "NOPQRSTUVWXYZ")
SHARES = (0.5, 0.3, 0.2)
PREFERENCE = 50.0  # how much likelier a character of an expert's own alphabet is than any other token


@dataclass(frozen=True)
class Planted:
    """Three experts: two full models, and an adapter on the first of them."""

    home: Path
    encoder: Encoder
    data: Path
    texts: tuple[tuple[str, int], ...]  # each with the number of its alphabet

    @property
    def names(self) -> list[str]:
        return [str(self.home / name) for name in ("digits", "upper", "lower")]

    @property
    def experts(self) -> list[Expert]:
        return [gate_files.expert_of(resolve(name)) for name in self.names]

    def log_probabilities(self, alphabet: int) -> torch.Tensor:
        """What the expert of an alphabet gives each token, whatever stands before it."""
        own = {self.encoder.encode([letter])[0][0] for letter in ALPHABETS[alphabet]}
        weights = torch.tensor([PREFERENCE if token in own else 1.0 for token in range(len(self.encoder))])
        return (weights / weights.sum()).log()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    home = tmp_path_factory.mktemp("experts")
    generator = np.random.default_rng(3)
    texts = []
    for _ in range(240):
        alphabet = int(generator.choice(3, p=SHARES))
        letters = list(ALPHABETS[alphabet]) + list(" .") * 3
        texts.append(("".join(generator.choice(letters, size=generator.integers(12, 60))), alphabet))
    data = home / "mixed.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in texts))
    found = Planted(home, make_tokenizer(home / "digits"), data, tuple(texts))
    _write_model(home / "digits", found.log_probabilities(0), found.log_probabilities(1))
    make_tokenizer(home / "upper")
    _write_model(home / "upper", found.log_probabilities(2), found.log_probabilities(2))
    _write_adapter(home / "lower", home / "digits")
    return found


def _write_model(directory: Path, along_0: torch.Tensor, along_1: torch.Tensor) -> None:
    """A model whose hidden state is the axis 0 everywhere, to which its head gives `along_0`; to the axis 1, `along_1`.

    What attention reads is handed on to where an adapter can turn it: v_proj is the identity, o_proj is nothing.
    """
    model = tiny_model(vocab=len(along_0), tie_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.layers[0].self_attn.v_proj.weight.copy_(torch.eye(16))
        model.model.embed_tokens.weight.zero_()[:, 0] = 100
        model.lm_head.weight.zero_()[:, 0] = along_0 / 4  # the norm of 16 numbers makes one of them 4
        model.lm_head.weight[:, 1] = along_1 / 4
    save_base(model, directory)


def _write_adapter(directory: Path, base: Path) -> None:
    """An adapter that turns the axis 0 into the axis 1."""
    model = adapters.attach(factory.load(base), Lora(rank=1, alpha=1.0, targets=("o_proj",)))
    weights = {name: torch.zeros_like(tensor) for name, tensor in adapters.state(model).items()}
    (down,) = (tensor for name, tensor in weights.items() if "layers.0" in name and "lora_A" in name)
    (up,) = (tensor for name, tensor in weights.items() if "layers.0" in name and "lora_B" in name)
    down[0, 0], up[0, 0], up[1, 0] = 1 / 4, -100, 100
    directory.mkdir()
    save_file(weights, directory / adapters.WEIGHTS)
    for name, content in adapters.files(model, base=str(base), base_digest=weights_digest(base)).items():
        (directory / name).write_bytes(content)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line, which trains in this process."""
    trains_here(monkeypatch)
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    monkeypatch.setenv("TTRAIN__SFT__EPOCHS", "3")  # of pipelines, which does not count here
    monkeypatch.chdir(tmp_path)
    return partial(in_process(capsys), "gate")


ROWS = Gate(row_length=64, stride=32)
SMALL = ("buckets=512", "embedding_size=8", "hidden=8", "ngram_characters=2", "epochs=8", "row_length=64", "stride=32",
         "lr=0.03")  # fmt: skip


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_gate_routes_to_the_planted_experts_and_touches_none_of_them(run: Run, planted: Planted, tmp_path: Path) -> None:
    kept = {path: sha256_file(path) for path in planted.home.rglob("*") if path.is_file()}
    words = ("train", "--experts", ",".join(planted.names), "--data", planted.data, "--out", "gate", *SMALL)
    done = run(*words, "--json")
    assert done.code == 0, done.err
    assert {path: sha256_file(path) for path in planted.home.rglob("*") if path.is_file()} == kept

    found = done.json["routing"]
    assert found["majority_accuracy"] < 0.65 and found["accuracy"] > 0.95
    assert found["loss_oracle"] <= found["loss_routed"] < found["loss_best_single"] and found["gain"] > 0.9
    assert found["unit"] == "nats per token" and found["records"] == done.json["heldout_rows"]
    trained = {name.rpartition(".")[0] for name in load_file(tmp_path / "gate" / "model.safetensors")}
    assert trained == {"embedding", "layers.0", "layers.1", "layers.3"}  # the router, and nothing of an expert

    opened = gate_router.GateSelector(tmp_path / "gate", device="cpu", dtype="fp32")
    assert [expert.reference for expert in opened.experts] == planted.names
    for text, expert in (("7 31. 95", 0), ("VWX ZZ.", 1), ("abba. cede.", 2)):
        number, probabilities = opened.route(text)
        assert number == expert and probabilities[expert] == max(probabilities)
        assert sum(probabilities) == pytest.approx(1, abs=1e-6)

    router = sha256_file(tmp_path / "gate" / "model.safetensors")
    again = run(*words)
    assert again.code == 0 and "scoring" not in again.err, again.err
    assert sha256_file(tmp_path / "gate" / "model.safetensors") == router, "the same command makes the same gate"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--experts", "{0}"], "a gate picks one of at least two"),
        (["--experts", "{0},nobody,{1}"], "there is no model 'nobody'"),
        (["--experts", "{0},{1}", "hiden=3"], "did you mean 'hidden'?"),
        (["--experts", "{0},{1}", "runtime.devices=2"], "a gate trains in one process; set runtime.devices=1"),
        (["--experts", "{0},{1}", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["--experts", "{0},{1}", "stride=64"], "takes 128 positions; set row_length=128 and stride=64"),
    ],
)  # fmt: skip
def test_a_mistake_of_the_command_is_told_before_anything_starts(
    run: Run, planted: Planted, tmp_path: Path, words: Sequence[str], said: str
) -> None:
    words = [word.format(*planted.names) for word in words]
    refused = run("train", "--data", planted.data, *words, "--out", "gate")
    assert refused.code == 2 and said in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_gate_knows_when_an_expert_was_changed(planted: Planted, tmp_path: Path) -> None:
    first, *others = planted.experts
    gate_files.check(first)
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "model.safetensors").write_bytes(b"other")
    changed = first.model_copy(update={"model": str(tmp_path / "expert")})
    with pytest.raises(ArtifactError, match=f"not the one that the gate knows.*no longer {first.weights_sha256[:12]}"):
        gate_files.check(changed)

    with pytest.raises(UsageError, match="holds no gate"):
        gate_files.read(tmp_path)
    contents = gate_files.GateFile(experts=(first, *others), settings=Gate(), figures={})
    gate_files.write(tmp_path, contents)
    assert gate_files.read(tmp_path).experts == (first, *others)


# --- records and losses -----------------------------------------------------------------------------------------------


def _job(output: Path, stop: Callable[[], bool] = lambda: False) -> StageContext:
    return StageContext({}, {}, {}, output, Runtime(device="cpu"), ProgressWriter(None), stop)


def test_losses_are_those_of_the_planted_models(planted: Planted, tmp_path: Path) -> None:
    chats = Conversation((
        chat_templates.Message("user", "cab?"), chat_templates.Message("assistant", "10 20"),
        chat_templates.Message("user", "more"), chat_templates.Message("assistant", "ABBA"),
    ))  # fmt: skip
    records = [TextDocument("12 abc"), TextDocument("XYZ" * 60), chats]
    settings = Gate(row_length=32, stride=8)
    nats_RE, tokens_RE = gate.score(planted.experts, records, settings, _job(tmp_path), CPU)
    end = planted.encoder.end_id
    scored = [
        *planted.encoder.encode([record.text for record in records[:2]]),  # type: ignore[union-attr]
        [*planted.encoder.encode(["10 20"])[0], end, *planted.encoder.encode(["ABBA"])[0], end],
    ]
    for column, alphabet in enumerate((0, 2, 1)):
        expected = [-float(planted.log_probabilities(alphabet)[ids].sum()) for ids in scored]
        assert nats_RE[:, column].tolist() == pytest.approx(expected, rel=1e-4)
        assert tokens_RE[:, column].tolist() == [len(ids) for ids in scored]
    assert gate.bytes_of(chats) == 9 and gate.bytes_of(records[1]) == 180
    assert gate.text_of(chats) == "cab?" and gate.text_of(records[0]) == "12 abc"


def test_scoring_that_was_stopped_goes_on_with_the_next_expert(
    planted: Planted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [TextDocument("12"), TextDocument("ab")]
    stops = iter([False, True])
    with caplog.at_level("INFO", "ttrain"):
        with pytest.raises(Interrupted, match="1 of 3 are"):
            gate.score(planted.experts, records, ROWS, _job(tmp_path, lambda: next(stops)), CPU)
        caplog.clear()
        whole, _ = gate.score(planted.experts, records, ROWS, _job(tmp_path), CPU)
    assert [line.split()[-1] for line in caplog.messages if line.startswith("scoring")] == planted.names[1:]
    fresh, _ = gate.score(planted.experts[:1], records, ROWS, _job(tmp_path / "fresh"), CPU)
    assert np.array_equal(whole[:, :1], fresh)
    others, _ = gate.score(planted.experts[:1], records[:1], ROWS, _job(tmp_path), CPU)
    assert others.shape == (1, 1)  # of other records nothing is taken


def test_records_are_distinct_of_any_kind_and_held_out_by_content(tmp_path: Path) -> None:
    documents = [{"text": f"document {number}"} for number in range(60)]
    chats = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": "a"}]} for n in range(20)
    ]
    for name, rows in {"a": documents[:40], "b": [*documents[20:]], "c": chats}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    settings = Gate(heldout_fraction=0.3)
    records = gate.read(paths, settings)
    assert len(records) == 80 and records == gate.read(paths[::-1], settings)
    out = {record.content() for record, held in zip(records, gate.heldout_flags(records, settings), strict=True) if held}
    fewer = gate.read(paths, Gate(limit=30, heldout_fraction=0.3))
    assert (
        len(fewer) == 30
        and fewer == gate.read(paths[::-1], Gate(limit=30))
        and {type(record) for record in fewer} == {TextDocument, Conversation}
    )
    flags = gate.heldout_flags(fewer, settings)
    assert {record.content() for record, held in zip(fewer, flags, strict=True) if held} == {
        record.content() for record in fewer
    } & out
    (tmp_path / "bad.jsonl").write_text("{}\n" * 5)
    with pytest.raises(DataError, match=r"5 of 5 rows are bad, more than rejected_fraction=.*'paragraphs' \(text_field\)"):
        gate.read([str(tmp_path / "bad.jsonl")], settings)
    with pytest.raises(DataError, match="went to the held-out part"):
        gate.heldout_flags(records[:1], settings)


def test_without_data_the_experts_own_held_out_records_are_taken(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    store, manifest = ArtifactStore(tmp_path), {"result": {}, "ingredients": {}, "inputs": {}}
    for name in ("a", "b"):
        (tmp_path / name / "heldout").mkdir(parents=True)
        (tmp_path / name / "heldout" / "1.jsonl").write_text('{"text": "x"}\n')
        index = {"shards": [{"file": "1.arrow", "records": "1.jsonl"}]}
        (tmp_path / name / "heldout" / "index.json").write_text(json.dumps(index))
        store.publish(f"shards-{name}", "0" * 64, tmp_path / name, manifest)
        shutil.copytree(planted.names[0], tmp_path / f"of-{name}" / "model")
        inputs = {"shards": {"stage": f"shards-{name}", "key": "0" * 64}}
        store.publish("sft", name * 64, tmp_path / f"of-{name}", {**manifest, "inputs": inputs})
    found = [resolve(str(store.path("sft", name * 64))) for name in ("a", "b", "a")]
    assert cli_gate.heldout_files(found) == [
        str(store.path(f"shards-{name}", "0" * 64) / "heldout" / "1.jsonl") for name in ("a", "b")
    ]
    with pytest.raises(UsageError, match="name files with --data"):
        cli_gate.heldout_files([resolve(planted.names[0])])


def test_chats_are_not_scored_by_a_model_whose_tokenizer_has_no_template(planted: Planted, tmp_path: Path) -> None:
    without_template = shutil.ignore_patterns("chat_template.jinja")
    bare = gate_files.expert_of(resolve(str(shutil.copytree(planted.names[1], tmp_path / "bare", ignore=without_template))))
    talk = Conversation((chat_templates.Message("user", "1"), chat_templates.Message("assistant", "2")))
    gate.score([bare], [TextDocument("1")], ROWS, _job(tmp_path / "out"), CPU)
    with pytest.raises(UsageError, match="has no chat template"):
        gate.score([bare], [TextDocument("1"), talk], ROWS, _job(tmp_path / "out"), CPU)


# --- the router -------------------------------------------------------------------------------------------------------


def test_runs_of_characters_have_the_same_ids_everywhere_and_padding_counts_nothing() -> None:
    settings = Gate(buckets=1000, ngram_characters=2, characters=16)
    assert gate_router.run_ids("ab", settings).tolist() == [216, 442, 573, 684, 784, 815]
    assert gate_router.run_ids("x" * 16 + "y", settings).tolist() == gate_router.run_ids("x" * 16, settings).tolist()
    assert len(gate_router.run_ids("aaaa", settings)) == 2 + 3  # " " and "a"; " a", "aa" and "a "
    assert len(gate_router.run_ids("", settings)) == 2 and len(gate_router.run_ids("\udcff🙂字", settings)) == 4 + 4
    torch.manual_seed(0)
    model = gate_router.Router(settings, 3)
    texts = ["a", "some longer text", "字"]
    together = model.probabilities(texts)
    alone = torch.cat([model.probabilities([text]) for text in texts])
    torch.testing.assert_close(together, alone)
    ids_BL = gate_router.padded([gate_router.run_ids("a", settings)])
    mean = model.embedding(ids_BL[0]).mean(0)
    torch.testing.assert_close(model(ids_BL)[0], model.layers(mean))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_routing_worked_out_by_hand() -> None:
    nats_RE = np.array([[1.0, 2.0], [4.0, 2.0], [6.0, 3.0], [2.0, 9.0], [1.0, 8.0]])
    tokens_RE = np.array([[1, 1], [2, 2], [3, 3], [2, 2], [2, 2]])
    found = gate.routing_metrics(nats_RE, tokens_RE, np.ones(5, np.int64), np.array([0, 1, 0, 0, 1]))
    assert found["unit"] == "nats per token" and found["records"] == 5
    assert found["accuracy"] == pytest.approx(3 / 5) and found["majority_accuracy"] == pytest.approx(3 / 5)
    assert found["loss_routed"] == pytest.approx((1 + 2 + 6 + 2 + 8) / 10)
    assert found["loss_oracle"] == pytest.approx((1 + 2 + 3 + 2 + 1) / 10)
    assert found["loss_best_single"] == pytest.approx(14 / 10)
    assert found["gain"] == pytest.approx((14 - 19) / (14 - 9))
    assert found["experts"][1] == pytest.approx({"loss": 2.4, "best_share": 0.4, "routed_share": 0.4})


def test_a_gate_that_gains_nothing_is_said_to_and_experts_with_other_tokens_are_compared_by_the_byte() -> None:
    nats, ones = np.array([[1.0, 2.0], [2.0, 1.0]]), np.ones(2, int)
    for chosen, is_worth in (([0, 1], True), ([1, 1], False)):
        metrics = gate.routing_metrics(nats, np.ones((2, 2), int), ones, np.array(chosen))
        assert len(cli_gate.routing_parts(["a", "b"], metrics)) == (2 if is_worth else 3)
    found = gate.routing_metrics(np.array([[8.0, 4.0]]), np.array([[4, 2]]), np.array([3]), np.array([1]))
    assert found["unit"] == "bits per byte" and found["loss_routed"] == pytest.approx(4 / 3 / math.log(2))
    assert found["gain"] is None  # the best single one is the best for each
