"""Merged tokens: beside ToMe written out with loops, without loss where tokens are alike, and the same in an exported graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compress.pipeline import run
from compress.recipe import check
from export.graph.onnx import export_float
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.models.architecture.dropped_tokens import DENOMINATOR, staying
from foundation.models.architecture.merged_tokens import LEAST, Merged, merge
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.importing import import_model
from prune.prune import Prune
from prune.tokens.tokens import prove_merging, shares_of, with_merged_tokens, with_tokens
from tests import tiny_embedding
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole
KEY = "stages.prune"


def merged_by_loops(
    states_LD: Tensor, sizes: list[float], left: int, first_stays: bool
) -> tuple[list[Tensor], list[float], list[int | None]]:
    """Returns the tokens that are left of a row without padding, their sizes, and where each token went: None for one that was dropped."""
    even, odd = list(range(0, len(states_LD), 2)), list(range(1, len(states_LD), 2))
    unit = torch.nn.functional.normalize(states_LD.double(), dim=1)
    best = {a: max(((float(unit[a] @ unit[b]), -b) for b in odd), default=None) for a in even}
    order = sorted((a for a in even if best[a] is not None and (a or not first_stays)), key=lambda a: (-best[a][0], a))  # type: ignore[index]
    gone = {a: -best[a][1] for a in order[: len(states_LD) - left]}  # type: ignore[index]
    sums = {place: states_LD[place].double() * sizes[place] for place in range(len(states_LD))}
    counts = dict(enumerate(sizes))
    for a, b in gone.items():
        sums[b], counts[b] = sums[b] + sums[a], counts[b] + counts[a]
    kept = [place for place in (*even, *odd) if place not in gone][:left]
    where = {place: number for number, place in enumerate(kept)}
    places = [where.get(gone.get(place, place)) for place in range(len(states_LD))]
    return [sums[place] / counts[place] for place in kept], [counts[place] for place in kept], places


@given(
    st.lists(st.integers(1, 13), min_size=1, max_size=4).filter(lambda lengths: max(lengths) > 1),
    st.floats(LEAST, 1.0),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_tokens_merge_as_written_out_with_loops(lengths: list[int], share: float, first_stays: bool, seed: int) -> None:
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    states_BLD = torch.randn(len(lengths), longest, 5, generator=generator)
    valid_BL = torch.arange(longest) < torch.tensor(lengths)[:, None]
    sizes_BL = torch.randint(1, 4, (len(lengths), longest), generator=generator).float() * valid_BL
    numerator = round(share * DENOMINATOR)
    left = [-(-length * numerator // DENOMINATOR) for length in lengths]
    count = staying(longest, share)
    found = merge(states_BLD, sizes_BL, valid_BL, torch.tensor(left)[:, None], count, first_stays)
    assert isinstance(found, Merged)
    assert found.states_BKD.shape == (len(lengths), count, 5)
    for row, length in enumerate(lengths):
        states, sizes, places = merged_by_loops(states_BLD[row, :length], sizes_BL[row, :length].tolist(), left[row], first_stays)
        assert found.valid_BK[row].tolist() == [True] * left[row] + [False] * (count - left[row])
        assert found.sizes_BK[row].tolist() == [*sizes, *[0.0] * (count - left[row])]
        torch.testing.assert_close(found.states_BKD[row, : left[row]], torch.stack(states).float(), rtol=1e-5, atol=1e-5)
        assert all(place in (None, told) for place, told in zip(places, found.place_BL[row, :length].tolist(), strict=True))
        if None in places:  # too few tokens could merge
            assert first_stays
            assert left[row] < 4
        else:
            assert float(found.sizes_BK[row].sum()) == float(sizes_BL[row].sum())
        if first_stays:
            assert torch.equal(found.states_BKD[row, 0], states_BLD[row, 0])


@given(st.integers(2, 12), st.integers(0, 6), st.floats(LEAST, 0.99), st.integers(0, 1000))
def test_padding_changes_nothing(length: int, padding: int, share: float, seed: int) -> None:
    states_1LD = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(seed))
    padded_1LD = torch.cat([states_1LD, torch.full((1, padding, 4), 7.0)], dim=1)
    left = torch.tensor([[staying(length, share)]])
    alone = merge(states_1LD, torch.ones(1, length), torch.ones(1, length, dtype=torch.bool), left, staying(length, share))
    valid = torch.arange(length + padding)[None] < length
    among = merge(padded_1LD, valid.float(), valid, left, staying(length + padding, share))
    torch.testing.assert_close(among.states_BKD[:, : left.item()], alone.states_BKD)
    assert among.sizes_BK[0, : left.item()].tolist() == alone.sizes_BK[0].tolist()
    assert among.place_BL[0, :length].tolist() == alone.place_BL[0].tolist()
    assert not among.valid_BK[0, left.item() :].any()


def without_positions(model: Any) -> Any:
    """Returns the model with position embeddings of 0, so that equal tokens have equal states."""
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
    return model


@pytest.mark.parametrize("first_stays", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("shares", [(0.75, 0.75, 0.75), (0.6, 0.6, 0.6), (1.0, 0.6, 0.6)])
def test_equal_tokens_merge_without_loss(
    shares: tuple[float, ...], padding: int, first_stays: bool, make_model: Callable[..., Any]
) -> None:
    """Every token stands twice, next to itself: 10 of 20 are enough, 12 or more are left, and attention counts a merged token twice."""
    model = without_positions(make_model("bert"))
    ids = torch.arange(6, 16).repeat_interleave(2)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    if padding:
        ids, mask = (torch.nn.functional.pad(values, (0, padding)) for values in (ids, mask))
    features = {"input_ids": ids, "attention_mask": mask}
    merged = with_merged_tokens(model, shares, KEY, first_stays)
    with torch.no_grad():
        torch.testing.assert_close(forward(merged, features), forward(model, features), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("first_stays", "out"), [(False, 5), (True, 3)])
def test_fewer_tokens_come_into_later_layers(
    first_stays: bool, out: int, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = with_merged_tokens(make_model("vit"), (0.6, 0.6, 0.6), KEY, first_stays)
    seen: list[int] = []
    for layer in model.get_submodule("vit.layers"):  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda block, args: seen.append(args[0].shape[1]))
        layer.register_forward_hook(lambda block, args, output: seen.append((output[0] if isinstance(output, tuple) else output).shape[1]))
    with torch.no_grad():
        forward(model, make_features("vit"))
    assert seen == [5, 3, 3, 3, 3, out]  # of a class token and four patches; all of them come out, if the head reads all of them


def test_other_tokens_merge_with_a_loss(make_model: Callable[..., Any]) -> None:
    model, ids = without_positions(make_model("bert")), (6 + torch.arange(20) % 13)[None]
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    merged = with_merged_tokens(model, (0.6, 0.6, 0.6), KEY, first_stays=False)
    with torch.no_grad():
        assert float((forward(merged, features) - forward(model, features)).abs().max()) > 5e-5


def test_a_row_of_one_token_is_left_alone(make_model: Callable[..., Any]) -> None:
    model, features = make_model("bert"), {"input_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(
            forward(with_merged_tokens(model, (0.6, 0.6, 0.6), KEY, first_stays=False), features), forward(model, features)
        )


def test_shares_fall_no_faster_than_tokens_can_merge() -> None:
    assert shares_of((0.6, 0.36), 3, KEY, merged=True) == (0.6, 0.36, 0.36)
    for tokens in ((0.5,), (0.9, 0.5), 0.3):
        with raises_problem("prune.tokens", "0.6"):
            shares_of(tokens, 3, KEY, merged=True)
    assert shares_of(0.3, 3, KEY)[-1] == 0.3


def test_the_first_token_stays_where_the_head_reads_it_alone(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    for name in ("bert", "vit"):
        assert prove_merging(make_model(name), make_features(name), KEY)


def test_what_the_class_token_has_become_is_read(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    """The logits are those of the last block of the model without merging, on the tokens that are left and their sizes."""
    model, features = make_model("vit"), make_features("vit")
    merged = with_merged_tokens(model, (1.0, 0.6, 0.6), KEY, first_stays=True)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    last = merged.get_submodule("vit.layers.2")
    last.register_forward_pre_hook(lambda block, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        found = forward(merged, features)
        ((args, kwargs),) = given
        output = model.get_submodule("vit.layers.2")(*args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        expected = model.get_submodule("classifier")(model.get_submodule("vit.layernorm")(output)[:, 0])
    torch.testing.assert_close(found, expected)


def test_the_shape_of_a_model_says_whether_its_first_token_stays(make_model: Callable[..., Any]) -> None:
    for stays in (False, True):
        merged = with_merged_tokens(make_model("vit"), (0.6, 0.6, 0.6), KEY, stays)
        sizes = Structure.of(merged, KEY).sizes
        assert (sizes.tokens, sizes.merged, sizes.first_stays, sizes.prefix) == ((0.6, 0.6, 0.6), True, stays, 0)
        assert sizes.of_layers([0, 2]).first_stays == stays
    dropped = Structure.of(with_tokens(merged, (0.6, 0.6, 0.6), [torch.ones(sizes.hidden)] * 3, KEY), KEY).sizes
    assert (dropped.merged, dropped.first_stays) == (False, False)


def test_positions_inside_of_layers_are_refused(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="read where tokens stand"):
        prove_merging(make_model("gpt2"), make_features("gpt2"), KEY)


def embedder(folder: Path) -> Path:
    """Writes a tiny embedding model of two layers that reads a mean, whose tokens merge; returns the folder."""
    given, source = tiny_embedding.folder(folder / "given", layers=3), folder / "source"
    source.mkdir()
    import_model(ModelConfig(path=str(given), task="sentence-embedding"), (), 0, source)
    merged = with_merged_tokens(load(source), (0.7, 0.5, 0.5), KEY, first_stays=False)
    out = folder / "merged"
    out.mkdir()
    save(merged, source, out, "merged")
    return out


def test_a_mean_is_read_and_a_checkpoint_opens_again_alike(tmp_path: Path) -> None:
    folder = embedder(tmp_path)
    prepared = Checkpoint(folder).preprocessor("sentence-embedding", 16, Target(sequence_lengths=(8,)))
    rows = prepared.encode(["a good film", "bad", "this movie was very poor and dull it was not like the other"])
    features = {name: torch.from_numpy(values) for name, values in rows.items()}
    first, again = load(folder), load(folder)
    plain = load(tmp_path / "source")
    assert not prove_merging(plain, features, KEY)
    assert Structure.of(first, KEY).sizes.merged
    with torch.no_grad():
        torch.testing.assert_close(forward(first, features), forward(again, features))
        assert not torch.allclose(forward(first, features), forward(plain, features), atol=1e-4)


@pytest.mark.slow
def test_an_exported_graph_answers_as_torch(tmp_path: Path) -> None:
    folder = embedder(tmp_path)
    prepared = Checkpoint(folder).preprocessor("sentence-embedding", 16, Target(sequence_lengths=(8,)))
    model = load(folder)
    path = export_float(Checkpoint(folder), prepared, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    texts = ["a good film", "bad", "this movie was very poor and dull it was not like the other", "great great great", "not"]
    for some in (texts, texts[:1], texts[2:4]):
        rows = {name: values for name, values in prepared.encode(some).items() if name in prepared.input_names}
        with torch.no_grad():
            expected = forward(model, {name: torch.from_numpy(values) for name, values in rows.items()}).numpy()
        (found,) = session.run(None, rows)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_what_others_say_of_tokens_needs_tokens() -> None:
    with pytest.raises(ValueError, match="token_reduction: merge given without tokens"):
        Prune(token_reduction="merge")


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside")
def test_a_run(tmp_path: Path) -> None:
    source = tiny_embedding.folder(tmp_path / "source", layers=3)
    data = tiny_embedding.pairs(tmp_path / "data", 60, 30, names=("text", "text_pair", "label"))
    stage = {"sparsity": 0, "tokens": [0.7, 0.5], "token_reduction": "merge", "rows": 16, "recover": {"epochs": 0.1}}
    recipe = check(
        {
            "name": "merged",
            "model": {"path": str(source), "task": "sentence-embedding"},
            "data": {"path": str(data), "max_length": 16},
            "target": {"engines": ["onnxruntime"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1},
            "stages": [{"prune": stage}, {"quantize": {"calibration": {"rows": 16}}}, {"export": {}}],
        }
    )
    report = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet")).report
    sizes = report["variants"][1]["pruning"]["after"]
    assert sizes["tokens"] == [0.7, 0.5, 0.5]
    assert sizes["merged"] is True
    assert report["variants"][1]["macs"] < report["variants"][0]["macs"]
    assert report["variants"][-1]["accuracy"]["onnxruntime"]["n"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside")
def test_a_run_of_images_keeps_the_class_token(tmp_path: Path) -> None:
    """The last layer computes the class token alone, as before tokens merged."""
    stage = {"sparsity": 0, "tokens": [0.7, 0.5], "token_reduction": "merge", "rows": 16, "recover": {"epochs": 0.05}}
    recipe = check(
        {
            **tiny_vit("merged", layers=3),
            "target": {"engines": ["onnxruntime", "openvino"], "batch_sizes": [1]},
            "stages": [{"finetune": {"epochs": 0.05}}, {"prune": stage}, {"quantize": {"calibration": {"rows": 32}}}, {"export": {}}],
        }
    )
    report = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet")).report
    variants = {variant["id"]: variant for variant in report["variants"]}
    sizes = variants["prune"]["pruning"]["after"]
    assert (sizes["merged"], sizes["first_stays"]) == (True, True)
    assert variants["prune"]["macs"] < variants["finetune"]["macs"]
    assert all(variants["quantize"]["accuracy"][engine]["n"] > 0 for engine in ("openvino", "onnxruntime"))
