"""Secrets in the URLs of data sources: the stages read with them, and nothing left holds them."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pipeline_home import Cli
from support.served import ended, serving, start
from support.web import Site, served

from ttrain.nightly.records import Nights

PASSWORD = "hunter2secret"
SIGNATURE = "sig0f5ecret"
FULL = ("pipeline", "run", "full")
ALONE = ("--engine", "none")


@pytest.fixture
def site(fresh: Cli) -> Iterator[Site]:
    files = {f"/data/{path.name}": path.read_bytes() for path in fresh.data.glob("*.jsonl")}
    with served(Site(files)) as opened:
        yield opened


def shown(site: Site, name: str) -> str:
    return f"{site.url.replace('://', '://***@')}/data/{name}?***"


def sources(cli: Cli, site: Site) -> list[str]:
    place = site.url.replace("://", f"://user:{PASSWORD}@")
    documents = sorted(path.name for path in cli.data.glob("docs*.jsonl"))
    names = {"pretrain": documents, "sft": ["chats.jsonl"], "lora": ["domain.jsonl"]}
    query = f"part=1&sig={SIGNATURE}"
    urls = {key: [f"{place}/data/{name}?{query}" for name in names[key]] for key in names}
    return [f"data.{key}={json.dumps(urls[key])}" for key in urls]


def files_with_secrets(root: Path) -> list[str]:
    contents = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    words = (PASSWORD.encode(), SIGNATURE.encode())
    return [str(path) for path, data in contents.items() if any(word in data for word in words)]


def open_to_others(directory: Path) -> list[str]:
    paths = [directory, *directory.rglob("*")]
    return [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_no_file_and_no_line_of_a_run_holds_its_secrets(fresh: Cli, site: Site) -> None:
    own = [*sources(fresh, site), "tracking.enabled=false"]
    said = fresh.here(*FULL, "--until", "tokenizer", *ALONE, *own)
    said += fresh.here("config", "show", *own)
    assert shown(site, "chats.jsonl") in said
    [record] = [json.loads(path.read_bytes()) for path in fresh.home.glob("runs/*.json")]
    assert record["outcome"] == "completed"
    assert record["settings"]["data"]["sft"] == [shown(site, "chats.jsonl")]
    assert PASSWORD not in said and SIGNATURE not in said
    assert files_with_secrets(fresh.home) == [] == open_to_others(fresh.home / "runs")


@pytest.mark.soak
def test_what_failed_keeps_no_secret_and_names_its_file(fresh: Cli, site: Site) -> None:
    good = site.files["/data/chats.jsonl"]
    site.files["/data/chats.jsonl"] = b'{"no": JSON}\n' * 50
    own = sources(fresh, site)
    said = fresh.here(*FULL, "--until", "shards-sft", *ALONE, *own, code=1)
    assert f"{shown(site, 'chats.jsonl')}:1: " in said
    [job] = fresh.home.glob("work/shards-sft/*/job.json")
    assert stat.S_IMODE(job.stat().st_mode) == 0o600, "it had the URLs while its stage ran"
    assert files_with_secrets(fresh.home) == []
    site.files["/data/chats.jsonl"] = good
    site.failing = "/data/domain.jsonl"
    said += fresh(*FULL, *own, code=2)
    assert f"data.lora is '{shown(site, 'domain.jsonl')}' but it cannot be read: 503" in said
    assert PASSWORD not in said and SIGNATURE not in said and files_with_secrets(fresh.home) == []


@pytest.mark.long
@pytest.mark.soak
def test_servers_nights_and_deployments_get_no_secret(fresh: Cli, site: Site) -> None:
    own = [*sources(fresh, site), "nightly.data=all"]
    said = ""
    for command in ("run", "plan"):
        options = ["--json"] if command == "plan" else []
        for pipeline in ("full", "nightly"):
            said += fresh("pipeline", command, pipeline, *options, *own)
    [night] = Nights(fresh.home, "tiny-test").newest_first()
    assert night.outcome == "promoted"
    assert [file["location"] for file in night.frozen.files["sft"]] == [shown(site, "chats.jsonl")]
    with serving(fresh) as server:
        said += fresh("pipeline", "schedule", "full", "--cron", "0 2 1 1 *", *own)
        server.wait_for("scheduled: full/tiny-test")
        run = ended(fresh, start(fresh, "evaluate.new_tokens=5"), server)
        assert run["state"]["type"] == "COMPLETED", server.said
        said += server.said
    kept = fresh.home / "schedules" / "full-tiny-test.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    # What the deployment needs, for its owner alone
    assert files_with_secrets(fresh.home) == [str(kept)]
    assert PASSWORD not in said and SIGNATURE not in said
    assert open_to_others(fresh.home / "runs") == [] == open_to_others(fresh.home / "nightly")
