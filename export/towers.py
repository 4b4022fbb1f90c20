"""The export of a model with two towers: a folder for each inside the build's, with a graph, an engine and what prepares its rows.

    <variant>-<precision>/
      preprocess.json  tokenizer.json                    of both
      image/  preprocess.json  model.onnx  engine files
      text/   preprocess.json  tokenizer.json  model.onnx  engine files

To everything else a build is one model that answers with vectors: `export.engines.towers` opens both engines behind one `predict`,
shares and layers are counted over both graphs, and an entry of export.json has the files of both under `towers`. Each tower has to agree
with torch by itself: texts are few, and would not be seen among the images.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from export.engines.registry import engine_module
from export.exporter import MODEL, PROBED_TOKENS, Exporter
from export.graph.quantized import write_graphs
from export.stored_weights import integer_weights
from foundation.artifacts import exported
from foundation.artifacts.artifact import write_json
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.core.engines import REFERENCE, EngineName
from foundation.labels.zero_shot import SIDES
from foundation.measure.engine_process import EngineProcess
from foundation.models.folder import Checkpoint
from foundation.models.heads.towers import tower_of
from foundation.schemes.checkpoint import QUANTIZATION_JSON, QUANTIZATION_TENSORS

if TYPE_CHECKING:
    from export.engines.module import WithTensors
    from export.parity.gate import Compared
    from export.parity.parity import LayerParity


class TowersExporter(Exporter):
    """The work on one build of a model with two towers."""

    tower = "image"
    """The tower that is being looked at."""

    def _onnx(self) -> Path:
        """Writes the graphs of both towers; returns the path of the first one's. fp16 and bf16 start from the fp32 graphs."""
        for name, prepared in self.preprocessor.towers.items():
            (self.folder / name).mkdir()
            prepared.save(self.folder / name)
            if not self.build.is_half:
                with tempfile.TemporaryDirectory(dir=self.folder, prefix="tower-") as folder:
                    view = checkpoint_of_tower(self.build.checkpoint, name, Path(folder))
                    write_graphs(view, prepared, self.files / name / MODEL, self.context.target.engines)
        return self._model("image")

    def _model(self, tower: str) -> Path:
        return self.files / tower / MODEL

    def _build(self, engine: EngineName, model: Path) -> Iterator[exported.Engine]:
        """Writes the files of one engine for both towers; yields an entry for each of its modes."""
        if engine == REFERENCE:
            yield from super()._build(engine, model)
            return
        refused = [name for name in SIDES if engine_module(engine).refusal(self.build.precision, self._model(name)) is not None]
        if refused:
            yield from super()._build(engine, self._model(refused[0]))
            return
        request = self._request(engine, model)
        built = [
            list(
                engine_module(engine).build(
                    replace(
                        request,
                        model=self._model(name),
                        folder=self.folder / name,
                        shared=self.files / name,
                        buckets=self.preprocessor.towers[name].buckets,
                    )
                )
            )
            for name in SIDES
        ]
        for entries in zip(*built, strict=True):
            yield self._joined(dict(zip(SIDES, entries, strict=True)))

    def _joined(self, entries: Mapping[str, exported.Engine]) -> exported.Engine:
        """Returns the entry of both towers from the entry of each."""
        first, second = entries.values()
        assert (first.mode, first.float_precision) == (second.mode, second.float_precision), entries
        assert first.size_bytes is not None, "its files were written"
        assert second.size_bytes is not None, "its files were written"
        files = {name: str(entry.file) for name, entry in entries.items()}
        return first.with_(
            towers=files,
            size_bytes=first.size_bytes + second.size_bytes,
            integer_weights=integer_weights([self.out / file for file in files.values()]),
        )

    def _share(self, process: EngineProcess, model: Path) -> exported.Shares:
        """Counts over both graphs, an image and a text of full length each."""
        from export.graph.macs import Gemm, count_macs
        from export.share import share

        batch, gemms, told = max(self.context.target.batch_sizes), list[Gemm](), dict[str, str]()
        for name, prepared in self.preprocessor.towers.items():
            sequence = max(prepared.buckets, default=None)
            own = count_macs(Graph(self._model(name)), batch, sequence)
            told |= process.ask("precisions", gemms=[gemm.node for gemm in own], batch=batch, sequence=sequence)["precisions"]
            gemms += own
        return share(gemms, told)

    def _layers(self, process: EngineProcess, model: Path, engine: str) -> list[LayerParity]:
        """Compares the layers of both graphs."""
        found: list[LayerParity] = []
        for name in SIDES:
            self.tower = name
            found += super()._layers(process, self._model(name), engine)
        return found

    def _probe(self, process: EngineProcess, entries: Sequence[WithTensors]) -> dict[str, Array]:
        """Returns the tensors of these layers and sites on some rows of the tower."""
        split = self.gate.split
        rows = [split.rows[index] for index in split.labels.of_tower(self.tower).tolist()]
        length = max(self.preprocessor.towers[self.tower].buckets, default=None)
        names = list(dict.fromkeys(name for entry in entries for name in entry.tensors))
        return process.probe(names, rows[: max(1, PROBED_TOKENS // length) if length else 1], length)

    def _compared(self, entry: exported.Engine, answers: Array) -> Compared:
        """Compares both towers with torch together, and each by itself."""
        from foundation.measure.agreement import compare_predictions, shortfall

        found, split = super()._compared(entry, answers), self.gate.split
        expected = self.gate.in_torch(self.build.checkpoint, "integers", len(answers))
        for name in SIDES:
            rows = split.labels.of_tower(name)
            own = compare_predictions(self.context.task, expected[rows], answers[rows], split.labels[rows])
            short = shortfall(own, f"torch ({name}s)") if entry.float_precision == "fp32" else None
            if short is not None and found.short is None and self._rounding(entry.engine) is None:
                found = replace(found, figures={**found.figures, "passed": False}, short=short)
        return found


def checkpoint_of_tower(checkpoint: Checkpoint, tower: str, out: Path) -> Checkpoint:
    """Writes a checkpoint whose quantized layers belong to one tower: links to its files, and its part of the scales.

    Args:
        checkpoint: The checkpoint, float or quantized.
        tower: image or text.
        out: Empty folder.

    Returns:
        The one in `out`.
    """
    for file in checkpoint.folder.iterdir():
        if file.name not in (QUANTIZATION_JSON, QUANTIZATION_TENSORS):
            (out / file.name).symlink_to(file.resolve())
    if checkpoint.is_quantized:
        document = json.loads((checkpoint.folder / QUANTIZATION_JSON).read_text(encoding="utf-8"))
        for key in ("layers", "float_layers"):
            document[key] = {name: value for name, value in document[key].items() if tower_of(name) == tower}
        for key in ("products", "residuals"):
            if key in document:
                document[key] = [name for name in document[key] if tower_of(name) == tower]
        write_json(out / QUANTIZATION_JSON, document)
        tensors = load_file(checkpoint.folder / QUANTIZATION_TENSORS)
        save_file({name: value for name, value in tensors.items() if tower_of(name) == tower}, out / QUANTIZATION_TENSORS)
    return Checkpoint(out)
