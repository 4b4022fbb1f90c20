"""A deployment: the model repository of a run, copied out of it, with a manifest and a README of its own.

    DIR/
      README.md  deployment.json
      model_repository/                 what Triton serves: the models that the run chose, under its name, or all
      golden.safetensors, golden_labels.safetensors      rows with recorded answers, which a roll-over is checked with
      model_repository_gpu/             where the run also wrote one for GPUs
      docker/                           where one of them is for TensorRT: images, compose, Prometheus, Grafana, Kubernetes

A repository for TensorRT also gets `wheels/`, the packages of its Python models: its containers need no network.

The artifacts of a run are never written to. A deployment may be: `build_plans.py` builds its plans there. `deployment.json` lists the
sha256 of every copied file and says which run they are from: name, anchor (`foundation.artifacts.chain`) and digest of the artifact. Every
byte is hashed after it was copied. It also names the models that were chosen to be served, and the goals that the run missed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, FileEntry
from foundation.artifacts.chain import GOLDEN, changes, damage, read_chain
from foundation.artifacts.document import read
from foundation.artifacts.run_folder import REPOSITORY, Run, check_outside, open_run
from foundation.artifacts.triton import Results
from foundation.core.arrays import Array
from foundation.core.errors import InputError, Problem
from foundation.core.shown import reason
from foundation.measure.answers import load_predictions
from triton_repo import served_models
from triton_repo.config import from_text, to_text
from triton_repo.gpu import wheels
from triton_repo.gpu.plan_files import SPEC, built_files, unhashed_files
from triton_repo.live import CONFIG
from triton_repo.served_models import ServedModel
from triton_repo.serving import is_for_gpus

MANIFEST, SCHEMA, README, LOG, DOCKER = "deployment.json", 1, "README.md", "triton.log", "docker"
CHOSEN, RESULTS = "chosen", "triton.json"
"""Key of the manifest with the models that are served, and the file of a run that says which one was chosen."""
MODELS, TASK, MISSED = "models", "task", "missed"
"""Keys of all models (`triton_repo.served_models`), of the task, and of the goals that the run missed."""
GOLDEN_LABELS, LABELS = "golden_labels.safetensors", "labels"


def repository_of(folder: Path) -> Path:
    """Returns the model repository of a run or of a deployment, after its files were hashed.

    Raises:
        InputError: There is none, or it is not what the run wrote.
    """
    if is_deployment(folder):
        wrong = problems(folder)
        if wrong:
            raise InputError.of([*wrong, Problem(f"{folder}", "damaged", remedy="deploy the run again")])
        return folder / REPOSITORY
    run = open_run(folder)
    return _intact(run).path / REPOSITORY


def models_in(folder: Path) -> list[ServedModel]:
    """Returns the models of a run or a deployment, those that are served first.

    Raises:
        InputError: The folder is no finished run and no deployment.
    """
    if is_deployment(folder):
        document = artifact.read_json(folder / MANIFEST)
        if MODELS in document:
            return served_models.read(document[MODELS])
        owner = document.get("owner")
        name = "" if owner is None else str(owner.get("run", ""))
        return served_models.of_earlier_version(folder / REPOSITORY, document.get(CHOSEN), name)
    run = open_run(folder)
    made = run.of_kind("model_repository")
    return [] if made is None else _models(run, made)


def missed_goals(folder: Path) -> list[str]:
    """Returns a line for each goal that the run of a deployment missed."""
    return [str(line) for line in artifact.read_json(folder / MANIFEST).get(MISSED, ())]


def _models(run: Run, served: Artifact) -> list[ServedModel]:
    file, repository = served.path / RESULTS, served.path / REPOSITORY
    results = read(Results, file) if file.exists() and not is_for_gpus(repository) else Results()
    return served_models.models_of(repository, results, str(run.recipe["name"]))


def deploy(
    folder: Path,
    out: Path,
    log: Callable[[str], None] = print,
    *,
    everything: bool = False,
    missed: Sequence[str] = (),
) -> Path:
    """Copies what is served of the model repository of a run to a folder outside of it, under the name of the run.

    Args:
        folder: A finished run with a model repository.
        out: New or empty folder, or an unchanged deployment, which is replaced.
        log: Prints one line.
        everything: Copies every model of the repository.
        missed: A line for each goal that the run missed, for the manifest.

    Returns:
        `out`.

    Raises:
        InputError: The run has no repository or is damaged, `out` cannot be written without losing something, or the wheels for the
            containers cannot be fetched.
    """
    run = open_run(folder)
    made = _intact(run)
    _check_place(run, out)
    models = _models(run, made)
    copied, left = served_models.divided(models, everything)
    with artifact.writing(out.absolute()) as temporary:
        files = dict(_copied(made, temporary, models, copied))
        (temporary / README).write_text(_readme(run, temporary), encoding="utf-8")
        added = [temporary / README, *_containers(temporary), *_golden(run, temporary, copied)]
        files |= {path.relative_to(temporary).as_posix(): _entry(path) for path in added}
        owner = {"run": run.recipe["name"], "anchor": read_chain(run.folder)["anchor"], "artifact": made.id, "digest": made.digest}
        document = {
            "schema": SCHEMA,
            "owner": owner,
            CHOSEN: [model.name for model in copied if model.part is not None],
            MODELS: served_models.written([replace(model, folder=model.name) for model in copied]),
            TASK: run.recipe["model"]["task"],
            MISSED: list(missed),
            "files": files,
            "digest": artifact.digest(files),
        }
        artifact.write_json(temporary / MANIFEST, document)
    size_mb = sum(entry["size"] for entry in files.values()) / 1e6
    log(f"{out}: {len(files)} files, {size_mb:.1f} MB of {run.recipe['name']}, anchor {owner['anchor'][:12]}; see {out / README}")
    if left:
        names = ", ".join(model.folder for model in left)
        log(f"not copied: {names}, which {'is' if len(left) == 1 else 'are'} not served; give --all to copy every model")
    return out


def is_deployment(folder: Path) -> bool:
    """Whether a folder was written by `deploy`."""
    return (folder / MANIFEST).is_file()


def problems(folder: Path, log: Callable[[str], None] = lambda line: None) -> list[Problem]:
    """Hashes the files of a deployment; returns a problem for each that is missing, added or changed.

    Plans that `build_plans.py` recorded, and what it writes with them, belong to it.
    """
    try:
        document = artifact.read_json(folder / MANIFEST)
        files = dict(document["files"])
        damaged = document["schema"] != SCHEMA or artifact.digest(files) != document["digest"]
        built = _built(folder)
    except artifact.DamagedArtifact as error:
        return [error.problem]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Problem(f"{folder / MANIFEST}", f"damaged ({reason(error)})")]
    lines = [Problem(f"{folder / MANIFEST}", "its digest does not belong to its list of files")] if damaged else []
    found = artifact.files_below(folder)
    for name in (MANIFEST, LOG):
        found.pop(name, None)
    for name, expected in {**files, **built}.items():
        if name not in found:
            lines.append(Problem(f"{folder / name}", "missing"))
        elif expected is not None and artifact.file_digest(found[name]) != expected["sha256"]:
            lines.append(Problem(f"{folder / name}", "changed"))
    lines += [Problem(f"{folder / name}", f"not in {MANIFEST}") for name in found if name not in files and name not in built]
    lines += [line for line in artifact.strangers_below(folder) if "an empty folder" not in line.given]
    log(f"{folder}: {len(files)} files, {len(built)} built here, {'damaged' if lines else 'intact'}")
    return lines


def _intact(run: Run) -> Artifact:
    """Returns the repository artifact of a run after checking its bytes, and the manifests of the whole run."""
    made = run.of_kind("model_repository")
    end = Problem(f"{run.folder}", "nothing damaged is served or copied", remedy="`compress run` makes what is damaged again")
    wrong = changes(read_chain(run.folder), run, "the run finished")
    if wrong:
        raise InputError.of([*wrong, end])
    if made is None:
        raise InputError(
            f"{run.folder}",
            "this run has no model repository",
            remedy="add `- triton_repo: {}` to the stages of its recipe and run it again",
        )
    wrong = list(damage(run, only=made))
    if wrong:
        raise InputError.of([*wrong, end])
    return made


def _check_place(run: Run, out: Path) -> None:
    check_outside(run, out)
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_deployment(out):
        raise InputError(f"{out}", "not empty, and not written by `compress deploy`", remedy="give a new folder")
    kept = problems(out) or [Problem(f"{out / name}", "built here") for name in _built(out)]
    if kept:
        raise InputError.of(
            [
                *kept,
                Problem(
                    f"{out}", "holds more than `compress deploy` wrote, and that would be lost", remedy="give a new folder, or empty it"
                ),
            ]
        )


def _copied(
    served: Artifact, temporary: Path, models: Sequence[ServedModel], copied: Sequence[ServedModel]
) -> Iterator[tuple[str, FileEntry]]:
    """Copies the repositories of an artifact, of `models` only those to be copied; yields name and entry of each file.

    Raises:
        InputError: A copy does not have the hash of the artifact's manifest.
    """
    places = {f"{REPOSITORY}/{model.folder}": f"{REPOSITORY}/{model.name}" if model in copied else None for model in models}
    for name, entry in served.manifest["files"].items():
        if not name.startswith(REPOSITORY):  # the repository for GPUs has this name with a suffix
            continue
        model = "/".join(name.split("/")[:2])
        place = places.get(model, model)
        if place is None:
            continue
        written = temporary / f"{place}{name[len(model) :]}"
        written.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(served.path / name, written)
        if _entry(written) != entry:
            raise InputError(
                f"{served.path / name}", "changed while it was copied", remedy="check the disk, and run `compress verify` on the run"
            )
        if name == f"{model}/{CONFIG}" and place != model:
            config = from_text(written.read_text(encoding="utf-8"))
            config.name = place.rpartition("/")[2]
            written.write_text(to_text(config), encoding="utf-8")
        if name == f"{REPOSITORY}/{README}" and models:
            written.write_text(served_models.renamed(written.read_text(encoding="utf-8"), models, copied), encoding="utf-8")
        yield written.relative_to(temporary).as_posix(), _entry(written)


def _golden(run: Run, folder: Path, copied: Sequence[ServedModel]) -> Iterator[Path]:
    """Adds the golden rows of the run, which a roll-over is checked with, where a server has answered them; yields the files."""
    if not {f"logits.{model.build}.triton" for model in copied} & set(_tensors(run.folder / GOLDEN)):
        return
    shutil.copyfile(run.folder / GOLDEN, folder / GOLDEN)
    _, labels = load_predictions(run.predictions(run.baseline), run.recipe["model"]["task"])
    save_file({LABELS: np.ascontiguousarray(labels.array)}, folder / GOLDEN_LABELS)
    yield from (folder / GOLDEN, folder / GOLDEN_LABELS)


def golden_labels(folder: Path) -> Array:
    """Returns the labels of the evaluation split of the run of a deployment, which some answers are compared by.

    Raises:
        InputError: The deployment has no golden rows.
    """
    if not (folder / GOLDEN_LABELS).is_file():
        raise InputError(
            f"{folder}",
            "this deployment has no golden rows to check a new version with: its run was not served, or an earlier version deployed it",
            remedy="give the run folder, or deploy it again",
        )
    labels: Array = load_file(folder / GOLDEN_LABELS)[LABELS]
    return labels


def _tensors(file: Path) -> list[str]:
    with safe_open(file, framework="numpy") as opened:
        return list(opened.keys())


def _containers(folder: Path) -> Iterator[Path]:
    """Adds what the containers of a repository for TensorRT need besides NVIDIA's images; yields the files."""
    for spec in sorted(folder.glob(f"{REPOSITORY}*/{SPEC}")):
        yield from wheels.vendor(spec.parent / wheels.FOLDER)
        shutil.copytree(docker_folder(), folder / DOCKER)
        (folder / DOCKER / ".env").write_text(f"REPOSITORY=../{spec.parent.name}\n", encoding="utf-8")
        yield from (path for path in sorted((folder / DOCKER).rglob("*")) if path.is_file())


def docker_folder() -> Path:
    """Returns the folder `docker` of a checkout, or its copy in an installed wheel."""
    package = Path(__file__).resolve().parent
    installed = package / DOCKER
    return installed if installed.is_dir() else package.parent / DOCKER


def _built(folder: Path) -> dict[str, dict[str, str] | None]:
    """Returns the files that `build_plans.py` added, with the sha256 of plans and configurations; None: a file without one."""
    added: dict[str, dict[str, str] | None] = {}
    for spec in folder.glob(f"{REPOSITORY}*/{SPEC}"):
        root = spec.parent
        added |= {f"{root.name}/{name}": {"sha256": digest} for name, digest in built_files(root).items()}
        added |= {f"{root.name}/{name}": None for name in unhashed_files(root)}
    return added


def _entry(path: Path) -> FileEntry:
    return {"sha256": artifact.file_digest(path), "size": path.stat().st_size}


def _readme(run: Run, folder: Path) -> str:
    names = sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(f"{REPOSITORY}*/{README}"))
    parts = "\n".join(f"- `{name}/`: see [{name}/{README}]({name}/{README})" for name in names)
    return _README.format(name=run.recipe["name"], anchor=read_chain(run.folder)["anchor"], parts=parts)


_README = """\
# {name}, ready to serve

Copied from a finished run by `compress deploy`; nothing here is linked to the run, and this folder may be written to.

{parts}

Anchor of the run: `{anchor}`. `deployment.json` holds the sha256 of every file; check them with `compress verify` on this folder.
`golden.safetensors`, where it is here, holds 64 rows of the evaluation data with their answers: `compress rollout` checks a new version
with them, and no client sees them.

## Serve

With this project installed:

    compress serve DIR

loads what was chosen to be served (with `--all` every model) and starts Triton behind a front that answers inference, health and metadata
only, limits the size of requests and starts Triton again if it dies. In a container of NVIDIA's nothing stands before Triton, so restrict
its protocols there, and never publish its ports to a network that you do not trust:

    KEY=$(head -c 32 /dev/urandom | base64 | tr -dc A-Za-z0-9)
    CLOSED=shared-memory,model-repository,statistics,trace,logging
    tritonserver --model-repository=/models --disable-auto-complete-config \\
        --http-restricted-api=$CLOSED,admin-key=$KEY --grpc-restricted-protocol=$CLOSED,admin-key=$KEY
"""
