"""Artifacts of a run in the store of its recipe (`foundation.artifacts.remote`): fetched before a step would run, uploaded afterwards.

A store that does not answer when a run starts is an error, and nothing has run. If it fails later, the run goes on alone: a warning says
so, and the next `compress run` of the recipe uploads what the store lacks. Contents with a wrong hash end the run. A plan reads manifests,
and the files that cache keys of later steps are formed from, into a temporary folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.recipe import Recipe
from compress.store_settings import store_of
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.artifacts.remote import RemoteStore, StoreFailure, connect
from foundation.artifacts.store import is_shared
from foundation.core.errors import InputError
from foundation.core.progress import Progress
from foundation.measure.fastest import EXPORTED
from foundation.stage.stage import Stage


class Sharing:
    """The store of a run.

    Args:
        store: The store.
        progress: Where fetches, uploads and failures are logged.
    """

    def __init__(self, store: RemoteStore, progress: Progress) -> None:
        self.store = store
        self._progress = progress
        self._reads = self._writes = True

    def fetch(self, step: Stage, key: str, destination: Path) -> Artifact | None:
        """Returns the artifact of a step from the store; None if it is not there, or the store fails.

        Raises:
            InputError: The store holds other contents than it says.
        """
        if not self._reads:
            return None
        started = time.monotonic()
        try:
            found = self.store.fetch(key, destination, str(step.id), step.PRODUCES, self._progress)
        except StoreFailure as failure:
            self._reads = self._writes = False
            self._progress.warn(f"store: {self.store.url} fails ({failure}); the run goes on, the next one uploads what it lacks")
            return None
        if found is None:
            self._progress.log(f"{step.id}: not in the store")
        else:
            size = found.size_bytes / 1e6
            self._progress.log(f"{step.id}: fetched from {self.store.url}, {size:.1f} MB in {time.monotonic() - started:.1f} s")
        return found

    def upload(self, made: Artifact, replace: bool) -> None:
        """Uploads an artifact that the store lacks.

        Args:
            made: The artifact.
            replace: Whether it takes the place of one with the same key: the step was forced to run.
        """
        if not self._writes:
            return
        started = time.monotonic()
        try:
            uploaded = self.store.upload(made, replace, self._progress)
        except StoreFailure as failure:
            self._writes = False
            self._progress.warn(f"store: {self.store.url} takes no upload ({failure}); the next run uploads what it lacks")
            return
        if uploaded:
            size = made.size_bytes / 1e6
            self._progress.log(f"{made.id}: uploaded to the store, {size:.1f} MB in {time.monotonic() - started:.1f} s")


class Offer:
    """What a store has of a run that is planned.

    Args:
        store: The store.
        scratch: An empty folder for manifests and small files.
    """

    def __init__(self, store: RemoteStore, scratch: Path) -> None:
        self._store, self._scratch = store, scratch

    def find(self, step: Stage, key: str) -> Artifact | None:
        """Returns the artifact of a step, with those of its files that cache keys of later steps are formed from; None if it is not there.

        Raises:
            InputError: The store fails, or holds other contents than it says.
        """
        try:
            found = self._store.look(key, self._scratch / key, str(step.id), step.PRODUCES)
            if found is not None:
                self._take_figures(found)
        except StoreFailure as failure:
            raise _silent(self._store.url, failure) from failure
        return found

    def _take_figures(self, found: Artifact) -> None:
        """Downloads predictions, timings, and the description of engines with their predictions; no weights."""
        if found.kind == "evaluation":
            self._store.take(found, [str(found.metrics["predictions"])])
        elif found.kind == "latency":
            self._store.take(found, found.manifest["files"])
        elif found.kind == "engine":
            self._store.take(found, [EXPORTED])
            builds = read(Exported, found.path / EXPORTED).builds
            self._store.take(found, {entry.predictions for build in builds for entry in build.engines if entry.predictions})


@contextmanager
def offered(recipe: Recipe, folder: Path) -> Iterator[Offer | None]:
    """Yields what the store of a recipe has of its run; None as for `opened_store`.

    Args:
        recipe: The recipe.
        folder: The run folder.

    Raises:
        InputError: The store does not answer, or its package is not installed.
    """
    url = _url(recipe, folder)
    if url is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="compress-plan-") as scratch:
        yield Offer(answering(url, create=False), Path(scratch))


def opened_store(recipe: Recipe, folder: Path, progress: Progress) -> Sharing | None:
    """Returns the store of a run; None if it has none, or is a candidate of a search, whose artifacts are in a folder of the search.

    Raises:
        InputError: It does not answer, or its package is not installed; nothing has run.
    """
    url = _url(recipe, folder)
    if url is None:
        return None
    store = answering(url, create=True)
    progress.log(f"store: {store.url}")
    return Sharing(store, progress)


def _url(recipe: Recipe, folder: Path) -> str | None:
    return None if is_shared(folder) else store_of(recipe.store)


def answering(url: str, create: bool) -> RemoteStore:
    """Returns a store that answers.

    Args:
        url: Its URL.
        create: Write the schema of a new store.

    Raises:
        InputError: It does not answer, or its package is not installed.
    """
    try:
        store = connect(url)
        store.begin(create)
    except StoreFailure as failure:
        raise _silent(url, failure) from failure
    return store


def _silent(url: str, failure: StoreFailure) -> InputError:
    """Returns the error of a store that does not answer."""
    remedy = "check the URL, the network, and the credentials in the environment; without `store` the run shares nothing"
    return InputError("store", f"{url} does not answer as it should ({failure})", remedy=remedy)
