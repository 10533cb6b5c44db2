"""Records what the steps of a fixed set of runs compute and send, or compares it bit for bit."""

# To check that a change does not alter behaviour:
#   python tools/bench/fixed_runs.py record before.json    (before it)
#   python tools/bench/fixed_runs.py compare before.json   (after it, on the same machine)
# Every run is pretrain_llama.py under torchrun on CPU ranks. Bits depend on the machine and on
# torch, so a record names both.

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError
from paro.strategy import legal_letters
from tools.bench.shared.turns import rows_in, start_training, torchrun
from tools.shared.command_line import Parser
from tools.shared.output import write_json

FIELDS = (
    *("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate"),
    *("model_state_bytes", "intra_bytes", "inter_bytes"),
)
# Odd sizes, so that shards are padded and split inside parameters.
SHARED = (
    "--distributed-backend gloo --mock-data --vocab-size 90 --make-vocab-size-divisible-by 7 "
    "--num-layers 3 --hidden-size 24 --ffn-hidden-size 44 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-style cosine --weight-decay 0.1 "
    "--log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --peak-tflops 1 "
    "--terminal lines"
)
# Numbers of heads, columns and vocabulary rows that rotation can divide.
ROTATED = "--vocab-size 95 --make-vocab-size-divisible-by 4 --paro-materialize rotate"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRun:
    """One training: its name, its flags in addition to `SHARED`, and whether it saves or loads."""

    name: str
    flags: str
    num_ranks: int = 4
    save: bool = False
    load: bool = False  # what the previous run with `save` saved


def fixed_runs() -> Iterator[FixedRun]:
    """Yield all runs, in order; a run that loads follows the one that saves."""
    grouped = "--paro-group-size 2"
    yield FixedRun(name="one process", flags="", num_ranks=1)
    for letters in legal_letters():
        yield FixedRun(name=letters, flags=f"{grouped} --paro-strategy {letters}")
        yield FixedRun(name=f"{letters} bf16", flags=f"{grouped} --paro-strategy {letters} --bf16")
    for collective in ("flat", "ring", "h-ring", "ho-ring"):
        flags = f"{grouped} --paro-strategy NIG --paro-collective {collective}"
        yield FixedRun(name=f"NIG {collective}", flags=flags)
    yield FixedRun(name="degrees 1,2,4", flags=f"{grouped} --paro-strategy 1,2,4")
    yield FixedRun(name="IIG without overlap", flags=f"{grouped} --paro-prefetch-units 0")
    for name, flags in (
        ("tied", "--tie-embeddings-and-output-weights"),
        ("recomputed", "--recompute-granularity full"),
        ("recomputed in attention", "--recompute-activations"),
        ("fp16", "--fp16 --initial-loss-scale 1024"),
        ("bf16 accumulators", "--bf16 --grad-reduce-in-bf16"),
        ("fp32 gradients", "--bf16 --accumulate-allreduce-grads-in-fp32"),
    ):
        yield FixedRun(name=f"IIG {name}", flags=f"{grouped} {flags}")
    for letters in ("III", "IIG"):
        for way in ("", " --paro-rotate-in-place"):
            flags = f"{grouped} --paro-strategy {letters} {ROTATED}{way}"
            yield FixedRun(name=f"{letters} rotated{way and ' in place'}", flags=flags)
    save = f"{grouped} --save-interval 2 --exit-interval 2"
    yield FixedRun(name="IIG saved", flags=save, save=True)
    yield FixedRun(name="IIG resumed", flags=grouped, load=True)
    yield FixedRun(name="NNG resumed from IIG", flags=f"{grouped} --paro-strategy NNG", load=True)
    yield FixedRun(name="one process resumed from IIG", flags="", num_ranks=1, load=True)


def train(run: FixedRun, folder: Path) -> list[dict[str, Any]]:
    """Return the `FIELDS` of every step of a run; `UserError` if the run fails."""
    metrics, log = folder / "metrics.jsonl", folder / "log"
    metrics.unlink(missing_ok=True)
    flags = [*SHARED.split(), *run.flags.split(), "--metrics-file", str(metrics)]
    if run.save:
        flags += ["--save", str(folder / "saved")]
    if run.load:
        flags += ["--load", str(folder / "saved")]
    command = [sys.executable, *torchrun(run.num_ranks), "pretrain_llama.py", *flags]
    if status := start_training(command, log).wait():
        text = log.read_text(errors="replace")
        raise UserError(f"run {run.name!r} ended with {status}:\n{text[-4000:]}")
    return [{name: row[name] for name in FIELDS} for row in rows_in(metrics)]


def machine() -> dict[str, str]:
    """Return the machine and the version of torch, on which bits of a record depend."""
    import torch  # imported late, so that flags are parsed without waiting for torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def train_all() -> dict[str, list[dict[str, Any]]]:
    """Train every run; progress goes to stderr."""
    runs = list(fixed_runs())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs, start=1):
            print(f"{number}/{len(runs)} {run.name}", file=sys.stderr, flush=True)
            results[run.name] = train(run, Path(folder))
    return results


def differences(
    before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Yield a line for every figure that differs, and for every run that only one side has."""
    for name in before.keys() | after.keys():
        if name not in before or name not in after:
            yield f"{name}: only {'after' if name in after else 'before'}"
            continue
        if len(before[name]) != len(after[name]):
            yield f"{name}: {len(before[name])} steps before, {len(after[name])} after"
        for old, new in zip(before[name], after[name], strict=False):
            for field in FIELDS:
                if old[field] != new[field]:
                    step = f"{name}, iteration {old['iteration']}"
                    yield f"{step}: {field} {old[field]!r} before, {new[field]!r} after"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the record: written, or read and compared with")
    args = parser.parse_args(argv)
    if args.what == "record":
        runs = train_all()
        record = {"machine": machine(), "runs": runs}
        write_json(args.file, record)
        print(f"{args.file}: {len(runs)} runs")
        return
    record = json.loads(args.file.read_text(encoding="utf-8"))
    if record["machine"] != machine():
        print(f"note: recorded on {record['machine']}, this is {machine()}")
    after = train_all()
    found = list(differences(record["runs"], after))
    for line in found:
        print(line)
    print(f"{len(after)} runs, {len(found)} differences")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    run_script("fixed_runs.py", main)
