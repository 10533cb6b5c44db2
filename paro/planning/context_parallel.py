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
from model.lora_config import down_name, up_name
from model.units import first_trained_unit, unit_specs
from paro.collectives.schedule import Op
from paro.distributed.byte_counter import Sent
from paro.planning.sending import Sender, To
from paro.spec.context_layout import heads_at_first, num_pieces
from paro.spec.run_spec import MicroBatch
from paro.spec.sharding_spec import UINT8, Collective
from paro.step.actions import Move, Verb
from paro.topology import AxisSpan, StreamKind, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of what ranks send each other for a block's attention, in one pass over it."""

    there: int  # to each rank of an exchange: queries, keys and values
    back: int  # and the output
    pieces: int  # in which both go
    apart: bool  # whether each piece has keys and values of its own; else the first has them
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
        apart=kv_heads > layout.heads,
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
    BACKWARD_OF_KEYS = "backward of keys"  # or values: no query needs gradients

    @property
    def is_backward(self) -> bool:
        return self in (Attending.BACKWARD, Attending.BACKWARD_OF_KEYS)

    @property
    def num_forwards(self) -> int:
        """How many forwards compute for as long."""
        return 2 if self.is_backward else int(self is not Attending.KEPT)


@dataclass(frozen=True, kw_only=True)
class AttentionOfBlocks:
    """The passes over attention that the actions of a step make."""

    config: LlamaConfig
    trained: frozenset[str]  # names of parameters

    def passes(self, move: Move) -> tuple[Attending, ...]:
        """Return the passes of attention in an action; none if it computes with no block."""
        verb, number, *_ = move
        if not 0 < number <= self.config.num_layers:  # the embedding is unit 0
            return ()
        if verb is Verb.GRADIENTS:
            return self._backward(number)
        return {
            Verb.FORWARD: (Attending.FORWARD,),
            Verb.RECOMPUTE: (Attending.KEPT if self.config.keeps_core else Attending.FORWARD,),
        }.get(verb, ())

    def _backward(self, number: int) -> tuple[Attending, ...]:
        recompute, first = self.config.recompute, self._of_first_trained
        backward = Attending.BACKWARD if number > self._first_trained else first
        if backward is None:
            return ()
        has_core = recompute is not None and recompute.core_attention
        return (*(Attending.CORE,) * has_core, backward)

    @cached_property
    def _first_trained(self) -> int:
        return first_trained_unit(unit_specs(self.config), self.trained.__contains__)

    @cached_property
    def _of_first_trained(self) -> Attending | None:
        """The backward of attention in the first block that trains; None if what trains follows.

        What precedes it needs no gradients. The projections of a norm's output are one operation:
        if a part of it trains, autograd asks for the gradients of all its results.
        """
        unit = unit_specs(self.config)[self._first_trained]
        trains = {name for name in unit.shapes if f"{unit.name}.{name}" in self.trained}
        queries, *others = (
            {f"w{part}", f"b{part}", f"{part}_norm", down_name(f"w{part}"), up_name(f"w{part}")}
            for part in "qkv"
        )
        together = {"attention_norm"}
        if self.config.torch_compile is None:
            together |= {"wq", "wk", "wv"}
        if trains & (together | queries):
            return Attending.BACKWARD
        return Attending.BACKWARD_OF_KEYS if trains & set().union(*others) else None


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
        first, last = (back(), there()) if kind.is_backward else (there(), back())
        others: tuple[Message, ...] = there(pieces - 1), back(pieces - 1)
        if kind is Attending.CORE:
            last = last._replace(number=0)
        elif kind is Attending.BACKWARD_OF_KEYS and not messages.apart:
            # Only the piece that came with keys and values goes back.
            others = (back(pieces - 1),)
            queries = messages.back // pieces
            last = last._replace(num_bytes=messages.there - (pieces - 1) * queries)
        return (
            Send("first", (first,)),
            "first",
            Send("others", others),
            *within,
            "others",
            Send("last", (last,)),
            "last",
        )

    def _within(self, kind: Attending) -> Pass:
        gathers = self.batch.context.gathers
        return self._gathered(kind) if gathers else self._turned(kind)

    def _gathered(self, kind: Attending) -> Pass:
        """Return keys and values of all places by a collective."""
        layout, messages = self.batch.context, self._messages
        span, own = layout.ring_span(self.topology), 1 / layout.ring
        keys = Send("keys", (Message(Op.ALL_GATHER, span, layout.ring * messages.keys),))
        if not kind.is_backward:
            return keys, own, "keys", 1 - own
        grads = Message(Op.REDUCE_SCATTER, span, layout.ring * messages.grads)
        now = messages.at_first * own
        return keys, now, "keys", 1 - own, Send("grads", (grads,)), own - now, "grads"

    def _turned(self, kind: Attending) -> Pass:
        """Return keys and values go round the rings."""
        rings = self.batch.context.rings(self.topology)
        inner, outer = (partial(self._hops, span) for span in rings)
        steps, turns = (math.prod(axis.size for axis in span) for span in rings)
        share, sums = 1 / (steps * turns), kind.is_backward
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
        """Return keys and values, and sums of their gradients, to the next rank."""
        messages = self._messages
        return tuple(
            Message(To.NEXT, span, round(num_bytes // messages.pieces * part), times)
            for num_bytes, number in ((messages.keys, keys), (messages.grads, sums))
            if part > 0 and (times := messages.pieces * number) > 0
        )


def context_traffic(
    blocks: AttentionOfBlocks,
    batch: MicroBatch,
    moves: Iterable[Move],
    world_size: int,
    sender: Sender,
) -> Sent:
    """Return bytes that a rank sends for attention in these actions."""
    if batch.context.size == 1:
        return Sent()
    own = batch.context.topology(world_size=world_size, group_size=sender.group_size)
    attention = Attention(config=blocks.config, batch=batch, topology=own)
    total = Sent()
    for kind, number in Counter(chain.from_iterable(map(blocks.passes, moves))).items():
        sends = (one.messages for one in attention.does(kind) if isinstance(one, Send))
        for message in chain.from_iterable(sends):
            total += _sent(message, sender) * number
    return total


def _sent(message: Message, sender: Sender) -> Sent:
    to, span, num_bytes, number = message
    if isinstance(to, Op):
        numel = num_bytes // span[0].inner
        return sender.sent([Collective(StreamKind.CONTEXT, to, span, numel, UINT8)])
    return sender.message(to, span, num_bytes) * number


def travelling_bytes(config: LlamaConfig, batch: MicroBatch) -> int:
    """Return allocated at most in attention's backward where keys and values travel.

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
