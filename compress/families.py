"""Families: one `prune` stage with a list of speed-ups becomes a chain of stages in the recipe, and every later stage one for each member.

    - prune: {family: [1, 2, 3], recover: {epochs: 4}}          - prune: {id: prune-2x, speedup: 2, recover: {epochs: 2}}
    - quantize: {}                                       -->    - prune: {id: prune-3x, input: prune-2x, speedup: 3, recover: {epochs: 2}}
    - export: {}                                                - quantize: {id: quantize-1x, input: baseline}
                                                                - quantize: {id: quantize-2x, input: prune-2x}
                                                                - quantize: {id: quantize-3x, input: prune-3x}
                                                                - export: {}

Each member starts from the weights of the next larger one, so the family costs one gradual training (Kurtic et al. 2023,
https://arxiv.org/abs/2302.04089, section 3.3): its passes are divided among the members. All speed-ups refer to the model that the family
starts from, or to the one that `over` names. After the expansion these are stages like any others, so caching, resuming, variants and the
report need no rules of their own.

As in the paper (section 3.3), members learn from the logits and from the hidden states of each token in each layer of the teacher, unless
the recipe names other losses, or layers leave: states would then have no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from foundation.core.errors import Problem, nearest
from foundation.core.step_names import BASELINE
from foundation.stage.stage import Stage

TOKEN_WEIGHT = 1.0
"""Weight of the loss on hidden states, next to the logits."""
LOSSES = ("distill", "loss", "losses", "soft_weight", "hidden_weight")
"""Keys of `recover` that choose losses."""

Members = Mapping[str, str]
"""Id of a stage for each member, by the suffix of the member, such as 2x."""


def expand(entries: object, kinds: Mapping[str, type[Stage]]) -> object:
    """Replaces every family in the `stages` of a recipe by its members, and every later stage that takes it by one for each member.

    Args:
        entries: The `stages` of a recipe as plain data, checked or not: what is malformed stays as it is, for the check of the stages.
        kinds: The classes of stages by name.
    """
    if not isinstance(entries, list):
        return entries
    stages, made, before = list[object](), dict[str, Members](), BASELINE
    for entry in entries:
        name, body = _parts(entry)
        kind = kinds.get(name)
        if kind is None or kind.PRODUCES != "checkpoint":
            stages.append(entry)
            continue
        own, source = str(body.get("id") or name), str(body.get("input") or before)
        if source in made:
            made[own] = {suffix: f"{own}-{suffix}" for suffix in made[source]}
            stages += [{name: _repeated(body, own, suffix, source, made)} for suffix in made[source]]
        elif (whole := _family(kind, body)) is not None:
            members, made[own] = _members(own, source, whole, body)
            stages += members
        else:
            stages.append(entry)
        before = BASELINE if name == "finetune" else own
    return stages


def _parts(entry: object) -> tuple[str, dict[str, Any]]:
    """Returns name and settings of an entry of `stages`; no name if it is malformed."""
    if isinstance(entry, str):
        return entry, {}
    if not isinstance(entry, dict) or len(entry) != 1:
        return "", {}
    [(name, body)] = entry.items()
    return (str(name), dict(body or {})) if isinstance(body, dict | None) else ("", {})


def _family(kind: type[Stage], body: Mapping[str, Any]) -> Any:
    """Returns a stage that is a family; None for other stages, and for one that the check of the stages refuses."""
    if "family" not in kind.model_fields or body.get("family") is None:
        return None
    try:
        return kind.model_validate(body)
    except ValidationError:
        return None


def _members(own: str, source: str, whole: Any, body: Mapping[str, Any]) -> tuple[list[object], Members]:
    """Returns the stages of a family, and the id that makes each member.

    Args:
        own: The id of the stage.
        source: The id of the model that it takes.
        whole: The stage, a `prune.prune.Prune`.
        body: Its settings as the recipe gives them.
    """
    pruned = [speedup for speedup in whole.family if speedup > 1]
    shared = {"measure": "latency", **{key: value for key, value in body.items() if key not in ("family", "input")}}
    if whole.recover is not None:
        given = dict(body.get("recover") or {})
        by_layer = {"heads", "ffn", "vocabulary"} >= set(whole.granularity) and not set(given) & set(LOSSES)
        losses = {"hidden_weight": TOKEN_WEIGHT} if by_layer else {}
        shared["recover"] = {**losses, **given, "epochs": whole.recover.epochs / len(pruned)}
    made = {_suffix(speedup): f"{own}-{_suffix(speedup)}" if speedup > 1 else source for speedup in whole.family}
    members, parent = list[object](), source
    for number, speedup in enumerate(pruned, 1):
        place = {"over": whole.over or source, "member": {"number": number, "count": len(pruned)}}
        identity = made[_suffix(speedup)]
        members.append({whole.NAME: {**shared, "id": identity, "input": parent, "speedup": speedup, **place}})
        parent = identity
    return members, made


def _repeated(body: Mapping[str, Any], own: str, suffix: str, source: str, made: Mapping[str, Members]) -> dict[str, Any]:
    """Returns the settings of a stage for one member; a teacher that a family makes is the teacher's own member, if there is one."""
    settings = {**body, "id": f"{own}-{suffix}", "input": made[source][suffix]}
    teacher = body.get("teacher")
    if isinstance(teacher, str | list):
        named = [teacher] if isinstance(teacher, str) else teacher
        theirs = [made.get(str(name), {}).get(suffix, name) for name in named]
        settings["teacher"] = theirs[0] if isinstance(teacher, str) else theirs
    return settings


def _suffix(speedup: float) -> str:
    """Returns the end of the ids of a member: 2x, or 2_5x."""
    return f"{speedup:g}x".replace(".", "_")


def check_speedup(stage: Stage, known: Sequence[str]) -> list[Problem]:
    """Returns the problems of the speed-up of a stage: it is a family of the members of another, or no stage makes the model that the
    speed-up refers to.

    Args:
        stage: A stage of a recipe whose families are expanded.
        known: The ids of the models before it, and baseline.
    """
    if getattr(stage, "family", None) is not None:
        given, why = "given for the members of another family", "each of them would be a family"
        return [Problem(f"stages.{stage.id}.family", given, why, "give both lists as one, or another `input:`")]
    over = getattr(stage, "over", None)
    if over is None or over in known:
        return []
    return [Problem(f"stages.{stage.id}.over", f"{over!r} given", f"{', '.join(known)} is allowed{nearest(over, known)}")]
