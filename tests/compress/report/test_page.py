import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import permutations, zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.report import decision, phrases
from compress.report.charts import scatter
from compress.report.model.contents import Goal
from compress.report.sections import accuracy
from tests.plain_reports import contents, decision_of, judge, render

VOID = {"meta", "input", "br", "link", "img", "hr"}
SECTIONS = ["goals", "tradeoff", "ledger", "latency", "size", "layers", "stages", "surroundings", "recipe"]


class Page(HTMLParser):
    """Reads a page, checks that every element is closed in order, and keeps what tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.inside: list[bool] = []
        """Of each open element whether its text is shown besides the figures: explanations, and what stands in cards alone."""
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
            names = dict(attrs)
            self.inside.append(tag in ("style", "aside") or "data-again" in names or "column" in (names.get("class") or "").split())

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()
            self.inside.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.inside):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def ledger_of(report: dict[str, Any]) -> dict[str, Any]:
    return accuracy.ledger(contents(report), decision_of(report))


def cell(value: float, n: int = 872) -> dict[str, Any]:
    return {"value": value, "low": value - 0.021, "high": value + 0.019, "n": n}


def timing(engine: str, precision: str, batch: int, p50: float, **more: Any) -> dict[str, Any]:
    mode = "eager" if engine == "torch" else "static"
    fields = {"engine": engine, "mode": mode, "precision": precision, "float_precision": "fp32", "device": "cpu", "threads": 2}
    figures = {"batch": batch, "sequence": 128, "p50_ms": p50, "p90_ms": p50 * 1.07, "p99_ms": p50 * 1.31, "n": 200}
    quantiles = [p50 * (0.9 + 0.01 * step) for step in range(21)]
    return fields | figures | {"throughput_per_s": 1000 * batch / p50, "quantiles_ms": quantiles} | more


def make_report() -> dict[str, Any]:
    unserved = {"value": None, "reason": "this variant is not in the model repository"}
    no_gpu = {"value": None, "reason": "no NVIDIA GPU on this machine"}
    report: dict[str, Any] = {
        "schema": 1,
        "name": "sst2-minilm",
        "task": "text-classification",
        "environment": {
            "cpu": "AMD EPYC",
            "cpu_features": ["avx2"],
            "gpus": [],
            "cores": 2,
            "memory_bytes": 16_700_000_000,
            "versions": {"torch": "2.13.0+cpu"},
        },
        "target": {"device": "cpu", "engines": ["openvino"], "batch_sizes": [1, 8]},
        "metric": {"name": "accuracy", "higher_is_better": True},
        "baseline": "baseline",
        "variants": [
            {
                "id": "baseline",
                "stages": ["baseline"],
                "parameters": 22_713_986,
                "macs": 1_361_000_000,
                "size_bytes": 91_100_000,
                "checkpoint_bytes": 91_600_000,
                "metrics": {"torch": {"accuracy": 0.9106, "f1": 0.9131, "matthews": 0.8214}},
                "accuracy": {"torch": cell(0.9106), "openvino": cell(0.9106), "tensorrt": no_gpu, "triton": unserved},
                "latency": [timing("torch", "fp32", 1, 41.3), timing("torch", "fp32", 8, 312.0), timing("openvino", "fp32", 1, 16.2)],
            },
            {
                "id": "quantize",
                "stages": ["baseline", "quantize"],
                "parameters": 22_713_986,
                "size_bytes": 23_400_000,
                "checkpoint_bytes": 92_300_000,
                "precision": "int8",
                "int8_share": 0.9991,
                "int8_share_all": 0.9412,
                "int8_layers": [
                    {"name": "encoder.0.query", "kind": "weight", "macs": 900, "precision": "int8"},
                    {"name": "classifier", "kind": "weight", "macs": 100, "precision": "fp32"},
                ],
                "quantization": {"scheme": "w8a8", "layers": [{"name": "encoder.0.query", "input_sqnr_db": 34.56, "weight_sqnr_db": 41.2}]},
                "parity": {"disagreements": 3, "limit": 1, "median_abs": 0.0123, "max_abs": 0.456, "n": 872, "passed": False}
                | {"layers": [{"layer": "encoder.0.query", "codes": 49152, "different": 7, "allowed": 2}]},
                "accuracy": {"torch": cell(0.9071), "openvino": cell(0.9060), "tensorrt": no_gpu, "triton": cell(0.9060)},
                "drops": {
                    "triton": {"difference": 0.0046, "low": -0.0034, "high": 0.0126, "right_to_wrong": 13, "wrong_to_right": 9, "n": 872}
                },
                "latency": [timing("openvino", "int8", 1, 4.87), timing("openvino", "int8", 8, 37.6, p99_ms=None, n=60)],
            },
        ],
        "stages": [{"id": "quantize", "seconds": 61.2, "cached": False}, {"id": "baseline", "seconds": 3725.0, "cached": True}],
        "triton": {"models": [{"model": "sst2", "variant": "quantize", "precision": "int8", "disagreements": 0, "latency": []}]},
        "flips": 22,
        "warnings": ["the frequency governor is 'powersave'"],
        "recipe": "name: sst2-minilm\nstages:\n  - quantize: {}\n",
        "commands": ["compress verify runs/sst2-minilm --live"],
    }
    report["triton"]["models"][0]["latency"] = [
        {"concurrency": 4, "p50_ms": 7.31, "p90_ms": 8.42, "p99_ms": None, "throughput_per_s": 547.0, "n": 150}
    ]
    report["goals"] = judge({"max_drop": 0.01, "min_speedup": 9.0, "max_size_mb": 25}, report)
    return report


def nothing_in(value: Any) -> Any:
    """Returns the same structure with every value None."""
    if isinstance(value, dict):
        return {key: nothing_in(item) for key, item in value.items()}
    return [nothing_in(item) for item in value] if isinstance(value, list) else None


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *paths_of(item, (*path, key))]]


def test_the_page_is_well_formed_and_has_every_section() -> None:
    page = Page(render(make_report()))
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("h1") == 1
    assert page.tags.count("svg") >= 4


def test_the_page_needs_nothing_but_itself() -> None:
    text = render(make_report())
    page = Page(text)
    links = [value for _, name, value in page.attributes if name in ("href", "src", "srcset", "action", "data", "xlink:href")]
    assert links
    assert all(link.startswith("#") and link[1:] in page.ids for link in links)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert not re.search(r"https?:|//\w|@import|url\(|@font-face", text)


def test_every_figure_appears() -> None:
    text = Page(render(make_report())).text.replace("\u00a0", " ").replace("\u2060", "")
    expected = [
        *("91.06 %", "90.60 %", "90.71 %", "88.5 \u2013 92.5", "n 872"),  # accuracy, interval, n
        *("\u22120.46 pt", "\u22121.26 to +0.34", "13 lost, 9 gained"),  # the paired drop
        *("41.3", "4.87", "44.2", "54.1", "8.48\u00d7", "8.30\u00d7", "205"),  # p50, p90, p99, speed-up, rows/s
        *("60 samples; p99 needs 200", "7.31", "8.42", "547", "150 requests; p99 needs 200"),
        *("23.4 MB", "91.1 MB", "3.89\u00d7 smaller", "22.7 M", "1.36 G"),
        *("99.9 %", "94.1 %", "encoder.0.query", "90.0 %", "1 of 2 GEMMs in int8", "34.6 / 41.2 dB"),
        *("0.0123", "0.456", "7 of 49,152 codes differ", "first to diverge: encoder.0.query"),
        *("1 min 1 s", "1 h 2 min", "cache", "AMD EPYC", "CPU features", "GPUs", "16.7 GB", "2.13.0+cpu"),
        *("the frequency governor is 'powersave'", "compress verify runs/sst2-minilm --live", "- quantize: {}", "91.31 %", "0.8214"),
        *("no NVIDIA GPU on this machine", "this variant is not in the model repository", "22 predictions that changed"),
    ]
    assert [piece for piece in expected if piece not in text] == []


def test_weights_that_floats_multiply_are_counted_in_place_of_products_of_integers() -> None:
    report = make_report()
    report["variants"][-1] |= {"int8_share": 0.0, "int8_share_all": 0.0, "integer_weights": 0.984}
    page = render(report)
    assert "Integer weights" in page
    assert "of all weights; multiplied by float activations" in page
    report["variants"][-1]["integer_weights"] = None
    assert "Integer weights" not in render(report)


def test_the_settings_that_were_tried_are_shown() -> None:
    report = make_report()
    point = {"instances": 2, "threads": 1, "max_batch_size": 8, "max_queue_delay_us": 1500, "loads": [], "rounds": 2}
    best = {**point, "own": False, "rows_per_s": 240.0, "p99_ms": 9.5, "concurrency": 16}
    own = {**point, "instances": 1, "own": True, "rows_per_s": 200.0, "p99_ms": None, "concurrency": None}
    report["triton"]["tuned"] = {"model": "quantize-int8", "limit_p99_ms": 10.0, "best": point, "trials": [best, own]}
    text = Page(render(report)).text.replace("\u00a0", " ")
    assert "Server settings tried" in text
    for expected in ("1.20\u00d7", "no load was within the limit", "of the recipe", "whose p99 is at most 10.0 ms", "1.50"):
        assert expected in text, expected
    assert "Server settings" not in render(make_report())
    settings = {key: own[key] for key in ("instances", "threads", "max_batch_size", "max_queue_delay_us")}
    ratio = {"value": 1.03, "low": 0.98, "high": None}
    confirmed = {"proposed": settings, "repeats": 6, "rows_per_s": [], "own_rows_per_s": [], "ratio": ratio, "taken": False}
    report["triton"]["tuned"]["confirmation"] = confirmed
    text = Page(render(report)).text.replace("\u00a0", " ")
    for expected in (
        "the settings of row 2",
        "1.03\u00d7",
        "interval 0.98\u00d7 to without bound",
        "6 repeats",
        "of the recipe are served",
    ):
        assert expected in text, expected


def test_the_verdict_says_what_was_gained_what_it_cost_and_which_goals_were_missed() -> None:
    report = make_report()
    sentence = "".join(piece for piece, _ in phrases.verdict(decision_of(report))).replace("\u00a0", " ")
    assert sentence == (
        "The int8 model of stage quantize is at least 8.30\u00d7 faster on OpenVINO than the baseline in torch, 3.89\u00d7 smaller, "
        "and loses 0.46 points of accuracy (measured in Triton; 95 % interval of the change \u22121.26 to +0.34)."
    )
    assert phrases.goals_sentence(contents(report).goals) == "1 of 3 goals missed, 2 met"
    text = Page(render(report)).text
    assert "\u2717 missed" in text


@pytest.mark.parametrize("state", ["met", "open", "none"])
def test_goals_sentence(state: str) -> None:
    judged = {"met": [{"met": True}] * 2, "open": [{"met": None}, {"met": True}], "none": []}[state]
    expected = {"met": "All 2 goals met", "open": "1 met, 1 could not be judged", "none": "No goals were set"}[state]
    assert phrases.goals_sentence([Goal(**one) for one in judged]) == expected


@pytest.mark.parametrize(
    "report", [{}, {"name": None, "variants": None}, {"variants": [{}]}, {"variants": [None]}, nothing_in(make_report())]
)
def test_what_was_not_measured_is_said_and_never_blank(report: dict[str, Any]) -> None:
    page = Page(render(report))
    assert "not measured" in page.text
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert not re.search(r"\bNone\b|\bnan\b|undefined", page.text)
    assert "0.00" not in page.text
    assert "0 %" not in page.text


@pytest.mark.whole
def test_any_null_leaves_a_well_formed_page() -> None:
    """Keys at the top one by one, as each hides much of the page; the others two by two, far from each other."""
    whole = make_report()
    alike = {tuple(key > 0 if isinstance(key, int) else key for key in path): path for path in paths_of(whole)}  # the first, and another
    top, inner = ([path for path in alike.values() if (len(path) == 1) == alone] for alone in (True, False))
    half = (len(inner) + 1) // 2
    for paths in [*((path,) for path in top), *zip_longest(inner[:half], inner[half:])]:
        together = list(filter(None, paths))
        nested = len(together) == 2 and any(one == other[: len(one)] for one, other in permutations(together))
        for nulls in [[one] for one in together] if nested else [together]:
            report = copy.deepcopy(whole)
            for path in nulls:
                above: Any = report
                for key in path[:-1]:
                    above = above[key]
                above[path[-1]] = None
            page = Page(render(report))
            assert not re.search(r"\bNone\b", page.text), nulls
            assert isinstance(judge({"max_drop": 0.1, "min_speedup": 2}, report), list)


def test_names_cannot_bring_in_markup() -> None:
    attack = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;"
    report = make_report()
    spiked = spike(report, attack)
    spiked["baseline"] = spiked["variants"][0]["id"]
    text = render(spiked)
    page = Page(text)
    assert "<script" not in text
    assert not {"script", "img"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert attack in "".join(page.words)


def spike(value: Any, attack: str) -> Any:
    """Returns a copy in which every free text carries the attack; words that the report acts on stay."""
    fixed = {"torch", "openvino", "onnxruntime", "triton", "tensorrt", "fp32", "int8", "eager", "static", "cpu", "accuracy", "quantize"}
    if isinstance(value, dict):
        return {key: spike(item, attack) for key, item in value.items()}
    if isinstance(value, list):
        return [spike(item, attack) for item in value]
    return value + attack if isinstance(value, str) and value not in fixed else value


def test_a_column_that_nothing_reached_gives_its_reason_once() -> None:
    text = Page(render(make_report())).text
    assert text.count("no NVIDIA GPU on this machine") == 1


def test_an_engine_that_the_run_did_not_ask_for_has_no_column() -> None:
    report = make_report()
    asked = {backend for variant in report["variants"] for backend in variant["accuracy"]}
    assert ledger_of(report)["backends"] == [phrases.engine_name(name) for name in accuracy.BACKENDS if name in asked]
    assert "onnxruntime" not in asked


def test_a_configuration_without_its_own_accuracy_is_not_plotted() -> None:
    report = make_report()
    report["variants"][1]["latency"].append(timing("openvino", "fp32", 1, 16.0))
    assert "quantize OpenVINO fp32:" not in render(report)
    report["variants"][1]["latency"][-1]["accuracy"] = cell(0.909)
    assert "quantize OpenVINO fp32: 90.90" in render(report)


def test_layers_that_ran_in_float_are_marked() -> None:
    text = render(make_report())
    assert '<li class="int8">' in text
    assert '<li class="float">' in text


def point(x: float, y: float, label: str = "p", role: str = "other") -> scatter.Point:
    return scatter.Point(x, y, y - 0.01, y + 0.01, label, label, "openvino", role)


@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0, 1)), min_size=1, max_size=20))
def test_pareto_front_is_what_nothing_beats(pairs: list[tuple[float, float]]) -> None:
    points = [point(x, y) for x, y in pairs]
    for sign, higher in ((1, True), (-1, False)):
        front = scatter.pareto(points, higher)
        for candidate in points:
            beaten = any(
                (o.x <= candidate.x and sign * o.y > sign * candidate.y) or (o.x < candidate.x and sign * o.y >= sign * candidate.y)
                for o in points
            )
            assert beaten == all((candidate.x, candidate.y) != (best.x, best.y) for best in front)


@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0, 1)), min_size=1, max_size=30), st.sampled_from([360, 1040]), st.booleans())
def test_everything_drawn_lies_on_the_plot(pairs: list[tuple[float, float]], width: int, higher: bool) -> None:
    drawn = scatter.scatter([point(x, y) for x, y in pairs], width, 400, str, all_labels=True, higher_is_better=higher)
    assert drawn is not None
    for mark in drawn.marks:
        assert mark.low is not None
        assert mark.high is not None
        assert (mark.low > mark.high) == higher  # what is better stands higher, so nearer to 0
        assert drawn.left <= mark.x <= drawn.right
        assert all(drawn.top - 1e-6 <= y <= drawn.bottom + 1e-6 for y in (mark.y, mark.low, mark.high) if y is not None)
    assert all(drawn.left <= x <= drawn.right for x, _ in drawn.x_ticks)
    assert all(drawn.top <= y <= drawn.bottom for y, _ in drawn.y_ticks)
    assert 1 <= len(drawn.y_ticks) <= 8


def test_labels_of_neighbours_do_not_overlap() -> None:
    points = [
        point(x, y, f"variant-{index} OpenVINO") for index, (x, y) in enumerate([(10, 0.9), (10.2, 0.9), (10.1, 0.901), (9.9, 0.899)])
    ]
    drawn = scatter.scatter(points, 1040, 440, str, all_labels=True)
    assert drawn is not None
    boxes = [(m.label.x, m.label.y - 7, m.label.x + len(m.label.text) * scatter.CHARACTER, m.label.y + 7) for m in drawn.marks if m.label]
    assert len(boxes) == 4
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            assert min(one[2], other[2]) <= max(one[0], other[0]) or min(one[3], other[3]) <= max(one[1], other[1])


@pytest.mark.parametrize("width", [360, 1040])
def test_every_mark_has_a_name_or_a_number_that_the_key_explains(width: int) -> None:
    points = [
        replace(point(1 + index % 7 / 50, 0.9 + index % 5 / 5000, f"variant-{index} OpenVINO int8"), title=f"mark {index}")
        for index in range(40)
    ]
    points[3] = replace(points[3], role="served")
    drawn = scatter.scatter(points, width, 400, str, all_labels=True)
    assert drawn is not None
    texts = {mark.point.title: mark.label.text for mark in drawn.marks if mark.label}
    key = {title: str(number) for number, title in drawn.key}
    assert len(texts) == len(points)
    assert {title: text for title, text in texts.items() if text.isdecimal()} == key
    assert key, "there is no room for all of them"
    assert texts["mark 3"].startswith("variant-3"), "what is served has its name"
    assert [number for number, _ in drawn.key] == list(range(1, len(key) + 1))


def test_a_plot_of_several_series_has_a_front_of_each() -> None:
    points = [
        scatter.Point(x, y, None, None, "p", "p", "openvino", "other", series) for x, y, series in ((1, 1, 1), (2, 2, 1), (1.5, 3, 2))
    ]
    drawn = scatter.scatter(points, 1040, 440, str, all_labels=True)
    alone = scatter.scatter([replace(point, series=0) for point in points], 1040, 440, str, all_labels=True)
    assert drawn is not None
    assert alone is not None
    assert (alone.front, alone.fronts) == (drawn.front, [])
    assert [number for number, _ in drawn.fronts] == [1, 2]
    assert [path.count("V") for _, path in drawn.fronts] == [1, 0]  # a front of n points climbs n - 1 times
    assert drawn.front not in (None, *(path for _, path in drawn.fronts))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (phrases.milliseconds(0.4123), "0.412"),
        (phrases.milliseconds(9.996), "10.0"),
        (phrases.milliseconds(1234.5), "1,234"),
        (phrases.ratio(1.004), "1.00\u00d7"),
        (phrases.ratio(9.4), "9.40\u00d7"),
        (phrases.size(999_600), "1.00\u00a0MB"),
        (phrases.size(512), "512\u00a0bytes"),
        (phrases.share(0.9999), "99.9\u00a0%"),
        (phrases.share(1.0), "100\u00a0%"),
        (phrases.figure(0.897911, "accuracy"), "89.79\u00a0%"),
        (phrases.figure(-0.12345, "matthews"), "\u22120.1235"),
        (phrases.change(0.0046, "accuracy"), "\u22120.46\u00a0pt"),
        (phrases.change(0.0, "accuracy"), "0.00\u00a0pt"),
        (phrases.change_interval(-0.0034, 0.0126, "accuracy"), "\u22121.26 to +0.34"),
        (phrases.figure(23.4567, "perplexity"), "23.46"),
        (phrases.interval(1022.123, 1023.4, "perplexity"), "1,022.12\u00a0\u2013\u2060\u00a01,023.40"),
        (phrases.change(0.0123, "perplexity"), "+1.23\u00a0%"),
        (phrases.change(-0.0123, "perplexity"), "\u22121.23\u00a0%"),
        (phrases.change_interval(-0.0034, 0.0126, "perplexity"), "\u22120.34 to +1.26\u00a0%"),
        (phrases.goal_name(Goal(goal="max_drop", limit=0.02), "perplexity"), "Perplexity increase of at most 2.00\u00a0%"),
        (phrases.goal_value(Goal(goal="max_drop", value=0.013), "perplexity"), "+1.30\u00a0%"),
        (phrases.duration(59.94), "59.9\u00a0s"),
        (phrases.duration(3599.9), "59\u00a0min 59\u00a0s"),
        (phrases.duration(7199.0), "2\u00a0h 0\u00a0min"),
        (phrases.count(None), "not measured"),
    ],
)
def test_figures_in_words(written: str, expected: str) -> None:
    assert written == expected


def test_the_spread_of_samples_is_drawn_relative_to_their_median() -> None:
    report = contents({"variants": [{"id": "a", "latency": [timing("torch", "fp32", 1, 10.0), timing("torch", "fp32", 1, 20.0)]}]})
    strips = [row["strip"] for row in accuracy.latency(report, decision.decision_of(report))[0]["rows"]]
    assert strips[0] == pytest.approx(strips[1])
    low, left, middle, right, high = (strips[0][key] for key in ("low", "left", "middle", "right", "high"))
    assert low < left < middle < right < high
    assert middle == pytest.approx(50, abs=0.1)


def test_sensitivity_and_attempts_are_shown() -> None:
    layer = {"name": "encoder.0.query", "gain": 0.0125, "alone": 0.01, "weights": 0.002, "inputs": 0.008}
    worst = {**layer, "name": "encoder.1.output", "gain": -0.5}
    report = make_report()
    report["variants"][-1]["quantization"] = {
        "scheme": "w8a8",
        "sensitivity": {"measure": "kl", "rows": 128, "layers": [layer, worst]},
        "attempts": [{"name": "ptq", "value": 0.02, "seconds": 3.0, "kept": False}, {"name": "qat", "value": 0.001, "kept": True}],
    }
    page = render(report)
    assert "KL of the logits, nats" in page
    text = Page(page).text
    assert "1.00e-02, 2.00e-03, 8.00e-03" in text, "what a touch screen cannot hover over is written"
    assert text.index("1.25e-02") < text.index("-5.00e-01")
    assert "ptq 0.02 3.0 s qat 0.001 not measured chosen" in text


@pytest.mark.parametrize(("last", "words"), [(20.5, "raises perplexity by"), (19.5, "lowers perplexity by"), (20.0001, "leaves")])
def test_a_report_of_perplexity_says_what_is_better(last: float, words: str) -> None:
    report = make_report() | {"metric": {"name": "perplexity", "higher_is_better": False}, "task": "text-generation"}
    for variant, value in zip(report["variants"], (20.0, last), strict=True):
        for backend, found in variant["accuracy"].items():
            if found["value"] is not None:
                variant["accuracy"][backend] = {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 43222}
    report["variants"][1]["drops"]["triton"] |= {"difference": last / 20 - 1, "low": last / 20 - 1.01, "high": last / 20 - 0.99}
    report["goals"] = judge({"max_drop": 0.02}, report)
    page = render(report)
    assert words in page
    assert "Lower is better" in page
    assert "lower perplexity is higher up" in page
    assert "n tokens" in Page(page).text
    assert "Median |dnll|" in page
    assert "Upper left is better" in page
    assert report["goals"][0]["met"] == (last < 20.4)
