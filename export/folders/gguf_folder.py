"""A folder with one file of GGUF, which llama.cpp, Ollama and LM Studio load (`export.gguf`).

    model-F16.gguf, -Q8_0, -Q4_0, -Q4_1, -Q4_K     weights, tokenizer and chat template; named by its format

The float part of a quantized model is F16. The card says which matrices hold the run's integers and which were rounded again.
"""

from __future__ import annotations

from pathlib import Path

from export.folders.source import PLACE, Snippet, Source, Written
from foundation.core.errors import InputError


def write(source: Source, out: Path) -> Written:
    """Fills a folder.

    Args:
        source: The variant.
        out: An existing empty folder.

    Raises:
        InputError: The package `gguf` is missing, or llama.cpp has no such model or tokenizer.
    """
    from export.gguf.write import write_gguf

    try:
        made = write_gguf(source.checkpoint, out / "model.gguf", name=source.variant)
    except InputError as error:
        raise InputError.of(problem.within(f"--variant {source.variant}") for problem in error.problems) from error
    file = made.file.rename(out / f"model-{made.kind}.gguf").name
    return Written(None, snippets(f"{PLACE}/{file}", source.facts.embeds_texts), made.remarks, library="gguf")


def snippets(file: str, embeds: bool) -> tuple[Snippet, ...]:
    """Returns the lines that load a file."""
    if embeds:
        lines = f'model = Llama("{file}", embedding=True)\nvector = model.embed("A text to read.", normalize=True)'
        shell = f'llama-embedding -m {file} -p "A text to read."'
    else:
        lines = f'model = Llama("{file}")\nanswer = model("Once upon a time", max_tokens=32)["choices"][0]["text"]'
        shell = f'llama-cli -m {file} -p "Once upon a time" -n 32'
    return (Snippet("llama-cpp-python", f"from llama_cpp import Llama\n\n{lines}"), Snippet("llama.cpp", shell, "sh"))
