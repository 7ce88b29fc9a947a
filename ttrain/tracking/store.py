"""One experiment of one MLflow: starts runs, registers models, and keeps what a silent server missed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, final
from urllib.parse import quote

from ttrain.tracking import sets
from ttrain.tracking.calls import clean, code_of, first_line, is_refusal, outcome, shown, unless_there
from ttrain.tracking.database import artifacts_of
from ttrain.tracking.runs import NullRun, Run

log = logging.getLogger("ttrain")
Result = TypeVar("Result")

PROBE_SECONDS = 3.0  # one question to a silent server, instead of the client's two times ten seconds
REST_SECONDS = 10.0  # between questions on behalf of what can wait: a hung server costs a stage a quarter of its time


@final
class Store:
    """One experiment of one MLflow, shared by threads; made by `open_store`."""

    def __init__(self, client: Any, uri: str, home: Path, experiment: str) -> None:
        self.client, self.uri = client, uri
        self.is_http = uri.startswith(("http://", "https://"))
        self.gave_up = False
        self._experiment, self._experiment_id = experiment, ""
        # A server chooses the place itself; everything else would write below the working directory
        self._place = None if self.is_http or uri.startswith(("databricks", "uc")) else artifacts_of(home)
        self._silent = self.is_http  # until /health has answered
        self._ask_again = 0.0
        self._warned: set[str] = set()
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._queue = threading.Lock()
        # SQLite has one writer anyway; without turns, threads met "database is locked" in 6 of 1803 (mlflow #20014)
        turn: contextlib.AbstractContextManager[object] = threading.RLock()
        self._turn = contextlib.nullcontext() if self.is_http else turn

    def start_run(
        self,
        name: str,
        *,
        run_id: str | None,
        parent_run_id: str | None,
        tags: Mapping[str, str],
        params: Mapping[str, object],
    ) -> Run | NullRun:
        """A new run, or the one of `run_id` continued; a NullRun that keeps `run_id` when MLflow fails."""
        parent = {"mlflow.parentRunId": parent_run_id} if parent_run_id else {}  # the tag by which the UI nests
        all_tags = {clean(key): str(value) for key, value in {**tags, **parent}.items()}
        what = f"starting the run {name}"
        entity, _ = self.tried(what, lambda: self._continued(run_id) or self._created(name, all_tags))
        if entity is None:
            return NullRun(run_id)
        run = Run(self, entity)
        if run.id == run_id:
            run.set_tags(all_tags)
        run.log_params(params)
        return run

    def register_model(self, name: str, *, run: Run | NullRun, artifact_path: str, tags: Mapping[str, str]) -> str | None:
        """The version of the registered model whose files the run holds under `artifact_path`; None when MLflow fails.

        A version with the same tags `ttrain.key` and `ttrain.content` is returned instead of making another.
        """
        if isinstance(run, NullRun):
            return None
        return self.tried(f"registering {name}", lambda: self._register(name, run, artifact_path, tags))[0]

    def find_model(self, name: str, tags: Mapping[str, str]) -> str | None:
        """The version of a registered model that has these tags' `ttrain.key` and `ttrain.content`; None where none has."""
        return self.tried(f"looking for {name}", lambda: self._same(name, tags))[0]

    def register_set(self, name: str, *, run: Run | NullRun, tags: Mapping[str, str]) -> str | None:
        """The version of the registered model `name` that is this set of models (`sets.register`); None when MLflow
        fails."""
        if isinstance(run, NullRun):
            return None
        return self.tried(f"registering the set {name}", lambda: sets.register(self.client, name, run, tags))[0]

    def end_run(self, run_id: str, status: str) -> None:
        """End a run whose process is gone, and its children, where they still seem to run."""
        self.tried(f"ending the run {run_id}", lambda: self._end_family(run_id, status))

    def experiment_id(self) -> str:
        """Id of the experiment, which is made or restored where needed; raises when MLflow does."""
        if not self._experiment_id:
            found = self.client.get_experiment_by_name(self._experiment)
            if found is None:
                unless_there(partial(self.client.create_experiment, self._experiment, self._place))
                found = self.client.get_experiment_by_name(self._experiment)
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)  # MLflow lets no other take its name
            self._experiment_id = str(found.experiment_id)
            # MLflow's pages open on training runs, not on its pages for agents and traces.
            self.client.set_experiment_tag(self._experiment_id, "mlflow.experimentKind", "custom_model_development")
        return self._experiment_id

    def tried(self, what: str, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Runs one call, after those that wait; warns of its error and returns it. Soon back from a silent server."""
        if not self._rests():
            self._deliver()
        result, error = self.once(action)
        if error is not None:
            self.warn(what, error)
        return result, error

    def later(self, what: str, action: Callable[[], object], *, insist: bool = False) -> None:
        """Runs a small call now, or when the server answers again; to insist is to ask one that was just silent."""
        self._waiting.append((what, action))
        if insist or not self._rests():
            self._deliver()

    def warn(self, what: str, error: Exception) -> None:
        """Warns once about each thing, and once about a server that does not answer."""
        kind = "silent" if self._silent else what
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("MLflow at %s: %s failed, the pipeline goes on: %s", shown(self.uri), what, first_line(error))

    def _rests(self) -> bool:
        return self._silent and time.monotonic() < self._ask_again

    def _deliver(self) -> None:
        """Runs what waits; a refused call is dropped, a failed one goes to the end, where it blocks no other."""
        with self._queue:
            for _ in range(len(self._waiting)):
                what, action = self._waiting.popleft()
                _, error = self.once(action)
                if error is not None:
                    self.warn(what, error)
                    if not is_refusal(error):
                        self._waiting.append((what, action))
                    if self._rests():
                        return

    def once(self, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Runs one call now; its result, or its error as a value, without a warning. Soon back from a silent server."""
        if self._silent and (silence := self._probe()) is not None:
            return None, silence
        with self._turn:
            result, error = outcome(action)
        self._silent = self.is_http and error is not None and not is_refusal(error)
        return result, error

    def _probe(self) -> Exception | None:
        """One short question to the server; None when it answers."""
        request, host = import_module("mlflow.utils.rest_utils"), import_module("mlflow.utils.credentials")
        ask = partial(request.http_request, timeout=PROBE_SECONDS, max_retries=0, raise_on_status=False)
        answer, error = outcome(lambda: ask(host.get_default_host_creds(self.uri), "/health", "GET"))
        if answer is not None and answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            error = ConnectionError(f"the server answers with HTTP {answer.status_code}")
        self._silent = error is not None
        self._ask_again = time.monotonic() + REST_SECONDS
        return error

    def _created(self, name: str, tags: Mapping[str, str]) -> Any:
        return self.client.create_run(self.experiment_id(), run_name=name, tags=tags)

    def _continued(self, run_id: str | None) -> Any:
        """The run, set to RUNNING; None where it is gone or was deleted by the user."""
        if run_id is None:
            return None
        try:
            run = self.client.get_run(run_id)
        except Exception as error:
            if code_of(error) == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        self.client.update_run(run_id, status="RUNNING")
        return run

    def _end_family(self, run_id: str, status: str) -> None:
        children = f"tags.`mlflow.parentRunId` = '{run_id}'"
        family = [self.client.get_run(run_id), *self.client.search_runs([self.experiment_id()], children)]
        for run in family:
            if run.info.status == "RUNNING":
                self.client.set_terminated(run.info.run_id, status)

    def _register(self, name: str, run: Run, artifact_path: str, tags: Mapping[str, str]) -> str:
        # A plain directory is a fine source. "runs:/..." would be one too, but MLflow copies that into a temporary
        # directory at each download, where an absolute location is used in place.
        source = f"{run.artifact_uri}/{quote(artifact_path) if run.artifact_uri.startswith('file:') else artifact_path}"
        unless_there(partial(self.client.create_registered_model, name))
        if (there := self._same(name, tags)) is not None:
            return there
        made = self.client.create_model_version(name, source, run.id, tags=dict(tags), await_creation_for=0)
        first = self._same(name, tags) or str(made.version)
        if first != str(made.version):  # another home registered it between the question and the answer
            self.client.delete_model_version(name, str(made.version))
        return first

    def _same(self, name: str, tags: Mapping[str, str]) -> str | None:
        versions = sets.all_pages(partial(self.client.search_model_versions, f"name='{name}'"))
        same = [
            int(version.version)
            for version in versions
            if all(tag in tags and version.tags.get(tag) == tags[tag] for tag in ("ttrain.key", "ttrain.content"))
        ]
        return str(min(same)) if same else None


@final
class NullStore:
    """Stands in where MLflow is missing or switched off."""

    def start_run(self, name: str, *, run_id: str | None, **_: object) -> NullRun:
        """A run that is not tracked."""
        return NullRun(run_id)

    def end_run(self, run_id: str, status: str) -> None:
        """Ends nothing."""

    def register_model(self, name: str, **_: object) -> str | None:
        """Registers nothing."""
        return None

    def find_model(self, name: str, tags: Mapping[str, str]) -> str | None:
        """Finds nothing."""
        return None

    def register_set(self, name: str, **_: object) -> str | None:
        """Registers nothing."""
        return None
