"""Trains from and into an object store that is far away, and measures the cost."""

# Two questions, each answered by pairs of neighbours in time: how many tokens per second a training
# has that reads its corpus from the store, relative to one with local files; and how long a step
# takes during a save into the store, relative to one without. The server takes processor time of
# the same machine: beside every run without the store, another process sends it the requests that
# the neighbour sent, at the same times, and drops the answers.

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data.indexed_dataset import EncodedDocuments, IndexedDatasetWriter
from paro.distributed.user_errors import run_script
from paro.errors import RunError, check_least, importing
from paro.report.log import print_line
from tools.bench.shared.far_store import BUCKET
from tools.bench.shared.turns import ROOT, rows_in
from tools.cluster.lifecycle import cluster
from tools.cluster.network import check_system
from tools.cluster.spec import ClusterSpec, address
from tools.shared.command_line import Parser
from tools.shared.output import write_json

HELPER = ("-m", "tools.bench.shared.far_store")
SPEC = ClusterSpec(nodes=2, ranks_per_node=1, inter="100mbit", name="store")
HOST, PORT, DELAY_SECONDS = address(1, 0), 9000, 0.05
ENVIRONMENT = {
    **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "OMP_NUM_THREADS": "1"},
    **{"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{HOST}:{PORT}"},
}
CORPUS_TOKENS = 2**25  # 64 MiB; the server reads the whole file for each block of 1 MiB
MODEL = (
    "--distributed-backend gloo --tokenizer-type NullTokenizer --vocab-size 4096 --num-layers 6 "
    "--hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 4 "
    "--global-batch-size 4 --num-workers 2 --lr 1e-3 --eval-iters 0 --peak-tflops 1 "
    "--log-interval 1 --lr-decay-style constant --split 1,0,0"
)
GOALS = {"tokens_per_second": "at least 0.98", "step_during_a_save": "at most 1.05"}


@dataclass(frozen=True, slots=True)
class Trained:
    """The milliseconds of the steps of a training, and the steps that ended during a save."""

    times: dict[int, float]
    during: list[int]
    requests: tuple[int, int, float]  # the first and last line of its requests, and its begin


def start(node: int, words: Sequence[object], log: Path) -> subprocess.Popen[bytes]:
    """Start a Python program in a node; its output goes into a file."""
    command = ["ip", "netns", "exec", SPEC.node(node), sys.executable, *map(str, words)]
    with log.open("w") as stream:
        env = {**os.environ, **ENVIRONMENT}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=stream)


def serve(folder: Path) -> None:
    """Start the server, which ends with its node; return when it has the corpus."""
    log = folder / "server.log"
    words = ("serve", HOST, PORT, DELAY_SECONDS, folder / "corpus", folder / "notes")
    server = start(1, (*HELPER, *words), log)
    while "open" not in log.read_text():
        if server.poll() is not None:
            raise RunError(f"the server has ended: {log.read_text()[-1000:]}")
        time.sleep(0.1)


def train(folder: Path, flags: Sequence[object], beside: Trained | None = None) -> Trained:
    """Train once; beside it, the requests of another training are sent once more."""
    notes, metrics, log = (folder / name for name in ("notes", "metrics.jsonl", "training.log"))
    cache = folder / "cache"
    metrics.unlink(missing_ok=True)
    first, begin, replay = len(notes.read_text().splitlines()), time.time(), None
    if beside is not None:
        replay = start(0, (*HELPER, "replay", notes, *beside.requests), folder / "replay.log")
    extra = ("--metrics-file", metrics, "--object-storage-cache-path", cache)
    status = start(0, ("pretrain_llama.py", *MODEL.split(), *flags, *extra), log).wait()
    if replay is not None and replay.wait() != 0:
        raise RunError(f"a request failed: {(folder / 'replay.log').read_text()[-1000:]}")
    shutil.rmtree(cache, ignore_errors=True)
    if status != 0:
        raise RunError(f"a training ended with status {status}: {log.read_text()[-1000:]}")
    times = {row["iteration"]: row["iteration_time_ms"] for row in rows_in(metrics)}
    last = len(notes.read_text().splitlines())
    return Trained(times, [*during_saves(log.read_text())], (first, last, begin))


def during_saves(log: str) -> Iterator[int]:
    """Yield the iterations whose line is between the begin and the end of a save."""
    is_saving = False
    for line in log.splitlines():
        if "saving checkpoint at iteration" in line:
            is_saving = True
        elif "successfully saved" in line:
            is_saving = False
        elif is_saving and (found := re.search(r"\] iteration +(\d+)/", line)):
            yield int(found[1])


def round_of(folder: Path, number: int, iterations: int) -> dict[str, Any]:
    """Train four times, with the store and next to it without; return the ratios."""
    trains: tuple[object, ...] = ("--train-iters", iterations)
    reads = (*trains, "--data-cache-path", folder / "order", "--data-path")
    from_store = train(folder, (*reads, f"s3://{BUCKET}/corpus/x"))
    from_files = train(folder, (*reads, folder / "corpus" / "x"), from_store)
    own, other = (sum(run.times[i] for i in run.times if i > 1) for run in (from_store, from_files))
    trains = (*trains, "--mock-data")
    saves = (f"s3://{BUCKET}/{number}", "--save-interval", iterations // 3, "--async-save")
    saving = train(folder, (*trains, "--save", *saves))
    idle = train(folder, trains, saving)
    if not saving.during:
        raise RunError("no step ended during a save: give more --iterations")
    steps = [[run.times[i] for i in saving.during] for run in (saving, idle)]
    ratios = (other / own, median(steps[0]) / median(steps[1]))
    return {
        **dict(zip(GOALS, ratios, strict=True)),
        "ms": {"from_store": own, "from_files": other, "during_saves": steps[0], "idle": steps[1]},
        "load": os.getloadavg()[0],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=f"{__doc__} Needs root and moto, and 10 minutes of two cores.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings; is emptied")
    add("--rounds", type=int, default=3, help="of four trainings; default 3")
    add("--iterations", type=int, default=48, help="of a training, with 3 saves; default 48")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    check_least(1, rounds=args.rounds)
    check_least(3, iterations=args.iterations)
    check_system()
    with importing("the study needs moto: pip install -r requirements-dev.txt"):
        import moto  # noqa: F401
    with suppress(FileNotFoundError):
        shutil.rmtree(args.folder)
    folder = args.folder.absolute()
    (folder / "corpus").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, 50, CORPUS_TOKENS).astype("<u2")
    lengths = np.full(len(ids) // 1024, 1024, dtype=np.int32)
    with IndexedDatasetWriter(folder / "corpus" / "x", np.dtype("<u2")) as writer:
        writer.add_documents(EncodedDocuments(ids, lengths, np.ones(len(lengths), dtype=np.int64)))
    rounds = []
    with cluster(SPEC):
        serve(folder)
        for number in range(args.rounds):
            rounds.append(round_of(folder, number, args.iterations))
            print_line(json.dumps(rounds[-1]))
    ratios = {name: median(found[name] for found in rounds) for name in GOALS}
    for name, goal in GOALS.items():
        print_line(f"{name}: {ratios[name]:.3f} of that without the store; the goal is {goal}")
    write_json(args.json, {**ratios, "rounds": rounds})


if __name__ == "__main__":
    run_script("study_store.py", main)
