"""Samples: prompts of the user's own held-out rows, in any language, and what a model answers."""

import math

import pytest
from support.tiny_models import tiny_model

from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.evaluate import samples
from ttrain.evaluate.samples import SamplePrompt
from ttrain.inference.loading import with_encoder

CHINESE = "山海经\n南山经之首曰鹊山其首曰招摇之山临于西海之上多桂多金玉有草焉其状如韭" * 5
ENGLISH = "The quick brown fox jumps over the lazy dog, and then it returns to where it began. " * 4


def turns(question: str, answer: str = "An answer.", *before: Message) -> Messages:
    asked = Message("user", question)
    return (*before, asked, Message("assistant", answer), Message("user", "And?"))


def documents_of(encoder: Encoder, *texts: str) -> list[SamplePrompt]:
    return samples.of_documents(texts, encoder, new_tokens=48, room=200)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_a_document_is_cut_into_its_beginning_and_what_follows(encoder: Encoder, text: str) -> None:
    (prompt,) = documents_of(encoder, text)
    assert prompt.text and prompt.reference
    assert text.startswith(prompt.text + prompt.reference)
    assert len(prompt.text.encode()) <= samples.BEGINNING_BYTES
    assert len(encoder.encode([prompt.reference])[0]) <= 48 + 1
    if text is ENGLISH:
        assert text[len(prompt.text)] == " ", "no word is cut"


def test_two_documents_are_chosen_by_their_content_and_with_different_beginnings(
    encoder: Encoder,
) -> None:
    texts = [f"{name}: {ENGLISH}" for name in "abcdef"]
    chosen = documents_of(encoder, *texts)
    assert len(chosen) == 2 and chosen == documents_of(encoder, *texts[::-1])
    assert len(documents_of(encoder, ENGLISH, ENGLISH + "more", CHINESE)) == 2
    assert documents_of(encoder, "", "x", " \n ", "\n" * 9) == []


def test_a_question_has_the_turns_before_it_and_its_own_answer(encoder: Encoder) -> None:
    with_system = turns("What is it?", "It is this.", Message("system", "Be kind."))
    unanswered = (Message("user", "Nobody answers?"),)
    chats = [with_system, turns("你好吗？", "很好。"), unanswered, turns("too long " * 300)]
    chosen = samples.of_chats(chats, encoder, new_tokens=48, room=200)
    samples_of = {(prompt.turns[0].role, prompt.text, prompt.reference) for prompt in chosen}
    assert samples_of == {("system", "What is it?", "It is this."), ("user", "你好吗？", "很好。")}


def test_a_sample_has_the_answer_of_the_model_beside_that_of_the_data(encoder: Encoder) -> None:
    prompts = [SamplePrompt("The fox"), samples.question("Why?"), *documents_of(encoder, ENGLISH)]
    model = tiny_model(vocab=len(encoder))
    loaded = with_encoder("model", model, encoder, (encoder.bos_id,), can_chat=True)
    written = samples.continuations(loaded, prompts, new_tokens=3)
    answers = [sample.pop("answer") for sample in written]
    assert any(answers)
    of_document = {"prompt": prompts[2].text, "reference": prompts[2].reference}
    assert written == [{"prompt": "The fox"}, {"prompt": "Why?"}, of_document]
    model.get_input_embeddings().weight.data.fill_(math.nan)
    written = samples.continuations(loaded, prompts[:1], new_tokens=3)
    assert written == [{"prompt": "The fox", "answer": ""}], "a model that has diverged"
