"""How the layers of a Transformer are shared by several processes: Megatron's split into columns and rows.

    columns   queries, keys, values and the first FFN matrices: each process has some heads, and some FFN neurons
    rows      the output projection and the last FFN matrix: each process has the inputs from its heads and neurons

        y = sum_p (f(x @ A_p.T + a_p)) @ B_p.T + b        A = [A_1; A_2; ...] by rows of the weight [O, I], B = [B_1, B_2, ...] by columns

Between a column and a row layer nothing is exchanged: heads do not read each other, and activations are elementwise. After a row layer
the processes add up their parts, and so they do in the backward pass with the gradient of what a column layer reads. Embeddings, norms
and heads of tasks stay whole, as does the residual stream.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3. The layers are found by structure
(`foundation.models.architecture.structure`), not by name. A layer that makes queries, keys and values (GPT-2) or gate and up projection
side by side is put into an order in which the share of each process is contiguous, and taken out of it again when the model is gathered.

Not supported: mixtures of experts; parameters between columns and rows, whose gradients would differ between processes (norms of queries
and keys, biases of a head, tables of relative positions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError, Problem
from foundation.labels.tasks import Task
from foundation.models.architecture.attention import Attention
from foundation.models.architecture.blocks import stacks_of, with_layers
from foundation.models.architecture.shapes import COUNTS, auto_class, on_meta, set_counts
from foundation.models.architecture.structure import HEAD_KINDS, HeadAxes, Structure, head_pieces, is_interleaved
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import REFUSED, on_meta_else_cpu, one_line, quiet, uninitialized, with_class
from foundation.models.meta import on_meta_device
from foundation.models.size import inputs_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Split:
    """The shares of `processes` processes in the layers of a model."""

    processes: int
    columns: Mapping[str, tuple[int, ...]]
    """Layers whose outputs are shared, by module name: lengths of the parts that are concatenated in them, such as queries, keys and
    values; each part is shared."""
    rows: tuple[str, ...]
    """Layers whose inputs are shared."""
    regions: tuple[tuple[tuple[str, ...], str], ...]
    """For each attention and FFN: its column layers, the first of which is called first, and its row layer."""
    counts: Mapping[str, Mapping[str, int]]
    """Attributes of attention modules, by module name, as they are in one process."""

    def orders(self) -> dict[str, Tensor]:
        """Returns the order of the outputs in which each share is contiguous, int64 `[O]`, by layer; those that have it already lack."""
        return {name: _order(parts, self.processes) for name, parts in self.columns.items() if len(parts) > 1}


def _order(parts: Sequence[int], processes: int) -> Tensor:
    ends = torch.tensor(parts).cumsum(0).tolist()
    pieces = [torch.arange(end - part, end).chunk(processes) for part, end in zip(parts, ends, strict=True)]
    return torch.cat([piece[process] for process in range(processes) for piece in pieces])


def split_of(model: nn.Module, processes: int, key: str) -> Split:
    """Returns how processes share the layers of a model.

    Args:
        model: A Transformers model with `nn.Linear` in place of `Conv1D`; its weights are not read and may be on the meta device.
        processes: Number of processes, at least 2.
        key: Key path in the recipe, for messages.

    Raises:
        InputError: The layers cannot be found or shared, or their sizes do not divide.
    """
    structure = Structure.of(model, key)
    config: PreTrainedConfig = model.config
    given = Problem(f"{key}: parallel.tensor", f"{processes} given", f"this {config.model_type}")
    if any(structure.sizes.experts):
        raise InputError.of(
            [given.because("is a mixture of experts, whose layers are not shared", "give tensor: 1, and strategy: fsdp2 if it is large")]
        )
    _check_sizes(structure, processes, replace(given, allowed=""))
    columns: dict[str, tuple[int, ...]] = {}
    regions: list[tuple[tuple[str, ...], str]] = []
    counts: dict[str, Mapping[str, int]] = {}
    for block in range(structure.depth):
        for what in HEAD_KINDS:
            found = structure.of_heads(block, what)
            if found is not None:
                made = _of_heads(*found)
                columns |= made
                regions.append((tuple(made), found[0].output))
                counts[found[0].module] = _counts(found[0], processes)
        made, last = _of_ffn(model, structure, block, given)
        columns |= made
        regions += [(tuple(made), last)] if made else []
    rows = tuple(row for _, row in regions)
    _check_between(model, structure, {*columns, *rows}, given)
    return Split(processes, columns, rows, tuple(regions), counts)


def shrink(model: nn.Module, split: Split) -> nn.Module:
    """Cuts the layers of a model to the sizes that one process has, in place; returns the model. Its weights lose their values.

    For running it without the other processes: to see what it takes, and whether it runs at all.
    """
    for name in {*split.columns, *split.rows}:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        outputs = layer.out_features // (split.processes if name in split.columns else 1)
        inputs = layer.in_features // (split.processes if name in split.rows else 1)
        bias, kind = layer.bias is not None, layer.weight
        with torch.device(kind.device), uninitialized():
            made = nn.Linear(inputs, outputs, bias=bias, dtype=kind.dtype)
        model.set_submodule(name, made.train(layer.training))
    for name, values in split.counts.items():
        set_counts(model.get_submodule(name), values)
    return model


def check_split(config: PreTrainedConfig, task: Task, length: int, processes: int, key: str) -> None:
    """Checks before the first stage that processes can share the layers of a model, by running the share of one.

    It runs on the meta device; models that look at values run on the CPU, with weights that are not initialized.

    Args:
        config: Transformers config of the model.
        task: The task.
        length: Tokens of a row.
        processes: Number of processes that share each layer; 1 is always possible.
        key: Key path of the stage, for messages.

    Raises:
        InputError: They cannot; see `split_of`.
    """
    if processes == 1:
        return
    named = with_class(config, task)
    split_of(on_meta(named), processes, key)
    try:
        on_meta_else_cpu(lambda meta: _run_share(named if meta else _small(named, key), task, length, processes, meta=meta))
    except REFUSED as error:
        given = Problem(f"{key}: parallel.tensor", f"{processes} given", f"a share of the layers of this {config.model_type}")
        raise InputError.of(
            [given.because(f"does not run ({one_line(error)})", "give tensor: 1, and strategy: fsdp2 if it is large")]
        ) from error


def _small(config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    return with_layers(config, [stack.first for stack in stacks_of(on_meta(config), key)])


def _run_share(config: PreTrainedConfig, task: Task, length: int, processes: int, *, meta: bool) -> None:
    split = split_of(on_meta(config), processes, "model")
    with torch.random.fork_rng(devices=[]), on_meta_device() if meta else uninitialized(), quiet(), torch.no_grad():
        model: PreTrainedModel = shrink(with_linears(auto_class(task, config).from_config(config)), split)
        model.eval()(**inputs_of(config, task, length, masked=not meta))


def _of_heads(attention: Attention, axes: HeadAxes) -> dict[str, tuple[int, ...]]:
    """Returns the column layers of an attention, with the parts of each."""
    made: dict[str, tuple[int, ...]] = {}
    for (weight, axis), parts in sorted(axes.items()):  # a set made them: in every process another order
        name, _, kind = weight.rpartition(".")
        if kind == "weight" and axis == 0:
            pieces = head_pieces(attention, parts)
            made[name] = (sum(pieces),) if is_interleaved(attention, parts) else tuple(pieces)
    return made


def _counts(attention: Attention, processes: int) -> dict[str, int]:
    """Returns the attributes of an attention module of a share."""
    heads, key_value_heads = attention.heads // processes, attention.key_value_heads // processes
    values = {"heads": heads, "key_value_heads": key_value_heads, "inner": heads * attention.head_dim}
    return {name: value for count, value in values.items() for name in COUNTS[count]}


def _of_ffn(model: nn.Module, structure: Structure, block: int, setting: Problem) -> tuple[dict[str, tuple[int, ...]], str]:
    """Returns the column layers of the FFN of a block, with the parts of each, and its row layer; none for a block without FFN.

    Raises:
        InputError: Other parameters follow the number of neurons, or there is not one row layer.
    """
    made: dict[str, tuple[int, ...]] = {}
    rows: list[str] = []
    for weight, axis in sorted(structure.ffn[block]):
        name, _, kind = weight.rpartition(".")
        if not isinstance(model.get_submodule(name), nn.Linear):
            raise InputError.of([setting.because(f"has {weight}, which follows its FFN neurons but is no linear layer", "give tensor: 1")])
        if kind == "weight" and axis == 0:
            times = structure.repeated.get((weight, axis), 1)
            made[name] = (structure.sizes.ffn[block],) * times
        elif kind == "weight":
            rows.append(name)
    if structure.ffn[block] and (len(rows) != 1 or not made or rows[0] in made):
        raise InputError.of(
            [setting.because("has an FFN that is not made of layers into neurons and one layer out of them", "give tensor: 1")]
        )
    return made, rows[0] if rows else ""


def _check_between(model: nn.Module, structure: Structure, shared: set[str], setting: Problem) -> None:
    """Raises an `InputError` for parameters that act on the heads of one process alone, or belong to heads but to no layer."""
    for block in range(structure.depth):
        for what in HEAD_KINDS:
            found = structure.of_heads(block, what)
            inside = model.get_submodule(found[0].module) if found else nn.Module()
            for name, _ in inside.named_parameters(prefix=found[0].module if found else ""):
                if name.rpartition(".")[0] not in shared:
                    raise InputError.of(
                        [setting.because(f"has {name} inside its attention, which every share would train apart", "give tensor: 1")]
                    )
    if structure.tables:
        raise InputError.of(
            [setting.because(f"has {structure.tables[0]} with an entry for each head, which is not shared", "give tensor: 1")]
        )


def _check_sizes(structure: Structure, processes: int, setting: Problem) -> None:
    """Raises an `InputError` for all sizes that the processes do not divide, with the nearest that they do."""
    sizes = structure.sizes
    problems: list[str] = []
    for block in range(structure.depth):
        for what, size in _sizes(sizes, block):
            if size % processes:
                fits = [number for number in (size - size % processes, size - size % processes + processes) if number]
                problems.append(f"block {block} has {size} {what} (nearest that divide: {' or '.join(map(str, fits))})")
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        remedy = f"give tensor: 1, or prune with prune: {{divisible_by: {processes}}}"
        raise InputError.of([setting.because(f"{problems[0]}{more}", remedy)])


def _sizes(sizes: Any, block: int) -> Iterator[tuple[str, int]]:
    grouped = sizes.key_value_heads[block] < sizes.heads[block]
    yield ("key and value heads", sizes.key_value_heads[block]) if grouped else ("heads", sizes.heads[block])
    if sizes.cross and sizes.cross[block]:
        yield "heads that read the encoder", sizes.cross[block]
    if sizes.ffn[block]:
        yield "FFN neurons", sizes.ffn[block]
