"""The recipe: one YAML file, parsed into one frozen, typed value.

`read` checks everything before a model or data is loaded and reports all problems in one `InputError`: key path, given value, allowed
values, nearest key. To add a stage, import it and add it to `STAGES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, ValidationError

from compress.families import check_speedup, expand
from compress.problems import explain
from compress.recipe_file import apply, read_file
from compress.search_settings import Search
from compress.store_settings import StoreUrl
from compress.towers import refused
from compress.track_settings import Track
from distill.distill import Distill
from export.cascade.cascade import Cascade
from export.export import Export
from foundation.core.config import Config
from foundation.core.engines import ENGINES, served_on
from foundation.core.errors import InputError, Problem, nearest
from foundation.core.goals import Goals
from foundation.core.named import one_of
from foundation.core.shown import shown
from foundation.core.step_names import BASELINE, INPUT, is_reserved
from foundation.core.target import Parallel, Target
from foundation.data.config import DataConfig
from foundation.labels.tasks import tasks_with
from foundation.models.config import ModelConfig
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.stage.stage import Stage, input_named, is_model, lines, teachers_named
from foundation.training.few_parameters.adapters import Adapters
from foundation.training.finetune import Finetune
from prune.compact.compact import Compact
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from triton_repo.triton_repo import TritonRepo

STAGES: tuple[type[Stage], ...] = (
    Finetune,
    Distill,
    Prune,
    Sparsify,
    Compact,
    Quantize,
    Adapters,
    Export,
    Cascade,
    TritonRepo,
)
"""All stages in their allowed order; distill, prune, sparsify and compact may come in any order. The order applies along `input`."""


class Recipe(Config):
    """A complete run: model, data, goals, deployment target and stages."""

    LATER: ClassVar[tuple[str, ...]] = ("track", "store")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run and of its folder: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random generators."""
    model: ModelConfig
    """The model to start from."""
    tokenizer: (
        Annotated[
            Annotated[str, Tag("str")] | Annotated[TrainTokenizer, Tag("TrainTokenizer")],
            Discriminator(lambda given: "TrainTokenizer" if isinstance(given, Mapping | TrainTokenizer) else "str"),
        ]
        | None
    ) = None
    """For text models with random weights: Hub id or folder of a tokenizer, or a map of settings to train one."""
    data: DataConfig
    """Training and evaluation data."""
    goals: Goals = Goals()
    """Limits that the result must meet."""
    target: Target = Target()
    """Deployment target: device, engines and shapes."""
    parallel: Parallel = Parallel()
    """Training with several processes; see `docs/how-to/several-processes.md`."""
    profile: bool = False
    """Profile every training that runs: a trace for Perfetto in the folder `profiles`, and tokens a second, utilisation, communication and
    memory in the report. Changes no result, and costs a few slower steps of each training."""
    search: Search | None = None
    """Settings that `compress search` may change, and its objectives; see `docs/how-to/search.md`. Has no effect on a run."""
    track: Track | None = None
    """Where `compress run` sends a run to; see `docs/how-to/track-runs.md`. Absent: nothing is sent. Changes no result
    and no cache key; only `compress run` and `compress bench` read it."""
    store: StoreUrl | None = None
    """URL of a store of artifacts that machines share, such as file:///FOLDER; see `docs/how-to/share-artifacts.md`. Absent: the variable
    COMPRESS_STORE of the environment, or else nothing is shared. Changes no result and no cache key."""
    stages: tuple[Any, ...]
    """List of one-key maps, in order: the key is the stage, the value its settings."""

    def stage(self, stage_id: str) -> Stage:
        """Returns the stage with that id."""
        found: Stage = next(stage for stage in self.stages if stage.id == stage_id)
        return found


def read(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: The YAML file.
        settings: Overrides `key.path=value`; the value is YAML, a stage is named by its id.

    Raises:
        InputError: The recipe has problems; one line for each.
    """
    return check(read_file(path), settings)


def check(raw: Mapping[str, object], settings: Sequence[str] = ()) -> Recipe:
    """Turns plain data and `key.path=value` overrides into a `Recipe`, or raises one `InputError` with every problem."""
    data = deepcopy(dict(raw))
    for setting in settings:
        apply(data, setting)
    entries = data.pop("stages", None)
    problems: list[Problem] = []
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate({**data, "stages": ()})  # which are checked by themselves
    except ValidationError as error:
        problems += explain(error, Recipe)
    stages, stage_problems = _check_stages(entries)
    problems += stage_problems
    if recipe is None or problems:
        raise InputError.of(problems)
    recipe = recipe.model_copy(update={"stages": tuple(stages)})
    problems = (
        _check_order(recipe)
        + _check_variant_goals(recipe)
        + _check_task(recipe)
        + _check_proposals(recipe)
        + _check_cascade(recipe)
        + _check_audit(recipe)
        + _check_adapters(recipe)
    )
    if problems:
        raise InputError.of(problems)
    return recipe


def untracked(recipe: Recipe) -> Recipe:
    """Returns a recipe without `track` and `store`: what a run is, without where it is sent."""
    return recipe.model_copy(update={"track": None, "store": None})


def dump(recipe: Recipe) -> dict[str, object]:
    """Returns the recipe as plain data including all defaults; the inverse of `check`."""
    data = recipe.model_dump(mode="json", exclude={"stages"})
    data["stages"] = [{stage.NAME: stage.model_dump(mode="json")} for stage in recipe.stages]
    return data


def written(recipe: Recipe) -> dict[str, object]:
    """Returns the recipe as plain data without the defaults: what its author wrote."""
    data = recipe.model_dump(mode="json", exclude={"stages"}, exclude_unset=True)
    data["stages"] = [{stage.NAME: _written(stage)} for stage in recipe.stages]
    return data


def _written(stage: Stage) -> dict[str, object]:
    settings = stage.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in settings.items() if (key, value) != ("id", stage.NAME)}


def schema() -> dict[str, object]:
    """Returns the JSON schema of a recipe file, for editors."""
    document = Recipe.model_json_schema()
    definitions = document.setdefault("$defs", {})
    entries = []
    for stage in STAGES:
        body = stage.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(body.pop("$defs", {}))
        entries.append({"type": "object", "properties": {stage.NAME: body}, "required": [stage.NAME], "additionalProperties": False})
    document["properties"]["stages"] = {"type": "array", "items": {"anyOf": entries}}
    document["properties"]["extends"] = {"type": "string", "description": "Base recipe: maps are merged, stages replaced."}
    document["required"] = [key for key in document.get("required", []) if key == "name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "compress recipe", **document}


def _check_stages(entries: object) -> tuple[list[Stage], list[Problem]]:
    known = {stage.NAME: stage for stage in STAGES}
    entries = expand(entries, known)
    if not isinstance(entries, list) or not entries:
        given = shown(entries) if entries else "nothing"
        allowed = f"a list of one-key maps is allowed, such as `- quantize: {{mode: ptq}}`; keys: {', '.join(known)}"
        return [], [Problem("stages", f"{given} given", allowed)]
    stages: list[Stage] = []
    problems: list[Problem] = []
    for position, entry in enumerate(entries):
        if isinstance(entry, str) and entry in known:
            entry = {entry: {}}
        if not isinstance(entry, dict) or len(entry) != 1:
            problems.append(
                Problem(f"stages[{position}]", f"{shown(entry, 80)} given", f"a map with one key is allowed; keys: {', '.join(known)}")
            )
            continue
        [(name, body)] = entry.items()
        if name not in known:
            problems.append(
                Problem(f"stages[{position}]", f"unknown stage {shown(name)}", f"allowed: {', '.join(known)}{nearest(str(name), known)}")
            )
            continue
        try:
            stage = known[name].model_validate({} if body is None else body)
            stages.append(stage if stage.id else stage.model_copy(update={"id": name}))
        except ValidationError as error:
            label = body["id"] if isinstance(body, dict) and isinstance(body.get("id"), str) else name
            problems += explain(error, known[name], f"stages.{label}")
    return stages, problems


def _check_order(recipe: Recipe) -> list[Problem]:
    problems = []
    order = {stage: position for position, stage in enumerate(STAGES)}
    order[Prune] = order[Sparsify] = order[Compact] = order[Distill]  # in any order, and repeatedly
    made = lines(recipe.stages)
    ids: set[str] = set()
    for listed, stage in zip((None, *recipe.stages), recipe.stages, strict=False):
        if stage.id in ids:
            problems.append(
                Problem(f"stages.{stage.id}", f"the id {stage.id!r} is already used", remedy=f"give this {stage.NAME} stage its own `id:`")
            )
        if is_reserved(str(stage.id)):
            used = f"the id {stage.id!r} is already used by every run itself"
            problems.append(Problem(f"stages.{stage.id}", used, remedy=f"give this {stage.NAME} stage another"))
        teachers = {BASELINE, INPUT, *ids}
        problems += [
            Problem(
                f"stages.{stage.id}.teacher",
                f"{teacher!r} given",
                f"{', '.join(sorted(teachers))}, or a model's folder or Hub id (with its owner) is allowed{nearest(teacher, teachers)}",
            )
            for teacher in teachers_named(stage)
            if not is_model(teacher) and teacher not in teachers
        ]
        problems += _check_input(stage, made, ids)
        ids.add(stage.id)
        branches = input_named(stage) is not None and (listed is None or listed.PRODUCES == "checkpoint")
        before = next(reversed(made[stage.id][:-1]), None) if branches else listed
        if before is not None and order[type(stage)] < order[type(before)]:
            names = ", ".join(known.NAME for known in STAGES)
            problems.append(Problem(f"stages.{stage.id}", f"{stage.NAME} cannot follow {before.NAME}", f"the order is {names}"))
    for once in (kind for kind in STAGES if kind is Finetune or kind.PRODUCES != "checkpoint"):
        if sum(isinstance(stage, once) for stage in recipe.stages) > 1:
            problems.append(Problem("stages", f"{once.NAME} is given more than once", "at most one is allowed"))
    kinds = [type(stage) for stage in recipe.stages]
    if Export not in kinds:
        served = dict.fromkeys(stage.NAME for stage in recipe.stages if stage.PRODUCES in ("model_repository", "cascade"))
        problems += [Problem("stages", f"{name} given without export", remedy="put `- export: {}` before it") for name in served]
    task = recipe.model.facts
    servers = served_on("cpu", generates=task.generates, encoder_decoder=task.encoder_decoder)
    if TritonRepo in kinds and recipe.target.device == "cpu" and not set(servers) & set(recipe.target.engines):
        given = ", ".join(recipe.target.engines)
        what = f"{recipe.model.task} with {one_of(servers)}"
        add = "it" if len(servers) == 1 else "one"
        problems.append(
            Problem("target.engines", f"{given} given", f"on the CPU triton_repo serves {what}", f"add {add}, or leave triton_repo out")
        )
    untrained = recipe.model.head == "new" or not recipe.model.is_trained
    labelled = bool(recipe.stages) and isinstance(recipe.stages[0], Distill) and recipe.stages[0].labeller is not None
    if untrained and kinds and kinds[0] is not Finetune and not labelled:
        what = "head: new" if recipe.model.is_trained else "init: random"
        problems.append(
            Problem(
                "stages",
                f"a model with {what} must be trained first",
                remedy="put `- finetune: {}`, or distill with a labeller, at the start",
            )
        )
    return problems


def _check_generating(recipe: Recipe) -> list[Problem]:
    """Returns the settings that an engine that answers prompts cannot have."""
    engine = next((name for name in recipe.target.engines if ENGINES[name].generates), None)
    row = recipe.model.facts
    problems = []
    if recipe.goals.max_bleu_drop is not None and not row.encoder_decoder:
        tasks = tasks_with(lambda other: other.encoder_decoder)
        problems = [
            Problem(
                "goals.max_bleu_drop", f"{recipe.goals.max_bleu_drop:g} given for {recipe.model.task}", f"it is for {tasks}", "leave it out"
            )
        ]
    if engine is None:
        return problems
    encodes = ENGINES[engine].generates == "encoder-decoder"
    if not row.generates or row.encoder_decoder != encodes:
        tasks = tasks_with(lambda other: other.generates and other.encoder_decoder == encodes)
        given = f"{engine} given for the task {recipe.model.task}"
        return [*problems, Problem("target.engines", given, f"it answers prompts of {tasks}", "leave it out")]
    return problems + [
        Problem(
            f"stages.{stage.id}.{key}",
            f"{str(getattr(stage, key)).lower()} given with the engine {engine}, which keeps attention and residuals in float",
            remedy=f"give {key}: false, or leave {engine} out",
        )
        for stage in recipe.stages
        if isinstance(stage, Quantize)
        for key in ("attention", "residual")
        if getattr(stage, key) is not False
    ]


def _check_proposals(recipe: Recipe) -> list[Problem]:
    """Returns the problems of proposed tokens: no engine takes them, or no stage makes the draft."""
    problems, made = [], [str(stage.id) for stage in recipe.stages if stage.PRODUCES == "checkpoint"]
    measured = any(isinstance(stage, Export) and (stage.generation.draft or stage.generation.prompt_lookup) for stage in recipe.stages)
    problems += [
        Problem(
            f"stages.{stage.id}.proposals",
            "true given, but export proposes no tokens",
            remedy="give its generation a draft or prompt_lookup",
        )
        for stage in recipe.stages
        if isinstance(stage, TritonRepo) and stage.proposals and not measured
    ]
    for stage in recipe.stages:
        if not isinstance(stage, Export) or (stage.generation.draft is None and stage.generation.prompt_lookup is None):
            continue
        key, draft = f"stages.{stage.id}.generation", stage.generation.draft
        takers = [name for name, row in ENGINES.items() if row.proposed_to]
        if not set(takers) & set(recipe.target.engines):
            given = "prompt_lookup" if draft is None else "draft"
            problems.append(
                Problem(f"{key}.{given}", "given, but no engine takes proposed tokens", remedy=f"put {one_of(takers)} into target.engines")
            )
        if draft is not None and draft not in made:
            allowed = one_of(made) if made else "none, as no stage makes a model,"
            problems.append(Problem(f"{key}.draft", f"{draft!r} given", f"{allowed} is allowed{nearest(draft, made)}"))
    return problems


def _check_adapters(recipe: Recipe) -> list[Problem]:
    """Returns what does not go with adapters: a second stage of them on one model, stages that know one answer to a text, and rows that
    name adapters of none."""
    trains = [stage for stage in recipe.stages if isinstance(stage, Adapters)]
    if not trains:
        given = Problem("data.columns.adapter", "given, but no stage trains adapters", remedy="add `- adapters: {}` before export")
        return [given] if recipe.data.columns.adapter is not None else []
    problems, made = list[Problem](), lines(recipe.stages)
    for stage in trains:
        key, line = f"stages.{stage.id}", made[str(stage.id)]
        if sum(isinstance(other, Adapters) for other in line) > 1:
            problems.append(Problem(key, "given for a model that has adapters already", remedy="name all of them in one column"))
        if any(isinstance(other, Quantize) and other.residual is not False for other in line):
            why = "adapters are added between a layer and its residual"
            problems.append(Problem(f"{key}: quantize.residual", "given with adapters", why, "give residual: false"))
    for other in recipe.stages:
        if isinstance(other, Cascade):
            problems.append(Problem(f"stages.{other.id}", "given with adapters", "a cascade has one answer to a text", "leave one out"))
        if isinstance(other, Export) and other.tensor_parallel > 1:
            problems.append(Problem(f"stages.{other.id}.tensor_parallel", "given with adapters", "ranks hold one model", "leave it out"))
    return problems


def _check_cascade(recipe: Recipe) -> list[Problem]:
    """Returns the problems of a cascade: there are no rows for its certificate, no stage makes a tier, a tier is given twice, or the last
    one is not the original."""
    problems, made = list[Problem](), lines(recipe.stages)
    original = [str(stage.id) for stage in made[BASELINE][-1:]] or [BASELINE]
    for stage in recipe.stages:
        if not isinstance(stage, Cascade):
            continue
        if recipe.data.certify is None:
            given, allowed = f"missing for stages.{stage.id}", "a certificate needs rows of its own"
            problems.append(Problem("data.certify", given, allowed, "name a file of rows that take part in nothing else"))
        if stage.tiers is None:
            continue
        key = f"stages.{stage.id}.tiers"
        names = list(dict.fromkeys((*made, BASELINE)))
        unknown = [name for name in stage.tiers if name not in names]
        problems += [Problem(key, f"{name!r} given", f"{', '.join(names)} is allowed{nearest(name, names)}") for name in unknown[:1]]
        if stage.tiers[-1] not in (*original, BASELINE):
            remedy = f"give {BASELINE} as the last one"
            problems.append(Problem(key, f"{stage.tiers[-1]!r} given last", "the last tier is the original", remedy))
        models = [BASELINE if name in original else name for name in stage.tiers]
        if len(set(models)) < len(models):
            problems.append(Problem(key, f"{', '.join(stage.tiers)} given", "a model can be one tier only", "leave the other out"))
    return problems


def _check_variant_goals(recipe: Recipe) -> list[Problem]:
    """Returns the goals of single variants that no stage makes, or that refer to such a one."""
    made = [BASELINE, *(str(stage.id) for stage in recipe.stages if stage.PRODUCES == "checkpoint")]
    problems = []
    for name, limits in (recipe.goals.variants or {}).items():
        named = {f"goals.variants.{name}": name, f"goals.variants.{name}.over": limits.over or BASELINE}
        for key, given in named.items():
            if given not in made:
                problems.append(Problem(key, f"{given!r} given", f"{', '.join(made)} is allowed{nearest(given, made)}"))
    return problems


def _check_audit(recipe: Recipe) -> list[Problem]:
    """Returns the problems of an audit: there is no cascade that it could watch."""
    if any(isinstance(stage, Cascade) for stage in recipe.stages):
        return []
    return [
        Problem(f"stages.{stage.id}.audit", "given without the stage cascade", "it watches a served cascade", "add one, or leave it out")
        for stage in recipe.stages
        if isinstance(stage, TritonRepo) and stage.audit != type(stage).model_fields["audit"].default
    ]


def _check_input(stage: Stage, producers: Mapping[str, Sequence[Stage]], ids: set[str]) -> list[Problem]:
    """Returns the problems of the `input` of a stage: no stage makes it, or it is already quantized."""
    named, problems = input_named(stage), []
    allowed = [BASELINE, *(name for name in producers if name in ids)]
    if named is not None and named not in allowed:
        choices = f"{', '.join(allowed)} (an earlier stage that makes a model) is allowed{nearest(named, allowed)}"
        problems.append(Problem(f"stages.{stage.id}.input", f"{named!r} given", choices))
    problems += check_speedup(stage, allowed)
    quantized = [other.id for other in producers.get(str(stage.id), ())[:-1] if isinstance(other, Quantize)]
    if isinstance(stage, Quantize) and quantized:
        given, remedy = f"its input is already quantized by {quantized[0]}", "give another `input:`, or leave this stage out"
        problems.append(Problem(f"stages.{stage.id}", given, remedy=remedy))
    return problems


def _check_task(recipe: Recipe) -> list[Problem]:
    """Returns the settings of a recipe that do not fit its task."""
    problems, row = [], recipe.model.facts
    if isinstance(recipe.tokenizer, TrainTokenizer) and (recipe.model.is_trained or not row.reads_text):
        rows = {"image": "images need none", "audio": "sounds need none"}
        reason = "a trained model keeps its tokenizer" if recipe.model.is_trained else rows[row.modality]
        problems.append(Problem("tokenizer", f"train: {recipe.tokenizer.train} given", reason, "leave it out"))
    problems += _check_generating(recipe) + _check_vllm(recipe)
    if row.two_towers:
        asked = {"new_head": recipe.model.head == "new", "searches": recipe.search is not None}
        problems += refused(recipe.model.task, recipe.stages, recipe.target, **asked)
    served = [stage for stage in recipe.stages if isinstance(stage, TritonRepo)]
    problems += [
        replace(problem, key=f"stages.{stage.id}.{problem.key}", remedy="leave it out")
        for stage in served
        for problem in stage.unread(row, recipe.target)
    ]
    kernels = served_on("kernels", generates=True, encoder_decoder=row.encoder_decoder) if row.generates else ()
    elsewhere = recipe.target.device != "cpu" and not set(kernels) & set(recipe.target.engines)
    if (row.generates or row.modality == "audio") and elsewhere and any(stage.vllm is None for stage in served):
        given = f"triton_repo given with target.device {recipe.target.device}"
        remedy = f"add {one_of(kernels)} to target.engines, " if kernels else ""
        remedy += "leave triton_repo out, or write a repository for vLLM with `triton_repo: {vllm: {}}`" if row.generates else ""
        remedy = f"give target.device: cpu, {remedy or 'or leave triton_repo out'}"
        where = f"on the cpu, or with {one_of(kernels)}" if kernels else "on the cpu alone"
        problems.append(Problem("stages", given, f"it serves {recipe.model.task} {where}", remedy))
    if row.generates and recipe.model.head == "new":
        problems.append(Problem("model.head", "new given", f"{recipe.model.task} keeps the head of the language model", "leave it out"))
    return problems


def _check_vllm(recipe: Recipe) -> list[Problem]:
    """Returns why a repository for vLLM cannot be written: it serves quantized decoders."""
    row, problems = recipe.model.facts, []
    for stage in recipe.stages:
        if not isinstance(stage, TritonRepo) or stage.vllm is None:
            continue
        key = f"stages.{stage.id}.vllm"
        if not row.generates or row.encoder_decoder:
            decoders = tasks_with(lambda other: other.generates and not other.encoder_decoder)
            given = f"given for the task {recipe.model.task}"
            problems.append(Problem(key, given, f"vLLM serves {decoders} here", "leave it out"))
        elif not any(isinstance(other, Quantize) for other in recipe.stages):
            reason = "vLLM gets the quantized weights of the last variant"
            problems.append(Problem(key, "given without a quantize stage", reason, "add one, or leave it out"))
    return problems
