"""A recipe as plain data: files that extend each other, local paths made absolute, and single values that are set.

Nothing here knows the keys of a recipe, apart from those whose values are paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.track_settings import absolute
from foundation.core.errors import InputError, nearest
from foundation.core.files import local
from foundation.core.shown import reason, shown
from foundation.core.step_names import BASELINE, INPUT
from foundation.core.yaml_file import parse_yaml


def read_file(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, object]:
    """Reads a YAML file, on top of the recipes that it extends.

    Args:
        path: The file; also `recipe.lock.yaml` of a run.
        seen: The files that extend it.

    Raises:
        InputError: A file cannot be read, is no map, or extends itself.
    """
    path = local(path, "recipe")
    if path.is_dir():
        raise InputError(f"{path}", "is a folder", remedy="give a YAML file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{path}", f"cannot be read ({reason(error)})", remedy="give the path of a YAML recipe, or start one with `compress init`"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}", f"not UTF-8 text (byte {error.start})") from error
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path}", f"{type(raw).__name__} given", "a recipe is a map with the keys name, model, data, stages, ...")
    if raw.keys() >= {"schema", "recipe", "environment"}:  # recipe.lock.yaml of a run, which contains the resolved recipe
        raw = raw["recipe"]
        if not isinstance(raw, dict):
            raise InputError(f"{path}", f"recipe: {shown(raw)} given", "a map is allowed: `compress run` writes this file")
    raw = {str(key): value for key, value in raw.items()}
    parent = raw.pop("extends", None)
    base: dict[str, object] = {}
    if parent is not None:
        if not isinstance(parent, str):
            raise InputError(f"{path}", f"extends: {shown(parent)} given", "the path of another recipe is allowed")
        extended = local(path.resolve().parent / local(parent, f"{path}: extends"), f"{path}: extends").resolve()
        if extended in (*seen, path.resolve()):
            raise InputError(f"{path}", f"extends: {parent} leads back to itself")
        base = read_file(extended, (*seen, path.resolve()))
    _resolve_paths(raw, path.resolve().parent, _stage_ids({**base, **raw}))
    return _merge(base, raw)


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Merges maps recursively; everything else, including `stages`, is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


PATHS = (".teacher", ".extra_text.path", ".corpus.path")
"""Ends of keys of `search.space` whose values are paths."""
MEMBER = re.compile(r"-\d+(_\d+)?x")
"""End of the id of a member of a family, behind the id of its stage."""


def _resolve_paths(raw: dict[str, object], folder: Path, ids: Sequence[str]) -> None:
    """Makes the local paths of one recipe file absolute, in place; Hub ids stay unchanged.

    Args:
        raw: The recipe, or a part of it.
        folder: The folder that its paths are relative to.
        ids: Ids of the stages of the whole recipe. A teacher with such a name is a stage, even if a folder has the same name.
    """

    def is_stage(value: str) -> bool:
        return any(value == name or (value.startswith(name) and MEMBER.fullmatch(value, len(name))) for name in (BASELINE, INPUT, *ids))

    def resolved(value: object, stages: bool = False) -> object:
        if isinstance(value, list):
            return [resolved(entry, stages) for entry in value]
        if not isinstance(value, str) or not value or ":" in value or (stages and is_stage(value)):
            return value
        try:
            given = Path(value).expanduser()
            is_local = value.startswith(("./", "../", "~")) or given.is_absolute() or (folder / given).exists()
            return str((folder / given).resolve()) if is_local else value
        except (OSError, ValueError, RuntimeError):  # no file can have this path; whoever opens it says so, with its key
            return value

    def resolve(owner: object, key: str) -> None:
        if isinstance(owner, dict) and key in owner:
            owner[key] = resolved(owner[key], key == "teacher")

    for key in ("path", "run", "config"):
        resolve(raw.get("model"), key)
    resolve(raw.get("data"), "path")
    resolve(raw, "tokenizer")
    track = raw.get("track")
    if isinstance(track, dict) and isinstance(track.get("mlflow"), str):
        track["mlflow"] = absolute(track["mlflow"], folder)
    stages = raw.get("stages")
    for entry in stages if isinstance(stages, list) else []:
        for body in entry.values() if isinstance(entry, dict) else []:
            resolve(body, "teacher")
            for key in ("extra_text", "corpus"):
                resolve(body.get(key) if isinstance(body, dict) else None, "path")
    search = raw.get("search")
    space = search.get("space") if isinstance(search, dict) else None
    given = space if isinstance(space, dict) else {}
    for key, values in given.items():
        if str(key).endswith(PATHS):
            stage = str(key).endswith(".teacher")
            choices = values.get("choices") if isinstance(values, dict) else values
            given[key] = {**values, "choices": resolved(choices, stage)} if isinstance(values, dict) else resolved(choices, stage)


def apply(raw: dict[str, object], setting: str) -> None:
    """Sets one value of plain recipe data by a text `key.path=value`, in place; errors as of `put`."""
    key, separator, text = setting.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise InputError(f"--set {shown(setting)}", "not of the form key.path=value", remedy="for example --set data.max_length=64")
    put(raw, parts, parse_yaml(text, f"--set {key}"), f"--set {setting}")


def put(raw: dict[str, object], parts: Sequence[str], value: object, setting: str) -> None:
    """Sets one value of plain recipe data, in place; maps are merged.

    Args:
        raw: The recipe as a map.
        parts: The key path; a stage is named by its id.
        value: The value.
        setting: Where it was given, for messages.

    Raises:
        InputError: No stage has the id, or a value on the way has no keys.
    """
    if parts[0] == "stages" and len(parts) > 1:
        entry, name = _stage_entry(raw, parts[1], setting)
        _check_below(entry[name], parts, 2, setting)
        if len(parts) == 2:
            entry[name] = value
            return
        body, nested = entry[name], _nest(parts[2:], value)
        merged = _merge(body if isinstance(body, dict) else {}, _nest(parts[2:], value))
        _resolve_paths({"stages": [{name: nested}]}, Path.cwd(), _stage_ids(raw))
        entry[name] = merged | ({parts[2]: nested[parts[2]]} if len(parts) == 3 else {})
        return
    _check_below(raw, parts, 0, setting)
    override = _nest(parts, value)
    _resolve_paths(override, Path.cwd(), _stage_ids({**raw, **override}))
    merged = _merge(raw, override)
    raw.clear()
    raw.update(merged)


def _check_below(value: object, parts: Sequence[str], depth: int, setting: str) -> None:
    """Checks that an override does not set keys of a number, text or list; a switch (true, false, null) may become a map.

    Args:
        value: The value at the first `depth` parts of the path.
        parts: The path of the override.
        depth: See `value`.
        setting: The override, for the message.

    Raises:
        InputError: A value on the way has no keys.
    """
    while depth < len(parts):
        if not isinstance(value, dict | bool | None):
            above = ".".join(parts[:depth])
            raise InputError(setting, f"{above} is {shown(value)}, which has no keys", remedy=f"set {above} itself")
        value = value.get(parts[depth]) if isinstance(value, dict) else None
        depth += 1


def _stage_entry(raw: dict[str, object], stage_id: str, setting: str) -> tuple[dict[str, object], str]:
    """Returns the entry in `stages` with that id, and its stage; a bare `- export` becomes a map."""
    stages = raw.get("stages")
    entries: list[object] = stages if isinstance(stages, list) else []
    for position, entry in enumerate(entries):
        if isinstance(entry, str):
            entry = entries[position] = {entry: None}
        if not isinstance(entry, dict):
            continue
        for name, body in entry.items():
            if _stage_id(name, body) == stage_id:
                return entry, name
    ids = _stage_ids(raw)
    raise InputError(setting, f"no stage has the id {stage_id!r}", f"stages: {', '.join(ids) or 'none'}{nearest(stage_id, ids)}")


def _stage_ids(raw: Mapping[str, object]) -> list[str]:
    """Returns the ids of the stages of plain recipe data; entries that are malformed have none."""
    stages = raw.get("stages")
    entries = [{entry: None} if isinstance(entry, str) else entry for entry in stages] if isinstance(stages, list) else []
    return [_stage_id(name, body) for entry in entries if isinstance(entry, dict) for name, body in entry.items()]


def _stage_id(name: object, body: object) -> str:
    given = body.get("id") if isinstance(body, dict) else None
    return given if isinstance(given, str) else str(name)


def _nest(parts: Sequence[str], value: object) -> dict[str, object]:
    nested: dict[str, object] = {parts[-1]: value}
    for part in reversed(parts[:-1]):
        nested = {part: nested}
    return nested
