"""The table of stages: the settings that each one sees."""

import json

import pytest

from ttrain.config import Settings, flatten
from ttrain.tasks import SHARDS, STAGES, Stage


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_process_gets_the_settings_that_its_stage_sees_and_no_others(stage: Stage) -> None:
    settings = Settings.model_validate({"model": {"moe": {"experts": 4}, "fields": {"sizes": [1]}}})
    job = json.loads(json.dumps(stage.part_of(settings)))
    rebuilt, whole = Settings.rebuilt(job), dict(flatten(settings.model_dump()))
    found = {name: value for name, value in whole.items() if name in dict(flatten(job))}
    for name, value in found.items():
        section: object = rebuilt
        for part in name.split("."):
            section = section[part] if isinstance(section, dict) else getattr(section, part)
        assert section == value, name
    for prefix in stage.sees:
        assert any(f"{name}.".startswith(f"{prefix}.") for name in whole), prefix
    with pytest.raises(AttributeError):
        _ = rebuilt.runtime


def test_a_stage_may_see_a_part_of_a_section() -> None:
    assert "near_duplicates" in SHARDS["pretrain"].part_of(Settings())["reading"]
    assert "near_duplicates" not in SHARDS["sft"].part_of(Settings())["reading"]
