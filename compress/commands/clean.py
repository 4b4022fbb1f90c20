"""`compress clean`: removes the artifacts that the last recipe does not use."""

from __future__ import annotations

import shutil
from pathlib import Path

from foundation.artifacts.run_folder import locked, open_run, unfinished
from foundation.artifacts.store import BUILD, is_shared
from foundation.core.errors import InputError


def clean(folder: Path) -> list[Path]:
    """Removes all artifacts that neither the last finished run nor a stopped later one uses.

    Of a stopped run the finished artifacts stay, with the training checkpoints and the finished builds of the stage that it was in.

    Args:
        folder: A finished run.

    Returns:
        The removed folders and files.

    Raises:
        InputError: The folder holds no finished run, or another process writes to it.
    """
    if is_shared(folder):
        raise InputError(
            f"{folder}", "its stages are shared with other runs of a search", remedy="remove the folder of the search to free them"
        )
    open_run(folder)  # a folder that is no run is not locked, and so not created
    with locked(folder):
        stopped = unfinished(folder)
        names = {found.path.name for found in open_run(folder).artifacts.values()} | stopped
        kept = (*names, *(f".{name}.scratch" for name in names))
        builds = set((folder / "stages").glob(f"{BUILD}*")) if stopped else set[Path]()  # the stopped export goes on from its own
        unused = [path for path in sorted((folder / "stages").iterdir()) if path not in builds and not _is_of(path.name, kept)]
        for path in unused:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return unused


def _is_of(name: str, names: tuple[str, ...]) -> bool:
    """Whether a name is kept; the scratch folders of other processes have their number as a suffix."""
    return name in names or name.rpartition(".")[0] in names
