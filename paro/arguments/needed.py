"""Missing, refused and unknown flags: the error lines, and a corrected command line."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from itertools import chain

from paro.arguments.flag_parser import by_flag, known_as, wrapped
from paro.arguments.megatron import replacements
from paro.arguments.yaml_flags import FLAG as YAML_FLAG
from paro.errors import one_line
from paro.text import listed

EXAMPLE = """\
python pretrain_llama.py --distributed-backend gloo --mock-data \\
    --vocab-size 999 --num-layers 2 --hidden-size 64 \\
    --num-attention-heads 4 --seq-length 64 --micro-batch-size 8 \\
    --train-iters 20 --lr 1e-2 --log-interval 5 --eval-iters 1"""

_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads")
_DATA = (
    *("--data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--data-phases"),
)
_TOKENIZER = ("--tokenizer-type", "--vocab-file", "--merge-file")
_VOCABULARY = ("--vocab-size", "--padded-vocab-size", "--llama-preset")
ANY_VOCABULARY = 32000  # LLaMA-2's number of ids, for dry runs without a vocabulary
# The lines on how a dry run gets a vocabulary without a tokenizer.
VOCABULARY = (
    "a dry run needs only a size: give --tokenizer-type NullTokenizer --vocab-size N, such as "
    f"{ANY_VOCABULARY}"
)
# Placeholder values of missing flags while the values of other flags are checked.
_STAND_INS: dict[str, dict[str, object]] = {
    "--seq-length": {"seq_length": 1},
    "--micro-batch-size": {"micro_batch_size": 1},
    "--lr": {"lr": 1.0},
    "--train-iters": {"train_iters": 1},
    "--data-path": {"mock_data": True},
    "--tokenizer-type": {"tokenizer_type": "NullTokenizer", "vocab_size": 1},
    "--world-size": {"world_size": 1},
}
# Flags of which a training needs one: the line where none is given.
_NEEDED = {
    ("--seq-length",): "--seq-length is missing: tokens per sample",
    ("--micro-batch-size",): "--micro-batch-size is missing: samples per rank and forward pass",
    ("--lr",): "--lr is missing: the highest learning rate",
    ("--train-iters", "--train-samples"): (
        "--train-iters or --train-samples is missing: how long to train"
    ),
    _DATA: "--data-path is missing: a corpus; or --mock-data for synthetic tokens",
}


def missing_flags(
    args: Namespace, *, named: Collection[str] = (), loaded: bool = False
) -> list[str]:
    """Return one line per required value that is missing; flags in `named` count as given.

    Before the checkpoint is `loaded`, values that --use-checkpoint-args supplies are not missing.
    """
    lines = [line for flags, line in _NEEDED.items() if not _any_given(args, named, *flags)]
    if loaded or not args.use_checkpoint_args:
        lines = [*missing_sizes(args, named), *lines]
        if not _any_given(args, named, *_TOKENIZER, "--mock-data", *_VOCABULARY * args.dry_run):
            without = VOCABULARY if args.dry_run else "only --mock-data needs none"
            lines.append(f"--tokenizer-type is missing; {without}")
    if args.dry_run and not _any_given(args, named, "--world-size"):
        lines.append("--dry-run needs --world-size N: the ranks to plan for")
    return lines


def flags_in(lines: Iterable[str]) -> KeysView[str]:
    """Return the flags that appear in the lines, in order of appearance."""
    return dict.fromkeys(re.findall(r"--[a-z][\w-]*", " ".join(lines))).keys()


def with_stand_ins(args: Namespace) -> tuple[Namespace, KeysView[str]]:
    """Return the arguments with placeholders for missing flags, and these flags; not model sizes.

    An error line that names such a flag is about a placeholder, not about a value that was given.
    """
    missing = flags_in(line.split(" missing")[0] for line in missing_flags(args, loaded=True))
    filled = dict(vars(args))
    for flag in missing & _STAND_INS.keys():
        filled |= _STAND_INS[flag]
    return Namespace(**filled), missing


def missing_sizes(args: Namespace, named: Collection[str] = ()) -> list[str]:
    """List one line with the model sizes that neither a flag nor a preset gives, if any."""
    if _any_given(args, named, "--llama-preset"):
        return []
    missing = [flag for flag in _SIZES if not _any_given(args, named, flag)]
    if not missing:
        return []
    verb, it = ("is", "it") if len(missing) == 1 else ("are", "them")
    return [f"{listed(missing)} {verb} missing; --llama-preset gives {it} too"]


def nothing_needed_is_given(args: Namespace) -> bool:
    """Return whether no required flag is given, so that an example command helps most."""
    beginnings = (*_SIZES, *chain(*_NEEDED), *_TOKENIZER, "--llama-preset")
    return not _any_given(args, (), *beginnings)


def _any_given(args: Namespace, named: Collection[str], *flags: str) -> bool:
    values = (getattr(args, flag.removeprefix("--").replace("-", "_")) for flag in flags)
    return any(flag in named for flag in flags) or any(
        not (value is None or value is False or value == ()) for value in values
    )


_LONGEST = 1000  # longest value, in characters, that a readable suggestion repeats
_FRUGAL = [["--paro-strategy", "GGG"]]
# Flag that a suggestion may add: the flags that it then replaces.
_REPLACES = {
    "--paro-strategy": ("--use-distributed-optimizer",),
    "--recompute-granularity": ("--recompute-activations", "--recompute-modules"),
}


def corrected(
    words: Sequence[str],
    args: Namespace,
    parser: ArgumentParser,
    *,
    better: Mapping[str, object],
    refused: Collection[str],
) -> str:
    """Build the command line to give instead of `words`; empty if only values are to change.

    - Flags that are refused, unknown or without effect are left out or replaced. A guess for an
      unknown flag never replaces a given flag.
    - `better` maps argument names to corrected values; a flag whose correction is the default is
      left out.
    - `refused` has flags whose values the parser did not take.
    """
    actions = parser._option_string_actions
    instead = replacements(args)
    heads = [flag.partition("=")[0] for flag, *_ in by_flag(words)]
    if all(name in actions and name not in instead for name in heads):
        return ""
    fields = {actions[name].dest for name in heads if name in actions}
    groups_of: dict[str, list[str]] = {}
    added: list[list[list[str]]] = []
    left_out: list[str] = []
    for flag, *values in by_flag(words):
        name, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        if name in instead:
            added.append(by_flag(instead[name]))
            continue
        names = [name] if name in actions else known_as(name, values, parser, fields)
        if not names or name == YAML_FLAG:  # its flags are in words
            continue
        *switches, name = names
        action = actions[name]
        other = better.get(action.dest, ...)
        most = 1 if action.nargs is None else action.nargs  # a text: any number of values
        is_long = max(map(len, values), default=0) > _LONGEST
        if name in refused or is_long or other == action.default:
            left_out.append(shlex.join([name, *values]))
            continue
        groups_of |= {switch: [switch] for switch in switches}
        if other is not ...:
            values = list(map(str, other)) if isinstance(other, list) else [str(other)]
        groups_of[name] = [name, *values[: most if isinstance(most, int) else None]]
    notes = [one_line(f"Left out for their values: {listed(left_out)}")] if left_out else []
    notes += _replace(groups_of, added)
    for action in parser._actions:
        new = better.get(action.dest)
        if action.dest not in fields and new not in (None, action.default):
            groups_of.setdefault(action.option_strings[0], [action.option_strings[0], str(new)])
    head = "These flags are left; paste them after pretrain_llama.py:"
    return "\n".join([*notes, head, " \\\n".join(wrapped(groups_of.values()))])


def _replace(groups_of: dict[str, list[str]], added: Sequence[list[list[str]]]) -> list[str]:
    """Add replacement flags that are not given yet; return notes about the replacements."""
    notes = []
    for groups in added:
        if not groups or groups[0][0] in groups_of:
            continue
        groups_of |= {group[0]: group for group in groups}
        if groups == _FRUGAL:
            notes.append(
                f"{' '.join(_FRUGAL[0])} needs the least memory of all and sends the most: "
                "tools/plan.py finds the fastest strategy that fits"
            )
        for other in _REPLACES.get(groups[0][0], ()):
            groups_of.pop(other, None)
    return notes
