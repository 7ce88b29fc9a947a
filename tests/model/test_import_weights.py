"""Models from TinySeek's and MiniMind's own files: equal logits with a slow reference, and refusals that name what is wrong.

The references compute position by position and expert by expert, from what is public of the two shapes, without any of the
modules under test. Letters in names: V vocabulary, D width, H heads, K width of a head.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.foreign_weights import EXPERTS, KV, LAYERS, OLD, TINYSEEK, TOP_K, D, H, Made, S, V, minimind, save, tinyseek
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.model.convert import import_model

IDS = torch.randint(1, V, (2, 9), generator=torch.Generator().manual_seed(5))


def apply(weights: Made, name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", torch.zeros(()))


def attend(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """One head: each position over itself and what is before it."""
    found = []
    for t, query in enumerate(queries):
        scores = torch.stack([query @ keys[s] / math.sqrt(len(query)) for s in range(t + 1)])
        found.append(scores.softmax(0) @ torch.stack(values[: t + 1]))
    return found


# --- TinySeek -----------------------------------------------------------------------------------------------------------


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Neighbours 2i and 2i+1 turn together."""
    found = x.clone()
    for i in range(len(x) // 2):
        angle = position * theta ** (-2 * i / len(x))
        a, b = float(x[2 * i]), float(x[2 * i + 1])
        found[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        found[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return found


def normalised(weights: Made, name: str, x: Tensor) -> Tensor:
    """By the deviation over D - 1."""
    x = (x - x.mean()) / (x.var(unbiased=True) + 1e-13).sqrt()
    return weights[f"{name}.gamma"] * x + weights[f"{name}.beta"]


def tinyseek_experts(weights: Made, moe: str, x: Tensor) -> Tensor:
    scores = x @ weights[f"{moe}.w_g"]
    chosen = scores.argsort(descending=True)[: TINYSEEK["keep"]].tolist()
    shares = {f"experts.{e}": weight for e, weight in zip(chosen, scores[chosen].softmax(0), strict=True)}
    shares |= {f"shared_experts.{e}": torch.tensor(1.0) for e in range(S)}
    found = torch.zeros(D)
    for expert, share in shares.items():
        inner = apply(weights, f"{moe}.{expert}.fc1", x).clamp(min=0)
        found = found + share * apply(weights, f"{moe}.{expert}.fc2", inner)
    return found


def tinyseek_logits(weights: Made, ids: list[int], heads: tuple[str, ...], layers: list[str]) -> list[Tensor]:
    """[T, V] for each head's name."""
    xs = [weights["tokenEmbedding.tokenEmbedding.weight"][token] for token in ids]
    K = D // H
    for layer in layers:
        mla = f"{layer}.mla"
        made = [
            (q := apply(weights, f"{mla}.w_dq", x), kv := apply(weights, f"{mla}.w_dkv", x),
             apply(weights, f"{mla}.w_uq", q), apply(weights, f"{mla}.w_uk", kv), apply(weights, f"{mla}.w_uv", kv),
             turned(apply(weights, f"{mla}.w_qr", q), t, TINYSEEK["ro_theta"]),
             turned(apply(weights, f"{mla}.w_kr", x), t, TINYSEEK["ro_theta"]))
            for t, x in enumerate(xs)
        ]  # fmt: skip
        of_heads = []
        for h in range(H):
            part = slice(h * K, (h + 1) * K)
            queries = [torch.cat((each[2][part], each[5])) for each in made]
            keys = [torch.cat((each[3][part], each[6])) for each in made]
            of_heads.append(attend(queries, keys, [each[4][part] for each in made]))
        mixed = [torch.cat([head[t] for head in of_heads]) for t in range(len(xs))]
        xs = [
            normalised(weights, f"{layer}.norm1", x + apply(weights, f"{mla}.w_o", m))
            for x, m in zip(xs, mixed, strict=True)
        ]
        xs = [normalised(weights, f"{layer}.norm2", x + tinyseek_experts(weights, f"{layer}.moe_ffn", x)) for x in xs]
    return [torch.stack([apply(weights, head, x) for x in xs]) for head in heads]


@pytest.mark.parametrize(("name", "inner"), [("weights.pkl", 5), ("weights.safetensors", 8)])
def test_tinyseek_gives_the_logits_of_a_slow_reference_from_both_heads(tmp_path: Path, name: str, inner: int) -> None:
    """Experts of 5 are computed one by one, those of 8 in groups."""
    weights = tinyseek(inner=inner)
    path = save(tmp_path / "theirs", weights, name, {**TINYSEEK, "hidden": inner})
    done = import_model(path.parent, tmp_path / "ours")
    assert (done.layout, done.kind, done.second_head) == ("TinySeek", "tinyseek", True)
    assert {*done.assumed} == {"max_len", "eos_token_id"}
    model = factory.load(tmp_path / "ours").eval()
    second = load_file(tmp_path / "ours" / "multi_token.safetensors")
    with torch.no_grad():
        found = model(IDS, output_hidden_states=True)
    for row, ids in enumerate(IDS.tolist()):
        first, then = tinyseek_logits(weights, ids, ("fc1", "fc2"), ["layers.0", "layers.1"])
        torch.testing.assert_close(found.logits[row], first, rtol=1e-4, atol=1e-4)
        theirs = found.hidden_states[-1][row] @ second["weight"].T + second["bias"]
        torch.testing.assert_close(theirs, then, rtol=1e-4, atol=1e-4)
    assert model.config.dropout == 0.1 and model.config.router_aux_loss_coef == 0.02
    assert model.config.pad_token_id == 0 and model.config.multi_token_loss_weight == 1.0


def test_tinyseek_with_one_layer_for_all_passes(tmp_path: Path) -> None:
    weights = tinyseek(shared_layer=True)
    path = save(tmp_path / "theirs", weights, config={**TINYSEEK, "n_layer": 3})
    assert not import_model(path, tmp_path / "ours").second_head
    model = factory.load(tmp_path / "ours").eval()
    assert len(model.model.layers) == 1
    with torch.no_grad():
        found = model(IDS).logits
    (expected,) = tinyseek_logits(weights, IDS[0].tolist(), ("fc",), ["synonymous_layer"] * 3)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


# --- MiniMind -----------------------------------------------------------------------------------------------------------


def rms(weight: Tensor, x: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def turned_halves(x: Tensor, position: int) -> Tensor:
    """Dimensions i and i + K/2 turn together, by MiniMind's base of a million."""
    neighbours = x.view(2, -1).T.reshape(-1)
    return turned(neighbours, position, 1e6).view(-1, 2).T.reshape(-1)


def gated(weights: Made, name: str, x: Tensor) -> Tensor:
    gate, up = (apply(weights, f"{name}.{part}", x) for part in ("gate_proj", "up_proj"))
    return apply(weights, f"{name}.down_proj", silu(gate) * up)


def minimind_block(weights: Made, name: str, x: Tensor, top_k: int) -> Tensor:
    if f"{name}.gate.weight" not in weights:
        return gated(weights, name, x)
    scores = apply(weights, f"{name}.gate", x).softmax(0)
    chosen = scores.argsort(descending=True)[:top_k].tolist()
    found = torch.zeros(D)
    for expert in chosen:
        found = found + scores[expert] / scores[chosen].sum() * gated(weights, f"{name}.experts.{expert}", x)
    for expert in range(sum(key.startswith(f"{name}.shared_experts.") for key in weights) // 3):
        found = found + gated(weights, f"{name}.shared_experts.{expert}", x)
    return found


def minimind_logits(weights: Made, ids: list[int], *, eps: float, top_k: int = TOP_K) -> Tensor:
    xs = [weights["model.embed_tokens.weight"][token] for token in ids]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        made: dict[str, list[list[Tensor]]] = {}
        for part, heads in (("q", H), ("k", KV), ("v", KV)):
            of_positions = []
            for t, x in enumerate(xs):
                inner = rms(weights[f"{name}.input_layernorm.weight"], x, eps)
                states = [*apply(weights, f"{name}.self_attn.{part}_proj", inner).view(heads, -1)]
                norm = weights.get(f"{name}.self_attn.{part}_norm.weight")
                states = [state if norm is None else rms(norm, state, eps) for state in states]
                of_positions.append([state if part == "v" else turned_halves(state, t) for state in states])
            made[part] = of_positions
        of_heads = []
        for h in range(H):
            g = h // (H // KV)
            of_heads.append(attend([q[h] for q in made["q"]], [k[g] for k in made["k"]], [v[g] for v in made["v"]]))
        mixed = [torch.cat([head[t] for head in of_heads]) for t in range(len(xs))]
        xs = [x + apply(weights, f"{name}.self_attn.o_proj", m) for x, m in zip(xs, mixed, strict=True)]
        norm = weights[f"{name}.post_attention_layernorm.weight"]
        xs = [x + minimind_block(weights, f"{name}.mlp", rms(norm, x, eps), top_k) for x in xs]
    return torch.stack([weights["lm_head.weight"] @ rms(weights["model.norm.weight"], x, eps) for x in xs])


CASES: list[Any] = [
    pytest.param({}, OLD, "llama", 1e-5, TOP_K, id="2025"),
    pytest.param({"experts": EXPERTS, "shared": 2}, OLD, "granitemoeshared", 1e-5, TOP_K, id="2025 with experts"),
    pytest.param({"normed": True, "head_dim": 8}, {}, "qwen3", 1e-6, 1, id="2026, heads wider than D/H"),
    pytest.param({"normed": True, "experts": EXPERTS}, {}, "qwen3_moe", 1e-6, 1, id="2026 with experts"),
    pytest.param(
        {"normed": True, "experts": EXPERTS}, {"num_experts_per_tok": 2}, "qwen3_moe", 1e-6, 2, id="2026, two of them"
    ),
]


@pytest.mark.parametrize(("shape", "config", "kind", "eps", "top_k"), CASES)
def test_minimind_gives_the_logits_of_a_slow_reference(
    tmp_path: Path, shape: dict[str, Any], config: dict[str, Any], kind: str, eps: float, top_k: int
) -> None:
    weights = minimind(**shape)
    done = import_model(save(tmp_path / "theirs", weights, "full_sft.pth", config), tmp_path / "ours")
    assert (done.layout, done.kind, done.second_head) == ("MiniMind", kind, False)
    model = factory.load(tmp_path / "ours").eval()
    assert model.config.tie_word_embeddings
    with torch.no_grad():
        found = model(IDS).logits
    for row, ids in enumerate(IDS.tolist()):
        expected = minimind_logits(weights, ids, eps=eps, top_k=top_k)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_what_neither_shapes_nor_a_config_tell_is_said(tmp_path: Path) -> None:
    """Two models that differ in their heads alone have the same shapes: MiniMind's default is taken, and named."""
    done = import_model(save(tmp_path / "theirs", minimind(head_dim=8)), tmp_path / "ours")
    assert done.assumed["num_attention_heads"] == 8
    assert json.loads((tmp_path / "ours" / "import.json").read_text())["assumed"] == done.assumed


def test_half_precision_and_wrappers_of_a_checkpoint_are_unpacked(tmp_path: Path) -> None:
    """As its resume files are: {"model": halves under names of DistributedDataParallel, "step": 3}."""
    weights = minimind(normed=True)
    torch.save(
        {"model": {f"module.{name}": tensor.half() for name, tensor in weights.items()}, "step": 3}, tmp_path / "a.pth"
    )
    import_model(tmp_path / "a.pth", tmp_path / "ours")
    model = factory.load(tmp_path / "ours")
    assert model.dtype == torch.float32
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"].half().float())


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    weights = minimind(normed=True)
    weights.add("lm_head.weight", V, D)
    import_model(save(tmp_path / "theirs", weights), tmp_path / "ours")
    model = factory.load(tmp_path / "ours").eval()
    assert not model.config.tie_word_embeddings
    with torch.no_grad():
        found = model(IDS[:1]).logits[0]
    torch.testing.assert_close(found, minimind_logits(weights, IDS[0].tolist(), eps=1e-6), rtol=1e-4, atol=1e-4)


WORDS = ("[PAD]", "<|im_end|>", "[MASK]", "[UNK]", "is", "a", "number", "%", ".", "1", "2", "好", "!", "词")


def test_tinyseeks_words_become_a_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    """Whose expression is written out here; one id is free, as in its own files, where a word stands twice."""
    numbers = {word: number + (number > 8) for number, word in enumerate(WORDS)}
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(numbers))
    assert import_model(path, tmp_path / "ours").tokenizer
    found = AutoTokenizer.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    for text in ("2 is a number! 好词", "12.2% of_a number\n is", "1.", "a1b 21%!"):
        pieces = re.findall(r"[a-zA-Z]+|\d+(?:\.\d+)?%?|[^\w\s]|[\u4e00-\u9fff]", text)
        split = [part for piece in pieces for part in (piece if re.search(r"[\d.%]", piece) else [piece])]
        assert found(text).input_ids == [numbers.get(part, 3) for part in split], text
    assert (found.pad_token_id, found.eos_token_id, found.unk_token_id, len(found)) == (0, 1, 3, 15)
    assert found.decode([4, 9, 13]) == "is[hole9]!"
    (tmp_path / "theirs" / "vocab.json").write_text("[]")
    with pytest.raises(ArtifactError, match="is not a vocabulary"):
        import_model(path, tmp_path / "other")


def test_the_command_converts_and_brings_a_tokenizer_along(tmp_path: Path) -> None:
    from support.tiny_data import make_tokenizer

    from ttrain.cli.main import app

    make_tokenizer(tmp_path / "words")
    path = save(tmp_path / "theirs", minimind(normed=True), "full_sft.pth")
    words = [
        "models",
        "import",
        str(path),
        "--out",
        str(tmp_path / "ours"),
        "--tokenizer",
        str(tmp_path / "words"),
        "--json",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == "qwen3"
    assert AutoConfig.from_pretrained(tmp_path / "ours").num_attention_heads == H
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) > 256
