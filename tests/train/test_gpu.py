"""What only a GPU can show: the kernel itself, no wait between logging steps, and the same bits after a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import Recorder, make_trainer, settings_of_training, tiny_model

from ttrain.config import Optim
from ttrain.train import attention, varlen
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import set_deterministic
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ALONE = Ranks(0, 1, CUDA)
WIDE: dict[str, Any] = {"hidden_size": 128, "heads": 2}  # heads of 64, which the kernel has


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    set_deterministic(True)
    yield
    set_deterministic(False)


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_the_kernel_equals_a_mask_in_fp32_and_its_gradients_do(kv: int) -> None:
    segments = torch.from_numpy(NumberedRows(4, 256).batch(range(4)).segments_BT).to(CUDA)
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 4, 256, 64), (4, kv, 256, 64), (4, kv, 256, 64)]
    leaves = [torch.randn(shape, generator=generator).to(CUDA).requires_grad_() for shape in shapes]
    mask = attention.segment_mask(segments)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    spans = varlen.spans_of(segments.cpu().numpy(), CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        found, _ = attention.record_attention(None, *leaves, None, spans=spans)
    gradients = torch.autograd.grad(found.float().square().sum(), leaves)
    for left, right in zip((expected, *wanted), (found.float(), *gradients), strict=True):
        assert (left - right).norm() < 1e-2 * left.norm(), "as far as bf16 goes"


def trainer_of(directory: Path | None, **more: Any) -> tuple[Trainer, Recorder]:
    options = {"kind": "qwen3", **WIDE}
    config = settings_of_training(
        optim=Optim(kind="muon", lr=1e-2),
        precision="bf16",
        row_length=64,
        tokens_per_step=384,
        tokens=20 * 384,
    )
    model, recorder = tiny_model(**options), Recorder()
    trainer = make_trainer(
        config,
        model,
        NumberedRows(13, 64),
        rows_per_device=3,
        ranks=ALONE,
        callbacks=[recorder],
        directory=directory,
        cadence=Cadence(log=10, checkpoint=10),
        task=LanguageModeling(config, model),
        **more,
    )
    return trainer, recorder


def test_no_step_between_two_logging_steps_waits_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, _ = trainer_of(None)
    assert trainer._deferred is not None
    step = trainer._train_step

    def watched(number: int, *rest: Any) -> Any:
        if number % 10 in (0, 9):
            return step(number, *rest)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(number, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer, "_train_step", watched)
    assert trainer.fit().step == 20


def test_a_run_that_is_continued_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight, _ = trainer_of(tmp_path / "straight")
    straight.fit()
    for stop in ({"stop_after": 10}, {}):
        continued, _ = trainer_of(tmp_path / "continued", **stop)
        result = continued.fit()
        assert continued.checkpoints is not None
        continued.checkpoints.close()
    assert result.resumed_from_step >= 10
    assert same(copies(straight.bare.state_dict()), copies(continued.bare.state_dict()))


def test_a_compiled_model_has_the_losses_of_one_that_is_not() -> None:
    """In bf16, whose roundings twenty steps of Muon make larger: 0.4 % at a loss of 0.75, on an H200."""
    losses = []
    for how in (Speed(), Speed(compile=True)):
        trainer, recorder = trainer_of(None, how=how)
        trainer.fit()
        assert trainer.model.compiled is how.compile
        losses.append(recorder.figures("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_gpu_trains_as_a_cpu_does_in_fp32() -> None:
    weights = []
    for ranks in (ALONE, Ranks(0, 1, torch.device("cpu"))):
        config, model = settings_of_training(optim=Optim(kind="adamw", lr=1e-2)), tiny_model()
        trainer = make_trainer(config, model, NumberedRows(13), rows_per_device=3, ranks=ranks)
        trainer.fit()
        weights.append({name: tensor.cpu() for name, tensor in trainer.bare.state_dict().items()})
    assert distance(*weights) < 1e-3
