"""An S3 server on the loopback, moto's, whose answers a test can disturb; no cloud is reached."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
