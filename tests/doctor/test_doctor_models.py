"""Every architecture and every adapter passes the checks of `ttrain doctor`, in tiny sizes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor import test_doctor
from doctor.test_doctor import ROWS, SOUND, check
from support.tiny_trainers import CPU, in_ranks, settings_of_training, tiny_model
from torch import Tensor
from transformers import dynamic_module_utils
from transformers.models import auto

from ttrain.config import Lora, Optim
from ttrain.config.model import MultiToken
from ttrain.data.order import ShuffledOrder
from ttrain.doctor import model
from ttrain.doctor.parts import Learner, trainer_of
from ttrain.model import adapters, factory, multi_token
from ttrain.store.model_files import ADAPTER
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.checkpoint_format import list_checkpoints
from ttrain.train.distributed import Ranks
from ttrain.train.memory_rows import select_rows, unevenly_masked
from ttrain.train.training_options import Cadence

MOE = {"experts": 4, "top_k": 2, "z_loss": 0.001}
SHARED = {**MOE, "shared_experts": 1, "bias_rate": 0.001}
SMALL_EXPERTS = {"experts": 4, "top_k": 2, "shared_experts": 1, "expert_size": 8}
UNGROUPED = {**SMALL_EXPERTS, "expert_size": 9}  # of a size that no groups can be made of
MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped queries, own head": {"kv_heads": 1, "tie_embeddings": False},
    "llama, yarn": {"rope_type": "yarn", "rope_factor": 4.0},
    "qwen3": {"kind": "qwen3", "scaled_residuals": True},
    "gpt2": {"kind": "gpt2"},
    "gemma2": {"kind": "gemma2", "fields": {"sliding_window": 5}},
    "moyun": {"kind": "moyun"},
    "tinyseek": {"kind": "tinyseek", "moe": SMALL_EXPERTS},
    "tinyseek, one layer": {"kind": "tinyseek", "moe": UNGROUPED, "fields": {"share_layers": True}},
    "llama with experts": {"moe": MOE},
    "llama with shared experts": {"moe": SHARED, "dropout": 0.0},  # the architecture has none
    "qwen3 with shared experts": {"kind": "qwen3", "moe": SHARED},
    "two heads and experts": {"multi_token": True, "moe": MOE},
}
MIXTURES = [name for name in MODELS if "experts" in name or "tinyseek" in name]
OPENED = [name for name in MODELS if name != "llama with experts"]  # opened with two heads
OWN_CODE = ("moyun", "tinyseek")  # which transformers does not have
# A fresh low-rank adapter changes no bit of the logits (tests/model/test_adapters.py).
ADAPTED = [(name, "prefix") for name in ("llama, yarn", "gpt2", "moyun")]
CASES = [(name, "") for name in MODELS] + ADAPTED
# To train and to resume, in addition to the llama of `test_doctor`: noise of the router and shared
# layers, biases that move, a second head, and each way of PEFT: stacked experts, transposed
# layers, prefixes.
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
        of = adapters if self.weights_file == ADAPTER else multi_token
        return of.state(self.model)


def build(name: str, adapter: str) -> Subject:
    settings = {"dropout": 0.1, **MODELS[name]}
    has_two_heads = settings.pop("multi_token", False)
    if adapter == "prefix":
        # Otherwise attention is so even that nothing put before the text could steer it.
        settings["init_std"] = 0.2
    network = tiny_model(**settings)
    if has_two_heads:
        multi_token.attach(network, MultiToken(), 1)
    if not adapter:
        return Subject(network)
    sizes = {"rank": 3, "virtual_tokens": 3, "row_length": 16, "tokens_per_step": 96}
    config = Lora.model_validate({"kind": adapter, **sizes})
    return Subject(adapters.attach(network, config), weights_file=ADAPTER)


def case_id(case: tuple[str, str]) -> str:
    name, adapter = case
    return f"{adapter} on {name}" if adapter else name


def learner_of(case: tuple[str, str]) -> Learner:
    lr = 0.2 if case[1] == "prefix" else 2e-2
    config = settings_of_training(optim=Optim(lr=lr))
    return replace(SOUND, config=config, build=partial(build, *case))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_it_sees_neither_the_future_nor_other_records_and_starts_at_knowing_nothing(
    case: tuple[str, str],
) -> None:
    learner = learner_of(case)
    check(model.future(learner))
    check(model.documents(learner))
    check(model.first_loss(learner))


@pytest.fixture(scope="module")
def steps_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, model.Step]]:
    """Each of two ranks after a step on the doctor's rows: two forks for all cases."""
    place = tmp_path_factory.mktemp("ranks")
    return in_ranks(2, place, lambda ranks: {case: first_step(case, ranks) for case in TRAINED})


def first_step(case: tuple[str, str], ranks: Ranks) -> model.Step:
    sample = unevenly_masked(select_rows(ROWS, model.ROWS))
    return model.first_step(learner_of(case), sample, ranks, rows_per_device=1)


@pytest.mark.parametrize("case", TRAINED, ids=case_id)
def test_how_rows_are_divided_does_not_matter(
    case: tuple[str, str], steps_of_ranks: list[dict[Any, model.Step]]
) -> None:
    check(model.accumulation(learner_of(case)))
    alone = first_step(case, Ranks(0, 1, CPU))
    of_ranks = [steps[case] for steps in steps_of_ranks]
    check(model.agreement(alone, of_ranks, "one process and two"))


@pytest.mark.parametrize("case", TRAINED, ids=case_id)
def test_it_resumes_to_the_bit_and_learns(case: tuple[str, str]) -> None:
    check(model.resume(learner_of(case)))
    check(model.learns(learner_of(case)))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_groups_do_not_look_like_a_leak(name: str) -> None:
    """With so many experts, groups of one or two tokens are common, whose last bits another token
    changes."""
    settings = {key: value for key, value in MODELS[name].items() if key != "multi_token"}
    settings["moe"] = {**settings["moe"], "experts": 32}
    network = partial(tiny_model, init_std=0.3, **settings)
    learner = replace(SOUND, build=lambda: Subject(network(hidden_size=64)))
    check(model.future(learner))


def test_a_checkpoint_of_every_architecture_opens_without_ttrain(tmp_path: Path) -> None:
    expected, directories = [], []
    for name in OPENED:
        subject = build(name, "")
        directory = tmp_path / name.replace(" ", "-")
        checkpoints = Checkpoints(directory, files=partial(factory.files, subject.model))
        learner = learner_of((name, ""))
        order = ShuffledOrder(len(ROWS), 4, 4, learner.config.seed)
        saving: dict[str, Any] = {"checkpoints": checkpoints, "cadence": Cadence(checkpoint=1)}
        trainer_of(learner, subject, ROWS, order, 4, **saving).fit()
        checkpoints.close()
        directories.append(list_checkpoints(directory)[-1])
        expected.append(last_logits(subject.model))
    # In a fork: a process of its own imports transformers for 5 s.
    modules = tmp_path / "modules"
    fork = tmp_path / "fork"
    [opened] = in_ranks(1, fork, lambda ranks: opened_without_ttrain(directories, modules))
    for name, ours, (package, theirs) in zip(OPENED, expected, opened, strict=True):
        has_code = name.startswith(OWN_CODE)
        assert package == ("transformers_modules" if has_code else "transformers")
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5, msg=f"the logits of {name}")


def opened_without_ttrain(directories: Sequence[Path], modules: Path) -> list[tuple[str, Tensor]]:
    """(package of the model's class, logits), without ttrain's modules and its registrations."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ttrain"]:
        sys.modules[name] = None  # type: ignore[assignment]  # to import it is an error
    for mapping in (auto.CONFIG_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._extra_content.clear()
    dynamic_module_utils.HF_MODULES_CACHE = str(modules)
    results = []
    for directory in directories:
        has_code = "auto_map" in json.loads((directory / "config.json").read_bytes())
        opened = auto.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=has_code)
        results.append((type(opened).__module__.partition(".")[0], last_logits(opened)))
    return results


def last_logits(network: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = network.eval()(torch.arange(9, 25)[None]).logits[0, -1]
    return logits
