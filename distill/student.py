"""Builds the student: its architecture and its initial weights.

    layers, init   some layers of the incoming model, with its embeddings, pooler and head
        first, last   l_i = i,  l_i = L - k + i
        uniform       l_i = floor(i (L - 1) / (k - 1) + 1/2), including the first and the last: DistilBERT's {0, 2, 4, 7, 9, 11} of 12
        every_second  l_i = 2 i
        a list        these layers, counted from 1
        random        newly initialized blocks
    hidden, ffn, heads   fewer channels, neurons and heads: slices of the incoming model (`distill.width`)
    An encoder-decoder has two stacks of layers: one number or choice holds for either, a map {encoder: ..., decoder: ...} sets each.
    path           another checkpoint with its own fast tokenizer
    config         another shape or model type, newly initialized

A student with all layers equals the incoming model, bit for bit. Initialization from the teacher's layers:
https://arxiv.org/abs/1910.01108, section 3. `first` is the default: the first layers are already trained to follow each other, while other
selections must be adapted; https://arxiv.org/abs/2004.03844 also finds that the lower layers matter most. Not supported: searching for the
best layers.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distill.choices import Student
from distill.width import narrow, with_widths
from foundation.core.errors import InputError, Problem, nearest
from foundation.labels.tasks import Task
from foundation.models.adapters import model_folder
from foundation.models.architecture.attention import probe
from foundation.models.architecture.blocks import (
    Arguments,
    Keywords,
    Output,
    block_of,
    blocks_of,
    layer_name,
    source_of,
    stacks_of,
    states_of,
    with_layers,
)
from foundation.models.architecture.shapes import auto_class, remade
from foundation.models.checkpoint import load
from foundation.models.config import OWN_KEYS, ModelConfig, check_task, own_names
from foundation.models.folder import Checkpoint
from foundation.models.forward import device_of, modes_kept
from foundation.models.heads.reader import THRESHOLD_KEY
from foundation.models.importing import import_model
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import REFUSED, depths_of, one_line, quiet, task_classes, with_class
from foundation.models.own_shape import SHAPE_KEY
from foundation.stage.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CARRIED = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "type_vocab_size", "image_size", "num_channels")
"""Config keys that every student inherits, as it gets the same tokens or images as the incoming model."""


def student_config(student: Student, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    """Returns the Transformers config of the student without reading weights.

    Args:
        student: The student's settings.
        config: The Transformers config of the incoming model.
        key: Key path of the student, for error messages.

    Raises:
        InputError: No such student can be built.
    """
    if student.path is not None:
        with _errors_about_student(key):
            found = Checkpoint(model_folder(student.path, "model.path", None), "model.path").config
        return _with_labels_of(config, found)
    if student.config is not None:
        return _changed_config(student.config, config, f"{key}.config")
    depths = depths_of(config)
    if depths is None:
        raise InputError(
            key, f"a {config.model_type} is not a stack of equal layers", remedy="give another model as the student (path or config)"
        )
    if student.is_narrower and len(depths) > 1:
        name = next(name for name in ("hidden", "ffn", "heads") if getattr(student, name) is not None)
        raise InputError(
            f"{key}.{name}",
            f"{getattr(student, name)} given",
            f"a {config.model_type} has two stacks of layers, which cannot be made narrower",
            "give layers or config, or prune its FFNs",
        )
    try:
        chosen = with_layers(config, student.chosen(depths, key))
    except NotImplementedError as error:  # Funnel, whose layers come in blocks of several
        raise InputError(
            key,
            f"the number of layers of a {config.model_type} cannot be set ({one_line(error)})",
            remedy="give another model as the student (path or config)",
        ) from error
    return with_widths(chosen, student.hidden, student.ffn, student.heads, key) if student.is_narrower else chosen


def build(student: Student, parent: Path, context: Context, key: str) -> tuple[nn.Module, Path]:
    """Returns the student, in evaluation mode on the CPU, and the folder with its tokenizer or image processor.

    Args:
        student: The student's settings.
        parent: The incoming checkpoint.
        context: Task, labels, seed and scratch folder.
        key: Key path of the student, for error messages.

    Raises:
        InputError: No such student can be built, or it does not support the task.
    """
    if student.path is not None:
        folder = context.scratch / "student"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with _errors_about_student(key):
            import_model(_model_of(student, context.task), context.data.labels, context.seed, folder)
        return load(folder), folder
    incoming = load(parent)
    if student.config is not None:
        config = student_config(student, incoming.config, key)
        return _untrained(config, context.task, context.seed, f"{key}.config"), parent
    stacks = stacks_of(incoming, f"{key}.layers")
    new = frozenset(side for side in range(len(stacks)) if student.is_new(side))
    taken = take_layers(incoming, student.chosen([stack.depth for stack in stacks], key), f"{key}.layers", context.seed, new)
    if student.is_narrower:
        taken = narrow(taken, student_config(student, incoming.config, key), key)
    return taken, parent


def take_layers(model: nn.Module, layers: Sequence[int], key: str, seed: int = 0, new: frozenset[int] = frozenset()) -> nn.Module:
    """Returns a copy of a model with only the given layers.

    Args:
        model: A Transformers model.
        layers: The layers to copy, counted from 0 through all stacks; a layer may occur twice.
        key: Key path in the recipe, for error messages.
        seed: Seed for new weights.
        new: Stacks whose blocks are initialized anew, as Transformers does, instead of copied.

    Raises:
        InputError: The model has no repeated blocks, or its blocks differ in weights or depend on their position.
    """
    stacks, blocks = stacks_of(model, key), list(blocks_of(model, key).values())
    student: PreTrainedModel = _seeded(lambda: remade(model, with_layers(model.config, layers)), seed)
    taken, weights = model.state_dict(), student.state_dict()
    places = dict(zip(blocks_of(student, key), layers, strict=True))
    copied = [layer for side, stack in enumerate(stacks) if side not in new for layer in stack.numbers]
    for place, (name, layer) in enumerate(places.items()):
        missing = [weight for weight in blocks[layer].state_dict() if f"{name}.{weight}" not in weights and layer in copied]
        if missing:
            kind = model.config.model_type  # type: ignore[union-attr]
            first = list(layers) == list(range(len(layers)))
            remedy = "give the student by path or config" if first else "keep the first layers (init: first)"
            raise InputError(
                key,
                f"{layer_name(stacks, layer)} of this {kind} has a weight {missing[0]}, which {layer_name(stacks_of(student, key), place)} "
                "of a student does not have",
                "only layers with equal weights can be selected",
                remedy,
            )
    for target in weights:
        number = block_of(target, list(places))
        if number is not None and layers[number] not in copied:
            continue
        source = source_of(target, stacks, layers, taken)
        if source not in taken or taken[source].shape != weights[target].shape:
            kind = model.config.model_type  # type: ignore[union-attr]
            if number is None:
                raise InputError(
                    key,
                    f"{target} of this {kind} depends on the number of layers, so its layers cannot be selected",
                    remedy="give the student by path or config",
                )
            raise InputError(key, f"the blocks of this {kind} differ ({source})", "only equal blocks can be selected")
        weights[target] = taken[source]
    student.load_state_dict(weights)
    if not new:
        _check_same_outputs(model, student.eval(), layers, key)
    made: nn.Module = student.eval()
    return made


@torch.no_grad()
def _check_same_outputs(model: PreTrainedModel, student: nn.Module, layers: Sequence[int], key: str) -> None:
    """Checks that every copied block computes the same as its original: in some models a block depends on its position.

    Raises:
        InputError: A block computes something else.
    """
    stacks, blocks = stacks_of(model, key), list(blocks_of(model, key).values())
    calls: dict[nn.Module, tuple[Arguments, Keywords, Tensor]] = {}

    def record(block: nn.Module, inputs: Arguments, options: Keywords, output: Output) -> None:
        calls[block] = (inputs, options, states_of(output))

    hooks = [block.register_forward_hook(record, with_kwargs=True) for block in blocks]
    kind, config = model.config.model_type, model.config
    inputs = {name: value.to(device_of(model)) for name, value in probe(model, torch.Generator().manual_seed(0)).items()}
    try:  # the blocks alone: a task's head may want other inputs
        with modes_kept(model):
            model.eval().base_model(**inputs, **({"use_cache": False} if getattr(config, "use_cache", False) else {}))
    finally:
        for hook in hooks:
            hook.remove()
    if any(blocks[layer] not in calls for layer in layers):
        raise InputError(
            key,
            f"a {kind} does not run its layers as modules, so a student's layers cannot be compared with its own",
            remedy="give the student by path or config",
        )
    for place, (block, layer) in enumerate(zip(blocks_of(student, key).values(), layers, strict=True)):
        given, options, expected = calls[blocks[layer]]
        if not torch.allclose(states_of(block(*given, **options)), expected, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise InputError(
                key,
                f"{layer_name(stacks, layer)} of this {kind} computes something else as {layer_name(stacks_of(student, key), place)} "
                "of a student, with equal weights",
                "its layers cannot be selected",
                "give the student by path or config",
            )


def check_student(student: Student, context: Context, num_labels: int | None, key: str) -> None:
    """Checks, before anything is trained, that another checkpoint can be the student; warns where its head is given up unasked.

    Args:
        student: The student's settings.
        context: Task and labels.
        num_labels: Number of labels of the data, if known.
        key: Key path of the student, for error messages.

    Raises:
        InputError: The checkpoint does not support the task.
    """
    if student.path is None:
        return
    with _errors_about_student(key):
        found = Checkpoint(model_folder(student.path, "model.path", None), "model.path").config
        check_task(_model_of(student, context.task), found, num_labels)
    if "head" not in student.model_fields_set and _has_head(student, found, context, num_labels):
        context.progress.warn(
            f"{key}.path: {student.path} is a {found.architectures[0]}; its trained head is replaced by a new one, "
            f"as {key}.head is not given: give keep to go on with it, or new"
        )


def _has_head(student: Student, trained: PreTrainedConfig, context: Context, num_labels: int | None) -> bool:
    """Whether a checkpoint brings a head that `head: keep` would take: one for this task and these labels."""
    if not trained.architectures or not context.facts.answer.FROM_HEAD:
        return False
    try:
        check_task(ModelConfig(path=student.path, task=context.task, head="keep"), trained, num_labels)
    except InputError:
        return False
    return not context.facts.answer.classifies or own_names(trained) in (None, context.data.labels)


def _model_of(student: Student, task: Task) -> ModelConfig:
    return ModelConfig(path=student.path, task=task, head=student.head)


def _changed_config(changes: dict[str, Any], config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    """Returns the config of a newly initialized student: the incoming model's, or the default of another type, with some keys changed."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = changes.get("model_type", config.model_type)
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{key}.model_type", f"{kind!r} given", remedy=f"give a model type of Transformers{nearest(str(kind), CONFIG_MAPPING)}"
        )
    same = kind == config.model_type
    default = AutoConfig.for_model(kind)
    aliases, names = default.attribute_map, set(default.to_dict())
    allowed = (names | set(aliases)) - OWN_KEYS
    unknown = sorted(set(changes) - allowed - {"model_type"})
    if unknown:
        raise InputError.of(
            Problem(f"{key}.{name}", f"not a config key of a {kind} that can be set here{nearest(name, allowed)}") for name in unknown
        )
    values = {aliases.get(name, name): value for name, value in changes.items() if name != "model_type"}
    if same:
        carried = _same_shape(config.to_dict(), values, aliases)
    else:
        carried = {name: getattr(config, name) for name in CARRIED if name in names and hasattr(config, name)}
    other = [name for name in CARRIED if name in values and values[name] != getattr(config, name, values[name])]
    if other:
        raise InputError.of(
            Problem(f"{key}.{name}", f"{values[name]} given", f"a student must use the incoming model's value ({getattr(config, name)})")
            for name in other
        )
    own = {"model_type", "architectures", "transformers_version", "_name_or_path", SHAPE_KEY}
    try:
        built = AutoConfig.for_model(kind, **{name: value for name, value in {**carried, **values}.items() if name not in own})
    except (StrictDataclassError, *REFUSED) as error:
        raise InputError(key, f"not a valid {kind} config ({one_line(error)})") from error
    return _with_labels_of(config, built)


def _same_shape(carried: dict[str, Any], values: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Returns the incoming model's config keys without those derived from a changed size, which Transformers recomputes.

    Lists with one entry per layer are dropped if the depth changes. Head size and number of key-value heads follow the new width and heads
    if they did so in the incoming model.

    Args:
        carried: All config keys of the incoming model.
        values: The changed keys.
        aliases: Maps Transformers' generic key names to the key names of this model type.
    """
    depth, width, heads = (aliases.get(name, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    derived = set()
    if values.get(depth, carried.get(depth)) != carried.get(depth):
        derived = {name for name, value in carried.items() if isinstance(value, list | tuple) and len(value) == carried[depth]} - {*CARRIED}
    kept = {name: value for name, value in carried.items() if name not in derived}
    if {width, heads} & values.keys() and carried.get("head_dim") and carried["head_dim"] * carried[heads] == carried[width]:
        kept["head_dim"] = values.get(width, carried[width]) // values.get(heads, carried[heads])
    if heads in values and carried.get("num_key_value_heads") == carried[heads]:
        kept["num_key_value_heads"] = values[heads]
    return kept


def _with_labels_of(config: PreTrainedConfig, changed: PreTrainedConfig) -> PreTrainedConfig:
    changed.id2label, changed.label2id = copy.deepcopy(config.id2label), copy.deepcopy(config.label2id)
    changed.problem_type = config.problem_type
    if hasattr(config, THRESHOLD_KEY):
        setattr(changed, THRESHOLD_KEY, getattr(config, THRESHOLD_KEY))
    return changed


def _untrained(config: PreTrainedConfig, task: Task, seed: int, key: str) -> nn.Module:
    if not task_classes(config, task):
        raise InputError(f"{key}.model_type", f"a {config.model_type} does not support {task}", remedy="give a model type that does")
    try:
        return _seeded(lambda: with_linears(auto_class(task, config).from_config(with_class(config, task))), seed).eval()
    except REFUSED as error:
        raise InputError(key, f"no such {config.model_type} can be created ({one_line(error)})", remedy="check the sizes") from error


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        return make()


@contextmanager
def _errors_about_student(key: str) -> Iterator[None]:
    """Rewrites the key paths in errors about a model to the student's."""
    try:
        yield
    except InputError as error:
        problems = [problem.renamed(" (then finetune must be the first stage)", "") for problem in error.problems]
        raise InputError.of(p.renamed("model.path", f"{key}.path").renamed("model.head", f"{key}.head") for p in problems) from error
