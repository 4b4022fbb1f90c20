"""`docker/cpu`: its files fit together, and the board and the alerts ask for metrics that the server has. No container is started here."""

import json
import re
from pathlib import Path

import yaml

from triton_repo.cascade.served.metrics import FAMILIES, PREFIX
from triton_repo.front.figures import METRICS

FOLDER = Path(__file__).resolve().parents[1] / "docker" / "cpu"
OURS = {f"compress_front_{name}" for name in METRICS} | {f"{PREFIX}{name}" for name in FAMILIES}
TRITON = {
    f"nv_inference_{name}" for name in ("count", "exec_count", "request_success", "request_duration_us", "queue_duration_us")
}  # tests/triton_repo finds each of them, and ours, in a running server (test_queueing.py, cascade/test_served.py)
LABELS = {"model", "outcome", "job", "tier", "test"}
FUNCTIONS = {"sum", "max", "by", "rate", "up"}


def read(name: str):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def asked() -> list[str]:
    """All queries of the board and of the alerts."""
    board = json.loads((FOLDER / "grafana" / "board.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return queries + [rule["expr"] for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def test_queries_name_metrics_that_exist() -> None:
    found = set()
    for query in asked():
        words = set(re.findall(r"[a-z_]{2,}", re.sub(r'"[^"]*"|\[\d+\w\]', "", query)))
        assert words <= OURS | TRITON | LABELS | FUNCTIONS, query
        found |= words
    assert found >= OURS | TRITON


def test_outcomes_are_those_of_the_front() -> None:
    named = {name for query in asked() for text in re.findall(r'outcome=~?"([^"]*)"', query) for name in text.split("|")}
    source = (FOLDER.parents[1] / "triton_repo" / "front" / "admission.py").read_text(encoding="utf-8")
    assert named == {name for name in named if f'"{name}"' in source} == {"refused", "timed_out", "failed"}


def test_the_services_find_each_other() -> None:
    compose = read("compose.yaml")["services"]
    for name, service in compose.items():
        for mounted in service["volumes"]:
            source = mounted.partition(":")[0]
            if source.startswith("./") and not source.startswith("./deployment"):
                assert (FOLDER / source).exists(), (name, source)
        assert (service.get("network_mode") == "service:server") == (name != "server")
    ports = dict(re.findall(r'"--(\w+)-port", "(\d+)"', (FOLDER / "Dockerfile").read_text(encoding="utf-8")))
    [[target]] = [job["targets"] for job in read("prometheus.yml")["scrape_configs"][0]["static_configs"]]
    assert target == f"127.0.0.1:{ports['metrics']}"
    assert f"127.0.0.1:{ports['http']}/v2/health/ready" in (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert compose["prometheus"]["command"][-1].partition("=")[2] in read("grafana/datasource.yaml")["datasources"][0]["url"]
    assert read("prometheus.yml")["rule_files"] == ["alerts.yml"]


def test_the_image_holds_every_package() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    project = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    [names] = re.findall(r"\[tool\.hatch\.build\.targets\.wheel\]\nonly-include = (\[.*\])", project)
    for name in json.loads(names):
        assert re.search(rf"^COPY .*\b{re.escape(name)}\b", text, re.MULTILINE), name
