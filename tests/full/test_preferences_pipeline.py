"""A pipeline with preference tuning: what it runs, measures and registers, and what another beta runs again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.pipeline_home import Cli

DPO = ("dpo.epochs=2", "dpo.tokens_per_step=512", "dpo.row_length=64", "dpo.validation_rows=16", "dpo.optim.lr=3e-3")
EVALUATED = ("evaluate.max_chats=40", "evaluate.max_bytes=1000")


@pytest.mark.soak  # its stages, plan, metrics and registered models are tested apart from each other
def test_pairs_are_learnt_measured_and_registered_and_another_beta_scores_no_reference_again(
    copy_of: Callable[..., Cli],
) -> None:
    cli = copy_of()
    pairs = [{"prompt": f"Is {n} right?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(300)]
    pairs += [{"prompt": f"对吗 {n}", "chosen": "对", "rejected": "错"} for n in range(100)]
    (cli.data / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    settings = (*DPO, *EVALUATED, f"data.dpo={cli.data / 'pairs.jsonl'}")
    cli.here("pipeline", "run", "full", "--engine", "none", *settings)
    run = cli.runs()[0]
    built = [stage["name"] for stage in run["stages"] if stage["outcome"] == "completed"]
    assert built == ["shards-dpo", "reference", "dpo", "lora", "evaluate"], "on the SFT model that is there"
    assert [stage["name"] for stage in run["stages"]][-4:] == built[1:]
    assert run["metrics"]["eval/preference_accuracy/dpo"] > 0.8 > run["metrics"]["eval/preference_accuracy/sft"]
    assert cli.to_run(*settings, "dpo.beta=0.2") == ["dpo", "lora", "evaluate"]
    [newest, *_] = json.loads(cli.in_process("models", "list", "--json", settings=False))
    assert "dpo" in json.dumps(newest)
    evaluated = json.loads(cli.in_process("eval", "dpo", "--limit", "10", "--json", settings=False))
    assert {"documents", "chats", "pairs"} <= {task["task"] for task in evaluated["tasks"]}
