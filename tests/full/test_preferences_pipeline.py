"""A pipeline with preference tuning: what it runs, measures and registers, and what another beta runs again."""

from __future__ import annotations

import json

from support.pipeline_home import Cli

SMALL = (
    *("dpo.epochs=2", "dpo.tokens_per_step=512", "dpo.row_length=64", "dpo.validation_rows=16", "dpo.optim.lr=3e-3"),
    *("pretrain.tokens=4096", "sft.epochs=0.3", "lora.epochs=0.2", "evaluate.max_chats=40", "evaluate.max_bytes=1000"),
)


def test_pairs_are_learnt_measured_and_registered_and_another_beta_scores_no_reference_again(
    fresh: Cli,
) -> None:
    cli = fresh
    pairs = [{"prompt": f"Is {n} right?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(150)]
    pairs += [{"prompt": f"对吗 {n}", "chosen": "对", "rejected": "错"} for n in range(50)]
    (cli.data / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    settings = (*SMALL, f"data.dpo={cli.data / 'pairs.jsonl'}", "reading.heldout_fraction=0.1")
    cli.here("pipeline", "run", "full", "--engine", "none", *settings)
    run = cli.runs()[0]
    assert [stage["name"] for stage in run["stages"]][-4:] == ["reference", "dpo", "lora", "evaluate"]
    assert run["metrics"]["eval/preference_accuracy/dpo"] > 0.8 > run["metrics"]["eval/preference_accuracy/sft"]
    assert cli.to_run(*settings, "dpo.beta=0.2") == ["dpo", "lora", "evaluate"]
    [newest, *_] = json.loads(cli.in_process("models", "list", "--json", settings=False))
    assert "dpo" in json.dumps(newest)
    evaluated = json.loads(cli.in_process("eval", "dpo", "--limit", "10", "--json", settings=False))
    assert {"documents", "chats", "pairs"} <= {task["task"] for task in evaluated["tasks"]}
