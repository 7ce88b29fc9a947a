"""Answers: the same in a batch as alone, and sampled with the model's probabilities."""

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
from ttrain.inference.generate import KVCache, TextStream, generate, logits_processors
from ttrain.inference.loading import LoadedModel, load
from ttrain.inference.sampling import Sampling, sampling
from ttrain.model import adapters, factory
from ttrain.store.model_files import Reference

Models = Callable[[str], LoadedModel]

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"kind": "gpt2", "tie_embeddings": True},  # its positions must not shift by padding
    "tinyseek": {"kind": "tinyseek"},
    "window": {"kind": "mistral", "fields": {"sliding_window": 8}},
    "experts": {"kind": "qwen3", "moe": Moe(experts=4, top_k=2)},
}
PROMPTS = [[2, 40, 41], [2, 17, 200, 33, 90, 12, 61], [2, *range(99, 87, -1)]]
LONG = Sampling(max_tokens=9)


@pytest.fixture(scope="module")
def model_of_shape(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def make(shape: str) -> LoadedModel:
        directory = write_model(tmp_path_factory.mktemp(shape), **SHAPES[shape])
        return ending_with(speaker(directory))

    return make


def answers(model: LoadedModel, prompts: list[list[int]], *args: Any, **more: Any) -> Any:
    return [completion.ids for completion in generate(model, prompts, *args, **more)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_those_of_complete_passes(shape: str, model_of_shape: Models) -> None:
    model = model_of_shape(shape)
    prompts = [*PROMPTS, [2]]
    expected = [greedy(model.model, prompt, 9) for prompt in prompts]
    assert answers(model, prompts[1:2], LONG) == expected[1:2]
    assert answers(model, prompts, LONG) == expected


def test_an_answer_ends_with_any_of_the_stop_tokens_and_leaves_it_out(model: LoadedModel) -> None:
    ids = greedy(model.model, PROMPTS[0], 9)
    end = next(at for at, token in enumerate(ids) if at > 3 and token not in ids[:at])
    streamed: list[int] = []

    def note(answers: dict[int, list[int]]) -> None:
        streamed[:] = answers.get(0, streamed)

    ending = ending_with(model, ids[end], NEVER)
    (stopped,) = generate(ending, [PROMPTS[0]], LONG, on_tokens=note)
    assert stopped.ended and stopped.ids == streamed == ids[:end]
    (cut,) = generate(ending, [PROMPTS[0]], Sampling(max_tokens=end))
    assert (cut.ended, cut.ids) == (False, ids[:end])


def test_a_sample_depends_on_seed_and_number_alone(model: LoadedModel) -> None:
    warm = Sampling(max_tokens=8, temperature=1.0)
    together = answers(model, PROMPTS, warm, numbers=[7, 8, 9])
    for number, prompt in enumerate(PROMPTS):
        assert answers(model, [prompt], warm, numbers=[7 + number]) == [together[number]]
    for settings, number in ((warm, 8), (warm.replaced({"seed": 2}), 7)):
        assert answers(model, PROMPTS[:1], settings, numbers=[number]) != together[:1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),  # squares that sum to 1
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5263, 0.3158, 0.1579, 0]),
    ],
)
def test_sampled_frequencies(settings: dict[str, Any], expected: list[float]) -> None:
    draws = 4000
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(draws, 1)
    processors = logits_processors(sampling(**{"temperature": 1.0, **settings}), range(draws), 1)
    chosen = processors(torch.zeros(draws, 1, dtype=torch.long), scores).argmax(-1)
    frequencies = (torch.bincount(chosen, minlength=4) / draws).tolist()
    assert frequencies == pytest.approx(expected, abs=0.03)  # four standard deviations
    assert [value == 0 for value in frequencies] == [value == 0 for value in expected]


def test_the_repetition_penalty_counts_the_answer_and_not_the_prompt() -> None:
    processors = logits_processors(Sampling(repetition_penalty=2.0), [0], 2)
    scores = processors(torch.tensor([[0, 1, 3]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    assert scores.tolist() == [[1.0, 1.0, 1.0, 0.5]]


def test_a_character_is_shown_when_all_its_bytes_are_there(model: LoadedModel) -> None:
    text = "a 東 🙂 é\ufffd!"
    ids = model.encoder.encode([text])[0]
    assert len(ids) > len(text)
    stream = TextStream(model.encoder)
    pieces = [stream.add(ids[:end]) for end in range(1, len(ids) + 1)]
    assert all("\ufffd" not in piece for piece in pieces[:-4])
    assert "".join([*pieces, stream.end()]) == text
    cut = TextStream(model.encoder)
    assert cut.add(model.encoder.encode(["東"])[0][:-1]) + cut.end() == "\ufffd"
    for lead, shown in (("the ", "fox"), ("the dog ", "the fox")):  # of a template
        led = TextStream(model.encoder, lead)
        assert led.add(model.encoder.encode(["the fox"])[0]) + led.end() == shown


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "experts"])
def test_later_turns_are_answered_as_from_scratch(shape: str, model_of_shape: Models) -> None:
    model = model_of_shape(shape)
    short = Sampling(max_tokens=5)
    kv_cache = KVCache(model)
    continued = [*PROMPTS[1], *answers(model, [PROMPTS[1]], short, kv_cache=kv_cache)[0], 60, 70]
    # Then the oldest exchanges were left out, and nothing is in common.
    for history in (continued, [*PROMPTS[1], 50, 51], [77]):
        expected = answers(model, [history], short)
        assert answers(model, [history], short, kv_cache=kv_cache) == expected


@pytest.mark.parametrize(("kind", "virtual_tokens"), [("lora", 0), ("prefix", 3)])
def test_adapters(kind: Any, virtual_tokens: int, directory: Path, tmp_path: Path) -> None:
    config = Lora(kind=kind, rank=2, targets=("q_proj", "v_proj"), virtual_tokens=3, row_length=32)
    adapted = disturb(adapters.attach(factory.load(directory), config), seed=3, by=1.0)
    adapter = save_adapter(adapted, tmp_path / "adapter", directory)
    model = ending_with(load(Reference("mine", directory, adapter), device="cpu"))
    expected = [greedy(adapted.eval(), prompt, 8) for prompt in PROMPTS[:2]]
    assert answers(model, PROMPTS[:2], Sampling(max_tokens=8)) == expected
    assert expected[0] != greedy(factory.load(directory), PROMPTS[0], 8)
    assert model.max_length == 128 - virtual_tokens


def test_a_tokenizer_from_elsewhere_is_completed_in_another_place(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert not speaker(tmp_path).can_chat
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        load(reference(tmp_path))


def test_a_model_of_nan_is_refused_where_it_is_loaded_and_where_it_answers(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    model = speaker(directory)
    with torch.no_grad():
        model.model.get_output_embeddings().weight[7, 3] = torch.nan
    with pytest.raises(ArtifactError, match="--dtype fp32"):
        generate(model, PROMPTS, LONG)
    save_file(factory.state(model.model), directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lm_head"):
        speaker(directory)
