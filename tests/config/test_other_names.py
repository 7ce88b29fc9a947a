"""Names of settings that people bring from other libraries."""

from __future__ import annotations

import pytest
from support.refusals import refused

from ttrain.config import Settings
from ttrain.config.loading import types_by_name
from ttrain.config.other_names import STAGE, names
from ttrain.config.training import TRAININGS


def test_every_name_of_another_library_means_settings_that_exist() -> None:
    keys = set(types_by_name(Settings))
    for setting in " ".join(names()["names"].values()).split():
        stages = {f"{stage}.{setting.removeprefix(STAGE)}" for stage in TRAININGS}
        assert (stages if setting.startswith(STAGE) else {setting}) <= keys


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "'pretrain.optim.lr' or 'sft.optim.lr'"),
        ("SFT.Learning-Rate", "'sft.optim.lr'?"),
        ("learing_rate", "'pretrain.optim.lr'"),
        ("sft.batch_size", "'sft.tokens_per_step'? (in tokens: rows x row_length)"),
        ("target_modules", "'lora.targets'?"),
        ("gradient_checkpointing", "'runtime.gradient_checkpointing'?"),
    ],
)
def test_a_setting_of_another_library_is_answered_with_ours(given: str, meant: str) -> None:
    message = refused(f"{given}=1")
    assert f"unknown setting '{given}' (from command line); did you mean {meant}" in message


def test_what_needs_no_setting_says_what_to_do_instead() -> None:
    assert "set TTRAIN_HOME=DIR" in refused("output_dir=out")
    assert "the same command continues" in refused("resume_from_checkpoint=last")
