"""How the data of a matched call travels when it does not travel with the call itself.

    gather   every rank's bytes to all others (a broadcast is the case where one rank has any)
    scatter  to every member the part that is for it
    reduce   share j to member j, who reduces it in rank order and sends the result to all
             (or keeps it: reducescatter)

Pieces are sent only once all members' calls are here, so whoever gets one knows where to put it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdlite.arithmetic import blocked_steps, run
from hvdlite.backends.base import Control
from hvdlite.ticket import EXTRA, INLINE, NBYTES, SERIAL, Key, Terms, Ticket
from hvdlite.types import Array

CALLS, PIECE = 1, 2  # what a message is

# Author, serial number of its call, stage.  Stage 2 i carries what the ranks contribute to segment
# i (0: to a call that does not reduce), 2 i + 1 its reduced shares.
Place = tuple[int, int, int]
REFUSED = -1  # a stage of its own: why the author cannot do its part of a reduction


@dataclass(slots=True)
class Incoming:
    """Bytes on their way here, in order."""

    target: Array
    key: Key
    received: int = 0

    def take(self, offset: int, payload: memoryview | bytes) -> None:
        """Store a piece; one that has come before does no harm."""
        if offset == self.received:
            end = offset + len(payload)
            self.target[offset:end] = np.frombuffer(payload, np.uint8)
            self.received = end

    @property
    def complete(self) -> bool:
        """Whether all is here."""
        return self.received >= self.target.size


@dataclass(slots=True)
class Outgoing:
    """Bytes on their way out, piece by piece as there is room."""

    to: tuple[int, ...]
    serial: int
    stage: int
    data: memoryview
    offset: int = 0

    def pump(self, control: Control) -> bool:
        """Send what there is room for; whether anything went."""
        moved = False
        while self.offset < len(self.data):
            piece = self.data[self.offset : self.offset + control.max_payload]
            if not control.post(self.to, (PIECE, self.serial, self.stage, self.offset), piece):
                return moved
            self.offset += len(piece)
            moved = True
        return moved

    @property
    def complete(self) -> bool:
        """Whether all is out."""
        return self.offset >= len(self.data)


class Transfer:
    """Where the bytes of a matched call come from and go to.

    Args:
        ticket: The call, matched; its `error` is set when there is no room for the result here:
            the others get theirs all the same, or are told if they need what this rank reduces.
        rank: This rank.
        block_elements: Elements that one NumPy call of a reduction handles.

    Attributes:
        parts: Of the result.
        incoming: Where what comes goes.
        outgoing: What goes out.
    """

    def __init__(self, ticket: Ticket, rank: int, block_elements: int) -> None:
        self.parts: list[Array] = []
        self.incoming: dict[Place, Incoming] = {}
        self.outgoing: list[Outgoing] = []
        self._rank, self._block_elements = rank, block_elements
        self._others = others(ticket.active, rank)
        self._shares: list[tuple[list[Array], Array]] = []  # operands and result
        self._returns: list[Outgoing] = []
        self._is_reduced = not ticket.terms.segments
        try:
            if ticket.terms.segments:
                self._plan_reduction(ticket)
            else:
                self._plan_gather(ticket)
        except (MemoryError, ValueError) as exc:
            ticket.error = exc
            self.incoming, self._shares, self._is_reduced = {}, [], True
            if self._others and ticket.terms.segments and not ticket.terms.keeps_shares:
                text = f"{type(exc).__name__}: {exc}"[:200].encode(errors="replace")
                self.outgoing = [Outgoing(self._others, ticket.serial, REFUSED, memoryview(text))]

    def _plan_gather(self, ticket: Ticket) -> None:
        terms, posts, data = ticket.terms, ticket.posts, ticket.data
        ranks, pick, me = terms.ranks, terms.pick, terms.ranks.index(self._rank)
        if self._others and posts[me][INLINE] is None:
            if pick is None:
                self.outgoing.append(Outgoing(self._others, ticket.serial, 0, data.data))
            else:
                self.outgoing += [
                    Outgoing((r,), ticket.serial, 0, data[pick(ticket.extra, k)].data)
                    for k, r in enumerate(ranks)
                    if r != self._rank
                ]
        pieces = [pick(post[EXTRA], me) if pick else slice(0, post[NBYTES]) for post in posts]
        sizes = [piece.stop - piece.start for piece in pieces]
        self.parts = terms.place(sizes, [post[EXTRA] for post in posts])
        for r, post, piece, target in zip(ranks, posts, pieces, self.parts, strict=True):
            inline = post[INLINE]
            if r == self._rank:
                target[:] = data[piece]
            elif inline is not None:
                target[:] = np.frombuffer(inline, np.uint8)[piece]
            else:
                self.incoming[r, post[SERIAL], 0] = Incoming(target, ticket.key)

    def _plan_reduction(self, ticket: Ticket) -> None:
        """Too large to be sent to everybody: each member reduces its own share."""
        terms, ranks, data, key = ticket.terms, ticket.active, ticket.data, ticket.key
        serials = {r: post[SERIAL] for r, post in zip(terms.ranks, ticket.posts, strict=True)}
        me, segments = ranks.index(self._rank), terms.segments
        if ranks != terms.ranks:
            segments = [segment.over(len(ranks)) for segment in segments]
        for i, segment in enumerate(segments):
            for k, r in enumerate(ranks):
                if r != self._rank:
                    part = data[segment.share(k)].data
                    self.outgoing.append(Outgoing((r,), ticket.serial, 2 * i, part))
        for i, segment in enumerate(segments):
            dtype, mine, start = segment.reduction.dtype, segment.share(me), segment.bounds[0]
            shift = mine.start if terms.keeps_shares else start
            size = (mine.stop if terms.keeps_shares else segment.bounds[-1]) - shift
            result = np.empty(size, np.uint8)
            operands = []
            for k, r in enumerate(ranks):
                operand = data[mine]
                if r != self._rank:
                    operand = np.empty(mine.stop - mine.start, np.uint8)
                    self.incoming[r, serials[r], 2 * i] = Incoming(operand, key)
                    if not terms.keeps_shares:
                        share = segment.share(k)
                        target = result[share.start - shift : share.stop - shift]
                        self.incoming[r, serials[r], 2 * i + 1] = Incoming(target, key)
                operands.append(operand.view(dtype))
            own = result[mine.start - shift : mine.stop - shift]
            self.parts.append(result.view(dtype))
            self._shares.append((operands, own.view(dtype)))
            if self._others and not terms.keeps_shares:
                back = Outgoing(self._others, ticket.serial, 2 * i + 1, own.data)
                self._returns.append(back)

    def advance(self, ticket: Ticket, control: Control) -> bool:
        """Send and reduce what can be; whether anything moved."""
        moved = False
        for outgoing in self.outgoing:
            moved = outgoing.pump(control) or moved
        if not self._is_reduced:
            operands_here = (s for (_, _, stage), s in self.incoming.items() if stage % 2 == 0)
            if not all(stream.complete for stream in operands_here):
                return moved
            for segment, (operands, own) in zip(ticket.terms.segments, self._shares, strict=True):
                # The operands are left as they are, so doing this twice does no harm.
                run(blocked_steps(segment.reduction, operands, [own], self._block_elements))
            self.outgoing = [*self.outgoing, *self._returns]
            self._is_reduced = moved = True
            for outgoing in self._returns:
                outgoing.pump(control)
        return moved

    def is_complete(self, control: Control) -> bool:
        """Whether everything is here and everything is out."""
        return (
            self._is_reduced
            and all(incoming.complete for incoming in self.incoming.values())
            and all(outgoing.complete for outgoing in self.outgoing)
            and (not self.outgoing or control.flushed(self._others))
        )

    @property
    def waits_for_messages(self) -> bool:
        """Whether nothing can be done until a message comes."""
        sent = all(outgoing.complete for outgoing in self.outgoing)
        return sent and not all(incoming.complete for incoming in self.incoming.values())

    def story(self) -> str:
        """How far it has come, for reports."""
        received = sum(incoming.received for incoming in self.incoming.values())
        sent = sum(outgoing.offset for outgoing in self.outgoing)
        return f"{received} bytes have come and {sent} are out"


@lru_cache(1024)
def others(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """All but this one."""
    return tuple(r for r in ranks if r != rank)


def reduce_inline(
    terms: Terms, inlines: Sequence[bytes], me: int, block_elements: int
) -> list[Array]:
    """Reduce what travelled with the calls, segment by segment.

    Args:
        terms: Those of the call.
        inlines: The active members' data.
        me: Which of them is this rank.
        block_elements: Elements that one NumPy call of a reduction handles.

    Returns:
        For each segment all of it, or this rank's share.
    """
    operands = [np.frombuffer(inline, np.uint8) for inline in inlines]
    parts = []
    for segment in terms.segments:
        piece = segment.share(me) if terms.keeps_shares else segment.whole
        views = [operand[piece].view(segment.reduction.dtype) for operand in operands]
        parts.append(segment.reduction.reduce(views, block_elements))
    return parts
