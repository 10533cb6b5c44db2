"""Attention of a context-parallel group: the schedule of each pass, its bytes, and its memory."""

# In: a model, a micro-batch with its context-parallel layout, and the schedule of a step. Out: for
# every forward, recomputation or backward of a block's attention a list of sends, computation and
# waits; the bytes that a rank sends; the bytes that backward allocates. A group is the ranks with
# fast links, such as a node. Sends and computation are those of paro/spec/kv_exchange.py, with n
# similar ring steps, or chunks of heads, merged into one: if each sends for m seconds and computes
# for c, they take n max(m, c) = max(n m, n c).
#
#   ring (p2p)    a turn, one step of the outer ring, sends keys and values (KV) to the next group,
#                 overlapped with all steps of the inner ring, which send KV inside the group; in
#                 backward dKV is sent one step later, and the last send overlaps with a few heads
#   allgather     attention to the rank's own tokens is cut in two: the all-gather of KV overlaps
#                 with the first part and, in backward, the reduce-scatter of dKV with the second
#   all-to-all    the all-to-alls of the first and of the last chunk of heads are exposed, those of
#                 the others overlap with computation

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import chain, groupby
from typing import NamedTuple

from model.config import down_name, up_name
from model.units import first_trained_unit, unit_specs
from paro.collectives.schedule import Op
from paro.planning.sending import Sender, To
from paro.spec.context_layout import head_exchange
from paro.spec.kv_exchange import (
    Action,
    Attend,
    DoubleRing,
    GatheredKV,
    Route,
    SendGrads,
    SendKV,
    TakeGrads,
    WaitKV,
    heads_at_first,
)
from paro.spec.run_spec import RunSpec
from paro.spec.sharding_spec import UINT8, Collective
from paro.step.actions import Move, Verb
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
    def num_forwards(self) -> int:
        """The compute time in units of a forward of attention; backward counts as two."""
        return 2 if self.is_backward else int(self is not AttentionPass.RECOMPUTE_EXCEPT_CORE)


class Message(NamedTuple):
    """A message to one rank, or a collective along axes, repeated `number` times in sequence."""

    to: To | Op
    span: AxisSpan
    num_bytes: int  # bytes of the message, or of the collective's unsharded buffer
    number: int = 1


class Send(NamedTuple):
    """Messages or collectives that are issued in sequence; a later wait names their key."""

    key: str
    messages: tuple[Message, ...]


# The entries of a pass, in order: a `Send` is queued, a float is a share of the pass to compute, a
# text is the key of a send to wait for.
Schedule = tuple[Send | float | str, ...]


class ContextAttention:
    """The attention of a model's blocks for a micro-batch of a context-parallel group."""

    def __init__(self, run: RunSpec) -> None:
        self.config, self.layout, self.trained = run.config, run.context, run.trained
        self.topology, self.messages = run.context_topology, messages_of(run)
        layout, heads, item_bytes = run.context, self.messages.kv_heads, run.compute_bytes
        inner, outer = layout.rings(self.topology)
        steps, turns = (math.prod(axis.size for axis in span) for span in (inner, outer))
        self._spans = {Route.INNER: inner, Route.OUTER: outer}
        self._exchange: DoubleRing | GatheredKV = DoubleRing(
            steps=steps, turns=turns, heads=heads, item_bytes=item_bytes
        )
        if layout.gathers:
            self._spans = {Route.COLLECTIVE: layout.ring_span(self.topology)}
            self._exchange = GatheredKV(ranks=layout.ring, heads=heads, item_bytes=item_bytes)

    def schedule(self, kind: AttentionPass) -> Schedule:
        """Build the schedule of a pass: the KV exchange, with the all-to-all of heads around it."""
        layout, messages = self.layout, self.messages
        kv_exchange: Schedule = ()
        if kind is not AttentionPass.RECOMPUTE_EXCEPT_CORE:
            entries = self._kv_exchange(is_backward=kind.is_backward)
            kv_exchange = tuple(
                one for one in entries if (one.messages if isinstance(one, Send) else one)
            )
        if layout.heads == 1:
            return kv_exchange
        num_chunks, span = messages.num_chunks, layout.heads_span(self.topology)
        qkv, output = (
            partial(Message, To.EACH, span, num_bytes // num_chunks)
            for num_bytes in (messages.qkv, messages.output)
        )
        first, last = (output(), qkv()) if kind.is_backward else (qkv(), output())
        others: tuple[Message, ...] = qkv(num_chunks - 1), output(num_chunks - 1)
        if kind is AttentionPass.RECOMPUTE_CORE:
            last = last._replace(number=0)
        elif kind is AttentionPass.BACKWARD_OF_KV and not messages.kv_in_chunks:
            # Gradients of keys and values go back with one chunk: the one that brought them.
            others = (output(num_chunks - 1),)
            queries = messages.output // num_chunks
            last = last._replace(num_bytes=messages.qkv - (num_chunks - 1) * queries)
        before = Send("first", (first,)), "first", Send("others", others)
        return *before, *kv_exchange, "others", Send("last", (last,)), "last"

    def passes(self, move: Move) -> tuple[AttentionPass, ...]:
        """Return the attention passes of an action; none if it computes no block."""
        (verb, number, *_), recompute = move, self.config.recompute
        if not 0 < number <= self.config.num_layers:  # the embedding is unit 0
            return ()
        if verb is Verb.FORWARD:
            return (AttentionPass.FORWARD,)
        if verb is Verb.RECOMPUTE:
            keeps_core = self.config.keeps_core
            return (AttentionPass.RECOMPUTE_EXCEPT_CORE if keeps_core else AttentionPass.FORWARD,)
        if verb is not Verb.GRADIENTS:
            return ()
        full = number > self._first_trained
        backward = AttentionPass.BACKWARD if full else self._first_backward
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

    def _kv_exchange(self, *, is_backward: bool) -> Iterator[Send | float | str]:
        """Yield the entries of the exchange of keys and values, some of which may be empty."""
        exchange = self._exchange
        actions = exchange.backward() if is_backward else exchange.forward()
        if isinstance(exchange, DoubleRing) and exchange.ranks > 1:
            return self._merged(exchange, actions)
        return self._in_order(actions)

    def _in_order(self, actions: Iterable[Action]) -> Iterator[Send | float | str]:
        """Yield the entries of actions in their order, consecutive computation as one."""
        for _, group in groupby(actions, lambda one: isinstance(one, Attend)):
            parts = [*group]
            if share := self._share(parts):
                yield share
                continue
            for one in parts:
                if isinstance(one, SendKV | SendGrads):
                    yield self._send(one.route, [one])
                elif not isinstance(one, Attend):
                    yield one.route.name

    def _merged(self, rings: DoubleRing, actions: Iterable[Action]) -> Iterator[Send | float | str]:
        """Yield the entries of rings: all turns but the last as one, the last, heads held back."""
        first, last_step = heads_at_first(rings.heads, rings.item_bytes), rings.steps - 1
        turns: list[Action] = []
        last_turn: list[Action] = []  # without its last step, which sends no keys and values
        at_end: list[Action] = []
        held_back: list[Action] = []
        for one in actions:
            if isinstance(one, WaitKV | TakeGrads):
                continue
            if one.heads.start >= first:
                held_back.append(one)
            elif one.turn < rings.turns - 1:
                turns.append(one)
            else:
                (last_turn if one.step < last_step else at_end).append(one)
        inner, outer = Route.INNER, Route.OUTER
        if turns:
            yield self._send(outer, turns)
            yield self._send(inner, turns)
            yield self._share(turns, range(last_step))
            yield inner.name
            yield self._share(turns, range(last_step, rings.steps))
            yield outer.name
        yield self._send(inner, last_turn)
        yield self._share(last_turn)
        yield inner.name
        yield self._share(at_end)
        yield self._send(inner, at_end)
        if turns:
            yield inner.name
            yield self._send(outer, last_turn + at_end)
            yield self._send(inner, held_back)
        yield self._share(held_back)
        yield inner.name
        yield outer.name

    def _share(self, actions: Iterable[Action], steps: range | None = None) -> float:
        """Compute the share of a pass's computation that actions are, if need be of some steps."""
        heads = sum(
            len(one.heads)
            for one in actions
            if isinstance(one, Attend) and (steps is None or one.step in steps)
        )
        return heads / (self._exchange.heads * self._exchange.ranks)

    def _send(self, route: Route, actions: Iterable[Action]) -> Send:
        """Return the messages of actions on a route; equal ones are one that is repeated."""
        messages, span = self.messages, self._spans[route]
        sends = (one for one in actions if isinstance(one, SendKV | SendGrads))
        numbers = Counter(
            (isinstance(one, SendGrads), len(one.heads)) for one in sends if one.route is route
        )
        found = []
        for (of_grads, heads), number in numbers.items():
            num_bytes = messages.kv_grads if of_grads else messages.kv
            if route is Route.COLLECTIVE:
                op = Op.REDUCE_SCATTER if of_grads else Op.ALL_GATHER
                found.append(Message(op, span, self.layout.ring * num_bytes))
            else:
                of_heads = round(num_bytes // messages.num_chunks * (heads / messages.kv_heads))
                found.append(Message(To.NEXT, span, of_heads, messages.num_chunks * number))
        return Send(route.name, tuple(found))

    def sent(self, moves: Iterable[Move], sender: Sender) -> Sent:
        """Compute the bytes that a rank sends for attention in the actions of a step."""
        total = Sent()
        for kind, count in Counter(chain.from_iterable(map(self.passes, moves))).items():
            sends = (one.messages for one in self.schedule(kind) if isinstance(one, Send))
            for to, span, num_bytes, number in chain.from_iterable(sends):
                if isinstance(to, Op):
                    numel = num_bytes // span[0].inner
                    collective = Collective(StreamKind.CONTEXT, to, span, numel, UINT8)
                    total += sender.sent([collective]) * count
                else:
                    total += sender.message(to, span, num_bytes) * (number * count)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The sizes of a rank's messages in one attention pass of a block."""

    qkv: int  # bytes of queries, keys and values to each rank of an all-to-all
    output: int  # bytes of attention's output to each rank of an all-to-all
    num_chunks: int  # number of chunks of heads in which the all-to-alls are cut
    kv_in_chunks: bool  # whether each chunk has its keys and values; else the first has all
    kv_heads: int  # heads of keys and values of a chunk on each rank
    kv: int  # bytes of a ring rank's keys and values, sent to the next rank
    kv_grads: int  # bytes of the gradients of a ring rank's keys and values


def messages_of(run: RunSpec) -> Messages:
    """Compute the messages of a run's micro-batch by its context-parallel layout."""
    layout, config, size = run.context, run.model, run.compute_bytes
    heads = config.num_attention_heads
    num_chunks, kv_chunks, repeats = head_exchange(heads, config.num_query_groups, layout)
    kv_heads = config.num_query_groups * repeats
    numel = run.num_tokens * config.kv_channels  # elements of a head
    return Messages(
        qkv=(heads + 2 * kv_heads) // layout.heads * numel * size,
        output=heads // layout.heads * numel * size,
        num_chunks=num_chunks,
        kv_in_chunks=kv_chunks == num_chunks,
        kv_heads=max(1, kv_heads // (layout.heads * num_chunks)),
        kv=2 * kv_heads * numel * size,
        kv_grads=2 * kv_heads * numel * 4,
    )


def kv_exchange_bytes(run: RunSpec) -> int:
    """Compute the peak bytes of attention's backward where keys and values are exchanged.

    Counted are the output's gradient, the queries' gradients (fp32 sum, and of one part), the
    gradients of a part's keys and values, sent keys and values, and fp32 sums of their gradients.
    """
    layout, size, messages = run.context, run.compute_bytes, messages_of(run)
    queries = run.num_tokens * run.model.num_attention_heads * run.model.kv_channels
    kv = messages.kv // size  # elements of a ring rank's keys and values
    part = queries * (2 * size + 4) + kv * size
    if layout.gathers:
        return part + layout.ring * kv * (size + 4)
    inner = layout.in_groups(run.group_size).inner
    steps, turns = inner // layout.heads, layout.size // inner
    moving, grads = min(2, steps - 1), 2 * (steps > 1)
    # The peak during the steps of the outer ring, where the first share waits for its sum.
    held: float = (moving + min(2, turns - 1) + (turns > 1)) * size + 4 * (grads + 2 * (turns > 2))
    if turns > 1:  # the peak at the end, when sums are sent between groups, and keys are cut
        left = 1 - heads_at_first(messages.kv_heads, size) / messages.kv_heads
        held = max(held, 4 * 2 + left * ((moving + (steps > 1)) * size + 4 * grads))
    return part + round(kv * (held + 4))
