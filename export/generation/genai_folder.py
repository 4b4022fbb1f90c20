"""The folder that OpenVINO GenAI reads: a decoder with its cache, its tokenizer and its settings.

    openvino_model.xml, .bin           the graph of `export.generation.cached_graph`, with the integers of the checkpoint
    tokenizer.json, chat.json, ...     what text is read from, also as graphs where these say the same (`export.generation.text_files`)
    config.json, generation_config.json
    positions.json                     where a text has to be read again, if anywhere (`foundation.standalone.stretches`)

Any program with OpenVINO GenAI runs it: `openvino_genai.LLMPipeline(folder, "CPU")`. It takes text where the folder has the graphs of the
tokenizer, and token ids in any case.

Two ways to run attention. Paged attention serves many requests at once; OpenVINO makes it from the graph where it finds the operator
ScaledDotProductAttention in every layer, and drops the attention mask. That is right only for causal attention, and where no token depends
on how many others are read with it: `paged_obstacle` names the models for which it is not. Stateful attention runs the graph as it is, one
request at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import openvino
from transformers import GenerationConfig

from export.generation.cached_graph import cached_graph
from export.generation.codes import insert_codes, insert_tables
from export.generation.on_grids import OnGrids
from export.generation.positions import looks_ahead
from export.generation.rereading import read_again_at
from export.generation.text_files import write_graphs, write_text_files
from foundation.artifacts.artifact import write_json
from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet
from foundation.standalone.stretches import FILE, KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL = "openvino_model.xml"
ATTENTION = "ScaledDotProductAttention"
RUNTIME_OPTIONS = "runtime_options"
UNLIMITED_CONTEXT = 2048
"""Tokens of a model whose positions have no limit."""


def model_files(folder: Path) -> list[Path]:
    """Returns the paths of the model in a folder: network and weights."""
    return [folder / MODEL, (folder / MODEL).with_suffix(".bin")]


def write_genai_folder(found: OnGrids, folder: Path, runtime_options: Mapping[str, str]) -> str | None:
    """Writes the folder of a checkpoint, float or quantized.

    Args:
        found: A decoder.
        folder: Folder to write; created.
        runtime_options: Properties that the model is compiled with wherever it is read; kept in the xml.

    Returns:
        Why the folder has no graphs of the tokenizer, in one line; None where it has them.

    Raises:
        InputError: The model keeps no keys and values, or its tokenizer cannot be loaded.
    """
    checkpoint = found.checkpoint
    again = read_again_at(found.model)
    graph = with_integers(found)
    folder.mkdir()
    if again is not None:
        write_json(folder / FILE, {KEY: again})
    for name, value in runtime_options.items():
        graph.set_rt_info(value, [RUNTIME_OPTIONS, name])
    openvino.save_model(graph, folder / MODEL, compress_to_fp16=False)
    shutil.copyfile(checkpoint.folder / "config.json", folder / "config.json")
    write_generation_config(checkpoint, folder)
    write_text_files(checkpoint, folder)
    return write_graphs(checkpoint, folder)


def with_integers(found: OnGrids) -> openvino.Model:
    """Returns the graph with cache of a checkpoint, with its integers as constants if it is quantized."""
    graph = cached_graph(found.model)
    insert_codes(graph, found.layers)
    insert_tables(graph, found.tables)
    return graph


def paged_obstacle(folder: Path) -> str | None:
    """Returns in one line why paged attention would give other tokens for the model of a folder; None where nothing is known against it.

    Args:
        folder: What `write_genai_folder` wrote.
    """
    config = Checkpoint(folder).config
    window = sliding_window(config)
    if window is not None:
        return f"its attention slides over a window of {window} tokens, which paged attention does not see in the mask"
    graph = openvino.Core().read_model(folder / MODEL)
    layers, found = len(graph.get_sinks()) // 2, sum(node.get_type_name() == ATTENTION for node in graph.get_ops())
    if found < layers:
        return f"{layers - found} of {layers} layers compute attention without the operator {ATTENTION} (ALiBi or capped scores)"
    texts = config.get_text_config()
    if looks_ahead(graph, most_tokens(texts) or UNLIMITED_CONTEXT, texts.vocab_size):
        return (
            "its positions depend on the longest text that is read at once (LongRoPE), and paged attention reads several, and parts of them"
        )
    return None


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the window of a model whose attention slides over one in any layer, in tokens; None where it reads all tokens."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    return None if kinds is not None and set(kinds) == {"full_attention"} else int(window)


def write_generation_config(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes generation_config.json: the checkpoint's own, or one with the special tokens of its config.json."""
    given = checkpoint.folder / "generation_config.json"
    if given.is_file():
        shutil.copyfile(given, folder / given.name)
        return
    with quiet():
        GenerationConfig.from_model_config(checkpoint.config).save_pretrained(folder)
