"""What this project asks of Transformers: which model classes a task has, and silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from compress.core.tasks import TASKS, Task

REFUSED = (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError, AssertionError, AttributeError, IndexError)
"""What Transformers raises for values that make no model."""


def stock_auto(task: Task) -> Any:
    """Returns the class of Transformers that picks the model class for a task, such as `AutoModelForCausalLM`."""
    import transformers

    return getattr(transformers, TASKS[task].auto_class)


def task_of(config: Any, answer: str | None = None) -> Task:
    """Returns a task that a checkpoint can be loaded for, by the model class that its config names; else the first in the table.

    Args:
        config: A Transformers config.
        answer: Only tasks with this answer count, where it is given.
    """
    named = (config.architectures or [""])[0]
    tasks = [task for task, row in TASKS.items() if answer in (None, row.answer)]
    return next((task for task in tasks if named in task_classes(config, task)), tasks[0])


def task_classes(config: Any, task: Task) -> list[str]:
    """Returns the names of the model classes for this kind of config and this task, best first; empty where there is none."""
    mapping = stock_auto(task)._model_mapping
    found = mapping.get(type(config), ())
    return [c.__name__ for c in (found if isinstance(found, tuple) else (found,))]


def with_class(config: Any, task: Task) -> Any:
    """Names the model class in a config that names none, and returns it: `from_config` needs that where there are several."""
    config.architectures = config.architectures or task_classes(config, task)[:1]
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Transformers from drawing bars and printing load reports: what matters of them is raised or logged here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def some(names: Iterable[str], limit: int = 3) -> str:
    """Returns the first of some names, and how many more there are; sets are sorted first."""
    names = sorted(names) if isinstance(names, set) else list(names)
    return ", ".join(map(str, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def one_line(error: BaseException) -> str:
    """Returns the message of an exception of a library as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
