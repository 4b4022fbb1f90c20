"""A folder with a network of OpenVINO under the names that Optimum Intel, sentence-transformers and OpenVINO GenAI look for.

    openvino_model.xml, openvino_model.bin     the network of the engine
    config.json, tokenizer.json, tokenizer_config.json, preprocessor_config.json ...
    modules.json, 1_Pooling/                   for text embedding models (`export.folders.hidden_states`)

The network is what the engine openvino loaded in the run, with the outputs of `export.folders.onnx_folder`. A decoder with the engine
openvino_genai has its folder already: it is copied, with the graphs of the tokenizer.

A network cannot store the precision of its float part, which OpenVINO lets the processor choose: every snippet gives it as the run did.

Names: OV_XML_FILE_NAME of optimum.intel.openvino.utils, at the top of the folder.

Left out: encoder-decoders, and models with two towers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from export.folders.hidden_states import HIDDEN, check_embeds, with_results, write_network, write_settings
from export.folders.onnx_folder import LOGITS, SPANS, optimum, sentence_transformers
from export.folders.source import PLACE, Built, Snippet, Source, Written, fit_to_graph, reading
from export.settings_files import copy_settings
from foundation.core.errors import InputError
from foundation.labels.facts import Facts

NETWORK = "openvino_model.xml"
PRECISION = "INFERENCE_PRECISION_HINT"
SETTINGS = (PRECISION, "KV_CACHE_PRECISION", "ATTENTION_BACKEND")
"""Properties of an engine that change its answers, as far as it has them."""
OF_PIPELINES = "ATTENTION_BACKEND"
"""Of these the one that OpenVINO GenAI alone knows."""
NO_TOKENIZER = "The folder has no graph of the tokenizer: programs read tokenizer.json."
NEEDS_BF16 = (
    f'`{PRECISION}: "bf16"` needs a CPU with bfloat16 arithmetic. Give `"f32"` on a CPU with AVX-512 but without bfloat16: '
    "OpenVINO emulates bfloat16 there, tens of times slower than float32."
)


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: The task has no such folder, or the run built no engine of OpenVINO for the variant.
    """
    key, facts = f"--variant {source.variant}", source.facts
    if facts.encoder_decoder or facts.two_towers:
        what = "an encoder-decoder" if facts.encoder_decoder else "a model with two towers"
        raise InputError(key, what, "only models with one network are written", "publish it as transformers")
    if facts.generates:
        return _copied(source, out, key)
    if facts.embeds_texts:
        check_embeds(source.checkpoint)
    built = source.engine(".xml", key)
    if facts.embeds_texts:
        write_settings(source.checkpoint, out)
        write_network(built.file, out / NETWORK)
    else:
        copy_settings(source.checkpoint.folder, out)
        _write_network(built.file, out / NETWORK, facts.finds_spans)
    fit_to_graph(source, out, _inputs(out / NETWORK))
    return Written(built, snippets(facts, built), _remarks(built), library="sentence-transformers" if facts.embeds_texts else "")


def snippets(facts: Facts, built: Built) -> tuple[Snippet, ...]:
    """Returns the lines that load the folder: in OpenVINO alone, and in Optimum or sentence-transformers."""
    properties = _properties(built)
    imports, lines = reading(facts, "np")
    outputs = [HIDDEN] if facts.embeds_texts else [*SPANS] if facts.finds_spans else [LOGITS]
    compiled = (
        f'network = openvino.Core().read_model("{PLACE}/{NETWORK}")\n'
        "names = [port.any_name for port in network.inputs]\n"  # the compiled model's inputs may have others
        f'model = openvino.Core().compile_model(network, "CPU", {properties})'
    )
    results = "\n".join(f'{output} = answers["{output}"]' for output in outputs)
    more = "\nvectors = last_hidden_state[:, 0]" if facts.embeds_texts else ""
    plain = Snippet("OpenVINO", f"import openvino\n{imports}\n\n{compiled}\n{lines}\nanswers = model(features)\n{results}{more}")
    other = sentence_transformers(f'backend="openvino", model_kwargs={{"ov_config": {properties}}}') if facts.embeds_texts else None
    return plain, other or optimum(facts, "intel", "OV", f"ov_config={properties}")


def _copied(source: Source, out: Path, key: str) -> Written:
    """Copies the folder of a decoder that an engine answers prompts from."""
    built = source.engine(".xml", key)
    copy_settings(source.checkpoint.folder, out)  # those of the engine's folder come after: it reads them
    shutil.copytree(built.file.parent, out, dirs_exist_ok=True)
    properties = _properties(built)
    own = "{" + ", ".join(part for part in properties.strip("{}").split(", ") if OF_PIPELINES not in part) + "}"
    pipeline = f'model = openvino_genai.LLMPipeline("{PLACE}", "CPU", **{properties})\n'
    pipeline += 'print(model.generate("Once upon a time", max_new_tokens=32))'
    without = () if (out / "openvino_tokenizer.xml").is_file() else (NO_TOKENIZER,)
    return Written(
        built,
        (
            Snippet("OpenVINO GenAI", f"import openvino_genai\n\n{pipeline}"),
            optimum(source.facts, "intel", "OV", f"ov_config={own}"),
        ),
        (*without, *_remarks(built)),
    )


def _remarks(built: Built) -> tuple[str, ...]:
    return (NEEDS_BF16,) if built.engine.properties.get(PRECISION) == "bf16" else ()


def _properties(built: Built) -> str:
    """Returns the settings that change answers, as a dict in Python."""
    properties = built.engine.properties
    return "{" + ", ".join(f'"{name}": "{properties[name]}"' for name in SETTINGS if name in properties) + "}"


def _inputs(network: Path) -> list[str]:
    import openvino

    return [port.any_name for port in openvino.Core().read_model(network).inputs]


def _write_network(network: Path, file: Path, spans: bool) -> None:
    """Copies a network and its weights; one that finds spans gets an output for each end."""
    if not spans:
        shutil.copyfile(network, file)
        shutil.copyfile(network.with_suffix(".bin"), file.with_suffix(".bin"))
        return
    import numpy as np
    import openvino
    from openvino import opset13

    model = openvino.Core().read_model(network)
    logits = model.get_results()[0].input_value(0)
    results = []
    for place, name in enumerate(SPANS):
        side = opset13.gather(logits, opset13.constant(np.int64(place)), opset13.constant(np.int64(2)))
        side.output(0).set_names({name})
        results.append(opset13.result(side))
    openvino.save_model(with_results(model, results), file, compress_to_fp16=False)
