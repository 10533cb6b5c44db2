"""The command line parser, with Megatron-LM's flag names and defaults; one function per group."""

# Types and choices only: all rules between flags are in paro/config. A default of None means that
# the value comes from elsewhere (a preset, another flag); the help text says from where.

from __future__ import annotations

import argparse
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from paro.arguments.flag_parser import AddFlag, FlagParser, by_flag, flag_group, hint_for, set_by
from paro.arguments.job import JOB_GROUPS
from paro.arguments.megatron import add_compatibility_args, refusals, take_other_flags
from paro.arguments.model import MODEL_GROUPS, add_inter_bits_args, add_outer_args
from paro.arguments.needed import (
    EXAMPLE,
    corrected,
    flags_in,
    missing_flags,
    nothing_needed_is_given,
)
from paro.arguments.yaml_flags import read_flags
from paro.collectives.schedule import COLLECTIVES
from paro.errors import UserError, flag_of
from paro.machine.files import shipped_machines
from paro.spec.context_layout import COMM_TYPES

_ABOUT = f"""\
Pre-trains a LLaMA whose parameters, gradients and optimizer state each lie where you say.

  it needs         sizes (--llama-preset NAME, or --num-layers, --hidden-size and
                   --num-attention-heads), --seq-length, --micro-batch-size, --lr,
                   --train-iters, and data: --data-path and a tokenizer, or --mock-data
  to try it        on any machine, in seconds, one process:
{textwrap.indent(EXAMPLE, " " * 21)}
  on GPUs          torchrun --nproc-per-node 8 pretrain_llama.py ..., or under SLURM
                   srun python pretrain_llama.py ...; examples/ has whole scripts
  before that      the same flags with --dry-run --world-size 64: do they agree, does it
                   fit, what is sent? No GPU needed
  strategies       --paro-strategy, the first that fits: NNI NNG NIG IIG IGG GGG
  short of memory  a smaller --micro-batch-size, --recompute-granularity full (of some
                   blocks: --recompute-method block), the next strategy,
                   --grad-reduce-in-bf16
  to go on         give --save and --load the same folder: a run resumes by itself

A mistake ends the run with status 2 and a line that says what to do; of flags that are
refused, unknown or missing all are said at once. Flags in groups:"""


Config = TypeVar("Config")
# A function that returns a line for each wrong value, and the arguments that would correct them.
WrongValues = Callable[[Namespace], tuple[Sequence[str], Mapping[str, object]]]


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter of help that adds defaults to texts, and breaks no flag across lines."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # a help text with its own line breaks
            return textwrap.indent(text, indent)
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, False, (), argparse.SUPPRESS) or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


@cache
def build_parser() -> ArgumentParser:
    """Return the parser of pretrain_llama.py; it is cached, so callers must not change it."""
    parser = FlagParser(
        usage="%(prog)s [flag ...]",  # listing all flags would fill a screen
        description=_ABOUT,
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=36),
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--yaml-cfg",
        metavar="FILE",
        help="read flags from this YAML file (flag: value, one level); the command line wins",
    )
    sharding = (_add_paro_args, add_inter_bits_args, add_outer_args)
    launch = (_add_distributed_args, add_context_args, _add_dry_run_args)
    for add in (*sharding, *MODEL_GROUPS, *launch, *JOB_GROUPS, add_compatibility_args):
        add(parser)
    return parser


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    trains: bool = True,
    wrong_values: WrongValues | None = None,
) -> Namespace:
    """Parse a command line (by default this process's own); `UserError` lists all mistakes.

    An error of a program that `trains` also lists refused and missing flags; without a mistake
    `check_flags` reports refused and missing flags later. With `wrong_values` an error also lists
    wrong values, and ends with the flags to give instead.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    yaml_parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    yaml_parser.add_argument("--yaml-cfg", nargs="?")
    yaml_file = yaml_parser.parse_known_args(words)[0].yaml_cfg
    mistakes: list[str] = []
    if yaml_file is not None:
        from_file, mistakes = read_flags(yaml_file, parser)
        words = from_file + words
    args, unknown, refused = parse_known(parser, words, mistakes)
    mistakes += _describe_unknown(unknown, parser)
    if mistakes and not trains:
        raise UserError(*mistakes)
    if mistakes and wrong_values is None:
        check_flags(args, mistakes)
    if trains and wrong_values is not None and (wrong := wrong_flags(args, mistakes)):
        if nothing_needed_is_given(args):
            check_flags(args, mistakes)
        lines, better = wrong_values(args)
        example = corrected(words, args, parser, better=better, refused=refused)
        raise UserError(*dict.fromkeys([*wrong, *lines]), example=example)
    return args


def check_flags(args: Namespace, mistakes: Sequence[str] = ()) -> None:
    """Raise `UserError` with `mistakes`, then a line for every refused or missing flag."""
    if wrong := wrong_flags(args, mistakes):
        bare = not mistakes and nothing_needed_is_given(args)
        raise UserError(*wrong, example=f"This trains, on any machine:\n{EXAMPLE}" if bare else "")


def wrong_flags(args: Namespace, mistakes: Sequence[str] = ()) -> list[str]:
    """Return a line for every flag that is refused or missing, after other `mistakes`."""
    return [*mistakes, *refusals(args), *missing_flags(args, named=flags_in(mistakes))]


def parse_known(
    parser: ArgumentParser, words: Sequence[str], mistakes: list[str]
) -> tuple[Namespace, list[str], set[str]]:
    """Return the parsed flags, the unknown words, and the flags whose values are refused.

    argparse stops at the first error. The flag with the error is then removed, the error appended
    to `mistakes`, and the rest parsed again.
    """
    words, others = take_other_flags(words, parser)
    refused: set[str] = set()
    while True:
        try:
            return *parser.parse_known_args(words, Namespace(**others)), refused
        except argparse.ArgumentError as error:
            wrong = error
        mistakes.append(str(wrong))
        names = (wrong.argument_name or "").split("/")
        refused.update(names)
        groups = [group for group in by_flag(words) if group[0].split("=")[0] not in names]
        kept = [word for group in groups for word in group]
        assert len(kept) < len(words), f"{wrong} names no word of {words}"
        words = kept


def names_in(*titles: str) -> frozenset[str]:
    """Return the names of the arguments in these groups of --help."""
    groups = [group for group in build_parser()._action_groups if group.title in titles]
    assert len(groups) == len(titles), f"not all of {titles} are groups"
    return frozenset(action.dest for group in groups for action in group._group_actions)


def non_default(arguments: Mapping[str, object]) -> list[str]:
    """Name the arguments that differ from their defaults."""
    defaults = {action.dest: action.default for action in build_parser()._actions}
    return [name for name, value in arguments.items() if value != defaults.get(name)]


def option_of(name: str) -> str:
    """Return the first option that gives an argument a value; a flag of its name if none does."""
    actions = (action for action in build_parser()._actions if action.dest == name)
    return next((action.option_strings[0] for action in actions), flag_of(name))


def spelled(name: str, value: object) -> list[str]:
    """Return the words of a command line that give an argument a value; empty if none do."""
    if isinstance(value, bool):
        actions = [action for action in build_parser()._actions if action.dest == name]
        pairs = [(each, option) for each in actions for option in each.option_strings]
        return [option for each, option in pairs if set_by(each, option) is value][:1]
    values = value if isinstance(value, list | tuple) else [value]
    return [] if value is None or not values else [option_of(name), *map(str, values)]


def value_text(name: str, value: object) -> str:
    """Describe an argument's value: a switch by the option that gives it."""
    if isinstance(value, bool):
        return " ".join(spelled(name, value)) or "not given"
    return "not given" if value is None else str(value)


def take(config_type: type[Config], args: Namespace, **derived: Any) -> Config:
    """Build a config dataclass: each field from the argument of its name, or `paro_` + its name.

    A flag with several values fills a tuple. `derived` has the values of fields that do not come
    from one argument.
    """
    for name in {field.name for field in fields(config_type)} - derived.keys():  # type: ignore[arg-type]
        value = getattr(args, name if hasattr(args, name) else f"paro_{name}")
        derived[name] = tuple(value) if isinstance(value, list) else value
    return config_type(**derived)


def _describe_unknown(unknown: Sequence[str], parser: ArgumentParser) -> Iterator[str]:
    """Yield one line per unknown flag, and one for words that belong to no flag."""
    for flag, *values in by_flag(unknown):
        words = " ".join((flag, *values))
        if flag.startswith("-"):
            yield f"{words} is unknown: {hint_for(flag.split('=')[0], parser)}"
        else:
            yield f"{words!r} belongs to no flag: --help lists all flags"


def _ranks_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


_ranks_or_auto.__name__ = "number of ranks or auto"  # argparse prints this name in its error line


# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


@flag_group("partial redundancy (PaRO)", "Ranks come in groups joined by fast links. Parameters, "
    "gradients and optimizer state are each replicated on every rank (N), sharded inside a group "
    "(I) or over all ranks (G).")
def _add_paro_args(add: AddFlag) -> None:
    add("--paro-strategy", metavar="STRATEGY",
        help="levels of parameters, gradients and optimizer state: three letters (IIG), three "
        "degrees (4,8,32: over how many ranks one copy is spread) or one of ddp zero1 zero2 zero3 "
        "mics hsdp, or auto: the fastest that fits on --paro-machine; default IIG, or NNG with "
        "--use-distributed-optimizer")
    add("--paro-group-size", type=int, metavar="RANKS",
        help="ranks joined by fast links; must divide the number of ranks; default: ranks per node")
    add("--paro-collective", choices=(*COLLECTIVES, "auto"), default="native",
        help="how collectives run: native, the backend's own along fast links and slow links in "
        "turn; ho-ring, along both at the same time; flat, the backend's own over all ranks at "
        "once; auto, for every call the fastest for its size on --paro-machine; with gloo also "
        "ring, one ring over all, and h-ring, a ring between groups, then one inside")
    add("--paro-machine", metavar="NAME",
        help="what this machine can, for flags that say auto: a file that a run or "
        "tools/bench_collectives.py --machine-file wrote on the same ranks and groups; or measure: "
        "the run measures anew at its start, for about a minute, and keeps the file in --save; "
        "default: the same, unless there is such a file or the run continues; or, but for "
        "--paro-collective auto, one that ships: " + " ".join(shipped_machines()))
    add("--paro-materialize", choices=("gather", "rotate"), default="gather",
        help="how parameters come to where they are used: gather them unit by unit, or rotate: "
        "every rank computes with the slice that it holds, and passes it on (needs params and "
        "grads sharded over the same ranks of a group, as III and IIG have them)")
    add("--paro-rotate-in-place", action="store_true",
        help="with --paro-materialize rotate: exchange slices in place, in chunks; needs less "
        "memory, but nothing is computed meanwhile")
    add("--paro-survive", type=int, default=0, metavar="NODES",
        help="keep every parameter, master and moment on so many nodes more than one, so that the "
        "others still hold all when they are lost at once: --paro-strategy auto chooses only such "
        "strategies, and others are refused; 0: no demand")
    add("--paro-elastic", action="store_true",
        help="a restart may have fewer or more nodes (torchrun --nnodes MIN:MAX): degrees and "
        "groups that do not fit become the nearest that do and that --paro-survive accepts, "
        "which then concerns the nodes that are left; the global batch stays, so it must be given; "
        "turns local copies on, as --paro-survive does")
    add("--paro-prefetch-units", type=int, default=1, metavar="UNITS",
        help="how many units (blocks) ahead parameters are gathered; 0 turns all overlap off")
    add("--paro-updated-ahead", metavar="UNITS",
        help="how many units ahead of their first use updated parameters are all-gathered; all: "
        "as soon as they are updated; default: all under gloo, one more than "
        "--paro-prefetch-units under nccl")


@flag_group("distributed", "How many ranks there are, torchrun or srun says; how they talk, these.")
def _add_distributed_args(add: AddFlag) -> None:
    add("--distributed-backend", choices=("nccl", "gloo"), default="nccl",
        help="nccl: one GPU per rank; gloo: CPU ranks")
    add("--paro-nccl-launch-order", choices=("free", "implicit"), default="free",
        help="free: collectives of several communicators begin in any order, and each has so few "
        "thread blocks that all fit on the GPU; implicit: they begin in the order of the host "
        "(NCCL_LAUNCH_ORDER_IMPLICIT)")
    add("--paro-nccl-copy-engine", action="store_true",
        help="parameters are gathered inside a node by the GPUs' copy engines, which leave the "
        "multiprocessors to computing; needs NCCL 2.28, and was not measured yet")
    add("--distributed-timeout-minutes", type=int, default=10, metavar="MINUTES",
        help="give up after so long without progress: on a peer, on data, on a lock")
    add("--use-distributed-optimizer", action="store_true",
        help="Megatron's name for --paro-strategy NNG (ZeRO-1)")


@flag_group("context parallelism", "For long sequences: several ranks share each sample.")
def add_context_args(add: AddFlag) -> None:
    synonyms = {"all_gather": "allgather"}  # Megatron's name
    add("--context-parallel-size", type=_ranks_or_auto, default=1, metavar="RANKS",
        help="neighbouring ranks that share each sample, every one with a part of its tokens: for "
        "long sequences; divides the ranks, and divides a group or is a multiple of one; "
        "twice as many must divide --seq-length; they stay ranks of the strategy; auto: "
        "as many as are fastest on --paro-machine, with up to so many times the micro-batch")
    add("--cp-comm-type", type=lambda name: synonyms.get(name, name), nargs="+", default=["p2p"],
        choices=(*COMM_TYPES, "auto"), metavar="TYPE",
        help="what they send for attention: a2a, they exchange tokens for heads (of which the "
        "ranks must have equally many; heads of keys and values are repeated for more ranks); "
        "p2p, keys and values go round; allgather; a2a+p2p; one for all blocks; auto: "
        "the fastest on --paro-machine, without it exchanges inside groups as far as heads allow")
    add("--hierarchical-context-parallel-sizes", type=int, nargs="+", metavar="RANKS",
        help="two numbers, innermost first, whose product is --context-parallel-size: with a2a+p2p "
        "the ranks that exchange heads and those that keys and values go round, with p2p the ranks "
        "of the inner ring and of the outer")
    add("--paro-context-ring", choices=("double", "flat"), default="double",
        help="how keys and values of p2p and a2a+p2p go round ranks of several groups: double, a "
        "ring inside groups while the next group's arrive from all its ranks at once; flat, one "
        "ring over all")


@flag_group("dry run", "Check a launch without it: one plain process, with the same flags and no "
    "torchrun or srun, configures for N ranks and says what each would hold, compute and send, "
    "with --paro-machine also how long a step takes and what is faster. It needs no GPU, allocates "
    "nothing and writes no file; status 0, or 2 and one line.")
def _add_dry_run_args(add: AddFlag) -> None:
    add("--dry-run", action="store_true", help="do that, and start no rank")
    add("--world-size", type=int, metavar="N", help="with --dry-run: the ranks to plan for; needed")
    add("--ranks-per-node", type=int, metavar="N",
        help="with --dry-run: how many of them a node has; default: a group of --paro-machine, "
        "else 8, or all where they are fewer")
    add("--device-memory-gb", type=float, metavar="GB",
        help="with --dry-run: fail unless the predicted memory of a rank fits a device of so many "
        "GB (1e9 bytes); under nccl it includes the CUDA context, NCCL's communicators and "
        "fragmentation; default: what --paro-machine has")
    add("--show-step", action="store_true",
        help="with --dry-run: list what a rank does in a step, action by action: when parameters "
        "are gathered and freed and gradients reduced, the MB that each collective sends inside "
        "and between groups, its comm stream, and the memory that is alive then")
