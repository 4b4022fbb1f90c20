"""The commands of Docker, with a player in its place: what is asked of it, and the one line where something is missing."""

import json

import pytest

from benchmarks.gpu import containers
from foundation.core.errors import InputError


class Docker:
    """Answers commands by how they begin; notes all of them."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, words):
        self.asked.append(list(words))
        key = words[0] if words[0] != "docker" else words[1]
        answer = self.answers.get(key.replace("-", "_"), "")
        if isinstance(answer, Exception):
            raise answer
        return answer(words) if callable(answer) else answer


LISTED = "NVIDIA L4, 580.1\nNVIDIA L4, 580.1\n"


def test_a_machine_with_gpus_and_docker_is_described():
    docker = Docker(nvidia_smi=LISTED, info='{"nvidia":{},"runc":{}}')
    assert containers.machine(docker, lambda name: name) == {"gpus": ["NVIDIA L4", "NVIDIA L4"], "driver": "580.1"}


@pytest.mark.parametrize(
    ("there", "answers", "message"),
    [
        ((), {}, r"no NVIDIA GPU \(nvidia-smi is not there\); run it on one that has"),
        (("nvidia-smi",), {"nvidia_smi": ""}, "nvidia-smi lists no GPU"),
        (("nvidia-smi",), {"nvidia_smi": LISTED}, "Docker is not installed"),
        (
            ("nvidia-smi", "docker"),
            {"nvidia_smi": LISTED, "info": InputError("docker info", "permission denied")},
            r"Docker does not answer \(docker info: permission denied\)",
        ),
        (("nvidia-smi", "docker"), {"nvidia_smi": LISTED, "info": '{"runc":{}}'}, "no runtime nvidia; install NVIDIA's container toolkit"),
    ],
)
def test_what_is_missing_is_one_line(there, answers, message):
    with pytest.raises(InputError, match=message) as raised:
        containers.machine(Docker(**answers), lambda name: name if name in there else None)
    assert len(raised.value.lines) == 1


def test_images_are_built_without_a_network_from_the_deployed_folder(tmp_path):
    docker = Docker()
    containers.build(tmp_path, tmp_path / "model_repository", "25.09", docker)
    assert len(docker.asked) == 2
    for words, target in zip(docker.asked, ("builder", "server"), strict=True):
        assert words[:4] == ["docker", "build", "--network", "none"]
        assert words[words.index("--target") + 1] == target
        assert "RELEASE=25.09" in words
        assert words[-3:] == ["--file", str(tmp_path / "docker" / "Dockerfile"), str(tmp_path / "model_repository")]


def test_plans_are_built_without_a_network_on_all_gpus(tmp_path):
    def built(words):
        (tmp_path / "plans.json").write_text(json.dumps({"plans": {"89": {}}}))
        return ""

    docker = Docker(run=built)
    assert containers.plans(tmp_path, docker) == {"plans": {"89": {}}}
    [words] = docker.asked
    assert words[words.index("--gpus") + 1] == "all"
    assert words[words.index("--network") + 1] == "none"
    assert f"{tmp_path}:/repository" in words


def test_a_server_is_waited_for_and_stopped(tmp_path, monkeypatch):
    asked = iter([False, False, True])
    monkeypatch.setattr(containers.time, "sleep", lambda seconds: None)
    docker = Docker(run="abc\n", port="127.0.0.1:49153\n", inspect="true")
    with containers.serving(tmp_path, "device=0", docker, lambda address: next(asked)) as address:
        assert address == "127.0.0.1:49153"
        assert docker.asked[0][docker.asked[0].index("--gpus") + 1] == "device=0"
    assert docker.asked[-1] == ["docker", "stop", "abc"]


def test_a_server_that_is_never_ready_is_stopped_and_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "READY_SECONDS", -1.0)
    docker = Docker(run="abc\n", port="127.0.0.1:49153\n", logs="E failed to load\n")
    with (
        pytest.raises(InputError, match=r"not ready within .*: E failed to load"),
        containers.serving(tmp_path, "all", docker, lambda address: False),
    ):
        pass
    assert docker.asked[-1] == ["docker", "stop", "abc"]


@pytest.mark.parametrize(
    ("script", "told"),
    [("echo warning >&2; echo not ready: why; exit 1", "not ready: why"), ("echo first >&2; echo last >&2; exit 1", "last")],
    ids=["what build_plans.py says", "what Docker says"],
)
def test_a_command_that_fails_is_one_line(script, told):
    with pytest.raises(InputError) as raised:
        containers.command(["sh", "-c", script])
    assert str(raised.value) == f"sh -c {script}: ended with status 1: {told}"
    assert containers.command(["echo", "fine"]) == "fine\n"
