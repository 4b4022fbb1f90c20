"""Every step of `compress` on one tiny model: what works, and the reason that is given for what does not."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from export.parity.parity import ParityError
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.labels.next_token import labels_of
from foundation.labels.tasks import TASKS
from foundation.models.architecture.axes import size_of
from foundation.models.architecture.shapes import auto_class
from foundation.models.checkpoint import load, load_float
from foundation.models.config import ModelConfig, set_labels
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from foundation.models.inputs.images import image_settings, image_shape
from foundation.models.library import quiet, sizes_config, with_class
from foundation.models.size import count
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import LayerScales, weight_scale
from foundation.stage.context import Context
from foundation.standalone.preprocess import TokenPair
from tests.architectures.rebuilt import difference, part, tied
from tests.architectures.table import IMAGE, LENGTH, VOCABULARY, Architecture
from tests.told import Told

COLUMNS = ("plan", "rebuild", "finetune", "distil", "prune", "quantize", "qat", "export", "kernels")
"""The steps, in the order of the documentation."""
TARGET = Target(engines=("openvino",), batch_sizes=(1,), threads=1)
WORKS = "yes"
BLOCK = 12
"""Tokens of a block of text for generation."""


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of as many tokens as the models have embeddings."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]  # RoBERTa counts positions from its padding id, 1
    words = {word: i for i, word in enumerate([*specials, *(f"w{i}" for i in range(VOCABULARY - len(specials)))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 0))
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def split(architecture: Architecture, number: int, seed: int) -> Split:
    """Returns rows with random labels."""
    random, rows, row = np.random.default_rng(seed), [], TASKS[architecture.task]
    if row.encoder_decoder:
        pairs = [TokenPair(*(random.integers(4, VOCABULARY, length).astype(np.int32) for length in (7, 5))) for _ in range(number)]
        return Split(list(pairs), labels_of(pairs, BLOCK - 1))
    if row.generates:
        rows = [random.integers(0, VOCABULARY, BLOCK).astype(np.int32) for _ in range(number)]
        return Split(list(rows), labels_of(rows, BLOCK - 1))
    labels = ClassIds(random.integers(0, 2, number))
    if row.modality == "text":
        return Split([" ".join(f"w{i}" for i in random.integers(0, 50, random.integers(3, 12))) for _ in range(number)], labels)
    for _ in range(number):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (IMAGE, IMAGE, 3), dtype=np.uint8)).save(file, "PNG")
        rows.append(file.getvalue())
    return Split(list(rows), labels)


def drawn(architecture: Architecture) -> Any:
    """Returns a model with random weights, large enough to give logits of size, in evaluation mode."""
    from transformers import AutoConfig

    keys = dict(architecture.config)
    if TASKS[architecture.task].modality == "text":
        keys |= {"vocab_size": VOCABULARY, "cls_token_id": 0, "bos_token_id": 0, "pad_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
    config: Any = AutoConfig.for_model(keys.pop("model_type"), **keys)
    set_labels(config, architecture.task, ("a", "b"))
    torch.manual_seed(0)
    with quiet():
        model = auto_class(architecture.task, config).from_config(with_class(config, architecture.task)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data *= 3
    if TASKS[architecture.task].modality == "image":
        let_norms_see(model)
    return model


def let_norms_see(model: Any) -> None:
    """Lets the batch norms of an image model take the statistics of random images, as training does: else activations would explode."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = None  # the mean over all batches, here one
        norm.train()
    with torch.no_grad():
        model(pixel_values=torch.randn(16, *image_shape(model.config), generator=torch.Generator().manual_seed(0)))
    model.eval()


def trained(architecture: Architecture, folder: Path) -> Path:
    """Writes a checkpoint as Transformers does, with a tokenizer or the settings of an image processor; returns its folder."""
    model = drawn(architecture)
    model.save_pretrained(folder)
    if TASKS[architecture.task].modality == "text":
        write_tokenizer(folder)
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(image_settings(model.config)))
    return folder


@dataclass(frozen=True)
class Bench:
    """A tiny model, its data, and what it takes to run stages on it."""

    architecture: Architecture
    folder: Path
    context: Context
    float_model: Artifact

    @classmethod
    def of(cls, architecture: Architecture, folder: Path) -> Bench:
        """Draws a model with weights large enough to give logits of size, and imports it as a trained one.

        Raises:
            InputError: The model cannot be imported.
        """
        generates = TASKS[architecture.task].generates
        data = Data(*(split(architecture, number, seed) for seed, number in enumerate((24, 8, 16))), () if generates else ("a", "b"))
        context = Context(architecture.task, data, BLOCK if generates else LENGTH, TARGET, 0, Told(), folder / "scratch")
        context.scratch.mkdir()
        imported = folder / "float"
        imported.mkdir()
        import_model(ModelConfig(path=str(trained(architecture, folder / "trained")), task=architecture.task), data.labels, 0, imported)
        artifact = Artifact(imported, {"id": "baseline", "stage": "model", "digest": "0" * 64})
        return cls(architecture, folder, replace(context, checkpoints={"baseline": artifact}, teachers=(artifact,)), artifact)

    def out(self, name: str) -> Path:
        """Returns a new folder."""
        return Path(tempfile.mkdtemp(prefix=name, dir=self.folder))

    def logits(self) -> torch.Tensor:
        """Returns the logits of some rows in a freshly loaded model."""
        from foundation.models.forward import forward

        model, prepared = load(self.float_model.path), self.context.preprocessor(self.float_model.path)
        _, features = next(iter(prepared.batches(self.context.data.selection.rows, 4)))
        with torch.inference_mode():
            return forward(model, {name: torch.from_numpy(value) for name, value in features.items()})

    def run(self, stage: Any, artifact: Artifact | None = None) -> Artifact:
        """Checks and runs a stage; returns what it wrote, which loads and answers."""
        artifact, out = artifact or self.float_model, self.out(stage.NAME)
        config: Any = load(artifact.path).config
        stage.check(config, config, self.context)
        stage.run(artifact, self.context, out)
        load(out)
        return Artifact(out, {"id": stage.NAME, "digest": "1" * 64})


def count_it(bench: Bench) -> None:
    """Counts parameters and MACs."""
    counted = count(load(bench.float_model.path).config, bench.architecture.task, 8)
    assert counted.macs > 0


def rebuild(bench: Bench) -> str:
    """Builds the model again from its config, with weights tied as the config says and, where there are tied ones, apart.

    Raises:
        InputError: It is not its source.
    """
    forms = [drawn(bench.architecture), drawn(bench.architecture)]
    if not tied(forms[0]):
        return _same(bench, forms[0])
    part(forms[1])
    for form in forms:
        _same(bench, form)
    return "tied and apart"


def _same(bench: Bench, model: Any) -> str:
    found = difference(bench.architecture, model, bench.out("rebuilt"))
    if found is not None:
        raise InputError("rebuilt", found)
    return WORKS


def finetune(bench: Bench) -> None:
    """Trains for one step."""
    from foundation.training.finetune import Finetune

    bench.run(Finetune(epochs=1, batch_size=24))


def prune(bench: Bench) -> str:
    """Removes a part of the heads and neurons, or of the experts; only of those that can be pruned where the others cannot."""
    from prune.prune import Prune

    common = {"sparsity": 0.1, "multiple_of": 8, "rows": 16, "allocation": "uniform", "recover": None}
    if size_of(load(bench.float_model.path).config, "experts"):
        bench.run(Prune(granularity=("heads", "experts"), measure="parameters", **common))
        return "heads and experts"
    try:
        bench.run(Prune(**common))
    except InputError as error:
        for granularity in ("heads", "ffn"):
            with suppress(InputError):
                bench.run(Prune(granularity=(granularity,), **common))
                return {"heads": "heads", "ffn": "neurons"}[granularity]
        raise error from None
    return WORKS


def distil(bench: Bench) -> None:
    """Trains a student of fewer layers for one step."""
    from distill.distill import Distill

    depth = getattr(sizes_config(load(bench.float_model.path).config), "num_hidden_layers", None)
    bench.run(Distill(student={"layers": (depth or 3) - 1}, loss="soft_target", epochs=1, batch_size=24))


def quantize(bench: Bench) -> Artifact:
    """Quantizes to int8 after training."""
    from quantize.quantize import Quantize

    return bench.run(Quantize(mode="ptq", calibration={"rows": 16}, weight_bits=7))


def qat(bench: Bench) -> None:
    """Trains for one step in int8."""
    from quantize.quantize import Quantize

    bench.run(Quantize(mode="qat", calibration={"rows": 16}, qat={"batch_size": 24}, weight_bits=7))


def export(bench: Bench) -> None:
    """Builds OpenVINO's engine of the int8 model, which has to agree with torch."""
    from export.export import Export

    quantized = quantize(bench)
    context = replace(bench.context, checkpoints={"quantize": quantized})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.builds.planned", lambda given, variants, draft: [_build(quantized)])
        Export(float_precision="fp32").run(quantized, context, bench.out("export"))


def kernels(bench: Bench) -> None:
    """Finds the parts that the fused kernels run, and proves them; every linear layer but the head of a language model is int8."""
    from export.fused.decoder.parts import decoder_plan
    from export.fused.parts import plan_of

    folder, facts = bench.out("kernels"), TASKS[bench.architecture.task]
    shutil.copytree(bench.float_model.path, folder, dirs_exist_ok=True)
    model: Any = load_float(folder)
    head = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head}
    scales = {name: LayerScales(weight_scale(layer.weight.detach(), 127), torch.tensor(0.1), 8) for name, layer in layers.items()}
    save_quantization(folder, scales, {})
    (decoder_plan if facts.generates and not facts.encoder_decoder else plan_of)(Checkpoint(folder))


def _build(quantized: Artifact) -> Any:
    from export.builds import Build

    return Build("quantize", Checkpoint(quantized.path), "int8", "quantize")


CALLS: Mapping[str, Callable[[Bench], Any]] = {
    "plan": count_it,
    "rebuild": rebuild,
    "finetune": finetune,
    "prune": prune,
    "distil": distil,
    "quantize": quantize,
    "qat": qat,
    "export": export,
    "kernels": kernels,
}


def tried(architecture: Architecture, folder: Path, steps: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """Returns for each step that it works, or the reason given."""
    try:
        bench = Bench.of(architecture, folder)
    except InputError as error:
        return {"import": _reason(error, folder)}
    found = {"import": WORKS}
    for step in steps:
        try:
            answer = CALLS[step](bench)
            found[step] = answer if isinstance(answer, str) else WORKS
        except InputError as error:
            found[step] = _reason(error, folder)
        except ParityError as error:
            found[step] = str(error)
    return found


def _reason(error: InputError, folder: Path) -> str:
    """Returns the message of an error without the folders of this machine."""
    return "; ".join(error.lines).replace(f"{folder}/", "")
