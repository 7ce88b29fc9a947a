"""Settings of nights. None enters a key, but for the replay, which shapes weights."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_serializer, field_validator

from ttrain.config.base import Count, Listed, Section, Seed, TimeOfDay, TimeZone, need, setting
from ttrain.config.training import BITS_PER_BYTE

FEWEST_RECORDS = (
    20  # held-out records below which no model is called better: see `ttrain.evaluate.task_result`
)
Event = Literal["failed", "completed", "promoted", "kept", "skipped", "unfinished"]
HIDDEN = "/***"  # stands for what follows a webhook's host


class Nightly(Section):
    """What a night trains."""

    start_from: Literal["champion", "scratch"] = setting(
        "champion",
        "pretraining continues the champion's base model, or begins anew on all documents; the "
        "tokenizer stays",
    )
    data: Literal["new", "all"] = setting(
        "new", "documents that the champion has not learnt, or all of them"
    )
    tokens: Count | None = setting(
        None,
        "budget of a night that continues the champion's base; empty, as epochs: that of pretrain",
        ge=1,
    )
    epochs: float | None = setting(
        None, "the same in passes over the night's documents, which are new ones", gt=0
    )
    rate: Literal["auto"] | Annotated[float, Field(gt=0)] = setting(
        0.5,
        "of the rates of pretrain.optim, where a night continues the champion's base: less is "
        "forgotten; auto: "
        "min(1, (8 / steps)^0.5), with pretrain.schedule.full_rate_steps in place of 8 where "
        "it is set",
    )
    replay: float = setting(
        0.05,
        "share of a night's tokens that the champion has learnt before, where data=new or "
        "chats=new; 0: none",
        ge=0,
        lt=1,
    )
    again: bool = setting(
        True,
        "documents of a night that was not promoted are read once more, beside newer ones; "
        "false: never",
    )
    chats: Literal["all", "new"] = setting(
        "all", "chats that SFT learns: all, or those of new files beside `replay` of learnt ones"
    )
    sft_base: Literal["new", "champion"] = setting(
        "new", "SFT starts anew from the night's base model, or continues the champion's SFT model"
    )
    lora_base: Literal["new", "champion"] = setting(
        "new",
        "an adapter is trained again on the night's model, or stays with the model that the "
        "champion's adapter "
        "belongs to, and is trained again only on new chats",
    )
    deadline: TimeOfDay | None = setting(None, "hour:minute when a night saves its state and stops")
    deadline_hours: float | None = setting(None, "the same, so long after the night began", gt=0)
    timezone: TimeZone | None = setting(
        None, "of the deadline, such as Europe/Berlin; empty: the machine's own"
    )
    attempts: int = setting(
        2, "nights in which the same list of files may fail before it is given up", ge=1
    )

    def check_values(self) -> None:
        need(
            self.tokens is None or self.epochs is None,
            f"nightly.tokens is {self.tokens} and nightly.epochs is {self.epochs}; set one of them",
        )
        need(
            self.deadline is None or self.deadline_hours is None,
            f"nightly.deadline is {self.deadline} and nightly.deadline_hours is "
            f"{self.deadline_hours}; set one of them",
        )


class Promotion(Section):
    """When a challenger becomes champion."""

    metric: str = setting(
        BITS_PER_BYTE.name, "of the evaluation, on the same held-out data", min_length=1
    )
    higher_is_better: bool = setting(
        False, "where the evaluation does not know; of a suite's figures it does"
    )
    margin: float = setting(0.0, "the challenger must be better by more than this", ge=0)
    confidence: float = setting(
        0.95,
        "of the paired bootstrap interval, whose lower end must exceed the margin",
        gt=0.5,
        lt=1,
    )
    resamples: int = setting(2000, "of the bootstrap; 0: the figures alone decide", ge=0)
    min_samples: int = setting(
        FEWEST_RECORDS, "held-out records below which no challenger is promoted", ge=2
    )
    seed: Seed = setting(1, "of the paired resampling")
    forgetting: float | None = setting(
        0.03,
        "share of the champion's figure by which the challenger may be worse on the held-out "
        "text of an earlier "
        "night or of a source, or in the metric of another model, and of the best figure that a "
        "champion had on the text of "
        "a night; empty: any share",
        ge=0,
    )
    baseline: Literal["zlib", "xz", "order0", "order3"] | float | None = setting(
        "xz",
        "what a first champion must beat: a baseline, in bits per byte of the base model, or a "
        "value of the "
        "metric; empty: nothing",
    )


class Notify(Section):
    """Notifications. Nothing leaves the machine unless it is set here."""

    command: Annotated[tuple[str, ...], Listed] = setting(
        (), "program and arguments, no shell; the message is JSON on stdin"
    )
    webhook: str | None = setting(
        None,
        "URL to which the message is posted as JSON; shown and recorded without its path, which "
        "can be secret",
    )
    webhook_file: str | None = setting(
        None,
        "file that holds this URL; for nights of a schedule, which keeps settings as they "
        "are shown",
    )
    on: Annotated[tuple[Event, ...], Listed] = setting(
        ("failed", "completed", "promoted", "skipped"),
        "events that send a notification; failed and completed also of runs of full",
    )
    timeout_seconds: float = setting(10.0, "for the program, and for the URL", gt=0)

    @field_validator("webhook")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is None or value.endswith(HIDDEN):  # from a record, in which it is hidden
            return None
        need(
            re.fullmatch(r"https?://\S+", value) is not None,  # the value itself is not shown
            "notify.webhook must be a URL that begins with http:// or https://; set "
            "notify.webhook=https://...",
        )
        return value

    @field_serializer("webhook", when_used="json")
    def _hide(self, value: str | None) -> str | None:
        return value and f"{urlsplit(value).scheme}://{urlsplit(value).hostname}{HIDDEN}"

    def check_values(self) -> None:
        need(
            not (self.webhook and self.webhook_file),
            f"notify.webhook and notify.webhook_file={self.webhook_file} are both set; set "
            "one of them",
        )
