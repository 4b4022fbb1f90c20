"""OpenVINO GenAI: language models that answer, from a graph with a cache of keys and values (`export.generation`).

Modes are alternatives; the first one that passes is used:

    paged      paged attention with continuous batching: many requests at once
    stateful   the graph as it is, one request after the other; for attention that paged attention would get wrong

`predict` gives the logits of whole blocks through the same graph with its cache: the first half of a block, then the second half, which
reads keys and values of the first from the cache in the precision that it is kept in. `generate` runs the pipelines of OpenVINO GenAI.

GenAI's own default is a cache of 8-bit integers, which changes answers; the precision of the cache is therefore always given. An engine
that computes in fp32 keeps it in fp32, fp16 or int8, one that computes in bf16 in bf16 or int8; others are refused by paged attention, and
ignored by stateful attention without a word.

A search with beams gives the answers of Transformers up to a length penalty just below 1. From 1 on GenAI may end it sooner where answers
reach an end token within a few steps.

GenAI 2026.4 adds a presence and a frequency penalty to logits below 0, and subtracts them from the others: they reward repetition as often
as they punish it. No value makes that right, so they are refused. All other settings follow `foundation.standalone.decoding_rules`,
in the same order.

In paged mode a draft model, or the text itself, may propose tokens (`foundation.core.speculation`).

Left out: devices other than the CPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino.opset13 as ops
from numpy.typing import NDArray

from export.engines import openvino as blocks
from export.engines.ending import Ending
from export.engines.openvino import PRECISIONS
from export.engines.spec import NO_BLOCKS, BuildRequest, EngineSpec, Logits, Placement, last_tokens_of
from export.engines.traced_precisions import traced_precisions
from foundation.core.arrays import Array, Features
from foundation.core.decoding import NO_TOKEN, Answer, Decoding, TokenCallback
from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.core.speculation import MATCHED_TOKENS, PROPOSED_MODE, Speculation
from foundation.schemes.table import of_precision
from foundation.standalone.draft_folder import with_stand_in
from foundation.standalone.language_text import LanguageText
from foundation.standalone.openvino_request import Request, for_this_cpu
from foundation.standalone.stretches import read_again_at, stretches

if TYPE_CHECKING:
    import openvino_genai

    from export.generation.on_grids import OnGrids
    from foundation.artifacts import exported

FOLDER = "genai"
CACHE = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "u8"}
CACHE_PRECISION = "KV_CACHE_PRECISION"
BACKENDS = {"paged": "PA", "stateful": "SDPA"}
NUMBERS = ("int8", "int4")
"""Number formats of weights that `export.generation.codes` writes."""
BACKEND = "ATTENTION_BACKEND"
"""A property of GenAI, unknown to the engine below it."""
WHOLE_PROMPTS = 2**20
"""Tokens of a step with a draft, so that prompts are read whole: OpenVINO GenAI 2026.4 answers otherwise where it reads them in parts."""


computes_bf16, float_part = blocks.computes_bf16, blocks.float_part


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why a model of this precision cannot run; None where it can."""
    scheme = of_precision(precision)
    if scheme is not None and scheme.activations == "blocks":
        return NO_BLOCKS
    if scheme is None or scheme.numbers in NUMBERS:
        return None
    return blocks.NO_FP8 if scheme.needs_float8 else f"its graph holds weights in {one_of(NUMBERS)}, and these are {scheme.numbers}"


def absence(device: str) -> str | None:
    """Returns None: OpenVINO runs on every CPU."""
    return None


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the folder that GenAI reads; yields the paged mode, then the stateful one."""
    from export.generation.genai_folder import model_files, paged_obstacle, write_genai_folder
    from export.generation.reads import reads_per_token

    folder = request.shared / FOLDER
    problem, options = written(request, folder, write_genai_folder)
    if problem is not None:
        request.log(f"{request.engine}: {problem}")
        yield request.entry("stateful", runnable=False, reason=problem, int8_share_reason="there is no engine")
        return
    obstacle = paged_obstacle(folder)
    precisions = dict.fromkeys((request.float_precision, *(["bf16"] if request.bf16_float_part else [])))
    for mode, floating in itertools.product(BACKENDS, precisions):
        reason, cache = obstacle if mode == "paged" else None, cache_precision(request.kv_cache, floating)
        given = {**properties(request.target.num_threads, floating, cache), **options, BACKEND: BACKENDS[mode]}
        yield request.entry(
            mode,
            model_files(folder),
            float_precision=floating,
            cache_precision=cache,
            properties=given,
            reads=reads_per_token(model_files(folder)[0], floating, cache),
            runnable=reason is None,
            reason=reason,
            int8_share_reason=reason,
        )


def written(
    request: BuildRequest, folder: Path, write_folder: Callable[[OnGrids, Path, Mapping[str, str]], str | None]
) -> tuple[str | None, dict[str, str]]:
    """Writes the folder of a model, unless the fp32 build did.

    Args:
        request: The build.
        folder: The folder.
        write_folder: Writes it, with properties of the model; returns why it has no graphs of the tokenizer, None where it has them or
            needs none.

    Returns:
        In one line why it cannot be written, None where it is there; and the properties.
    """
    from export.generation.on_grids import on_grids
    from export.graph.qdq_schemes import group_of

    options, scheme = {blocks.GROUP: "0"}, of_precision(request.precision)  # 0: tokens are not quantized by the engine
    if request.shared != request.folder:
        return None if folder.exists() else "the engine was not built in fp32, whose files it reads", options
    try:
        found = on_grids(request.checkpoint)
        if scheme is not None and scheme.activations == "dynamic":
            options[blocks.GROUP] = str(group_of(found.widths))
        left_out = write_folder(found, folder, options)
    except InputError as error:  # the model keeps no keys and values, for one
        return "; ".join(error.lines), options
    if left_out is not None:
        request.log(f"{request.engine}: other programs give token ids to {folder.name}/, not text: {left_out}")
    return None, options


def reads_graph() -> bool:
    """Returns False: the graph with a cache is made from the checkpoint."""
    return False


def cache_precision(kv_cache: str, float_precision: str) -> str:
    """Returns the type of the cache of keys and values.

    Args:
        kv_cache: float, fp16 or int8, as the recipe says.
        float_precision: What the engine computes in; one that computes in bf16 has bf16 for fp16 too.
    """
    return float_precision if kv_cache == "float" or (kv_cache, float_precision) == ("fp16", "bf16") else kv_cache


def open_engine(spec: EngineSpec) -> OpenVinoGenai:
    """Opens the files of `build`."""
    return OpenVinoGenai(spec)


def properties(threads: int, float_precision: str, cache_precision: str) -> dict[str, str]:
    """Returns the settings that a model is compiled with, wherever it is timed, evaluated or served."""
    return {**blocks.properties(threads, float_precision), CACHE_PRECISION: CACHE[cache_precision]}


class OpenVinoGenai:
    """An engine from the files of `build`. The graph for blocks and the pipeline for answers are compiled when they are first asked.

    Raises:
        InputError: Tokens are to be proposed to a model that runs in stateful mode.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if spec.speculation is not None and spec.mode != PROPOSED_MODE:
            raise InputError("speculation", f"the model runs in {spec.mode} mode", f"tokens can be proposed in {PROPOSED_MODE} mode alone")
        self._spec = spec
        self._properties = for_this_cpu(openvino.Core(), spec.properties)
        self._compile_properties = {name: value for name, value in self._properties.items() if name != BACKEND}

    def predict(self, features: Features) -> Logits:
        """Returns the logits of every position, float32 [n, L, V]."""
        ids = features["input_ids"]
        self._request.reset_state()
        half, vocabulary = ids.shape[1] // 2, self._model.output("logits").get_partial_shape()[2].get_length()
        logits: Logits = np.empty((*ids.shape, vocabulary), np.float32)
        for start, stop in ((0, half), (half, ids.shape[1])):
            if stop > start:
                self._forward(ids[:, :stop], start, logits[:, start:stop])
        return logits

    def read(self, features: Features) -> None:
        """Reads rows as prompts, in the pipeline that is served: attention of the graph for blocks is slower than paged attention."""
        last_tokens_of(self, features)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node from the runtime model; int8 where both sides of the product are integers."""
        head = self._model.output("logits").get_node().input_value(0).get_node().get_friendly_name()
        return traced_precisions(gemms, [self._compiled], head, exact=self._compile_properties.get(blocks.GROUP) == "0")

    def placement(self) -> Placement:
        """Returns the settings that a compiled model reports: a pipeline does not, so that one of a single operation stands for its own."""
        compiled = self.__dict__.get("_compiled") or openvino.Core().compile_model(_smallest(), "CPU", self._compile_properties)
        (device,) = compiled.get_property("EXECUTION_DEVICES")
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return {"device": device.lower(), "provider": f"OpenVINO GenAI {device}", "float_precision": PRECISIONS[precision]}

    def reported(self) -> dict[str, str]:
        """Returns the settings that the compiled model reports."""
        return blocks.reported(self._compiled)

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answers to prompts of token ids; in paged mode all run at once, in stateful mode one after the other."""
        answered = self._paged if self._spec.mode == "paged" else self._stateful
        return answered(prompts, decoding, on_tokens or (lambda number, tokens: None))

    @cached_property
    def _model(self) -> openvino.Model:
        return openvino.Core().read_model(self._spec.path)

    @cached_property
    def _compiled(self) -> openvino.CompiledModel:
        return openvino.Core().compile_model(self._model, "CPU", self._compile_properties)

    @cached_property
    def _request(self) -> Request:
        return Request(self._compiled)

    def _forward(self, seen: Array, start: int, logits: Logits) -> None:
        """Writes the logits of tokens from position `start` on into `logits`; the tokens before are in the cache."""
        rows, length = seen.shape
        positions = np.arange(start, length, dtype=np.int64)
        self._request.infer(
            {
                "input_ids": np.asarray(seen[:, start:], np.int64),
                "attention_mask": np.ones((rows, length), np.int64),
                "position_ids": np.tile(positions, (rows, 1)),
                "beam_idx": np.arange(rows, dtype=np.int32),
            },
            logits,
        )

    @cached_property
    def _paged_pipeline(self) -> openvino_genai.ContinuousBatchingPipeline:
        import openvino_genai

        folder, scheduler, speculation = Path(self._spec.path).parent, openvino_genai.SchedulerConfig(), self._spec.speculation
        with ExitStack() as stack:
            if speculation is not None and speculation.draft is not None:
                scheduler.max_num_batched_tokens = WHOLE_PROMPTS
                folder, draft = (stack.enter_context(with_stand_in(one)) for one in (folder, Path(speculation.draft).parent))
                speculation = replace(speculation, draft=str(draft / Path(speculation.draft).name))
            properties = {**self._compile_properties, **speculating(speculation)}
            return openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    @cached_property
    def _again(self) -> int | None:
        return read_again_at(Path(self._spec.path).parent)

    @cached_property
    def _stateful_pipeline(self) -> openvino_genai.LLMPipeline:
        import openvino_genai

        return openvino_genai.LLMPipeline(str(Path(self._spec.path).parent), "CPU", **self._properties)

    def _paged(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback) -> list[Answer]:
        pipeline, speculation = self._paged_pipeline, self._spec.speculation
        settings = generation_config(decoding, self._of_model, speculation)
        ends = _own_ends(decoding, self._of_model) if speculation is not None else frozenset()
        started = time.perf_counter()
        handles = [pipeline.add_request(number, _tensor(prompt), settings) for number, prompt in enumerate(prompts)]
        texts = [_Text(Ending(ends, decoding.stop, lambda: self._text), partial(on_tokens, number)) for number in range(len(prompts))]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - started
            for handle, text in zip(handles, texts, strict=True):
                for output in handle.read().values() if decoding.beams == 1 and handle.can_read() and not text.ended else ():
                    text.take(output.generated_ids, now)
                    if text.ended:
                        handle.cancel()
        if decoding.beams > 1:
            found = ([tuple(output.generated_ids) for output in _best_first(handle)] for handle in handles)
            return [Answer(tuple(one[: decoding.answers]), ()) for one in found]
        answers = [text.answer() for text in texts]
        if speculation is None:
            return answers
        return [_counted(speculation, *one, decoding) for one in zip(prompts, answers, (text.steps for text in texts), strict=True)]

    @cached_property
    def _text(self) -> LanguageText:
        return LanguageText.load(Path(self._spec.path).parent)

    @cached_property
    def _of_model(self) -> openvino_genai.GenerationConfig:
        """GenAI's config of the model; a pipeline to which tokens are proposed does not know it."""
        import openvino_genai

        if self._spec.speculation is None:
            return self._paged_pipeline.get_config()
        return openvino_genai.GenerationConfig(str(Path(self._spec.path).with_name("generation_config.json")))

    def _stateful(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback) -> list[Answer]:
        import openvino_genai

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
            """Records when each token comes."""

            def __init__(self, text: _Text) -> None:
                super().__init__()
                self.text = text

            def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
                self.text.take([token] if isinstance(token, int) else token, time.perf_counter() - started)
                return openvino_genai.StreamingStatus.CANCEL if self.text.ended else openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        pipeline, answers = self._stateful_pipeline, []
        settings, started = generation_config(decoding, pipeline.get_generation_config()), time.perf_counter()
        for number, prompt in enumerate(prompts):
            text = _Text(Ending((), decoding.stop, lambda: self._text), partial(on_tokens, number))
            if decoding.beams > 1:
                found = pipeline.generate(_tensor(prompt), settings)
                answers.append(Answer(tuple(tuple(one) for one in found.tokens[: decoding.answers]), ()))
                continue
            for most in stretches(len(prompt), decoding.max_tokens, self._again):
                settings.max_new_tokens = most
                found = pipeline.generate(_tensor(prompt), settings, Clock(text))
                if text.ended or found.finish_reasons[0] == openvino_genai.GenerationFinishReason.STOP:
                    break
                prompt = np.concatenate([prompt, np.array(found.tokens[0], np.int32)])
            answers.append(text.answer())
        return answers


def speculating(speculation: Speculation | None) -> dict[str, object]:
    """Returns the properties of a pipeline to which tokens are proposed."""
    import openvino_genai

    if speculation is None:
        return {}
    if speculation.draft is None:
        return {"prompt_lookup": True}
    given = for_this_cpu(openvino.Core(), speculation.properties)
    properties = {name: value for name, value in given.items() if name != BACKEND}
    return {"draft_model": openvino_genai.draft_model(str(Path(speculation.draft).parent), "CPU", **properties)}


class _Text:
    """The answer to one prompt as it comes.

    Args:
        ending: Looks for what ends it and the pipeline does not look for.
        told: Takes tokens as they come.
    """

    def __init__(self, ending: Ending, on_tokens: Callable[[Sequence[int]], None]) -> None:
        self._ending, self._on_tokens = ending, on_tokens
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        self.steps: list[int] = []
        """Tokens that came with each step of the model."""

    @property
    def ended(self) -> bool:
        """Whether nothing that still comes belongs to it."""
        return self._ending.ended

    def take(self, ids: Sequence[int], now: float) -> None:
        """Takes the tokens of a step; `now` in seconds."""
        self.steps.append(len(ids))
        taken = self._ending.take(ids)
        self._tokens += taken
        self._seconds += [now] * len(taken)
        self._on_tokens(taken)

    def answer(self) -> Answer:
        """Returns the whole answer."""
        return Answer((tuple(self._tokens),), tuple(self._seconds))


def _counted(speculation: Speculation, prompt: NDArray[np.int32], answer: Answer, steps: Sequence[int], decoding: Decoding) -> Answer:
    """Returns an answer with the numbers of proposed and accepted tokens, given how many tokens came with each step."""
    (tokens,) = answer.tokens
    ends = itertools.accumulate(steps)
    kept = [size - max(0, end - len(tokens)) for size, end in zip(steps, ends, strict=True) if end - size < len(tokens)]
    proposed = speculation.proposed(prompt.tolist(), tokens, kept, decoding.max_tokens)
    return replace(answer, proposed=proposed, accepted=len(tokens) - len(kept))


def generation_config(
    decoding: Decoding, of_model: openvino_genai.GenerationConfig, speculation: Speculation | None = None
) -> openvino_genai.GenerationConfig:
    """Returns the settings in GenAI's words.

    Args:
        decoding: The settings.
        of_model: GenAI's config of the model, for its end tokens.
        speculation: What proposes tokens.

    Raises:
        InputError: Nothing can be proposed with these settings, or GenAI does not take a penalty.
    """
    import openvino_genai

    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(decoding, name) != 0:
            raise InputError(
                name,
                f"{getattr(decoding, name):g} given",
                "0 is allowed: OpenVINO GenAI adds it to negative logits instead of subtracting it",
                "give repetition_penalty, or answer in torch or onnxruntime_decoder",
            )
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = decoding.max_tokens
    # GenAI passes all stop tokens over where it ignores the end token
    config.ignore_eos = speculation is not None or (decoding.ignore_end and not decoding.stop_tokens)
    if speculation is None:  # else `Ending` looks for them: GenAI passes over those within proposed tokens
        config.stop_token_ids = set(_own_ends(decoding, of_model))
    # without an end token GenAI takes the tokenizer's, and fails where it has none
    config.set_eos_token_id(NO_TOKEN if decoding.ignore_end or of_model.eos_token_id < 0 else of_model.eos_token_id)
    config.repetition_penalty = decoding.repetition_penalty
    config.do_sample = decoding.samples
    if decoding.samples:
        config.temperature, config.rng_seed = decoding.temperature, decoding.seed
        config.top_p, config.min_p = decoding.top_p, decoding.min_p
        if decoding.top_k:
            config.top_k = decoding.top_k
    if decoding.beams > 1:
        if decoding.repetition_penalty != 1:
            raise InputError(
                "repetition_penalty",
                f"{decoding.repetition_penalty:g} given with {decoding.beams} beams",
                "OpenVINO GenAI searches without it",
                "leave one of them out, or answer in torch",
            )
        config.num_beams, config.num_return_sequences = decoding.beams, decoding.answers
        config.length_penalty = decoding.length_penalty
    if speculation is not None:
        speculation.check(decoding)
        config.num_assistant_tokens = speculation.tokens
        if speculation.draft is None:
            config.max_ngram_size = MATCHED_TOKENS
    return config


def end_tokens(of_model: openvino_genai.GenerationConfig) -> tuple[int, ...]:
    """Returns the end tokens of a model, given GenAI's config of it."""
    return tuple(token for token in (*of_model.stop_token_ids, of_model.eos_token_id) if token >= 0)


def _own_ends(decoding: Decoding, of_model: openvino_genai.GenerationConfig) -> frozenset[int]:
    """Returns the tokens that end an answer."""
    return frozenset((*decoding.stop_tokens, *(() if decoding.ignore_end else end_tokens(of_model))))


def _tensor(prompt: NDArray[np.int32]) -> openvino.Tensor:
    return openvino.Tensor(np.ascontiguousarray(prompt, np.int64)[None])


def _best_first(handle: openvino_genai.GenerationHandle) -> list[openvino_genai.GenerationOutput]:
    return sorted(handle.read_all(), key=lambda output: -output.score)


def _smallest() -> openvino.Model:
    """Returns a model of one operation."""
    x = ops.parameter([1], np.float32)
    return openvino.Model([ops.relu(x)], [x])
