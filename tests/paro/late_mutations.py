"""Mutations of the product that each remove one wait or one `after` of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paro.collectives.native import NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.sharding.shards import UnitShards
from paro.step.gathering import GatheringPolicy
from paro.step.rotating import SlicePolicy
from paro.step.updating import UpdatingPolicy
from tests.helpers.waits import changed

HO_RING = "--paro-collective ho-ring"
ROTATE = "--paro-materialize rotate"
IN_PLACE = f"{ROTATE} --paro-rotate-in-place"
FULL = "--recompute-granularity full"
AHEAD = "--paro-updated-ahead 2"
FLAT = "--paro-collective flat"
MUON = "--optimizer muon --lr 0.01"
AUTO = "AUTO"  # in flags: an algorithm chosen for every call
FOLDER = "FOLDER"  # in flags: a folder of the ranks, made for the run
SAVED = f"--save {FOLDER}"
CODES = (
    "--paro-inter-param-bits 4 --paro-inter-grad-bits 4 "
    "--bf16 --hidden-size 60 --ffn-hidden-size 151 --vocab-size 211"
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A text in a method's source, what replaces it, and a run that must then go wrong."""

    owner: type
    method: str
    old: str
    new: str
    strategy: str
    more: str = ""
    world_size: int = 4
    group_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.owner.__name__}.{self.method}: {self.old} -> {self.new or 'nothing'}"

    @contextmanager
    def removed(self) -> Iterator[None]:
        method = f"{self.owner.__name__}.{self.method}"
        with changed(self.owner.__module__, method, self.old, self.new):
            yield


# An order that is no call of a wait and no `after=`.
MUTATIONS = (
    Mutation(
        GatheringPolicy, "_gather_and_wait", "actions.append((Verb.WAIT, buffer))", "pass", "IIG"
    ),
    Mutation(
        GatheringPolicy,
        "end_step",
        "*((Verb.WAIT_REDUCED, buffer) for buffer in self.shape.trainable)",
        "",
        "IIG",
    ),
    Mutation(UpdatingPolicy, "before_forward", "return self._queue", "return []  #", "IIG", AHEAD),
    Mutation(
        UpdatingPolicy, "flush", "return self._queue", "return []  #", "NIG", f"{SAVED} {AHEAD}"
    ),
    Mutation(SlicePolicy, "begin_forward", "[(Verb.WAIT,)]", "[]", "IIG", ROTATE),
    Mutation(
        SlicePolicy,
        "before_forward",
        "[(Verb.WAIT_SHIFTED,)] if self._waits(step) else []",
        "[]",
        "IIG",
        ROTATE,
    ),
    Mutation(
        SlicePolicy,
        "after_forward",
        "[shift, (Verb.WAIT_SHIFTED,)]",
        "[shift]",
        "IIG",
        f"{IN_PLACE} {FULL}",
    ),
    Mutation(
        SlicePolicy,
        "before_backward",
        "actions.append((Verb.WAIT_SHIFTED,))",
        "pass",
        "IIG",
        ROTATE,
    ),
    Mutation(
        SlicePolicy,
        "first_gradient",
        "[] if self._in_place else [(Verb.WAIT_GRADS,)]",
        "[]",
        "IIG",
        ROTATE,
    ),
    Mutation(
        SlicePolicy,
        "after_backward",
        "actions += [(Verb.WAIT_SHIFTED,)]",
        "pass",
        "IIG",
        f"{IN_PLACE} --trainable names:*norm*",  # else gradients that follow are waited for
    ),
    Mutation(
        SlicePolicy, "after_backward", "actions.append((Verb.WAIT_GRADS,))", "pass", "IIG", IN_PLACE
    ),
    Mutation(
        UnitShards,
        "step_reduce",
        "self._sum_over_world(self._reduced)",
        "self._sum_over_world(DONE)",
        "IIG",
    ),
    Mutation(UnitShards, "step_reduce", "_fresh = reduced,", "_fresh = DONE,", "IIG", MUON),
    Mutation(UnitShards, "gather_updated", "unit._updated = updated", "pass", "IIG", MUON),
    Mutation(
        NativeCollectives,
        "_gather",
        "self._gather_job(part, span[depth], own), event",
        "self._gather_job(part, span[depth], own), DONE",
        "GGG",
    ),
    Mutation(
        NativeCollectives,
        "_scatter",
        "self._scatter_job(part, axis, comm_dtype), event",
        "self._scatter_job(part, axis, comm_dtype), DONE",
        "GGG",
    ),
    Mutation(
        NativeCollectives,
        "_sum",
        "part, comm_dtype),\n            event,",
        "part, comm_dtype),\n            DONE,",
        "NNN",
    ),
    Mutation(NativeCollectives, "_sum", "job, event)", "job, DONE)", "NNN"),
    Mutation(NativeCollectives, "_sum", "comm_dtype, event)", "comm_dtype, DONE)", "NNI"),
    Mutation(
        PipelinedCollectives,
        "run",
        "ready = ends[stage.after]",
        "ready = DONE",
        "GGG",
        HO_RING,
    ),
    Mutation(
        PipelinedCollectives,
        "run",
        "[*first, memory.left[slot]]",
        "[*first]",
        "GGG",
        HO_RING,
    ),
    Mutation(
        PipelinedCollectives,
        "run",
        "(request.after or DONE,)",
        "(DONE,)",
        "1,2,8",
        HO_RING,
        world_size=8,
        group_size=4,
    ),
)

# Every wait and `after=` of the product (tests/helpers/waits.py finds them), by name: a run, as a
# strategy and flags, that goes wrong without it.
CAUGHT = {
    "collectives.api AutoCollectives.run_after: after=after": ("GGG", AUTO),
    "collectives.coded CodedReduction.reduce: after=after": ("IIG", CODES),
    "collectives.flat FlatCollectives._submit: after=after": ("IIG", FLAT),
    "collectives.interface Collectives.all_gather: after=after": ("IIG", ""),
    "collectives.interface Collectives.reduce_scatter: after=after": ("IIG", ""),
    "collectives.interface Collectives.all_reduce: after=after": ("NNI", ""),
    "collectives.native NativeCollectives._submit: after=after": ("IIG", ""),
    "collectives.pipelined PipelinedCollectives.run_after: after=after": (
        "IIG",
        f"{CODES} {HO_RING}",
    ),
    "collectives.pipelined PipelinedCollectives.run: after=ready": ("GGG", HO_RING),
    "collectives.wire Wire._trade: message.wait()": ("NNI", ""),
    "collectives.wire Pending.wait: self._work.wait()": ("NNI", ""),
    "collectives.wire _carry_out: Pending(work, operation.tensor, what).wait()": ("NIG", MUON),
    "distributed.exposed_time Exposure.wait: event.wait()": ("IIG", ""),
    "optim.matrices MuonStep._scatter: self._exposure.wait(WaitKind.REDUCE, moving.event)": (
        "IIG",
        MUON,
    ),
    "optim.matrices MuonStep._apply: self._exposure.wait(WaitKind.GATHER_UPDATED, back.event)": (
        "IIG",
        MUON,
    ),
    "rotation.rotating_unit RotatingUnit._wait_shifted: "
    "self.context.exposure.wait(WaitKind.GATHER, self._arrived)": ("IIG", ROTATE),
    "rotation.rotating_unit RotatingUnit._wait_grads: "
    "self.context.exposure.wait(WaitKind.REDUCE, self._grads_arrived)": ("IIG", ROTATE),
    "sharding.distributed_model DistributedModel.finish_gradients: unit.wait_reduced()": (
        "IIG",
        ROTATE,
    ),
    "sharding.distributed_model DistributedModel.wait_for_updated_params: "
    "unit.wait_for_updated_params()": ("NIG", SAVED),
    "sharding.sharded_unit ShardedUnit.gather: after=self._updated": ("IIG", ""),
    "sharding.sharded_unit ShardedUnit.use: self.wait_for_updated_params()": ("NNI", ""),
    "sharding.sharded_unit ShardedUnit.use: "
    "self.context.exposure.wait(WaitKind.GATHER, self._gathered)": ("IIG", ""),
    "sharding.sharded_unit ShardedUnit._queue_reduction: after=event": ("GGG", AUTO),
    "sharding.sharded_unit ShardedUnit.free_whole_grad: "
    "self.context.exposure.wait(WaitKind.REDUCE, self._grad_U_read)": ("IIG", ""),
    "sharding.shards UnitShards.wait_for_updated_params: "
    "self.context.exposure.wait(WaitKind.GATHER_UPDATED, self._updated)": ("IIG", ""),
    "sharding.shards UnitShards.gather_updated: after=gathered": ("IIG", CODES),
    "sharding.shards UnitShards._sum_over_world: after=event": ("IIG", CODES),
    "sharding.shards UnitShards._sum_over_world: after=event #2": ("IIG", CODES),
    "sharding.shards UnitShards._sum_over_world: after=event #3": ("IIG", ""),
    "sharding.shards UnitShards._sum_over_world: after=event #4": ("IIG", ""),
    "sharding.shards UnitShards.wait_reduced: "
    "self.context.exposure.wait(WaitKind.REDUCE, self._reduced)": ("IIG", ""),
    "training.replicas check_replicas: training.model.wait_for_updated_params()": ("NIG", SAVED),
}

_STREAMS = "LateStreams stands for it; tests/paro/distributed/test_comm_stream.py"
_MESSAGES = "messages from point to point, on threads; tests/paro/collectives/test_executor.py"
_SCHEDULE = "data of a schedule; tests/paro/collectives/test_schedule.py"
_PIPELINE = "data of the plan; a mutation of PipelinedCollectives.run ignores it"
_RING = "of threads, which NCCL's path does not run; tests/paro/collectives/test_shifts.py"
_COUNTS = "no order needs it: bytes and seconds sent before must not count for what follows"
_SAVES = (
    "no order needs it, a save reads masters: what is sent does not count as saving, and a lost "
    "peer ends the run before the save"
)
_TIMES = "no order needs it: the time of this wait is told from that of the gather, which follows"
_STAGES = "times the stages of threads' jobs"
_CLOCK = "no order needs it: else a time would be that of launches alone"
_THREAD = "the thread of a save; tests/end_to_end/test_checkpoint_flags.py"
_COPIES = "the thread of local copies; tests/end_to_end/test_local_copies.py"
_CONTEXT = "what attention waits for; tests/paro/context_parallel/test_partwise.py removes each"
_CLOSE = "no order needs it: a lost peer is named by it, before streams close"

# The others, and why no run on late streams goes wrong without them.
ELSEWHERE = {
    "collectives.executor ScheduledCollectives.run: after=after": _MESSAGES,
    "collectives.executor ScheduledCollectives.run: after=after #2": _MESSAGES,
    "collectives.executor ScheduledCollectives.run: after=event": _MESSAGES,
    "collectives.executor ScheduledCollectives.run_after: after=after": _MESSAGES,
    "collectives.executor ScheduledCollectives._submit: after=request.after": _MESSAGES,
    "collectives.pipeline make_pipeline: after=index_of.get((piece, number - 1))": _PIPELINE,
    "collectives.schedule _linked: "
    "after=_distinct(*map(arrived.get, sent), lead, barrier)": _SCHEDULE,
    "collectives.schedule _linked: "
    "after=_distinct(*map(arrived.get, received)) if backwards else ()": _SCHEDULE,
    **dict.fromkeys(
        (
            "collectives.transfer Transfer._run_level: "
            "self._await(lambda: self._unsent[level] == 0)",
            "collectives.transfer Transfer._run_level: pending.wait()",
            "collectives.transfer Transfer._run_level: "
            "self._await(partial(self._all_arrived, receive.after))",
            "collectives.transfer Transfer._run_level: self._sends[level].popleft().wait()",
            "collectives.transfer Transfer._run_level: self._sends[level].popleft().wait() #2",
            "collectives.transfer Transfer._await: "
            "self._changed.wait_for(lambda: self._failure is not None or condition())",
        ),
        _MESSAGES,
    ),
    **dict.fromkeys(
        (
            "distributed.comm_stream AllEvents.wait: event.wait()",
            "distributed.comm_stream _ThreadEvent.wait: self.finished.wait(_GLANCE_SECONDS)",
            "distributed.comm_stream ThreadStreams._work: after.wait()",
            "distributed.comm_stream _StreamEvent.wait: "
            "torch.cuda.current_stream().wait_event(self.event)",
            "distributed.comm_stream CudaStreams.submit: "
            "own.wait_stream(torch.cuda.current_stream())",
            "distributed.comm_stream CudaStreams.submit: after.wait()",
            "distributed.comm_stream CudaStreams.close: stream.synchronize()",
        ),
        _STREAMS,
    ),
    "distributed.exposed_time Exposure.wait: stage.wait()": _STAGES,
    "distributed.timers synchronize: torch.cuda.synchronize(device)": _CLOCK,
    "optim.optimizer ParoOptimizer.loaded: self.model.wait_for_updated_params()": _COUNTS,
    "collectives.shifts Ring.shift: message.wait()": _RING,
    "collectives.shifts Ring._exchange_ahead: arriving.popleft().wait()": _RING,
    "collectives.shifts Ring._exchange_ahead: leaving[number].wait()": _RING,
    **dict.fromkeys(
        (
            "context_parallel.exchange Exchange.finish: "
            "self._exposure.wait(WaitKind.CONTEXT, flight.event)",
            *(
                f"context_parallel.{place}: self._exposure.wait(WaitKind.CONTEXT, {event})"
                for place, event in (
                    ("ring RingTravel._held", "event"),
                    ("ring _Sum.take", "self._event"),
                    ("gather GatherTravel.visit", "event"),
                    ("gather GatherTravel.collect", "event"),
                )
            ),
            "context_parallel.gather GatherTravel.collect: "
            "self._exposure.wait(WaitKind.CONTEXT, event) #2",
            "context_parallel.gather ContextStreams.submit: after=after",
        ),
        _CONTEXT,
    ),
    "sharding.sharded_unit ShardedUnit.use: "
    "self.context.exposure.wait(WaitKind.GATHER_UPDATED, self._updated)": _TIMES,
    **dict.fromkeys(
        (
            "training.local_copies LocalCopies.discard: self.wait()",
            "training.local_copies LocalCopies.settle: self._background.wait()",
            "training.local_copies LocalCopies.wait: self._background.wait()",
            "training.local_copies _Copier.__call__: self._stream.synchronize()",
            "training.local_copies _Copier.updated: "
            "self._stream.wait_stream(torch.cuda.current_stream())",
            "training.loop Loop._reasons: self._copies.wait()",
        ),
        _COPIES,
    ),
    "training.loop Loop.run: self.training.model.wait_for_updated_params()": _SAVES,
    "training.loop Loop._save: self.training.model.wait_for_updated_params()": _SAVES,
    "training.saving Saver.settle: self._background.wait()": _THREAD,
    "training.saving Saver.resume_hint: self._background.wait()": _THREAD,
    "training.step Training.close: self.model.wait_for_updated_params()": _CLOSE,
    "training.step evaluate: model.wait_for_updated_params()": _COUNTS,
}
