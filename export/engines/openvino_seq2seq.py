"""OpenVINO for encoder-decoders: a source is read once, its answer written token by token from a cache of keys and values.

`predict` gives the logits of whole targets: the first half of what the decoder reads, then the second half, which reads keys and values of
the first from the cache in the precision that it is kept in. `generate` answers sources in groups
(`foundation.standalone.encoder_decoder`), with the search of `foundation.standalone.decoding_rules`.

OpenVINO GenAI has no pipeline for encoder-decoders of text. Left out: devices other than the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from export.engines import openvino as blocks
from export.engines import openvino_genai as decoders
from export.engines.ending import Ending
from export.engines.openvino import PRECISIONS
from export.engines.own_rules import rules_of
from export.engines.spec import BuildRequest, EngineSpec, Logits, Placement
from export.engines.traced_precisions import traced_precisions
from foundation.core.answer_tokens import AnswerTokens
from foundation.core.arrays import Features
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.standalone.decoding_rules import Rules, Text, search, write
from foundation.standalone.encoder_decoder import EncoderDecoder
from foundation.standalone.language_text import LanguageText
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from foundation.artifacts import exported

FOLDER = "seq2seq"
MODE = "stateful"
GROUP = 16
"""Sources that are answered together."""

refusal, absence, computes_bf16, float_part = decoders.refusal, decoders.absence, blocks.computes_bf16, blocks.float_part
reads_graph = decoders.reads_graph


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the folder of both graphs; yields a mode for each float precision."""
    from export.generation.encoder_decoder_folder import folder_files, write_encoder_decoder_folder
    from export.generation.reads import reads_per_token

    folder = request.shared / FOLDER
    problem, options = decoders.written(request, folder, write_encoder_decoder_folder)
    if problem is not None:
        request.log(f"{request.engine}: {problem}")
        yield request.entry(MODE, runnable=False, reason=problem, int8_share_reason="there is no engine")
        return
    for floating in dict.fromkeys((request.float_precision, *(["bf16"] if request.bf16_float_part else []))):
        cache = decoders.cache_precision(request.kv_cache, floating)
        given = {**decoders.properties(request.target.num_threads, floating, cache), **options}
        reads = reads_per_token(folder_files(folder)[0], floating, cache)
        yield request.entry(MODE, folder_files(folder), float_precision=floating, cache_precision=cache, properties=given, reads=reads)


def open_engine(spec: EngineSpec) -> OpenVinoSeq2Seq:
    """Opens the files of `build`."""
    return OpenVinoSeq2Seq(spec)


class OpenVinoSeq2Seq:
    """An engine from the files of `build`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.path).parent
        self._properties = dict(spec.properties)
        self._preprocessor = Preprocessor.load(Path(spec.folder))
        self._tokens = AnswerTokens.of_folder(self._folder)

    def predict(self, features: Features) -> Logits:
        """Returns the logits of every position of the decoder, float32 [n, L, V]."""
        lengths, read = features["attention_mask"].sum(axis=1), features["decoder_input_ids"].astype(np.int64)
        sources = [ids[:length].astype(np.int32) for ids, length in zip(features["input_ids"], lengths, strict=True)]
        half, order = read.shape[1] // 2, np.arange(len(read), dtype=np.int32)
        with self._model.begin(sources) as group:
            parts = [group.forward(part, order) for part in (read[:, :half], read[:, half:]) if part.shape[1]]
        return np.concatenate(parts, axis=1)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node from the runtime models; int8 where both sides of the product are integers."""
        import openvino

        graph = openvino.Core().read_model(self._spec.path)
        head = graph.output("logits").get_node().input_value(0).get_node().get_friendly_name()
        compiled = [self._model.encoder, self._model.decoder]
        return traced_precisions(gemms, compiled, head, exact=self._properties.get(blocks.GROUP) == "0")

    def placement(self) -> Placement:
        """Returns the settings that the compiled decoder reports."""
        (device,) = self._model.decoder.get_property("EXECUTION_DEVICES")
        precision = self._model.decoder.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return {"device": device.lower(), "provider": f"OpenVINO {device}", "float_precision": PRECISIONS[precision]}

    def reported(self) -> dict[str, str]:
        """Returns the settings that the compiled decoder reports."""
        return blocks.reported(self._model.decoder)

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answers to sources of token ids, `GROUP` at a time; a search with beams takes one at a time."""
        started = time.perf_counter()
        if decoding.beams > 1:
            return [self._searched(source, decoding) for source in prompts]
        answers: list[Answer] = []
        for group in (prompts[at : at + GROUP] for at in range(0, len(prompts), GROUP)):
            answers += self._answered(group, decoding, len(answers), started, on_tokens)
        return answers

    def _answered(
        self, sources: Sequence[NDArray[np.int32]], decoding: Decoding, before: int, started: float, on_tokens: TokenCallback | None
    ) -> list[Answer]:
        """Answers one group; `before` is the number of sources before it."""
        texts = [Text(self._rules(decoding), self._start) for _ in sources]
        endings = [Ending((), decoding.stop, lambda: self._text) for _ in sources]  # the texts know their end tokens
        seconds: list[list[float]] = [[] for _ in sources]

        def took(number: int, token: int) -> None:
            seconds[number].append(time.perf_counter() - started)
            if on_tokens is not None:
                on_tokens(before + number, [token])
            endings[number].take([token])
            texts[number].stopped = endings[number].ended

        with self._model.begin(sources) as group:
            write(group.step, texts, took)
        return [Answer((tuple(text.tokens),), tuple(times)) for text, times in zip(texts, seconds, strict=True)]

    def _searched(self, source: NDArray[np.int32], decoding: Decoding) -> Answer:
        with self._model.begin([source] * decoding.beams) as group:
            found = search(group.step, self._rules(decoding), self._start, decoding.beams, decoding.length_penalty)
        return Answer(tuple(tuple(one) for one in found[: decoding.answers]), ())

    def _rules(self, decoding: Decoding) -> Rules:
        return rules_of(decoding, self._tokens.ends, self._tokens.first)

    @property
    def _start(self) -> int:
        start = self._preprocessor.decoder_start_token_id
        assert start is not None, "an encoder-decoder has a start token"
        return start

    @cached_property
    def _text(self) -> LanguageText:
        return LanguageText.load(self._folder)

    @cached_property
    def _model(self) -> EncoderDecoder:
        return EncoderDecoder(self._folder, self._properties, self._preprocessor.pad_token_id)
