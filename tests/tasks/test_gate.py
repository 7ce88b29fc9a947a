"""A gate over planted experts: each is the unigram model of an alphabet, so that its loss is known,
and so is the best."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.data_commands import in_process, trains_here
from support.shard_sets import write_lines
from support.tiny_adapters import save_base
from support.tiny_data import make_tokenizer
from support.tiny_trainers import CPU, tiny_model

from ttrain.config import Expert, Gate, Runtime
from ttrain.core.files import ProgressWriter, write_json
from ttrain.core.hashing import sha256_file
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.records import Conversation, TextDocument
from ttrain.errors import ArtifactError
from ttrain.inference import gate_files, gate_router
from ttrain.lineage.lookup import resolve
from ttrain.tasks import gate
from ttrain.tasks.common.job import StageContext

ALPHABETS = {"digits": "0123456789", "lower": "abcdefghijklm"}
PREFERENCE = 50.0  # how much likelier an expert's own characters are than any other token


@dataclass(frozen=True)
class Planted:
    """Two experts with one tokenizer."""

    home: Path
    encoder: Encoder
    data: Path

    @property
    def names(self) -> list[str]:
        return [str(self.home / name) for name in ALPHABETS]

    @property
    def experts(self) -> list[Expert]:
        return [gate_files.expert_of(resolve(name)) for name in self.names]

    def log_probabilities(self, name: str) -> torch.Tensor:
        """What an expert gives each token, whatever stands before it."""
        own = {self.encoder.encode([letter])[0][0] for letter in ALPHABETS[name]}
        tokens = range(len(self.encoder))
        weights = torch.tensor([PREFERENCE if token in own else 1.0 for token in tokens])
        return (weights / weights.sum()).log()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """The hidden state is axis 0; the head gives it the logarithms of the alphabet."""
    home, generator, rows = tmp_path_factory.mktemp("experts"), np.random.default_rng(3), []
    for _ in range(240):
        letters = [*ALPHABETS[generator.choice([*ALPHABETS], p=(0.6, 0.4))], *" . . ."]
        rows.append({"text": "".join(generator.choice(letters, size=generator.integers(12, 60)))})
    encoder, _ = (make_tokenizer(home / name) for name in ALPHABETS)
    made = Planted(home, encoder, write_lines(home / "mixed.jsonl", rows))
    for name in ALPHABETS:
        model = tiny_model(vocab=len(made.encoder), tie_embeddings=False)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.zero_()[:, 0] = 100
            # The norm of 16 numbers makes one of them 4.
            model.lm_head.weight.zero_()[:, 0] = made.log_probabilities(name) / 4
        save_base(model, home / name)
    return made


def test_a_gate_routes_to_the_planted_experts(
    planted: Planted, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests() -> dict[Path, str]:
        return {path: sha256_file(path) for path in planted.home.rglob("*") if path.is_file()}

    trains_here(monkeypatch)
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    monkeypatch.chdir(tmp_path)
    before, experts, run = digests(), ",".join(planted.names), in_process(capsys)
    small = "buckets=512 embedding_size=8 hidden=8 ngram_characters=2 epochs=8 row_length=64"
    options = (*small.split(), "stride=32", "lr=0.03", "--data", planted.data, "--out", "gate")
    words = ("gate", "train", "--experts", experts, *options)
    done = run(*words, "--json")
    assert done.code == 0, done.err
    assert digests() == before
    metrics = done.json["routing"]
    assert metrics["majority_accuracy"] < 0.75 and metrics["accuracy"] > 0.95
    assert metrics["loss_oracle"] <= metrics["loss_routed"] < metrics["loss_best_single"]
    assert metrics["gain"] > 0.9 and metrics["records"] == done.json["heldout_rows"]
    router = tmp_path / "gate" / "model.safetensors"
    opened = gate_router.GateSelector(tmp_path / "gate", device="cpu", dtype="fp32")
    assert [expert.reference for expert in opened.experts] == planted.names
    for text, expert in (("7 31. 95", 0), ("abba. cede.", 1)):
        number, probabilities = opened.route(text)
        assert number == expert and probabilities[expert] == max(probabilities)
    digest, again = sha256_file(router), run(*words)
    assert again.code == 0 and "scoring" not in again.err, again.err
    assert sha256_file(router) == digest, "the same command makes the same gate"


def test_a_changed_expert_or_router_is_refused(planted: Planted, tmp_path: Path) -> None:
    first, other = planted.experts
    gate_files.check(first)
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert" / "model.safetensors").write_bytes(b"other")
    changed = first.model_copy(update={"model": str(tmp_path / "expert")})
    with pytest.raises(ArtifactError, match=r"weights in .*expert"):
        gate_files.check(changed)
    parts = {"experts": (first, other), "settings": Gate(), "figures": {}}
    contents = gate_files.GateFile(**parts, router_sha256="0" * 64)
    write_json(tmp_path / gate_files.GATE, contents.model_dump(mode="json"))
    assert gate_files.read(tmp_path).experts == (first, other)
    save_file({}, tmp_path / gate_files.WEIGHTS)
    with pytest.raises(ArtifactError, match=gate_files.WEIGHTS):
        gate_router.GateSelector(tmp_path, device="cpu", dtype="fp32")


def test_losses_are_those_of_the_planted_models(planted: Planted, tmp_path: Path) -> None:
    turns = ("user", "cab?"), ("assistant", "10 20"), ("user", "more"), ("assistant", "ABBA")
    chats = Conversation(tuple(Message(*turn) for turn in turns))
    texts, encode, end = ("12 abc", "XYZ" * 60), planted.encoder.encode, planted.encoder.end_id
    records = [*map(TextDocument, texts), chats]
    runtime, progress = Runtime(device="cpu"), ProgressWriter(None)
    job = StageContext({}, {}, {}, tmp_path, runtime, progress, lambda: False)
    nats_RE = gate.score(planted.experts, records, Gate(row_length=32, stride=8), job, CPU)
    scored = [*encode(list(texts)), [*encode(["10 20"])[0], end, *encode(["ABBA"])[0], end]]
    for column, name in enumerate(ALPHABETS):
        expected = [-float(planted.log_probabilities(name)[ids].sum()) for ids in scored]
        assert nats_RE[:, column].tolist() == pytest.approx(expected, rel=1e-4)
    assert gate.bytes_of(chats) == 9 and gate.bytes_of(records[1]) == 180
    assert gate.text_of(chats) == "cab?" and gate.text_of(records[0]) == "12 abc"


def test_figures_of_a_routing_worked_out_by_hand() -> None:
    nats_RE = np.array([[1.0, 2.0], [4.0, 2.0], [6.0, 3.0], [2.0, 9.0], [1.0, 8.0]])
    metrics = gate.routing_metrics(nats_RE * math.log(2), 10, np.array([0, 1, 0, 0, 1]))
    second = {"loss": 2.4, "best_share": 0.4, "routed_share": 0.4}
    assert metrics.pop("experts")[1] == pytest.approx(second)
    expected = {"records": 5, "accuracy": 3 / 5, "majority_accuracy": 3 / 5}
    losses = {"loss_routed": 1.9, "loss_oracle": 0.9, "loss_best_single": 1.4}
    gain = (14 - 19) / (14 - 9)
    assert metrics == pytest.approx({**metrics, **expected, **losses, "gain": gain})
