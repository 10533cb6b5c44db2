"""What the nodes of a run print: node 0 as it is, every other node's lines after its name."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

_CHUNK = 65536
_STDOUT, _STDERR = 1, 2


@dataclass(slots=True, kw_only=True)
class _Stream:
    """A pipe from a node, where its lines go, and the line that is not complete yet."""

    pipe: IO[bytes]
    prefix: bytes
    target: int
    rest: bytes = b""


class NodeOutput:
    """Forwards what nodes write into pipes, line by line, so that lines of two never mix."""

    def __init__(self, nodes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._selector = selectors.DefaultSelector()
        for node, process in nodes.items():
            for pipe, target in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
                if pipe is not None:
                    prefix = f"node {node}: ".encode()
                    stream = _Stream(pipe=pipe, prefix=prefix, target=target)
                    self._selector.register(pipe, selectors.EVENT_READ, stream)

    def forward(self, seconds: float) -> None:
        """Waits up to `seconds` for output and forwards what arrives first."""
        if not self._selector.get_map():
            time.sleep(seconds)
        else:
            for key, _ in self._selector.select(seconds):
                self._forward_from(key.data)

    def finish(self, seconds: float) -> None:
        """Forwards for up to `seconds` what is still in the pipes, and closes them."""
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            self.forward(left)
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()

    def _forward_from(self, stream: _Stream) -> None:
        chunk = os.read(stream.pipe.fileno(), _CHUNK)
        if not chunk:
            self._close(stream)
            return
        *lines, stream.rest = (stream.rest + chunk).split(b"\n")
        _write(stream, lines)

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        if stream.rest:
            _write(stream, [stream.rest])


def _write(stream: _Stream, lines: list[bytes]) -> None:
    data = b"".join(stream.prefix + line + b"\n" for line in lines)
    while data:
        try:
            data = data[os.write(stream.target, data) :]
        except BrokenPipeError:  # the reader is gone; the run continues
            return
