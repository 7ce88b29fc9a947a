"""A night's weights averaged with the champion's, and the choice between the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.night_models import COUNT, write_evaluation, write_model
from support.tiny_stages import run_here

from ttrain.config import AverageConfig, ChosenBaseConfig, Nightly, Promotion, Runtime, Settings
from ttrain.core.files import write_json
from ttrain.errors import ArtifactError
from ttrain.evaluate.task_result import record_name
from ttrain.stages import average, chosen_base
from ttrain.stages.heldout import NIGHTS

SHARE = AverageConfig.model_validate({"nightly": Nightly(average=0.25)})
RULES = ChosenBaseConfig.model_validate({"promotion": Promotion()})


def averaged(tmp_path: Path, night: Path, champion: Path, name: str = "output") -> dict[str, torch.Tensor]:
    run_here(average, SHARE, tmp_path / name, {"night": night, "champion": champion}, Runtime())
    return dict(load_file(tmp_path / name / "model" / "model.safetensors"))


def test_each_weight_lies_between_the_night_s_and_the_champion_s_by_the_share(tmp_path: Path) -> None:
    night = write_model(tmp_path / "night", a=torch.tensor([0.0, 4.0]), half=torch.tensor([1.0], dtype=torch.bfloat16))
    champion = write_model(tmp_path / "champion", a=torch.tensor([8.0, 0.0]), half=torch.tensor([3.0], dtype=torch.bfloat16))
    found = averaged(tmp_path, night, champion)
    assert found["a"].tolist() == [2.0, 3.0]
    assert found["half"].tolist() == [1.5] and found["half"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "output/model/config.json").read_text()) == {"name": "night"}
    again = averaged(tmp_path, night, champion, "again")
    assert all(torch.equal(found[name], again[name]) for name in found), "the same bits each time"


def test_what_the_champion_does_not_have_and_what_is_no_weight_stay_the_night_s(tmp_path: Path) -> None:
    night = write_model(tmp_path / "night", a=torch.tensor([4.0]), new=torch.tensor([1.0]), steps=torch.tensor([7]))
    save_file({"head": torch.tensor([1.0])}, night / "model" / "multi_token.safetensors")
    champion = write_model(tmp_path / "champion", a=torch.tensor([0.0]), steps=torch.tensor([3]))
    inputs = {"night": night, "champion": champion}
    figures = run_here(average, SHARE, tmp_path / "output", inputs, Runtime())
    assert figures == {"share": 0.25, "averaged_tensors": 1, "kept_tensors": 3}
    found = load_file(tmp_path / "output/model/model.safetensors")
    assert (found["a"].item(), found["new"].item(), found["steps"].item()) == (3.0, 1.0, 7)
    assert load_file(tmp_path / "output/model/multi_token.safetensors")["head"].item() == 1.0


def test_models_of_other_shapes_are_refused_with_the_setting(tmp_path: Path) -> None:
    night, champion = write_model(tmp_path / "night", a=torch.zeros(2)), write_model(tmp_path / "champion", a=torch.zeros(3))
    with pytest.raises(ArtifactError, match=r"cannot average a: it is \[2\].*\[3\].*nightly\.average= \(empty\)"):
        averaged(tmp_path, night, champion)
    with pytest.raises(ValueError, match=r"nightly\.average is 0\.5 but nightly\.start_from is scratch"):
        Settings.model_validate({"nightly": {"average": 0.5, "start_from": "scratch"}})


# --- the choice ---


def chosen(tmp_path: Path, night: dict[str, float], average: dict[str, float], champion: dict[str, float]) -> Any:
    documents = tmp_path / "documents"
    names = [[record_name(f"{name} {number}") for number in range(COUNT)] for name in champion]
    (documents / NIGHTS).parent.mkdir(parents=True)
    write_json(documents / NIGHTS, names)
    inputs = {name: write_model(tmp_path / name, a=torch.zeros(1)) for name in ("night", "average")}
    figures = {"of-night": night, "of-average": average, "of-champion": champion}
    evaluations = {name: write_evaluation(tmp_path / name, **costs) for name, costs in figures.items()}
    result = run_here(chosen_base, RULES, tmp_path / "output", {**inputs, **evaluations, "documents": documents}, Runtime())
    taken = json.loads((tmp_path / "output/model/config.json").read_text())["name"]
    assert taken == result["chosen"]
    return result


CHAMPION = {"old": 2.0, "new": 3.0}


@pytest.mark.parametrize(
    ("night", "average", "taken"),
    [
        ({"old": 2.0, "new": 1.0}, {"old": 2.0, "new": 2.0}, "night"),
        ({"old": 2.0, "new": 2.0}, {"old": 1.9, "new": 1.9}, "average"),
        ({"old": 2.3, "new": 1.0}, {"old": 2.02, "new": 1.8}, "average"),  # the night's own forgets
        ({"old": 2.3, "new": 1.0}, {"old": 2.2, "new": 1.8}, "night"),  # both do: the better one
        ({"old": 2.0, "new": 2.0}, {"old": 2.0, "new": 2.0}, "night"),  # equal
        ({"old": 2.3, "new": 3.3}, {"old": 2.0, "new": 3.1}, "average"),  # neither would be promoted
    ],
)
def test_the_better_candidate_is_taken_and_one_that_forgets_only_if_both_do(
    tmp_path: Path, night: dict[str, float], average: dict[str, float], taken: str
) -> None:
    result = chosen(tmp_path, night, average, CHAMPION)
    assert result["chosen"] == taken, result
    assert set(result["candidates"]) == {"night", "average"}
    forgets = night["old"] > 2.06
    assert result["candidates"]["night"]["lost"] == (["night 1"] if forgets else [])
    assert result["candidates"]["night"]["better_by"] == pytest.approx(2.5 - (night["old"] + night["new"]) / 2)


def test_without_held_out_documents_the_night_s_own_weights_are_taken(tmp_path: Path) -> None:
    for name in ("of-night", "of-average", "of-champion"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "evaluation.json", {"metrics": {}})
    (tmp_path / "documents").mkdir()
    inputs = {name: write_model(tmp_path / name, a=torch.zeros(1)) for name in ("night", "average")}
    inputs |= {name: tmp_path / name for name in ("of-night", "of-average", "of-champion", "documents")}
    assert run_here(chosen_base, RULES, tmp_path / "output", inputs, Runtime()) == {"chosen": "night", "candidates": {}}
