"""A folder with an ONNX graph under the names that Optimum, transformers.js and sentence-transformers look for.

    onnx/model.onnx              a float graph
    onnx/model_quantized.onnx    int8 weights: what transformers.js calls q8, its default in browsers
    onnx/model_q4.onnx           int4 weights
    onnx/<name>_data             weights of 2 GB and more
    config.json, tokenizer.json, tokenizer_config.json, preprocessor_config.json ...    at the top
    modules.json, 1_Pooling/     for text embedding models (`export.folders.hidden_states`)

The graph is what the engine onnxruntime loaded in the run. Its output `logits` stays, with two exceptions, which these programs name
otherwise: `start_logits` and `end_logits` [B, S] of a model that finds spans, and `last_hidden_state` [B, 1, D] of an embedding model.
Integer weights with float activations are written so that a session with default settings multiplies in float
(`export.folders.hidden_states.with_float_activations`).

Names: ONNX_WEIGHTS_NAME of optimum.onnxruntime.constants and `<name>_data` of its `_cached_file`; DEFAULT_DTYPE_SUFFIX_MAPPING and the
folder `onnx` of transformers.js; `backend_should_export` of sentence_transformers.backend.

Left out: language models, of which Optimum expects inputs `past_key_values.<layer>.key`; models with two towers.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from export.folders.hidden_states import HIDDEN, as_hidden_states, check_embeds, with_float_activations, write_settings
from export.folders.source import PICTURE, PLACE, TEXT, Snippet, Source, Written, fit_to_graph, reading
from export.settings_files import copy_settings
from foundation.artifacts.graph import Graph
from foundation.core.errors import InputError
from foundation.labels.facts import Facts
from foundation.schemes.table import SCHEMES

FOLDER, FLOAT, BITS = "onnx", "model.onnx", {4: "model_q4.onnx"}
QUANTIZED = "model_quantized.onnx"
DTYPES = {FLOAT: "fp32", QUANTIZED: "q8", BITS[4]: "q4"}
"""What transformers.js calls the files."""
LOGITS, SPANS = "logits", ("start_logits", "end_logits")


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: The task has no such folder, or the run built no engine that opens an ONNX file for the variant.
    """
    from export.graph.onnx import save

    key = f"--variant {source.variant}"
    check_task(source, key)
    if source.facts.embeds_texts:
        check_embeds(source.checkpoint)
    built = source.engine(".onnx", key)
    model = with_float_activations(Graph(built.file).load())
    if source.facts.embeds_texts:
        write_settings(source.checkpoint, out)
        model = as_hidden_states(model)
    else:
        copy_settings(source.checkpoint.folder, out)
    fit_to_graph(source, out, [tensor.name for tensor in model.graph.input])
    if source.facts.finds_spans:
        model = as_spans(model)
    file = save(model, out / FOLDER / file_name(source))
    _rename_data(file)
    return Written(built, snippets(source.facts, file.name), library="sentence-transformers" if source.facts.embeds_texts else "")


def check_task(source: Source, key: str) -> None:
    """Raises if programs expect another graph of models of the task.

    Raises:
        InputError: A language model, or a model with two towers.
    """
    if source.facts.generates:
        others = "publish it as transformers, compressed-tensors, or from an engine that answers prompts as openvino"
        raise InputError(key, "a language model", "Optimum expects a graph with past_key_values, which no engine here has", others)
    if source.facts.two_towers:
        raise InputError(key, "a model with two towers", "programs expect both in one graph", "publish it as transformers")


def file_name(source: Source) -> str:
    """Returns the name of the graph, by the bits of its weights."""
    scheme = source.checkpoint.scheme
    return FLOAT if scheme is None else BITS.get(SCHEMES[scheme].weight_bits, QUANTIZED)


def as_spans(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a graph whose output `logits` [B, S, 2] became `start_logits` and `end_logits` [B, S]; the model is changed."""
    graph, (output,) = model.graph, model.graph.output
    batch, sequence, _ = output.type.tensor_type.shape.dim
    shape, kind = [dim.dim_param or dim.dim_value for dim in (batch, sequence)], output.type.tensor_type.elem_type
    del graph.output[:]
    for place, name in enumerate(SPANS):
        graph.initializer.append(helper.make_tensor(f"{name}_place", TensorProto.INT64, [], [place]))
        graph.node.append(helper.make_node("Gather", [output.name, f"{name}_place"], [name], name=name, axis=2))
        graph.output.append(helper.make_tensor_value_info(name, kind, shape))
    return model


def snippets(facts: Facts, name: str) -> tuple[Snippet, ...]:
    """Returns the lines that load the folder: in ONNX Runtime alone, Optimum or sentence-transformers, and transformers.js."""
    imports, lines = reading(facts, "np")
    outputs = [HIDDEN] if facts.embeds_texts else [*SPANS] if facts.finds_spans else [LOGITS]
    left = "hidden" if facts.embeds_texts else ", ".join(outputs)
    left = left if len(outputs) > 1 else f"({left},)"
    names = ", ".join(f'"{output}"' for output in outputs)
    session = f'session = onnxruntime.InferenceSession("{PLACE}/{FOLDER}/{name}")\nnames = [node.name for node in session.get_inputs()]'
    run = f"{left} = session.run([{names}], features)" + ("\nvectors = hidden[:, 0]" if facts.embeds_texts else "")
    plain = f"import onnxruntime\n{imports}\n\n{session}\n{lines}\n{run}"
    programs = [Snippet("ONNX Runtime", plain)]
    if facts.embeds_texts:
        programs.append(sentence_transformers(f'backend="onnx", model_kwargs={{"file_name": "{FOLDER}/{name}"}}'))
    else:
        programs.append(optimum(facts, "onnxruntime", "ORT", f'file_name="{name}"'))
    if facts.embeds_texts or (facts.modality != "audio" and (facts.answer.classifies or facts.tags or facts.finds_spans)):
        programs.append(_in_browsers(facts, name))
    return tuple(programs)


def _in_browsers(facts: Facts, name: str) -> Snippet:
    """Returns the lines of transformers.js: of the pipelines that read exactly what these graphs read."""
    task, options = ("feature-extraction", ', { pooling: "cls" }') if facts.embeds_texts else (facts.pipeline_tag, "")
    question = '"Which text?", "The text that holds the answer."'
    row = f'"{PICTURE}"' if facts.modality == "image" else question if facts.finds_spans else TEXT
    code = 'import { pipeline } from "@huggingface/transformers";\n\n'
    code += f'const model = await pipeline("{task}", "{PLACE}", {{ dtype: "{DTYPES[name]}" }});\n'
    return Snippet("transformers.js", f"{code}const output = await model({row}{options});", "js")


def optimum(facts: Facts, module: str, prefix: str, options: str) -> Snippet:
    """Returns the lines that load a folder in Optimum.

    Args:
        facts: The task.
        module: `onnxruntime` or `intel`.
        prefix: Of its classes: `ORT` or `OV`.
        options: Further arguments of `from_pretrained`.
    """
    imports, lines = reading(facts, "pt")
    kind = facts.auto_class.replace("Auto", prefix, 1)
    model = f'model = {kind}.from_pretrained("{PLACE}", {options})'
    return Snippet("Optimum", f"from optimum.{module} import {kind}\n{imports}\n\n{lines}\n{model}\noutputs = model(**features)")


def sentence_transformers(options: str) -> Snippet:
    """Returns the lines that load a folder in sentence-transformers, with further arguments."""
    model = f'model = SentenceTransformer("{PLACE}", {options})'
    lines = f"from sentence_transformers import SentenceTransformer\n\n{model}\nvectors = model.encode([{TEXT}])"
    return Snippet("sentence-transformers", lines)


def _rename_data(file: Path) -> None:
    """Renames a file of weights next to the graph from `.data` to `_data`, the name that these programs download with it."""
    data = file.with_name(f"{file.name}.data")
    if not data.exists():
        return
    renamed = file.with_name(f"{file.name}_data")
    data.rename(renamed)
    model = onnx.load(str(file), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = renamed.name
    onnx.save_model(model, str(file))
