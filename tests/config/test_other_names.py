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
    ("name", "advice"),
    [
        ("SFT.Learning-Rate", "'sft.optim.lr'?"),
        ("learing_rate", "'pretrain.optim.lr'"),
        ("sft.batch_size", "'sft.tokens_per_step'? (in tokens: rows x row_length)"),
        ("output_dir", "TTRAIN_HOME=DIR"),  # which no setting decides
        ("resume_from_checkpoint", "same command"),
    ],
)
def test_a_setting_of_another_library_is_answered_with_ours(name: str, advice: str) -> None:
    message = refused(f"{name}=1")
    assert f"'{name}'" in message and advice in message
