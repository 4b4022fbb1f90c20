"""The shipped recipes: in the folder `recipes` of a checkout, or `compress/recipes` of an installed wheel.

The file name is the name of the recipe: `compress run quickstart` runs it, `compress init --recipe quickstart` copies it to edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from foundation.core.errors import InputError, nearest
from foundation.core.files import local
from foundation.core.shown import pasted

if TYPE_CHECKING:
    from compress.recipe import Recipe

SUFFIX = ".yaml"


def folder() -> Path:
    """Returns the folder of the shipped recipes."""
    package = Path(str(files("compress")))
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Returns the shipped recipes by name."""
    return {path.stem: path for path in sorted(folder().glob(f"**/*{SUFFIX}"))}


def about(path: Path) -> str:
    """Returns the first line of a recipe, which describes it."""
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def find(reference: str | Path) -> Path:
    """Returns the file of a recipe: the given file if it exists, else the shipped recipe of that name.

    Raises:
        InputError: There is no such file and no such shipped recipe. A missing path with a folder or suffix is left to `read`.
    """
    path, name, known = local(reference, "recipe"), str(reference), shipped()
    if name in known and not path.is_file():
        return known[name]
    if not path.exists() and not path.suffix and name == path.name:
        raise InputError(name, "no such file or shipped recipe", f"shipped: {', '.join(known)}{nearest(name, known)}")
    return path


def load(reference: str | Path, settings: Sequence[str]) -> Recipe:
    """Reads and checks a recipe; loads neither data nor weights.

    Args:
        reference: A file, or the name of a shipped recipe.
        settings: Overrides, KEY.PATH=VALUE.

    Raises:
        InputError: Every problem of the recipe, one line each.
    """
    from compress.recipe import read
    from compress.run.warm_start import started

    return started(read(find(reference), settings))


def copy_of(name: str, output: str) -> str:
    """Returns the text of a shipped recipe that will be saved as `output`.

    A recipe that extends another one is written in full, with all defaults.

    Raises:
        InputError: The recipe is unknown.
    """
    known = shipped()
    if name not in known:
        raise InputError(f"--recipe {name}", "unknown", f"shipped: {', '.join(known)}{nearest(name, known)}")
    first, command, *lines = known[name].read_text(encoding="utf-8").splitlines()
    body = [
        line for line in lines if not line.startswith("# yaml-language-server:")
    ]  # the path of the schema is only valid next to the shipped recipe
    if any(line.startswith("extends:") for line in body):
        body = _resolved(known[name])
    return "\n".join([first, command.replace(f"recipes/{known[name].name}", pasted(output)), *body]) + "\n"


def _resolved(path: Path) -> list[str]:
    import yaml

    from compress.recipe import dump, read

    return yaml.safe_dump(dump(read(path)), sort_keys=False, allow_unicode=True, width=120).splitlines()
