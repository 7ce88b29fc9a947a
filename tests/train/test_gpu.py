"""What only a GPU can show: the kernel, no waits between logs, the bits after a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import make_trainer, settings_of_training, tiny_model

from ttrain.config import Optim
from ttrain.train import attention, varlen
from ttrain.train.callbacks import Callback
from ttrain.train.distributed import Ranks
from ttrain.train.precision import set_deterministic
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ALONE = Ranks(0, 1, CUDA)
MUON = Optim(kind="muon", lr=1e-2)
WIDE: dict[str, Any] = {"kind": "qwen3", "hidden_size": 128, "heads": 2}  # of 64, the kernel's
STEPS = {"row_length": 64, "tokens_per_step": 384, "tokens": 20 * 384}


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    set_deterministic(True)
    yield
    set_deterministic(False)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_kernel_and_its_gradients_equal_a_mask_in_fp32(kv_heads: int) -> None:
    segments = torch.from_numpy(NumberedRows(4, 256).batch(range(4)).segments_BT).to(CUDA)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(4, n, 256, 64, generator=generator) for n in (4, kv_heads, kv_heads)]
    leaves = [state.to(CUDA).requires_grad_() for state in states]
    mask = attention.segment_mask(segments)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    spans = varlen.spans_of(segments.cpu().numpy(), CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        out = attention.record_attention(None, *leaves, None, spans=spans)[0].float()
    expected = exact, *torch.autograd.grad(exact.square().sum(), leaves)
    results = out, *torch.autograd.grad(out.square().sum(), leaves)
    for left, right in zip(expected, results, strict=True):
        assert (left - right).norm() < 1e-2 * left.norm(), "up to the rounding of bf16"


class ForbidWaits(Callback):
    """Makes a wait for the GPU an error in steps neither the first nor the last before a log."""

    def step_start(self, step: int) -> None:
        torch.cuda.set_sync_debug_mode("default" if step % 10 in (0, 1) else "error")


def trainer_of(directory: Path, **options: Any) -> Trainer:
    config = settings_of_training(optim=MUON, precision="bf16", **STEPS)
    options |= {"directory": directory, "cadence": Cadence(log=10, checkpoint=10), "ranks": ALONE}
    rows = NumberedRows(13, 64)
    return make_trainer(config, tiny_model(**WIDE), rows, rows_per_device=3, **options)


def test_a_continued_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight = trainer_of(tmp_path / "straight", callbacks=[ForbidWaits()])
    assert straight.deferred is not None
    try:
        straight.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for stop in ({"stop_after": 10}, {}):
        continued = trainer_of(tmp_path / "continued", **stop)
        result = continued.fit()
        assert continued.checkpoints is not None
        continued.checkpoints.close()
    assert result.resumed_from_step >= 10
    assert same(copies(straight.bare.state_dict()), copies(continued.bare.state_dict()))
