"""The waits of the product, found by their syntax, and mutations that each remove an order."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from paro.collectives.interface import Collectives
from paro.collectives.native import NativeCollectives
from paro.collectives.pipelined import PipelinedCollectives
from paro.distributed.comm_stream import DONE
from paro.sharding.shards import UnitShards
from paro.step.gathering import GatheringPolicy, ParamAllGatherPolicy
from paro.step.rotating import RotationPolicy
from paro.step.slices import SlicePolicy

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (
    *("collectives", "context_parallel", "distributed"),
    *("optim", "rotation", "sharding", "training"),
)
_NAMES = ("wait", "_await", "synchronize")
_BEGINNINGS = ("wait_", "synchronize_")
_DONE = f"__import__({DONE.__module__!r}, fromlist=['DONE']).DONE"  # in any module


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits, or an `after=` of a call; `text` is its source, numbered if repeated."""

    module: str
    function: str  # qualified within the module; nested functions belong to the outermost
    text: str

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('paro.')} {self.function}: {self.text}"

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The function runs without it: a call becomes True, `after` becomes `DONE`."""
        tree = ast.parse(_path(self.module).read_text(encoding="utf-8"))
        (node,) = [node for wait, node in _waits_in(self.module, tree) if wait == self]
        _empty(tree, node)
        with _running(self.module, self.function, ast.fix_missing_locations(tree)):
            yield


@contextmanager
def changed(module: str, function: str, old: str, new: str) -> Iterator[None]:
    """The function, qualified within its module, runs with a text of its source replaced."""
    source = _path(module).read_text(encoding="utf-8")
    (node,) = [body for name, body in _functions(ast.parse(source)) if name == function]
    own = ast.get_source_segment(source, node, padded=True)
    assert own is not None, f"{function} has no source"
    assert own.count(old) == 1, f"{module} {function}: found {own.count(old)} times: {old}"
    tree = ast.parse(source.replace(own, own.replace(old, new)))
    with _running(module, function, tree):
        yield


@contextmanager
def _running(module: str, function: str, tree: ast.Module) -> Iterator[None]:
    """The function runs as this tree of its module has it."""
    code = compile(tree, str(_path(module)), "exec")
    owner: Any = importlib.import_module(module)
    for part in function.split("."):
        owner = inspect.getattr_static(owner, part)
    own = inspect.unwrap(owner)
    assert isinstance(own, FunctionType), f"{module} {function} is no function"
    before = own.__code__
    own.__code__ = _code_of(code, function)
    try:
        yield
    finally:
        own.__code__ = before


def all_waits() -> list[Wait]:
    """Every wait of the packages that communicate or wait for those that do."""
    found = []
    for path in sorted(path for name in _FOLDERS for path in (ROOT / "paro" / name).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found += [wait for wait, _ in _waits_in(module, ast.parse(path.read_text("utf-8")))]
    return found


def _path(module: str) -> Path:
    return ROOT / Path(*module.split(".")).with_suffix(".py")


def _waits_in(module: str, tree: ast.Module) -> Iterator[tuple[Wait, ast.AST]]:
    for function, body in _functions(tree):
        repeated: Counter[str] = Counter()
        for node in sorted(filter(_is_wait, ast.walk(body)), key=_place):
            text = ast.unparse(node)
            repeated[text] += 1
            number = f" #{repeated[text]}" if repeated[text] > 1 else ""
            yield Wait(module, function, text + number), node


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _place(node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, ast.expr | ast.keyword)
    return node.lineno, node.col_offset


def _is_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg == "after" and not isinstance(node.value, ast.Constant)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name = node.func.attr
    return name in _NAMES or name.startswith(_BEGINNINGS)


def _empty(tree: ast.Module, node: ast.AST) -> None:
    if isinstance(node, ast.keyword):
        node.value = ast.parse(_DONE, mode="eval").body
        return
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, field, ast.Constant(True))
            elif isinstance(value, list) and node in value:
                value[value.index(node)] = ast.Constant(True)


def _code_of(code: CodeType, function: str) -> CodeType:
    todo = [code]
    while todo:
        one = todo.pop()
        if one.co_qualname == function:
            return one
        todo += [const for const in one.co_consts if isinstance(const, CodeType)]
    raise AssertionError(f"{function} was not compiled")


HO_RING = "--paro-collective ho-ring"
ROTATE = "--paro-materialize rotate"
IN_PLACE = f"{ROTATE} --paro-rotate-in-place"
FULL = "--recompute-granularity full"
AHEAD = "--paro-updated-ahead 2"
FLAT = "--paro-collective flat"
MUON = "--optimizer muon --lr 0.01"
LARGE = "--hidden-size 256 --ffn-hidden-size 768"  # messages arrive well after they are posted
OFFLOAD = "--optimizer-cpu-offload"
OUTER = "--paro-outer-steps 2 --paro-outer-warmup 0 --paro-outer-delay 1"
AUTO = "AUTO"  # in flags: an algorithm chosen for every call
FOLDER = "FOLDER"  # in flags: a folder of the ranks, made for the run
SAVED = f"--save {FOLDER}"
CODES = (
    "--paro-inter-param-bits 4 --paro-inter-grad-bits 4 "
    "--bf16 --hidden-size 60 --ffn-hidden-size 151 --vocab-size 211"
)
AT_THE_SAVE = "--paro-outer-steps 3"  # a round is in flight then
OUTER_CODES = "--paro-outer-bits 4 --hidden-size 60 --ffn-hidden-size 151 --vocab-size 211"


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
        with changed(self.owner.__module__, method, self.old, self.new.replace("DONE", _DONE)):
            yield


_gathering = partial(Mutation, GatheringPolicy, strategy="IIG")
_updating = partial(Mutation, ParamAllGatherPolicy, old="return self._queue", new="return []  #")
_rotating = partial(Mutation, SlicePolicy, strategy="IIG")
_rotated = partial(Mutation, RotationPolicy, strategy="IIG", more=ROTATE)
_muon = partial(Mutation, UnitShards, strategy="IIG", more=MUON)
_native = partial(Mutation, NativeCollectives, "run")
_pipelined = partial(Mutation, PipelinedCollectives, "run", more=HO_RING)
_NEXT, _GRADS = "(ActionKind.WAIT_SHIFTED,)", "(ActionKind.WAIT_GRADS,)"
_COPIED = "(ActionKind.WAIT, buffer) for buffer in self.shape.replicated"
_REDUCED = "(ActionKind.WAIT_REDUCED, buffer) for buffer in self.shape.trainable"
# An order that is no call of a wait and no `after=`.
MUTATIONS = (
    _gathering("_gather_and_wait", "actions.append((ActionKind.WAIT, buffer))", "pass"),
    _gathering("end_step", f"*({_REDUCED})", ""),
    _updating("before_forward", strategy="IIG", more=AHEAD),
    _updating("flush", strategy="NIG", more=f"{SAVED} {AHEAD}"),
    _rotating("_begin_forward", "[(ActionKind.WAIT,)]", "[]", more=ROTATE),
    _rotating("before_forward", f"actions.append({_NEXT})", "pass", more=ROTATE),
    _rotating("after_forward", f"[shift, {_NEXT}]", "[shift]", more=f"{IN_PLACE} {FULL}"),
    _rotating("before_backward", f"actions.append({_NEXT})", "pass", more=ROTATE),
    _rotating("first_gradient", f"[*actions, {_GRADS}]", "actions", more=ROTATE),
    _rotating(
        "after_backward",
        f"{_NEXT},",
        "",
        more=f"{IN_PLACE} --trainable names:*norm*",  # else gradients that follow are waited for
    ),
    _rotating("after_backward", f"actions.append({_GRADS})", "pass", more=IN_PLACE),
    _rotated("begin_evaluation", _COPIED, ""),
    _rotated("end_step", _REDUCED, ""),
    _muon("grad_sync", "_fresh = reduced,", "_fresh = DONE,"),
    _muon("param_all_gather", "unit._updated = updated", "pass"),
    _native("[outermost], event)", "[outermost], DONE)", "NNI"),
    _native("reversed(inner), event)", "reversed(inner), DONE)", "NNN"),
    Mutation(Collectives, "run_after", "after=after", "after=DONE", "IIG", f"{CODES} {HO_RING}"),
    _pipelined("ready = done[stage.after]", "ready = DONE", "GGG"),
    _pipelined("[*first, memory.left[slot]]", "[*first]", "GGG"),
    _pipelined("(request.after,)", "(DONE,)", "1,2,8", world_size=8, group_size=4),
)

# Every wait and `after=` of the product, by name: a run, as a strategy and flags, that goes wrong
# without it.
CAUGHT = {
    "collectives.quantized QuantizedSum.reduce: after=after": ("IIG", CODES),
    "collectives.native FlatCollectives.run: after=request.after": ("IIG", FLAT),
    "collectives.interface Endpoint._submit: after=after": ("IIG", ""),
    "collectives.interface Collectives.run_after: after=after": ("GGG", AUTO),
    "collectives.native NativeCollectives._run: after=event": ("GGG", ""),
    "collectives.pipelined PipelinedCollectives.run: after=ready": ("GGG", HO_RING),
    "collectives.wire Wire._exchange_rows: message.wait()": ("NNI", LARGE),
    "collectives.wire Pending.wait: self._work.wait()": ("NNI", LARGE),
    "collectives.wire Wire.exchange: Pending(work, message.tensor, what).wait()": ("NIG", MUON),
    "distributed.exposed_time ExposedTimer.wait: event.wait()": ("IIG", ""),
    "optim.muon MuonStep._send_result: self.exposed_timer.wait(WaitKind.REDUCE, momentum.event)": (
        "IIG",
        MUON,
    ),
    "optim.muon MuonStep._apply: "
    "self.exposed_timer.wait(WaitKind.PARAM_ALL_GATHER, result.event)": ("IIG", MUON),
    **dict.fromkeys(
        (
            "optim.offload Offload.during_update: states.fetched.wait()",
            "optim.offload Offload._fetch: after=after",
            "optim.offload Offload.during_update: states.returned.wait()",
        ),
        ("IIG", OFFLOAD),
    ),
    "optim.outer OuterOptimizer._move: each.context.exposed_timer.wait(WaitKind.REDUCE, event)": (
        "NNN",
        f"{SAVED} {OUTER}",
    ),
    "optim.outer OuterUnit._after: after=after": ("III", f"{SAVED} {OUTER}"),
    "optim.outer OuterUnit.begin: after=stepped": ("III", f"{SAVED} {OUTER}"),
    "optim.outer OuterOptimizer._move: each.wait_reduced()": ("III", f"{SAVED} {OUTER}"),
    "optim.outer OuterOptimizer.wait: each.wait_reduced()": (
        "III",
        f"{SAVED} {OUTER} {AT_THE_SAVE}",
    ),
    "training.saving Saver.save: training.optimizer.outer.wait()": (
        "III",
        f"{SAVED} {OUTER} {AT_THE_SAVE}",
    ),
    "rotation.rotated_model RotatingUnit._wait_arrived: "
    "self.context.exposed_timer.wait(kind, self._arrivals.pop(kind, DONE))": ("IIG", ROTATE),
    "sharding.distributed_model DistributedModel.wait_for_updated_params: "
    "unit.wait_for_updated_params()": ("NIG", SAVED),
    "sharding.sharded_unit ShardedUnit.gather: after=self._updated": ("IIG", ""),
    "sharding.sharded_unit ShardedUnit.wait: self.wait_for_updated_params()": ("NNI", ""),
    "sharding.sharded_unit ShardedUnit.wait: "
    "self.context.exposed_timer.wait(WaitKind.GATHER, self._gathered)": ("IIG", ""),
    "sharding.sharded_unit ShardedUnit.reduce: after=event": ("GGG", AUTO),
    "sharding.sharded_unit ShardedUnit.free: "
    "self.context.exposed_timer.wait(WaitKind.REDUCE, self._grad_U_read)": ("IIG", ""),
    "sharding.shards UnitShards.wait_for_updated_params: "
    "self.context.exposed_timer.wait(WaitKind.PARAM_ALL_GATHER, self._updated)": ("IIG", ""),
    "sharding.shards UnitShards.param_all_gather: after=updated": ("IIG", CODES),
    "sharding.shards UnitShards.grad_sync: after=reduced": ("IIG", CODES),
    "sharding.shards UnitShards.queue: after=after": ("IIG", ""),
    "sharding.shards UnitShards.grad_sync: after=self._reduced": ("IIG", ""),
    "sharding.shards UnitShards.wait_reduced: "
    "self.context.exposed_timer.wait(WaitKind.REDUCE, self._reduced)": ("IIG", ""),
    "training.replicas check_replicas: training.model.wait_for_updated_params()": ("NIG", SAVED),
}

_STREAMS = "LateStreams stands for it; tests/paro/distributed/test_exposed_time.py"
_MESSAGES = "messages of threads; tests/paro/collectives/test_late_messages.py"
_SCHEDULE = "data of a schedule; tests/paro/collectives/test_schedule.py"
_PIPELINE = "data of the plan; a mutation of PipelinedCollectives.run ignores it"
_RING = "messages of threads, as in a ring; tests/paro/collectives/test_late_messages.py"
_COUNTS = "no order needs it: bytes and seconds sent before must not count for what follows"
_SAVES = (
    "no order needs it, a save reads masters: what is sent does not count as saving, and a lost "
    "peer ends the run before the save"
)
_HOST = "the host waits for a GPU; tests/paro/test_fake_cuda.py counts it"
_STAGES = "times the stages of threads' jobs"
_CLOCK = "no order needs it: else a time would be that of launches alone"
_THREAD = "the thread of a save; tests/end_to_end/test_checkpoint_flags.py"
_COPIES = "the thread of local copies; tests/end_to_end/test_local_copies.py"
_CONTEXT = "what attention waits for; tests/paro/context_parallel/test_blockwise.py removes each"
_HASHES = "hashes of a moving anchor; tests/paro/optim/test_outer.py compares them in flight"
_FORWARD = "each forward of an evaluation has waited for all units; one that fails has not"
_EXPORT = "a message that arrives when waited for; tests/paro/training/test_resume.py"
_USED = "for a gather that nothing has waited for: the policy releases units that have run"
_CLOSE = "no order needs it: a lost peer is named by it, before streams close"

# The others, and why no run on late streams goes wrong without them: all those of a module, or one.
MODULES = {
    "collectives.scheduled": _MESSAGES,
    "collectives.schedule": _SCHEDULE,
    "collectives.shifts": _RING,
    **dict.fromkeys(("context_parallel.attention", "context_parallel.exchange"), _CONTEXT),
    "distributed.comm_stream": _STREAMS,
    "training.in_memory": _COPIES,
}
ELSEWHERE = {
    "collectives.pipeline make_pipeline: after=index_of.get((chunk, number - 1))": _PIPELINE,
    "distributed.exposed_time ExposedTimer.wait: stage.wait()": _STAGES,
    "distributed.timers synchronize: torch.cuda.synchronize(device)": _CLOCK,
    "optim.offload Offload.during_update: torch.cuda.current_stream().synchronize()": _HOST,
    "training.replicas check_replicas: training.optimizer.outer.wait()": _HASHES,
    "optim.optimizer ParoOptimizer.loaded: self.model.wait_for_updated_params()": _COUNTS,
    "training.export prepare_export: training.model.wait_for_updated_params()": _SAVES,
    "training.export prepare_export: training.optimizer.outer.wait()": _EXPORT,
    "training.loop Loop._evaluate: self.snapshots.wait()": (
        "an evaluation replaces masters; tests/paro/training/test_loop.py removes it"
    ),
    "sharding.sharded_unit ShardedUnit.release: self.wait()": _USED,
    "training.loop Loop._reasons: self.snapshots.wait()": _COPIES,
    "training.loop Loop.run: self.training.model.wait_for_updated_params()": _SAVES,
    "training.loop Loop.run: self.training.model.wait_for_updated_params() #2": _SAVES,
    "training.saving Saver.settle: self.background.wait()": _THREAD,
    "training.saving Saver.resume_hint: self.background.wait()": _THREAD,
    "training.step Training.close: self.model.wait_for_updated_params()": _CLOSE,
    "training.evaluation evaluate: training.model.wait_for_updated_params()": _COUNTS,
    "training.evaluation _exchanged: model.wait_for_updated_params()": _FORWARD,
    "training.evaluation _exchanged: model.wait_for_updated_params() #2": _COUNTS,
}
