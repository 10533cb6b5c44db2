"""Flags of muP, and of learning rates and weight decay of some parameters."""

from __future__ import annotations

from argparse import ArgumentTypeError

from paro.arguments.flag_parser import AddFlag, flag_group

# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


@flag_group("parameter groups", "Learning rates and weight decay of some parameters.")
def add_param_group_args(add: AddFlag) -> None:
    add("--decoupled-lr", type=float, metavar="X",
        help="the highest learning rate of embedding and output layer; default: --lr")
    add("--decoupled-min-lr", type=float, metavar="X", help="their lowest; default: --min-lr")
    add("--apply-wd-to-qk-layernorm", action="store_true",
        help="decay the norms of --qk-layernorm too")
    add("--no-weight-decay-cond-type", type=_is_of_qk_norms, dest="apply_wd_to_qk_layernorm",
        default=False, metavar="apply_wd_to_qk_layernorm", help="Megatron's earlier spelling of it")
    add("--param-group", nargs="+", action="extend", default=[], metavar="GROUP",
        help="names:PATTERN[,PATTERN] lr-mult=X wd-mult=X, with one of the factors or both: "
        "lr-mult multiplies the learning rate that these parameters have otherwise; wd-mult is the "
        "factor on --weight-decay, by default 0 for norms and biases, else 1. Of several groups "
        "the first that has a parameter's name decides")


def _is_of_qk_norms(text: str) -> bool:
    if text != "apply_wd_to_qk_layernorm":
        raise ArgumentTypeError(f"{text} is unknown: give apply_wd_to_qk_layernorm")
    return True


@flag_group("muP", "Learning rates that are tuned on a narrow model serve wider ones.")
def add_mup_args(add: AddFlag) -> None:
    add("--use-mup", action="store_true", default=None,
        help="divide the learning rate and AdamW's epsilon of matrices of blocks, and logits, by "
        "the width, which is --hidden-size / --mup-base-hidden-size, and the initial standard "
        "deviation of these matrices by its root; scale attention's scores by 1 / the head size")
    add("--mup-base-hidden-size", type=int, metavar="N",
        help="--hidden-size of the model on which they were tuned; default: this one's")
    add("--mup-embedding-mult", type=float, metavar="X",
        help="factor on the embedding's output; default 1")
    add("--mup-output-mult", type=float, metavar="X",
        help="factor on logits; 1, the default: 1 / the width")
    add("--mup-base-head-dim", type=float, metavar="N",
        help="scale attention's scores by the root of N too, which for heads of N channels is the "
        "usual scale; default 1")
    add("--mup-attn-scale-power", type=float, metavar="X",
        help="scale them by 1 / the head size to this power; default 1")
