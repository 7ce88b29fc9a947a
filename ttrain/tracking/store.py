"""One experiment of one MLflow: starts runs, and tells MLflow what their outboxes hold, now or when it answers again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ttrain.core.redact import without_user
from ttrain.core.sqlite_files import is_damage
from ttrain.tracking import client as asking
from ttrain.tracking import outbox, outboxes, run_binding
from ttrain.tracking.atomic_files import local_path
from ttrain.tracking.calls import RefusedError, is_refusal, outcome, unless_there
from ttrain.tracking.client import Asking
from ttrain.tracking.database import REPAIR, artifacts_of, database_of, open_client
from ttrain.tracking.delivery_types import KINDS
from ttrain.tracking.journal import Entry
from ttrain.tracking.mlflow_setup import silence, tracking_uri
from ttrain.tracking.model_versions import Versions
from ttrain.tracking.null_tracker import NullRun
from ttrain.tracking.orphaned_outbox import remove_unmade, tell_one
from ttrain.tracking.retry_thread import Courier
from ttrain.tracking.runs import Run, clean_tags
from ttrain.tracking.safe_names import run_name
from ttrain.tracking.uploads import Progress

log = logging.getLogger("ttrain")
COUNTED: Final = {"rows": "metrics", "follow": "metrics"}

REST_SECONDS = 2.0  # before a silent server is asked again; doubled each time, up to half a minute
TAKE_SECONDS = 20.0  # until another process has told what an earlier process left of a run that goes on here
UPLOADS_STALL_SECONDS = 60.0  # without a byte: at the end of a run, uploads are waited for no longer


@final
class Store:
    """One experiment of one MLflow, shared by threads; made by `open_store`, to be closed."""

    def __init__(self, client: Any, uri: str, home: Path, experiment: str) -> None:
        self.client, self.uri, self.home = client, uri, home
        self.asking = Asking(uri, is_own=self.tracker == "")
        self.is_http = self.asking.is_http
        self.versions = Versions(client)
        self.progress = Progress()
        self.counts: dict[str, int] = {}  # what arrived: metrics, parameters, ...; "lost": what never can
        self._experiment, self._experiment_ids = experiment, dict[str, str]()
        # A server chooses the place itself; everything else would write below the working directory
        self._place = None if self.is_http or uri.startswith(("databricks", "uc")) else artifacts_of(home)
        self._open: dict[str, Run] = {}  # by the id of their outbox
        self._opening = threading.RLock()
        self._may_tell_earlier = self._upload_failed = False
        self.turn = self.asking.turn
        rest = lambda: REST_SECONDS if self.is_http else 0.2  # noqa: E731
        self._courier = Courier("tracking", partial(self._deliver_all, uploads=False), rest)
        self._uploader = Courier("tracking-uploads", partial(self._deliver_all, uploads=True), rest)

    def start_run(
        self,
        name: str,
        *,
        run_id: str | None = None,
        identity: str | None = None,
        parent: Run | NullRun | None = None,
        parent_run_id: str | None = None,
        tags: Mapping[str, str],
        params: Mapping[str, object],
        started: float | None = None,
        keeps_files: bool = False,
    ) -> Run | NullRun:
        """A new run, or one continued: that of MLflow's `run_id`, or of the `identity` that it had here before.

        `started`: in seconds since 1970, where it was not now. `keeps_files`: the files of the artifact that it leaves go to
        MLflow, also where its process is killed before that.
        A server that is silent is told later; the run's `id` is None until then.
        """
        given = clean_tags({**tags, **({run_binding.PARENT: parent_run_id} if parent_run_id else {})})
        about: dict[str, Any] = {"name": run_name(name), "tags": given, "parent_run_id": parent_run_id}
        about |= {"parent": parent.identity if parent else None, "keeps_files": keeps_files}
        if started is not None:
            about["started"] = started
        run = self._open_run(identity, run_id, about, parent if isinstance(parent, Run) else None)
        self.told(f"starting the run {name}", lambda: None, run)
        if run.is_again:
            run.tell("continued", values=given)
        run.log_params(params)
        return run

    def run_of(self, run_id: str) -> Run:
        """A run that is in MLflow, to say more about it, or nothing where it is gone."""
        about = {"name": run_id, "tags": {}, "ended": True, "is_made": True}
        run = self._open_run(None, run_id, about, None)
        if self.asking.is_silent:
            self.asking.probe()
        self.told(f"opening the run {run_id}", lambda: None, run)
        return run

    def register_model(
        self, name: str, *, run: Run | NullRun, artifact_path: str, tags: Mapping[str, str], **words: str
    ) -> str | None:
        """The version of the registered model whose files the run holds under `artifact_path`; None as long as it waits.

        A version with the same tags `ttrain.key` and `ttrain.content` is returned instead of making another. `words`:
        `description` of the version, `about` of the registered model.
        """
        if isinstance(run, NullRun):
            return None
        answer: str | None = run.tell("register", name=name, path=artifact_path, tags=dict(tags), **words).answer
        return answer

    def register_models(
        self, name: str, *, run: Run | NullRun, models: Sequence[Mapping[str, Any]], **data: Any
    ) -> str | None:
        """The version of the registered model `name` that is this set of models (`model_sets.tags_of`).

        None as long as it waits. Those that are not registered yet are, from this run.

        Of each model: name, stage, tags, artifact_path, `path` of its files, None where they are not here, `description`
        and `about` as `register_model` takes them. `data`: `run_name`, `keys` by stage, `metrics`, and the same two.
        """
        if isinstance(run, NullRun):
            return None
        models = [{**model, "path": model["path"] and self.relative(Path(model["path"]))} for model in models]
        entry = run.tell("register_models", name=name, models=models, **data)
        self.finish_uploads()
        answer: str | None = entry.answer
        return answer

    def deliver_soon(self, run: Run, entry: Entry) -> None:
        """Tells MLflow now, where that is quick; files that go over the network go in the background."""
        if not KINDS[entry.what].uploads:
            self.deliver(run)
        elif run.is_bound and run.artifact_uri and local_path(run.artifact_uri):
            self.deliver(run, uploads=True)
        else:
            self._uploader.wake()

    def deliver(self, run: Run, *, uploads: bool = False, again: bool = False) -> bool:
        """Tells MLflow what the run's outbox holds, in its order; False where something is left, which a thread retries.

        What fails while the rest succeeds is passed over until it is tried `again`. Nobody waits for another thread that
        waits for a server.
        """
        turn = run.upload_turn if uploads else run.turn
        if not turn.acquire(blocking=not self.is_http):
            return self._again(uploads)
        try:
            if again:
                run.failed -= {entry.number for entry in run.waiting() if KINDS[entry.what].uploads == uploads}
            while entry := self._next(run, uploads):
                if self.told(KINDS[entry.what].words, partial(self._tell, run, entry), run):
                    run.box.told(entry)
                else:
                    self._upload_failed |= uploads
                    if self.asking.is_silent:
                        return self._again(uploads)
                    run.failed.add(entry.number)
            return not run.failed or self._again(uploads)
        finally:
            turn.release()

    def told(self, what: str, action: Callable[[], object], run: Run) -> bool:
        """Runs one call about a run, which MLflow is made to have before; False where it has to be tried again.

        What MLflow refuses is dropped with a warning.
        """
        if self.asking.is_silent:
            return self._again(False)
        _, error = outcome(partial(run_binding.bind, self, run))
        unmade = error is not None
        if not unmade:
            _, error = outcome(action)
        if error is None:
            return True
        refused = isinstance(error, RefusedError) or (not unmade and (is_refusal(error) or type(error) is ValueError))
        self.asking.failed(what, error, is_silent=not refused and not isinstance(error, OSError))  # a disk is no server
        if refused:
            self._count("lost", 1)
        else:
            self._again(False)
        return refused

    def on_upload(self, told: Callable[[int, int], object]) -> None:
        """Calls `told(bytes done, bytes in all)` a few times a second while files go over the network."""
        self.progress.told = told

    def finish_uploads(self, seconds: float = UPLOADS_STALL_SECONDS) -> None:
        """Waits for what is being uploaded, as long as bytes go and nothing fails."""
        self.progress.moved, self._upload_failed = time.monotonic(), False
        while self._left(uploads=True) and time.monotonic() - self.progress.moved < seconds:
            if self.asking.is_silent or self._upload_failed:
                return
            self._uploader.wake()
            time.sleep(0.02)

    def tell_earlier(self) -> None:
        """From now on, also tells what processes that were killed, or met a silent server, left to tell."""
        self._may_tell_earlier = True
        if outboxes.found(self.home):
            self._uploader.wake()

    def close(self) -> int:
        """Tells what can be told in one more try, and lets go of the outboxes; how many things are left."""
        runs = list(self._open.values())
        self.finish_uploads()
        self._courier.stop(asking.PROBE_SECONDS + 1 if self.asking.is_silent else 30.0)
        self._uploader.stop(asking.PROBE_SECONDS + 1)
        for one in runs:
            if not self.asking.is_silent:
                self.deliver(one, again=True)
        left = [entry for one in runs for entry in one.waiting()]
        lost = sum(len(one.waiting()) for one in runs if not one.box.is_kept)
        for one in runs:
            one.box.close()
            self._open.pop(one.box.id, None)
        if lost:
            log.warning(
                "MLflow at %s was not told %d things of this run, and the disk took no note of them: they are lost there; "
                "what ttrain shows of the run stands in the home",
                without_user(self.uri), lost,
            )  # fmt: skip
        elif left:
            how = REPAIR if is_damage(self.asking.last_error) else "the next run does, or: ttrain track sync"
            log.warning("MLflow at %s has yet to be told %d things of this run; %s", without_user(self.uri), len(left), how)
        return len(left)

    def experiment_id(self, name: str | None = None) -> str:
        """Id of the experiment, which is made or restored where needed; raises when MLflow does."""
        name = name or self._experiment
        if name not in self._experiment_ids:
            found = self.client.get_experiment_by_name(name)
            if found is None:
                unless_there(partial(self.client.create_experiment, name, self._place))
                found = self.client.get_experiment_by_name(name)
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)  # MLflow lets no other take its name
            # MLflow's pages open on training runs, not on its pages for agents and traces.
            self.client.set_experiment_tag(found.experiment_id, "mlflow.experimentKind", "custom_model_development")
            self._experiment_ids[name] = str(found.experiment_id)
        return self._experiment_ids[name]

    def forget_experiments(self) -> None:
        """Asks for them anew: the one that a run was to be made in is gone, or the whole database was replaced."""
        self._experiment_ids.clear()

    def parent_id(self, run: Run) -> str | None:
        """MLflow's id of the run's parent. Raises what MLflow does."""
        return run_binding.parent_id(self, run)

    def remove_twins(self, run: Run) -> None:
        """Deletes what an unanswered question has made besides this run. Raises what MLflow does."""
        run_binding.remove_twins(self, run)

    def relative(self, path: Path) -> str:
        """A path as an outbox names it: below the home, which may be moved meanwhile, or absolute."""
        path = path.absolute()
        return str(path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)

    def absolute(self, path: str) -> Path:
        """What `relative` made a name of."""
        return self.home / path

    @property
    def tracker(self) -> str:
        """What outboxes call this MLflow: nothing for the home's own, which moves with it; no password is written down."""
        return "" if self.uri == f"sqlite:///{database_of(self.home)}" else without_user(self.uri)

    def _open_run(self, identity: str | None, run_id: str | None, about: dict[str, Any], parent: Run | None) -> Run:
        """The run with its outbox: the one that is open, the one that a process before left, or a new one."""
        identity = identity if outbox.ID.fullmatch(identity or "") else None
        with self._opening:
            run = self._open.get(identity or "")
            if run is None:
                folder = self.home / outbox.FOLDER / (identity or "none")
                box = outbox.take(folder, TAKE_SECONDS) if identity else None
                about = {"ended": False, **about}
                here = {"tracker": self.tracker, "experiment": self._experiment}
                if box is None:  # or another process has it, and the run is another one
                    known: dict[str, Any] = {"id": identity} if identity and not (folder / "run.json").exists() else {}
                    about["doubtful"] = bool(identity) and run_id is None
                    box = outbox.create(self.home, **known, run_id=run_id, **here, **about)
                else:
                    if box.about.get("tracker") != self.tracker:  # which has no such run
                        box.about |= {"run_id": None, **here}
                    about["started"] = box.about["started"]
                    box.note(**about, doubtful=box.about.get("run_id") is None)
                for entry in list(box.entries):
                    if entry.what == "follow":  # it is followed again, by who continues it
                        box.told(entry)
                run = self._open[box.id] = Run(self, box)
            else:
                run.box.note(ended=False, parent=about.get("parent"))
            run.is_again = bool(identity or run_id)
            run.parent = parent
            return run

    def _deliver_all(self, *, uploads: bool) -> bool:
        """What all open runs have to tell, then what earlier processes left; False where some of it is left."""
        if self.asking.is_silent and self.asking.probe() is not None:
            return False
        runs = list(self._open.values())
        runs = runs[::-1] if uploads else runs  # a run's models are registered from its stages' runs, which came after it
        done = [self.deliver(run, uploads=uploads, again=True) for run in runs]
        if uploads and self._may_tell_earlier:  # what is small first, of all of them
            remove_unmade(self.home)
            left = outboxes.found(self.home)
            done += [tell_one(self, directory, uploads=False) is not False for directory in left]
            done += [tell_one(self, directory) is not False for directory in outboxes.children_first(left)]
        return all(done)

    def _next(self, run: Run, uploads: bool) -> Entry | None:
        waiting = (entry for entry in run.waiting() if KINDS[entry.what].uploads == uploads)
        return next((entry for entry in waiting if entry.number not in run.failed), None)

    def _tell(self, run: Run, entry: Entry) -> None:
        entry.answer = KINDS[entry.what].tell(run, entry)
        number = entry.answer if isinstance(entry.answer, int) else 1
        self._count(COUNTED.get(entry.what, entry.what), number)

    def _count(self, what: str, number: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def _left(self, *, uploads: bool) -> int:
        runs = list(self._open.values())
        return sum(KINDS[entry.what].uploads == uploads for run in runs for entry in run.waiting())

    def _again(self, uploads: bool) -> bool:
        """A thread tries it later; False."""
        (self._uploader if uploads else self._courier).wake()
        return False


def open_reader(home: Path) -> Store:
    """The tracker for questions alone: no experiment is made. Raises what MLflow does where it cannot be opened."""
    home = home.resolve()
    uri = tracking_uri(home)
    silence()
    return Store(open_client(uri, home), uri, home, "")
