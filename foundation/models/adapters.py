"""Adapters of peft next to a model: they are added to its weights where the recipe says so, and refused otherwise.

    DIR/config.json, model.safetensors                      the model
    DIR/adapter_config.json, adapter_model.safetensors      what was trained on top of it

Transformers puts such an adapter on a model that it loads, as modules of its own, and then reports the missing weights of the adapter as if
they were missing in the model. Whether the weights hold the adapter already cannot be read from the files, so the recipe has to say.
Merging is peft's: W + (alpha / r) B A for low-rank adapters (https://arxiv.org/abs/2106.09685). Not supported: adapters that do not change
weights, such as learned prompts; adapters without the weights of their model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.models.adapter_files import ADAPTERS_JSON
from foundation.models.files import find
from foundation.models.library import REFUSED, one_line, preview, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_JSON, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of weight names in peft's files."""
Adapter = Literal["merge"]


def model_folder(path: str, key: str, adapter: Adapter | None, *, weights: bool = False) -> Path:
    """Returns the local folder of a model, as `foundation.models.files.find`, after a check of the adapter next to it.

    Args:
        path: Local folder or Hub id.
        key: Key path in the recipe, for messages.
        adapter: The recipe's setting for an adapter.
        weights: Whether to download the weights too.

    Raises:
        InputError: There is no such folder; there is an adapter without a setting for it; or there is none to merge.
    """
    folder = find(path, key, weights=weights)
    if (folder / ADAPTERS_JSON).is_file():
        reason = f"{folder} holds a model with adapters, of which a run would start without them"
        raise InputError(key, reason, remedy="give the model that they were trained on")
    if not (folder / ADAPTER_JSON).is_file():
        if adapter is not None:
            raise InputError(f"{key.rpartition('.')[0]}.adapter", f"{adapter} given", f"{folder} has no {ADAPTER_JSON}", "leave it out")
        return folder
    settings = read_json(folder / ADAPTER_JSON, key)
    named = settings.get("base_model_name_or_path")
    base = shown(named if named else "an unknown model", 120)
    what = f"an adapter of peft ({shown(settings.get('peft_type'), 40)}, for {base})"
    local = weights or any(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or (local and not any(folder.glob("model*.safetensors"))):
        raise InputError(
            key,
            f"{folder} holds {what} alone, without the weights of the model",
            remedy=(
                f"give the model with the adapter merged (merge_and_unload of peft), or put the files of {base} beside "
                "the adapter and give model.adapter: merge"
            ),
        )
    if adapter is None:
        raise InputError(
            key,
            f"{folder} holds {what} beside the weights of the model",
            remedy=(
                "give model.adapter: merge to add it to them (for a model elsewhere in the recipe merge_and_unload "
                f"of peft does so), or remove {ADAPTER_JSON} if the weights hold it already"
            ),
        )
    if local and not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(key, f"{folder} has no {ADAPTER_WEIGHTS}", remedy="save the adapter again with save_pretrained of peft")
    return folder


@contextmanager
def without_adapter(folder: Path) -> Iterator[Path]:
    """Yields a folder with links to the files of a model but for the files of its adapter, which Transformers would load too."""
    if not (folder / ADAPTER_JSON).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for file in folder.iterdir():
            if file.name not in (ADAPTER_JSON, ADAPTER_WEIGHTS):
                (Path(temporary) / file.name).symlink_to(file.resolve())
        yield Path(temporary)


def brought(folder: Path, key: str) -> set[str]:
    """Returns the names of the weights that an adapter replaces as a whole, such as a head that was trained with it.

    Raises:
        InputError: The adapter's file is damaged, or one of its weights is not finite.
    """
    import torch

    names: set[str] = set()
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dict
                if not torch.isfinite(stored.get_tensor(name).float()).all():
                    raise InputError(
                        key, f"{folder / ADAPTER_WEIGHTS}: {name} has values that are NaN or infinite", remedy="give finite weights"
                    )
                names.add(name.removeprefix(PREFIX))
    except (SafetensorError, OSError) as error:
        raise InputError(key, f"{folder / ADAPTER_WEIGHTS} cannot be read ({one_line(error)})", remedy="save the adapter again") from error
    return names


def merged(model: PreTrainedModel, folder: Path, key: str) -> PreTrainedModel:
    """Returns a model with the adapter of its folder added to its weights.

    Args:
        model: A stock Transformers model in float32.
        folder: Folder with the adapter.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The adapter does not fit the model, or cannot be merged into weights.
    """
    from peft import PeftModel

    what = f"the adapter of {folder}"
    try:
        with quiet():
            wrapped: Any = PeftModel.from_pretrained(model, str(folder), local_files_only=True)
            result = wrapped.load_adapter(str(folder), "default", local_files_only=True)  # again, as only this says what did not fit
            whole = wrapped.merge_and_unload()
    except (OSError, NotImplementedError, *REFUSED) as error:
        raise InputError(
            key, f"{what} cannot be merged ({one_line(error)})", remedy="merge it with peft first, and give the result"
        ) from error
    lost = [*result.missing_keys, *result.unexpected_keys]
    if lost:
        raise InputError(
            f"{what} does not fit the model ({preview(lost)}", "missing, or not of the model); give files that belong together"
        )
    return whole
