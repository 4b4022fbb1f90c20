"""The files next to a decoder that its text is read from, and the files of OpenVINO GenAI where they say the same.

    tokenizer.json, tokenizer_config.json, ...   as in the checkpoint, for Transformers
    chat.json                                    what Transformers reads next to tokenizer.json (`foundation.standalone.language_text`)
    openvino_tokenizer.xml, .bin                 text to ids as a graph, for other programs with OpenVINO GenAI; also the chat template
    openvino_detokenizer.xml, .bin               ids to text

Every engine of ours and the server read the first two. The graphs are a second reader: openvino_tokenizers does not know every step of a
tokenizer, gives other ids for some texts where it does (spaces before a single digit), and OpenVINO GenAI renders some chat
templates to other prompts. So the graphs are asked `PROBES`, and left out where one answer differs: a program that gives text then gets an
error instead of the answer to another prompt. Token ids are taken all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer

from foundation.artifacts.artifact import write_json
from foundation.measure.probes import CHATS, PROBES
from foundation.models.files import TEXT_FILES, copy_files
from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import language_text
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.models.library import one_line, quiet
from foundation.standalone.chat_template import TemplateRefused
from foundation.standalone.language_text import SETTINGS, LanguageText

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"


def write_text_files(checkpoint: Checkpoint, folder: Path) -> LanguageText:
    """Writes the text files of a checkpoint (tokenizer, template, settings), without the graphs.

    Returns:
        Its reader.

    Raises:
        InputError: The tokenizer cannot be loaded.
    """
    copy_files(checkpoint.folder, folder, TEXT_FILES)
    text = language_text(checkpoint.folder)
    write_json(folder / SETTINGS, asdict(text.settings))
    return text


def write_graphs(checkpoint: Checkpoint, folder: Path) -> str | None:
    """Writes the tokenizer of a checkpoint as the graphs that OpenVINO GenAI reads, where they say what the tokenizer says.

    Args:
        checkpoint: The checkpoint.
        folder: Holds what `write_text_files` wrote.

    Returns:
        None if they are there, or in one line why not.
    """
    files = [(folder / name).with_suffix(suffix) for name in (TOKENIZER, DETOKENIZER) for suffix in (".xml", ".bin")]
    try:
        with quiet():
            parts = convert_tokenizer(load_tokenizer(str(checkpoint.folder)), with_detokenizer=True)
        for part, name in zip(parts, (TOKENIZER, DETOKENIZER), strict=True):
            openvino.save_model(part, folder / name, compress_to_fp16=False)
        reason = next(_differences(folder), None)
    except Exception as error:  # the converter raises whatever stops it, where it does not know a step
        reason = f"openvino_tokenizers does not convert it ({one_line(error)})"
    if reason is not None:
        for file in files:
            file.unlink(missing_ok=True)
    return reason


def _differences(folder: Path) -> Iterator[str]:
    """Yields in one line what OpenVINO GenAI reads or writes otherwise than the tokenizer."""
    import openvino_genai

    converted, text = openvino_genai.Tokenizer(str(folder)), LanguageText.load(folder)
    for probe in PROBES:
        ids = text.encode(probe)
        if converted.encode(probe, add_special_tokens=True).input_ids.data.reshape(-1).tolist() != ids:
            yield f"the graph of openvino_tokenizers gives other ids for {json.dumps(probe)}"
        if converted.decode(ids) != text.decode(ids):
            yield f"the graph of openvino_tokenizers decodes the ids of {json.dumps(probe)} to another text"
    for messages in CHATS if text.has_template else ():
        try:
            expected = text.apply_chat_template(messages)
        except TemplateRefused:
            continue
        try:
            rendered = converted.apply_chat_template(list(messages), add_generation_prompt=True)
        except RuntimeError:
            rendered = None
        if rendered != expected:
            yield "OpenVINO GenAI renders the chat template to another prompt than Transformers"
