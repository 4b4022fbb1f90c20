"""A folder that Transformers loads: weights, config, tokenizer or preprocessor; for text embedding models the files of
sentence-transformers too.

    model.safetensors, or model-0000x-of-0000y.safetensors and model.safetensors.index.json
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, preprocessor_config.json ...
    modules.json, 1_Pooling/, 2_Normalize/ ...     as far as the checkpoint has them

A quantized checkpoint holds weights on the grid of its scheme, as floats: Transformers computes with exactly these, and leaves activations
float. The scales are not copied: programs that load every file of tensors would take them for weights.

Left out: layers of unequal size, which only `compress.api.load_checkpoint` builds.
"""

from __future__ import annotations

from pathlib import Path

from export.folders.source import PLACE, Snippet, Source, Written, reading
from export.settings_files import copy_modules, copy_settings
from foundation.core.errors import InputError
from foundation.schemes.table import SCHEMES


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: Its layers differ in size.
    """
    if source.has_own_shape:
        raise InputError(
            f"--variant {source.variant}",
            "its layers differ in size or read a learned prefix",
            "no class of Transformers builds such a model",
            "publish it as onnx or openvino, or load it with compress.api.load_checkpoint",
        )
    folder = source.checkpoint.folder
    copy_settings(folder, out, weights=True)
    copy_modules(folder, out)
    return described(source)


def described(source: Source) -> Written:
    """Returns what the folder of a variant holds."""
    scheme = source.checkpoint.scheme
    rounds = scheme is not None and SCHEMES[scheme].activations != "float"
    remarks = []
    if scheme is not None:
        remarks.append(
            f"The weights are on the grid of the scheme {scheme}, stored as floats: each is a scale times an integer. Transformers "
            "computes with them in float; the file is as large as the float model's."
        )
    if rounds:
        remarks.append(
            "Transformers leaves activations float. The figures below are of quantized activations, so that answers differ slightly."
        )
    library = "sentence-transformers" if source.facts.embeds_texts else ""
    return Written(None, snippets(source), tuple(remarks), as_torch=not rounds, library=library)


def snippets(source: Source) -> tuple[Snippet, ...]:
    """Returns the lines that load a folder of weights."""
    facts = source.facts
    if facts.embeds_texts:
        lines = f'model = SentenceTransformer("{PLACE}")\nvectors = model.encode(["A text to read."])'
        return (Snippet("sentence-transformers", f"from sentence_transformers import SentenceTransformer\n\n{lines}"),)
    if facts.two_towers:
        loads = f'.from_pretrained("{PLACE}")'
        lines = f"model = {facts.auto_class}{loads}\nprocessor = AutoProcessor{loads}"
        return (Snippet("Transformers", f"from transformers import {facts.auto_class}, AutoProcessor\n\n{lines}"),)
    imports, lines = reading(facts, "pt")
    last = "model.generate(**features, max_new_tokens=32)" if facts.generates else "model(**features)"
    named = "tokens" if facts.generates else "outputs"
    head, _, classes = imports.rpartition("import ")
    imports = f"{head}import {', '.join(sorted([classes, facts.auto_class]))}"
    model = f'model = {facts.auto_class}.from_pretrained("{PLACE}")'
    return (Snippet("Transformers", f"{imports}\n\n{lines}\n{model}\n{named} = {last}"),)
