"""Batch sizes of each iteration, also under a ramp-up or a step schedule (Megatron's rules)."""

# Megatron's rules. With --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to
# --global-batch-size in equal steps of INCREMENT, and each size lasts for SAMPLES / (number of
# steps) samples. With --step-batch-size-schedule each size is named, and after how many tokens it
# begins. Everything here is a function of the samples consumed so far, so that a resumed run
# needs no state for it.

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from paro.errors import UserError, check_least, check_multiple

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_MICRO_BATCHES = 10**6  # largest number of micro-batches per rank in a step
_MAX_RAMPUP_ITERATIONS = 10**6  # longest ramp-up: its iterations are counted one by one
_STEPS_FLAG = "--step-batch-size-schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The batch sizes of a run, in training and in evaluations.

    `rampup_batch_size` is (start, increment, samples). `step_batch_size_schedule` has pairs (number
    of samples after which a size begins, size) in rising order; the last is `global_batch_size`.
    """

    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    rampup_batch_size: tuple[int, int, int] | None = None
    step_batch_size_schedule: tuple[tuple[int, int], ...] | None = None
    eval_global_batch_size: int | None = None  # samples per eval iteration; None: global_batch_size
    eval_micro_batch_size: int | None = None  # samples of a micro-batch; None: micro_batch_size
    evaluates: bool = True  # False: the run has no evaluation

    def __post_init__(self) -> None:
        check_least(
            1,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            eval_micro_batch_size=self.eval_micro_batch_size,
            eval_global_batch_size=self.eval_global_batch_size,
        )
        if self.step_batch_size_schedule is None:
            self._check_multiple("--global-batch-size", self.global_batch_size)
        if self.rampup_batch_size is not None:
            self._check_rampup(*self.rampup_batch_size)
        self._check_eval()
        for flag, count in (
            ("--global-batch-size", self.most_micro_batches),
            ("--eval-global-batch-size", self.num_eval_micro_batches),
        ):
            if count > _MAX_MICRO_BATCHES:
                raise UserError(
                    f"{flag} is {count} micro-batches for each rank, and a step must have at most "
                    f"{_MAX_MICRO_BATCHES}: lower it or raise --micro-batch-size"
                )

    @property
    def changes(self) -> bool:
        """True if the batch changes in the course of the run."""
        return self.rampup_batch_size is not None or self.step_batch_size_schedule is not None

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of one micro-batch on all data-parallel ranks together."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def most_micro_batches(self) -> int:
        """The most micro-batches that a rank takes in any iteration."""
        return max(self.global_batch_size, self.largest_step) // self.samples_per_micro_batch

    @property
    def largest_step(self) -> int:
        """The largest global batch of --step-batch-size-schedule; 0 without one."""
        return max((size for _, size in self.step_batch_size_schedule or ()), default=0)

    @property
    def eval_micro_batch(self) -> int:
        """Samples of one evaluation micro-batch on one rank."""
        return self.eval_micro_batch_size or self.micro_batch_size

    @property
    def eval_batch(self) -> int:
        """Samples of one evaluation iteration on all ranks together."""
        return self.eval_global_batch_size or self.global_batch_size

    @property
    def num_eval_micro_batches(self) -> int:
        """Micro-batches of one evaluation iteration on each rank."""
        return self.eval_batch // (self.eval_micro_batch * self.data_parallel_size)

    def batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that starts after `consumed_samples`."""
        if (steps := self.step_batch_size_schedule) is not None:
            return [size for begin, size in steps if begin <= consumed_samples][-1]
        if self.rampup_batch_size is None:
            return self.global_batch_size
        start, increment, rampup_samples = self.rampup_batch_size
        if start == self.global_batch_size or consumed_samples >= rampup_samples:
            return self.global_batch_size
        num_increments = (self.global_batch_size - start) // increment
        return start + int(consumed_samples / (rampup_samples / num_increments)) * increment

    def num_micro_batches_at(self, consumed_samples: int) -> int:
        """Return a rank's micro-batches in the iteration that starts after `consumed_samples`."""
        size = self.batch_size_at(consumed_samples)
        assert size % self.samples_per_micro_batch == 0, "check_from was not called"
        return size // self.samples_per_micro_batch

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples consumed after `iterations` iterations that start at `consumed`."""
        while iterations > 0:
            size, count = self._equal_from(consumed)
            count = iterations if count is None else min(count, iterations)
            consumed += count * size
            iterations -= count
        return consumed

    def samples_before(self, consumed: int, iterations: int) -> int:
        """Return the samples consumed before the `iterations` iterations that end at `consumed`."""
        every = self.samples_per_micro_batch
        for _ in range(iterations):
            begins = range(consumed - every, -1, -every)
            consumed = next(at for at in begins if at + self.batch_size_at(at) == consumed)
        return consumed

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Count the full global batches between `consumed` samples and `samples` in total."""
        iterations = 0
        while True:
            size, count = self._equal_from(consumed)
            fitting = max(0, samples - consumed) // size
            if count is None or fitting < count:
                return iterations + fitting
            iterations += count
            consumed += count * size

    def check_from(self, consumed_samples: int) -> None:
        """Raise `UserError` unless all batches after `consumed_samples` divide over the ranks.

        Earlier batches need not divide: the number of ranks may have been different.
        """
        size = self.batch_size_at(consumed_samples)
        if self.rampup_batch_size is not None and size < self.global_batch_size:
            start, increment, samples = self.rampup_batch_size
            flag = f"--rampup-batch-size {start} {increment} {samples}"
            self._check_multiple(f"{flag}: {'START' if size == start else 'the size'}", size)
            self._check_multiple(f"{flag}: INCREMENT", increment)
        for begin, later in self.step_batch_size_schedule or ():
            if begin > consumed_samples or later == size:
                self._check_multiple(f"{_STEPS_FLAG}: the size", later)

    def _equal_from(self, consumed: int) -> tuple[int, int | None]:
        """Return (batch size after `consumed`, iterations with this size; None: to the end)."""
        change: int | None = None
        if self.rampup_batch_size is not None and consumed < self.rampup_batch_size[2]:
            change = consumed + 1  # a ramp-up may change at every iteration
        elif self.step_batch_size_schedule is not None:
            changes = [begin for begin, _ in self.step_batch_size_schedule if begin > consumed]
            change = min(changes, default=None)
        size = self.batch_size_at(consumed)
        return size, None if change is None else -(-(change - consumed) // size)

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        flag = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            raise UserError(f"{flag}: START and INCREMENT must be at least 1, SAMPLES at least 0")
        if samples // start > _MAX_RAMPUP_ITERATIONS:
            raise UserError(
                f"{flag} lasts for {samples // start} iterations of START samples, and a ramp-up "
                f"must have at most {_MAX_RAMPUP_ITERATIONS}: lower SAMPLES"
            )
        if start > self.global_batch_size:
            raise UserError(
                f"{flag} starts above --global-batch-size {self.global_batch_size}: lower START"
            )
        if (self.global_batch_size - start) % increment != 0:
            raise UserError(
                f"{flag} cannot reach --global-batch-size {self.global_batch_size} from {start} "
                f"in steps of {increment}"
            )

    def _check_eval(self) -> None:
        at_once = self.eval_micro_batch * self.data_parallel_size
        sizes = (self.eval_global_batch_size, self.eval_micro_batch_size)
        if sizes != (None, None) and self.eval_batch % at_once != 0:
            raise UserError(
                f"--eval-global-batch-size {self.eval_batch} is not divisible by "
                f"--eval-micro-batch-size {self.eval_micro_batch} times {self.data_parallel_size} "
                f"data-parallel ranks (= {at_once}); each is its counterpart in training where it "
                "is not given"
            )

    def _check_multiple(self, what: str, size: int) -> None:
        check_multiple(what, size, self.micro_batch_size, self.data_parallel_size)


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return the sizes of --step-batch-size-schedule and the samples after which each begins.

    `text` is a list of TOKENS:SIZE, separated by blanks or commas, in any order.
    """
    check_least(1, seq_length=seq_length)
    steps = []
    for entry in text.replace(",", " ").split():
        tokens, colon, samples = entry.partition(":")
        if not colon:
            raise UserError(f"{_STEPS_FLAG}: {entry!r} is not TOKENS:SIZE, such as 250B:1536")
        steps.append((_number(tokens, entry) // seq_length, _number(samples, entry)))
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise UserError(f"{_STEPS_FLAG} {text!r} has no size to begin with: add 0:SIZE")
    for (begin, size), (following, next_size) in pairwise(steps):
        if begin == following:
            raise UserError(
                f"{_STEPS_FLAG} {text!r}: the sizes {size} and {next_size} begin at the same "
                f"sample, {begin}, of {seq_length} tokens each"
            )
    if min(size for _, size in steps) < 1:
        raise UserError(f"{_STEPS_FLAG} {text!r}: every size must be at least 1")
    return tuple(steps)


def _number(text: str, entry: str) -> int:
    """Return a whole number, maybe with suffix K, M, B or T; parsed as in Megatron."""
    digits, factor = text.strip().upper(), 1
    if digits[-1:] in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1]]
    try:
        number = float(digits) * factor
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(
            f"{_STEPS_FLAG}: {text!r} in {entry!r} is no number such as 768, 1.5M or 250B"
        )
    return int(number)
