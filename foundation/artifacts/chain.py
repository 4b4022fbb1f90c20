"""The chain of a run: one digest, the anchor, over everything that its report says or that is served from it.

    files -> manifest of each artifact -> chain.json -> anchor -> report.json, report.html

`chain.json` is written when a run finishes. It lists the sha256 of each manifest (each of which lists the sha256 of its files), of the
recipe with its list of artifacts, of the golden rows, of the changed predictions and of the sizes of the splits, and where
`model_repository` leads. The anchor is the
digest of that list. Whoever keeps a report elsewhere can find any later change: the report holds the list and the anchor.

A chain inside the run folder finds damage, not a forger who also writes a new chain; `verify --report` with a kept report finds that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import LOCK_FILE, REPOSITORY, Run
from foundation.core.errors import InputError, Problem
from foundation.core.shown import reason

CHAIN, SCHEMA = "chain.json", 1
GOLDEN, FLIPS, DATA = "golden.safetensors", "flips.jsonl", "data.json"


class ChainFile(TypedDict):
    """A file of the run folder."""

    path: str
    """Relative to the folder."""
    sha256: str | None
    """None for a missing file."""


class Chain(TypedDict):
    """The contents of chain.json but its schema."""

    anchor: str
    files: Sequence[ChainFile]
    model_repository: str | None
    """Where the link leads; None without one."""


def chain_of(run: Run) -> Chain:
    """Returns the chain of a run as it is on disk now."""
    data = [DATA] if os.path.lexists(run.folder / DATA) else []  # runs of earlier versions have none
    names = [LOCK_FILE, GOLDEN, FLIPS, *data, *(f"{stage['artifact']}/{artifact.MANIFEST}" for stage in run.stages)]
    files = [ChainFile(path=name, sha256=_digest(run.folder / name)) for name in names]
    return anchored(files, _target(run.folder / REPOSITORY))


def anchored(files: Sequence[ChainFile], link: str | None) -> Chain:
    """Returns the chain of these entries, with its anchor."""
    return Chain(anchor=artifact.digest({"files": files, "model_repository": link}), files=files, model_repository=link)


def write_chain(run: Run) -> None:
    """Writes `chain.json`; the last step of a run before its report."""
    artifact.write_json(run.folder / CHAIN, {"schema": SCHEMA, **chain_of(run)})


def read_chain(folder: Path) -> Chain:
    """Returns the chain that the run wrote.

    Raises:
        InputError: There is none, or it is damaged.
    """
    path, cure = folder / CHAIN, f"`compress run` on {folder / LOCK_FILE} keeps the finished stages and writes it"
    if not os.path.lexists(path):
        raise InputError(
            f"{path}", "missing: an earlier version finished this run, or the file was removed", "a changed manifest cannot be found", cure
        )
    try:
        return checked(artifact.read_json(path))
    except artifact.DamagedArtifact as error:
        raise InputError.of([error.problem.advise(cure)]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}", f"damaged ({reason(error)})", remedy=cure) from error


def recorded(folder: Path, name: str) -> str | None:
    """Returns the sha256 of a file (path relative to the run folder) in the chain of a run; None if there is no chain or no such entry."""
    try:
        chain = read_chain(folder)
    except InputError:  # no run has finished here yet, or its chain is damaged: `report` and `verify` say so
        return None
    return next((entry["sha256"] for entry in chain["files"] if entry["path"] == name), None)


def forget(folder: Path, name: str) -> None:
    """Removes a file from the chain of a run, before a step writes it anew: a run that is stopped later still finds it intact."""
    if recorded(folder, name) is not None:
        chain = read_chain(folder)
        kept = anchored([entry for entry in chain["files"] if entry["path"] != name], chain["model_repository"])
        artifact.write_json(folder / CHAIN, {"schema": SCHEMA, **kept})


def checked(document: Any) -> Chain:
    """Returns the chain in a document whose anchor belongs to its entries.

    Raises:
        KeyError, TypeError: An entry is missing or of the wrong type.
        ValueError: The anchor belongs to other entries.
    """
    files = [ChainFile(path=str(entry["path"]), sha256=entry["sha256"]) for entry in document["files"]]
    found = anchored(files, document["model_repository"])
    if found["anchor"] != document["anchor"]:
        raise ValueError("its anchor belongs to other entries")
    return found


def damage(run: Run, log: Callable[[str], None] = lambda line: None, only: Artifact | None = None) -> Iterator[Problem]:
    """Hashes every file of every artifact and yields a problem for each that is missing, added or changed, and for a wrong link.

    Args:
        run: The run.
        log: Gets one line for each artifact.
        only: The one artifact to hash; None: all.
    """
    for stage in run.stages:
        found = run.artifacts[stage["id"]]
        if only is not None and found is not only:
            continue
        problems = artifact.verify(found)
        if not problems and stage["digest"] != found.digest:
            problems = [Problem(f"{found.path}", f"digest {found.digest[:12]}, but the run recorded {stage['digest'][:12]}")]
        log(f"{stage['id']}: {len(found.manifest['files'])} files, {'damaged' if problems else 'intact'}")
        yield from problems
    yield from _link(run)


def changes(expected: Chain, run: Run, source: str) -> list[Problem]:
    """Returns a problem for each entry of a chain that is not what is on disk now.

    Args:
        expected: The chain that was recorded.
        run: The run.
        source: Where it was recorded, for the message.
    """
    found = chain_of(run)
    before, now = ({entry["path"]: entry["sha256"] for entry in chain["files"]} for chain in (expected, found))
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    problems = [Problem(f"{run.folder / name}", f"{_what(before.get(name), now.get(name))} since {source}") for name in other]
    if expected["model_repository"] != found["model_repository"]:
        leads = f"leads to {found['model_repository']}, but to {expected['model_repository']} according to {source}"
        problems.append(Problem(f"{run.folder / REPOSITORY}", leads))
    return problems


def _what(before: str | None, now: str | None) -> str:
    return "added" if before is None else "missing" if now is None else "changed"


def _link(run: Run) -> Iterator[Problem]:
    path, made = run.folder / REPOSITORY, run.of_kind("model_repository")
    if made is None:
        if os.path.lexists(path):
            yield Problem(f"{path}", "does not belong to this run, whose recipe has no triton_repo stage", remedy="remove it")
        return
    wanted = f"stages/{made.path.name}/{REPOSITORY}"
    if not os.path.lexists(path):
        yield Problem(f"{path}", "missing", f"a link to {wanted} is expected", "`compress run` writes it again")
    elif not path.is_symlink():
        yield Problem(f"{path}", f"is not a link to {wanted}", remedy="move it away, and `compress run` writes the link again")
    elif os.readlink(path) != wanted:
        yield Problem(f"{path}", f"leads to {os.readlink(path)}", f"{wanted} is expected", "`compress run` writes it again")


def _target(path: Path) -> str | None:
    return os.readlink(path) if path.is_symlink() else None


def _digest(path: Path) -> str | None:
    return artifact.file_digest(path) if path.is_file() and not path.is_symlink() else None
