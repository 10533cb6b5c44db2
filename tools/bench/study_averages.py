"""Compares averaged weights of a constant learning rate with a decay of the learning rate."""

# One process a training, in fp32. Trainings of a seed have equal samples and differ in their last
# fifth alone: there the rate stays, with an average of the weights and saves to be merged, or falls
# to 0 in a line. All held-out samples are read by every evaluation.

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from paro.errors import RunError, UserError, check_least
from paro.files.schema import read_json
from paro.report.log import print_line
from tools.bench.shared.trainings import QUICKSTART, data_flags
from tools.bench.shared.turns import start_training
from tools.bench.study_optimizers import FLAGS
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table, write_json, write_text

DESCRIPTION = """\
Trains a small model with a constant learning rate and with one that falls to 0 over the last fifth,
and compares their held-out losses with those of the constant run's average (EMA) and of its last
checkpoints, merged. The text is the quickstart's (make quickstart). --folder gets losses.json and
report.md; seeds that are in losses.json are not trained again.

  python tools/bench/study_averages.py --folder runs/averages
  python tools/bench/study_averages.py --folder runs/averages-quickstart \\
      --model quickstart --train-iters 300 --lr 1e-3
"""
DECAYED, CONSTANT, AVERAGED = "decay", "constant rate", "constant rate, EMA"
MERGES = (("uniform", 2), ("uniform", 4), ("uniform", 8), ("1-sqrt", 8))
NUM_SAVES = 8  # in the last fifth
SMALL = "--num-layers 4 --hidden-size 128"  # 1.8 million parameters
MODELS = {"small": SMALL, "quickstart": "--num-layers 6 --hidden-size 256"}


def flags_of(
    seed: int, iterations: int, lr: float, saves: Path | None, model: str = "small"
) -> list[str]:
    """Return the flags of a training: with a decay, or with an average and saves to a folder."""
    tail, flags = iterations // 5, FLAGS.replace("cosine", "WSD --lr-wsd-decay-style linear")
    flags = flags.replace(SMALL, MODELS[model])
    flags += f" --lr {lr:g} --min-lr 0 --seed {seed} --train-iters {iterations} --eval-interval 0"
    if saves is None:
        return f"{flags} --lr-wsd-decay-iters {tail}".split()
    flags += (
        f" --lr-wsd-decay-iters 1 --lr-decay-iters {iterations + 1} --override-opt_param-scheduler"
    )
    flags += f" --ema-decay {1 - 2 / tail:g} --eval-ema --save-interval {tail // NUM_SAVES} --save"
    return [*flags.split(), str(saves)]


def run(words: Sequence[str], log: Path) -> tuple[float, ...]:
    """Run a script; return the held-out losses of the last evaluation that it prints, if any."""
    if start_training([sys.executable, *words], log).wait() != 0:
        raise RunError(f"{words[0]} failed, {log} says why")
    lines = [line for line in log.read_text().splitlines() if "validation loss at" in line]
    return tuple(map(float, re.findall(r"(?:value|weights): ([\d.E+-]+)", (lines or [""])[-1])))


def losses_of(
    seed: int, iterations: int, lr: float, model: str, data: Sequence[str], out: Path
) -> dict[str, float]:
    """Train a seed twice, merge its last checkpoints; return held-out losses by kind."""
    out.mkdir(parents=True, exist_ok=True)
    saves = out / "saves"
    if saves.exists():
        raise UserError(f"{saves} is left of a study that was stopped: remove it")
    decay = [*flags_of(seed, iterations, lr, None, model), *data]
    (decayed,) = run(["pretrain_llama.py", *decay], out / "decay.log")
    constant = [*flags_of(seed, iterations, lr, saves, model), *data]
    losses = {DECAYED: decayed}
    losses[CONSTANT], losses[AVERAGED] = run(["pretrain_llama.py", *constant], out / "constant.log")
    plain = [*decay, "--skip-train", "--finetune"]
    for scheme, last in MERGES:
        merged = out / f"{scheme}-{last}"
        flags = ["--input", str(saves), "--last", str(last), "--weights", scheme]
        run(["tools/merge_checkpoints.py", *flags, "--output", str(merged)], out / "merge.log")
        words = ["pretrain_llama.py", *plain, "--load", str(merged)]
        (losses[f"last {last} merged, {scheme}"],) = run(words, out / "merged.log")
    return losses


def report(by_seed: Mapping[str, Mapping[str, float]]) -> str:
    """Format held-out losses by kind, of each seed and in the mean, as Markdown."""
    kinds = list(next(iter(by_seed.values())))
    rows = [
        [
            kind,
            *(f"{losses[kind]:.4f}" for losses in by_seed.values()),
            f"{mean(losses[kind] for losses in by_seed.values()):.4f}",
            f"{mean(losses[kind] - losses[DECAYED] for losses in by_seed.values()):+.4f}",
        ]
        for kind in kinds
    ]
    heads = " | ".join(("", *(f"seed {seed}" for seed in by_seed), "mean", "above the decay"))
    return "\n".join(markdown_table(heads, rows)) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_averages.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings and results")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    add("--train-iters", type=int, default=800, help="of a training, of 2,048 tokens; default 800")
    add(
        "--model",
        choices=MODELS,
        default="small",
        help="of 1.8 million parameters, or quickstart's 6.6",
    )
    add("--lr", type=float, default=2e-3, help="the highest learning rate; default 2e-3")
    cores = len(os.sched_getaffinity(0))
    add("--at-once", type=int, default=cores, metavar="N", help="seeds side by side")
    add("--data", type=Path, default=QUICKSTART, metavar="DIR", help="quickstart's")
    args = parser.parse_args(argv)
    check_least(5 * NUM_SAVES, train_iters=args.train_iters)
    check_least(1, at_once=args.at_once)
    data, file = data_flags(args.data), args.folder / "losses.json"
    by_seed: dict[str, dict[str, float]] = {}
    if file.exists():
        by_seed = read_json(file, dict[str, dict[str, float]])
    missing = [seed for seed in args.seeds if str(seed) not in by_seed]

    def work(seed: int) -> dict[str, float]:
        folder = args.folder.absolute() / str(seed)
        return losses_of(seed, args.train_iters, args.lr, args.model, data, folder)

    with ThreadPoolExecutor(args.at_once) as pool:
        for seed, losses in zip(missing, pool.map(work, missing), strict=True):
            by_seed[str(seed)] = losses
            write_json(file, by_seed, is_update=True)
    text = report(by_seed)
    write_text(args.folder / "report.md", text)
    print_line(text)


if __name__ == "__main__":
    run_script("study_averages.py", main)
