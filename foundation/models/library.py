"""Small interface to Transformers: the model classes of a task, its exceptions, and silencing its output."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from foundation.core.shown import reason
from foundation.labels.tasks import TASKS, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REFUSED = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, AssertionError, AttributeError, ImportError)
"""Exceptions that Transformers raises for configs it cannot build a model from."""
DECODER_DEPTHS = ("num_decoder_layers", "decoder_layers")
"""Config keys of the number of layers of an encoder-decoder's decoder; `num_hidden_layers` counts the layers of its encoder."""


T = TypeVar("T")
_uninitialized, _inside, _entering = ExitStack(), 0, threading.Lock()
SIDES = ("encoder", "decoder")
"""The stacks of an encoder-decoder, in order."""


def stock_auto(task: Task) -> Any:
    """Returns the Transformers auto class of a task, such as `AutoModelForCausalLM`."""
    import transformers

    return getattr(transformers, TASKS[task].auto_class)


def task_of(config: PreTrainedConfig, *, generates: bool = False) -> Task:
    """Returns a task for which a checkpoint can be loaded, from the model class named in its config; else the first in the table.

    Args:
        config: A Transformers config.
        generates: Whether it has to be one that generates text.
    """
    named = (config.architectures or [""])[0]
    tasks = [task for task, row in TASKS.items() if row.generates or not generates]
    return next((task for task in tasks if named in task_classes(config, task)), tasks[0])


def sizes_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config that holds the sizes of the layers: the vision config inside the config of an image classifier, or itself."""
    inner = getattr(config, "vision_config", None)
    return config if inner is None or getattr(config, "num_hidden_layers", None) is not None else inner


def depths_of(config: PreTrainedConfig) -> tuple[int, ...] | None:
    """Returns the number of layers of each stack, the encoder's first; None if a Transformers config has no such numbers (ResNet)."""
    own = sizes_config(config)
    depths: list[Any] = [getattr(own, "num_hidden_layers", None)]
    if getattr(config, "is_encoder_decoder", False):
        depths.append(next((getattr(own, name) for name in DECODER_DEPTHS if hasattr(own, name)), None))
    return None if None in depths else tuple(depths)


def task_classes(config: PreTrainedConfig, task: Task) -> list[str]:
    """Returns the names of the model classes for this type of config and this task, preferred one first; empty if there is none."""
    return [c.__name__ for c in _classes(config, task)]


def _classes(config: PreTrainedConfig, task: Task) -> tuple[Any, ...]:
    """Returns the model classes for this type of config and this task; for vectors of texts the encoder of an encoder-decoder alone, if
    Transformers has a class for it (T5)."""
    if TASKS[task].embeds_texts and (alone := encoder_alone(config)) is not None:
        return (alone,)
    found = stock_auto(task)._model_mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def encoder_alone(config: PreTrainedConfig) -> Any:
    """Returns the class that is the encoder alone of a type of encoder-decoder, such as T5EncoderModel; None for other types."""
    from transformers import AutoModelForTextEncoding

    if not getattr(type(config), "is_encoder_decoder", False):  # of the type: the class sets it to false in the configs of its models
        return None
    return AutoModelForTextEncoding._model_mapping.get(type(config), None)


def with_class(config: PreTrainedConfig, task: Task) -> PreTrainedConfig:
    """Sets the model class in a config without one, and returns the config; `from_config` needs it if there are several classes."""
    config.architectures = config.architectures or task_classes(config, task)[:1]
    return config


def as_with_head(config: PreTrainedConfig, task: Task) -> None:
    """Names the model class of the task in the config of a body or of a model for another task, in place: it gets a new head."""
    classes = task_classes(config, task)
    if (config.architectures or [""])[0] not in classes:
        config.architectures = classes[:1]


def takes_padding(config: PreTrainedConfig, task: Task) -> bool:
    """Whether the model class of this config and task takes a mask of padding."""
    return "attention_mask" in inspect.signature(model_class(config, task).forward).parameters


def model_class(config: PreTrainedConfig, task: Task) -> Any:
    """Returns the model class of this config and task, the preferred one where there are several."""
    return _classes(config, task)[0]


def on_meta_else_cpu(run: Callable[[bool], T]) -> T:
    """Returns `run(True)`, on the meta device; if Transformers refuses, as for models that look at values, returns `run(False)`."""
    try:
        return run(True)
    except REFUSED:
        pass  # whatever is wrong shows again on the CPU, with a message about the model
    return run(False)


@contextmanager
def uninitialized() -> Iterator[None]:
    """Leaves the weights of new models as their memory was; for models that run without values, or get them afterwards.

    It holds for the whole process, as in Transformers, whose context puts back what it found: of two threads inside, the one that leaves
    last would put back the other's. Here the first of them enters it and the last leaves it.
    """
    from transformers.initialization import no_init_weights

    global _inside
    with _entering:
        if not _inside:
            _uninitialized.enter_context(no_init_weights())
        _inside += 1
    try:
        yield
    finally:
        with _entering:
            _inside -= 1
            if not _inside:
                _uninitialized.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses progress bars and load reports of Transformers; we raise or log what matters in them ourselves."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loud = level < logging.ERROR  # a change of level empties the caches of thousands of loggers, and these blocks are nested
    if loud:
        logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if loud:
            logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def preview(names: Iterable[str], limit: int = 3) -> str:
    """Returns the first `limit` names and the number of the others, as text; sets are sorted first."""
    names = sorted(names) if isinstance(names, set) else list(names)
    return ", ".join(map(str, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def one_line(error: BaseException) -> str:
    """Returns the message of a library's exception as one line of at most 200 characters."""
    return reason(error, 200)


def in_place_of(stock: Any, subclass: Any) -> Any:
    """Returns `subclass`, a subclass of a stock model class, with the name of that class, and with `from_config` as auto classes have
    it."""
    subclass.__name__, subclass.__qualname__, subclass.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    subclass.from_config = classmethod(lambda cls, config, **kwargs: cls._from_config(config, **kwargs))
    return subclass
