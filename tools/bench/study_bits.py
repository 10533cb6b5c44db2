"""Trains the quickstart's model with fewer bits between groups, or in fp8; compares the losses."""

# Rounding alone must not decide: at a learning rate of 2e-3 the order of sums
# changes the loss by more than codes do, at 1e-3 by less than 0.0001. Every variant trains from the
# same seeds on the same text; what is compared is the last loss on held-out text.

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paro.distributed.user_errors import run_script
from tools.bench.shared.trainings import (
    ABLATED,
    QUICKSTART,
    Finished,
    Losses,
    Variant,
    data_flags,
    run_all,
)
from tools.shared.command_line import Parser
from tools.shared.output import markdown_table
from tools.shared.picture import check_can_draw, drawing

DESCRIPTION = """\
Trains the quickstart's model (4 ranks in groups of 2, bf16) with fewer bits between groups, or
with matrix products in fp8, and compares the loss on held-out text. Needs the quickstart's text
and tokenizer (make quickstart). Every training is added to --json, so that a study can be stopped
and continued.

  python tools/bench/study_bits.py --json bits.json --folder runs/bits --plot bits.png
"""
FLAGS = (
    "--distributed-backend gloo --paro-strategy IIG --paro-group-size 2 --num-layers 6 "
    "--hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 16 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 "
    "--adam-beta2 0.95 --bf16 --split 95,5,0 --num-workers 0 --log-interval 5 --eval-iters 10 "
    "--tokenizer-type SentencePieceTokenizer --peak-tflops 1"
)
LONG = 1000  # iterations of the long trainings
SHORT, SEEDS = 240, (1, 2, 3)


def _bits(grads: int, params: int) -> str:
    return f"--paro-inter-grad-bits {grads} --paro-inter-param-bits {params}"


VARIANTS = (
    Variant("16/16", _bits(16, 16)),
    Variant("8/8", _bits(8, 8)),
    Variant("4/8", _bits(4, 8)),
    Variant("4/4", _bits(4, 4)),
    Variant("4/4 without transform", _bits(4, 4), script=f"{ABLATED} transform"),
    Variant("4/4 without transform+blocks", _bits(4, 4), script=f"{ABLATED} transform+blocks"),
    Variant("4/4 with error feedback", f"{_bits(4, 4)} --paro-inter-grad-error-feedback"),
    Variant("16/16 in fp8 (hybrid)", f"{_bits(16, 16)} --fp8-format hybrid"),
)
# Variant, iterations, seed.
Job = tuple[Variant, int, int]
JOBS: tuple[Job, ...] = (
    *((variant, SHORT, seed) for seed in SEEDS for variant in VARIANTS),
    *((variant, LONG, 1) for variant in (VARIANTS[0], VARIANTS[3])),
)


def key_of(job: Job) -> str:
    variant, iterations, seed = job
    return f"{variant.name}, {iterations} iterations, seed {seed}"


def flags_of(job: Job, data: Sequence[str]) -> list[str]:
    """Return the script of a training, and its flags."""
    variant, iterations, seed = job
    return [
        *f"{variant.script} {FLAGS} {variant.flags} --seed {seed}".split(),
        *("--train-iters", str(iterations), "--eval-interval", str(iterations // 4), *data),
    ]


def early(losses: Losses, base: Losses) -> float:
    """Return the mean loss above that of `base`, from the warm-up's end to half-way.

    There, variants differ most: later all of them converge to much the same loss.
    """
    curve, other = dict(losses.loss), dict(base.loss)
    end = max(curve)
    return mean(curve[at] - other[at] for at in curve if 0.1 * end < at <= 0.5 * end)


Pairs = list[tuple[Losses, Losses]]


def pairs_of(finished: Finished, variant: Variant, iterations: int, seeds: Sequence[int]) -> Pairs:
    """Pair trainings of a variant with 16/16 from equal seeds, where both are done."""
    keys = [[key_of((each, iterations, seed)) for each in (variant, VARIANTS[0])] for seed in seeds]
    return [(finished[own], finished[base]) for own, base in keys if {own, base} <= finished.keys()]


def table(finished: Finished) -> str:
    """Return markdown: the losses of every variant, and their differences to 16/16 by seed."""
    rows: list[tuple[object, ...]] = []
    for iterations, seeds in ((SHORT, SEEDS), (LONG, (1,))):
        for variant in VARIANTS:
            if pairs := pairs_of(finished, variant, iterations, seeds):
                loss = mean(run.last for run, _ in pairs)
                more = _all_of([run.last - base.last for run, base in pairs])
                sooner = _all_of([early(*pair) for pair in pairs])
                rows.append((variant.name, iterations, len(pairs), f"{loss:.4f}", more, sooner))
    apart = "more than 16/16: mean, by seed"
    heads = "gradients/updates | iterations | seeds | held-out loss, mean"
    heads += f" | {apart} | in training, first half, {apart}"
    return "\n".join(markdown_table(heads, rows))


def _all_of(differences: Sequence[float]) -> str:
    each = ", ".join(f"{value:+.4f}" for value in differences)
    return f"{mean(differences):+.4f}: {each}"


def plot(finished: Finished, path: Path) -> None:
    """Draw losses over iterations, less the losses of 16/16."""
    with drawing(path, 1, 3, size=(13, 4.5)) as (figure, (training, held_out, long)):
        for color, variant in enumerate(VARIANTS[1:]):
            style = {"color": f"C{color}", "marker": "."}
            for iterations, seeds, panel in ((SHORT, SEEDS, held_out), (LONG, (1,), long)):
                pairs = pairs_of(finished, variant, iterations, seeds)
                for pair in pairs:
                    panel.plot(*_above(*(dict(one.held_out) for one in pair)), **style)
                if pairs and iterations == SHORT:
                    (at, *_), losses = zip(
                        *(_above(*(dict(one.loss) for one in pair)) for pair in pairs), strict=True
                    )
                    means = [mean(each) for each in zip(*losses, strict=True)]
                    training.plot(at, means, label=variant.name, **style)
        panels = {
            training: "in training, mean of seeds",
            held_out: "on held-out text",
            long: f"on held-out text, {LONG:,} iterations",
        }
        for panel, what in panels.items():
            panel.axhline(0.0, color="black", linewidth=0.8)
            panel.set(xlabel="iteration", ylabel="nat above 16/16", title=what)
            panel.grid(alpha=0.3)
        figure.legend(loc="outside right", fontsize="small", title="bits of gradients/updates")


def _above(curve: dict[int, float], base: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return iterations, and by how much the first one's losses are above the second one's."""
    return list(curve), [curve[at] - base[at] for at in curve]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="study_bits.py", description=DESCRIPTION)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="losses; continued if it exists")
    add("--folder", type=Path, required=True, metavar="DIR", help="of trainings; is emptied")
    add("--data", type=Path, default=QUICKSTART, metavar="DIR", help="quickstart's")
    add("--plot", type=Path, metavar="FILE", help="draw the differences (png, svg, pdf)")
    args = parser.parse_args(argv)
    data = data_flags(args.data)
    check_can_draw(args.plot)
    flags = {key_of(job): flags_of(job, data) for job in JOBS}
    launch = ("bash", "examples/one_machine.sh", "--nproc-per-node", "4")
    finished = run_all(lambda _: flags, args.folder, file=args.json, launch=launch)
    print(table(finished))
    if args.plot is not None:
        plot(finished, args.plot)


if __name__ == "__main__":
    run_script("study_bits.py", main)
