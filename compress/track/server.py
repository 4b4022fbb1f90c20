"""A tracking server of MLflow, over mlflow-skinny: what a run sends to it, in few and bounded requests.

MLflow's own defaults wait for minutes for a server that is away, send telemetry and print addresses. Here a request has 10 seconds and one
repetition, and the other two are off. User name, password and token are read from the environment by MLflow alone.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from compress.track_settings import SQLITE
from foundation.core.errors import InputError
from foundation.core.shown import reason

NO_MLFLOW = "pip install 'compress-transformers[track]'"
SILENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "MLFLOW_DISABLE_AGENT_HINT": "1"}
"""No telemetry is sent, and no address or hint is printed."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
TIMEOUT, REQUEST_SECONDS, UPLOAD_SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT", 10, 600
"""Seconds for a request, and for the upload of a file. What the user set in the environment comes first."""
MOST_METRICS, MOST_TEXTS = 500, 100
"""Entries of a request: MLflow takes 1,000 metrics, 100 params and 100 tags, and 1 MB."""
PARENT = "mlflow.parentRunId"
"""Tag of a nested run."""
ARTIFACTS = "mlartifacts"
"""Folder of the artifacts next to a database file."""


class TrackingFailure(Exception):
    """The server did not take what was sent; `str(failure)` is why."""


class _Info(Protocol):
    run_id: str
    lifecycle_stage: str


class _Data(Protocol):
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]


class _Run(Protocol):
    info: _Info
    data: _Data


class _Experiment(Protocol):
    experiment_id: str


class Client(Protocol):
    """The part of `mlflow.MlflowClient` that is used."""

    def get_experiment_by_name(self, name: str) -> _Experiment | None:
        """Returns an experiment."""

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        """Creates an experiment and returns its id."""

    def create_run(
        self, experiment_id: str, start_time: int | None = None, tags: Mapping[str, str] | None = None, run_name: str | None = None
    ) -> _Run:
        """Creates a run."""

    def get_run(self, run_id: str) -> _Run:
        """Returns a run with the latest value of each metric."""

    def update_run(self, run_id: str, status: str | None = None) -> None:
        """Sets the status of a run."""

    def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
        """Sets how and when a run ended."""

    def log_batch(self, run_id: str, metrics: Sequence[object] = (), params: Sequence[object] = (), tags: Sequence[object] = ()) -> object:
        """Adds metrics, params and tags to a run."""

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Uploads a file."""

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Uploads a folder."""


class Server:
    """A tracking server. Each method raises `TrackingFailure` where the server does not answer or refuses.

    Args:
        uri: Its address, without credentials.
        client: Speaks with it.
    """

    def __init__(self, uri: str, client: Client) -> None:
        self.uri = uri
        self._client = client

    def check(self, experiment: str) -> None:
        """Asks for an experiment; creates nothing."""
        with _calls():
            self._client.get_experiment_by_name(experiment)

    def experiment(self, name: str) -> str:
        """Returns the id of an experiment, which is created if it does not exist."""
        with _calls():
            known = self._client.get_experiment_by_name(name)
            if known is not None:
                return known.experiment_id
            place = None
            if self.uri.startswith(SQLITE):  # MLflow would take the folder `mlruns` of wherever the command runs
                place = (Path(self.uri.removeprefix(SQLITE)).absolute().parent / ARTIFACTS).as_uri()
            return self._client.create_experiment(name, artifact_location=place)

    def has(self, run: str) -> bool:
        """Whether the server has a run that was not deleted."""
        from mlflow.exceptions import MlflowException

        with _calls():
            try:
                return self._client.get_run(run).info.lifecycle_stage == "active"
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise

    def create(self, experiment: str, name: str, started_ms: int, parent: str | None) -> str:
        """Creates a run, nested below another one if there is a parent; returns its id."""
        tags = {} if parent is None else {PARENT: parent}
        with _calls():
            return self._client.create_run(experiment, start_time=started_ms, tags=tags, run_name=name).info.run_id

    def describe(
        self, run: str, numbers: Mapping[str, float], texts: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """Sends what the server does not have yet: a figure that it has with the same value is not sent again.

        Args:
            run: Id of the run.
            numbers: Metrics.
            texts: Tags.
            settings: Params; those that the server has stay, as MLflow never changes one.
        """
        from mlflow.entities import Metric, Param, RunTag

        now = int(time.time() * 1000)
        with _calls():
            known = self._client.get_run(run).data
            metrics = [Metric(name, value, now, 0) for name, value in numbers.items() if known.metrics.get(name) != value]
            tags = [RunTag(name, text) for name, text in (texts or {}).items() if known.tags.get(name) != text]
            params = [Param(name, text) for name, text in (settings or {}).items() if name not in known.params]
            for some in _portions(metrics, MOST_METRICS):
                self._client.log_batch(run, metrics=some)
            for some in _portions(params, MOST_TEXTS):
                self._client.log_batch(run, params=some)
            for some in _portions(tags, MOST_TEXTS):
                self._client.log_batch(run, tags=some)

    def set_running(self, run: str) -> None:
        """Sets the status of a run that goes on."""
        with _calls():
            self._client.update_run(run, status="RUNNING")

    def end(self, run: str, status: str, ended_ms: int) -> None:
        """Sets how and when a run ended."""
        with _calls():
            self._client.set_terminated(run, status=status, end_time=ended_ms)

    def upload(self, run: str, path: Path, place: str | None = None) -> None:
        """Uploads a file, or a folder with everything below it, to a folder of the artifacts."""
        with _calls(UPLOAD_SECONDS):
            if path.is_dir():
                self._client.log_artifacts(run, str(path), place)
            else:
                self._client.log_artifact(run, str(path), place)


def check_place(uri: str) -> None:
    """Checks that a server can be spoken with from here.

    Raises:
        InputError: The package is not installed, or the folder of a database file does not exist.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise InputError("track.mlflow", "given, but the package mlflow-skinny is not installed", remedy=NO_MLFLOW)
    if uri.startswith(SQLITE):
        folder = Path(uri.removeprefix(SQLITE)).absolute().parent
        if not folder.is_dir():
            raise InputError("track.mlflow", f"{uri} given, but there is no folder {folder}", remedy="create it")


def connect(uri: str) -> Server:
    """Returns a tracking server; sends nothing. The tables of a new database file are created.

    Raises:
        InputError: As of `check_place`, or the database cannot be opened.
    """
    check_place(uri)
    os.environ.update(SILENT)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else each step of the creation of a database is shown
    from mlflow import MlflowClient

    try:
        with _calls():
            client: Client = MlflowClient(tracking_uri=uri)
    except TrackingFailure as failure:
        raise unreachable(uri, failure) from failure
    return Server(uri, client)


def unreachable(uri: str, failure: TrackingFailure) -> InputError:
    """Returns the error of a server that does not take what is sent when a run starts, or when `compress track` sends it."""
    remedy = "start the server, or set the environment variables that it asks for; `compress track RUN --mlflow URI` sends a run later"
    return InputError("track.mlflow", f"{uri} does not answer as it should ({failure})", remedy=remedy)


@contextmanager
def _calls(timeout_s: int = REQUEST_SECONDS) -> Iterator[None]:
    """Within the block requests are bounded, and every failure of MLflow, of the network or of a file is a `TrackingFailure`."""
    wanted = {name: value for name, value in {**PATIENCE, TIMEOUT: str(timeout_s)}.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    except Exception as error:
        if not _is_theirs(error):
            raise
        raise TrackingFailure(_why(error)) from error
    finally:
        for name in wanted:
            os.environ.pop(name, None)


def _is_theirs(error: Exception) -> bool:
    """Whether an error is MLflow's, the network's, a file's or the database's, and not a fault of the code here."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException | OSError | ImportError):  # ImportError: artifacts in a store whose package is not installed
        return True
    return type(error).__module__.startswith("sqlalchemy.")


def _portions(entries: Sequence[object], most: int) -> Iterator[Sequence[object]]:
    for start in range(0, len(entries), most):
        yield entries[start : start + most]


def _why(error: BaseException) -> str:
    """Returns the reason of the operating system, if that is the cause: MLflow repeats the address and every object on the way to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return reason(cause)
        cause = cause.__cause__ or cause.__context__
    return reason(error)
