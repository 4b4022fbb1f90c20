"""The folder that an encoder-decoder is answered from.

    encoder.xml, .bin                  reads a source (`export.generation.encoder_decoder_graphs`), with the integers of the checkpoint
    decoder.xml, .bin                  writes the target, with a cache of its own keys and values
    tokenizer.json, chat.json, ...     what text is read from (`export.generation.text_files`)
    config.json, generation_config.json

`foundation.standalone.encoder_decoder` runs it with only numpy and openvino.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import openvino

from export.generation.codes import insert_codes, insert_tables, table_constants, weight_products
from export.generation.encoder_decoder_graphs import encoder_decoder_graphs
from export.generation.genai_folder import RUNTIME_OPTIONS, write_generation_config
from export.generation.on_grids import OnGrids
from export.generation.text_files import write_text_files
from foundation.schemes.scales import Scales
from foundation.standalone.encoder_decoder import DECODER, ENCODER


def folder_files(folder: Path) -> list[Path]:
    """Returns the paths of the two models in a folder, the decoder first: networks and weights."""
    models = [folder / DECODER, folder / ENCODER]
    return [*models, *(path.with_suffix(".bin") for path in models)]


def write_encoder_decoder_folder(found: OnGrids, folder: Path, runtime_options: Mapping[str, str]) -> None:
    """Writes the folder of a checkpoint, float or quantized.

    Args:
        found: An encoder-decoder.
        folder: Folder to write; created.
        runtime_options: Properties that the models are compiled with wherever they are read; kept in the xml files.

    Raises:
        InputError: The decoder keeps no keys and values.
    """
    checkpoint = found.checkpoint
    graphs = dict(zip((ENCODER, DECODER), encoder_decoder_graphs(found.model), strict=True))
    _insert_codes(list(graphs.values()), found.layers)
    for name, scale_V in found.tables.items():
        holders = [graph for graph in graphs.values() if table_constants(graph, scale_V)]  # both, where source and target share a table
        for graph in holders or graphs.values():
            insert_tables(graph, {name: scale_V})
    folder.mkdir()
    for file, graph in graphs.items():
        for key, value in runtime_options.items():
            graph.set_rt_info(value, [RUNTIME_OPTIONS, key])
        openvino.save_model(graph, folder / file, compress_to_fp16=False)
    shutil.copyfile(checkpoint.folder / "config.json", folder / "config.json")
    write_text_files(checkpoint, folder)
    write_generation_config(checkpoint, folder)


def _insert_codes(graphs: list[openvino.Model], layers: Mapping[str, Scales]) -> None:
    """Lets each layer read its codes in the graph that it is in: the keys and values of the source are products of the encoder's."""
    products = [weight_products(graph) for graph in graphs]
    lost = [name for name in layers if not any(name in found for found in products)]
    if lost:
        raise ValueError(f"{lost[0]}: no product with a constant weight in the graphs")
    for graph, found in zip(graphs, products, strict=True):
        insert_codes(graph, {name: scales for name, scales in layers.items() if name in found})
