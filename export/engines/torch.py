"""torch as an engine: the baseline that speed-ups are measured against, and the reference that other engines have to agree with.

    eager      the checkpoint as `foundation.models.checkpoint.load` gives it
    compiled   the same through torch.compile, once for each shape; it needs a C++ compiler

A quantized checkpoint asked for in fp32 or bf16 runs as the float model on its grid weights: its int8 layers are not put in place.

Left out: CUDA graphs.
"""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from export.engines.ending import Ending
from export.engines.spec import BuildRequest, EngineSpec, Logits, Placement
from foundation.core.arrays import Features
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, load_float
from foundation.models.forward import forward
from foundation.models.generation import answer_tokens, generate
from foundation.models.library import quiet
from foundation.standalone.language_text import LanguageText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foundation.artifacts import exported

NO_GRAPH = "torch has no graph of its own that could be counted"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def can_compile() -> bool:
    """Whether torch.compile finds a C++ compiler for the CPU."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def refusal(precision: str, model: Path) -> str | None:
    """Returns None: torch runs every checkpoint."""
    return None


def absence(device: str) -> str | None:
    """Returns in one line why torch cannot run on a device of this machine; None where it can."""
    return None if device == "cpu" or torch.cuda.is_available() else "torch finds no NVIDIA GPU that it can use"


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Builds nothing, as it runs the checkpoint itself; yields the eager mode."""
    size = sum(file.stat().st_size for file in request.checkpoint.folder.glob("*.safetensors"))
    yield request.entry("eager", size_bytes=size, int8_share_reason=NO_GRAPH)


def open_engine(spec: EngineSpec) -> Torch:
    """Opens a checkpoint."""
    return Torch(spec)


class Torch:
    """An engine from a checkpoint folder."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._dtype = DTYPES[spec.float_precision]
        self._device = torch.device(spec.device)
        folder = self._folder = Path(spec.path)
        if spec.precision == "int8":
            self._model = load(folder, self._device, self._dtype)
        else:
            self._model = load_float(folder).to(self._device, self._dtype)
        if spec.mode == "compiled":
            if not can_compile():
                raise InputError("torch compiled", "no C++ compiler is on PATH", remedy="install g++, or leave this mode out")
            self._model = torch.compile(self._model, dynamic=False)  # type: ignore[assignment]

    def predict(self, features: Features) -> Logits:
        """Returns logits float32 [n, C], or [n, L, V]."""
        with torch.inference_mode():
            logits: Logits = forward(self._model, self._tensors(features)).cpu().numpy()
        return logits

    def read(self, features: Features) -> None:
        """Computes what `predict` does; of a decoder the logits of the last token alone, and keeps keys and values, as before an answer."""
        model: PreTrainedModel = getattr(self._model, "_orig_mod", self._model)
        if model.config.is_encoder_decoder or "logits_to_keep" not in inspect.signature(model.forward).parameters:
            self.predict(features)
            return
        with torch.inference_mode():
            self._model(**self._tensors(features), logits_to_keep=1, use_cache=True).logits.float().cpu().numpy()

    def _tensors(self, features: Features) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in features.items()}
        return {name: tensor.to(self._dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answers to prompts of token ids, one after the other, by `generate` of Transformers."""
        started = time.perf_counter()
        return [self._answer(number, prompt, decoding, started, on_tokens) for number, prompt in enumerate(prompts)]

    def _answer(
        self, number: int, prompt: NDArray[np.int32], decoding: Decoding, started: float, on_tokens: TokenCallback | None
    ) -> Answer:
        seconds: list[float] = []

        class Clock:
            """Records when each token comes; Transformers passes the prompt first."""

            def __init__(self) -> None:
                self.is_prompt = True

            def put(self, tokens: torch.Tensor) -> None:
                if not self.is_prompt:
                    seconds.append(time.perf_counter() - started)
                    if on_tokens is not None:
                        on_tokens(number, tokens.reshape(-1).tolist())
                self.is_prompt = False

            def end(self) -> None:
                pass

        model: PreTrainedModel = self._model
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(self._device)
        before = 1 if model.config.is_encoder_decoder else ids.shape[1]  # the start token of the decoder, or the prompt
        given: dict[str, object] = {"logits_processor": LogitsProcessorList([Counted(decoding, before)])}
        if decoding.beams == 1:
            stops = Stops(Ending((), decoding.stop, lambda: self._text), before)
            given |= {"streamer": Clock(), "stopping_criteria": StoppingCriteriaList([stops])}
        known = () if decoding.ignore_end else answer_tokens(model).ends
        ends = (*known, *decoding.stop_tokens)
        torch.manual_seed(decoding.seed)
        with torch.inference_mode(), quiet():
            found = generate(model, ends, in_transformers(decoding), input_ids=ids, attention_mask=torch.ones_like(ids), **given)
        answers = [_until(row, ends) for row in found[:, before:].tolist()]
        return Answer(tuple(answers), tuple(seconds[: len(answers[0])]))

    @cached_property
    def _text(self) -> LanguageText:
        from foundation.models.inputs.language import language_text

        return language_text(self._folder)

    def placement(self) -> Placement:
        """Returns the device and the type of the float weights."""
        weight = next(weight for weight in self._model.parameters() if weight.is_floating_point())
        precision = next(name for name, dtype in DTYPES.items() if dtype == weight.dtype)
        return {"device": weight.device.type, "provider": f"torch {weight.device.type}", "float_precision": precision}

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns nothing: eager torch has no graph of its own that could be read."""
        return {}


def in_transformers(decoding: Decoding) -> dict[str, int | float | bool]:
    """Returns the settings in the words of Transformers."""
    settings: dict[str, int | float | bool] = {
        "max_new_tokens": decoding.max_tokens,
        "repetition_penalty": decoding.repetition_penalty,
        "num_beams": decoding.beams,
        "num_return_sequences": decoding.answers,
        "length_penalty": decoding.length_penalty,
    }
    if decoding.samples:
        settings |= {"do_sample": True, **{name: getattr(decoding, name) for name in ("temperature", "top_k", "top_p", "min_p")}}
    return settings


class Counted(LogitsProcessor):  # type: ignore[misc]
    """The presence and the frequency penalty, which Transformers lacks: logit - presence [count > 0] - frequency count, by the answer.

    Args:
        decoding: The settings.
        before: Tokens before the answer.
    """

    def __init__(self, decoding: Decoding, before: int) -> None:
        self._presence, self._frequency, self._before = decoding.presence_penalty, decoding.frequency_penalty, before

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the scores [n, V] of the next tokens of texts [n, L] after the penalties."""
        if self._presence == self._frequency == 0:
            return scores
        answer = input_ids[:, self._before :]
        count = torch.zeros_like(scores).scatter_add(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._presence * (count > 0) - self._frequency * count  # type: ignore[return-value]  # of floats


class Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends one answer at its stop text.

    Args:
        ending: Looks for it.
        before: Tokens before the answer.
    """

    def __init__(self, ending: Ending, before: int) -> None:
        self._ending, self._read = ending, before

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **settings: object) -> torch.BoolTensor:
        """Returns whether the text of tokens [1, L] has ended, [1]."""
        self._ending.take(input_ids[0, self._read :].tolist())
        self._read = input_ids.shape[1]
        return torch.full((1,), self._ending.ended, device=input_ids.device)  # type: ignore[return-value]  # of booleans


def _until(tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens up to the first that ends an answer: shorter answers of a search are filled up."""
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tuple(tokens[: last + 1])
