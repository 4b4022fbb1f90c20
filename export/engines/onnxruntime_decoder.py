"""ONNX Runtime for decoders that answer: one graph of fused operators, keys and values in buffers of its caller, continuous batching.

For models whose layers are built like Llama's (`export.generation.decoder_parts`). A small decoder is faster here than in OpenVINO GenAI,
above all in int4 (benchmarks/README.md): there are a fifth of the operators. w4a8-block and w8a8-dynamic multiply integers:
inputs are rounded to int8, with a scale for each block of as many inputs as share a weight scale; parity asks torch with the same
rounding (`export.parity.own_rounding`). w4a16 multiplies in float. What a product rounds is read back (`export.engines.block_products`).

`predict` gives the logits of whole blocks through the cache: the first half of a block, then the second half. `generate` lets as many
prompts run at once as `ROWS`; others take the place of those that end.

Keys and values are kept in fp32. Threads spin while they wait, as between the hundreds of operators of a token it pays.

Left out: static int8 and FP8, whose scales MatMulNBits does not take, bf16, other caches than fp32, proposals of tokens, and devices other
than the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from export.engines import onnxruntime as graphs
from export.engines.block_products import ATTRIBUTES, reported, rounds_inputs
from export.engines.own_rules import rules_of
from export.engines.spec import BuildRequest, EngineSpec, Logits, Placement, last_tokens_of
from export.engines.writing import Writing
from export.stored_weights import BLOCKS, attribute
from foundation.artifacts.graph import Graph
from foundation.core.answer_tokens import AnswerTokens
from foundation.core.arrays import Features
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.core.errors import InputError
from foundation.schemes.table import INT4_BY_INT8, SchemeFacts, of_precision, weight_only
from foundation.standalone.decoding_rules import Rules, search
from foundation.standalone.language_text import LanguageText
from foundation.standalone.onnx_decoder import CACHE, INVARIANT, Beams, OnnxDecoder, Texts, session_options

if TYPE_CHECKING:
    import onnx

    from export.parity.own_rounding import Rounding
    from foundation.artifacts import exported

FOLDER, MODEL = "onnx-decoder", "model.onnx"
MODE = "batched"
ROWS = 32
"""Prompts that run at once."""
STATIC = "ONNX Runtime multiplies integer weights of a decoder in w8a8-dynamic, w4a8-block or w4a16; give one of these"
FLOAT_CACHE = "it keeps keys and values in fp32 alone: give export.generation.kv_cache: float"
PRECISIONS = {(4, True): INT4_BY_INT8, (4, False): weight_only("int4"), (8, True): "int8", (8, False): weight_only("int8")}
"""Precision of a MatMulNBits, by the bits of its codes and whether it rounds its input to int8."""
ATTENTION = "GroupQueryAttention"
HALVES = ("high", "low")
"""Last parts of the names of products with half of an int8 table (`export.generation.fused_graph`)."""


def refusal(precision: str, model: Path) -> str | None:
    """Returns in one line why a model of this precision cannot run; None where it can."""
    scheme = of_precision(precision)
    if scheme is None or scheme.grouped or scheme.activations == "dynamic":
        return None
    return STATIC if scheme.integer else graphs.refusal(precision, model)


def absence(device: str) -> str | None:
    """Returns None: ONNX Runtime runs on every CPU."""
    return None


def rounding(scheme: SchemeFacts) -> Rounding | None:
    """Returns the quantization of inputs by MatMulNBits, one block for each weight scale; None where the scheme leaves them float."""
    from export.parity.own_rounding import BLOCKS as ROUNDED

    return None if scheme.activations == "float" else ROUNDED


def build(request: BuildRequest) -> Iterator[exported.Engine]:
    """Writes the folder of the engine; yields its one mode."""
    from export.generation.fused_folder import reads_of, write_fused_folder

    folder, problem = request.folder / FOLDER, FLOAT_CACHE if request.kv_cache != "float" else None
    if problem is None:
        try:
            write_fused_folder(request.checkpoint, folder)
        except InputError as error:
            problem = "; ".join(error.lines)
    if problem is not None:
        request.log(f"{request.engine}: {problem}")
        yield request.entry(MODE, runnable=False, reason=problem, int8_share_reason="there is no engine")
        return
    files = [folder / MODEL, folder / f"{MODEL}.data"]
    yield request.entry(
        MODE,
        files,
        cache_precision="fp32",
        properties=properties(request.target.num_threads) | ({INVARIANT: "1"} if request.batch_invariant else {}),
        reads=reads_of(Graph(folder / MODEL)),
    )


def reads_graph() -> bool:
    """Returns False: the fused graph is made from the checkpoint."""
    return False


def batch_invariant() -> bool:
    """Whether answers can be made independent of the answers that are written with them (`foundation.standalone.onnx_decoder`)."""
    return True


def properties(threads: int) -> dict[str, str]:
    """Returns the settings of a session, which the server repeats."""
    return {**graphs.properties(threads), "session.intra_op.allow_spinning": "1"}


def open_engine(spec: EngineSpec) -> OnnxRuntimeDecoder:
    """Opens the files of `build`."""
    return OnnxRuntimeDecoder(spec)


class OnnxRuntimeDecoder:
    """An engine from the files of `build`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._end_tokens = frozenset(AnswerTokens.of_folder(Path(spec.path).parent).ends)

    def predict(self, features: Features) -> Logits:
        """Returns the logits of every position, float32 [n, L, V]."""
        ids, texts = np.asarray(features["input_ids"], np.int64), self._decoder.texts()
        half, logits = ids.shape[1] // 2, np.empty((*ids.shape, self._decoder.vocabulary), np.float32)
        for part in (slice(half), slice(half, None)):
            if ids[:, part].shape[1]:
                texts.forward(ids[:, part], logits[:, part])
        return logits

    def read(self, features: Features) -> None:
        """Reads rows as prompts."""
        last_tokens_of(self, features)

    def precisions(self, gemms: Sequence[str], batch: int, sequence: int | None) -> dict[str, str]:
        """Returns the precision of each GEMM node, by the session's optimized graph and by what such products compute here."""
        told: dict[str, str] = {}
        for node in self._optimized:
            if node.op_type in (BLOCKS, *graphs.FLOAT):
                told |= dict.fromkeys(_modules(node), _precision(node))
            elif node.op_type == ATTENTION:
                told |= {f"{node.name}/{product}": "fp32" for product in ("qk", "pv")}
        found = {gemm: told.get(gemm, told.get(gemm.rpartition("/")[0])) for gemm in gemms}
        return {gemm: precision for gemm, precision in found.items() if precision is not None}

    def reported(self) -> dict[str, str]:
        """Returns what the products multiply, the type of keys and values, and whether answers depend on their company."""
        kinds = {graphs.FLOATS[one.type] for one in self._decoder.session.get_inputs() if one.name.startswith(CACHE)}
        alike = {"answers": "the same alone and in company"} if self._decoder.invariant else {}
        return {**reported(self._optimized), "keys and values": " and ".join(sorted(kinds)), **alike}

    def placement(self) -> Placement:
        """Returns the first provider of the session, and the type of its logits."""
        session = self._decoder.session
        (logits,) = (one.type for one in session.get_outputs() if one.name == "logits")
        return {"device": "cpu", "provider": session.get_providers()[0], "float_precision": graphs.FLOATS[logits]}

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answers to prompts of token ids, up to `ROWS` at once; a search with beams takes one at a time."""
        if decoding.beams > 1:
            return [self._searched(prompt, decoding) for prompt in prompts]
        rules = [self.rules(decoding, len(prompt)) for prompt in prompts]
        return Writing(self.texts(), ROWS, prompts, rules, decoding, lambda: self.text, on_tokens).answers()

    def _searched(self, prompt: NDArray[np.int32], decoding: Decoding) -> Answer:
        *before, start = prompt.tolist()
        beams = Beams(self._decoder, before)
        found = search(beams.step, self.rules(decoding, len(prompt)), start, decoding.beams, decoding.length_penalty, before)
        return Answer(tuple(tuple(one) for one in found[: decoding.answers]), ())

    def rules(self, decoding: Decoding, length: int) -> Rules:
        """Returns the rules that choose tokens after a prompt of so many tokens.

        Raises:
            InputError: The model has no room for an answer.
        """
        room = self._decoder.context - length
        if room < 1:
            most = f"the model reads {self._decoder.context} with its answer"
            raise InputError("prompt", f"{length} tokens given", most, "give a shorter one")
        return rules_of(decoding, self._end_tokens, room=room)

    @cached_property
    def _optimized(self) -> list[onnx.NodeProto]:
        """The nodes of the graph as the session optimizes it."""
        with tempfile.TemporaryDirectory() as folder:
            options = session_options(self._spec.properties)
            options.optimized_model_filepath = str(Path(folder, "optimized.onnx"))
            onnxruntime.InferenceSession(self._spec.path, options, providers=["CPUExecutionProvider"])
            return list(Graph(Path(options.optimized_model_filepath)).load(external=False).graph.node)

    @cached_property
    def text(self) -> LanguageText:
        """Decoder from tokens to text."""
        return LanguageText.load(Path(self._spec.path).parent)

    @cached_property
    def _decoder(self) -> OnnxDecoder:
        return OnnxDecoder(Path(self._spec.path), self._spec.properties)

    def texts(self) -> Texts:
        """Returns a cache without a text."""
        return self._decoder.texts()


def _modules(node: onnx.NodeProto) -> list[str]:
    """Returns the modules that a product is of: one, those that it merges, or one whose table it has a half of."""
    name, _, half = node.name.rpartition("/")
    return [name] if half in HALVES else node.name.split("+")


def _precision(node: onnx.NodeProto) -> str:
    """Returns what a product multiplies; half of an int8 table counts as int8 weights."""
    if node.op_type != BLOCKS:
        return "fp32"
    bits, block, level = (attribute(node, name) for name in ATTRIBUTES)
    rounds = rounds_inputs(bits, block, level)
    return PRECISIONS[8 if node.name.rpartition("/")[2] in HALVES else bits, rounds]
