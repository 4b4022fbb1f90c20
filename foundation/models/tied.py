"""Tied weights: one parameter under several names, such as a head and the embeddings.

A model built from a config ties what the config says. A model loaded from files need not be tied alike. If both weights are stored, with
different values, Transformers leaves them apart whatever the config says. And `T5Config` turns `tie_word_embeddings: false` into "do not
scale the decoder's output" and then sets it to true. So the config of Flan-T5 ties, although its head is a weight of its own.

A model that is built again and then filled with the weights of its source has to share what the source shares, and nothing else. Otherwise
the second of two weights overwrites the first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def shared_as(model: nn.Module, source: nn.Module) -> None:
    """Ties the parameters of a model exactly like the parameters of the same names in its source, in place.

    Parameters that the source does not have, such as a new head's, stay as they are.

    Args:
        model: A model that was built from a config.
        source: The model whose weights it gets.
    """
    owners = {name: _identity(parameter) for name, parameter in source.named_parameters(remove_duplicate=False)}
    _part(model, owners)
    first: dict[Hashable, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        tied = first.setdefault(owners.get(name, name), parameter)
        if tied is not parameter:  # models built without values are not tied by Transformers
            _place(model, name, tied)


def shared_names(model: nn.Module) -> frozenset[frozenset[str]]:
    """Returns the names of each parameter that has several."""
    names: dict[Hashable, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(_identity(parameter), set()).add(name)
    return frozenset(frozenset(group) for group in names.values() if len(group) > 1)


def apart(model: nn.Module, stored: Collection[str]) -> None:
    """Unties, in place, each parameter of a model that a file stores under its own name.

    Args:
        model: A model that was built from a config.
        stored: Names of the weights in the file; of a tied weight only one of the names.
    """
    _part(model, {name: name for name in stored})


def note_apart(config: PreTrainedConfig, names: Collection[str]) -> None:
    """Notes in a config, in place, which tied weights the files of its model store under names of their own.

    What is then built from the config, or from a copy of it with other sizes, is untied by `untie_noted`. A plan counts models this way,
    whose weights it does not read.
    """
    if names:
        config.weights_apart = sorted(names)


def untie_noted(model: Any) -> None:
    """Unties, in place, the weights of a model that its config notes (`note_apart`)."""
    if names := getattr(model.config, "weights_apart", ()):
        apart(model, names)


def _identity(parameter: nn.Parameter) -> Hashable:
    """Returns the key that tied parameters share: the address, or the object where there is none, as on the meta device."""
    return (parameter.data_ptr(), parameter.shape) if parameter.numel() and not parameter.is_meta else id(parameter)


def _part(model: Any, owners: Mapping[str, Hashable]) -> None:
    """Copies parameters whose names have different owners; names without an owner stay with the first name of their parameter."""
    copies: dict[tuple[int, Hashable], nn.Parameter] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for number, group in names.items():
        kept = next((owners[name] for name in group if name in owners), None)
        for name in group:
            owner = owners.get(name, kept)
            if owner == kept:
                continue
            parameter = model.get_parameter(name)
            copies.setdefault((number, owner), nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
            _place(model, name, copies[number, owner])
    # what Transformers ties again after the vocabulary has changed
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(tied.items()):
        if model.get_parameter(target) is not model.get_parameter(source):
            del tied[target]


def _place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, child = name.rpartition(".")
    setattr(model.get_submodule(path), child, parameter)
