"""A model hub on loopback: the four requests that `huggingface_hub` makes, and failures on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeModel:
    """One repository: its files, and whether its terms have to be accepted."""

    files: dict[str, bytes]
    licence: str = "mit"
    gated: bool = False
    revisions: tuple[str, ...] = ("main", COMMIT)


@dataclass
class FakeHub:
    """State of the server, open to tests."""

    models: dict[str, FakeModel] = field(default_factory=dict)
    accepted_tokens: set[str] = field(default_factory=set)
    failing_status: int | None = None
    served: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.served[f"{request.command} {path}"] += 1
        if self.failing_status is not None:
            return _reply(request, self.failing_status)
        for model_id, model in self.models.items():
            if path == f"/api/models/{model_id}":
                return _reply_json(request, _info(model_id, model))
            for prefix in (f"/api/models/{model_id}/revision/", f"/api/models/{model_id}/tree/"):
                if path.startswith(prefix):
                    if path.removeprefix(prefix) not in model.revisions:
                        return _reply(request, 404, {"X-Error-Code": "RevisionNotFound"})
                    answer = _tree(model) if "/tree/" in prefix else _info(model_id, model)
                    return _reply_json(request, answer)
            if path.startswith(f"/{model_id}/resolve/"):
                token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
                if model.gated and token not in self.accepted_tokens:
                    return _reply(request, 403 if token else 401, {"X-Error-Code": "GatedRepo"})
                return _send_file(request, model.files.get(path.split("/resolve/")[1].split("/", 1)[1]))
        return _reply(request, 404, {"X-Error-Code": "RepoNotFound"})


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A hub on a free port of loopback for the length of a `with` block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.handle(self)

        do_HEAD = do_GET

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _info(model_id: str, model: FakeModel) -> dict[str, Any]:
    return {
        "id": model_id,
        "sha": COMMIT,
        "gated": "manual" if model.gated else False,
        "cardData": {"license": model.licence},
        "config": json.loads(model.files.get("config.json", b"{}")),
        "siblings": [{"rfilename": name, "size": len(data)} for name, data in model.files.items()],
    }


def _tree(model: FakeModel) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in model.files.items()
    ]


def _send_file(request: BaseHTTPRequestHandler, data: bytes | None) -> None:
    if data is None:
        return _reply(request, 404, {"X-Error-Code": "EntryNotFound"})
    headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
    return _reply(request, 200, headers, data)


def _reply_json(request: BaseHTTPRequestHandler, content: object) -> None:
    _reply(request, 200, {"Content-Type": "application/json"}, json.dumps(content).encode())


def _reply(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str] | None = None, body: bytes = b""
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
