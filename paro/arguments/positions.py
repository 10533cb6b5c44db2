"""Flags of rotary positions: their base, and how they are stretched to longer contexts."""

from __future__ import annotations

from argparse import BooleanOptionalAction

from model.config import POSITION_EMBEDDINGS
from paro.arguments.flag_parser import AddFlag

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


def add_position_args(add: AddFlag) -> None:
    add("--rotary-base", type=float, metavar="BASE",
        help="base of the rotary embedding's wavelengths; default 10000")
    add("--rotary-seq-len-interpolation-factor", type=float, metavar="X",
        help="divide positions by X (linear RoPE scaling); default 1")
    add("--use-rope-scaling", action="store_true", default=None,
        help="stretch long wavelengths as LLaMA-3.1 does, by --rope-scaling-factor")
    add("--rope-scaling-factor", type=float, metavar="X",
        help="how far --use-rope-scaling stretches; default 8")
    add("--rope-scaling-original-max-position-embeddings", type=int, metavar="TOKENS",
        help="the context that --use-rope-scaling stretches; default 8192")
    add("--rope-scaling-low-freq-factor", type=float, metavar="X",
        help="what turns fewer than X times over that context is stretched in full; default 1")
    add("--rope-scaling-high-freq-factor", type=float, metavar="X",
        help="what turns more than X times is not stretched; default 4")
    add("--position-embedding-type", choices=POSITION_EMBEDDINGS, metavar="TYPE",
        help="rope, or yarn: rotary positions stretched by YaRN; default: the preset's, or rope")
    add("--yarn-rotary-scaling-factor", type=float, metavar="X",
        help="how far YaRN stretches long wavelengths, at least 1")
    add("--yarn-original-max-position-embeddings", type=int, metavar="TOKENS",
        help="the context that YaRN stretches; default 4096")
    add("--yarn-beta-fast", type=float, metavar="X",
        help="what turns more than X times over that context is not stretched; default 32")
    add("--yarn-beta-slow", type=float, metavar="X",
        help="what turns fewer than X times over that context is stretched in full; default 1")
    add("--yarn-mscale", type=float, metavar="X",
        help="weight of log(factor) in the scale of queries and keys, over that of "
        "--yarn-mscale-all-dim; default: a scale of 1 + 0.1 log(factor)")
    add("--yarn-mscale-all-dim", type=float, metavar="X",
        help="weight of log(factor) by whose scale that of --yarn-mscale is divided")
    add("--yarn-correction-range-round-to-int", action=BooleanOptionalAction,
        help="round the pairs of channels between which YaRN interpolates outwards (the default)")
