"""The file of a plan: safetensors, with the plan as JSON under `plan` of its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foundation.core.errors import InputError

FORMAT = 4
KIND = "kind"
"""Entry of the JSON: what the plan is of."""
Document = Mapping[str, Any]
Made = TypeVar("Made")


def write_file(path: Path, kind: str, document: Document, tensors: Mapping[str, Tensor]) -> None:
    """Writes the file of a plan.

    Args:
        path: The file.
        kind: What the plan is of: encoder or decoder.
        document: What the JSON says besides.
        tensors: By name; they are copied, so that they may share memory.
    """
    entire = {"format": FORMAT, KIND: kind, **document}
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path, {"plan": json.dumps(entire)})


def read_file(path: Path, makers: Mapping[str, Callable[[Document, Mapping[str, Tensor]], Made]]) -> Made:
    """Returns the plan of a file.

    Args:
        path: The file.
        makers: Make the plan from JSON and tensors, by kind.

    Raises:
        InputError: The file is missing, damaged, of another format, or of a kind that is not among the makers.
    """
    try:
        with safe_open(path, "pt") as file:
            document = json.loads((file.metadata() or {})["plan"])
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}; this version reads {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
        return makers[document[KIND]](document, tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{path}", f"cannot be used as a plan ({type(error).__name__}: {error})", remedy="export again") from error
