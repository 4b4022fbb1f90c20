"""torch on the fused kernels of `export.kernels`: decoders of GPT-2's and Llama's layers that answer, on NVIDIA GPUs.

    packed    whole texts without padding, causal attention; answers from a cache of keys and values in pages, steps recorded as CUDA graphs

The engine runs one file, the plan of `export.fused.decoder`; it needs torch, the Triton language and safetensors. Its integers equal those
in `foundation.schemes.int8`: parity compares w8a8 layer by layer, and the greedy tokens of every scheme with torch's. What is float is
float32, keys and values too, and fp16 where the recipe asks for `float_precision: fp16`. As many prompts run at once as `ROWS`; others take
the place of those that end.

Without a GPU the environment variable TRITON_INTERPRET=1 runs every kernel in the interpreter of the language, as for `torch_kernels`.

Left out: float builds, w4a8-block and fp8; a search with beams; caches in less than what is float; proposals of tokens; models that
`export.fused.decoder.parts` lists.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from export.engines import torch_kernels
from export.engines.own_rules import rules_of
from export.engines.spec import BuildRequest, EngineSpec, Logits, Placement, last_tokens_of
from export.engines.torch_kernels import ATTENTION_PRODUCTS, MODE, float_part, launches_of, nodes_of, probed_tensors
from export.engines.writing import Writing
from foundation.core.answer_tokens import AnswerTokens
from foundation.core.arrays import Array, Features
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.core.errors import InputError
from foundation.schemes.table import SchemeFacts, of_precision, schemes_with, weight_only
from foundation.standalone.decoding_rules import Rules
from foundation.standalone.language_text import LanguageText

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from export.fused.linears import Linear
    from export.parity.own_rounding import Rounding
    from foundation.artifacts import exported

__all__ = ["absence", "build", "float_part", "open_engine", "refusal", "rounding"]
FOLDER, FILE = "torch-kernels-decoder", "plan.safetensors"
ROWS = 32
"""Prompts that run at once."""
FLOAT_CACHE = "it keeps keys and values in what is float alone: give export.generation.kv_cache: float"
BEAMS = "it does not search with beams"
absence = torch_kernels.absence


def runs(scheme: SchemeFacts) -> bool:
    """Whether there are kernels for a scheme."""
    return scheme.numbers == "int8" or (scheme.numbers == "int4" and scheme.activations == "float")


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why the kernels cannot run a graph of this precision; None where they can."""
    scheme = of_precision(precision)
    return None if scheme is not None and runs(scheme) else f"it runs {schemes_with(runs)}, and this build is {precision}"


def model_refusal(config: PreTrainedConfig) -> str | None:
    """Returns in one line why the kernels cannot run the model of a Transformers config, as far as the config shows it."""
    from foundation.models.own_shape import embedding_rank_of

    return torch_kernels.LOW_RANK if embedding_rank_of(config) else None


def rounding(scheme: SchemeFacts) -> Rounding | None:
    """Returns None: the scale of each token is torch's."""
    return None


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the folder of the engine; yields its one mode, in fp32 and where asked for in fp16 too."""
    from export.fused.decoder.compared_launches import passes
    from export.fused.decoder.parts import decoder_plan
    from export.fused.decoder.plan import write_decoder
    from export.generation.genai_folder import write_generation_config
    from export.generation.text_files import write_text_files
    from foundation.artifacts.artifact import writing

    folder = request.folder / FOLDER
    try:
        if request.kv_cache != "float":
            raise InputError("export.generation.kv_cache", f"{request.kv_cache} given", FLOAT_CACHE)
        plan = decoder_plan(request.checkpoint, nodes_of(request.model))
    except InputError as error:
        problem = "; ".join(error.lines)
        request.log(f"{request.engine}: {problem}")
        yield request.entry(MODE, runnable=False, reason=problem, int8_share_reason="there is no engine")
        return
    floats = dict.fromkeys((request.float_precision, *(["fp16"] if request.fp16_float_part else [])))
    if request.target.device == "cuda" and absence("cuda") is None and not torch_kernels.interprets():
        chosen = launches_of(request, plan.longest, "fp16" if "fp16" in floats else "fp32", partial(passes, plan))
        plan = replace(plan, launches=chosen)
    with writing(folder) as temporary:
        write_decoder(plan, temporary / FILE)
        shutil.copyfile(request.checkpoint.folder / "config.json", temporary / "config.json")
        write_text_files(request.checkpoint, temporary)
        write_generation_config(request.checkpoint, temporary)
    for floating in floats:
        facts = {"cache_precision": floating, "integer_weights": plan.integer_share, "reads": plan.reads(2 if floating == "fp16" else 4)}
        yield request.entry(MODE, [folder / FILE], float_precision=floating, properties={}, **facts)


def open_engine(spec: EngineSpec) -> TorchKernelsDecoder:
    """Opens the files of `build`."""
    return TorchKernelsDecoder(spec)


class TorchKernelsDecoder:
    """An engine from the files of `build`."""

    def __init__(self, spec: EngineSpec) -> None:
        from export.fused.decoder.runner import DecoderRunner

        why = absence(spec.device)
        if why is not None:
            raise InputError("target.engines", f"{spec.engine} given", why)
        torch.set_num_threads(spec.threads)
        self._folder = Path(spec.path).parent
        self._runner = DecoderRunner(Path(spec.path), spec.device, spec.float_precision)
        self._end_tokens = frozenset(AnswerTokens.of_folder(self._folder).ends)

    def predict(self, features: Features) -> Logits:
        """Returns the logits of every position, float32 [n, L, V]."""
        return self._runner.predict(features)

    def read(self, features: Features) -> None:
        """Reads rows as prompts."""
        last_tokens_of(self, features)

    def probe(self, tensors: Sequence[str], features: Features) -> dict[str, Array]:
        """Returns inputs, codes and products of int8 layers by their ONNX names, [T, ...] of the tokens of all rows."""
        known = probed_tensors(self._runner.plan, self._runner.probe(features))
        return {name: known[name] for name in tensors}

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node, by the layers of the plan; products of attention are float."""
        rest = self._runner.float_precision
        tied = rest if self._runner.plan.word.scale is None else weight_only("int8")
        layers = {self._runner.plan.head_name: tied} | {layer.name: _precision(layer, rest) for layer in self._runner.plan.linears}
        told = {gemm: layers[module] for gemm in gemms if (module := gemm.rpartition("/")[0]) in layers}
        return told | {gemm: rest for gemm in gemms if gemm not in told and gemm.rpartition("/")[2] in ATTENTION_PRODUCTS}

    def reported(self) -> dict[str, str]:
        """Returns the type of keys and values, and how kernels are launched, where that was chosen by times."""
        return {"keys and values": self._runner.float_precision, **self._runner.plan.launches.reported}

    def placement(self) -> Placement:
        """Returns the device of the weights and what runs the kernels there."""
        return {"device": self._runner.device.type, "provider": self._runner.provider, "float_precision": self._runner.float_precision}

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answers to prompts of token ids, up to `ROWS` at once.

        Raises:
            InputError: A prompt leaves no room for an answer, or a search with beams is asked for.
        """
        if decoding.beams > 1:
            raise InputError("beams", f"{decoding.beams} given", BEAMS, "give 1, or answer in torch")
        rules = [self._rules(decoding, len(prompt)) for prompt in prompts]
        longest = sorted((len(prompt) + rule.max_tokens for prompt, rule in zip(prompts, rules, strict=True)), reverse=True)
        with self._runner.on_device():
            texts = self._runner.texts(longest[:ROWS])
            return Writing(texts, ROWS, prompts, rules, decoding, lambda: self._text, on_tokens).answers()

    def _rules(self, decoding: Decoding, length: int) -> Rules:
        """Returns the rules that choose tokens after a prompt of so many tokens."""
        context = self._runner.plan.longest
        if length >= context:
            raise InputError("prompt", f"{length} tokens given", f"the model reads {context} with its answer", "give a shorter one")
        return rules_of(decoding, self._end_tokens, room=context - length)

    @cached_property
    def _text(self) -> LanguageText:
        return LanguageText.load(self._folder)


def _precision(layer: Linear, rest: str) -> str:
    if layer.bits is None:
        return rest
    return "int8" if layer.is_int8 else weight_only(f"int{layer.bits}")
