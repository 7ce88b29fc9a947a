"""GGUF files in llama.cpp itself, where the extra `llama` is installed."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_adapters import disturb, save_adapter
from support.tiny_models import fresh, said_with_ttrain

from ttrain.config import Lora
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.export.export import Request, export
from ttrain.inference.loading import load
from ttrain.lineage.lookup import resolve
from ttrain.model import adapters, factory

llama_cpp: Any = pytest.importorskip(
    "llama_cpp", reason="llama.cpp is not installed: pip install 'ttrain[llama]' builds it"
)
pytestmark = pytest.mark.usefixtures("use_trained_home")
PIECES = (
    *("The man said", " 12345", "3.14", "  ", "\n\n", "\t", "don't", "I'LL", "x_y", "?!", "—"),
    *("你好", "，世界。", "東京", "Ünïcödé", "🙂", "👩\u200d👧", "e\u0301", "<|user|>", "<|end|>"),
    *("\u00a0", "\u3000", "a" * 40, "١٢٣", "½", "привет", "\r\n", " .", "def f(x):", "<|bos|>"),
)


def texts(number: int) -> list[str]:
    generator = random.Random(51)
    return ["".join(generator.choices(PIECES, k=generator.randint(1, 12))) for _ in range(number)]


def opened(path: Path, **options: Any) -> Any:
    return llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, verbose=False, type_k=0, type_v=0, **options
    )


def greedy(model: Any, encoder: Encoder, prompt: str, number: int) -> list[int]:
    ids = [encoder.bos_id, *encoder.encode([prompt])[0]]
    tokens: list[int] = []
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
        if len(tokens) == number or token in (encoder.eos_id, encoder.end_id):
            break
        tokens.append(token)
    return tokens


def test_the_same_ids_for_texts_of_all_kinds(tmp_path: Path) -> None:
    export(resolve("sft"), tmp_path / "out", Request(gguf="f16"))
    model = llama_cpp.Llama(str(tmp_path / "out" / "out-f16.gguf"), vocab_only=True, verbose=False)
    samples = texts(1000)
    ours = Encoder(tmp_path / "out").encode(samples)
    for text, ids in zip(samples, ours, strict=True):
        assert model.tokenize(text.encode(), add_bos=False, special=False) == ids, text
    assert model.tokenize(b"The man", special=False)[0] == model.token_bos()
    marked = model.tokenize(b"<|user|>Hi<|end|>", add_bos=False, special=True)
    assert marked == Encoder(tmp_path / "out").encode_markup("<|user|>Hi<|end|>")


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "llama", "kv_heads": 1},
        {"kind": "llama", "rope_type": "linear", "rope_factor": 2.0},
        {"kind": "qwen3"},
        {"kind": "qwen3", "moe": {"experts": 4, "shared_experts": 0}},
        {"kind": "llama", "moe": {"experts": 4, "shared_experts": 0}},
    ],
    ids=str,
)
def test_the_same_greedy_tokens(tmp_path: Path, fields: dict[str, Any]) -> None:
    source = fresh(tmp_path / "model", **{"hidden_size": 64, **fields})
    export(resolve(str(source)), tmp_path / "out", Request(gguf="f32"))
    model = opened(tmp_path / "out" / "out-f32.gguf")
    encoder = Encoder(source)
    for prompt in ("The man", "What did", "你好", "12 + 3", "x"):
        assert greedy(model, encoder, prompt, 24) == said_with_ttrain(prompt, 24, source)


def test_the_same_greedy_tokens_in_f16(tmp_path: Path) -> None:
    source = fresh(tmp_path / "model", hidden_size=64, kind="qwen3", max_length=256)
    export(resolve(str(source)), tmp_path / "out", Request(dtype="fp16", gguf="f16"))
    model = opened(tmp_path / "out" / "out-f16.gguf")
    encoder = Encoder(source)
    for prompt in texts(20):
        answer = said_with_ttrain(prompt, 24, tmp_path / "out")  # of weights in fp16
        assert greedy(model, encoder, prompt, 24) == answer, prompt


def test_a_chat_is_asked_by_the_template_and_ends_by_itself(tmp_path: Path) -> None:
    source = fresh(tmp_path / "model", hidden_size=64, kind="qwen3", max_length=256)
    export(resolve(str(source)), tmp_path / "out", Request(gguf="f32"))
    model = opened(tmp_path / "out" / "out-f32.gguf")
    subject = load(resolve(str(source)), device="cpu")
    ends = set()
    # Of a marker in a question llama.cpp makes a special token; ttrain keeps it as text.
    for question in (piece for piece in PIECES if "<|" not in piece):
        turns = [{"role": "user", "content": question}]
        [theirs] = model.create_chat_completion(
            turns, temperature=0.0, max_tokens=24, repeat_penalty=1.0
        )["choices"]
        [ours] = subject.generate([prompt_ids(subject.encoder, (Message(**turns[0]),))], 24)
        text = subject.encoder.decode(ours.ids).replace("\ufffd", "")  # which it leaves out
        answer = theirs["message"]["content"]
        # An answer that reaches the limit goes on to the end of a character of several tokens.
        assert answer == text if ours.ended else answer.startswith(text), question
        assert (theirs["finish_reason"] == "stop") == ours.ended
        ends.add(ours.ended)
    assert ends == {True, False}


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    source = fresh(tmp_path / "model", hidden_size=64, kind="llama")
    model = disturb(adapters.attach(factory.load(source), Lora(rank=2)), seed=5, by=0.2)
    adapter = tmp_path / "adapter"
    save_adapter(model, adapter, source)
    for file in source.glob("*token*"):
        shutil.copy(file, adapter)
    shutil.copy(source / "chat_template.jinja", adapter)
    export(resolve(str(source)), tmp_path / "base", Request(gguf="f32"))
    export(resolve(str(adapter), base=str(source)), tmp_path / "lora", Request(gguf="f32"))
    model = opened(
        tmp_path / "base" / "base-f32.gguf", lora_path=str(tmp_path / "lora" / "lora-f32.gguf")
    )
    encoder = Encoder(source)
    for prompt in ("The man", "What did", "x"):
        answer = said_with_ttrain(prompt, 24, source, adapter)
        assert greedy(model, encoder, prompt, 24) == answer
        assert answer != said_with_ttrain(prompt, 24, source)
