"""Predicts memory, step time and traffic of candidates; shared parts are computed once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, partial

from model.units import flops_per_token
from paro.machine.caching import cached_by
from paro.machine.collective_time import CollectiveTimes
from paro.planning.comm_costs import CommCosts, ContextCosts
from paro.planning.computing import ComputeTimes, coding_seconds, device_of
from paro.planning.run_memory import DeviceMemory, RunMemory
from paro.planning.search_space import FEWEST_BITS, Candidate, PlanRequest
from paro.planning.step_costs import StepCosts, Timeline, round_seconds, simulate
from paro.planning.step_counts import StepCounts
from paro.precision import PrecisionConfig
from paro.quantization.formats import FULL_BITS
from paro.spec.offload import offloaded
from paro.spec.run_spec import RunSpec
from paro.topology import Sent

BITS_GAIN = 0.02  # share of the step time that quantization must save to be chosen
# The fields that a run has of a candidate.
_CHOSEN = ("strategy", "micro_batch_size", "context", "collective", "recompute", "materialize")
_GIVEN = {each.name for each in fields(RunSpec)} - {*_CHOSEN, "precision", "num_micro_batches"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRound:
    """The time of the longest round of outer steps."""

    seconds: float
    exposed: float  # seconds for which groups wait, where training does not hide the round
    seconds_a_step: float  # the exposed time of all rounds, a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted memory, step time and traffic of a candidate."""

    candidate: Candidate
    num_micro_batches: int
    fits: bool
    memory: DeviceMemory
    timeline: Timeline
    seconds: float  # the time of a step, with the mean of what rounds of outer steps add
    tokens_per_second: float
    mfu: float
    sent: Sent
    precision: PrecisionConfig
    coding_seconds: float  # a rank's time to quantize and dequantize in a step, exposed or not
    muon_seconds: float  # time of Newton-Schulz in a step, with waits for matrices
    host_bytes: int  # optimizer states of a rank that are in host memory, and not in `memory`
    outer_round: OuterRound | None = None  # None: all ranks are synchronous

    @property
    def memory_bytes(self) -> int:
        return self.memory.total


def faster_bits(full: Estimate | None, quantized: Estimate | None) -> Estimate | None:
    """Choose the quantized candidate only where it saves enough; None without estimates."""
    if full is None or quantized is None:
        return full or quantized
    saves = quantized.seconds < full.seconds * (1 - BITS_GAIN)
    return quantized if saves and quantized.fits >= full.fits else full


class Estimator:
    """The predictions for candidates of a request; shared parts are computed once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._times_of = cache(partial(CollectiveTimes, request.machine))
        self.memories = RunMemory(request.machine)
        counted = request.model, request.seq_length, request.trained  # for MFU, as by the trainer
        self._flops_per_token = cache(partial(flops_per_token, *counted, causal=False))
        self._given = {name: getattr(request, name) for name in _GIVEN}

    def run_spec(self, candidate: Candidate, *, timed: bool = False) -> RunSpec:
        """Return the description of a run of the candidate; `timed`: of its step that is timed."""
        request, size, context = self.request, candidate.micro_batch_size, candidate.context
        chosen = {name: getattr(candidate, name) for name in _CHOSEN}
        count, samples = request.micro_batches(size, context), request.global_batch_size
        largest = samples if timed else max(samples, request.largest_batch_size)
        return RunSpec(
            **self._given,
            **chosen,
            precision=candidate.precision(request),
            num_micro_batches=largest * count // samples,
        )

    def costs(self, candidate: Candidate) -> StepCosts:
        """Return the costs of a step of a candidate."""
        run = self.run_spec(candidate, timed=True)
        return StepCosts(
            run=run,
            computing=self._computing_of(run),
            comm_costs=self._comm_costs_of(run),
            counts=self._counts_of(run),
            context=self._context_costs_of(run) if run.context.size > 1 else None,
        )

    @cached_by(lambda run: (run.micro_batch_size, run.context, run.recompute, run.collective))
    def _context_costs_of(self, run: RunSpec) -> ContextCosts:
        return ContextCosts(computing=self._computing_of(run), times=self._times_of(run.collective))

    def _counts_of(self, run: RunSpec) -> StepCounts:
        recompute, rotates = run.recompute, run.materialize.rotates
        if recompute is not None and recompute.method == "block" and not rotates:
            every = replace(recompute, method="uniform", num_layers=1)
            run = replace(run, recompute=every)  # recomputation of other blocks takes no time
        return self.memories.step(run)

    @cached_by(lambda run: (run.states_kind, run.collective))
    def _comm_costs_of(self, run: RunSpec) -> CommCosts:
        times = self._times_of(run.collective)
        specs = self.memories.specs(run)
        return CommCosts(run=run, counts=self._counts_of(run), specs=specs, times=times)

    @cached_by(lambda run: (run.micro_batch_size, run.context, run.recompute, *run.units_kind))
    def _computing_of(self, run: RunSpec) -> ComputeTimes:
        device = device_of(self.request.machine)
        return ComputeTimes(run=run, step=self.memories.step(run), device=device)

    def memory(self, candidate: Candidate) -> DeviceMemory:
        """Predict the largest number of bytes that a rank takes of its device."""
        return self.memories.of(self.run_spec(candidate))

    def sent(self, candidate: Candidate) -> Sent:
        """Count bytes that a rank sends in a step on average, as if sent axis by axis (native).

        Flat and ring send more bytes between groups, and fewer inside them.
        """
        run = replace(self.run_spec(candidate, timed=True), collective="native")
        return self.memories.sent(run, run.num_micro_batches)

    @cached_by(lambda candidate: candidate)
    def estimate(self, candidate: Candidate) -> Estimate:
        """Predict memory, time and traffic of a candidate."""
        request, costs = self.request, self.costs(candidate)
        memory = self.memory(candidate)
        timeline = simulate(costs)
        outer, outer_round = request.outer, None
        seconds = timeline.seconds
        if outer is not None:
            whole = round_seconds(costs)
            exposed = max(0.0, whole - outer.outer_delay * timeline.seconds)
            a_step = exposed * outer.outer_fragments / outer.outer_steps
            outer_round = OuterRound(seconds=whole, exposed=exposed, seconds_a_step=a_step)
            seconds += a_step
        tokens = request.global_batch_size * request.seq_length
        flops = self._flops_per_token() * tokens / request.world_size  # per rank and step
        return Estimate(
            candidate=candidate,
            num_micro_batches=costs.run.num_micro_batches,
            fits=memory.total <= request.device_bytes,
            memory=memory,
            timeline=timeline,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            mfu=flops / seconds / costs.device.peak_flops,
            sent=self.sent(candidate),
            precision=candidate.precision(request),
            coding_seconds=coding_seconds(costs.device, costs.comm_costs.coding_bytes),
            muon_seconds=costs.muon_seconds,
            host_bytes=offloaded(costs.comm_costs.specs).host_bytes * costs.machine.is_of_gpus,
            outer_round=outer_round,
        )

    def quantizes(self, candidate: Candidate) -> bool:
        """Say whether a candidate sends quantized values between groups."""
        return self._comm_costs_of(self.run_spec(candidate)).coding_bytes > 0

    def other_bits(self, candidate: Candidate) -> Estimate | None:
        """Predict a candidate with 16 bits if it quantizes, or the reverse; None: no change."""
        if candidate.precision(self.request).quantizes:
            quantized, other = candidate, replace(candidate, inter_bits=FULL_BITS)
        elif self.request.chooses_bits:
            quantized = other = replace(candidate, inter_bits=FEWEST_BITS)
        else:
            return None
        return self.estimate(other) if self.quantizes(quantized) else None

    def estimate_bits(self, candidate: Candidate) -> tuple[Estimate, Estimate | None]:
        """Predict a candidate with its bit width, given or chosen, and with the other one."""
        estimate, other = self.estimate(candidate), self.other_bits(candidate)
        if other is None or not self.request.chooses_bits:
            return estimate, other
        full, quantized = sorted((estimate, other), key=lambda e: e.precision.quantizes)
        return (quantized, full) if faster_bits(full, quantized) is quantized else (full, quantized)
