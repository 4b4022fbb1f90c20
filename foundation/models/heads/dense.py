"""The linear layer that some models of sentence-transformers have behind their pooling, such as sentence-t5 and GTR: the module Dense.

    v = f(W v + b)                    f: none, tanh, ReLU or GELU; b may be missing

In our checkpoints its weights are the layer `sentence_dense` of the model. sentence-transformers has a folder for them, which is read when
a model is imported and written again next to a checkpoint.

Left out: several such modules, and ones that read or write something else than the vector of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import read_json
from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.core.shown import shown
from foundation.models.files import fetched
from foundation.models.library import REFUSED, one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYER = "sentence_dense"
"""Name of the layer in a model."""
WEIGHTS = "model.safetensors"
THEIR_ACTIVATIONS = {
    "none": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
}
"""Activations by our names, as sentence-transformers writes them."""
VECTOR = "sentence_embedding"
"""What a module reads and writes, in the words of sentence-transformers."""


class DenseSettings(TypedDict):
    """The layer, in the settings of a model."""

    outputs: int
    bias: bool
    activation: str
    """A key of `THEIR_ACTIVATIONS`."""


def read_dense(folder: Path, name: str, path: str | None) -> DenseSettings:
    """Returns the settings of the module in a subfolder of a model.

    Args:
        folder: The folder of the model.
        name: The subfolder.
        path: `model.path` of the recipe.

    Raises:
        InputError: The file is missing or damaged, or names what is not supported.
    """
    file = fetched(folder, f"{name}/config.json", path, "model.path")
    if not file.is_file():
        raise InputError("model.path", f"{folder} has no config.json of its Dense module", remedy="copy the whole folder of the model")
    settings: Any = read_json(file, "model.path")
    names = {theirs: ours for ours, theirs in THEIR_ACTIVATIONS.items()}
    activation, outputs, bias = settings.get("activation_function"), settings.get("out_features"), settings.get("bias", True)
    if activation not in names:
        allowed = f"{one_of(list(names))} is allowed"
        raise InputError("model.path", f"{file} has the activation_function {shown(activation)}", allowed, "give another model")
    if type(outputs) is not int or outputs < 1 or type(bias) is not bool:
        raise InputError("model.path", f"{file} has {shown(outputs)} out_features and the bias {shown(bias)}", "a number and true or false")
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, VECTOR) not in (None, VECTOR):
            raise InputError("model.path", f"{file} has the {key} {shown(settings[key])}", f"{VECTOR} is allowed", "give another model")
    return DenseSettings(outputs=outputs, bias=bias, activation=names[activation])


def weights_file(folder: Path, name: str, path: str | None) -> Path:
    """Returns the file with the weights of the module in a subfolder of a model.

    Raises:
        InputError: There is none.
    """
    file = fetched(folder, f"{name}/{WEIGHTS}", path, "model.path")
    if not file.is_file():
        remedy = "save the model again with save_pretrained of SentenceTransformer, which writes safetensors"
        raise InputError("model.path", f"{folder / name} has no {WEIGHTS}", "the weights of its Dense module are needed", remedy)
    return file


def load_dense(layer: nn.Linear, file: Path) -> None:
    """Copies the weights of a module of sentence-transformers into a layer.

    Raises:
        InputError: The file cannot be read, or its weights do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = {name.removeprefix("linear."): tensor for name, tensor in load_file(file).items()}
        layer.load_state_dict(stored)
    except (OSError, SafetensorError, *REFUSED) as error:
        raise InputError("model.path", f"{file} does not fit the model ({one_line(error)})", remedy="copy the whole folder") from error


def write_dense(folder: Path, weight_OI: Tensor, bias_O: Tensor | None = None, activation: str = "none") -> None:
    """Writes the module.

    Args:
        folder: Folder to write into; created.
        weight_OI: W.
        bias_O: b; None without.
        activation: f, a key of `THEIR_ACTIVATIONS`.
    """
    from safetensors.torch import save_file

    outputs, inputs = weight_OI.shape
    settings = {"in_features": inputs, "out_features": outputs, "bias": bias_O is not None}
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", {**settings, "activation_function": THEIR_ACTIVATIONS[activation]})
    tensors = {"linear.weight": weight_OI, **({} if bias_O is None else {"linear.bias": bias_O})}
    save_file({name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def activations() -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Returns the functions f, by name."""
    import torch

    return {"none": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
