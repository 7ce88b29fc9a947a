"""Models from TinySeek's and MiniMind's own files: equal logits with a slow reference, and refusals that name what is wrong.

The references compute position by position and expert by expert, from what is public of the two shapes, without any of the
modules under test. Letters in names: V vocabulary, D width, H heads, K width of a head.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from ttrain.errors import ArtifactError, UsageError
from ttrain.model import factory
from ttrain.model.convert import import_model

V, D, H = 23, 16, 4
IDS = torch.randint(1, V, (2, 9), generator=torch.Generator().manual_seed(5))


class Made(dict[str, Tensor]):
    """A state dict of random tensors, large enough for every part to matter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, around: float = 0.0) -> None:
        self[name] = around + 0.4 * torch.randn(*shape, generator=self._generator)

    def linear(self, name: str, out: int, into: int) -> None:
        self.add(f"{name}.weight", out, into)
        self.add(f"{name}.bias", out)


def apply(weights: Made, name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", torch.zeros(()))


def attend(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """One head: each position over itself and what is before it."""
    found = []
    for t, query in enumerate(queries):
        scores = torch.stack([query @ keys[s] / math.sqrt(len(query)) for s in range(t + 1)])
        found.append(
            sum((weight * value for weight, value in zip(scores.softmax(0), values, strict=False)), torch.zeros(()))
        )
    return found


# --- TinySeek -----------------------------------------------------------------------------------------------------------

C, R, F, E, S, KEEP = 6, 4, 5, 6, 2, 3
TINYSEEK = {
    "vocab_size": V, "device": "cuda", "n_layer": 2, "n_head": H, "d_model": D, "d_c": C, "d_r": R, "hidden": F,
    "other_experts": E, "shared_experts": S, "keep": KEEP, "ro_theta": 500.0, "dropout": 0.1, "scale": 0.02, "alpha": 0.02,
    "pad_idx": 0,
}  # fmt: skip


def tinyseek(shared_layer: bool = False, inner: int = F) -> Made:
    made = Made(1)
    made.add("tokenEmbedding.tokenEmbedding.weight", V, D)
    for layer in ("synonymous_layer",) if shared_layer else ("layers.0", "layers.1"):
        for name, out, into in (
            ("w_dq", C, D), ("w_dkv", C, D), ("w_qr", R, C), ("w_kr", R, D), ("w_uq", D, C), ("w_uk", D, C), ("w_uv", D, C),
            ("w_o", D, D),
        ):  # fmt: skip
            made.linear(f"{layer}.mla.{name}", out, into)
        for norm in ("norm1", "norm2"):
            made.add(f"{layer}.{norm}.gamma", D, around=1.0)
            made.add(f"{layer}.{norm}.beta", D)
        made.add(f"{layer}.moe_ffn.w_g", D, E)
        made.add(f"{layer}.moe_ffn.w_n", D, E)
        for expert in [f"experts.{n}" for n in range(E)] + [f"shared_experts.{n}" for n in range(S)]:
            made.linear(f"{layer}.moe_ffn.{expert}.fc1", inner, D)
            made.linear(f"{layer}.moe_ffn.{expert}.fc2", D, inner)
    for head in ("fc",) if shared_layer else ("fc1", "fc2"):
        made.linear(head, V, D)
    return made


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
    chosen = scores.argsort(descending=True)[:KEEP].tolist()
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


def save(directory: Path, weights: dict[str, Tensor], name: str = "weights.pkl", config: Any = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(dict(weights), directory / name)
    else:
        torch.save(dict(weights), directory / name)
    if config is not None:
        (directory / "model_config.json").write_text(json.dumps(config))
    return directory / name


@pytest.mark.parametrize(("name", "inner"), [("weights.pkl", F), ("weights.safetensors", 8)])
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

LAYERS, KV, INNER, EXPERTS, TOP_K = 2, 2, 24, 4, 2


def minimind(*, normed: bool = False, experts: int = 0, shared: int = 0, head_dim: int = 4) -> Made:
    made = Made(2)
    made.add("model.embed_tokens.weight", V, D)
    made["lm_head.weight"] = made["model.embed_tokens.weight"]
    made.add("model.norm.weight", D, around=1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, out, into in (
            ("q_proj", H * head_dim, D), ("k_proj", KV * head_dim, D), ("v_proj", KV * head_dim, D),
            ("o_proj", D, H * head_dim),
        ):  # fmt: skip
            made.add(f"{name}.self_attn.{part}.weight", out, into)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made.add(f"{name}.{norm}.weight", D, around=1.0)
        for norm in ("q_norm", "k_norm") if normed else ():
            made.add(f"{name}.self_attn.{norm}.weight", head_dim, around=1.0)
        blocks = [f".experts.{n}" for n in range(experts)] + [f".shared_experts.{n}" for n in range(shared)]
        for block in blocks or [""]:
            made.add(f"{name}.mlp{block}.gate_proj.weight", INNER, D)
            made.add(f"{name}.mlp{block}.up_proj.weight", INNER, D)
            made.add(f"{name}.mlp{block}.down_proj.weight", D, INNER)
        if experts:
            made.add(f"{name}.mlp.gate.weight", experts, D)
    return made


def rms(weight: Tensor, x: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def turned_halves(x: Tensor, position: int) -> Tensor:
    """Dimensions i and i + K/2 turn together, by MiniMind's base of a million."""
    half, found = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * 1e6 ** (-2 * i / len(x))
        a, b = float(x[i]), float(x[i + half])
        found[i] = a * math.cos(angle) - b * math.sin(angle)
        found[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


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


OLD = {"num_attention_heads": H}
CASES: list[Any] = [
    pytest.param({}, OLD, "llama", 1e-5, TOP_K, id="2025"),
    pytest.param({"experts": EXPERTS, "shared": 1}, OLD, "granitemoeshared", 1e-5, TOP_K, id="2025 with experts"),
    pytest.param(
        {"experts": EXPERTS, "shared": 2}, {**OLD, "num_experts_per_tok": 3}, "granitemoeshared", 1e-5, 3, id="more"
    ),
    pytest.param({"normed": True}, {}, "qwen3", 1e-6, 1, id="2026"),
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


# --- what is refused ----------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Made], None]:
    return lambda weights: weights.__delitem__(name)


def extra(name: str) -> Callable[[Made], None]:
    return lambda weights: weights.add(name, 3)


def resized(name: str) -> Callable[[Made], None]:
    return lambda weights: weights.add(name, 2, 2)


@pytest.mark.parametrize(
    ("weights", "change", "name"),
    [
        (tinyseek, without("layers.1.mla.w_uk.bias"), "missing: layers.1.mla.w_uk.bias [16]"),
        (tinyseek, extra("layers.1.mla.w_new"), "unexpected: layers.1.mla.w_new [3]"),
        (tinyseek, resized("layers.1.moe_ffn.experts.5.fc2.weight"), "fc2.weight is [2, 2] but must be [16, 5]"),
        (tinyseek, without("fc2.weight"), "missing: fc2.weight [23, 16]"),
        (minimind, without("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight [24, 16]"),
        (minimind, extra("model.layers.1.mlp.bias"), "unexpected: model.layers.1.mlp.bias [3]"),
        (minimind, resized("model.layers.1.self_attn.v_proj.weight"), "v_proj.weight is [2, 2] but must be [8, 16]"),
    ],
)  # fmt: skip
def test_every_tensor_that_does_not_fit_is_named_and_nothing_is_left(
    tmp_path: Path, weights: Callable[[], Made], change: Callable[[Made], None], name: str
) -> None:
    made = weights()
    change(made)
    path = save(tmp_path / "theirs", made, config=TINYSEEK if weights is tinyseek else OLD)
    with pytest.raises(ArtifactError) as error:
        import_model(path, tmp_path / "ours")
    assert name in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]


class Malicious:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"fc1.weight": Malicious()}, protocol=2))
    torch.save({"fc1.weight": Malicious()}, tmp_path / "b.pth")
    for name in ("a.pkl", "b.pth"):
        with pytest.raises(ArtifactError, match="could run its code") as refused:
            import_model(tmp_path / name, tmp_path / "ours")
        assert "weights_only" not in str(refused.value)  # torch's advice to open it all the same
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        ({"a.weight": torch.zeros(2)}, None, "has no known layout"),
        ({"step": 3}, None, "is not a state dict"),
        ({"tok_embeddings.weight": torch.zeros(2, 2)}, None, "layout of 2024"),
        ({name: tensor.to(torch.int8) for name, tensor in minimind().items()}, OLD, "q_proj.weight holds int8"),
        ({name: tensor / 0 for name, tensor in minimind().items()}, OLD, "q_proj.weight holds numbers that are not finite"),
        ({f"model.0.{name}": tensor for name, tensor in tinyseek().items()}, TINYSEEK, "several TinySeek models"),
        ({**tinyseek(), "layers.0.mla.w_o.lora_a": torch.zeros(2)}, TINYSEEK, "holds an adapter"),
        (tinyseek(), None, "n_head of .* is unknown"),
        (tinyseek(), {**TINYSEEK, "d_c": 128}, "d_c is 128, but the weights have 6"),
        (tinyseek(), {**TINYSEEK, "n_layer": 6}, "n_layer is 6, but the weights have 2"),
        (minimind(), {"num_hidden_layers": 16}, "num_hidden_layers is 16, but the weights have 2"),
        (tinyseek(), {**TINYSEEK, "keep": 7}, "num_experts_per_tok is 7 but must be from 1 to 6"),
        (tinyseek(), {**TINYSEEK, "n_head": 3}, "must be a multiple of num_attention_heads 3"),
        (tinyseek(), {**TINYSEEK, "dropout": "much"}, "does not make a model: .*dropout"),
        (minimind(), {"num_attention_heads": 3}, "16 rows of queries and 8 of keys, which 3 heads do not divide"),
        (minimind(), {"inference_rope_scaling": True}, "inference_rope_scaling"),
        (minimind(experts=4), {**OLD, "num_experts_per_tok": 1}, "do not sum to 1"),
        (minimind(experts=4), {**OLD, "norm_topk_prob": False}, "do not sum to 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_converted_says_why(tmp_path: Path, weights: Any, config: Any, message: str) -> None:
    path = save(tmp_path / "theirs", weights, config=config)
    with pytest.raises(ArtifactError, match=message):
        import_model(path, tmp_path / "ours")


def test_a_torn_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ArtifactError, match="cannot read"):
        import_model(path, tmp_path / "ours")
    for source, message in ((tmp_path / "none.pth", "does not exist"), (tmp_path, "holds 0 files with weights")):
        with pytest.raises(UsageError, match=message):
            import_model(source, tmp_path / "ours")


def test_an_empty_working_directory_may_be_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    import_model(path, Path())
    assert (tmp_path / "here" / "config.json").is_file()


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "theirs", tinyseek(), config=TINYSEEK)
    with pytest.raises(UsageError, match="is not empty"):
        import_model(path, tmp_path / "theirs")


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
    words = ["models", "import", str(path), "--to", str(tmp_path / "ours"), "--tokenizer", str(tmp_path / "words"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == "qwen3"
    assert AutoConfig.from_pretrained(tmp_path / "ours").num_attention_heads == H
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) > 256
