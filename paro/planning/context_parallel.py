"""What attention sends where ranks share samples, as in training, and what it allocates."""

# A pass over a block's attention sends messages, computes shares of the pass, and waits for what
# it has sent. Turns of a ring are alike, so they are one: n turns in each of which a message of m
# seconds travels while p are computed take n max(m, p) = max(n m, n p). The same holds of the
# pieces in which heads are exchanged.
#
#     ring       Ri ranks inside, Ro outside, p = 1 / (Ri Ro) of the pass: in a turn Ri - 1 messages
#                of the inner ring travel beside as many p, and one of the outer beside Ri of them;
#                nothing travels outside in the last turn. In backward sums follow one step behind:
#                beside the last one a part of turn 0 is computed or, in one ring, of the own p; the
#                last one inside a group overlaps with nothing, if there are two rings.
#     gather     beside the own 1/R; in backward beside a part of it, the reduce-scatter beside the
#                rest
#     exchange   the first piece in and the last out overlap with nothing, the others with all else
#
# A recomputation of the core alone ends before the last output has travelled; one of a block that
# kept what attention computes exchanges heads alone.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from model.config import LlamaConfig
from paro.collectives.schedule import Op
from paro.context_parallel.layout import heads_at_first, num_pieces
from paro.distributed.byte_counter import Sent
from paro.planning.run_plan import MicroBatch
from paro.planning.sending import Collective, Sender, To
from paro.step.actions import Move, Verb
from paro.topology import AxisSpan, Topology, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of what ranks send each other for a block's attention, in one pass over it."""

    there: int  # to each rank of an exchange: queries, keys and values
    back: int  # and the output
    pieces: int  # in which both go
    at_first: float  # of a rank's own share of gradients, the part that is not left for the end
    keys: int  # a place's keys and values, to the next place of a ring
    grads: int  # and their gradients


def messages_of(config: LlamaConfig, batch: MicroBatch) -> Messages:
    """Those of a micro-batch whose samples ranks share."""
    layout, heads = batch.context, config.num_attention_heads
    kv_heads = max(config.num_query_groups, layout.heads)  # as they are sent
    numel = batch.num_tokens * config.kv_channels  # of a head
    pieces = num_pieces(heads, kv_heads, layout) if layout.heads > 1 else 1
    of_piece = max(1, kv_heads // (layout.heads * pieces))
    return Messages(
        there=(heads + 2 * kv_heads) // layout.heads * numel * batch.compute_bytes,
        back=heads // layout.heads * numel * batch.compute_bytes,
        pieces=pieces,
        at_first=heads_at_first(of_piece, batch.compute_bytes) / of_piece,
        keys=2 * kv_heads * numel * batch.compute_bytes,
        grads=2 * kv_heads * numel * 4,
    )


class Attending(Enum):
    """A pass over a block's attention."""

    FORWARD = "forward"
    CORE = "core"  # a recomputation of the core alone
    KEPT = "kept"  # a recomputation of a block that kept what attention computes
    BACKWARD = "backward"

    @property
    def num_forwards(self) -> int:
        """How many forwards compute for as long."""
        return {Attending.BACKWARD: 2, Attending.KEPT: 0}.get(self, 1)


def attends(config: LlamaConfig, verb: Verb) -> tuple[Attending, ...]:
    """The passes over a block's attention of an action that computes."""
    has_core = config.recompute is not None and config.recompute.core_attention
    return {
        Verb.FORWARD: (Attending.FORWARD,),
        Verb.RECOMPUTE: (Attending.KEPT if config.keeps_core else Attending.FORWARD,),
        Verb.GRADIENTS: (Attending.CORE,) * has_core + (Attending.BACKWARD,),
    }.get(verb, ())


class Message(NamedTuple):
    """What a rank sends along a span, so many times, one after the other."""

    to: To | Op
    span: AxisSpan
    num_bytes: int  # of a collective: of its whole buffer
    number: int = 1


class Send(NamedTuple):
    """Messages, one after the other; their key is waited for later, or at once."""

    key: str
    messages: tuple[Message, ...]


# What a pass does, one after the other; a number computes this share of it, a key is waited for.
Pass = tuple[Send | float | str, ...]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The passes over a block's attention; the topology is that of its layout."""

    config: LlamaConfig
    batch: MicroBatch
    topology: Topology

    @cached_property
    def _messages(self) -> Messages:
        return messages_of(self.config, self.batch)

    def does(self, kind: Attending) -> Pass:
        """What a rank does in such a pass."""
        layout, messages = self.batch.context, self._messages
        within = () if kind is Attending.KEPT else self._within(kind)
        if layout.heads == 1:
            return within
        span, pieces = layout.heads_span(self.topology), messages.pieces
        there, back = (
            partial(Message, To.EACH, span, num_bytes // pieces)
            for num_bytes in (messages.there, messages.back)
        )
        first, last = (back, there) if kind is Attending.BACKWARD else (there, back)
        return (
            Send("first", (first(),)),
            "first",
            Send("others", (there(pieces - 1), back(pieces - 1))),
            *within,
            "others",
            Send("last", (last(int(kind is not Attending.CORE)),)),
            "last",
        )

    def _within(self, kind: Attending) -> Pass:
        gathers = self.batch.context.gathers
        return self._gathered(kind) if gathers else self._turned(kind)

    def _gathered(self, kind: Attending) -> Pass:
        """Keys and values of all places by a collective."""
        layout, messages = self.batch.context, self._messages
        span, own = layout.ring_span(self.topology), 1 / layout.ring
        keys = Send("keys", (Message(Op.ALL_GATHER, span, layout.ring * messages.keys),))
        if kind is not Attending.BACKWARD:
            return keys, own, "keys", 1 - own
        grads = Message(Op.REDUCE_SCATTER, span, layout.ring * messages.grads)
        now = messages.at_first * own
        return keys, now, "keys", 1 - own, Send("grads", (grads,)), own - now, "grads"

    def _turned(self, kind: Attending) -> Pass:
        """Keys and values go round the rings."""
        rings = self.batch.context.rings(self.topology)
        inner, outer = (partial(self._hops, span) for span in rings)
        steps, turns = (math.prod(axis.size for axis in span) for span in rings)
        share, sums = 1 / (steps * turns), kind is Attending.BACKWARD
        if share == 1:
            return (1.0,)
        now = self._messages.at_first if sums else 1.0
        last_turn = (
            Send("inner", inner(steps - 1, sums * (steps - 2))),
            (steps - 2 + (now if turns == 1 else 1.0)) * share,
            "inner",
            share,
            Send("inner", inner(0, sums * min(1, steps - 1))),
        )
        if turns == 1:
            return (*last_turn, (1 - now) * share, "inner")

        def in_group(turns: int, part: float) -> Send:
            """So many turns of the inner ring, with a part of the heads."""
            hops = turns * (steps - 1)
            return Send("inner", inner(hops, sums * hops, part))

        return (
            Send("outer", outer(turns - 1, sums * (turns - 2))),
            in_group(1, now),
            in_group(turns - 2, 1.0),
            (now + turns - 2) * (steps - 1) * share,
            "inner",
            (now + turns - 2) * share,
            "outer",
            *last_turn,
            "inner",
            Send("outer", outer(0, sums)),
            in_group(1, 1 - now),
            (1 - now) * steps * share,
            "inner",
            "outer",
        )

    def _hops(self, span: AxisSpan, keys: int, sums: int, part: float = 1.0) -> tuple[Message, ...]:
        """Keys and values, and sums of their gradients, to the next rank."""
        messages = self._messages
        return tuple(
            Message(To.NEXT, span, round(num_bytes // messages.pieces * part), times)
            for num_bytes, number in ((messages.keys, keys), (messages.grads, sums))
            if part > 0 and (times := messages.pieces * number) > 0
        )


def context_traffic(
    config: LlamaConfig,
    batch: MicroBatch,
    moves: Iterable[Move],
    world_size: int,
    sender: Sender,
) -> Sent:
    """Bytes that a rank sends for attention in these actions."""
    own = batch.context.topology(world_size=world_size, group_size=sender.group_size)
    attention = Attention(config=config, batch=batch, topology=own)
    blocks = range(1, config.num_layers + 1)
    numbers = Counter(move[0] for move in moves if move[0] >= Verb.FORWARD and move[1] in blocks)
    total = Sent()
    for verb, number in numbers.items() if batch.context.size > 1 else ():
        passes = chain.from_iterable(map(attention.does, attends(config, verb)))
        sends = (one.messages for one in passes if isinstance(one, Send))
        for message in chain.from_iterable(sends):
            total += _sent(message, sender) * number
    return total


def _sent(message: Message, sender: Sender) -> Sent:
    to, span, num_bytes, number = message
    if isinstance(to, Op):
        return sender.sent([Collective(Use.CONTEXT, to, span, num_bytes, itemsize=1)])
    return sender.message(to, span, num_bytes) * number


def travelling_bytes(config: LlamaConfig, batch: MicroBatch) -> int:
    """Allocated at most in attention's backward where keys and values travel.

    The gradient of its output; those of queries, summed in fp32 and of one part; those of a part's
    keys and values; and keys and values that move, with their gradients' sums in fp32.
    """
    layout, size = batch.context, batch.compute_bytes
    queries = batch.num_tokens * config.num_attention_heads * config.kv_channels
    of_place = messages_of(config, batch).keys // size  # elements of keys and values
    part = queries * (2 * size + 4) + of_place * size
    if layout.gathers:
        return part + layout.ring * of_place * (size + 4)
    inner = layout.inner or layout.size
    places, turns = inner // layout.heads, layout.size // inner
    moving, sums = min(2, places - 1), 2 * (places > 1)
    # While turns follow each other; the first share of one waits for its sum.
    held: float = (moving + min(2, turns - 1) + (turns > 1)) * size + 4 * (sums + 2 * (turns > 2))
    if turns > 1:  # at the end, beside the sum between groups: keys that are cut, and travel
        left = 1 - messages_of(config, batch).at_first
        held = max(held, 4 * 2 + left * ((moving + (places > 1)) * size + 4 * sums))
    return part + round(of_place * (held + 4))
