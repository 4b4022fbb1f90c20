"""What a folder for another program is written from, and what the writer says about it.

    Source    a variant: its checkpoint, and its builds in the export of the run
    Written   the engine whose figures hold for the folder, snippets that load it, and remarks

Settings (config, tokenizer, preprocessor) are copied as they are for weights, and fitted to the graph for graphs (`fit_to_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from export.settings_files import TOKENIZER
from foundation.artifacts import exported
from foundation.artifacts.artifact import read_json, write_json
from foundation.core.engines import ENGINES
from foundation.core.errors import InputError
from foundation.labels.facts import Facts
from foundation.labels.tasks import TASKS, Task
from foundation.models.folder import Checkpoint
from foundation.models.inputs.tokenizer_file import NEW_CLASS, OLD_CLASS
from foundation.models.own_shape import SHAPE_KEY, stock_type

CONFIG = "config.json"
PLACE = "path/to/this/folder"
"""Stands for the folder in snippets."""
TEXT, PICTURE, SOUND = '"A text to read."', "picture.png", "sound.wav"
"""What snippets let a model read."""
Language = Literal["python", "js", "sh"]


@dataclass(frozen=True)
class Source:
    """A variant of a run, from which a folder is written."""

    variant: str
    """Its id."""
    checkpoint: Checkpoint
    task: Task
    export: Path | None
    """Folder of the artifact of the stage `export`; None for a run without one."""
    builds: tuple[exported.Build, ...]
    """Its builds there, in order."""

    @property
    def facts(self) -> Facts:
        """The facts about the task."""
        return TASKS[self.task]

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json, as they are."""
        contents: dict[str, Any] = read_json(self.checkpoint.folder / CONFIG)
        return contents

    @property
    def has_own_shape(self) -> bool:
        """Whether layers differ in size, as pruning leaves them; no class of Transformers builds such a model."""
        return SHAPE_KEY in self.config

    def engine(self, ending: Literal[".onnx", ".xml"], key: str) -> Built:
        """Returns an engine that runs, in its recommended mode, from the first build that has it.

        Args:
            ending: Ending of the file that it opens.
            key: Start of the message.

        Raises:
            InputError: The run has no such engine for the variant.
        """
        answers = self.facts.generates
        names = [name for name, row in ENGINES.items() if row.published == ending and (row.generates is not None) == answers]
        for build in self.builds:
            for engine in build.engines:
                if engine.engine in names and engine.runnable and engine.file is not None:
                    assert self.export is not None, "its builds are there"
                    return Built(build, engine, self.export / engine.file)
        title = ENGINES[names[0]].title
        raise InputError(key, f"{title} runs no build of it in this run", remedy=f"name {names[0]} in target.engines, and run again")


@dataclass(frozen=True)
class Built:
    """A build, one of its engines, and the file that this engine opens."""

    build: exported.Build
    engine: exported.Engine
    file: Path

    @property
    def float_precision(self) -> str:
        """Precision of the layers that are not quantized."""
        return self.engine.float_precision or self.build.float_precision


@dataclass(frozen=True)
class Snippet:
    """Lines that load a folder."""

    title: str
    """The program."""
    code: str
    language: Language = "python"


@dataclass(frozen=True)
class Written:
    """What a folder holds, for its model card."""

    built: Built | None
    """The engine that the folder is for; None: weights that a program builds its model from."""
    snippets: tuple[Snippet, ...]
    """How to load it, the plainest way first."""
    remarks: tuple[str, ...] = ()
    """What a reader has to know, a sentence each."""
    as_torch: bool = False
    """Without an engine: whether the program computes what torch computed in the run, so that the run's figures of torch hold."""
    library: str = ""
    """`library_name` of the card, where it is not the format's."""


def fit_to_graph(source: Source, out: Path, inputs: Sequence[str]) -> None:
    """Changes settings in a folder, so that programs with Transformers 4 read them, and its tokenizer gives what a graph reads.

    The config gets a stock model type where the checkpoint has a shape of its own: the sizes are in the graph. The tokenizer gets a class
    that Transformers 4 knows, and the names of the graph's inputs: classes differ in whether they give `token_type_ids`.

    Args:
        source: The variant.
        out: A folder with its settings.
        inputs: Names of the inputs of the graph.
    """
    config = read_json(out / CONFIG)
    write_json(out / CONFIG, {key: value for key, value in stock_type(config).items() if key != SHAPE_KEY})
    if source.facts.modality == "text":
        file = out / TOKENIZER
        settings = read_json(file) if file.is_file() else {}
        kind = settings.get("tokenizer_class", NEW_CLASS)
        write_json(file, {**settings, "tokenizer_class": OLD_CLASS if kind == NEW_CLASS else kind, "model_input_names": [*inputs]})


def reading(facts: Facts, kind: Literal["np", "pt"]) -> tuple[str, str]:
    """Returns two pieces of a snippet: the lines that import, and the lines that make `features` of an input.

    Args:
        facts: The task.
        kind: Arrays of NumPy, for a graph whose inputs are `names`, or tensors of torch.
    """
    chosen = "\nfeatures = {name: features[name] for name in names}" if kind == "np" else ""  # not all that a tokenizer gives are inputs
    if facts.modality == "text":
        pair = ', text_pair=["Another one."]' if "text_pair" in facts.columns and facts.reranks else ""
        question = ', ["The text that holds the answer."]' if facts.finds_spans else ""
        first = '["Which text?"]' if facts.finds_spans else f"[{TEXT}]"
        lines = (
            f'tokenizer = AutoTokenizer.from_pretrained("{PLACE}")\nfeatures = tokenizer({first}{question}{pair}, return_tensors="{kind}")'
        )
        return "from transformers import AutoTokenizer", lines + chosen
    if facts.modality == "image":
        lines = f'processor = AutoImageProcessor.from_pretrained("{PLACE}")\n'
        lines += f'features = processor(images=Image.open("{PICTURE}"), return_tensors="{kind}")'
        return "from PIL import Image\nfrom transformers import AutoImageProcessor", lines + chosen
    lines = f'processor = AutoFeatureExtractor.from_pretrained("{PLACE}")\nsamples, rate = soundfile.read("{SOUND}", dtype="float32")\n'
    lines += f'features = processor(samples, sampling_rate=rate, return_tensors="{kind}")'
    return "import soundfile\nfrom transformers import AutoFeatureExtractor", lines + chosen
