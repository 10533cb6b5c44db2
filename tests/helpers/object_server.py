"""Servers on the loopback: moto's S3, whose answers a test can disturb, and a part of W&B's API."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from werkzeug.serving import BaseWSGIServer, make_server

from paro.files.object_store import _file_system, path_of

BUCKET = "bucket"
SECRET = "wJalrXUtnFEMI"
# What a user's environment has; the libraries read it.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATEST",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

CODES = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied", "400": "ExpiredToken"}
Answer = Callable[..., Iterable[bytes]]


@dataclass
class Fault:
    """A fault of the next requests whose method and path match."""

    how: str
    method: str
    path: str
    times: int

    def matches(self, method: str, path: str) -> bool:
        return self.method in ("", method) and self.path in path


@dataclass
class ObjectServer:
    """A server whose next answers to some requests are faults."""

    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _down_until: float = 0.0
    _released: threading.Event = field(default_factory=threading.Event)

    def fails(self, how: str, method: str = "", path: str = "", times: int = 1) -> None:
        """The next requests of a method and a part of a path fail: `how` is a status, "truncated"
        or "hangs"."""
        self._faults.append(Fault(how, method, path, times))

    def recovers(self) -> None:
        """From now on all requests are answered."""
        self._faults.clear()
        self._down_until = 0.0

    def stops(self, seconds: float) -> None:
        """No request is answered before the time has passed."""
        self._down_until = time.monotonic() + seconds

    def fetched(self, path: str) -> list[str]:
        """The ranges in which a path was read."""
        return [part for method, at, part in self.requests if method == "GET" and at == path]

    def __call__(self, app: Answer, environ: Mapping[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        time.sleep(max(0.0, self._down_until - time.monotonic()))
        with self._lock:
            faults = ((n, f) for n, f in enumerate(self._faults) if f.matches(method, path))
            number, fault = next(faults, (0, None))
            if fault is not None:
                fault.times -= 1
                if fault.times == 0:
                    del self._faults[number]
        if fault is not None:
            return self._fail(fault.how, app, environ, start)
        return app(environ, start)

    def _fail(self, how: str, app: Answer, environ: Any, start: Any) -> Iterable[bytes]:
        if how == "hangs":
            self._released.wait(600)
            return app(environ, start)
        if how == "truncated":
            content = b"".join(app(environ, start))
            return [content[: len(content) // 2]]
        code = CODES[how]
        start(f"{how} {code}", [("Content-Type", "application/xml")])
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]

    @contextmanager
    def running(self) -> Iterator[ObjectServer]:
        """Serves a bucket until the block ends, in which this environment is that of a user."""
        from moto.server import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app = DomainDispatcherApplication(create_backend_app)
        server: BaseWSGIServer = make_server(
            "127.0.0.1", 0, lambda environ, start: self(app, environ, start), threaded=True
        )
        server.daemon_threads = True  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
        try:
            with mock.patch.dict(os.environ, {**ENVIRONMENT, **place}):
                _file_system.cache_clear()
                _file_system("s3", os.getpid()).makedirs(BUCKET, exist_ok=True)
                yield self
        finally:
            _file_system.cache_clear()
            self._released.set()
            server.shutdown()


def upload(folder: Path, url: str) -> None:
    """Copies the files of a folder."""
    for path in folder.iterdir():
        if path.is_file():
            (path_of(url) / path.name).write_bytes(path.read_bytes())


class WandbServer(ThreadingHTTPServer):
    """`history` holds a line of JSON for every step, as wandb sends it."""

    daemon_threads = True

    def __init__(self, *, rewinds: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.rewinds = rewinds
        self.history: list[str] = []

    def values(self, tag: str) -> dict[int, float]:
        rows = map(json.loads, self.history)
        return {row["_step"]: row[tag] for row in rows}

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of an answer to a GraphQL operation."""
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}
        name = variables.get("name") or variables.get("runName")
        run = {"id": "1", "name": name, "displayName": name, "config": "{}", "project": project}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": run, "inserted": not self.history}}
        if operation == "RunResumeStatus":
            status = run | {
                "historyLineCount": len(self.history),
                "historyTail": json.dumps(self.history[-1:]),
                "summaryMetrics": "{}",
                "wandbConfig": '{"t": 1}',
                **dict.fromkeys(("eventsLineCount", "logLineCount"), 0),
                "eventsTail": "[]",
                "tags": [],
            }
            return {"model": project | {"bucket": status if self.history else None}}
        if operation == "RewindRun" and self.rewinds:
            last = variables["metricValue"]
            self.history[:] = [row for row in self.history if json.loads(row)["_step"] <= last]
            rewound = run | {"historyLineCount": len(self.history)}
            return {"rewindRun": {"rewoundRun": rewound}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": self.url} for file in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        content = self._content()
        answer: dict[str, Any] = {}
        if self.path.startswith("/graphql"):
            asked = json.loads(content)
            data = self.server.answer(asked["operationName"], asked.get("variables") or {})
            answer = {"data": data} if data else {"data": None, "errors": [{"message": "unknown"}]}
        elif self.path.endswith("/file_stream"):
            files = json.loads(content).get("files") or {}
            if sent := files.get("wandb-history.jsonl"):
                self.server.history[sent["offset"] :] = sent["content"]
        self._reply(answer)

    def do_PUT(self) -> None:
        self._content()
        self._reply({})

    def _content(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return (
            gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content
        )

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def wandb_server(*, rewinds: bool = True) -> Iterator[WandbServer]:
    server = WandbServer(rewinds=rewinds)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
