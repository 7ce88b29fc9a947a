"""The loss from hidden states in chunks: equal to the plain one, small in memory, and plain where a
head does more."""

import logging
from typing import Any

import pytest
import torch
from support.comparing import bytes_kept, copies, distance, same, with_gradients, worst
from support.tiny_adapters import disturb
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_mixtures import tiny_moe
from support.tiny_trainers import ALONE, CPU, settings_of_training, tiny_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from ttrain.config import Lora
from ttrain.data.packing import IGNORE, Batch
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
    logits = F.linear(hidden, weight)
    if logits.dtype == torch.float64:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return token_loss_sum(logits, labels)


def results(loss: Tensor, *leaves: Tensor, factor: float = 0.37) -> dict[str, Tensor]:
    named = {str(n): leaf for n, leaf in enumerate(leaves) if leaf.requires_grad}
    return with_gradients(loss, torch.tensor(factor), named)


def chunked(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = 7
) -> dict[str, Tensor]:
    return results(linear_token_loss_sum(hidden, weight, labels, chunk), hidden, weight)


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_the_loss_in_chunks_equals_the_plain_one_with_its_gradients(
    dtype: torch.dtype, limit: float, chunk: int
) -> None:
    hidden, weight, labels = inputs(dtype)
    tensors = chunked(hidden, weight, labels, chunk)
    assert worst(results(plain(hidden, weight, labels), hidden, weight), tensors) < limit
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_positions_without_a_target_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose counts are waited for; a hidden state without a target may even be
    NaN."""
    hidden, weight, labels = inputs()
    live = labels != IGNORE
    expected = chunked(hidden, weight, labels)
    monkeypatch.setattr(losses, "live_rows", lambda labels: torch.arange(len(labels)))
    assert distance(expected, chunked(hidden, weight, labels)) < 1e-6
    with torch.no_grad():
        hidden[~live] = torch.nan
    tensors = chunked(hidden, weight, labels)
    assert float(tensors["out"]) == pytest.approx(float(expected["out"]), rel=1e-6)
    assert distance({"0": expected["0"][live]}, {"0": tensors["0"][live]}) < 1e-6


def test_a_target_of_no_probability_in_fp32_has_its_loss_and_gradient() -> None:
    hidden, weight, labels = inputs(scale=1000)
    exact = results(plain(hidden.double(), weight.double(), labels), hidden, weight)
    assert float(exact["out"]) / labels.numel() > 150, "fp32 has no number below exp(-104)"
    assert distance(chunked(hidden, weight, labels), exact) < 1e-5


def test_all_labels_ignored_give_0_and_gradients_of_0() -> None:
    hidden, weight, labels = inputs()
    tensors = chunked(hidden, weight, torch.full_like(labels, IGNORE), None)
    assert {*tensors} == {"out", "0", "1"}, "DDP waits for a gradient of every parameter"
    assert all(float(tensor.abs().max()) == 0 for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hits_are_those_of_argmax_also_where_logits_are_equal(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for values in (3, 50, 10_000):
        logits = torch.randint(0, values, (400, 60), generator=generator).to(dtype)
        guesses = torch.randint(0, 60, (400,), generator=generator)
        labels = torch.where(torch.arange(400) % 3 == 0, logits.argmax(1), guesses)
        labels[::7] = IGNORE
        assert int(losses.count_hits(logits, labels)) == int((logits.argmax(1) == labels).sum()) > 0
    assert int(losses.count_hits(logits, torch.full_like(labels, IGNORE))) == 0


def all_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits of all positions, by the mask of their records, and the labels."""
    arrays = (batch.input_ids_BT, batch.positions_BT, batch.segments_BT, batch.labels_BT)
    ids, positions, segments, labels = map(torch.from_numpy, arrays)
    with torch.no_grad():
        output = model.eval()(ids, attention_mask=segment_mask(segments), position_ids=positions)
    return output.logits, labels


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("chunk", [0, 7, 512])
def test_the_accuracy_of_a_validation_is_an_offline_count(chunk: int, kind: str) -> None:
    """With a head that is computed in chunks, and with all logits of a model whose head does
    more."""
    rows, model, hits, targets = NumberedRows(20), tiny_model(kind=kind), 0, 0
    task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk)
    batches = [rows.batch(range(start, start + 5)) for start in range(0, 20, 5)]
    for batch in batches:
        logits, labels = all_logits(model, batch)
        hits += int((logits.argmax(-1) == labels).sum())
        targets += int((labels != IGNORE).sum())
    fp32 = resolve_precision("fp32", CPU)
    _, figures = measure(task, task.build_model(), batches, ALONE, fp32)
    assert hits > 0 and figures == {"accuracy": hits / targets}


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    hidden, weight, labels = inputs()
    labels[0, 0] = V
    with pytest.raises((RuntimeError, IndexError)):
        linear_token_loss_sum(hidden, weight, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_half_precision_are_as_good_as_plain_ones(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs()
    exact = results(plain(hidden.double(), weight.double(), labels), hidden, weight)
    with torch.autocast("cpu", dtype):
        expected = plain(hidden, weight, labels)
        loss = linear_token_loss_sum(hidden, weight, labels, 7)
    assert loss.dtype == torch.float32, "half precision has no room for a sum over many tokens"
    theirs, ours = results(expected, hidden, weight), results(loss, hidden, weight)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    for name, tensor in exact.items():
        error, limit = (distance({name: tensor}, {name: each[name]}) for each in (ours, theirs))
        assert error < 0.01 and error < 1.2 * limit


def test_small_probabilities_do_not_vanish_in_fp16_and_large_sums_do_not_overflow() -> None:
    # Each probability is 1.7e-5, of which fp16 keeps eight bits.
    weight = torch.zeros(60_000, 2).requires_grad_()
    hidden = torch.full((1, 60, 2), 1200.0).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = linear_token_loss_sum(hidden, weight, torch.full((1, 60), 5))
    slopes = results(loss, hidden, weight, factor=1.0)["1"]
    assert float(slopes[5, 0]) == pytest.approx(-60 * 1200.0, rel=1e-3), "beyond 65504"
    assert float(slopes[6, 0]) == pytest.approx(60 * 1200.0 / 60_000, rel=1e-3)


def test_the_loss_scale_meets_small_gradients_before_they_are_rounded_to_fp16() -> None:
    """Four weights a unit of fp16 apart: the slope, half a unit, is 0 in fp16; 65536 times it is
    not."""
    weight = (2.0**-14 * (1 + torch.arange(4) * 2.0**-10)).half()[:, None].requires_grad_()
    hidden = torch.zeros(1, 1, 1, dtype=torch.float16).requires_grad_()
    loss = linear_token_loss_sum(hidden, weight, torch.tensor([[1]]))
    assert float(results(loss, hidden, factor=65536.0)["0"]) == 65536 * 0.5 * 2.0**-24


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, losses.FP16_GRADIENT_SCALE])
def test_the_scores_for_a_compiler_are_those_of_torch(scale: float | None, compiled: bool) -> None:
    """Compiled to one graph that writes its input; without inductor, whose kernels differ on
    a GPU."""
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(40, 3 * V, generator=generator)).requires_grad_()
    labels = torch.randint(3 * V, (40,), generator=generator)
    labels[::5] = IGNORE
    expected = F.cross_entropy(logits, labels, reduction="sum")
    (slopes,) = torch.autograd.grad(expected, logits)
    score: Any = losses.fused_score
    if compiled:
        score = torch.compile(score, dynamic=False, backend="aot_eager", fullgraph=True)
    ours = logits.detach().clone()
    total = score(ours, labels, torch.float32, scale).sum()
    assert float(total) == pytest.approx(float(expected.detach()), rel=1e-6)
    if scale is None:
        assert torch.equal(ours, logits)
    else:
        assert distance({"slopes": scale * slopes}, {"slopes": ours}) < 1e-6


class Products(TorchDispatchMode):
    """Counts matrix products, and the entries of the largest tensor of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        shape = output.shape if isinstance(output, Tensor) else ()
        if len(shape) == 2 and shape[1] == V and shape[0] != D:
            self.largest = max(self.largest, output.numel())
        return output


@pytest.mark.parametrize(("chunk", "most"), [(5, 5 * V), (None, N * V)])
def test_no_more_logits_than_those_of_a_chunk_are_in_memory(chunk: int | None, most: int) -> None:
    with Products() as products:
        linear_token_loss_sum(*inputs(), chunk)
    assert 0 < products.largest <= most


def test_positions_without_a_target_are_computed_only_up_to_a_multiple_of_64() -> None:
    labels = torch.full((256,), IGNORE)
    labels[3:133] = 1
    rows = losses.live_rows(labels)
    assert len(rows) == 192
    assert rows[:130].tolist() == [*range(3, 133)]
    assert rows.unique().numel() == 192


def test_what_needs_no_gradient_is_not_computed() -> None:
    hidden, weight, labels = inputs()
    chunks = -(-N // 7)

    def products(weight: Tensor) -> int:
        with Products() as products:
            linear_token_loss_sum(hidden, weight, labels, 7)
        return products.count

    assert products(weight) == 3 * chunks
    assert products(weight.detach()) == 2 * chunks
    with torch.no_grad():
        assert products(weight) == chunks
    assert {*chunked(hidden, weight.detach(), labels)} == {"out", "0"}


def gradients(
    model: Any, chunk: int | None, *, precision: torch.dtype | None = None, **options: Any
) -> dict[str, Tensor]:
    task = LanguageModeling(settings_of_training(), model, chunk_tokens=chunk, **options)
    module = task.build_model().train()
    torch.manual_seed(0)
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss = task.train_step(module, NumberedRows(4).batch(range(4)), CPU).total
    loss.backward()  # type: ignore[no-untyped-call]
    slopes = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return {"loss": loss.detach(), **slopes}


@pytest.mark.parametrize(
    ("options", "adapted"),
    [({}, False), ({"tie_embeddings": False}, False), ({"kind": "qwen3", "kv_heads": 1}, True)],
)
def test_every_gradient_of_a_model_is_that_of_all_logits_at_once(
    options: dict[str, Any], adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The attention of records rounds otherwise than torch's.
    monkeypatch.setattr(attention, "record_arguments", lambda model, *records: {})
    model = tiny_model(**options)
    if adapted:
        model = disturb(adapters.attach(model, Lora(rank=3)), by=0.1)
    expected = gradients(model, 0)
    assert worst(expected, gradients(model, 10)) < 1e-6
    theirs, ours = (gradients(model, chunk, precision=torch.bfloat16) for chunk in (0, 10))
    assert 0 < distance(expected, ours) < 1.2 * distance(expected, theirs)


@pytest.mark.parametrize(
    ("adapted", "precision"), [(False, None), (True, torch.bfloat16)], ids=["fp32", "lora, bf16"]
)
def test_gradient_checkpointing_changes_no_bit_with_dropout_either(
    adapted: bool, precision: torch.dtype | None
) -> None:
    def measured(**options: Any) -> tuple[dict[str, Tensor], int]:
        model, slopes = tiny_model(dropout=0.3, layers=4), dict[str, Tensor]()
        if adapted:
            model = adapters.attach(model, Lora(rank=3, dropout=0.3))
        options["precision"] = precision
        size = bytes_kept(lambda: slopes.update(copies(gradients(model, None, **options))))
        return slopes, size

    kept, much = measured()
    recomputed, little = measured(gradient_checkpointing=True)
    assert same(kept, recomputed)
    assert little < 0.5 * much


DENSE = ("llama", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "qwen3_moe", "ernie4_5_moe", "glm4_moe")


@pytest.mark.parametrize("kind", [*DENSE, *SPARSE])
def test_heads_that_are_a_product_and_nothing_more(kind: str) -> None:
    model = tiny_model(kind=kind) if kind in DENSE else tiny_moe(kind)
    ids = torch.randint(9, VOCAB, (2, 16))
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        assert torch.equal(model(input_ids=ids).logits, hidden @ model.lm_head.weight.T)
    assert distance(gradients(model, 0), gradients(model, 10)) < 1e-6


def test_all_plain_heads_are_tested() -> None:
    assert {*PLAIN_HEADS} == {CAUSAL[kind] for kind in (*DENSE, *SPARSE)}


def test_a_head_that_does_more_takes_the_plain_way(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(kind="granite", fields={"logits_scaling": 4.0})
    batch = NumberedRows(3).batch(range(3))
    language_modeling.warn_unchunked_logits.cache_clear()
    with caplog.at_level(logging.WARNING, "ttrain"):
        for _ in range(2):
            task = LanguageModeling(settings_of_training(), model, chunk_tokens=7)
    assert caplog.text.count("GraniteForCausalLM") == 1
    loss = task.validation_step(task.build_model().eval(), batch, CPU).total
    expected = token_loss_sum(*all_logits(model, batch))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_an_adapter_on_the_output_head_is_in_the_loss() -> None:
    config = Lora(rank=3, targets=("q_proj", "lm_head"))
    slopes = gradients(adapters.attach(tiny_model(tie_embeddings=False), config), 10)
    (name,) = (name for name in slopes if "lm_head" in name and "lora_B" in name)
    assert float(slopes[name].abs().max()) > 0
