"""A model hub on this machine: the few requests that the hub's client makes, answered from a directory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from skipdecode.models.loading import hub_files

_ports = [0]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _handler(models: dict[str, Path], new: Path | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            revision = re.search(r"/(?:revision|resolve|tree)/([^/]+)", path)
            if revision is not None and revision[1] not in ("main", COMMIT):
                return self._refuse("RevisionNotFound")
            for name, folder in models.items():
                if path.startswith(f"api/models/{name}/tree/"):
                    return self._json([_entry(f) for f in sorted(folder.iterdir())])
                if f"{path}/".startswith(f"api/models/{name}/"):
                    return self._json({"id": name, "sha": COMMIT, "siblings": []})
                if path.startswith(f"{name}/resolve/"):
                    return self._file(folder / path.split("/")[-1])
            return self._refuse("RepoNotFound")

        def do_POST(self) -> None:
            """What `create_repo` and `create_commit` ask for."""
            lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
            sent = [json.loads(line) for line in lines]
            if new is None or "Authorization" not in self.headers:
                self._refuse("GatedRepo")
            elif self.path == "/api/repos/create":
                (folder := new / sent[0]["name"]).mkdir(exist_ok=True)
                models[name := f"{sent[0]['organization']}/{folder.name}"] = folder
                (new / "asked.json").write_text(json.dumps(sent[0]))
                self._json({"url": f"http://{self.headers['Host']}/{name}"})
            elif "/commit/" not in self.path:  # how files are sent, and whether a card's metadata is valid
                files = sent[0].get("files", [])
                how = {"uploadMode": "regular", "shouldIgnore": False}
                self._json({"errors": [], "warnings": [], "files": [{"path": one["path"]} | how for one in files]})
            else:
                name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                for one in (line["value"] for line in sent if line["key"] == "file"):
                    (models[name] / one["path"]).write_bytes(base64.b64decode(one["content"]))
                self._json({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

        def do_HEAD(self) -> None:
            self.do_GET()

        def _json(self, value: object) -> None:
            self._answer(json.dumps(value).encode(), {})

        def _file(self, file: Path) -> None:
            if not file.is_file():
                return self._refuse("EntryNotFound")
            headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT}
            return self._answer(file.read_bytes(), headers)

        def _answer(self, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    return Handler


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


def _entry(file: Path) -> dict[str, object]:
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}


@contextmanager
def hub_of(models: dict[str, Path], new: Path | None = None) -> Iterator[str]:
    """Serve directories by hub id; yields the address. With a token, models are uploaded into the directory `new`."""
    server = ThreadingHTTPServer(("127.0.0.1", _ports[0]), _handler(models, new))
    _ports[0] = server.server_address[1]  # the same for all: the client keeps its first address in several places
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the hub's client in this process ask the server at `address`, with a cache of its own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(hub_files, "TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(hub_files, "_unreachable", {})
