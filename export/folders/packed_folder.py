"""A folder in the format compressed-tensors, which Transformers, vLLM and SGLang load: codes instead of weights
(`export.compressed_tensors`).

Left out: models other than quantized decoders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from export.folders.source import CONFIG, PLACE, Snippet, Source, Written
from export.folders.transformers_folder import snippets
from foundation.artifacts.artifact import read_json
from foundation.core.errors import InputError
from foundation.schemes.table import SCHEMES

DEQUANTIZED = f'.from_pretrained("{PLACE}", quantization_config=CompressedTensorsConfig(dequantize=True))'
"""Transformers 5.23 loads zero points in this way alone."""


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: The variant is no quantized decoder, or the format cannot hold it.
    """
    from export import compressed_tensors

    checkpoint = source.checkpoint
    if checkpoint.scheme is None or not compressed_tensors.is_decoder(checkpoint):
        raise InputError(
            f"--variant {source.variant}", "no quantized decoder", remedy="give a quantized language model, or publish as another format"
        )
    reason = compressed_tensors.obstacle(checkpoint)
    if reason is not None:
        raise InputError(f"--variant {source.variant}", "the format cannot hold it", reason)
    compressed_tensors.write(checkpoint, out)
    remarks = ["The integers are exactly those of the run; programs unpack them as they load, or multiply them."]
    if SCHEMES[checkpoint.scheme].activations == "dynamic":
        remarks.append("Programs scale the activations of a token by max |x| / 127.5; the figures below are of max |x| / 127.")
    served = Snippet("vLLM", f"vllm serve {PLACE}", "sh")
    return Written(None, (_loading(snippets(source)[0], out), served), tuple(remarks), as_torch=True)


def _loading(snippet: Snippet, out: Path) -> Snippet:
    """Returns a snippet of Transformers, which has to ask for float weights where the codes have zero points."""
    groups = read_json(out / CONFIG)["quantization_config"]["config_groups"]
    if all(group["weights"]["symmetric"] for group in groups.values()):
        return snippet
    code = snippet.code.replace("AutoTokenizer\n", "AutoTokenizer, CompressedTensorsConfig\n", 1)
    return replace(snippet, code=code.replace(f'.from_pretrained("{PLACE}")\ntokens', f"{DEQUANTIZED}\ntokens"))
