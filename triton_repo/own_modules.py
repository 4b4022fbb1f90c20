"""Python models that bring along the modules of ours that they import, for servers without the training environment."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from foundation.standalone.preprocess import Preprocessor
from triton_repo.config import SETTINGS, TEXT_PAIR, ModelSettings, model_config, serialized, to_text, version_settings
from triton_repo.layout import VERSION, WARM_UP

ROOT = Path(__file__).resolve().parents[1]
OURS = ("foundation", "export")


def write_model(
    out: Path,
    settings: ModelSettings,
    preprocessor: Preprocessor,
    kind: Literal["KIND_GPU", "KIND_MODEL"],
    files: Iterable[tuple[Path, str]],
    rows: Mapping[str, bytes],
) -> Path:
    """Writes the folder of a model; returns the folder of its version, for what else the model reads.

    Args:
        out: The repository.
        settings: The model.
        preprocessor: Saved next to it.
        kind: Who chooses its devices, as Triton names it.
        files: Python files, and the place of each in the version.
        rows: A row for each warm-up sample, by name.
    """
    folder = out / settings.name
    version, warm_up = folder / VERSION, folder / WARM_UP
    version.mkdir(parents=True)
    warm_up.mkdir()
    config = model_config(settings)
    config.instance_group[0].kind = getattr(config.instance_group[0], kind)
    (folder / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
    (version / SETTINGS).write_text(version_settings(settings), encoding="utf-8")
    preprocessor.save(version)
    for source, name_there in files:
        (version / name_there).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, version / name_there)
    for sample, row in rows.items():
        for column in settings.inputs:  # the second text of a pair stays empty: the first one fills the bucket
            (warm_up / f"{sample}.{column}").write_bytes(serialized([b"" if column == TEXT_PAIR else row]))
    return version


def modules(start: Path, root: Path) -> list[Path]:
    """Returns the files of our modules that a file imports, and those that they import, with their packages; sorted."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        new = _imported(waiting.pop(), root) - found
        found |= new
        waiting += new
    packages = {package / "__init__.py" for path in found for package in path.parents if package != root and root in package.parents}
    return sorted(found | packages)


def _imported(path: Path, root: Path) -> set[Path]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (root / f"{name.replace('.', '/')}.py" for name in names if name.partition(".")[0] in OURS)
    return {file for file in ours if file.exists()}
