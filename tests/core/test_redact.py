"""What is secret in a URL or a setting, and what only looks so; that records are enough to take the secrets up again."""

from __future__ import annotations

import pytest

from ttrain.config import Settings, flatten
from ttrain.core import redact
from ttrain.core.redact import HIDDEN, is_hidden, is_secret, masked, restored
from ttrain.errors import DataError

SECRET = "hunter2"
LOCATIONS = [
    (f"s3://key:{SECRET}@bucket/x.jsonl", "s3://***@bucket/x.jsonl"),
    (f"s3://key:a/{SECRET}/+b@bucket/x.jsonl", "s3://***@bucket/x.jsonl"),
    (f"s3://bucket/x.jsonl?versionId={SECRET}", "s3://bucket/x.jsonl?***"),
    (f"s3://bucket/x.jsonl#{SECRET}", "s3://bucket/x.jsonl#***"),
    (f"https://{SECRET}@host/x.jsonl", "https://***@host/x.jsonl"),
    (f"https://user:p@{SECRET}@host/x.jsonl", "https://***@host/x.jsonl"),
    (f"https://host/x.jsonl?sv=1&sig={SECRET}", "https://host/x.jsonl?***"),
    (f"HTTPS://user:{SECRET}@[::1]:8443/x.jsonl", "HTTPS://***@[::1]:8443/x.jsonl"),
    (
        f"simplecache::https://user:{SECRET}@host/x.jsonl?a={SECRET}",
        "simplecache::https://***@host/x.jsonl?***",
    ),
    (
        f"zip://in?.jsonl::https://u:{SECRET}@host/x.zip?{SECRET}",
        "zip://in?.jsonl::https://***@host/x.zip?***",
    ),
    (f"postgresql://user:p@{SECRET}@host/db", "postgresql://***@host/db"),
    (f"ftp://user:p@ss/{SECRET}@a/{SECRET}@host.org/x", "ftp://***@host.org/x"),
    (f"https://user:{SECRET}@host:80/a@b/x", "https://***@host:80/a@b/x"),
]
OPEN = [
    "/data/a?b#c@d.jsonl",
    "file:///data/a?b#c.jsonl",
    "data/*.jsonl",
    "python-docs",
    "hf://owner/name@main/data/part-?.jsonl",
    "s3://bucket/day=0?/part-?.jsonl",
    "s3://bucket/a#1.jsonl",
    "https://host:8443/a@b/x.jsonl",
    "http://[::1]:80/a@b/x.jsonl",
    "abfs://container@account.dfs.core.windows.net/x.jsonl",
    "zip://a.jsonl::https://host/x.zip",
]


@pytest.mark.parametrize(("location", "shown"), LOCATIONS)
def test_a_url_is_shown_without_user_password_query_and_fragment(location: str, shown: str) -> None:
    assert (
        redact.url(location) == redact.url(shown) == shown
        and is_hidden(shown)
        and not is_hidden(location)
    )
    for words in (f"cannot read {location} now", f"cannot read {shown} now"):
        assert redact.text(words) == f"cannot read {shown} now"
    assert masked({"data.sft": [{"path": location}]}) == {"data.sft": [{"path": shown}]}
    assert SECRET not in str(DataError(f"{location} is corrupt"))
    tree = Settings.model_validate(
        {"data": {"sft": [location], "lora": [{"path": location, "weight": 2}]}}
    )
    assert SECRET not in tree.model_dump_json()
    assert tree.model_dump()["data"]["sft"] == (location,), (
        "only what leaves the process is without it"
    )


def test_a_path_or_an_open_url_is_shown_as_it_is() -> None:
    assert [
        location for location in OPEN if redact.url(location) != location or is_hidden(location)
    ] == []
    assert masked({"data.sft": OPEN}) == {"data.sft": OPEN}


def test_a_text_keeps_what_stands_around_its_urls() -> None:
    shown = redact.url("https://host/x.jsonl?sig=1")
    assert redact.text(f"{shown}:12: no text") == "https://host/x.jsonl?***:12: no text"
    assert (
        redact.text("['https://a/x?1', 'https://u:p@b/y']")
        == "['https://a/x?***', 'https://***@b/y']"
    )
    page = "http://127.0.0.1:5000/#/experiments/1/runs/2"
    assert redact.text(f"see {page}") == f"see {page}", "the address of a page is no source of data"
    assert redact.text("use ghp_" + "a" * 36 + " here") == "use *** here"
    assert redact.without_user("http://u:p@host:5000/x?y=1") == "http://host:5000/x?y=1"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (f"https://h/a b?sig={SECRET}&se=2026", "https://h/a b?sig=***&se=2026"),
        (
            f"no file a b.jsonl?sv=1&X-Amz-Signature={SECRET}",
            "no file a b.jsonl?sv=1&X-Amz-Signature=***",
        ),
        (f"GET /a?token={SECRET} HTTP/1.1", "GET /a?token=*** HTTP/1.1"),
        (
            f"X-Amz-Security-Token={SECRET}, signature={SECRET}",
            "X-Amz-Security-Token=***, signature=***",
        ),
        (f"host=h user=u password={SECRET}", "host=h user=u password=***"),
        (
            "key=1a2b tokens=5 token=7 model.signature=x design=9",
            "key=1a2b tokens=5 token=7 model.signature=x design=9",
        ),
    ],
)
def test_secret_parameters_are_hidden_wherever_a_text_has_them(words: str, shown: str) -> None:
    assert redact.text(words) == redact.text(shown) == shown


def test_a_name_is_secret_by_its_words_whatever_stands_between_and_after_them() -> None:
    secret = (
        "api_key_2",
        "DB_PASSWORD_1",
        "gateway.password_1",
        "hub_token_2",
        "my token",
        "secrets[0].x",
        "credentials.a",
    )
    assert [name for name in secret if not is_secret(name)] == []
    assert not any(
        map(
            is_secret,
            ("tokens", "pad_token", "tokens_per_step", "key_file", "webhook_file", "secrets_path"),
        )
    )


def test_the_current_settings_fill_in_what_a_record_hides() -> None:
    here, there = "https://u:new@host/a.jsonl", "https://host/get?id=1"
    now = {
        "data": {
            "sft": (here, "b.jsonl"),
            "lora": ({"path": there, "weight": 3},),
            "pretrain": (there,),
        }
    }
    record = {
        "data": {
            "sft": ["https://***@host/a.jsonl", "c.jsonl"],
            "lora": [{"path": "https://host/get?***", "weight": 2}],
            "pretrain": ["https://***@elsewhere/a.jsonl"],
        }
    }
    assert restored(record, now)["data"] == {
        "sft": [here, "c.jsonl"],
        "lora": [{"path": there, "weight": 2}],
        "pretrain": record["data"]["pretrain"],
    }


SECRETS = (
    "hub.token",
    "hf_token",
    "apiKey",
    "db.password",
    "PASSWORD",
    "aws_secret_access_key",
    "notify.webhook_url",
    "a.private-key",
    "auth",
    "proxy.authorization",
    "x.credentials",
    "x.access_key",
    "tokens.token",
    "user.pwd",
    "task.secrets.wandb",
    "task.hubSecrets.first[0]",
    "hub.refresh_tokens",
)
NO_SECRETS = (
    "pretrain.tokens",
    "tokens_per_step",
    "tokenizer.vocab_size",
    "tokenizer.eos_token",
    "multi_token",
    "model.keys",
    "key",
    "notify.webhook_file",
    "secret_file",
    "sft.author",
    "attention",
    "secrets.file",
    "credentials.path",
    "pretrain.validation_tokens",
)


def test_a_secret_is_known_by_its_name_and_what_only_sounds_like_one_is_shown() -> None:
    assert masked(dict.fromkeys(SECRETS, SECRET)) == dict.fromkeys(SECRETS, HIDDEN)
    assert masked({name: [SECRET] for name in SECRETS}) == {name: [HIDDEN] for name in SECRETS}
    assert masked(dict.fromkeys(NO_SECRETS, "shown")) == dict.fromkeys(NO_SECRETS, "shown")


def test_no_setting_of_ours_but_the_webhook_is_hidden() -> None:
    tree = Settings().model_dump(mode="json")
    assert {key for key, value in flatten(tree) if is_secret(key)} == {"notify.webhook"}
    assert Settings.model_validate(masked(tree)) == Settings(), (
        "deployments have them as parameters, and read them back"
    )
