"""The part of W&B's API that keeps the history of one run, served on this machine."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
