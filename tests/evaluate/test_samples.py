"""Samples: their prompts are of the user's own held-out rows, whatever language, unless the settings name others."""

import pytest
from support.tiny_models import tiny_model

from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.evaluate import samples
from ttrain.evaluate.samples import SamplePrompt
from ttrain.inference.loading import with_encoder

CHINESE = (
    "山海经\n南山经之首曰鹊山其首曰招摇之山临于西海之上多桂多金玉有草焉其状如韭而青花其名曰祝余食之不饥"
    * 4
)
ENGLISH = (
    "The quick brown fox jumps over the lazy dog, and then it returns to the place where it began. "
    * 4
)


def talk(question: str, answer: str = "An answer.", *before: Message) -> Messages:
    return (
        *before,
        Message("user", question),
        Message("assistant", answer),
        Message("user", "And?"),
    )


def documents_of(
    encoder: Encoder, texts: list[str], room: int = 200, new_tokens: int = 48
) -> list[SamplePrompt]:
    return samples.of_documents(texts, encoder, new_tokens=new_tokens, room=room)


def chats_of(encoder: Encoder, chats: list[Messages], room: int = 200) -> list[SamplePrompt]:
    return samples.of_chats(chats, encoder, new_tokens=48, room=room)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, "one two"])
def test_a_document_is_cut_into_its_beginning_and_what_follows(encoder: Encoder, text: str) -> None:
    (prompt,) = documents_of(encoder, [text])
    assert prompt.text and prompt.reference and text.startswith(prompt.text + prompt.reference)
    assert len(prompt.text.encode()) <= samples.BEGINNING_BYTES and not prompt.turns
    assert len(encoder.encode([prompt.reference])[0]) <= 48 + 1
    if text is ENGLISH:
        assert text[len(prompt.text)] == " ", "a word stays whole"


def test_two_documents_are_chosen_by_their_content_and_never_the_same_beginning_twice(
    encoder: Encoder,
) -> None:
    texts = [f"{name}: {ENGLISH}" for name in "abcdef"]
    chosen = documents_of(encoder, texts)
    assert len(chosen) == 2 and chosen == documents_of(encoder, texts[::-1])
    assert len(documents_of(encoder, [ENGLISH, ENGLISH + "more", CHINESE])) == 2
    assert documents_of(encoder, ["", "x", " \n ", "\n" * 9]) == [], "nothing to continue"


def test_a_question_has_the_turns_before_it_and_its_own_answer(encoder: Encoder) -> None:
    system = Message("system", "Be kind.")
    chosen = chats_of(
        encoder, [talk("What is it?", "It is this.", system), talk("你好吗？", "很好。")]
    )
    assert {prompt.text: prompt.reference for prompt in chosen} == {
        "What is it?": "It is this.",
        "你好吗？": "很好。",
    }
    assert {prompt.turns[0].role for prompt in chosen} == {"system", "user"}
    assert chats_of(encoder, [(Message("user", "Nobody answers?"),), talk("too long " * 300)]) == []
    assert len(chats_of(encoder, [talk("Same?"), talk("Same?", "Another."), talk("Other?")])) == 2


def test_a_sample_has_the_answer_of_the_model_beside_that_of_the_data(encoder: Encoder) -> None:
    speaker = with_encoder(
        "model", tiny_model(vocab=len(encoder)), encoder, (encoder.bos_id,), can_chat=True
    )
    prompts = [SamplePrompt("The fox"), samples.question("Why?"), *documents_of(encoder, [ENGLISH])]
    written = samples.continuations(speaker, prompts, new_tokens=3)
    assert [sample["prompt"] for sample in written] == [prompt.text for prompt in prompts]
    assert [sorted(sample) for sample in written] == [
        ["answer", "prompt"],
        ["answer", "prompt"],
        ["answer", "prompt", "reference"],
    ]


def test_a_model_that_has_diverged_writes_nothing_and_stops_nothing(encoder: Encoder) -> None:
    model = tiny_model(vocab=len(encoder))
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    speaker = with_encoder("model", model, encoder, (encoder.bos_id,), can_chat=True)
    (written,) = samples.continuations(speaker, [SamplePrompt("The fox")], new_tokens=3)
    assert written == {"prompt": "The fox", "answer": ""}
