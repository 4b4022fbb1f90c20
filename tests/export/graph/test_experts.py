"""Experts in a graph: every expert sees every token, and the answer is that of the chosen ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import openvino
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from export.graph.experts import all_experts, make_exportable
from export.graph.onnx import _tidy, _trace

pytestmark = pytest.mark.whole

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1, "intermediate_size": 12}


def mixture(experts: int = 4, chosen: int = 2) -> torch.nn.Module:
    torch.manual_seed(experts)
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=experts, num_experts_per_tok=chosen, vocab_size=40, pad_token_id=0, attn_implementation="eager"
    )
    model = transformers.MixtralForCausalLM(config).eval()
    model.config.use_cache = False
    return model


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 7))
def test_it_says_what_the_chosen_experts_say(experts: int, chosen: int, tokens: int) -> None:
    module = mixture(experts, min(chosen, experts)).model.layers[0].mlp.experts
    with torch.inference_mode():
        module.gate_up_proj.normal_()
        module.down_proj.normal_()
        states_ND = torch.randn(tokens, 24)
        chosen_Nk = torch.stack([torch.randperm(experts)[: min(chosen, experts)] for _ in range(tokens)])
        weights_Nk = torch.rand(chosen_Nk.shape)
        found = all_experts(module, states_ND, chosen_Nk, weights_Nk)
        for token in range(tokens):
            expected = torch.zeros(24)
            for expert, weight in zip(chosen_Nk[token].tolist(), weights_Nk[token].tolist(), strict=True):
                gate, up = (module.gate_up_proj[expert] @ states_ND[token]).chunk(2)
                expected += weight * (module.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-4)


class Wrapper(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=inputs[0]).logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    import onnx

    model, path, axes = mixture(), tmp_path_factory.mktemp("experts") / "model.onnx", ("batch", "sequence")
    plain = mixture()
    make_exportable(model)
    with torch.no_grad():
        graph = _trace(Wrapper(model).eval(), (torch.randint(1, 40, (2, 6)),), ["input_ids"], axes)
    onnx.save(_tidy(graph, axes, axes), path)
    return plain, path


@pytest.mark.first(1)
@pytest.mark.parametrize("shape", [(1, 5), (3, 8)])
def test_engines_answer_as_the_model_did_before(exported: tuple[torch.nn.Module, Path], shape: tuple[int, int]) -> None:
    model, path = exported
    ids = np.random.default_rng(0).integers(1, 40, shape)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    by_onnx = onnxruntime.InferenceSession(path).run(None, {"input_ids": ids})[0]
    by_openvino = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"input_ids": ids})[0]
    np.testing.assert_allclose(by_onnx, expected, atol=1e-5)
    np.testing.assert_allclose(by_openvino, expected, atol=1e-5)


def test_a_model_without_experts_stays_as_it_is() -> None:
    model = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8))
    before = model.config._experts_implementation
    make_exportable(model)
    assert model.config._experts_implementation == before
