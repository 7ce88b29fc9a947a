"""Which parts of URLs and which settings are secret; hidden values are filled in again."""

import pytest

from ttrain.config import Settings, flatten
from ttrain.core import redact
from ttrain.core.redact import HIDDEN, is_hidden, is_secret, masked, restored
from ttrain.errors import DataError

SECRET = "hunter2"
LOCATIONS = [
    (f"s3://key:a/{SECRET}/+b@bucket/x.jsonl", "s3://***@bucket/x.jsonl"),
    (f"s3://bucket/x.jsonl?versionId={SECRET}", "s3://bucket/x.jsonl?***"),
    (f"s3://bucket/x.jsonl#{SECRET}", "s3://bucket/x.jsonl#***"),
    (f"https://{SECRET}@host/x.jsonl", "https://***@host/x.jsonl"),
    (f"HTTPS://user:{SECRET}@[::1]:8443/x.jsonl", "HTTPS://***@[::1]:8443/x.jsonl"),
    (f"zip://in?.jsonl::https://u:{SECRET}@h/x.zip?a", "zip://in?.jsonl::https://***@h/x.zip?***"),
    (f"postgresql://user:p@{SECRET}@host/db", "postgresql://***@host/db"),
    (f"ftp://user:p@ss/{SECRET}@a/{SECRET}@host.org/x", "ftp://***@host.org/x"),
    (f"https://user:{SECRET}@host:80/a@b/x", "https://***@host:80/a@b/x"),
]
OPEN = ["/data/a?b#c@d.jsonl", "file:///data/a?b#c.jsonl", "hf://owner/name@main/part-?.jsonl"]
OPEN += ["s3://bucket/day=0?/part-?.jsonl", "s3://bucket/a#1.jsonl", "https://host:80/a@b/x.jsonl"]
OPEN += ["abfs://container@account.dfs.core.windows.net/x.jsonl", "zip://a.jsonl::https://host/x"]
SECRETS = "hf_token apiKey PASSWORD aws_secret_access_key x.access_key auth notify.webhook_url "
SECRETS += "a.private-key proxy.authorization user.pwd task.hubSecrets.first[0] DB_PASSWORD_1 "
SECRETS += "hub.refresh_tokens credentials.a"
NO_SECRETS = "pretrain.tokens tokens_per_step pad_token model.keys key_file secrets.file sft.author"


@pytest.mark.parametrize(("location", "shown"), LOCATIONS)
def test_a_url_is_shown_without_user_password_query_and_fragment(location: str, shown: str) -> None:
    assert redact.url(location) == redact.url(shown) == shown
    assert is_hidden(shown) and not is_hidden(location)
    assert redact.text(f"cannot read {location} now") == f"cannot read {shown} now"
    assert masked({"data.sft": [{"path": location}]}) == {"data.sft": [{"path": shown}]}
    assert SECRET not in str(DataError(f"{location} is corrupt"))
    data = {"sft": [location], "lora": [{"path": location, "weight": 2}]}
    settings = Settings.model_validate({"data": data})
    assert SECRET not in settings.model_dump_json()
    assert settings.data.sft == (location,), "within the process it is complete"


def test_a_text_keeps_open_urls_and_what_stands_around_them() -> None:
    assert masked({"data.sft": OPEN}) == {"data.sft": OPEN} and not any(map(is_hidden, OPEN))
    shown = redact.url("https://host/x.jsonl?sig=1")
    assert redact.text(f"{shown}:12: no text") == "https://host/x.jsonl?***:12: no text"
    assert redact.text("use ghp_" + "a" * 36 + " here") == "use *** here"
    assert redact.without_user("http://u:p@host:5000/x?y=1") == "http://host:5000/x?y=1"
    for words, shown in (
        (f"https://h/a b?sig={SECRET}&se=2026", "https://h/a b?sig=***&se=2026"),
        (f"X-Amz-Token={SECRET}, signature={SECRET}", "X-Amz-Token=***, signature=***"),
        (f"host=h user=u password={SECRET}", "host=h user=u password=***"),
        ("['https://a/x?1', 'https://u:p@b/y']", "['https://a/x?***', 'https://***@b/y']"),
        ("key=1a2b tokens=5 token=7 model.signature=x design=9",) * 2,
    ):
        assert redact.text(words) == redact.text(shown) == shown


def test_the_current_settings_fill_in_what_a_record_hides() -> None:
    user, query = "https://u:new@host/a.jsonl", "https://host/get?id=1"
    now = {"sft": (user, "b.jsonl"), "lora": ({"path": query, "weight": 3},), "pretrain": (query,)}
    record = {
        "sft": ["https://***@host/a.jsonl", "c.jsonl"],
        "lora": [{"path": "https://host/get?***", "weight": 2}],
        "pretrain": ["https://***@elsewhere/a.jsonl"],
    }
    expected = {"sft": [user, "c.jsonl"], "lora": [{"path": query, "weight": 2}]}
    assert restored({"data": record}, {"data": now})["data"] == {**record, **expected}


def test_a_secret_is_known_by_its_name() -> None:
    for name in (*SECRETS.split(), "my token"):
        assert masked({name: SECRET}) == {name: HIDDEN}
        assert masked({name: [SECRET]}) == {name: [HIDDEN]}
    for name in NO_SECRETS.split():
        assert not is_secret(name) and masked({name: "shown"}) == {name: "shown"}


def test_no_setting_of_ours_but_the_webhook_is_hidden() -> None:
    tree = Settings().model_dump(mode="json")
    assert {key for key, value in flatten(tree) if is_secret(key)} == {"notify.webhook"}
    assert Settings.model_validate(masked(tree)) == Settings()  # as deployments read them back
