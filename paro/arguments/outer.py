"""Flags of outer steps."""

from __future__ import annotations

from argparse import ArgumentParser

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


def add_outer_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "outer steps",
        "For slow links between groups: each group trains alone, and groups meet every H steps.",
    ).add_argument
    add("--paro-outer-steps", type=int, metavar="STEPS",
        help="steps that a group trains alone before groups meet (DiLoCo, PyTorch's local SGD); "
        "the strategy's states stay inside a group; default: all ranks train synchronously")
    add("--paro-outer-lr", type=float, metavar="X",
        help="learning rate of the outer optimizer, which steps along the groups' mean movement; "
        "default: 0.6, 0.4 for one group, 0.8 from 8 groups on or with Muon")
    add("--paro-outer-momentum", type=float, metavar="X",
        help="its momentum; default: 0.9, and 0.6 for one group with Muon")
    add("--no-paro-outer-nesterov", action="store_false", dest="paro_outer_nesterov",
        help="plain momentum in place of Nesterov's")
    add("--paro-outer-bits", type=int, choices=(32, 16, 8, 4), default=16, metavar="BITS",
        help="bits in which a value crosses groups: 32, 16 (bf16), or 8 or 4, quantized; what the "
        "anchor loses by it is sent in the next round")
    add("--paro-outer-fragments", type=int, default=1, metavar="NUMBER",
        help="parts of the model that meet one after another, each every so many steps: less is "
        "sent at a time")
    add("--paro-outer-delay", type=int, default=0, metavar="STEPS",
        help="steps of training under which the messages of a round travel; less than the steps "
        "between two rounds")
    add("--paro-outer-warmup", type=int, default=100, metavar="STEPS",
        help="steps at the start of the run in which all ranks train synchronously")
