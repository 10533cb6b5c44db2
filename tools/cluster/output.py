"""What the nodes of a run print: node 0 as it is, every other node's lines after its name."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Thread
from typing import IO

_STDOUT, _STDERR = 1, 2


class NodeOutput:
    """Forwards what nodes write into pipes, line by line, so that lines of two never mix."""

    def __init__(self, nodes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._writing = Lock()
        self._threads = [
            Thread(target=self._forward, args=(pipe, f"node {node}: ", target), daemon=True)
            for node, process in nodes.items()
            for pipe, target in ((process.stdout, _STDOUT), (process.stderr, _STDERR))
            if pipe is not None
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float) -> None:
        """Waits for up to `seconds` until all that is still in the pipes is forwarded."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _forward(self, pipe: IO[bytes], prefix: str, target: int) -> None:
        with pipe:
            for line in pipe:
                data = prefix.encode() + line.removesuffix(b"\n") + b"\n"
                with self._writing, suppress(OSError):  # of a reader that has ended, or a full disk
                    while data:
                        data = data[os.write(target, data) :]
