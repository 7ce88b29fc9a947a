"""Every architecture and every adapter passes the checks of `ttrain doctor`, in tiny sizes."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor import test_doctor
from doctor.test_doctor import FP32, ROWS, language
from support.tiny_trainers import CPU, in_ranks, settings_of_training, tiny_model
from torch import Tensor
from transformers import dynamic_module_utils
from transformers.models import auto

from ttrain.config import Lora, Optim, Runtime
from ttrain.config.model import MultiToken
from ttrain.data.order import ShuffledOrder
from ttrain.doctor import model
from ttrain.doctor.parts import Finding, Learner, select_rows, trainer_of, unevenly_masked
from ttrain.model import adapters, factory, multi_token
from ttrain.store.model_files import ADAPTER
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.checkpoint_format import list_checkpoints
from ttrain.train.distributed import Ranks
from ttrain.train.training_options import Cadence

MOE = {"experts": 4, "top_k": 2, "z_loss": 0.001}
SHARED = {**MOE, "shared_experts": 1, "bias_rate": 0.001}
TINYSEEK = {
    "kind": "tinyseek",
    "moe": {"experts": 4, "top_k": 2, "shared_experts": 1, "expert_size": 8},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped queries, own head": {"kv_heads": 1, "tie_embeddings": False},
    "llama, yarn": {"rope_type": "yarn", "rope_factor": 4.0},
    "qwen3": {"kind": "qwen3", "scaled_residuals": True},
    "gpt2": {"kind": "gpt2"},
    "gemma2": {"kind": "gemma2", "fields": {"sliding_window": 5}},
    "moyun": {"kind": "moyun"},
    "tinyseek": TINYSEEK,
    "tinyseek, one layer": {  # and experts of a size that no groups can be made of
        **TINYSEEK,
        "moe": {**TINYSEEK["moe"], "expert_size": 9},
        "fields": {"share_layers": True},
    },
    "llama with experts": {"moe": MOE},
    "llama with shared experts": {"moe": SHARED, "dropout": 0.0},  # the architecture has none
    "qwen3 with shared experts": {"kind": "qwen3", "moe": SHARED},
    "two heads and experts": {"multi_token": True, "moe": MOE},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora"},
    "dora": {"kind": "dora"},
    "prefix": {"kind": "prefix", "virtual_tokens": 3},
}
# A fresh low-rank adapter changes no bit of the logits (tests/model/test_adapters.py); a prefix is seen.
ADAPTED: list[tuple[str, str]] = [
    ("llama, yarn", "prefix"),
    ("gpt2", "prefix"),
    ("moyun", "prefix"),
]
MIXTURES = [name for name in MODELS if "experts" in name or "tinyseek" in name]
CASES = [(name, "") for name in MODELS] + ADAPTED
# To train and to resume, beside the llama of `test_doctor`: noise of the router and shared layers, biases that move, a
# second head, and each way of PEFT: stacked experts, transposed layers, prefixes.
TRAINED: list[tuple[str, str]] = [
    ("tinyseek, one layer", ""),
    ("qwen3 with shared experts", ""),
    ("two heads and experts", ""),
    ("llama with experts", "lora"),
    ("gpt2", "dora"),
    ("llama, yarn", "prefix"),
]


class Subject(test_doctor.Subject):
    def state(self) -> dict[str, Tensor]:
        return (
            adapters.state(self.model)
            if self.weights_file == ADAPTER
            else multi_token.state(self.model)
        )


def build(name: str, adapter: str) -> Subject:
    settings = dict(MODELS[name])
    has_two_heads = settings.pop("multi_token", False)
    if adapter == "prefix":
        settings["init_std"] = (
            0.2  # or attention is so even that nothing put before the text could steer it
        )
    made = tiny_model(**{"dropout": 0.1, **settings})
    if has_two_heads:
        multi_token.attach(made, MultiToken(), 1)
    if not adapter:
        return Subject(made)
    config = Lora(rank=3, row_length=16, tokens_per_step=96, **ADAPTERS[adapter])
    return Subject(adapters.attach(made, config), weights_file=ADAPTER)


def case_id(case: tuple[str, str]) -> str:
    name, adapter = case
    return f"{adapter} on {name}" if adapter else name


def learner_of(case: tuple[str, str]) -> Learner:
    config = settings_of_training(optim=Optim(lr=0.2 if case[1] == "prefix" else 2e-2))
    return Learner(
        config,
        Runtime(device="cpu", rows_per_device=4),
        partial(build, *case),
        language,
        ROWS,
        FP32,
    )


def assert_ok(check: Finding | None) -> None:
    assert check is not None
    assert check.ok, check.measured


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_it_sees_neither_the_future_nor_other_records_and_starts_at_knowing_nothing(
    case: tuple[str, str],
) -> None:
    learner = learner_of(case)
    assert_ok(model.future(learner))
    assert_ok(model.documents(learner))
    assert_ok(model.first_loss(learner))


@pytest.fixture(scope="module")
def steps_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], list[model.Step]]:
    """What each of two ranks has after a step on the doctor's rows: two forks for all cases."""
    sample = unevenly_masked(select_rows(ROWS, model.ROWS))

    def steps(ranks: Ranks) -> dict[tuple[str, str], model.Step]:
        return {
            case: model.first_step(learner_of(case), sample, ranks, rows_per_device=1)
            for case in TRAINED
        }

    found = in_ranks(2, tmp_path_factory.mktemp("ranks"), steps)
    return {case: [of_rank[case] for of_rank in found] for case in TRAINED}


@pytest.mark.parametrize("case", TRAINED, ids=case_id)
def test_how_rows_are_divided_does_not_matter(
    case: tuple[str, str], steps_of_ranks: dict[tuple[str, str], list[model.Step]]
) -> None:
    assert_ok(model.accumulation(learner_of(case)))
    sample = unevenly_masked(select_rows(ROWS, model.ROWS))
    alone = model.first_step(learner_of(case), sample, Ranks(0, 1, CPU), rows_per_device=1)
    assert_ok(model._agreement(alone, steps_of_ranks[case], "one process and two"))


@pytest.mark.parametrize("case", TRAINED, ids=case_id)
def test_it_resumes_to_the_bit_and_learns(case: tuple[str, str]) -> None:
    assert_ok(model.resume(learner_of(case)))
    assert_ok(model.learns(learner_of(case)))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_groups_do_not_look_like_a_leak(name: str) -> None:
    """So many experts that groups of one or two tokens are common, of which another token changes the last bits."""
    settings = {key: value for key, value in MODELS[name].items() if key != "multi_token"}
    many = {
        **settings,
        "moe": {**settings["moe"], "experts": 32},
        "init_std": 0.3,
        "hidden_size": 64,
    }
    learner = Learner(
        settings_of_training(),
        Runtime(device="cpu"),
        lambda: Subject(tiny_model(**many)),
        language,
        ROWS,
        FP32,
    )
    assert_ok(model.future(learner))


OPENED = [
    name for name in MODELS if name != "llama with experts"
]  # which are opened with two heads


def test_a_checkpoint_of_every_architecture_opens_without_ttrain(tmp_path: Path) -> None:
    config, expected, directories = settings_of_training(optim=Optim(lr=2e-2)), [], []
    for name in OPENED:
        subject, place = build(name, ""), tmp_path / name.replace(" ", "-")
        checkpoints = Checkpoints(place, files=partial(factory.files, subject.model))
        learner = Learner(
            config, Runtime(device="cpu"), partial(build, name, ""), language, ROWS, FP32
        )
        trainer_of(
            learner,
            subject,
            ROWS,
            ShuffledOrder(len(ROWS), 4, 4, learner.config.seed),
            rows_per_device=4,
            checkpoints=checkpoints,
            cadence=Cadence(checkpoint=1),
        ).fit()
        checkpoints.close()
        directories.append(list_checkpoints(place)[-1])
        expected.append(last_logits(subject.model))
    # In a fork: a process of its own, as in `tests/export/test_export_elsewhere.py`, imports transformers for 5 s.
    [found] = in_ranks(
        1, tmp_path / "fork", lambda ranks: opened_without_ttrain(directories, tmp_path / "modules")
    )
    for name, ours, (module, theirs) in zip(OPENED, expected, found, strict=True):
        assert module == (
            "transformers_modules" if name.startswith(("moyun", "tinyseek")) else "transformers"
        )
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5, msg=f"the logits of {name}")


def opened_without_ttrain(directories: Sequence[Path], modules: Path) -> list[tuple[str, Tensor]]:
    """(package of the model's class, logits), without ttrain's modules and what it told transformers of its classes."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ttrain"]:
        sys.modules[name] = None  # type: ignore[assignment]  # to import it is an error
    for mapping in (auto.CONFIG_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._extra_content.clear()
    dynamic_module_utils.HF_MODULES_CACHE = str(modules)
    found = []
    for directory in directories:
        has_code = "auto_map" in json.loads((directory / "config.json").read_bytes())
        opened = auto.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=has_code)
        found.append((type(opened).__module__.partition(".")[0], last_logits(opened)))
    return found


def last_logits(opened: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = opened.eval()(torch.arange(9, 25)[None]).logits[0, -1]
    return logits
