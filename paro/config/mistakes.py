"""Wrong values of flags, and the values to give instead, for one message with all mistakes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence

from data.tokenizer_config import FILE_FLAGS, TOKENIZER_TYPES
from model.config import LLAMA_PRESETS
from paro.arguments.flag_parser import PATHS
from paro.arguments.needed import ANY_VOCABULARY, flags_in, missing_flags, with_stand_ins
from paro.arguments.parser import build_parser, take
from paro.config.context_parallel import data_parallel_size_of
from paro.config.model import vocab_size_given
from paro.config.parts import fitting_batches, with_values
from paro.config.run import distinct, take_tokens, value_mistakes
from paro.distributed.world import LaunchConfig
from paro.errors import UserError


def wrong_values(args: Namespace) -> tuple[Sequence[str], Mapping[str, object]]:
    """List a line for each wrong flag value, and the arguments that would correct the values."""
    filled, missing = with_stand_ins(args)

    def wrong(better: Mapping[str, object]) -> list[str]:
        lines = value_mistakes(with_values(filled, better))
        return [line for line in lines if not missing & flags_in([line])]

    lines = wrong({})
    better = _fitting_tokenizer(args) | _fitting_positions(filled) | better_values(filled, missing)
    while rest := wrong(better):  # mistakes that earlier mistakes hid
        lines += rest
        helps = (
            left_out
            for line in rest
            for left_out in _left_out(line, with_values(filled, better))
            if line not in wrong(better | left_out)
        )
        if (left_out := next(helps, None)) is None:
            break
        better |= left_out
    return distinct(lines), better


def _left_out(line: str, args: Namespace) -> Iterator[dict[str, object]]:
    """Yield the default of each flag in `line` that the user may leave out.

    Flags for files and folders, and required flags, have no equivalent default: not yielded.
    """
    actions = build_parser()._option_string_actions
    missing = {*missing_flags(args, loaded=True)}
    for flag in flags_in([line]):
        action = actions.get(flag)
        if action is None or action.metavar in PATHS:
            continue
        default = {action.dest: action.default}
        is_given = getattr(args, action.dest, action.default) != action.default
        if is_given and missing.issuperset(missing_flags(with_values(args, default), loaded=True)):
            yield default


def better_values(args: Namespace, missing: Collection[str] = ()) -> dict[str, object]:
    """Find batch sizes that divide into micro-batches on all ranks; return only changed values.

    A smaller micro-batch is preferred to larger batches. A negative --eval-iters becomes 0, as in
    Megatron-LM. A value of None means: leave the flag out. Nothing without a correct world size.
    """
    try:
        world = take(LaunchConfig, args).world()
        data_parallel_size = data_parallel_size_of(world, args.context_parallel_size)
    except UserError:
        return {}
    if "--world-size" in missing:
        return {}
    fitting = {**fitting_batches(args, data_parallel_size), "eval_iters": max(args.eval_iters, 0)}
    return {name: value for name, value in fitting.items() if value != getattr(args, name)}


def _fitting_positions(args: Namespace) -> dict[str, object]:
    """Return max_position_embeddings for samples longer than the preset's positions."""
    preset = args.llama_preset and LLAMA_PRESETS[args.llama_preset]
    max_positions = args.max_position_embeddings or 0
    if not preset or args.seq_length <= max(max_positions, preset.max_position_embeddings):
        return {}
    return {"max_position_embeddings": args.seq_length}


def _fitting_tokenizer(args: Namespace) -> dict[str, object]:
    """Find the tokenizer type that reads the given files, to replace an unknown type.

    A dry run without tokenizer files gets a NullTokenizer with a vocabulary size.
    """
    tokenizer_type, is_known = args.tokenizer_type, args.tokenizer_type in (None, *TOKENIZER_TYPES)
    if is_known and not args.dry_run:
        return {}
    files = [file for name in FILE_FLAGS if (file := getattr(args, name)) is not None]
    for name in (tokenizer_type,) if is_known else TOKENIZER_TYPES:
        better = {} if is_known else {"tokenizer_type": name}
        try:
            config = take_tokens(with_values(args, better)).tokenizer
        except UserError:
            continue
        if [*config.files] == files and not (files and name == "NullTokenizer"):
            return better
    if not args.dry_run:
        return {"tokenizer_type": "HuggingFaceTokenizer"}
    size = {} if vocab_size_given(args) else {"vocab_size": ANY_VOCABULARY}
    return {"tokenizer_type": "NullTokenizer", **dict.fromkeys(FILE_FLAGS), **size}
