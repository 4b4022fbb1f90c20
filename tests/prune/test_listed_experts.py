"""Pruned experts of Switch Transformers and NLLB-MoE, which are modules: python -m pytest tests/prune/test_listed_experts.py"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from export.engines.openvino_genai import properties
from export.engines.openvino_seq2seq import OpenVinoSeq2Seq
from export.engines.spec import EngineSpec
from export.generation.encoder_decoder_folder import write_encoder_decoder_folder
from export.generation.on_grids import on_grids
from export.graph.onnx import export_float
from foundation.artifacts.artifact import Artifact
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, load_float, save
from foundation.models.folder import Checkpoint
from foundation.models.inputs.padding import read_by_decoder
from foundation.models.layers.listed_experts import gates_of, is_listed
from foundation.standalone.encoder_decoder import DECODER
from foundation.training.train import Batch
from prune.cost import ShapeCost
from prune.gates import gated
from prune.hook_points import HookPoints
from prune.prune import Prune
from prune.routing import loads
from prune.scores import by_activation, by_magnitude
from prune.selection import Part
from prune.sensitivity import silenced
from prune.surgery import KeptUnits, shrink
from quantize.quantize import Quantize
from tests.export.generation import tiny_encoder_decoders
from tests.prune.test_encoder_decoder import features
from tests.quantize.test_listed_mixtures import KINDS

pytestmark = pytest.mark.whole

KEY, EXPERTS = "stages.prune", 6
ROUTERS = {"switch": "SwitchTransformersTop1Router", "nllb": "NllbMoeTop2Router"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a mixture of six experts a layer, which have room for all tokens."""
    name = f"few-{request.param}"

    def config() -> Any:
        made = KINDS[str(request.param)]()
        made.num_experts, made.expert_capacity = EXPERTS, 64
        if hasattr(made, "moe_eval_capacity_token_fraction"):
            made.moe_eval_capacity_token_fraction = 1.0
        return made

    monkeypatch.setitem(tiny_encoder_decoders.CONFIGS, name, config)
    return name


def model_of(kind: str) -> Any:
    return load_float(tiny_encoder_decoders.checkpoint(kind))


def batch() -> Batch:
    return Batch(features(), torch.zeros(0), np.arange(3), 0, 1)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**features()).logits
        return found


def kept_of(structure: Structure, uneven: bool) -> KeptUnits:
    """Keeps four experts of each layer, or four of the first such layer and three of the others."""
    sparse = [block for block, number in enumerate(structure.sizes.experts) if number]
    chosen = {block: [0, 2, 5] if uneven and block != sparse[0] else [1, 2, 4, 5] for block in sparse}
    experts = tuple(chosen.get(block, ()) for block in range(structure.depth))
    return dataclasses.replace(KeptUnits.everything(structure.sizes), experts=experts)


def without(model: Any, structure: Structure, kept: KeptUnits) -> Any:
    """Written out: routers that give experts that are gone the logit of minus infinity."""
    for block, name in enumerate(structure.blocks):
        for router in model.get_submodule(name).modules():
            if type(router).__name__ in ROUTERS.values():
                gone = torch.tensor([number not in kept.experts[block] for number in range(EXPERTS)])
                router.classifier.register_forward_hook(lambda _, __, found, gone=gone: found.masked_fill(gone, -1e9))
    return model


@pytest.mark.parametrize("uneven", [False, True])
def test_the_small_model_is_the_large_one_whose_routers_never_choose_the_others(kind: str, uneven: bool, tmp_path: Path) -> None:
    model = model_of(kind)
    before, structure = logits(model), Structure.of(model, KEY)
    kept = kept_of(structure, uneven)
    small: Any = shrink(model, structure, kept, KEY)
    expected = logits(without(model, structure, kept))
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(small), expected, rtol=1e-4, atol=1e-5)
    assert Structure.of(small, KEY).sizes.same(kept.sizes(structure.sizes))
    assert hasattr(small.config, "compress_architecture") == uneven
    save(small, tiny_encoder_decoders.checkpoint(kind), tmp_path, "Cut")
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=1e-4, atol=1e-5)
    places = [module for module in small.modules() if is_listed(module)]
    assert [module.num_experts for module in places] == [len(of_block) for of_block in kept.experts if of_block]


def test_the_cost_of_a_layer_follows_its_experts(kind: str) -> None:
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    cost, kept = ShapeCost.of(model, structure, "parameters"), kept_of(structure, True)
    small = shrink(model, structure, kept, KEY)
    assert cost.total(kept.sizes(structure.sizes)) == ShapeCost.of(small, Structure.of(small, KEY), "parameters").total()
    owned = {name for block in structure.blocks for name in model.state_dict() if name.startswith(f"{block}.")}
    assert cost.total() == sum(model.state_dict()[name].numel() for name in owned)
    assert cost.experts_per_token == (1 if "switch" in kind else 2)


def read_by(model: Any, structure: Structure) -> dict[int, tuple[Any, Tensor, Tensor]]:
    """The experts of each block, the states that they read, and the router's weights, of the tokens of the batch without padding."""
    seen: dict[int, tuple[Any, Tensor, Tensor]] = {}
    handles = []
    for block, name in enumerate(structure.blocks):
        for module in filter(is_listed, model.get_submodule(name).modules()):

            def hook(module: nn.Module, args: tuple[Tensor, ...], block: int = block) -> None:
                seen[block] = module, args[0], gates_of(module, *args[1:])

            handles.append(module.register_forward_pre_hook(hook))
    logits(model)
    for handle in handles:
        handle.remove()
    given = features()
    masks = [given["attention_mask"].bool().flatten(), (given["decoder_input_ids"] != tiny_encoder_decoders.PAD).flatten()]
    masks[1].view(3, -1)[:, 0] = True  # the token that a decoder starts with is the padding of T5
    found = {}
    for block, (module, states_ND, gates_NE) in seen.items():
        real_N = masks[structure.stack_of(structure.blocks[block])]
        found[block] = module, states_ND[real_N], gates_NE[real_N]
    return found


def test_loads_and_activations_are_those_of_the_routers_choices(kind: str) -> None:
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    read = read_by(model, structure)
    assert len(read) >= 2
    found, scores = loads(model, structure, [batch()]), by_activation(model, structure, lambda: iter([batch()])).components
    for block, (module, states_ND, gates_NE) in read.items():
        chosen_NE = gates_NE != 0
        assert chosen_NE.sum(dim=1).max() == (1 if "switch" in kind else 2)
        np.testing.assert_allclose(found[block], chosen_NE.sum(dim=0) / chosen_NE.sum(), atol=1e-6)
        experts = [module.get_submodule(f"expert_{number}") for number in range(EXPERTS)]
        squares = [float((expert(states_ND) * gates_NE[:, [number]]).square().sum()) for number, expert in enumerate(experts)]
        expected = torch.tensor(squares).sqrt()
        torch.testing.assert_close(scores[block, "experts"] / scores[block, "experts"].mean(), expected / expected.mean())


def test_the_magnitude_of_an_expert_is_that_of_all_its_weights(kind: str) -> None:
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    block, (module, _, _) = next(iter(read_by(model, structure).items()))
    for parameter in module.get_submodule("expert_3").parameters():
        parameter.data.zero_()
    score_E = by_magnitude(model, structure).components[block, "experts"]
    assert int(score_E.argmin()) == 3


def test_gates_are_the_derivative_by_each_expert(kind: str) -> None:
    """Against a finite difference: the router's weights of one expert times 1 + h."""
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    one = {name: value[:1] for name, value in features().items()}

    def loss() -> Tensor:
        found: Tensor = model(**one).logits.log_softmax(dim=-1)[..., 3].sum()
        return found

    with gated(model, structure, hidden=False) as start:
        gates = start(1)
        found = gates.gradients(loss()[None])
    for block, (module, _, gates_NE) in read_by(model, structure).items():
        number = int(gates_NE.abs().sum(dim=0).argmax())
        expert, step = module.get_submodule(f"expert_{number}"), 1e-3
        measured = []
        for factor in (1 + step, 1 - step):
            handle = expert.register_forward_hook(lambda _, __, out, factor=factor: out * factor)
            with torch.no_grad():
                measured.append(float(loss()))
            handle.remove()
        expected = (measured[0] - measured[1]) / (2 * step)
        assert float(found[block, "experts"][0, number]) == pytest.approx(expected, rel=0.02, abs=2e-2)


def test_experts_are_silent_while_the_loss_without_them_is_measured(kind: str) -> None:
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    block, (module, _, gates_NE) = next(iter(read_by(model, structure).items()))
    gone = int((gates_NE != 0).sum(dim=0).argmax())
    kept = [number for number in range(EXPERTS) if number != gone]
    before, part = logits(model), Part(block, "experts", EXPERTS, 1.0, EXPERTS)
    with silenced(model, structure, HookPoints.of(model, structure), part, kept):
        found = logits(model)
    module.get_submodule(f"expert_{gone}").register_forward_hook(lambda _, __, out: 0 * out)
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-5)
    assert (found - before).abs().max() > 1e-3


def cut(kind: str, out: Path) -> Path:
    """Writes a checkpoint whose layers keep different numbers of experts."""
    model = model_of(kind)
    structure = Structure.of(model, KEY)
    out.mkdir()
    save(shrink(model, structure, kept_of(structure, True), KEY), tiny_encoder_decoders.checkpoint(kind), out, "Cut")
    tiny_encoder_decoders.preprocessor().save(out)
    return out


@pytest.mark.slow
def test_the_graph_computes_the_pruned_model(kind: str, tmp_path: Path) -> None:
    folder, given = cut(kind, tmp_path / "cut"), features()
    graph = export_float(Checkpoint(folder), tiny_encoder_decoders.preprocessor(), tmp_path / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    found = session.run(None, {node.name: given[node.name].numpy() for node in session.get_inputs()})[0]
    expected = logits(load(folder)).numpy()
    assert np.abs(expected - logits(model_of(kind)).numpy()).max() > 1e-2
    real = read_by_decoder(given["decoder_input_ids"], tiny_encoder_decoders.PAD).numpy()
    assert np.abs(found - expected)[real].max() / np.abs(expected).max() < 5e-5  # the rounding of large weights in another order


@pytest.mark.slow
def test_the_engine_computes_the_pruned_and_quantized_model(kind: str, tmp_path: Path) -> None:
    folder, out, files = cut(kind, tmp_path / "cut"), tmp_path / "out", tmp_path / "files"
    out.mkdir()
    context = tiny_encoder_decoders.context(kind, tmp_path)
    Quantize(calibration={"rows": 8}).run(Artifact(folder, {"id": "prune", "digest": "1" * 64}), context, out)
    tiny_encoder_decoders.preprocessor().save(out)
    write_encoder_decoder_folder(on_grids(Checkpoint(out)), files, {})
    options = {**properties(1, "fp32", "fp32"), "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    spec = EngineSpec("openvino_seq2seq", "stateful", "int8", "fp32", "cpu", 1, str(files / DECODER), str(out), (1,), options)
    given = dict(features())
    begun = given["decoder_input_ids"].clone()
    begun[:, 0] = 2  # no padding: NLLB-MoE gives padding no position, and with a cache counts it as one
    given["decoder_input_ids"] = begun
    found = OpenVinoSeq2Seq(spec).predict({name: value.numpy() for name, value in given.items()})
    with torch.inference_mode():
        expected = load(out)(**given).logits.numpy()
    real = read_by_decoder(begun, tiny_encoder_decoders.PAD).numpy()
    np.testing.assert_allclose(found[real], expected[real], atol=5e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "activation", "taylor"])
def test_the_stage_cuts_a_third_of_them(kind: str, method: str, tmp_path: Path) -> None:
    context = tiny_encoder_decoders.context(kind, tmp_path)
    stage = Prune(granularity=("experts",), sparsity=0.2, measure="parameters", method=method, rows=6, recover=None)
    source = Artifact(tiny_encoder_decoders.checkpoint(kind), {"id": "baseline", "stage": "model"})
    config = Checkpoint(source.path).config
    stage.check(config, config, context)
    (tmp_path / "out").mkdir()
    figures: Any = stage.run(source, context, tmp_path / "out")
    assert figures["cost"]["after"] < 0.81 * figures["cost"]["before"]
    left = [len(of_block) for of_block in figures["loads"]["after"] if of_block]
    assert left
    assert all(sum(of_block) == pytest.approx(1) for of_block in figures["loads"]["after"] if of_block)
    assert sum(left) < EXPERTS * len(left)
    assert torch.isfinite(logits(load(tmp_path / "out"))).all()
