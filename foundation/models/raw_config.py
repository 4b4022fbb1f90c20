"""Checks the contents of a config.json before Transformers sees them.

Transformers builds what a config says: it loops over a billion layers, divides by a NaN, and downloads code for an attention
implementation that names a kernel of the Hub. Allowed here are

    numbers              finite, apart from values that are infinite by default in Transformers
    integers             at most 2^53; layers, labels, experts, heads and positions at most what `MOST` says; sizes at least 1
    ..._eps              above 0, at most 1
    ...dropout..., drop_path_rate    at least 0, below 1
    rope_theta, initializer_range, ...    not negative
    ..._implementation   one that comes with Transformers (`IMPLEMENTATIONS`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from foundation.core.errors import InputError, Problem
from foundation.core.shown import shown

LARGEST = 2**53
DEEPEST = 30
MOST: tuple[tuple[str, int], ...] = (
    (r"(num|n)_(.*_)?layers?|(encoder|decoder)_layers|(encoder_|decoder_)?depths?|num_(.*_)?(blocks|stages)", 1000),
    (r"num_(.*_)?(experts|heads)|n_heads?|n_routed_experts|num_experts_per_tok", 100_000),
    (r"num_labels", 1_000_000),
    (r"(max_)?(n_)?positions?(_embeddings)?|max_position_embeddings|n_ctx", 2**24),
)
"""Patterns of keys, and the largest value: each of these is a loop in Python somewhere."""
SIZES = re.compile(
    r"hidden_size|num_hidden_layers|num_attention_heads|intermediate_size|vocab_size|max_position_embeddings|image_size|patch_size"
    r"|num_channels|embedding_size|n_layers?|n_heads?|n_embd|n_positions|d_model|dim|hidden_dim|num_key_value_heads|head_dim|num_labels"
)
TYPES = {"id2label": (dict, "a map"), "label2id": (dict, "a map"), "architectures": (list, "a list of names")}
IMPLEMENTATIONS = {"attn": ("eager", "sdpa"), "experts": ("eager", "batched_mm", "grouped_mm")}
OUTPUTS = {"output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_return_dict"}
"""Keys for extra outputs of a model and their form: settings of the caller, not of the model."""
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")


def check_raw(raw: Mapping[str, object], default: Mapping[str, object], where: str) -> None:
    """Checks numbers and implementations.

    Args:
        raw: Contents of a config.json, or a part of one.
        default: What Transformers fills in for this type of model; values equal to these are allowed.
        where: Start of each message.

    Raises:
        InputError: Something is wrong; one line for each problem.
    """
    problems = [
        Problem(where, f"{name}: {shown(raw[name])} given", f"{allowed} is allowed")
        for name, (kind, allowed) in TYPES.items()
        if raw.get(name) is not None and not isinstance(raw[name], kind)
    ]
    named = raw.get("architectures")
    if isinstance(named, list) and not all(isinstance(one, str) for one in named):
        problems.append(Problem(where, f"architectures: {shown(named)} given", "a list of names is allowed"))
    ids = raw.get("id2label")
    if isinstance(ids, dict) and not all(str(key).isascii() and str(key).isdigit() and len(str(key)) < 10 for key in ids):
        problems.append(Problem(where, f"id2label: {shown(ids)} given", "a map from ids to names is allowed"))
    problems += _problems(raw, default, where, 0)
    if problems:
        raise InputError.of(problems)


def without_outputs(raw: Mapping[str, object]) -> dict[str, Any]:
    """Returns the contents of a config.json, checked by `check_raw`, without the keys in `OUTPUTS`, in the configs inside it too."""
    return {name: without_outputs(value) if isinstance(value, dict) else value for name, value in raw.items() if name not in OUTPUTS}


def check_labels(names: Mapping[int, object], where: str) -> tuple[str, ...]:
    """Returns the class names of an id2label by id.

    Args:
        names: Class names by id.
        where: Start of each message.

    Raises:
        InputError: The ids are not 0, 1, 2, ..., or names are equal, empty or no text.
    """
    if sorted(names) != list(range(len(names))):
        raise InputError(where, f"id2label has the ids {shown(sorted(names))}", f"{len(names)} labels need 0 to {len(names) - 1}")
    ordered = [names[index] for index in range(len(names))]
    texts = [name for name in ordered if _is_name(name)]
    if len(texts) < len(ordered):
        wrong = next(name for name in ordered if not _is_name(name))
        raise InputError(where, f"id2label has the name {shown(wrong)}", "text without control characters is allowed")
    folded = [name.strip() for name in texts]
    again = next((name for position, name in enumerate(folded) if name in set(folded[:position])), None) if _repeats(folded) else None
    if again is not None:
        raise InputError(where, f"id2label names several classes {shown(again)}", remedy="give each its own name, or give model.head: new")
    return tuple(texts)


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable()


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)


def _problems(value: object, default: object, where: str, depth: int) -> Iterator[Problem]:
    if depth > DEEPEST:
        yield Problem(where, f"config.json is nested more than {DEEPEST} levels deep")
        return
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        known, inner = default.get(name) if isinstance(default, Mapping) else None, _plain(inner)
        if inner == known and inner is not None:
            continue
        match = _IMPLEMENTATION.fullmatch(str(name))
        if match:
            yield from _implementation(name, inner, IMPLEMENTATIONS[match[1]], where)
        else:
            yield from _values(str(name), inner, known, where, depth)


def _values(name: str, value: object, default: object, where: str, depth: int) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        yield from _problems(value, default, where, depth + 1)
    elif isinstance(value, list) and depth <= DEEPEST:
        for position, inner in enumerate(value):
            known = default[position] if isinstance(default, list | tuple) and position < len(default) else None
            if (plain := _plain(inner)) != known:
                yield from _values(name, plain, known, where, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        allowed = _refused(name.lower(), value)
        if allowed is not None:
            yield Problem(where, f"{name}: {shown(value)} given", allowed)


def _plain(value: object) -> object:
    """Returns the number that `{"__float__": "NaN"}` stands for in Transformers, else the value."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        try:
            return float(value["__float__"])
        except (TypeError, ValueError):
            return math.nan
    return value


def _refused(name: str, value: float) -> str | None:
    """Returns the allowed range for a number outside it; None for a number inside."""
    if not isinstance(value, int) and not math.isfinite(value):
        return "a finite number is allowed"
    if abs(value) > LARGEST and isinstance(value, int):
        return "integers up to 2^53 are allowed"
    most = next((limit for pattern, limit in MOST if re.fullmatch(pattern, name)), LARGEST)
    if isinstance(value, int) and value > most:
        return f"at most {most} is allowed"
    if value < 1 and isinstance(value, int) and SIZES.fullmatch(name):
        return "at least 1 is allowed"
    if re.search(r"(^|_)eps(ilon)?$", name) and not 0 < value <= 1:
        return "a number above 0, at most 1, is allowed"
    if re.search(r"drop(out|_path|_rate|$)|pdrop$|layerdrop", name) and not 0 <= value < 1:
        return "a number from 0 to below 1 is allowed"
    if re.search(r"^(rope_theta|initializer_range|initializer_factor|init_std)$", name) and value < 0:
        return "a number that is not negative is allowed"
    return None


def _implementation(name: str, value: object, allowed: tuple[str, ...], where: str) -> Iterator[Problem]:
    given = list(value.values()) if isinstance(value, Mapping) else [value]
    wrong = [inner for inner in given if inner is not None and inner not in allowed]
    if wrong:
        fits = f"{' or '.join(allowed)} is allowed; other implementations may be code from the Hub, which is never run"
        yield Problem(where, f"{name}: {shown(wrong[0])} given", fits, "remove the key")
