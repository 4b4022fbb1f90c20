#!/usr/bin/env bash
# wandb 0.31.0: `wandb sync` of an offline run whose artifact files are gone says "Finished syncing", exits with 0 and marks the run as synced.
# The guesses were that the folder of an offline run is all of it, so that it can be copied to a machine that has a connection, and that
# sync fails where a file of an artifact is missing.
#
# Seen (2026-11-28): the folder `offline-run-...` holds config, summary, history and the manifest of the artifact. The files of the artifact
# are copied to ~/.local/share/wandb/artifacts/staging (WANDB_DATA_DIR), and the .wandb file holds their absolute paths; with
# `add_file(..., policy="immutable")` it holds the path of the original. If that file is not there, sync creates the artifact on the server,
# neither uploads nor commits it, prints no warning, and leaves `.wandb.synced`, so that a later sync passes the run over.
# The server here is a stand-in of some lines: it answers the queries of wandb-core and notes what it is sent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq wandb==0.31.0
cd "$folder"
env -u WANDB_MODE -u WANDB_DIR -u WANDB_DATA_DIR "$folder/venv/bin/python" - <<'PYTHON'
import gzip
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

seen = []


def reply(query, variables, up):
    if "upsertBucket" in query:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "x", "name": variables["name"], "displayName": "n", "historyLineCount": 0, "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}
    if "createArtifact(" in query:
        sequence = {"id": "s", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": "a", "state": "PENDING", "artifactSequence": sequence}}}
    if "createArtifactManifest" in query:
        file = {"id": "f", "name": "m", "displayName": "m", "uploadUrl": up + "manifest", "uploadHeaders": [], "storagePath": "m"}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
    if "createArtifactFiles" in query:
        names = [one["name"] for one in variables["input"]["artifactFiles"]]
        nodes = [{"id": "f", "name": name, "displayName": name, "uploadUrl": up + name, "uploadHeaders": [], "storagePath": name} for name in names]
        edges = [{"node": node | {"artifact": {"id": "a"}, "uploadMultipartUrls": None}} for node in nodes]
        return {"createArtifactFiles": {"files": {"edges": edges}}}
    if "commitArtifact" in query:
        return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
    if "createRunFiles" in query:
        files = [{"name": name, "uploadUrl": up + name} for name in variables["files"]]
        return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
    return {"serverInfo": {"features": []}, "model": None}


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def answer(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self):
        self.body()
        seen.append(self.path)
        self.answer({})

    def do_POST(self):
        data = self.body()
        if self.path != "/graphql":
            return self.answer({"exitcode": None, "limits": {}})
        asked = json.loads(data)
        seen.append(asked.get("operationName"))
        self.answer({"data": reply(asked["query"], asked.get("variables") or {}, f"http://127.0.0.1:{server.server_port}/up/")})

    def handle(self):
        try:
            super().handle()
        except ConnectionError:  # wandb-core ends with open connections
            pass

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
home = pathlib.Path.cwd() / "home"
home.mkdir()
variables = {"HOME": str(home), "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
code = """
import pathlib
import wandb

print("wandb", wandb.__version__)
pathlib.Path("weights.bin").write_text("w" * 1000)
run = wandb.init(project="p", id="abc", mode="offline", settings=wandb.Settings(silent=True, console="off"))
artifact = wandb.Artifact("weights", type="model")
artifact.add_file("weights.bin")
run.log_artifact(artifact)
run.finish()
"""
subprocess.run([sys.executable, "-c", code], cwd=home, env={**os.environ, **variables}, check=True)
[folder] = home.glob("wandb/offline-run-*")
inside = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"w" * 1000]
copy = pathlib.Path.cwd() / "another-machine" / folder.name
shutil.copytree(folder, copy)


def sync(path):
    """Returns whether the artifact was uploaded, whether it was committed, the exit status and whether the run counts as synced."""
    seen.clear()
    done = subprocess.run([sys.executable, "-m", "wandb", "sync", path], env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)
    print(done.stdout + done.stderr, end="")
    assert "Finished syncing" in done.stdout + done.stderr, "the behaviour has changed"
    assert "CreateArtifact" in seen, "the behaviour has changed"
    return "/up/weights.bin" in seen, "CommitArtifact" in seen, done.returncode, any(path.glob("*.wandb.synced"))


whole = sync(folder)
shutil.rmtree(home / ".local")  # another machine has no such folder
lost = sync(copy)
print(f"copies of the file in the folder of the run: {len(inside)}; (uploaded, committed, status, marked as synced): {whole}, then {lost}")
assert not inside and whole == (True, True, 0, True) and lost == (False, False, 0, True), "the behaviour has changed"
PYTHON
