"""Flags of what crosses groups in fewer bits, for training and for planning."""

from __future__ import annotations

from argparse import ArgumentParser

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


def add_inter_bits_args(parser: ArgumentParser, *, trains: bool) -> None:
    """`trains`: with the flags that only a training needs."""
    add = parser.add_argument_group(
        "fewer bits between groups",
        "What crosses groups once a step may be rounded to codes; all else stays exact.",
    ).add_argument
    add("--paro-inter-param-bits", type=int, choices=(16, 8, 4), default=16, metavar="BITS",
        help="bits in which updated parameters cross groups once a step: 16, their own type; 8 or "
        "4, codes of how much they changed, which saves half or three quarters of the bytes; norms "
        "and biases stay exact")
    add("--paro-inter-grad-bits", type=int, choices=(16, 8, 4), default=16, metavar="BITS",
        help="bits in which gradients cross groups once a step: 16, the type of communication; 8 "
        "or 4, codes of their Hadamard transforms, added up in fp32; those of norms and biases "
        "stay exact")
    add("--paro-inter-grad-error-feedback", action="store_true",
        help="add a moving average of what codes of gradients lost to later ones; takes a byte for "
        "each gradient element that a rank holds, kept in checkpoints but dropped where ranks or "
        "strategy change")
    add("--paro-inter-bits", choices=("auto",),
        help="auto: the planner chooses 4 bits for both where --paro-machine is faster with them, "
        "and 16 where packing costs more than it saves; without it the planner never chooses bits")
    if not trains:
        return
    add("--paro-inter-bits-warmup-iters", type=int, metavar="ITERATIONS",
        help="send 16 bits for so long at the start; default: the learning rate's warm-up")
