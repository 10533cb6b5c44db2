"""Flags of learning rates and weight decay that are not those of all parameters."""

from __future__ import annotations

from argparse import ArgumentParser

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


def add_param_group_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "parameter groups", "Learning rates and weight decay of some parameters.",
    ).add_argument
    add("--decoupled-lr", type=float, metavar="X",
        help="the highest learning rate of embedding and output layer; default: --lr")
    add("--decoupled-min-lr", type=float, metavar="X", help="their lowest; default: --min-lr")
    add("--apply-wd-to-qk-layernorm", action="store_true",
        help="decay the norms of --qk-layernorm too")
    add("--no-weight-decay-cond-type", choices=("apply_wd_to_qk_layernorm",),
        help="Megatron's earlier spelling of it")
    add("--param-group", nargs="+", action="extend", default=[], metavar="GROUP",
        help="names:PATTERN[,PATTERN] lr-mult=X wd-mult=X, with one of the factors or both: "
        "lr-mult multiplies the learning rate that these parameters have otherwise; wd-mult is the "
        "factor on --weight-decay, by default 0 for norms and biases, else 1. Of several groups "
        "the first that has a parameter's name decides")
