"""Secrets in the URLs of data sources: the stages read with them, and nothing that stays behind holds them."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pipeline_home import Cli
from support.served import ended, serving, start
from support.web import Site, served

from ttrain.nightly.records import Nights

PASSWORD, SIGNATURE = "hunter2secret", "sig0f5ecret"
UP_TO_SHARDS = ("--until", "shards-sft", "--engine", "none")


@pytest.fixture
def site(empty: Cli) -> Iterator[Site]:
    files = {f"/data/{path.name}": path.read_bytes() for path in empty.data.glob("*.jsonl")}
    with served(Site(files)) as opened:
        yield opened


def url(site: Site, name: str) -> str:
    return f"{site.url.replace('://', f'://user:{PASSWORD}@')}/data/{name}?part=1&sig={SIGNATURE}"


def shown(site: Site, name: str) -> str:
    return f"{site.url.replace('://', '://***@')}/data/{name}?***"


def sources(cli: Cli, site: Site) -> list[str]:
    documents = sorted(path.name for path in cli.data.glob("docs*.jsonl"))
    named = {"pretrain": documents, "sft": ["chats.jsonl"], "lora": ["domain.jsonl"]}
    return [
        f"data.{name}={json.dumps([url(site, file) for file in files])}"
        for name, files in named.items()
    ]


def holding_secrets(*roots: Path) -> list[str]:
    paths = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [
        str(path)
        for path in paths
        if any(word.encode() in path.read_bytes() for word in (PASSWORD, SIGNATURE))
    ]


def open_to_others(directory: Path) -> list[str]:
    paths = [directory, *directory.rglob("*")]
    return [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_no_file_and_no_line_of_a_run_holds_the_secrets_of_its_sources(
    empty: Cli, site: Site
) -> None:
    own = [*sources(empty, site), "tracking.enabled=false"]
    said = empty.here("pipeline", "run", "full", "--until", "tokenizer", "--engine", "none", *own)
    said += empty.here("config", "show", *own)
    assert shown(site, "chats.jsonl") in said
    [record] = [json.loads(path.read_bytes()) for path in empty.home.glob("runs/*.json")]
    assert record["outcome"] == "completed" and record["settings"]["data"]["sft"] == [
        shown(site, "chats.jsonl")
    ]
    assert PASSWORD not in said and SIGNATURE not in said
    assert (
        len([path for path in empty.home.rglob("*") if path.is_file()]) > 8
        and holding_secrets(empty.home) == []
    )
    assert open_to_others(empty.home / "runs") == []


@pytest.mark.soak
def test_what_failed_keeps_no_secret_and_its_message_says_which_file(
    fresh: Cli, site: Site
) -> None:
    good, site.files["/data/chats.jsonl"] = site.files["/data/chats.jsonl"], b'{"no": JSON}\n' * 50
    own = sources(fresh, site)
    said = fresh.here("pipeline", "run", "full", *UP_TO_SHARDS, *own, code=1)
    assert f"{shown(site, 'chats.jsonl')}:1: " in said
    jobs = list(fresh.home.glob("work/shards-sft/*/job.json"))
    assert [stat.S_IMODE(job.stat().st_mode) for job in jobs] == [0o600], (
        "it had the URLs while its stage ran"
    )
    assert holding_secrets(fresh.home) == []
    site.files["/data/chats.jsonl"], site.failing = good, "/data/domain.jsonl"
    said += fresh("pipeline", "run", "full", *own, code=2)
    assert f"data.lora is '{shown(site, 'domain.jsonl')}' but it cannot be read: 503" in said
    assert PASSWORD not in said and SIGNATURE not in said and holding_secrets(fresh.home) == []


@pytest.mark.long
@pytest.mark.soak
def test_prefect_mlflow_a_night_and_a_deployment_get_no_secret_and_run(
    fresh: Cli, site: Site
) -> None:
    cli = fresh
    own = [*sources(cli, site), "nightly.data=all"]
    said = cli("pipeline", "run", "full", *own) + cli("pipeline", "run", "nightly", *own)
    said += cli("pipeline", "plan", "full", "--json", *own) + cli(
        "pipeline", "plan", "nightly", "--json", *own
    )
    again = ("pipeline", "rerun", "evaluate", "evaluate.new_tokens=6")
    assert "without its" in cli(*again, code=2, settings=False)
    for setting in sources(cli, site):
        key, _, value = setting.partition("=")
        cli.environment[f"TTRAIN__{key.upper().replace('.', '__')}"] = value
    said += cli(*again, settings=False)
    assert [stage["outcome"] for stage in cli.runs()[0]["stages"]].count("completed") == 1, (
        "the keys are the same"
    )
    for setting in sources(cli, site):
        del cli.environment[f"TTRAIN__{setting.partition('=')[0].upper().replace('.', '__')}"]
    [night] = Nights(cli.home, "tiny-test").newest_first()
    assert night.outcome == "promoted"
    assert [file["location"] for file in night.frozen.files["sft"]] == [shown(site, "chats.jsonl")]
    with serving(cli) as server:
        said += cli("pipeline", "schedule", "full", "--cron", "0 2 1 1 *", *own)
        server.wait_for("scheduled: full/tiny-test")
        run = ended(cli, start(cli, "evaluate.new_tokens=5"), server)
        assert run["state"]["type"] == "COMPLETED", server.said
        assert run["parameters"] == {"changes": ["evaluate.new_tokens=5"]}, (
            "no server has a setting"
        )
        said += server.said
    kept = cli.home / "schedules" / "full-tiny-test.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert holding_secrets(cli.home) == [str(kept)], (
        "what the deployment needs, for its owner alone"
    )
    assert PASSWORD not in said and SIGNATURE not in said
    assert open_to_others(cli.home / "runs") == [] == open_to_others(cli.home / "nightly")
