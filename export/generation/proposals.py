"""Tokens that a draft, or the text, proposes to the engines of a run: whether answers stay the same, and how many tokens are accepted.

Every engine that takes proposals answers the prompts of the export once more. Its answers have to be those that it gave by itself,
but for tokens whose logits are as good as equal, which sums over several tokens at once may turn (`foundation.standalone.tolerance`; not
held to it where bf16 or the cache rounds far more). How fast it is then is measured with the other speeds (`foundation.measure.proposals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.choices import Generation
from export.engines.spec import proposed_to, spec_of
from export.parity.parity import ParityError
from foundation.artifacts.document import Figures
from foundation.artifacts.exported import Build, Engine
from foundation.core.decoding import Decoding
from foundation.core.engines import ENGINES
from foundation.core.errors import InputError
from foundation.core.speculation import PROPOSED_MODE
from foundation.measure.engine_process import EngineProcess
from foundation.measure.proposals import accepted
from foundation.measure.tokens import compare_tokens, ended, filled, load_answers, token_shortfall
from foundation.models.inputs.vocabulary import other_tokens
from foundation.stage.context import Context


def with_proposals(builds: Sequence[Build], settings: Generation, context: Context, root: Path) -> list[Build]:
    """Asks every engine that takes proposals.

    Args:
        builds: The builds of export.json.
        settings: What proposes.
        context: The context of the stage.
        root: Folder of export.json.

    Returns:
        The builds; engines that take proposals have `speculation`: `draft` (build, or None), `file`, `properties`, `tokens` (at once),
        `compared` (with the answers without proposals), `proposed`, `accepted`, `tokens_per_step`.

    Raises:
        InputError: The draft cannot propose tokens.
        ParityError: Answers are others.
    """
    if settings.draft is None and settings.prompt_lookup is None:
        return list(builds)
    proposing = _look_up(settings) if settings.draft is None else _draft(builds, settings, context)
    return [
        build.with_(
            engines=tuple(_with_proposals(build, one, proposing, context, root) if _generates(one) else one for one in build.engines)
        )
        if build.variant != settings.draft
        else build
        for build in builds
    ]


def _generates(entry: Engine) -> bool:
    return entry.runnable and ENGINES[entry.engine].proposed_to


def _look_up(settings: Generation) -> Figures:
    return {"draft": None, "file": None, "properties": {}, "tokens": settings.prompt_lookup}


def _draft(builds: Sequence[Build], settings: Generation, context: Context) -> Figures:
    """Returns the part of `speculation` that says what proposes: the first engine of the draft that can."""
    mine = [(build, entry) for build in builds if build.variant == settings.draft for entry in build.engines if _generates(entry)]
    fitting = [(build, entry) for build, entry in mine if entry.mode == PROPOSED_MODE]
    if not fitting:
        why = f"it runs in {mine[0][1].mode} mode" if mine else "no engine of it answers prompts"
        raise InputError(
            "export.generation.draft", f"{settings.draft} given", f"{why}, and a draft needs {PROPOSED_MODE} mode", "give another"
        )
    for variant in dict.fromkeys(build.variant for build in builds):
        difference = other_tokens(context.checkpoints[variant].path, context.checkpoints[str(settings.draft)].path)
        if difference is not None:
            raise InputError(
                "export.generation.draft", f"{settings.draft} has {difference} in {variant}", remedy="give one with the same tokenizer"
            )
    build, entry = fitting[0]
    return {"draft": build.folder, "file": entry.file, "properties": entry.properties, "tokens": settings.draft_tokens}


def _with_proposals(build: Build, entry: Engine, proposing: Figures, context: Context, root: Path) -> Engine:
    """Returns the entry of an engine that has answered once more."""
    name = f"{build.folder} {entry.engine} {entry.mode}"
    if entry.mode != PROPOSED_MODE:
        context.progress.warn(f"{name}: tokens can be proposed in {PROPOSED_MODE} mode alone; none are")
        return entry
    found, generation = entry.with_(speculation=proposing), entry.generation
    assert generation is not None, "an engine that takes proposals has answered without"
    prompts, expected = load_answers(root / str(generation.file))
    spec, decoding = spec_of(root, build, entry, context.target), Decoding(max_tokens=expected.shape[1], ignore_end=not ended(expected))
    with EngineProcess(proposed_to(spec, root, found)) as process, context.progress.bar(f"    {name}: tokens", expected.size) as advance:
        answers = process.generate(prompts, decoding, lambda _, tokens: advance(len(tokens)))
    compared = compare_tokens(expected, filled([one.tokens[0] for one in answers], expected.shape[1]))
    reason = token_shortfall(compared, "the engine without proposals")
    if reason is not None and entry.float_precision == entry.cache_precision == "fp32":
        raise ParityError(f"{name} with {proposing['draft'] or 'prompt look-up'}: {reason}")
    counted = accepted(answers)
    context.progress.log(
        f"  {name} with {proposing['draft'] or 'prompt look-up'}: {counted['accepted']} of {counted['proposed']} proposed tokens accepted, "
        f"{counted['tokens_per_step']:.2f} tokens per step; {compared['identical']} of {compared['prompts']} answers as without"
    )
    return found.with_(speculation={**proposing, "compared": compared, **counted})
