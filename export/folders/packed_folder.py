"""A folder in the format compressed-tensors, which Transformers, vLLM and SGLang load: codes instead of weights
(`export.compressed_tensors`). Text embedding models have the files of sentence-transformers too (modules.json, 1_Pooling/ ...).

Left out: models that read no text alone, encoder-decoders, and float models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from export.folders.source import CONFIG, PLACE, Snippet, Source, Written
from export.folders.transformers_folder import snippets
from export.settings_files import copy_modules
from foundation.artifacts.artifact import read_json
from foundation.core.errors import InputError
from foundation.schemes.table import SCHEMES

DEQUANTIZED = "quantization_config=CompressedTensorsConfig(dequantize=True)"
"""Transformers 5.23 loads zero points in this way alone."""


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: The variant is no quantized text model, or the format cannot hold it.
    """
    from export import compressed_tensors

    checkpoint, facts = source.checkpoint, source.facts
    if checkpoint.scheme is None or facts.modality != "text" or facts.encoder_decoder or facts.two_towers:
        raise InputError(
            f"--variant {source.variant}", "no quantized text model with one stack", remedy="give one, or publish as another format"
        )
    reason = compressed_tensors.obstacle(checkpoint)
    if reason is not None:
        raise InputError(f"--variant {source.variant}", "the format cannot hold it", reason)
    compressed_tensors.write(checkpoint, out)
    copy_modules(checkpoint.folder, out)
    remarks = ["The integers are exactly those of the run; programs unpack them as they load, or multiply them."]
    if SCHEMES[checkpoint.scheme].activations == "dynamic":
        remarks.append("Programs scale the activations of a token by max |x| / 127.5; the figures below are of max |x| / 127.")
    loads = [_loading(snippets(source)[0], out, facts.embeds_texts)]
    if facts.generates:
        loads.append(Snippet("vLLM", f"vllm serve {PLACE}", "sh"))
    else:
        remarks.append("Transformers needs the package compressed-tensors. It multiplies the same integers as floats.")
    if facts.embeds_texts:
        remarks.append("As loaded below, sentence-transformers makes floats of the integers and does not round activations.")
    return Written(None, tuple(loads), tuple(remarks), as_torch=True, library="sentence-transformers" if facts.embeds_texts else "")


def _loading(snippet: Snippet, out: Path, embeds: bool) -> Snippet:
    """Returns a snippet that loads the model; it asks for float weights where the codes have zero points, and in sentence-transformers 6.2,
    whose call of the model passes by the hook that unpacks the codes."""
    groups = read_json(out / CONFIG)["quantization_config"]["config_groups"]
    if not embeds and all(group["weights"]["symmetric"] for group in groups.values()):
        return snippet
    imports, code = snippet.code.split("\n", 1)
    if embeds:
        options = f'model_kwargs={{"quantization_config": {DEQUANTIZED.partition("=")[2]}}}'
        code = code.replace(f'("{PLACE}")', f'("{PLACE}", {options})', 1)
        return replace(snippet, code=f"{imports}\nfrom transformers import CompressedTensorsConfig\n{code}")
    before, loads, after = code.rpartition(f'.from_pretrained("{PLACE}")')
    return replace(snippet, code=f"{imports}, CompressedTensorsConfig\n{before}{loads[:-1]}, {DEQUANTIZED}){after}")
