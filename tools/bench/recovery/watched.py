"""A training in an emulated cluster that is disturbed, and its output."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.bench.recovery.gated import GATE, OPENED, REACHED
from tools.cluster.agents import Agents
from tools.cluster.processes import processes_in
from tools.cluster.spec import ClusterSpec

GATED = Path(__file__).with_name("gated.py")
_LOOK_SECONDS = 0.02
_ITERATION = re.compile(r"\] iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ")
_RECOVERED = re.compile(
    r"recovered iteration (\d+) from local copies: (\S+ \S+) from the ranks' own nodes, "
    r"(\S+ \S+) from other nodes, in (\S+) s"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One printed iteration."""

    iteration: int
    loss: str
    grad_norm: str
    at: float  # time.monotonic


class Watched:
    """A training under elastic agents in a folder, which is emptied first."""

    def __init__(
        self, spec: ClusterSpec, flags: list[str], folder: Path, *, least_nodes: int | None = None
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self.memory = folder / "memory"
        self.metrics = folder / "metrics.jsonl"
        argv = [str(GATED), str(folder), str(self.memory), *flags]
        argv += ["--metrics-file", str(self.metrics)]
        self.agents = Agents(spec, argv, folder, least_nodes=least_nodes)
        self.seen: list[Seen] = []
        self._read = dict.fromkeys(range(spec.nodes), 0)

    def look(self) -> None:
        """Read the output since the last call."""
        for node, begin in self._read.items():
            path = self.folder / f"node{node}.log"
            if not path.exists():
                continue
            with path.open("rb") as log:
                log.seek(begin)
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[node] = begin + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if found := _ITERATION.search(line):
                    number, loss, norm = found.groups()
                    self.seen.append(Seen(int(number), loss, norm, time.monotonic()))

    def newest(self) -> int:
        """Return the newest iteration that was ever printed."""
        return max((seen.iteration for seen in self.seen), default=0)

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Look until it holds; False if all agents ended or the time is over."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or not self.agents.running():
                self.look()
                return holds()
            time.sleep(_LOOK_SECONDS)
            self.look()
        return True

    def text(self) -> str:
        """Return all that was printed."""
        logs = sorted(self.folder.glob("node*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def recoveries(self) -> list[tuple[int, float]]:
        """Return the iteration and the seconds of every recovery from memory."""
        return [(int(found[1]), float(found[4])) for found in _RECOVERED.finditer(self.text())]

    # Faults

    def set_gate(self, point: str, rank: int, *, skip: int = 0) -> None:
        (self.folder / REACHED).unlink(missing_ok=True)
        written = self.folder / "gate.new"
        written.write_text(json.dumps({"point": point, "rank": rank, "skip": skip}))
        written.replace(self.folder / GATE)

    def reaches_gate(self, seconds: float) -> bool:
        return self.wait_until((self.folder / REACHED).exists, seconds)

    def open_gate(self) -> None:
        (self.folder / GATE).unlink(missing_ok=True)

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> bool:
        """Send a rank a signal; False if it has ended."""
        pid = self.agents.ranks().get(rank)
        if pid is None:
            return False
        os.kill(pid, number)
        return True

    def lose_node(self, node: int) -> None:
        """End the node's processes and delete its memory at once."""
        self.agents.lose(node)
        for path in self.memory.glob(f"*-{self.agents.spec.node(node)}"):
            shutil.rmtree(path)

    def left_over(self) -> list[str]:
        """List processes, files of local copies and readers of other nodes' files after the end."""
        spec = self.agents.spec
        pids = processes_in(map(spec.node, range(spec.nodes)), started_by_run=spec.name)
        left = [f"process {pid}" for pid in pids]
        left += [f"file {path.name}" for path in self.memory.rglob("*") if path.is_file()]
        if (self.folder / OPENED).exists():
            left.append("a rank has opened the folder of another node")
        return left
