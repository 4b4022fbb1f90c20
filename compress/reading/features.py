"""The names by which the datasets library numbers classes: the names of ClassLabel columns, also in lists, as for sets of labels and for
tags.

    parquet          the entry `huggingface` of its schema: {"info": {"features": {...}}}
    other tables     dataset_info.json next to the file, or in the folder above: {"features": {...}}

A column of numbers without such names means what `compress.reading.labels` says. Of a README.md of the Hub nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from foundation.core.errors import InputError
from foundation.core.shown import reason, shown
from foundation.data.tables import Column, Table, opened, parquet_file, parse_json, suffix

INFO = "dataset_info.json"
SCHEMA_ENTRY = b"huggingface"


def label_names_of(table: Table, column: Column) -> tuple[str, ...]:
    """Returns the names of the classes of a column by id; () where nothing numbers them.

    Raises:
        InputError: The file cannot be read, or what should name the classes is damaged.
    """
    if not isinstance(column, str):
        return ()
    found = _in_schema(table) if suffix(table.path) == ".parquet" else None
    where, features = found or _beside(table.path)
    return names_in(features.get(column), f"{where}: column {shown(column)}")


def names_in(feature: object, where: str) -> tuple[str, ...]:
    """Returns the names of a ClassLabel, or of the members of a list of them, by id; () of any other feature.

    Args:
        feature: As `Features.to_dict` of the datasets library writes it.
        where: Start of the message.

    Raises:
        InputError: The names are no texts, or two are equal.
    """
    while True:
        if isinstance(feature, list) and len(feature) == 1:  # as versions before 4 wrote lists
            feature = feature[0]
        elif isinstance(feature, Mapping) and "feature" in feature and "_type" in feature:
            feature = feature["feature"]
        else:
            break
    if not isinstance(feature, Mapping) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names) or len(set(names)) < len(names):
        raise InputError(where, f"names its classes {shown(names, 80)}", "different texts are allowed", "write the file again")
    return tuple(names)


def _in_schema(table: Table) -> tuple[str, Mapping[str, object]] | None:
    """Returns where the features of a parquet file are written, and the features; None without."""
    import pyarrow

    with opened(table) as stream:
        try:
            text = (parquet_file(stream).schema_arrow.metadata or {}).get(SCHEMA_ENTRY)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{table.path}", f"not a readable parquet file ({reason(error)})", remedy="write it again") from error
    if text is None:
        return None
    where = f"{table.path}: {SCHEMA_ENTRY.decode()} in its schema"
    written = parse_json(where, text.decode("utf-8", "replace"))
    info = written.get("info") if isinstance(written, dict) else None
    return where, _features(info)


def _beside(path: Path) -> tuple[str, Mapping[str, object]]:
    """Returns the name of the file that describes a table, and the features; nothing without such a file."""
    for folder in (path.parent, path.parent.parent):
        file = folder / INFO
        if file.is_file():
            with opened(Table(file, ())) as stream:
                return str(file), _features(parse_json(str(file), stream.read().decode("utf-8", "replace")))
    return "", {}


def _features(info: object) -> Mapping[str, object]:
    features = info.get("features") if isinstance(info, dict) else None
    return features if isinstance(features, dict) else {}
