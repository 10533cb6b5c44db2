"""The one parser: a function per group, under Megatron-LM's flag names and defaults."""

# Types and choices only: every rule between flags lies in config.py. A default of None means that
# the value comes from elsewhere (a preset, another flag), and the help says from where.

from __future__ import annotations

import argparse
import difflib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from data.tokenizer import TOKENIZER_TYPES
from model.config import LLAMA_PRESETS
from paro.collectives import COLLECTIVES
from paro.compatibility import add_compatibility_args
from paro.optim.lr_schedule import DECAY_STYLES, WEIGHT_DECAY_STYLES, WSD_DECAY_STYLES
from paro.yaml_flags import read_flags

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class _HelpFormatter(argparse.HelpFormatter):
    """Adds the default to a help text where there is one to tell."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, False, (), argparse.SUPPRESS) or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


class _Parser(ArgumentParser):
    """Raises `ValueError` instead of leaving, so that one place decides what the user sees."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser() -> ArgumentParser:
    """The parser of pretrain_llama.py."""
    parser = _Parser(
        usage="%(prog)s [flag ...]",  # all of them would fill a screen
        description="Pre-train a LLaMA model; every model state has its own redundancy level.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--yaml-cfg",
        metavar="FILE",
        help="read flags from this YAML file (flag: value, one level); the command line wins",
    )
    _add_paro_args(parser)
    _add_model_args(parser)
    _add_training_args(parser)
    _add_recompute_args(parser)
    _add_regularization_args(parser)
    _add_learning_rate_args(parser)
    _add_mixed_precision_args(parser)
    _add_distributed_args(parser)
    _add_data_args(parser)
    _add_tokenizer_args(parser)
    _add_validation_args(parser)
    _add_checkpointing_args(parser)
    _add_logging_args(parser)
    add_compatibility_args(parser)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """The flags of a command line (this process's own by default); `ValueError` for mistakes."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    yaml_parser = _Parser(add_help=False, allow_abbrev=False)
    yaml_parser.add_argument("--yaml-cfg")
    yaml_file = yaml_parser.parse_known_args(words)[0].yaml_cfg
    if yaml_file is not None:
        words = read_flags(yaml_file, parser) + words
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(_describe_unknown(unknown, parser))
    return args


def _describe_unknown(unknown: list[str], parser: ArgumentParser) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else " (--help lists all flags)"
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


# One flag in two or three lines reads as a table: the formatter would take six.
# fmt: off


def _add_paro_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "partial redundancy (PaRO)",
        "Ranks come in groups joined by fast links. Parameters, gradients and optimizer state are "
        "each replicated on every rank (N), sharded inside a group (I) or over all ranks (G).",
    ).add_argument
    add("--paro-strategy", metavar="STRATEGY",
        help="levels of parameters, gradients and optimizer state: three letters (IIG), three "
        "degrees (4,8,32: over how many ranks one copy is spread) or one of ddp zero1 zero2 zero3 "
        "mics hsdp; default IIG, or NNG with --use-distributed-optimizer")
    add("--paro-group-size", type=int, metavar="RANKS",
        help="ranks joined by fast links; must divide the number of ranks; default: ranks per node")
    add("--paro-collective", choices=(*COLLECTIVES, "auto"), default="native",
        help="how collectives run: native, the backend's own along fast links and slow links in "
        "turn; ring, one ring of our own over all; h-ring, a ring between groups, then one inside; "
        "ho-ring, both at the same time; flat, the backend's own over all ranks at once; auto, for "
        "every call the fastest for its size on --paro-machine")
    add("--paro-machine", metavar="FILE",
        help="how fast this machine's collectives are, for --paro-collective auto: a file that "
        "tools/bench_collectives.py --machine-file wrote on the same ranks and groups")
    add("--paro-prefetch-units", type=int, default=1, metavar="UNITS",
        help="how many units (blocks) ahead parameters are gathered; 0 turns all overlap off")


def _add_model_args(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "model", "LLaMA: RMSNorm, SwiGLU, rotary embedding, no biases, no dropout.")
    add = group.add_argument
    add("--llama-preset", choices=sorted(LLAMA_PRESETS), metavar="NAME",
        help="take all sizes from a published model; explicit flags win. One of: "
        + " ".join(LLAMA_PRESETS))
    add("--num-layers", type=int, metavar="N", help="transformer blocks; needed without a preset")
    add("--hidden-size", type=int, metavar="N", help="width of the model; needed without a preset")
    add("--ffn-hidden-size", type=int, metavar="N",
        help="width inside the MLP; default 8/3 of --hidden-size, rounded down to 64")
    add("--num-attention-heads", type=int, metavar="N",
        help="query heads; needed without a preset")
    add("--group-query-attention", action="store_true",
        help="let groups of query heads share keys and values, see --num-query-groups")
    add("--num-query-groups", type=int, metavar="N",
        help="key and value heads under --group-query-attention (default 1) or a preset")
    add("--kv-channels", type=int, metavar="N",
        help="size of one head; default --hidden-size / --num-attention-heads")
    add("--max-position-embeddings", type=int, metavar="TOKENS",
        help="longest sequence the model is made for; default: the preset's, or --seq-length")
    add("--rotary-base", type=float, metavar="BASE",
        help="base of the rotary embedding's wavelengths; default 10000")
    add("--use-rope-scaling", action="store_true", default=None,
        help="stretch long wavelengths as LLaMA-3.1 does, by --rope-scaling-factor")
    add("--rope-scaling-factor", type=float, metavar="X",
        help="how far --use-rope-scaling stretches; default 8")
    add("--norm-epsilon", type=float, metavar="EPS",
        help="added under the root of RMSNorm; default 1e-5")
    add("--init-method-std", type=float, metavar="STD",
        help="standard deviation of initial weights; output layers get STD / sqrt(2 layers); "
        "default 0.02")
    tie = group.add_mutually_exclusive_group().add_argument
    tie("--tie-embeddings-and-output-weights", action="store_true", default=None,
        help="use the embedding as the output layer; default: the preset's, or off")
    tie("--untie-embeddings-and-output-weights", action="store_false", default=None,
        dest="tie_embeddings_and_output_weights",
        help="have an output layer of its own, whatever the preset says")
    add("--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
        help="pad the vocabulary of embedding and output layer to a multiple of N")


def _add_training_args(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--micro-batch-size", type=int, metavar="SAMPLES",
        help="samples per rank and forward pass; needed")
    add("--global-batch-size", type=int, metavar="SAMPLES",
        help="samples per optimizer step over all ranks, a multiple of --micro-batch-size times "
        "ranks: gradients are accumulated; default: exactly that product")
    add("--rampup-batch-size", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with a global batch of START and add INCREMENT at equal distances over "
        "SAMPLES samples, up to --global-batch-size")
    add("--seq-length", type=int, metavar="TOKENS", help="tokens per sample; needed")
    add("--train-iters", type=int, metavar="N",
        help="optimizer steps in all, those before a resume included; this or --train-samples")
    add("--train-samples", type=int, metavar="N",
        help="samples in all; a last partial batch is left out")
    add("--calculate-per-token-loss", action="store_true",
        help="weigh all tokens of a global batch alike; without it every micro-batch counts alike")
    add("--seed", type=int, default=1234, metavar="N",
        help="fixes initialization and the order of the data, on any number of ranks")
    add("--exit-interval", type=int, metavar="N", help="save and leave at every multiple of N")
    add("--exit-duration-in-mins", type=float, metavar="MINUTES",
        help="save and leave after so much time")
    add("--exit-signal-handler", action="store_true",
        help="save and leave when any rank gets --exit-signal")
    add("--exit-signal", choices=EXIT_SIGNALS, default="SIGTERM", help="that signal")
    add("--manual-gc", action="store_true",
        help="keep Python's garbage collector from running by itself, at another time on each rank")
    add("--manual-gc-interval", type=int, default=0, metavar="N",
        help="with --manual-gc: collect every N iterations on all ranks; 0: never")
    add("--empty-unused-memory-level", type=int, choices=(0, 1, 2), default=0, metavar="LEVEL",
        help="give cached CUDA memory back every iteration, against fragmentation: 1, before the "
        "update; 2, after it too; 0: never")


def _add_recompute_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "recomputation", "Forget activations in forward and make them again in backward.",
    ).add_argument
    add("--recompute-activations", action="store_true",
        help="short for --recompute-granularity selective")
    add("--recompute-granularity", choices=("full", "selective"),
        help="full: whole blocks, keeping their inputs (a third more compute); selective: only the "
        "inside of attention")
    add("--recompute-method", choices=("uniform", "block"),
        help="for full: uniform, all blocks in chunks of --recompute-num-layers (the default); "
        "block, only the first --recompute-num-layers blocks")
    add("--recompute-num-layers", type=int, metavar="N", help="see --recompute-method; default 1")


def _add_regularization_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("regularization").add_argument
    add("--weight-decay", type=float, metavar="X", default=0.01,
        help="decoupled weight decay, norms excluded")
    add("--start-weight-decay", type=float, metavar="X",
        help="weight decay at the first sample, for --weight-decay-incr-style linear or cosine")
    add("--end-weight-decay", type=float, metavar="X", help="and after the last")
    add("--weight-decay-incr-style", choices=WEIGHT_DECAY_STYLES, default="constant",
        help="how weight decay goes from start to end; constant uses --weight-decay throughout")
    add("--clip-grad", type=float, default=1.0, metavar="NORM",
        help="scale gradients down to this global norm; 0: never")
    add("--adam-beta1", type=float, metavar="X", default=0.9, help="decay of the mean of gradients")
    add("--adam-beta2", type=float, metavar="X", default=0.999,
        help="decay of the mean of their squares")
    add("--adam-eps", type=float, metavar="X", default=1e-8, help="keeps AdamW from dividing by 0")
    add("--adam-implementation", choices=("torch", "apex"), default="torch",
        help="torch's fused AdamW, or FusedAdam of NVIDIA's apex, where installed from its source")


def _add_learning_rate_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "learning rate", "Counted in samples: iterations are converted by the batch size.",
    ).add_argument
    add("--lr", type=float, metavar="X", help="the highest learning rate; needed")
    add("--min-lr", type=float, metavar="X", default=0.0, help="the lowest, after the decay")
    add("--lr-decay-style", choices=DECAY_STYLES, default="linear",
        help="how it falls from --lr to --min-lr; WSD is stable until its tail")
    add("--lr-decay-iters", type=int, metavar="N",
        help="iterations until --min-lr, warm-up included; default: all")
    add("--lr-decay-samples", type=int, metavar="N", help="the same in samples")
    add("--lr-warmup-iters", type=int, metavar="N",
        help="iterations of linear warm-up; default 0")
    add("--lr-warmup-samples", type=int, metavar="N", help="the same in samples")
    add("--lr-warmup-fraction", type=float, metavar="X", help="the same as a part of the decay")
    add("--lr-warmup-init", type=float, default=0.0, metavar="X", help="where warm-up begins")
    add("--lr-wsd-decay-style", choices=WSD_DECAY_STYLES, default="exponential",
        help="the shape of WSD's tail")
    add("--lr-wsd-decay-iters", type=int, metavar="N", help="iterations of WSD's tail")
    add("--lr-wsd-decay-samples", type=int, metavar="N", help="the same in samples")


def _add_mixed_precision_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group(
        "mixed precision", "Without a flag all is fp32. Master parameters and moments always are.",
    ).add_argument
    add("--bf16", action="store_true", help="compute and communicate in bfloat16")
    add("--fp16", action="store_true", help="compute and communicate in float16, loss scaled")
    add("--grad-reduce-in-bf16", action="store_true",
        help="accumulate gradients in bf16 too: half the memory, less exact")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true",
        help="communicate gradients in fp32 too: twice the bytes, Megatron's bf16 numerics")
    add("--loss-scale", type=float, metavar="X",
        help="a constant factor on the loss; default: dynamic under --fp16, else 1")
    add("--initial-loss-scale", type=float, default=2.0**32, metavar="X",
        help="where the dynamic loss scale begins")
    add("--min-loss-scale", type=float, default=1.0, metavar="X", help="its lowest value")
    add("--loss-scale-window", type=int, default=1000, metavar="STEPS",
        help="it doubles after so many finite steps")
    add("--hysteresis", type=int, default=2, metavar="STEPS",
        help="it halves at a non-finite step once so many were seen since it last doubled")


def _add_distributed_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("distributed").add_argument
    add("--distributed-backend", choices=("nccl", "gloo"), default="nccl",
        help="nccl: one GPU per rank; gloo: CPU ranks")
    add("--distributed-timeout-minutes", type=int, default=10, metavar="MINUTES",
        help="give up on a peer after so long")
    add("--use-distributed-optimizer", action="store_true",
        help="Megatron's name for --paro-strategy NNG (ZeRO-1)")


def _add_data_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--data-path", nargs="*", default=(), metavar="PREFIX",
        help="a corpus as tools/preprocess_data.py writes it, PREFIX.bin and PREFIX.idx; or "
        "several, each behind its weight (0.3 A 0.7 B), or without weights: by their sizes")
    add("--data-args-path", metavar="FILE",
        help="the same from a file: words, or a JSON list in which lists may stand for paths")
    for split in ("train", "valid", "test"):
        add(f"--{split}-data-path", nargs="*", default=(), metavar="PREFIX",
            help=f"corpora for {split} alone, as for --data-path; nothing is cut by --split")
    add("--per-split-data-args-path", metavar="FILE",
        help='the same from a file: JSON, {"train": [...], "valid": [...], "test": [...]}')
    add("--mock-data", action="store_true",
        help="deterministic synthetic tokens instead of a corpus")
    add("--split", metavar="TRAIN,VALID,TEST",
        help="the parts of every corpus to train, validate and test on, in any unit; default "
        "969, 30, 1")
    add("--data-cache-path", metavar="DIR",
        help="where sample indices are kept between runs; default: beside the corpus")
    add("--eod-mask-loss", action="store_true",
        help="leave the tokens that end documents out of the loss")
    add("--reset-position-ids", action="store_true",
        help="count positions from the beginning of each document, not of each sample")
    add("--reset-attention-mask", action="store_true",
        help="keep documents that share a sample from seeing each other")
    add("--num-workers", type=int, default=2, metavar="N",
        help="background workers of the data loader, per rank; 0: none")


def _add_tokenizer_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE",
        help=f"needed except with --mock-data: {' '.join(TOKENIZER_TYPES)}")
    add("--tokenizer-model", metavar="FILE", help="the tokenizer's file, folder or name")
    add("--vocab-size", type=int, metavar="N",
        help="for NullTokenizer: ids below N are data, N ends a document; default: the preset's; "
        "for others checked against the tokenizer")


def _add_validation_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("validation").add_argument
    add("--eval-interval", type=int, default=1000, metavar="N",
        help="evaluate on held-out data every N iterations; 0: only at the end")
    add("--eval-iters", type=int, default=100, metavar="N",
        help="global batches per evaluation; 0: never evaluate")
    add("--full-validation", action="store_true",
        help="let every evaluation read all validation data once, instead of --eval-iters batches")
    add("--multiple-validation-sets", action="store_true",
        help="evaluate each corpus of --valid-data-path by itself, under its name")
    add("--skip-train", action="store_true",
        help="evaluate what --load holds on validation and test data and leave; nothing is written")


def _add_checkpointing_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("checkpointing").add_argument
    add("--save", metavar="DIR", help="save checkpoints under DIR; default: none is saved")
    add("--save-interval", type=int, metavar="N",
        help="save every N iterations; default: at the end only")
    add("--load", metavar="DIR", help="go on from the latest checkpoint under DIR, if there is one")
    add("--exit-on-missing-checkpoint", action="store_true",
        help="stop if --load holds no checkpoint instead of starting afresh")


def _add_logging_args(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("logging").add_argument
    add("--log-interval", type=int, default=100, metavar="N",
        help="print a line, and write one to --metrics-file, every N iterations")
    add("--log-throughput", action="store_true", help="add TFLOP/s per device to that line")
    add("--log-num-zeros-in-grad", action="store_true",
        help="add how many elements of the gradients are zero")
    add("--log-params-norm", action="store_true",
        help="add the norm of all parameters after the update")
    add("--metrics-file", metavar="FILE",
        help="append a JSON object per logged iteration: losses in full precision, throughput, "
        "memory, bytes sent")
    add("--peak-tflops", type=float, metavar="X",
        help="what one device can compute, for MFU; default: a table of GPUs, else timed at start")
    add("--tensorboard-dir", metavar="DIR", help="write TensorBoard events to DIR")
    add("--tensorboard-log-interval", type=int, default=1, metavar="N",
        help="write to TensorBoard and W&B every N iterations")
    add("--tensorboard-queue-size", type=int, default=1000, metavar="N",
        help="TensorBoard events held back before they are written")
    add("--wandb-project", metavar="NAME", help="log to this Weights & Biases project")
    add("--wandb-entity", metavar="NAME", help="the user or team it belongs to")
    add("--wandb-exp-name", metavar="NAME", help="name of the run there")
    add("--wandb-save-dir", metavar="DIR", help="where its files lie on this machine")
