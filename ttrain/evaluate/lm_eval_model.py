"""A subject as lm-evaluation-harness asks its models; also for `lm_eval.simple_evaluate(model=HarnessModel(...))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ttrain.errors import UsageError
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.generation import answers
from ttrain.evaluate.log_likelihood import beginning, log_likelihoods
from ttrain.evaluate.tree_attention import Scorer

DEFAULT_LENGTH, DEFAULT_TOKENS = 2048, 256  # as the harness's own model has them


class HarnessModel(LM):  # type: ignore[misc]  # the harness is not typed here
    """Answers the three kinds of requests that tasks make."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        super().__init__()
        self._subject, self._progress = subject, progress

    def loglikelihood(self, requests: Sequence[Instance], **others: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is what the model would say) of each continuation after its context."""
        found = log_likelihoods(self._subject, [request.args for request in requests], self._progress)
        return [(-one.nats, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance], **others: Any) -> list[float]:
        """The log-likelihood of each whole text, in the harness's windows: they share one token, the last one is full."""
        encoded = self._subject.encoder.encode([request.args[0] for request in requests])
        start = beginning(self._subject)[-1]
        pairs, owners = [], []
        for number, ids in enumerate(encoded):
            windows = get_rolling_token_windows(
                token_list=[*self._subject.begin_ids, *ids], prefix_token=start,
                max_seq_len=self._subject.max_length or DEFAULT_LENGTH, context_len=1,
            )  # fmt: skip
            for window in windows:
                context, continuation = make_disjoint_window(window)
                pairs.append((tuple(context), tuple(continuation)))
                owners.append(number)
        found = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, Scorer(self._subject).score(pairs, self._progress), strict=True):
            found[number] -= nats
        return found

    def generate_until(self, requests: Sequence[Instance], **others: Any) -> list[str]:
        """The greedy answer to each prompt, up to the first of the texts that end it."""
        found = [""] * len(requests)
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            told = dict(request.args[1])
            if told.get("do_sample"):
                raise UsageError(f"task {request.task_name} wants answers that are drawn; ttrain's evaluation is greedy")
            until = told.get("until") or ()
            stops = (until,) if isinstance(until, str) else tuple(until)
            tokens = next(
                (told[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if told.get(key)), DEFAULT_TOKENS
            )
            alike.setdefault((stops, int(tokens)), []).append(number)
        for (stops, tokens), numbers in alike.items():
            limit = self._subject.max_length
            room = tokens if limit is None else min(tokens, limit // 2)
            encoded = self._subject.encoder.encode([requests[number].args[0] for number in numbers])
            prompts = [[*self._subject.begin_ids, *ids] for ids in encoded]
            if limit is not None:
                prompts = [ids[-(limit - room) :] for ids in prompts]
            for number, (text, _) in zip(numbers, answers(self._subject, prompts, room, stops, self._progress), strict=True):
                found[number] = text
        return found
