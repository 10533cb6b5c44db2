"""All values that are wrong, told together, and the batch sizes that would fit the ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import gcd
from typing import Any, TypeVar

from data.tokenizer import build_tokenizer
from data.tokenizer_config import TOKENIZER_TYPES
from model.fusion import Fusions
from paro.arguments.needed import flags_in, missing_flags, missing_sizes, with_stand_ins
from paro.arguments.parser import WrongValues, build_parser, take
from paro.checkpoint.config import CheckpointConfig
from paro.config.batch_schedule import BatchSchedule
from paro.config.checkpoint import resumed_samples
from paro.config.checks import CHECKS, check_local_copies, needs_of
from paro.config.context_parallel import sharing
from paro.config.inter_bits import take_precision
from paro.config.model import take_model
from paro.config.parts import (
    take_batches,
    take_data,
    take_loss_scale,
    take_profile,
    take_schedule,
    take_tokenizer,
    take_train,
)
from paro.config.plan import take_sharding
from paro.distributed.process_group import RuntimeConfig
from paro.distributed.world import LaunchConfig, World
from paro.errors import UserError
from paro.optim.muon_config import MuonConfig
from paro.optim.optimizer import OptimConfig
from paro.optim.step_checks import StepChecksConfig
from paro.planning.search.trainable import Trainable
from paro.report.config import ReportConfig
from paro.report.watchdog import WatchConfig

Part = TypeVar("Part")
_PLACES = ("FILE", "DIR", "PREFIX")  # as --help calls values that are files and folders
_MOST = 10**6  # samples in a batch, for which others are looked for
# Parts that are filled from the flags of the same names, by the fields of RunConfig.
_FILLED: Mapping[str, type[Any]] = {
    "checkpoint": CheckpointConfig,
    "fusions": Fusions,
    "optim": OptimConfig,
    "muon": MuonConfig,
    "checks": StepChecksConfig,
    "report": ReportConfig,
    "watch": WatchConfig,
    "runtime": RuntimeConfig,
}


def wrong_values(args: Namespace) -> WrongValues:
    """Every wrong value of flags that are all given, beside flags that are refused."""
    filled, missing = with_stand_ins(args)

    def wrong(better: Mapping[str, object]) -> list[str]:
        changed = _with(filled, better)
        try:
            lines = value_mistakes(changed, take(LaunchConfig, changed).world())
        except UserError as error:
            lines = tuple(map(str, error.args))
        return [line for line in lines if not missing & flags_in([line])]

    told = wrong({})
    better = _fitting_type(filled) | _fitting_sizes(filled, missing)
    while rest := wrong(better):  # also what others hid
        told += rest
        helps = (
            left_out
            for line in rest
            for left_out in _left_out(line, _with(filled, better))
            if line not in wrong(better | left_out)
        )
        if (left_out := next(helps, None)) is None:
            break
        better |= left_out
    return WrongValues(distinct(told), better)


def _left_out(line: str, args: Namespace) -> Iterator[dict[str, object]]:
    """The defaults of the flags in a line about wrong values that may be left out, one by one.

    Files and folders may not, and what is needed neither: no default means the same.
    """
    actions = build_parser()._option_string_actions
    for flag in flags_in([line]):
        action = actions.get(flag)
        if action is None or action.metavar in _PLACES:
            continue
        default = {action.dest: action.default}
        is_given = getattr(args, action.dest, action.default) != action.default
        if is_given and _missing(_with(args, default)) <= _missing(args):
            yield default


def _missing(args: Namespace) -> set[str]:
    return set(missing_flags(args, loaded=True))


def _fitting_sizes(args: Namespace, missing: Collection[str]) -> dict[str, object]:
    """`better_values` for the ranks that are given, if they are right."""
    try:
        world = sharing(take(LaunchConfig, args).world(), args.context_parallel_size)
    except UserError:
        return {}
    return {} if "--world-size" in missing else better_values(args, world.data_parallel_size)


def _fitting_type(args: Namespace) -> dict[str, object]:
    """The tokenizer type that reads the given files, instead of one that does not exist here."""
    given = args.tokenizer_type
    if given is None or given in TOKENIZER_TYPES:
        return {}
    for name in TOKENIZER_TYPES:
        better: dict[str, object] = {"tokenizer_type": name}
        try:
            config = take_tokenizer(_with(args, better))
            build_tokenizer(config)
        except UserError:
            continue
        if name != "NullTokenizer" or not config.files:
            return better
    return {"tokenizer_type": "HuggingFaceTokenizer"}


def distinct(lines: Iterable[str]) -> tuple[str, ...]:
    """The first line about each value: one that two parts refuse is one mistake."""
    found: dict[tuple[str, ...], str] = {}
    for line in lines:
        found.setdefault(tuple(line.split()[:2]), line)
    return tuple(found.values())


def value_mistakes(args: Namespace, world: World) -> tuple[str, ...]:
    """A line for each part of the configuration that cannot be made, as far as it is known."""
    wrong: list[str] = []

    def part(make: Callable[..., Part], *needs: object) -> Part | None:
        if any(need is None for need in needs):
            return None
        try:
            return make(*needs)
        except UserError as error:
            wrong.extend(error.args)
            return None

    found = {name: part(partial(take, kind), args) for name, kind in _FILLED.items()}
    world = part(sharing, world, args.context_parallel_size) or world
    batches = part(take_batches, args, world)
    if batches is None and None not in (args.step_batch_size_schedule, args.global_batch_size):
        batches = part(take_batches, _with(args, {"global_batch_size": None}), world)
    if batches is None:  # which others need
        better = _with(args, _fitting_batches(args, world.data_parallel_size))
        batches = part(take_batches, better, world)
    part(_check_sizes, batches, found["checkpoint"])
    train, data = part(take_train, args, batches), part(take_data, args)
    built = part(build_tokenizer, part(take_tokenizer, args))
    model = sharding = strategy = None
    if built is not None and data is not None and not missing_sizes(args):
        model = part(take_model, args, built.vocab_size)
        sharding, strategy, *_ = part(take_sharding, args, world, model) or (None, None)
    part(lambda sizes, whole: take_schedule(args, sizes, whole, None), batches, train)
    part(take_loss_scale, args)
    trainable = part(Trainable.of_flag, args.trainable)
    part(lambda kind, whole: kind.names(whole), trainable, model)
    found |= {"batches": batches, "train": train, "data": data, "model": model}
    found |= {"sharding": sharding, "strategy": strategy, "trainable": trainable}
    found |= {"precision": part(take_precision, args), "profile": part(take_profile, args)}
    for check in (*CHECKS, check_local_copies):
        part(check, *(found[name] for name in needs_of(check)))
    return distinct(wrong)


def better_values(args: Namespace, data_parallel_size: int) -> dict[str, object]:
    """What to give instead of batch sizes that do not divide into micro-batches on all ranks.

    The micro-batch becomes smaller where that is enough; else sizes become larger. Negative
    iterations of evaluation are none, as in Megatron-LM. None: the flag is to be left out.
    """
    found = {**_fitting_batches(args, data_parallel_size), "eval_iters": max(args.eval_iters, 0)}
    return {name: value for name, value in found.items() if value != getattr(args, name)}


def _check_sizes(batches: BatchSchedule, checkpoint: CheckpointConfig) -> None:
    if batches.changes:
        batches.check_from(resumed_samples(checkpoint))


def _with(args: Namespace, values: Mapping[str, object]) -> Namespace:
    return Namespace(**{**vars(args), **values})


def _fitting_batches(args: Namespace, data_parallel_size: int) -> dict[str, object]:
    micro, whole, steps = (
        args.micro_batch_size,
        args.global_batch_size,
        args.step_batch_size_schedule,
    )
    if micro < 1 or (whole is not None and not 0 < whole < _MOST):
        return {}
    if whole is not None and whole % data_parallel_size == 0:
        micro = gcd(micro, whole // data_parallel_size)
    unit = micro * data_parallel_size
    found: dict[str, object] = {"micro_batch_size": micro}
    if steps is not None:
        found |= {"global_batch_size": None, "step_batch_size_schedule": _steps(steps, unit)}
    elif whole is not None:
        found["global_batch_size"] = whole = _multiple(whole, unit)
        if args.rampup_batch_size is not None:
            start, increment, samples = args.rampup_batch_size
            found["rampup_batch_size"] = [*_ramp(start, increment, whole, unit), samples]
    return found


def _multiple(size: int, unit: int) -> int:
    """The size, or the next larger one that is a multiple of the unit."""
    return -(-size // unit) * unit


def _ramp(start: int, increment: int, whole: int, unit: int) -> tuple[int, int]:
    """A start and an increment of multiples of the unit that lead to the whole batch."""
    start = min(_multiple(max(start, 1), unit), whole)
    increment = min(_multiple(max(increment, 1), unit), max(whole - start, unit))
    while start < whole and (whole - start) % increment:
        increment += unit
    return start, increment


def _steps(text: str, unit: int) -> str:
    """A step schedule with sizes that are multiples of the unit; as it is if it is none."""
    steps = [entry.partition(":") for entry in text.replace(",", " ").split()]
    if not all(size.isdecimal() for *_, size in steps):
        return text
    return " ".join(f"{begin}:{_multiple(int(size), unit)}" for begin, _, size in steps)
