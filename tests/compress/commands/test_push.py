"""Uploads to the Hub, against a server that speaks its HTTP interface: what is sent, with which token, and what is refused."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from compress.commands.push import check_target, upload
from foundation.core.errors import InputError

SECRET = "hf_secretsecretsecret"
CARD = "---\nlicense: apache-2.0\n---\n\n# A model\n"


class Hub(ThreadingHTTPServer):
    """Answers what `huggingface_hub` asks to create a repository and to commit files to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuse = ""
        self.tokens: set[str] = set()
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self._read()
        self._answer({})

    def do_POST(self) -> None:
        body, hub = self._read(), self.server
        hub.tokens.add(str(self.headers["Authorization"]))
        if hub.refuse and hub.refuse in self.path:
            self._answer({"error": "you may not"}, 403)
        elif self.path == "/api/repos/create":
            hub.repositories.append(json.loads(body))
            self._answer({"url": f"{hub.address}/team/model"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            modes = [(file["path"], "regular" if file["path"].endswith((".md", ".json")) else "lfs") for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            self._answer(
                {
                    "transfer": "basic",
                    "objects": [
                        {**entry, "actions": {"upload": {"href": f"{hub.address}/large/{entry['oid']}", "header": {}}}} for entry in wanted
                    ],
                }
            )
        else:
            self._commit(body)

    def _commit(self, body: bytes) -> None:
        assert self.path == "/api/models/team/model/commit/main"
        hub = self.server
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                hub.commits.append(line["value"]["summary"])
            elif line["key"] == "file":
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            else:
                hub.files[line["value"]["path"]] = hub.large[line["value"]["oid"]]
        self._answer({"commitUrl": f"{hub.address}/team/model/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, document: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(document).encode()
        with suppress(BrokenPipeError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)  # its own protocol has no stand-in here
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "onnx").mkdir(parents=True)
    (tmp_path / "out" / "README.md").write_text(CARD)
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "onnx" / "model.onnx").write_bytes(b"graph" * 100)
    return tmp_path / "out"


def test_every_file_goes_into_one_commit_of_a_private_repository(hub: Hub, folder: Path) -> None:
    check_target("team/model")
    assert upload(folder, "team/model", "tiny: quantize as onnx") == f"{hub.address}/team/model/commit/{'0' * 40}"
    assert [(made["organization"], made["name"], made["visibility"]) for made in hub.repositories] == [("team", "model", "private")]
    assert hub.commits == ["tiny: quantize as onnx"]
    assert hub.files == {name: (folder / name).read_bytes() for name in ("README.md", "config.json", "onnx/model.onnx")}
    assert len(hub.large) == 1
    assert hub.tokens == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("refuse", ["/repos/create", "/preupload/", "/commit/"])
def test_a_refusal_is_one_line_without_the_token(refuse: str, hub: Hub, folder: Path) -> None:
    hub.refuse = refuse
    with pytest.raises(InputError) as caught:
        upload(folder, "team/model", "m")
    (problem,) = caught.value.problems
    assert problem.key == "--push team/model"
    assert hub.address in problem.given
    assert str(folder) in problem.remedy
    assert SECRET not in str(caught.value)
    assert not hub.files


def test_a_server_that_is_not_there_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with pytest.raises(InputError) as caught:
        upload(folder, "team/model", "m")
    assert (len(caught.value.lines), SECRET in str(caught.value)) == (1, False)


@pytest.mark.parametrize(
    ("name", "token", "part"),
    [("model", SECRET, "no organization"), ("team/a--b", SECRET, "--"), ("team/model", None, "no token in HF_TOKEN")],
)
def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(
    name: str, token: str | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError) as caught:
        check_target(name)
    assert part in caught.value.problems[0].given
