"""Artifacts of a run in the store of its recipe (`foundation.artifacts.remote`): fetched before a step would run, uploaded afterwards.

A store that does not answer when a run starts is an error, and nothing has run. If it fails later, the run goes on alone: a warning says
so, and the next `compress run` of the recipe uploads what the store lacks. Contents with a wrong hash end the run.
"""

from __future__ import annotations

import time
from pathlib import Path

from compress.recipe import Recipe
from compress.store_settings import store_of
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.remote import RemoteStore, StoreFailure, connect
from foundation.artifacts.store import is_shared
from foundation.core.errors import InputError
from foundation.core.progress import Progress
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


def opened_store(recipe: Recipe, folder: Path, progress: Progress) -> Sharing | None:
    """Returns the store of a run; None if it has none, or is a candidate of a search, whose artifacts are in a folder of the search.

    Raises:
        InputError: It does not answer, or its package is not installed; nothing has run.
    """
    url = None if is_shared(folder) else store_of(recipe.store)
    if url is None:
        return None
    store = answering(url, create=True)
    progress.log(f"store: {store.url}")
    return Sharing(store, progress)


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
        remedy = "check the URL, the network, and the credentials in the environment; without `store` the run shares nothing"
        raise InputError("store", f"{url} does not answer as it should ({failure})", remedy=remedy) from failure
    return store
