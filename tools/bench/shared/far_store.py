"""An S3 server, moto's, that is far away and notes its requests; and sends them to it once more."""

# python -m tools.bench.shared.far_store serve HOST PORT DELAY_SECONDS CORPUS NOTES
# python -m tools.bench.shared.far_store replay NOTES FIRST_LINE LAST_LINE BEGIN

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paro.files.object_store import StorePath, _file_system, path_of

BUCKET = "study"


def serve(host: str, port: str, delay: str, corpus: str, notes: str) -> None:
    """Serve the files of a folder as `corpus/` of the bucket; say `open` when they are there."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    is_open = threading.Event()

    def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if is_open.is_set():
            names = ("REQUEST_METHOD", "PATH_INFO", "HTTP_RANGE", "CONTENT_LENGTH")
            stream.write(json.dumps([time.time(), *(environ.get(name) for name in names)]) + "\n")
            time.sleep(float(delay))
        answered: Iterable[bytes] = app(environ, start)
        return answered

    with Path(notes).open("w", buffering=1, encoding="utf-8") as stream:
        server = make_server(host, int(port), answer, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _file_system("s3", os.getpid()).makedirs(BUCKET, exist_ok=True)
        for path in Path(corpus).iterdir():
            path_of(f"s3://{BUCKET}/corpus/{path.name}").write_bytes(path.read_bytes())
        is_open.set()
        sys.stdout.write("open\n")
        sys.stdout.flush()
        threading.Event().wait()


def replay(notes: str, first: str, last: str, begin: str) -> None:
    """Send the requests of some lines again, as long after now as they came after `begin`."""
    shift = time.time() - float(begin)
    lines = Path(notes).read_text(encoding="utf-8").splitlines()
    with ThreadPoolExecutor(16) as threads:
        sent = [
            threads.submit(_send, shift, *json.loads(line))
            for line in lines[int(first) : int(last)]
        ]
    for each in sent:
        each.result()


def _send(shift: float, at: float, method: str, path: str, span: str | None, size: str) -> None:
    """Repeat a request of the time `at`, later by `shift`; writes go to another object."""
    time.sleep(max(0.0, at + shift - time.time()))
    if method == "PUT":
        path_of(f"s3://{BUCKET}/unread/{at}").write_bytes(bytes(int(size)))
    elif limits := re.fullmatch(r"bytes=(\d+)-(\d+)", span or ""):
        StorePath(f"s3:/{path}").read_range(int(limits[1]), int(limits[2]) + 1)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "replay": replay}
    commands[sys.argv[1]](*sys.argv[2:])
