import math
import subprocess
import sys

import numpy as np
import pytest

from foundation.standalone.confidence import CALIBRATED, KEEP_ALL, NAMES, SURE, Score, confidence, features, kept, route


def score(name: str, form: str = "class", **more: object) -> Score:
    return {"name": name, "form": form, "temperature": 1.0, "weights": [], "bias": [], **more}  # type: ignore[typeddict-item]


def naive_of_classes(logits: list[float]) -> list[float]:
    """The definitions, written out with exact sums."""
    largest, second = sorted(logits)[::-1][:2]
    total = math.fsum(math.exp(one - largest) for one in logits)
    p = [math.exp(one - largest) / total for one in logits]
    return [largest - second, math.fsum(one * math.log(one) for one in p if one > 0), largest + math.log(total)]


def naive_of_sets(logits: list[float]) -> list[float]:
    p = [1 / (1 + math.exp(-one)) for one in logits]
    q = [1 / (1 + math.exp(one)) for one in logits]
    entropy = -math.fsum(one * math.log(one) for one in (*p, *q) if one > 0)
    return [min(map(abs, logits)), -entropy, math.fsum(math.log1p(math.exp(one)) for one in logits)]


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("scale", [0.01, 1.0, 12.0])
def test_scores_are_their_definitions(classes: int, scale: float) -> None:
    logits = (np.random.default_rng(classes).normal(size=(50, classes)) * scale).astype(np.float32)
    np.testing.assert_allclose(features(logits, "class"), [naive_of_classes(row) for row in logits.tolist()], atol=1e-12)
    np.testing.assert_allclose(features(logits, "set"), [naive_of_sets(row) for row in logits.tolist()], rtol=1e-9, atol=1e-9)


def test_a_temperature_divides_the_logits_first() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    halves = (logits.astype(np.float64) / 2).tolist()
    np.testing.assert_allclose(features(logits, "class", 2.0), [naive_of_classes(row) for row in halves], atol=1e-12)


def test_large_logits_neither_overflow_nor_lose_their_order() -> None:
    logits = np.array([[3e38, -3e38], [1e4, 0.0], [1e-3, 0.0]], np.float32)
    for form in ("class", "set"):
        found = features(logits, form)
        assert np.isfinite(found).all()
        assert (np.diff(found[:, 2]) < 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["class", "set"])
def test_logits_that_are_not_finite_have_no_score_and_are_never_kept(bad: float, name: str, form: str) -> None:
    scores = confidence(np.array([[1.0, 2.0, bad], [3.0, 1.0, 0.5]], np.float32), score(name, form))
    assert math.isnan(scores[0])
    assert math.isfinite(scores[1])
    assert kept(scores, KEEP_ALL).tolist() == [False, True]
    assert route([scores], [KEEP_ALL]).tolist() == [1, 0]


def test_a_row_of_tags_is_as_sure_as_its_least_sure_word() -> None:
    rng = np.random.default_rng(3)
    logits = np.zeros((3, 5, 4), np.float32)
    logits[0, :3], logits[1, :1] = rng.normal(size=(3, 4)), rng.normal(size=(1, 4))
    found = features(logits, "tags")
    naive = np.array([naive_of_classes(row) for row in logits[0, :3].tolist()])
    np.testing.assert_allclose(found[0], naive.min(axis=0), atol=1e-12)
    np.testing.assert_allclose(found[1], naive_of_classes(logits[1, 0].tolist()), atol=1e-12)
    assert found[2].tolist() == [SURE] * 3


def test_a_calibrated_score_has_a_bias_of_the_predicted_class() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 1.0]], np.float32)
    parts = features(logits, "class", 0.5)
    own = score(CALIBRATED, temperature=0.5, weights=[1.0, 10.0, 100.0], bias=[0.25, 0.5])
    expected = parts @ np.array([1.0, 10.0, 100.0]) + np.array([0.25, 0.5])
    np.testing.assert_allclose(confidence(logits, own), expected)
    one = score(CALIBRATED, temperature=0.5, weights=[1.0, 10.0, 100.0], bias=[0.25])
    np.testing.assert_allclose(confidence(logits, one), parts @ np.array([1.0, 10.0, 100.0]) + 0.25)


def test_a_value_and_a_vector_have_a_linear_model_of_the_answer() -> None:
    values = np.array([[2.0], [-3.0]], np.float32)
    own = score(CALIBRATED, "value", weights=[0.5, -1.0], bias=[0.25])
    assert confidence(values, own).tolist() == [0.5 * 2 - 4 + 0.25, 0.5 * -3 - 9 + 0.25]
    vectors = np.array([[3.0, 4.0], [0.0, 0.0], [-6.0, 8.0]], np.float32)
    own = score(CALIBRATED, "vector", weights=[1.0, 2.0, 10.0], bias=[0.5])
    expected = [0.6 + 1.6 + 10 * math.log(5) + 0.5, 0.5, -0.6 + 1.6 + 10 * math.log(10) + 0.5]
    np.testing.assert_allclose(confidence(vectors, own), expected)


@pytest.mark.parametrize(("form", "weights"), [("value", [0.0, 0.0]), ("vector", [0.0, 0.0])])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_or_vector_that_is_no_number_is_never_kept(form: str, weights: list[float], bad: float) -> None:
    scores = confidence(np.array([[bad], [1.0]], np.float32), score(CALIBRATED, form, weights=weights, bias=[1.0]))
    assert kept(scores, KEEP_ALL).tolist() == [False, True]


def test_the_first_model_that_keeps_a_row_answers_it() -> None:
    scores = [np.array([3.0, 1.0, 1.0, 2.0]), np.array([0.0, 5.0, 0.0, 9.0])]
    assert route(scores, [2.0, 4.0]).tolist() == [0, 1, 2, 0]
    assert route(scores, [None, 4.0]).tolist() == [2, 1, 2, 1]
    assert route(scores, [None, None]).tolist() == [2, 2, 2, 2]
    assert route(scores, [KEEP_ALL, None]).tolist() == [0, 0, 0, 0]
    assert kept(np.array([2.0, np.nextafter(2.0, 0)]), 2.0).tolist() == [True, False]


def test_the_file_needs_numpy_alone() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'scipy', 'pydantic', 'foundation']));"
        "import importlib.util as u; s = u.spec_from_file_location('confidence', sys.argv[1]); m = u.module_from_spec(s);"
        "s.loader.exec_module(m); import numpy as np; print(m.route([np.array([1.0, 3.0])], [2.0]).tolist())"
    )
    file = sys.modules["foundation.standalone.confidence"].__file__
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 0]"
