"""Writes a checkpoint as a GGUF file, which llama.cpp and the programs on top of it load (Ollama, LM Studio).

    weights       the run's own integers where a block format has their grid (`export.gguf.blocks`), else rounded again or floats
    vectors       F32, as llama.cpp reads norms and biases
    numbers       of the architecture (`export.gguf.families`)
    tokenizer     vocabulary and the name of its rules (`export.gguf.vocabulary`), special tokens, chat template

The package `gguf` writes the file, and names the tensors. They are spooled to the folder for temporary files, so that a model needs no
more memory than 256 MB and its largest tensor.

On a CPU llama.cpp rounds what a matrix of blocks is multiplied with to int8, in blocks of 32 with a scale each. A run with float
activations leaves them float, and a run with w8a8 has other scales: answers differ slightly either way.

Source: the GGUF specification, ggml/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from export.compressed_tensors import is_decoder
from export.gguf.blocks import Encoded, Floats, Kind, Origin, encode
from export.gguf.families import FAMILIES, frequency_factors, problem, row_order
from export.gguf.vocabulary import vocabulary
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.scales import Scales
from foundation.schemes.sites import load_sites
from foundation.schemes.tables import load_tables

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_PACKAGE = "pip install 'compress-transformers[gguf]'"
FILE_TYPES: Mapping[str, str] = {
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
    "Q4_1": "MOSTLY_Q4_1",
    "Q4_K": "MOSTLY_Q4_K_S",
}
"""`general.file_type`, by the format of most weights of the blocks."""


@dataclass(frozen=True)
class StoredTensor:
    """What became of a tensor."""

    name: str
    """In the file."""
    source: str
    """In the checkpoint."""
    kind: Kind
    origin: Origin
    size: int
    """Numbers."""
    reason: str
    """Why a quantized matrix was rounded again; empty where it was not."""
    scales: int
    changed_scales: int
    largest_change: float
    """Largest relative change of a scale by float16."""


@dataclass(frozen=True)
class GgufFile:
    """A file that was written."""

    file: Path
    kind: str
    """Format of most weights: F32, F16, Q8_0, Q4_0, Q4_1 or Q4_K."""
    tensors: tuple[StoredTensor, ...]
    notes: tuple[str, ...]
    """How llama.cpp reads texts otherwise."""

    def of(self, origin: Origin) -> tuple[StoredTensor, ...]:
        """Returns the tensors of an origin."""
        return tuple(tensor for tensor in self.tensors if tensor.origin == origin)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader has to know, a sentence each."""
        return tuple(self._remarks())

    def _remarks(self) -> Iterator[str]:
        taken, again = self.of("codes"), self.of("rounded")
        if taken:
            changed, scales = sum(one.changed_scales for one in taken), sum(one.scales for one in taken)
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one.kind for one in taken).items())
            yield f"{len(taken)} matrices hold exactly the integers of the run ({kinds})."
            most = max(one.largest_change for one in taken)
            by = f", none by more than {most:.2%}" if changed else ""
            yield f"Scales are float16: {changed} of {scales} changed{by}."
        for (kind, reason), count in Counter((one.kind, one.reason) for one in again).items():
            yield f"{count} quantized matrices were rounded again, to {kind}: {reason}."
        if any(one.kind.startswith("Q") for one in self.tensors):
            yield "llama.cpp rounds their inputs to int8, 32 numbers to a scale, on a CPU: answers differ slightly from the run's."
        yield from self.notes


def write_gguf(checkpoint: Checkpoint, file: Path, *, floats: Floats = "F16", name: str = "") -> GgufFile:
    """Writes a file.

    Args:
        checkpoint: A language model or a text embedding model of `export.gguf.families.FAMILIES`, quantized or float.
        file: The file; replaced if it is there.
        floats: Format of matrices that are not quantized.
        name: Name of the model in the file.

    Returns:
        What was written, with what was rounded again.

    Raises:
        InputError: The package `gguf` is missing, llama.cpp does not compute such a model, or has no such tokenizer.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError("gguf", "the package gguf is not installed", remedy=NO_PACKAGE)
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType

    config = checkpoint.config
    reason = problem(config, is_decoder(checkpoint))
    if reason is not None:
        raise InputError(f"{checkpoint.folder}", reason, remedy="publish the model in another format")
    family = FAMILIES[config.model_type]
    words = vocabulary(checkpoint.folder, config.vocab_size, family.embeds)
    part = file.with_name(f"{file.name}.part")
    writer = GGUFWriter(part, family.arch, use_temp_file=True)
    stored = tuple(_add_tensors(writer, checkpoint, config, floats))
    kind = _most(stored, floats)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(LlamaFileType[FILE_TYPES[kind]])
    family.describe(config, writer)
    words.add_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(file)
    return GgufFile(file, kind, stored, (*words.remarks, *_notes(checkpoint, config)))


def _add_tensors(writer: Any, checkpoint: Checkpoint, config: PreTrainedConfig, floats: Floats) -> Iterator[StoredTensor]:
    family, weights, scales = FAMILIES[config.model_type], checkpoint.weights, _scales(checkpoint)
    names, left = _names(checkpoint, config), dict(scales)
    for source, name in names.items():
        exact: Floats = "F32" if name in family.always_float32 else floats
        encoded = encode(weights[source], left.pop(source.removesuffix(".weight"), None), exact, row_order(config, source))
        yield _add(writer, name, source, encoded)
    if left:
        raise InputError(f"{checkpoint.folder}", f"{next(iter(left))} has another name in its files", remedy="quantize the model again")
    factors = frequency_factors(config)
    if factors is not None:
        yield _add(writer, "rope_freqs.weight", "", encode(factors, None, "F32"))


def _add(writer: Any, name: str, source: str, encoded: Encoded) -> StoredTensor:
    from gguf import GGMLQuantizationType

    writer.add_tensor(name, encoded.data, raw_dtype=GGMLQuantizationType[encoded.kind])
    size, counts = prod(map(int, writer.tensors[-1][name].shape)), (encoded.scales, encoded.changed_scales, encoded.largest_change)
    return StoredTensor(name, source, encoded.kind, encoded.origin, size, encoded.reason, *counts)


def _names(checkpoint: Checkpoint, config: PreTrainedConfig) -> dict[str, str]:
    """Returns the names in the file of all tensors that it holds, by their names in the checkpoint.

    Raises:
        InputError: llama.cpp has no name for a tensor.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    family = FAMILIES[config.model_type]
    (arch,) = (one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == family.arch)
    known = get_tensor_name_map(arch, config.num_hidden_layers)
    names: dict[str, str] = {}
    for source in checkpoint.weights.names:
        if source.startswith(family.unread) or source.endswith("rotary_emb.inv_freq"):
            continue
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = known.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            remedy = "publish the model in another format"
            raise InputError(f"{checkpoint.folder}", f"the tensor {source}", "llama.cpp has no name for it", remedy)
        names[source] = name
    return names


def _scales(checkpoint: Checkpoint) -> dict[str, Scales | Tensor]:
    """Returns scales by module path: of layers, and of the rows of tables."""
    if not checkpoint.is_quantized:
        return {}
    layers, _ = load_quantization(checkpoint.folder)
    return {**layers, **load_tables(checkpoint.folder)}


def _most(stored: tuple[StoredTensor, ...], floats: Floats) -> str:
    """Returns the format of most weights of the blocks."""
    sizes: Counter[str] = Counter()
    for tensor in stored:
        if tensor.name.startswith("blk.") and tensor.name.endswith(".weight") and "norm" not in tensor.name:
            sizes[tensor.kind] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else floats


def _notes(checkpoint: Checkpoint, config: PreTrainedConfig) -> Iterator[str]:
    """Yields what the run computes otherwise than llama.cpp."""
    if checkpoint.is_quantized and load_sites(checkpoint.folder).names:
        yield "Attention and residual additions are float in llama.cpp; the run computed them in int8."
    settings = getattr(config, EMBEDDING_KEY, None)
    if not settings:
        return
    if settings["normalize"]:
        yield "llama.cpp returns vectors as they are pooled: divide each by its length."
    if settings["dimensions"]:
        yield f"Keep the first {settings['dimensions']} numbers of each vector, before you divide it by its length."
    if settings["prompt"]:
        yield f"Put {settings['prompt']!r} before each text: llama.cpp does not."
