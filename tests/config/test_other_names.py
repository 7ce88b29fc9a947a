"""Names of settings that people bring from other libraries."""

from __future__ import annotations

import pytest

from ttrain.config import Settings
from ttrain.config.loading import load, settable_keys
from ttrain.config.other_names import NAMES, STAGE
from ttrain.config.training import TRAININGS
from ttrain.errors import UsageError


def refused(*overrides: str, **environment: str) -> str:
    with pytest.raises(UsageError) as error:
        load(overrides, environment=environment)
    return str(error.value)


def test_every_name_of_another_library_means_settings_that_exist_or_has_a_note() -> None:
    keys = set(settable_keys(Settings))
    for name, meaning in NAMES.items():
        assert meaning.keys or meaning.note, name
        for key in meaning.keys:
            stage_keys = {f"{stage}.{key.removeprefix(STAGE)}" for stage in TRAININGS}
            expected = stage_keys if key.startswith(STAGE) else {key}
            assert expected <= keys, name


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("learning_rate=2e-4", "pretrain.optim.lr=2e-4"),
        ("sft.lr=2e-4", "sft.optim.lr=2e-4"),
        ("SFT.Learning-Rate=2e-4", "sft.optim.lr=2e-4"),
        ("learing_rate=2e-4", "pretrain.optim.lr=2e-4"),
        ("sft.batch_size=32", "sft.tokens_per_step=TOKENS (rows x row_length)"),
        ("model.size=small", "model.preset=10m"),
        ("warmup_ratio=0.1", "pretrain.schedule.warmup_steps=100 (in steps, not as a share)"),
        ("bf16=True", "pretrain.precision=bf16"),
        ("target_modules=q_proj,v_proj", "lora.targets=q_proj,v_proj"),
        ("dataset=*.jsonl", "'data.pretrain=*.jsonl'"),
        ("gradient_checkpointing=true", "runtime.gradient_checkpointing=true"),
    ],
)
def test_a_setting_of_another_library_is_answered_with_ours_as_one_would_type_it(given: str, written: str) -> None:
    message = refused(given)
    assert f"Write {written}" in message or f"Write for example {written}" in message
    assert f"{given.partition('=')[0]}" in message and "(from command line)" in message


def test_what_needs_no_setting_says_what_to_do_instead() -> None:
    assert "set TTRAIN_HOME=DIR" in refused("output_dir=out")
    assert "the same command continues" in refused("resume_from_checkpoint=last")


def test_the_right_setting_is_written_as_in_the_layer_where_the_wrong_one_stands() -> None:
    assert "Write TTRAIN__SFT__OPTIM__LR=1e-3" in refused(TTRAIN__SFT__LEARNING_RATE="1e-3")
