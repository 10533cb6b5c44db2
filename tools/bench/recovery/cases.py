"""The trainings of the study of recovery, and how many failures of which kind each one gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.cluster.spec import ClusterSpec

ITERATIONS = 60
INTER = "100mbit"
NUM_UNITS = 8  # of the model: a gate inside an update passes over some
# The model of the comparison with other frameworks: 6.8M parameters.
MODEL = (
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 4096 "
    "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 688 "
    "--seq-length 128 --micro-batch-size 1 --lr 0.001 --log-interval 1 --num-workers 0 "
    f"--eval-iters 0 --peak-tflops 1 --distributed-timeout-minutes 1 --train-iters {ITERATIONS} "
    "--log-timers-to-tensorboard"
)
KINDS = {
    "rank": 10,
    "node": 10,
    "rank in update": 5,
    "node in update": 5,
    "rank in all-gather": 4,
    "node in all-gather": 4,
    "rank in local copy": 4,
    "rank in save": 3,
    "rank in recovery": 4,
    "stop": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training; in `kinds` "rank" and "node" are killed, "stop" is SIGSTOP."""

    name: str
    nodes: int = 2
    ranks_per_node: int = 4
    strategy: str = "III"
    own_flags: str = "--paro-survive 1"
    save_interval: int | None = 20
    least_nodes: int = 0  # to train with; by default all
    kinds: Mapping[str, int] = field(default_factory=lambda: KINDS)
    precision: float = 0.0  # of losses, relative; 0: the same text

    def __post_init__(self) -> None:
        if self.least_nodes == 0:
            object.__setattr__(self, "least_nodes", self.nodes)

    @property
    def spec(self) -> ClusterSpec:
        return ClusterSpec(
            nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=INTER, name="recovery"
        )

    def flags(self, folder: Path, own_flags: str | None = None) -> list[str]:
        """Return the flags of pretrain_llama.py; `own_flags` instead of the case's."""
        own_flags = self.own_flags if own_flags is None else own_flags
        batch = 2 * self.nodes * self.ranks_per_node
        if self.least_nodes < self.nodes:
            batch = 2 * math.lcm(*range(self.least_nodes, self.nodes + 1)) * self.ranks_per_node
        flags = [*MODEL.split(), "--global-batch-size", str(batch)]
        flags += ["--paro-strategy", self.strategy, "--paro-group-size", str(self.ranks_per_node)]
        flags += own_flags.split()
        if own_flags:
            flags += ["--non-persistent-local-ckpt-dir", str(folder / "memory")]
        if self.save_interval is not None:
            checkpoints = str(folder / "checkpoints")
            flags += ["--save", checkpoints, "--load", checkpoints]
            flags += ["--save-interval", str(self.save_interval)]
        return flags

    def skips(self, point: str) -> int:
        """Return how many calls a gate may pass over."""
        return NUM_UNITS if point in ("update", "all-gather") else 1

    def agrees(self, found: Sequence[str], want: Sequence[str]) -> bool:
        """Return whether loss and gradient norm equal those of the undisturbed training."""
        if self.precision == 0.0:
            return list(found) == list(want)
        pairs = zip(map(float, found), map(float, want), strict=True)
        return all(math.isclose(a, b, rel_tol=self.precision) for a, b in pairs)


_DISK = {"rank": 15, "node": 15}
CASES = (
    Case(name="III"),
    Case(name="NII", strategy="NII"),
    Case(name="NNI", strategy="NNI"),
    Case(name="2,2,4", nodes=4, ranks_per_node=2, strategy="2,2,4"),
    Case(
        name="III, two of three nodes",
        nodes=3,
        ranks_per_node=2,
        own_flags="--paro-survive 1 --paro-elastic",
        least_nodes=2,
        kinds={"rank": 5, "node": 15, "node in update": 5},
        precision=1e-5,
    ),
    Case(
        name="IIG",  # a lost node held what nobody else has
        strategy="IIG",
        own_flags="--non-persistent-ckpt-type local",
        save_interval=5,
        kinds={"rank": 8, "node": 6},
    ),
    Case(name="III, from disk", own_flags="", save_interval=5, kinds=_DISK),
    Case(name="III, plain torchrun", own_flags="", save_interval=None, kinds=_DISK),
)
