"""Attention of a context-parallel group: the schedule of each pass, its bytes, and its memory."""

# In: a model, a micro-batch with its context-parallel layout, and the schedule of a step. Out: for
# every forward, recomputation or backward of a block's attention a list of sends, computation and
# waits; the bytes that a rank sends; the bytes that backward allocates. A group is the ranks with
# fast links, such as a node. Sends and computation are those of paro/spec/kv_exchange.py, but n
# ring steps or chunks of heads are simulated as one, which is exact if they are alike: steps that
# each send for m seconds and meanwhile compute for c take n max(m, c) = max(n m, n c).
#
#   ring (p2p)    a turn, one step of the outer ring, sends keys and values (KV) to the next group,
#                 overlapped with all steps of the inner ring, which send KV inside the group; in
#                 backward dKV is sent one step later, and the last send overlaps with a few heads
#   allgather     attention to the rank's own tokens is cut in two: the all-gather of KV overlaps
#                 with the first part and, in backward, the reduce-scatter of dKV with the second
#   all-to-all    the all-to-alls of the first and of the last chunk of heads are exposed, those of
#                 the others overlap with computation

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property, partial
from itertools import chain, groupby
from typing import NamedTuple

from model.config import down_name, up_name
from model.units import first_trained_unit, unit_specs
from paro.collectives.schedule import Op
from paro.planning.sending import Receivers, Sender
from paro.planning.simulation import WaitOp
from paro.spec.context_layout import head_exchange
from paro.spec.kv_exchange import (
    AttendKV,
    DoubleRing,
    GatheredKV,
    KVAction,
    KVRoute,
    SendKV,
    SendKVGrads,
    WaitKV,
    WaitKVGrads,
    heads_at_first,
)
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import UINT8, Collective
from paro.step.actions import Action, ActionKind
from paro.topology import AxisSpan, Sent, StreamKind


class AttentionPass(Enum):
    """A computation of a block's attention: forward, a recomputation, or backward."""

    FORWARD = "forward"
    RECOMPUTE_CORE = "recomputation of core attention alone"
    RECOMPUTE_EXCEPT_CORE = "recomputation of a block whose core attention's output was saved"
    BACKWARD = "backward"
    BACKWARD_OF_KV = "backward of keys and values alone"

    @property
    def is_backward(self) -> bool:
        return self in (AttentionPass.BACKWARD, AttentionPass.BACKWARD_OF_KV)

    @property
    def forward_equivalents(self) -> int:
        """The compute time in units of a forward of core attention; backward counts as two."""
        return 2 if self.is_backward else int(self is not AttentionPass.RECOMPUTE_EXCEPT_CORE)


class AttentionMessage(NamedTuple):
    """A message to one rank, or a collective along axes, repeated `number` times in sequence."""

    to: Receivers | Op
    span: AxisSpan
    num_bytes: int  # bytes of the message, or of the collective's unsharded buffer
    number: int = 1


class AttentionSend(NamedTuple):
    """The start of messages, which are sent in sequence; a later wait names their key."""

    key: str
    messages: tuple[AttentionMessage, ...]


class AttentionShare(NamedTuple):
    """The computation of a share of an attention pass."""

    share: float


AttentionSchedule = tuple[AttentionSend | AttentionShare | WaitOp, ...]
_Entries = Iterator[AttentionSend | AttentionShare | WaitOp]


class AttentionSchedules:
    """The schedules of attention in a model's blocks, for a micro-batch that ranks share."""

    def __init__(self, run: RunSpec) -> None:
        self.config, self.layout, self.trained = run.config, run.context, run.trained
        self.topology, self.sizes = run.context_topology, AttentionMessageSizes(run)
        self._exchange = self.layout.kv_exchange(self.topology)

    def schedule(self, kind: AttentionPass) -> AttentionSchedule:
        """Build the schedule of a pass: the KV exchange, with the all-to-all of heads around it."""
        layout, sizes = self.layout, self.sizes
        kv_exchange: AttentionSchedule = ()
        if kind is not AttentionPass.RECOMPUTE_EXCEPT_CORE:
            kv_exchange = tuple(self._kv_exchange(is_backward=kind.is_backward))
        if layout.heads == 1:
            return kv_exchange
        num_chunks, span = sizes.num_chunks, layout.heads_span(self.topology)
        qkv, output = (
            partial(AttentionMessage, Receivers.EACH, span, num_bytes // num_chunks)
            for num_bytes in (sizes.qkv, sizes.output)
        )
        first, last = (output(), qkv()) if kind.is_backward else (qkv(), output())
        others: tuple[AttentionMessage, ...] = qkv(num_chunks - 1), output(num_chunks - 1)
        if kind is AttentionPass.RECOMPUTE_CORE:
            last = last._replace(number=0)
        elif kind is AttentionPass.BACKWARD_OF_KV and not sizes.kv_in_chunks:
            # Gradients of keys and values go back with one chunk: the one that brought them.
            others = (output(num_chunks - 1),)
            queries = sizes.output // num_chunks
            last = last._replace(num_bytes=sizes.qkv - (num_chunks - 1) * queries)
        return (
            AttentionSend("first", (first,)),
            WaitOp("first"),
            AttentionSend("others", others),
            *kv_exchange,
            WaitOp("others"),
            AttentionSend("last", (last,)),
            WaitOp("last"),
        )

    def passes(self, action: Action) -> tuple[AttentionPass, ...]:
        """Return the attention passes of an action; none if it computes no block."""
        (kind, number, *_), recompute = action, self.config.recompute
        if not 0 < number <= self.config.num_layers:  # the embedding is unit 0
            return ()
        if kind is ActionKind.FORWARD:
            return (AttentionPass.FORWARD,)
        if kind is ActionKind.RECOMPUTE:
            keeps_core = self.config.keeps_core
            return (AttentionPass.RECOMPUTE_EXCEPT_CORE if keeps_core else AttentionPass.FORWARD,)
        if kind is not ActionKind.GRADIENTS:
            return ()
        backward = AttentionPass.BACKWARD if number > self._first_trained else self._first_backward
        if backward is None:
            return ()
        recomputes_core = recompute is not None and recompute.core_attention
        return (AttentionPass.RECOMPUTE_CORE, backward) if recomputes_core else (backward,)

    @cached_property
    def _first_trained(self) -> int:
        return first_trained_unit(unit_specs(self.config), self.trained.__contains__)

    @cached_property
    def _first_backward(self) -> AttentionPass | None:
        """The backward of attention in the first block that trains; None if it has no backward.

        Parts before the first trained parameter need no gradients. The projections of a norm's
        output are one operation: if one projection trains, autograd needs the gradients of all.
        """
        unit = unit_specs(self.config)[self._first_trained]
        trains = {name for name in unit.shapes if f"{unit.name}.{name}" in self.trained}
        queries, *kv = (
            {f"w{part}", f"b{part}", f"{part}_norm", down_name(f"w{part}"), up_name(f"w{part}")}
            for part in "qkv"
        )
        together = {"attention_norm"}
        if self.config.torch_compile is None:
            together |= {"wq", "wk", "wv"}
        if trains & (together | queries):
            return AttentionPass.BACKWARD
        return AttentionPass.BACKWARD_OF_KV if trains & set().union(*kv) else None

    def _kv_exchange(self, *, is_backward: bool) -> _Entries:
        """Yield the entries of the exchange of keys and values, from the actions of a rank."""
        exchange, heads = self._exchange, self.sizes.kv_heads
        actions = exchange.forward(heads)
        if is_backward:
            actions = exchange.backward(heads, self.sizes.item_bytes)
        if isinstance(exchange, GatheredKV) or exchange.ranks == 1:
            return self._in_order(actions)
        # Without sends of no messages and shares of nothing.
        return (entry for entry in self._merged(exchange, actions) if entry[-1])

    def _in_order(self, actions: Iterable[KVAction]) -> _Entries:
        """Yield the entries of actions in their order, consecutive computation as one."""
        for is_compute, group in groupby(actions, lambda action: isinstance(action, AttendKV)):
            if is_compute:
                yield self._share(group)
                continue
            for action in group:
                if isinstance(action, SendKV | SendKVGrads):
                    yield self._send(action.route, [action])
                elif isinstance(action, WaitKV | WaitKVGrads):
                    yield WaitOp(action.route.name)

    def _merged(self, rings: DoubleRing, actions: Iterable[KVAction]) -> _Entries:
        """Yield the entries of a double ring, some of them empty.

        All turns but the last are merged into one, then come the last turn and the heads that
        backward computes at the end.
        """
        sizes, last_step = self.sizes, rings.steps - 1
        first = heads_at_first(sizes.kv_heads, sizes.item_bytes)
        turns: list[KVAction] = []
        last_turn: list[KVAction] = []  # without its last step, which sends no keys and values
        at_end: list[KVAction] = []
        held_back: list[KVAction] = []
        for action in actions:
            if isinstance(action, WaitKV | WaitKVGrads):
                continue
            if action.heads.start >= first:
                held_back.append(action)
            elif action.turn < rings.turns - 1:
                turns.append(action)
            else:
                (last_turn if action.step < last_step else at_end).append(action)
        inner, outer = KVRoute.INNER, KVRoute.OUTER
        if turns:
            yield self._send(outer, turns)
            yield self._send(inner, turns)
            yield self._share(turns, range(last_step))
            yield WaitOp(inner.name)
            yield self._share(turns, range(last_step, rings.steps))
            yield WaitOp(outer.name)
        yield self._send(inner, last_turn)
        yield self._share(last_turn)
        yield WaitOp(inner.name)
        yield self._share(at_end)
        yield self._send(inner, at_end)
        if turns:
            yield WaitOp(inner.name)
            yield self._send(outer, last_turn + at_end)
            yield self._send(inner, held_back)
        yield self._share(held_back)
        yield WaitOp(inner.name)
        yield WaitOp(outer.name)

    def _share(self, actions: Iterable[KVAction], steps: range | None = None) -> AttentionShare:
        """Compute the share of a pass's attention in actions, or in their ring steps in `steps`."""
        heads = sum(
            len(action.heads)
            for action in actions
            if isinstance(action, AttendKV) and (steps is None or action.step in steps)
        )
        return AttentionShare(heads / (self.sizes.kv_heads * self._exchange.ranks))

    def _send(self, route: KVRoute, actions: Iterable[KVAction]) -> AttentionSend:
        """Merge the sends of actions on a route; messages of equal size become one with a count."""
        sizes, span = self.sizes, self._exchange.spans[route]
        sends = (action for action in actions if isinstance(action, SendKV | SendKVGrads))
        numbers = Counter(
            (isinstance(kv, SendKVGrads), len(kv.heads)) for kv in sends if kv.route is route
        )
        messages = []
        for (of_grads, heads), number in numbers.items():
            num_bytes = sizes.kv_grads if of_grads else sizes.kv
            if route is KVRoute.COLLECTIVE:
                op = Op.REDUCE_SCATTER if of_grads else Op.ALL_GATHER
                messages.append(AttentionMessage(op, span, self._exchange.ranks * num_bytes))
            else:
                of_heads = round(num_bytes // sizes.num_chunks * (heads / sizes.kv_heads))
                count = sizes.num_chunks * number
                messages.append(AttentionMessage(Receivers.NEXT, span, of_heads, count))
        return AttentionSend(route.name, tuple(messages))

    def sent(self, actions: Iterable[Action], sender: Sender) -> Sent:
        """Compute the bytes that a rank sends for attention in the actions of a step."""
        total = Sent()
        for kind, count in Counter(chain.from_iterable(map(self.passes, actions))).items():
            schedule = self.schedule(kind)
            sends = (entry.messages for entry in schedule if isinstance(entry, AttentionSend))
            for to, span, num_bytes, number in chain.from_iterable(sends):
                if isinstance(to, Op):
                    numel = num_bytes // span[0].inner
                    collective = Collective(StreamKind.CONTEXT, to, span, numel, UINT8)
                    total += sender.sent([collective]) * count
                else:
                    total += sender.message(to, span, num_bytes) * (number * count)
        return total


class AttentionMessageSizes:
    """The sizes of a rank's messages in one attention pass of a block, for a micro-batch."""

    def __init__(self, run: RunSpec) -> None:
        layout, config, size = run.context, run.model, run.compute_bytes
        heads = config.num_attention_heads
        num_chunks, kv_chunks, repeats = head_exchange(heads, config.num_query_groups, layout)
        kv_heads = config.num_query_groups * repeats
        numel = run.num_tokens * config.kv_channels  # elements of a head
        # Bytes to each rank of an all-to-all: queries, keys and values; attention's output.
        self.qkv = (heads + 2 * kv_heads) // layout.heads * numel * size
        self.output = heads // layout.heads * numel * size
        self.num_chunks = num_chunks  # chunks of heads in which the all-to-alls are cut
        # Whether each chunk has its keys and values; else the first has all.
        self.kv_in_chunks = kv_chunks == num_chunks
        # Number of heads of keys and values of a chunk on each rank.
        self.kv_heads = max(1, kv_heads // (layout.heads * num_chunks))
        self.item_bytes = size  # bytes of an element of queries, keys and values
        self.kv = 2 * kv_heads * numel * size  # bytes that a ring rank sends to the next rank
        self.kv_grads = 2 * kv_heads * numel * 4  # bytes of the gradients of keys and values


def kv_exchange_bytes(run: RunSpec) -> int:
    """Compute the peak bytes of attention's backward where keys and values are exchanged.

    Counted are the output's gradient, the queries' gradients (fp32 sum, and of one part), the
    gradients of a part's keys and values, sent keys and values, and fp32 sums of their gradients.
    """
    size, sizes = run.compute_bytes, AttentionMessageSizes(run)
    queries = run.num_tokens * run.model.num_attention_heads * run.model.kv_channels
    kv = sizes.kv // size  # elements of a ring rank's keys and values
    part = queries * (2 * size + 4) + kv * size
    exchange = run.context.kv_exchange(run.context_topology)
    if isinstance(exchange, GatheredKV):
        return part + exchange.ranks * kv * (size + 4)
    steps, turns = exchange.steps, exchange.turns
    moving, between = map(exchange.receive_buffers, exchange.spans)
    grads, summed = 2 * (steps > 1), 2 * (turns > 2)  # sums of the inner and of the outer ring
    # The peak during the steps of the outer ring; with sums there a turn's first share waits.
    held: float = (moving + between + (turns > 2)) * size + 4 * (grads + summed)
    if turns > 1:  # the peak at the end, when sums are sent between groups, and keys are cut
        left = 1 - heads_at_first(sizes.kv_heads, size) / sizes.kv_heads
        held = max(held, 4 * 2 + left * ((moving + (steps > 1)) * size + 4 * grads))
    return part + round(kv * (held + 4))
