"""Times preprocess_data.py against its bare tokenizer, in pairs, and measures its memory."""

# The bare tokenizer is the library alone: as many processes, each with its share of the texts in
# memory already, calling `encode_batch` and dropping the result; timed from when all are ready
# until the last one is done. The other of the pair is the whole command, in wall-clock time:
# starting Python and its workers, reading, writing, renaming. Where other programs share the cores
# wall-clock time says little; processor time, over all processes, is compared as well.

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.corpus import read_batches, texts_of
from data.sources import SourceChunk
from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least
from paro.report.log import print_line
from tools import preprocess_data
from tools.bench.shared.turns import order_of_round
from tools.preprocessing.encode import EncodingPlan, tokenizer_of
from tools.shared.command_line import Parser
from tools.shared.output import write_json

SCRIPT = Path(preprocess_data.__file__)


def shares_of_texts(
    chunks: Sequence[SourceChunk], plan: EncodingPlan, number: int, of: int
) -> list[list[str]]:
    """Return every `of`-th batch of the corpus, starting with batch `number`, as texts."""
    batches = islice(read_batches(chunks, plan.keys), number, None, of)
    return [
        [text for texts in texts_of(batch, plan.keys) for by_key in texts.by_key for text in by_key]
        for batch in batches
    ]


class TimedRun(NamedTuple):
    """Cost of one contender: wall-clock and processor seconds, and bytes of a process."""

    seconds: float
    cpu_seconds: float
    largest_process: int = 0


def encode_share(
    chunks: Sequence[SourceChunk], plan: EncodingPlan, number: int, used: Any, ready: Barrier
) -> None:
    """Encode a share of the corpus by the bare tokenizer: main function of a process."""
    tokenizer = tokenizer_of(plan.tokenizer)
    share = shares_of_texts(chunks, plan, number, len(used))
    ready.wait()
    begin = time.process_time()
    for texts in share:
        tokenizer.encode_batch(texts)
    used[number] = time.process_time() - begin


def time_bare(chunks: Sequence[SourceChunk], plan: EncodingPlan, workers: int) -> TimedRun:
    """Return the cost of the tokenizer alone in `workers` processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in the workers of preprocess_data.py
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(workers + 1)
    used = context.Array("d", workers)
    processes = [
        context.Process(target=encode_share, args=(chunks, plan, number, used, ready))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    ready.wait()
    begin = time.perf_counter()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise UserError("a process of the bare tokenizer failed, see above")
    return TimedRun(time.perf_counter() - begin, sum(map(float, used[:])))


def time_command(words: Sequence[str]) -> TimedRun:
    """Return the cost of a whole run of preprocess_data.py, including its workers."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(SCRIPT), *words, "--output-prefix", f"{folder}/out"]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)  # includes its workers: they are its children
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            raise UserError(f"preprocess_data.py failed: {errors.read().strip()}")
    return TimedRun(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def run_rounds(
    words: Sequence[str], job: preprocess_data.Job, workers: int, rounds: int
) -> list[dict[str, float]]:
    """Return the figures of both, round by round; the one that starts alternates."""
    rows = []
    contenders: dict[str, Callable[[], TimedRun]] = {
        "bare": partial(time_bare, job.chunks, job.plan, workers),
        "command": partial(time_command, words),
    }
    for number in range(rounds):
        turns = {name: contenders[name]() for name in order_of_round([*contenders], number)}
        bare, command = turns["bare"], turns["command"]
        rows.append(
            {
                "bare": bare.seconds,
                "command": command.seconds,
                "ratio": bare.seconds / command.seconds,
                "cpu_ratio": bare.cpu_seconds / command.cpu_seconds,
                "largest_process": command.largest_process,
            }
        )
        print_line(
            f"round {number + 1}: bare tokenizer {bare.seconds:.2f} s (processors "
            f"{bare.cpu_seconds:.2f} s), command {command.seconds:.2f} s "
            f"({command.cpu_seconds:.2f} s): {bare.seconds / command.seconds:.3f} of the bare "
            f"tokenizer's speed, largest process {command.largest_process / 1e6:.0f} MB"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        description=(
            "Times preprocess_data.py against the bare tokenizer. All flags of preprocess_data.py "
            "but --output-prefix are understood."
        ),
        usage="%(prog)s [--rounds N] [--json FILE] [flag of preprocess_data.py ...]",
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs to time (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    own, words = parser.parse_known_args(argv)
    check_least(1, rounds=own.rounds)
    args = preprocess_data.make_parser().parse_args([*words, "--output-prefix", "unused"])
    job = preprocess_data.job_of(args)
    rows = run_rounds(words, job, args.workers, own.rounds)
    ratio = statistics.median(row["ratio"] for row in rows)
    cpu_ratio = statistics.median(row["cpu_ratio"] for row in rows)
    speed = job.num_bytes / 1e6 / statistics.median(row["command"] for row in rows)
    print_line(
        f"{job.num_bytes / 1e6:.1f} MB, {args.workers} workers: {speed:.2f} MB/s, {ratio:.3f} of "
        f"the bare tokenizer's speed (median of {own.rounds}), {cpu_ratio:.3f} by processor time"
    )
    figures = {"bytes": job.num_bytes, "workers": args.workers, "ratio": ratio, "rounds": rows}
    write_json(own.json, figures | {"cpu_ratio": cpu_ratio})


if __name__ == "__main__":
    run_script("bench_preprocess.py", main)
