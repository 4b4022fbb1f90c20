"""ONNX Runtime on tiny decoders: its tokens are those of Transformers, its integers those of the checkpoint, its texts come and go."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from export.engines.onnxruntime_decoder import MODE, MODEL, ROWS, OnnxRuntimeDecoder, properties, refusal
from export.engines.spec import EngineSpec
from export.generation.decoder_parts import parts_of
from export.generation.fused_folder import reads_of, write_fused_folder
from export.generation.fused_graph import fused_graph, save_fused
from export.generation.on_grids import on_grids
from export.parity.own_rounding import rounding_blocks
from export.stored_weights import integer_weights
from foundation.artifacts.graph import Graph
from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.schemes.int4_by_int8 import in_blocks
from foundation.schemes.tables import row_scale
from foundation.standalone import onnx_decoder
from foundation.standalone.onnx_decoder import PART, Texts, together
from tests.export.engines.test_openvino_genai import PENALTY, TOKENS, in_transformers
from tests.export.generation.genai_checkpoints import checkpoint, prompts
from tests.export.generation.test_codes import OFFSETS, ZERO_POINTS
from tests.export.generation.tiny_decoders import CONFIGS, GROUPED, VOCABULARY, decoder
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KINDS = ("llama", "mistral", "qwen2", "qwen3")
SCHEMES = ("w8a8-dynamic", "w4a16", ZERO_POINTS, "w4a8-block")
PRECISION = {None: "fp32", "w8a8-dynamic": "int8-dynamic", "w4a16": "w4a16", ZERO_POINTS: "w4a16", "w4a8-block": "w4a8-block"}
ROUNDING = ("w8a8-dynamic", "w4a8-block")
OTHERS = {
    "gpt2": "GPT2Model has no layers",
    "gpt_neox": "GPTNeoXLayer has no self_attn",
    "opt": "OPTModel has no layers",
    "bloom": "BloomModel has no layers",
    "gemma2": "Gemma2RMSNorm has no variance_epsilon",
    "gemma3": "Gemma3RotaryEmbedding",
    "phi3": "Phi3DecoderLayer has resid_attn_dropout",
    "falcon": "FalconModel has no layers",
    "olmo2": "Olmo2DecoderLayer has no input_layernorm",
    "mixtral": "MixtralSparseMoeBlock has experts",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock has experts",
}
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-fused-")


@cache
def folder(kind: str, scheme: str | None = None) -> Path:
    path = Path(_SCRATCH.name, f"{kind}-{scheme}")
    write_fused_folder(Checkpoint(checkpoint(kind, scheme)), path)
    return path


def spec(kind: str, scheme: str | None = None) -> EngineSpec:
    path = folder(kind, scheme)
    return EngineSpec("onnxruntime_decoder", MODE, PRECISION[scheme], "fp32", "cpu", 1, str(path / MODEL), str(path), (1,), properties(1))


@cache
def engine(kind: str, scheme: str | None = None) -> OnnxRuntimeDecoder:
    return OnnxRuntimeDecoder(spec(kind, scheme))


def test_every_decoder_is_written_or_refused() -> None:
    assert {*KINDS, *OTHERS} == set(CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    decoding = Decoding(max_tokens=TOKENS, repetition_penalty=PENALTY, ignore_end=True)
    for asked in (prompts((9,)), prompts((1, 12, 20, 33), seed=1)):
        answers = engine(kind).generate(asked, decoding)
        for prompt, answer in zip(asked, answers, strict=True):
            assert [list(one) for one in answer.tokens] == in_transformers(kind, prompt)
            assert len(set(answer.tokens[0])) > 3  # or equality would prove little
            assert list(answer.seconds) == sorted(answer.seconds)


@pytest.mark.parametrize("beams", [2, 5])
def test_beams_are_those_of_transformers(beams: int) -> None:
    decoding = Decoding(max_tokens=12, beams=beams, answers=beams, repetition_penalty=1.5, length_penalty=0.7, ignore_end=True)
    for prompt in prompts((1, 6, 17), seed=2):
        (answer,) = engine("llama").generate([prompt], decoding)
        expected = in_transformers(
            "llama",
            prompt,
            max_new_tokens=12,
            num_beams=beams,
            num_return_sequences=beams,
            repetition_penalty=1.5,
            length_penalty=0.7,
        )
        assert [list(one) for one in answer.tokens] == expected


@pytest.mark.parametrize(("kind", "why"), OTHERS.items())
def test_models_with_other_layers_are_refused_by_what_is_different(kind: str, why: str) -> None:
    with pytest.raises(InputError, match=f"its {CONFIGS[kind]().model_type} layers .*Llama.*{why}"):
        parts_of(decoder(kind))


def test_heads_of_another_size_are_refused_and_of_another_number_taken() -> None:
    with pytest.raises(InputError, match=r"heads have 8 numbers, .* multiples of 16"):
        parts_of(LlamaForCausalLM(LlamaConfig(**{**GROUPED, "num_attention_heads": 8})).eval())
    model: Any = decoder("llama")
    attention = model.model.layers[1].self_attn  # of which two heads of four are left, and one of two for keys and values
    for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        cut_rows(getattr(attention, name), size)
    attention.o_proj.weight.data = attention.o_proj.weight.data[:, :32].clone()
    parts = parts_of(model)
    assert [(layer.heads, layer.key_heads) for layer in parts.layers] == [(4, 2), (2, 1)]


def cut_rows(layer: Any, size: int) -> None:
    layer.weight.data, layer.out_features = layer.weight.data[:size].clone(), size


def test_a_model_with_the_same_modules_that_computes_otherwise_is_refused() -> None:
    model: Any = decoder("llama")
    # as Granite's residual_multiplier
    model.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: (1.1 * output[0], *output[1:]))
    with pytest.raises(InputError, match="has the modules of Llama and computes otherwise"):
        parts_of(model)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("kind", seldom(KINDS, ("mistral", "qwen2")))  # windows and biases: their tokens are asked for above
def test_logits_are_those_of_torch_that_rounds_as_the_engine_does(kind: str, scheme: str | None) -> None:
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, 11))
    model: Any = load_float(checkpoint(kind, scheme))
    with torch.no_grad():
        if scheme not in ROUNDING:
            expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
        else:
            exact = model(input_ids=torch.from_numpy(ids)).logits.numpy()
            with rounding_blocks(model, Checkpoint(checkpoint(kind, scheme))):
                expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
            assert np.abs(exact - expected).max() > 1e-3 * np.abs(expected).max()  # the rounding is there
            np.testing.assert_array_equal(exact, model(input_ids=torch.from_numpy(ids)).logits.numpy())  # and gone again
    found = engine(kind, scheme).predict({"input_ids": ids})
    close = np.abs(found - expected).max(axis=(1, 2)) <= 1e-5 * np.abs(expected).max()
    assert close.sum() >= len(ids) - (scheme in ROUNDING), np.abs(found - expected).max()  # a row may lie on a boundary of codes


def texts_of(kind: str, scheme: str | None = None) -> Texts:
    return engine(kind, scheme)._decoder.texts()


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_texts_that_come_and_go_are_written_as_if_alone(data: Any) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    texts, alone = texts_of("mistral"), list[np.ndarray]()
    for _ in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["read", "step", "keep"])) if alone else "read"
        if action == "read":
            new = [random.integers(3, VOCABULARY, int(random.integers(1, 40))) for _ in range(data.draw(st.integers(1, 4)))]
            found, rows = texts.read(new), range(len(alone), len(alone) + len(new))
            alone += new
        elif action == "step":
            count = data.draw(st.integers(1, len(alone)))
            tokens = random.integers(3, VOCABULARY, count)
            found, rows = texts.step(tokens), range(count)
            alone[:count] = [np.append(text, token) for text, token in zip(alone, tokens, strict=False)]
        else:
            order = data.draw(st.lists(st.integers(0, len(alone) - 1), min_size=1, max_size=5))
            texts.keep(order)
            alone = [alone[source] for source in order]
            continue
        for row, logits in zip(rows, found, strict=True):
            expected = texts_of("mistral").forward(alone[row][None])[0, -1]
            np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    assert texts.lengths == [len(text) for text in alone]


def test_a_prompt_that_is_longer_than_a_part_and_than_the_first_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_decoder, "PART", 16)
    monkeypatch.setattr(onnx_decoder, "ROOM", 16)
    (prompt,) = prompts((9,))
    reference: Any = load_float(checkpoint("llama"))
    texts = texts_of("llama")
    logits = texts.read([prompt])
    for token in range(30):  # past twice the first room
        with torch.no_grad():
            expected = reference(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[0], expected, atol=1e-4 * np.abs(expected).max())
        prompt = np.append(prompt, np.int32(3 + token))
        logits = texts.step(prompt[-1:].astype(np.int64))
    long = np.resize(prompt, 2 * 16 + 7)
    parts = texts_of("llama").read([long])
    np.testing.assert_allclose(parts[0], texts_of("llama").forward(long[None].astype(np.int64))[0, -1], atol=1e-4 * np.abs(parts).max())


@given(st.lists(st.integers(1, 2 * PART), min_size=1, max_size=12))
def test_prompts_are_read_together_in_order_and_within_a_part(lengths: list[int]) -> None:
    groups = list(together([np.full(length, number) for number, length in enumerate(lengths)]))
    assert [int(one[0]) for group in groups for one in group] == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(map(len, group)) <= PART


def test_more_prompts_than_run_at_once_are_answered_in_order() -> None:
    asked = prompts(tuple(1 + number % 7 for number in range(ROWS + 9)))
    heard: dict[int, list[int]] = {}
    decoding = Decoding(max_tokens=3, ignore_end=True)
    answers = engine("llama").generate(asked, decoding, lambda number, tokens: heard.setdefault(number, []).extend(tokens))
    assert [tuple(heard[number]) for number in range(len(asked))] == [answer.tokens[0] for answer in answers]
    assert answers[-1].tokens == engine("llama").generate(asked[-1:], decoding)[0].tokens


def test_an_end_token_a_stop_token_and_the_seed_of_a_sample() -> None:
    (prompt,) = prompts((9,))
    (free,) = engine("llama").generate([prompt], Decoding(max_tokens=20, ignore_end=True, repetition_penalty=PENALTY))
    stop = free.tokens[0][4]
    (stopped,) = engine("llama").generate(
        [prompt], Decoding(max_tokens=20, ignore_end=True, repetition_penalty=PENALTY, stop_tokens=(stop,))
    )
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(stop) + 1]
    sampled = [engine("llama").generate([prompt], Decoding(max_tokens=20, temperature=2.0, seed=seed))[0].tokens for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [(None, "fp32"), ("w8a8-dynamic", "int8"), ("w4a16", "w4a16"), (ZERO_POINTS, "w4a16"), ("w4a8-block", "w4a8")],
)
def test_precisions_are_read_off_the_graph_that_the_session_optimized(scheme: str | None, expected: str) -> None:
    layer = "model.layers.1"
    names = [f"{layer}.self_attn.{one}_proj/MatMul" for one in "qkvo"] + [
        f"{layer}.mlp.{one}_proj/MatMul" for one in ("gate", "up", "down")
    ]
    told = engine("llama", scheme).precisions(
        [*names, f"{layer}.self_attn/qk", f"{layer}.self_attn/pv", "lm_head/MatMul", "other/MatMul"], 1, 8
    )
    assert told == {
        **dict.fromkeys(names, expected),
        f"{layer}.self_attn/qk": "fp32",
        f"{layer}.self_attn/pv": "fp32",
        "lm_head/MatMul": "fp32",
    }


@pytest.mark.parametrize(("scheme", "halves", "size"), [(None, 2, 32), ("w4a16", 2, 32), ("w4a8-block", 1, 64)])
def test_int8_tables_are_stored_once_and_read_as_torch_does(scheme: str | None, halves: int, size: int, tmp_path: Path) -> None:
    found = on_grids(Checkpoint(checkpoint("llama", scheme)))
    model: Any = found.model
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    name, table = "model.embed_tokens", model.model.embed_tokens.weight
    scale_V = row_scale(table.detach())
    table.data = (table.data / scale_V[:, None]).round().clamp(-127, 127) * scale_V[:, None]
    graph = fused_graph(replace(found, tables={name: scale_V}))
    save_fused(graph, tmp_path / MODEL)
    codes = [one for one in graph.graph.initializer if list(one.dims) == [VOCABULARY, 1, size]]
    assert len(codes) == halves  # embeddings and head read the same ones
    shutil.copyfile(folder("llama") / "generation_config.json", tmp_path / "generation_config.json")
    opened = OnnxRuntimeDecoder(replace(spec("llama"), path=str(tmp_path / MODEL)))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9))
    rounds = scheme in ROUNDING
    if rounds:
        model.lm_head.register_forward_pre_hook(lambda module, inputs: (in_blocks(inputs[0], 64),))
    with torch.no_grad(), rounding_blocks(model, Checkpoint(checkpoint("llama", scheme))) if rounds else nullcontext():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(opened.predict({"input_ids": ids}), expected, atol=1e-5 * np.abs(expected).max())
    told = opened.precisions(["lm_head/MatMul"], 1, 8)
    assert told == {"lm_head/MatMul": "int8" if rounds else "w8a16"}
    reads = {one: what for one, what in opened.reported().items() if one.startswith("products")}
    assert all(what.endswith("inputs in int8" if rounds else "inputs in float32") for what in reads.values())
    assert len(reads) == (1 if scheme is None else 2)
    assert opened.reported()["keys and values"] == "fp32"


def test_what_files_hold_and_a_token_reads() -> None:
    shares = {scheme: integer_weights([folder("llama", scheme) / MODEL]) for scheme in (None, "w8a8-dynamic", "w4a16")}
    blocks = sum(parameter.numel() for name, parameter in decoder("llama").named_parameters() if "proj" in name)
    whole = blocks + 2 * VOCABULARY * 64
    assert shares == {None: 0, "w8a8-dynamic": pytest.approx(blocks / whole), "w4a16": pytest.approx(blocks / whole)}
    read = reads_of(Graph(folder("llama") / MODEL))
    assert read == {"weight_bytes": 4 * (blocks + VOCABULARY * 64), "cache_bytes_per_token": 4 * 2 * 2 * 2 * 16}
    assert reads_of(Graph(folder("llama", "w4a16") / MODEL))["weight_bytes"] < read["weight_bytes"] / 2


def test_an_answer_ends_with_the_context_and_a_longer_prompt_is_refused() -> None:
    (answer,) = engine("llama").generate(prompts((250,)), Decoding(max_tokens=50, ignore_end=True))
    assert len(answer.tokens[0]) == 6  # of 256
    with pytest.raises(InputError, match="256 tokens given; the model reads 256 with its answer"):
        engine("llama").generate(prompts((256,)), Decoding())


def test_static_int8_int8_weights_and_fp8_are_refused() -> None:
    assert refusal("w4a8-block", Path()) is refusal("fp32", Path()) is refusal("w4a16", Path()) is refusal("int8-dynamic", Path()) is None
    for precision in ("int8", "w8a16"):
        assert "w8a8-dynamic, w4a8-block or w4a16" in str(refusal(precision, Path()))
    assert "FP8" in str(refusal("fp8", Path()))
    with pytest.raises(InputError, match="w8a8 given"):
        fused_graph(on_grids(Checkpoint(checkpoint("llama", "w8a8"))))
    with pytest.raises(InputError, match="real offsets"):
        fused_graph(on_grids(Checkpoint(checkpoint("llama", OFFSETS))))


def test_where_it_runs() -> None:
    assert engine("llama").placement() == {"device": "cpu", "provider": "CPUExecutionProvider", "float_precision": "fp32"}


def test_layers_that_read_the_same_are_one_product_if_their_weights_have_one_format(tmp_path: Path) -> None:
    together = on_grids(Checkpoint(checkpoint("llama", "w4a16")))
    up = "model.layers.0.mlp.up_proj"
    apart = replace(together, layers={name: scales for name, scales in together.layers.items() if name != up})
    logits, products = [], []
    for number, model in enumerate((together, apart)):
        graph = fused_graph(model)
        products.append({node.name for node in graph.graph.node if "MatMul" in node.op_type and ".0.mlp." in node.name})
        save_fused(graph, tmp_path / f"{number}.onnx")
        texts = onnx_decoder.OnnxDecoder(tmp_path / f"{number}.onnx", properties(1)).texts()
        logits.append(np.concatenate([texts.read(list(prompts((7, 4)))), texts.step(np.array([3, 5]))]))
    gate, down = up.replace("up_", "gate_"), up.replace("up_", "down_")
    assert products == [{f"{gate}+{up}", down}, {gate, up, down}]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)
