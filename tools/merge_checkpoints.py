"""Averages checkpoints of a run into one model, tensor by tensor, such as a stable phase's last."""

# [Note: weights of a merge]
# A merge of the last K checkpoints of a constant learning rate stands in for a decay: the movement
# between two checkpoints counts as often as later checkpoints do, so that weights c_1, ..., c_K
# scale the movement before checkpoint j by c_j + ... + c_K (arXiv 2507.17634). Uniform weights are
# a linear decay. For WSD's 1 - sqrt(x), c_j = sqrt(j / K) - sqrt((j - 1) / K), which Megatron-LM
# calls minus-sqrt. Linear weights rise: c_j is in proportion to j.

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import sqrt
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor
from tqdm import tqdm

from paro.checkpoint.convert.conversion import Conversion
from paro.checkpoint.convert.source import LazyTensor, ModelSource
from paro.checkpoint.directory import common_of, find_checkpoint, iterations_in
from paro.checkpoint.manifest import read_manifest
from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least, reading, writing
from paro.files.atomic_file import check_folder
from paro.files.object_store import path_of
from paro.report.log import print_line
from tools.shared.command_line import Parser

SCHEMES = {
    "uniform": lambda j, number: 1.0 / number,
    "linear": lambda j, number: 2.0 * j / (number * (number + 1)),
    "1-sqrt": lambda j, number: sqrt(j / number) - sqrt((j - 1) / number),
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Averages checkpoints of a run, saved under any strategies, into a model to train "
            "from, to convert or to evaluate. A few hundred MB are in memory at a time."
        ),
    )
    add = parser.add_argument
    add("--input", required=True, type=path_of, metavar="DIR", help="the --save of the run")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="K", help="average its last K checkpoints")
    which.add_argument(
        "--iterations", metavar="A,B,...", help="average the checkpoints of these iterations"
    )
    add(
        "--weights",
        choices=tuple(SCHEMES),
        default="uniform",
        help="of the checkpoints: uniform, the mean, which stands for a linear decay of the "
        "learning rate; linear, in proportion to 1, 2, ..., K; 1-sqrt, which stands for that decay "
        "of WSD; default: uniform",
    )
    add("--base", metavar="DIR", help="where the base of the checkpoints is, if it moved")
    add("--output", required=True, type=Path, metavar="DIR", help="a folder that does not exist")
    return parser


def chosen(root: Path, last: int | None, listed: str | None) -> list[int]:
    """Return the iterations to average, in their order; `UserError` unless all are there."""
    there = sorted(iterations_in(root))
    text = f"{root} holds {'iterations ' + ', '.join(map(str, there)) if there else 'none'}"
    if last is not None:
        check_least(2, last=last)
        if last > len(there):
            raise UserError(f"--last {last} are more checkpoints than there are: {text}")
        return there[-last:]
    words = (listed or "").split(",")
    wanted = sorted({int(word) for word in words if word.isdecimal() and len(word) < 19})
    if not 1 < len(wanted) == len(words):
        raise UserError(f"--iterations {listed} must be 2 or more different ones, such as 100,200")
    for iteration in wanted:
        if iteration not in there:
            raise UserError(f"--iterations {listed}: {iteration} is not there: {text}")
    return wanted


def mean_of(tensors: Sequence[LazyTensor], weights: Iterable[float]) -> LazyTensor:
    """Return the weighted mean of tensors, in the type of the last; equal values keep their bits.

    A mean in fp32 moves towards each tensor in turn, by its share of the weights so far.
    """
    given = [*weights]
    shares = [weight / total for weight, total in zip(given, accumulate(given), strict=True)]

    def rows(start: int, stop: int) -> Tensor:
        mean = tensors[0].rows(start, stop).float()
        for tensor, share in zip(tensors[1:], shares[1:], strict=True):
            mean.lerp_(tensor.rows(start, stop).float(), share)
        return mean.to(tensors[-1].dtype)

    return replace(tensors[-1], rows=rows)


def opened(args: argparse.Namespace, iteration: int) -> tuple[Conversion, ModelSource]:
    """Open a checkpoint, whose adapters are merged into its weights, as a copy to be written."""
    with reading(f"--input {args.input}"):
        common = common_of(read_manifest(find_checkpoint(args.input, iteration)))
    conversion = Conversion(
        source_format="paro",
        target_format="paro",
        source=args.input,
        target=args.output,
        dtype=None,
        iteration=iteration,
        base=args.base,
        merge=common.get("lora") is not None,
        divisible_by=1,
        padded_vocab_size=common.get("model", {}).get("vocab_size"),
    )
    return conversion, conversion.open()


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_folder("--input", args.input)
    iterations = chosen(args.input, args.last, args.iterations)
    made = [opened(args, iteration) for iteration in iterations]
    conversion, newest = made[-1]
    for iteration, (_, source) in zip(iterations, made, strict=True):
        if replace(
            source.config, max_position_embeddings=newest.config.max_position_embeddings
        ) != (newest.config):
            raise UserError(
                f"--input {args.input}: iterations {iteration} and {iterations[-1]} are of "
                "different models: give others with --iterations"
            )
    scheme, number = SCHEMES[args.weights], len(iterations)
    weights = [scheme(j, number) for j in range(1, number + 1)]
    tensors = {
        name: mean_of([source.tensors[name] for _, source in made], weights)
        for name in newest.tensors
    }
    merged = replace(newest, tensors=tensors, origin=None)
    parts = ", ".join(
        f"{at} x {weight:.4g}" for at, weight in zip(iterations, weights, strict=True)
    )
    print_line(f"averages iterations {parts}", *newest.notes)
    bar = tqdm(total=conversion.num_bytes(merged), unit="B", unit_scale=True, disable=None)
    with writing(f"--output {args.output}"), bar:
        conversion.write(merged, bar.update)
    print_line(f"wrote {args.output} (paro)")


if __name__ == "__main__":
    run_script("merge_checkpoints.py", main)
