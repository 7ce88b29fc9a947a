"""Answers: the same in a batch as alone, and a sample of the model's shares."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_adapters import disturb, save_adapter
from support.tiny_models import NEVER, ending_with, greedy, reference, speaker, write_model

from ttrain.config import Lora, Moe
from ttrain.errors import ArtifactError
from ttrain.inference.generate import (
    Completion,
    KVCache,
    TextStream,
    completion_text,
    generate,
    logits_processors,
)
from ttrain.inference.loading import LoadedModel, load
from ttrain.inference.sampling import Sampling, sampling
from ttrain.model import adapters, factory
from ttrain.store.model_files import Reference

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "kind": "gpt2",
        "tie_embeddings": True,
    },  # learnt positions, which padding must not shift
    "tinyseek": {"kind": "tinyseek"},
    "window": {"kind": "mistral", "fields": {"sliding_window": 8}},
}
PROMPTS = [
    [2, 40, 41],
    [2, 17, 200, 33, 90, 12, 61],
    [2, 99, 98, 97, 96, 95, 94, 93, 92, 91, 90, 89, 88],
]
LONG = Sampling(max_tokens=9)


@pytest.fixture(scope="module")
def model_of_shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @cache
    def make(shape: str) -> LoadedModel:
        return speaker(write_model(tmp_path_factory.mktemp(shape), **SHAPES[shape]))

    return make


@pytest.mark.parametrize("shape", [*SHAPES, "experts"])
def test_greedy_answers_are_those_of_whole_passes_alone_and_in_a_padded_batch(
    shape: str, model_of_shape: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    experts = {"kind": "qwen3", "moe": Moe(experts=4, top_k=2)}
    one = model_of_shape(shape) if shape in SHAPES else speaker(write_model(tmp_path, **experts))
    prompts = [*PROMPTS, [2]]
    expected = [greedy(one.model, prompt, 9) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) == len(prompts)
    one = ending_with(one)
    assert [generate(one, [prompt], LONG)[0].ids for prompt in prompts[1:2]] == expected[1:2]
    assert [said.ids for said in generate(one, prompts, LONG)] == expected


def test_an_answer_ends_with_any_of_the_stop_tokens_and_leaves_it_out(directory: Path) -> None:
    one = speaker(directory)
    free = greedy(one.model, PROMPTS[0], 9)
    stop = next(token for at, token in enumerate(free) if at > 3 and token not in free[:at])
    heard: list[int] = []

    def note(answers: dict[int, list[int]]) -> None:
        heard[:] = answers.get(0, heard)

    (said,) = generate(ending_with(one, stop, NEVER), [PROMPTS[0]], LONG, on_tokens=note)
    assert said.ended
    assert said.ids == heard == free[: free.index(stop)]
    (cut,) = generate(ending_with(one, stop), [PROMPTS[0]], Sampling(max_tokens=free.index(stop)))
    assert not cut.ended
    assert cut.ids == said.ids


def test_a_sampled_answer_depends_on_seed_and_number_and_not_on_the_batch(directory: Path) -> None:
    one = speaker(directory)
    warm = Sampling(max_tokens=8, temperature=1.0)
    together = [said.ids for said in generate(one, PROMPTS, warm, numbers=[7, 8, 9])]
    alone = [
        generate(one, [prompt], warm, numbers=[7 + at])[0].ids for at, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert generate(one, [PROMPTS[0]], warm, numbers=[8])[0].ids != alone[0]
    assert generate(one, [PROMPTS[0]], warm.replaced({"seed": 2}), numbers=[7])[0].ids != alone[0]


def test_samples_have_the_shares_of_the_settings() -> None:
    draws = 4000
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(draws, 1)
    for settings, shares in (
        ({"temperature": 1.0}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),  # squares, made to sum to 1
        ({"temperature": 1.0, "top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.9}, [0.5263, 0.3158, 0.1579, 0]),
    ):
        processors = logits_processors(sampling(**settings), range(draws), 1)
        chosen = processors(torch.zeros(draws, 1, dtype=torch.long), scores).argmax(-1)
        found = (torch.bincount(chosen, minlength=4) / draws).tolist()
        assert found == pytest.approx(shares, abs=0.03), settings  # four standard deviations
        assert [share for share, wanted in zip(found, shares, strict=True) if wanted == 0] == [
            0
        ] * shares.count(0)


def test_the_repetition_penalty_counts_the_answer_and_not_the_prompt() -> None:
    processors = logits_processors(Sampling(repetition_penalty=2.0), [0], 2)
    scores = processors(torch.tensor([[0, 1, 3]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    assert scores.tolist() == [[1.0, 1.0, 1.0, 0.5]]


def test_a_character_is_shown_when_all_its_bytes_are_there(directory: Path) -> None:
    encoder = speaker(directory).encoder
    text = "a 東 🙂 é\ufffd!"
    ids = encoder.encode([text])[0]
    shown = TextStream(encoder)
    pieces = [shown.add(ids[:end]) for end in range(1, len(ids) + 1)]
    assert len(ids) > len(text)
    assert all("\ufffd" not in piece for piece in pieces[:-4])
    assert "".join([*pieces, shown.end()]) == text
    cut = TextStream(encoder)
    assert cut.add(encoder.encode(["東"])[0][:-1]) == ""
    assert cut.end() == "\ufffd"


def test_a_lead_of_the_template_is_not_shown(directory: Path) -> None:
    encoder = speaker(directory).encoder
    ids = encoder.encode(["the fox jumps"])[0]
    for lead, shown in (
        ("the ", "fox jumps"),
        ("", "the fox jumps"),
        ("the dog ", "the fox jumps"),
    ):
        stream = TextStream(encoder, lead)
        pieces = [stream.add(ids[:end]) for end in range(1, len(ids) + 1)]
        assert "".join(pieces) + stream.end() == stream.shown == shown
        assert completion_text(encoder, Completion(ids, ended=True, seconds=0.0), lead) == shown


@pytest.mark.parametrize("shape", SHAPES)
def test_later_turns_are_answered_as_from_scratch(
    shape: str, model_of_shape: Callable[[str], LoadedModel]
) -> None:
    one = ending_with(model_of_shape(shape))
    short = Sampling(max_tokens=5)
    kept, history = KVCache(one), list(PROMPTS[1])
    for turn in range(5):
        if turn == 3:
            history = [*PROMPTS[1], 50, 51]  # the oldest exchanges were left out
        if turn == 4:
            history = [77]  # nothing is in common
        (fresh,) = generate(one, [history], short)
        (said,) = generate(one, [history], short, kv_cache=kept)
        assert said.ids == fresh.ids
        history += [*said.ids, 60 + turn, 70 + turn]


def test_a_turn_computes_what_is_new_in_it(directory: Path) -> None:
    one = ending_with(speaker(directory))
    kept, short = KVCache(one), Sampling(max_tokens=4)
    (first,) = generate(one, [PROMPTS[1]], short, kv_cache=kept)
    seen: list[int] = []
    embedding: Any = one.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape[1]))
    generate(one, [[*PROMPTS[1], *first.ids, 60, 61, 62]], short, kv_cache=kept)
    assert (
        seen[0] == 4
    )  # three new tokens, and the last one of the answer, which went through no pass
    seen.clear()
    generate(one, [PROMPTS[1][:5]], short, kv_cache=kept)
    assert seen[0] == 1


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_an_adapter_answers_as_peft_does(kind: str, directory: Path, tmp_path: Path) -> None:
    config = Lora(kind=kind, rank=2, targets=("q_proj", "v_proj"), virtual_tokens=3, row_length=32)
    adapted = disturb(adapters.attach(factory.load(directory), config), seed=3, by=1.0)
    place = save_adapter(adapted, tmp_path / "adapter", directory)
    one = ending_with(load(Reference("mine", directory, place), device="cpu"))
    expected = [greedy(adapted.eval(), prompt, 8) for prompt in PROMPTS[:2]]
    assert [said.ids for said in generate(one, PROMPTS[:2], Sampling(max_tokens=8))] == expected
    assert expected[0] != greedy(factory.load(directory), PROMPTS[0], 8)
    assert one.max_length == 128 - (3 if kind == "prefix" else 0)


def test_a_tokenizer_from_elsewhere_is_completed_aside(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    one = speaker(tmp_path)
    assert not one.can_chat
    assert one.encoder.decode(one.encoder.encode(["a text"])[0]) == "a text"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        load(reference(tmp_path))


def test_a_model_of_nan_is_refused_where_it_is_loaded_and_where_it_answers(tmp_path: Path) -> None:
    place = write_model(tmp_path / "model")
    one = speaker(place)
    with torch.no_grad():
        one.model.get_output_embeddings().weight[7, 3] = torch.nan
    for settings in (LONG, sampling(temperature=1.0, max_tokens=2)):
        with pytest.raises(
            ArtifactError, match="computes scores that are not finite; use --dtype fp32"
        ):
            generate(one, PROMPTS, settings)
    save_file(factory.state(one.model), place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ArtifactError,
        match=r"1 of the \d+ weights in .*model hold numbers that are not finite \(lm_head",
    ):
        speaker(place)
