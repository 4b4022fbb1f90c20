"""Wheels that are vendored: exact, hashed, fetched once; from a package of ours in the place of the index."""

import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from foundation.core.errors import InputError
from triton_repo import deployment
from triton_repo.gpu import wheels

pytestmark = pytest.mark.whole

NAME = "tiny_package-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one wheel, which the requirements name; an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as file:
        file.writestr("tiny_package.py", "")
        file.writestr("tiny_package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
        file.writestr("tiny_package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny_package-1.0.dist-info/RECORD", "")
    requirements = tmp_path / "requirements.txt"
    digest = hashlib.sha256((folder / NAME).read_bytes()).hexdigest()
    requirements.write_text(f"tiny-package==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(wheels, "REQUIREMENTS", requirements)
    monkeypatch.setenv(wheels.VARIABLE, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_wheels_are_fetched_once_and_copied(index, tmp_path):
    assert [path.name for path in wheels.vendor(tmp_path / "first")] == [NAME]
    (index / NAME).unlink()
    assert [path.name for path in wheels.vendor(tmp_path / "second")] == [NAME]


def test_a_wheel_of_another_hash_is_refused_and_nothing_is_kept(index, tmp_path):
    with zipfile.ZipFile(index / NAME, "a") as file:
        file.writestr("more.py", "")
    with pytest.raises(InputError, match=r"cannot be fetched .* folder .* \$COMPRESS_WHEELS"):
        wheels.vendor(tmp_path / "out")
    assert list((tmp_path / "cache" / "compress").iterdir()) == []


def test_a_repository_for_tensorrt_is_deployed_with_wheels_and_containers(index, tmp_path):
    for name in ("model_repository", "model_repository_gpu"):
        (tmp_path / "deployed" / name).mkdir(parents=True)
    (tmp_path / "deployed" / "model_repository_gpu" / "gpu.json").touch()
    added = {path.relative_to(tmp_path / "deployed").as_posix() for path in deployment._containers(tmp_path / "deployed")}
    source = deployment.docker_folder()
    expected = {f"docker/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    assert added == {f"model_repository_gpu/wheels/{NAME}", "docker/.env", *expected}
    assert (tmp_path / "deployed" / "docker" / ".env").read_text() == "REPOSITORY=../model_repository_gpu\n"


def test_other_repositories_need_no_wheels(index, tmp_path):
    (tmp_path / "model_repository").mkdir()
    assert list(deployment._containers(tmp_path)) == []


def test_pins_are_those_of_the_server_environment_and_have_hashes():
    root = Path(wheels.__file__).parent
    pins = dict(re.findall(r"^(\w+)==(\S+)", (root / "requirements.txt").read_text(), re.M))
    server = dict(re.findall(r"^(\w+)==(\S+)", (root.parent / "server-requirements.txt").read_text(), re.M))
    assert pins == {name: server[name] for name in ("numpy", "pillow", "tokenizers")}
    assert int(pins["numpy"].split(".")[0]) < 2
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", (root / "requirements.txt").read_text())
    assert len(hashes) == len(set(hashes)) == 5
