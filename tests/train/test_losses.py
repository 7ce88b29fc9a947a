"""The loss from hidden states in chunks: equal to the plain one, small in memory, and plain where a head does more."""

import logging
from typing import Any

import pytest
import torch
from support.comparing import bytes_kept, copies, distance, same, with_gradients
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_mixtures import tiny_moe
from support.tiny_trainers import ALONE, CPU, settings_of_training, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ttrain.config import Lora
from ttrain.data.packing import IGNORE
from ttrain.model import adapters
from ttrain.train import attention, language_modeling, losses
from ttrain.train.attention import segment_mask
from ttrain.train.language_modeling import PLAIN_HEADS, LanguageModeling
from ttrain.train.losses import linear_token_loss_sum, token_loss_sum
from ttrain.train.precision import resolve_precision
from ttrain.train.step_figures import measure

N, D, V = 24, 8, 50


def inputs(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, N/2, D], a head [V, D], labels of which about a third are IGNORE."""
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(2, N // 2, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (2, N // 2), generator=generator)
    labels = labels.masked_fill(torch.rand(2, N // 2, generator=generator) < 1 / 3, IGNORE)
    assert 0 < int((labels == IGNORE).sum()) < N
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    if logits.dtype == torch.float64:
        flat = logits.flatten(0, 1), labels.flatten()
        return torch.nn.functional.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum")
    return token_loss_sum(logits, labels)


def results(loss: Tensor, *leaves: Tensor, factor: float = 0.37) -> dict[str, Tensor]:
    named = {str(n): leaf for n, leaf in enumerate(leaves) if leaf.requires_grad}
    found = with_gradients(loss, torch.tensor(factor), named)
    return {"loss": found.pop("out"), **found}


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_loss_in_chunks_equals_the_plain_one_with_its_gradients(
    dtype: torch.dtype, chunk: int
) -> None:
    hidden, weight, labels = inputs(dtype)
    expected = results(plain(hidden, weight, labels), hidden, weight)
    found = results(linear_token_loss_sum(hidden, weight, labels, chunk), hidden, weight)
    for name, tensor in expected.items():
        assert distance({name: tensor}, {name: found[name]}) < (
            1e-6 if dtype == torch.float32 else 1e-13
        )
        assert found[name].dtype == dtype


def test_where_all_positions_are_computed_those_without_a_target_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device whose counts are waited for; a hidden state without a target may even be no number."""
    hidden, weight, labels = inputs()
    live = labels != IGNORE
    expected = results(linear_token_loss_sum(hidden, weight, labels, 7), hidden, weight)
    monkeypatch.setattr(losses, "live_rows", lambda labels: torch.arange(len(labels)))
    assert (
        distance(
            expected, results(linear_token_loss_sum(hidden, weight, labels, 7), hidden, weight)
        )
        < 1e-6
    )
    with torch.no_grad():
        hidden[~live] = torch.nan
    found = results(linear_token_loss_sum(hidden, weight, labels, 7), hidden, weight)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert distance({"0": expected["0"][live]}, {"0": found["0"][live]}) < 1e-6


def test_a_target_of_no_probability_in_fp32_has_its_loss_and_gradient() -> None:
    hidden, weight, labels = inputs(scale=1000)
    exact = results(plain(hidden.double(), weight.double(), labels), hidden, weight)
    assert float(exact["loss"]) / labels.numel() > 150, "fp32 has no number below exp(-104)"
    assert (
        distance(results(linear_token_loss_sum(hidden, weight, labels, 7), hidden, weight), exact)
        < 1e-5
    )


def test_all_labels_ignored_give_0_and_gradients_of_0() -> None:
    hidden, weight, labels = inputs()
    found = results(
        linear_token_loss_sum(hidden, weight, torch.full_like(labels, IGNORE)), hidden, weight
    )
    assert {*found} == {"loss", "0", "1"}, "DDP waits for a gradient of every parameter"
    assert all(float(tensor.abs().max()) == 0 for tensor in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_are_those_of_argmax_also_where_logits_are_equal(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for values in (3, 50, 10_000):
        logits = torch.randint(0, values, (400, 60), generator=generator).to(dtype)
        labels = torch.where(
            torch.arange(400) % 3 == 0,
            logits.argmax(1),
            torch.randint(0, 60, (400,), generator=generator),
        )
        labels[::7] = IGNORE
        assert int(losses.count_hits(logits, labels)) == int((logits.argmax(1) == labels).sum()) > 0
    assert int(losses.count_hits(logits, torch.full_like(labels, IGNORE))) == 0


@pytest.mark.parametrize("chunk", [0, 7, 512])
def test_the_accuracy_of_a_validation_is_an_offline_count_over_the_same_tokens(chunk: int) -> None:
    """With a head that is computed in chunks, and with all logits of a model whose head does more."""
    rows = NumberedRows(20)
    batches = [rows.batch(range(start, start + 5)) for start in range(0, 20, 5)]
    for model in (tiny_model(), tiny_model(kind="gpt2")):
        task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk)
        hits = targets = 0
        model.eval()
        for batch in batches:
            ids, positions, segments, labels = language_modeling._arrays(batch, CPU)
            with torch.no_grad():
                logits = model(
                    input_ids=ids, position_ids=positions, attention_mask=segment_mask(segments)
                ).logits
            hits, targets = (
                hits + int((logits.argmax(-1) == labels).sum()),
                targets + int((labels != IGNORE).sum()),
            )
        _, figures = measure(
            task, task.build_model(), batches, ALONE, resolve_precision("fp32", CPU)
        )
        assert hits > 0 and figures == {"accuracy": hits / targets}


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    hidden, weight, labels = inputs()
    labels[0, 0] = V
    with pytest.raises((RuntimeError, IndexError)):
        linear_token_loss_sum(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_the_gradients_are_at_least_as_good_as_the_plain_ones(
    dtype: torch.dtype,
) -> None:
    hidden, weight, labels = inputs()
    exact = results(plain(hidden.double(), weight.double(), labels), hidden, weight)
    with torch.autocast("cpu", dtype):
        expected = plain(hidden, weight, labels)
        loss = linear_token_loss_sum(hidden, weight, labels, 7)
    assert loss.dtype == torch.float32, (
        "a sum over thousands of tokens has no room in half precision"
    )
    theirs, ours = results(expected, hidden, weight), results(loss, hidden, weight)
    for name in exact:
        assert ours[name].dtype == torch.float32
        assert distance({name: exact[name]}, {name: ours[name]}) < 0.01
        assert distance({name: exact[name]}, {name: ours[name]}) < 1.2 * distance(
            {name: exact[name]}, {name: theirs[name]}
        )


def test_small_probabilities_do_not_vanish_in_fp16_and_large_sums_do_not_overflow() -> None:
    weight = torch.zeros(
        60_000, 2
    ).requires_grad_()  # each probability is 1.7e-5, of which fp16 keeps eight bits
    hidden = torch.full((1, 60, 2), 1200.0).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = linear_token_loss_sum(hidden, weight, torch.full((1, 60), 5))
    found = results(loss, hidden, weight, factor=1.0)["1"]
    assert float(found[5, 0]) == pytest.approx(-60 * 1200.0, rel=1e-3), "beyond 65504"
    assert float(found[6, 0]) == pytest.approx(60 * 1200.0 / 60_000, rel=1e-3)


def test_the_loss_scale_meets_small_gradients_before_they_are_rounded_to_fp16() -> None:
    """Four weights a unit of fp16 apart: the slope is half a unit, which is 0 in fp16, and 65536 times it is not."""
    weight = (2.0**-14 * (1 + torch.arange(4) * 2.0**-10)).half()[:, None].requires_grad_()
    hidden = torch.zeros(1, 1, 1, dtype=torch.float16).requires_grad_()
    loss = linear_token_loss_sum(hidden, weight, torch.tensor([[1]]))
    assert float(results(loss, hidden, factor=65536.0)["0"]) == 65536 * 0.5 * 2.0**-24


@pytest.mark.parametrize(
    ("scale", "compiled"),
    [(None, False), (1.0, False), (losses.FP16_GRADIENT_SCALE, False), (1.0, True)],
)
def test_what_a_compiler_gets_scores_as_the_other_does(scale: float | None, compiled: bool) -> None:
    """Compiled to one graph that writes its input; without inductor, which on a CPU makes other kernels than on a GPU."""
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(40, 3 * V, generator=generator)
    labels = torch.randint(3 * V, (40,), generator=generator)
    labels[::5] = IGNORE
    ours, theirs = logits.clone(), logits.clone()
    score: Any = losses.fused_score
    if compiled:
        score = torch.compile(score, dynamic=False, backend="aot_eager", fullgraph=True)
    expected = losses._score(theirs, labels, torch.float32, scale)
    assert float(score(ours, labels, torch.float32, scale).sum()) == pytest.approx(
        float(expected.sum()), rel=1e-6
    )
    assert (
        torch.equal(ours, logits)
        if scale is None
        else distance({"slopes": ours}, {"slopes": theirs}) < 1e-6
    )


class Seen(TorchDispatchMode):
    """Matrix products, and the entries of the largest tensor of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if (
            isinstance(found, Tensor)
            and found.ndim == 2
            and found.shape[1] == V
            and found.shape[0] != D
        ):
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize(("chunk", "most"), [(5, 5 * V), (None, N * V)])
def test_no_more_logits_than_those_of_a_chunk_are_in_memory(chunk: int | None, most: int) -> None:
    with Seen() as seen:
        linear_token_loss_sum(*inputs(), chunk)
    assert 0 < seen.largest <= most


def test_positions_without_a_target_are_computed_only_up_to_a_multiple_of_64() -> None:
    labels = torch.full((256,), IGNORE)
    labels[3:133] = 1
    found = losses.live_rows(labels)
    assert len(found) == 192
    assert found[:130].tolist() == [*range(3, 133)]
    assert found.unique().numel() == 192


def test_what_needs_no_gradient_is_not_computed() -> None:
    hidden, weight, labels = inputs()
    chunks = -(-N // 7)

    def products(run: Any) -> int:
        with Seen() as seen:
            run()
        return seen.products

    assert products(lambda: linear_token_loss_sum(hidden, weight, labels, 7)) == 3 * chunks
    assert products(lambda: linear_token_loss_sum(hidden, weight.detach(), labels, 7)) == 2 * chunks
    with torch.no_grad():
        assert products(lambda: linear_token_loss_sum(hidden, weight, labels, 7)) == chunks
    assert {
        *results(linear_token_loss_sum(hidden, weight.detach(), labels, 7), hidden, weight)
    } == {"loss", "0"}


def gradients(
    model: Any, chunk: int | None, *, precision: torch.dtype | None = None, **options: Any
) -> dict[str, Tensor]:
    task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk, **options)
    module = task.build_model().train()
    torch.manual_seed(0)
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss = task.train_step(module, NumberedRows(4).batch(range(4)), CPU).total
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize(
    ("options", "adapted"),
    [({}, False), ({"tie_embeddings": False}, False), ({"kind": "qwen3", "kv_heads": 1}, True)],
)
def test_every_gradient_of_a_model_is_that_of_all_logits_at_once(
    options: dict[str, Any], adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention, "record_arguments", lambda model, *records: {}
    )  # which rounds otherwise than torch's
    model = tiny_model(**options)
    if adapted:
        model = adapters.attach(model, Lora(rank=3))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    expected, found = gradients(model, 0), gradients(model, 10)
    for name, tensor in expected.items():
        assert distance({name: tensor}, {name: found[name]}) < 1e-6, name
    theirs, ours = (gradients(model, chunk, precision=torch.bfloat16) for chunk in (0, 10))
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)


@pytest.mark.parametrize(
    ("adapted", "precision"), [(False, None), (True, torch.bfloat16)], ids=["fp32", "lora, bf16"]
)
def test_gradient_checkpointing_changes_no_bit_with_dropout_either(
    adapted: bool, precision: torch.dtype | None
) -> None:
    def found(**options: Any) -> tuple[dict[str, Tensor], int]:
        model = tiny_model(dropout=0.3, layers=4)
        if adapted:
            model = adapters.attach(model, Lora(rank=3, dropout=0.3))
        results: dict[str, Tensor] = {}
        kept = bytes_kept(
            lambda: results.update(copies(gradients(model, None, precision=precision, **options)))
        )
        return results, kept

    kept_all, much = found()
    computed_again, little = found(gradient_checkpointing=True)
    assert same(kept_all, computed_again)
    assert little < 0.5 * much


DENSE, SPARSE = (
    ("llama", "mistral", "qwen2", "qwen3"),
    ("mixtral", "qwen3_moe", "ernie4_5_moe", "glm4_moe"),
)


@pytest.mark.parametrize("kind", [*DENSE, *SPARSE])
def test_heads_that_are_a_product_and_nothing_more(kind: str) -> None:
    model = tiny_model(kind=kind) if kind in DENSE else tiny_moe(kind)
    ids = torch.randint(9, VOCAB, (2, 16))
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        assert torch.equal(model(input_ids=ids).logits, hidden @ model.lm_head.weight.T)
    expected, found = gradients(model, 0), gradients(model, 10)
    assert distance(expected, found) < 1e-6


def test_all_plain_heads_are_tested() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    assert {*PLAIN_HEADS} == {CAUSAL[kind] for kind in (*DENSE, *SPARSE)}


def test_a_head_that_does_more_takes_the_plain_way_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(kind="granite", fields={"logits_scaling": 4.0})
    batch = NumberedRows(3).batch(range(3))
    language_modeling.warn_unchunked_logits.cache_clear()
    with caplog.at_level(logging.WARNING, "ttrain"):
        for _ in range(2):
            task = LanguageModeling(settings_of_training(), model, chunk_tokens=7)
    assert caplog.text.count("the output head of GraniteForCausalLM may do more") == 1, (
        "however many are made"
    )
    loss = task.validation_step(task.build_model().eval(), batch, CPU).total
    ids, positions, segments, labels = language_modeling._arrays(batch, CPU)
    with torch.no_grad():
        logits = model.eval()(
            input_ids=ids, position_ids=positions, attention_mask=segment_mask(segments)
        ).logits
    assert float(loss) == pytest.approx(float(token_loss_sum(logits, labels)), rel=1e-6)


def test_an_adapter_on_the_output_head_is_in_the_loss() -> None:
    model = adapters.attach(
        tiny_model(tie_embeddings=False), Lora(rank=3, targets=("q_proj", "lm_head"))
    )
    found = gradients(model, 10)
    moved = [name for name in found if "lm_head" in name and "lora_B" in name]
    assert len(moved) == 1 and float(found[moved[0]].abs().max()) > 0
