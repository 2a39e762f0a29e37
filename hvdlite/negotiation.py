"""The matching layer: eager calls meet by name, whatever the order in which ranks make them.

 [1] A rank posts its call to the members of the process set: name, signature, size, and small data.
 [2] When a rank holds one post of every member it compares the signatures.  All members compare the
     same posts, so all raise the same `MismatchError`, or none does.
 [3] Small data is here already: calls that reduce alike are reduced together, in one go.  Larger
     data follows in pieces, only now: so whoever gets a piece knows where to put it.
       gather   every rank's bytes to all others (a broadcast is the case where one rank has any)
       scatter  to every member the part that is for it
       reduce   share j to member j, who reduces it in rank order and sends the result to all
                (or keeps it: reducescatter)
 [4] When everything is here the call's own `finish` makes the result, in the frame of who waits.

No order, no server, no extra round for small data.  Every effect of a message can be repeated
without harm (serial numbers, offsets), because a signal handler may raise in the middle of one.
Only meetings that a message or a submission has woken are looked at, so a thousand calls in flight
cost no more than one.
"""

import hashlib
import marshal
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hvdlite.arithmetic import Reduction, Step, at_once, blocked_steps, run
from hvdlite.backends.base import Control, Header
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.progress import Progress
from hvdlite.stall import DONE, FAILED, MATCHED, describe_call
from hvdlite.types import Array

_CALLS, _PIECE = 1, 2
_INLINE_BYTES = 32 * 1024  # up to here the data travels with the call itself
_RETRY = 32  # submissions between two looks for room
_BATCH_BYTES = 64 * 1024  # calls that had to wait travel together up to here
MAX_NAME_BYTES = 512
_MAX_WIRE_BYTES = 1024
_JOIN_NAME = "\0join"
_NOTHING = np.empty(0, np.uint8)

Signature = tuple[tuple[str, Any], ...]  # field and value, e.g. ("dtype", "float32")
Key = tuple[int, str]  # process set and name: what calls meet by


class _Post(NamedTuple):
    """One rank's announcement of a call."""

    serial: int
    epoch: int  # how often all ranks had joined
    wire: bytes  # the signature as it travels; equal signatures are equal bytes
    nbytes: int
    extra: Any
    inline: bytes | None

    @property
    def room(self) -> int:
        """Bytes of a message that it takes at most, without the name."""
        extra = 64 if self.extra is None else 4096
        return len(self.inline or b"") + len(self.wire) + extra


class Segment(NamedTuple):
    """A run of elements that are reduced alike; a group of tensors has several.

    `bounds` are byte offsets in the call's data: member k's share goes from `bounds[k]` to
    `bounds[k + 1]`.
    """

    reduction: Reduction
    bounds: tuple[int, ...]

    @property
    def whole(self) -> slice:
        """All of it."""
        return slice(self.bounds[0], self.bounds[-1])

    def share(self, k: int) -> slice:
        """What member k reduces."""
        return slice(self.bounds[k], self.bounds[k + 1])

    def over(self, n: int) -> "Segment":
        """The same with even shares for n members."""
        start, itemsize = self.bounds[0], self.reduction.dtype.itemsize
        count = (self.bounds[-1] - start) // itemsize
        bounds = tuple(start + count * k // n * itemsize for k in range(n + 1))
        return Segment(self.reduction, bounds)


def even_segment(reduction: Reduction, start: int, stop: int) -> Segment:
    """Shares of equal size, up to one element."""
    return Segment(reduction, (start, stop)).over(reduction.num_ranks)


@dataclass(slots=True)
class _Incoming:
    """Bytes on their way here, in order."""

    target: Array
    key: Key
    received: int = 0

    def take(self, offset: int, payload: memoryview | bytes) -> None:
        if offset == self.received:
            end = offset + len(payload)
            self.target[offset:end] = np.frombuffer(payload, np.uint8)
            self.received = end

    @property
    def complete(self) -> bool:
        return self.received >= self.target.size


@dataclass(slots=True)
class _Outgoing:
    """Bytes on their way out, piece by piece as there is room."""

    to: tuple[int, ...]
    serial: int
    stage: int
    data: memoryview
    offset: int = 0

    def pump(self, control: Control) -> bool:
        moved = False
        while self.offset < len(self.data):
            piece = self.data[self.offset : self.offset + control.max_payload]
            if not control.post(self.to, (_PIECE, self.serial, self.stage, self.offset), piece):
                return moved
            self.offset += len(piece)
            moved = True
        return moved

    @property
    def complete(self) -> bool:
        return self.offset >= len(self.data)


@dataclass(slots=True)
class _Transfer:
    """Where the bytes of a matched call come from and go to.

    `incoming` is keyed as the messages are: author, serial number, stage.  Stage 2 i carries what
    the ranks contribute to segment i (0: to a call that does not reduce), 2 i + 1 its reduced
    shares.
    """

    parts: list[Array]  # of the result
    incoming: dict[tuple[int, int, int], _Incoming] = field(default_factory=dict)
    outgoing: list[_Outgoing] = field(default_factory=list)
    shares: list[tuple[list[Array], Array]] = field(default_factory=list)  # operands and result
    returns: list[_Outgoing] = field(default_factory=list)
    is_reduced: bool = False


class Ticket:
    """One eager call of this rank, from its submission to its result.

    Args:
        set_id: Process set.
        ranks: Its members, world ranks ascending.
        name: What the members' calls are matched by; None: the next count of `counted_as`.
        signature: What must be equal on all members, the kind of call first; names, numbers, texts
            and tuples of them.
        data: This rank's contribution, uint8.
        finish: Makes the result from the parts: what `place` returned, or for each segment the
            reduced bytes (with `keeps_shares` this member's share of them).
        place: For calls that do not reduce; called once all sizes are known, with the bytes each
            member contributes and each member's `extra`; returns one uint8 array a member for them.
        segments: The arithmetic, for calls that reduce.
        keeps_shares: The reduced shares stay where they are.
        pick: For calls that scatter: what of a member's contribution is for member k, given its
            `extra` and k.
        extra: A number, short text or tuple that may differ between members.
        counted_as: What calls without a name are counted by; default: the kind.

    Attributes:
        done: The call is over; `error` tells how.
        abandoned: Nobody wants the result any more; the call goes on by itself.
    """

    serial = 0
    done = False
    abandoned = False
    is_submitted = is_posted = is_matched = is_finished = False
    result: Any = None
    error: Exception | None = None
    parts: Sequence[Array] = ()
    posts: Mapping[int, _Post] = {}
    active: tuple[int, ...] = ()  # once matched: the members that have not joined
    transfer: _Transfer | None = None

    def __init__(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        name: str | None,
        signature: Signature,
        data: Array,
        finish: Callable[[Sequence[Array]], Any],
        *,
        place: Callable[[Sequence[int], Sequence[Any]], list[Array]] | None = None,
        segments: Sequence[Segment] = (),
        keeps_shares: bool = False,
        pick: Callable[[Any, int], slice] | None = None,
        extra: Any = None,
        counted_as: str = "",
    ) -> None:
        self.key = (set_id, name or "")
        self.counted_as = "" if name else counted_as or signature[0][1]
        self.ranks, self.signature, self.data, self.finish = ranks, signature, data, finish
        self.place, self.segments, self.keeps_shares = place or separate, segments, keeps_shares
        self.pick, self.extra = pick, extra

    @property
    def name(self) -> str:
        """What the members' calls are matched by."""
        return self.key[1]

    @property
    def waits_for_messages(self) -> bool:
        """Whether nothing can be done for it until a message comes."""
        transfer = self.transfer
        if transfer is None:
            return self.is_posted and not self.is_matched
        sent = all(outgoing.complete for outgoing in transfer.outgoing)
        return sent and not all(incoming.complete for incoming in transfer.incoming.values())

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody still wants the result."""
        return not (self.done or self.abandoned)

    @property
    def what(self) -> str:
        """Names the call in messages."""
        return describe_call(self.kind, self.name)

    @property
    def kind(self) -> str:
        """The kind of call, e.g. "allreduce"."""
        return str(self.signature[0][1]) if self.signature else "joined"

    @property
    def is_answer(self) -> bool:
        """Whether it only tells the others that this rank has joined."""
        return not self.signature

    @property
    def bears_joined_ranks(self) -> bool:
        """Whether a member that has joined can be left out."""
        reduces = self.segments and all(s.reduction.is_linear for s in self.segments)
        return self.signature[0][1] == "barrier" or (bool(reduces) and not self.keeps_shares)


class _Meeting:
    """Calls of one name in one process set.

    Attributes:
        posts: What was announced and not yet matched: author -> serial -> post, ascending.
        tickets: This rank's calls, in the order in which they were made.
    """

    __slots__ = ("posts", "tickets")

    def __init__(self) -> None:
        self.posts: dict[int, dict[int, _Post]] = {}
        self.tickets: list[Ticket] = []


class Matcher:
    """Matches and carries out the eager calls of one Context.

    Args:
        control: Carries the messages.
        progress: Where waits happen.
        block_elements: Elements that one NumPy call of a reduction handles.

    Attributes:
        epoch: How often all ranks have joined.
        members: Members of a process set, by its number; None: there is none.
    """

    members: Callable[[int], tuple[int, ...] | None]

    def __init__(self, control: Control, progress: Progress, block_elements: int) -> None:
        self.control, self.progress = control, progress
        self.rank = control.rank
        self._block_elements = block_elements
        self._serial = 0
        self._filed: dict[int, int] = {}  # per author: last call whose post is filed
        self._meetings: dict[Key, _Meeting] = {}
        self._woken: dict[Key, None] = {}  # meetings where something may be done now
        self._incoming: dict[tuple[int, int, int], _Incoming] = {}
        self._announced: set[tuple[int, int]] = set()  # calls whose data comes in pieces
        self._early: dict[tuple[int, int, int], dict[int, bytes]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._unposted: deque[tuple[Ticket, _Post]] = deque()  # in order of their serial numbers
        self.epoch = 0
        self.members = lambda _: None
        self._join: Ticket | None = None  # this rank has joined, and not all others
        progress.add(self, self.advance)

    def unnamed(self, set_id: int, kind: str) -> str:
        """The name of the next call without one: a count per process set and kind."""
        count = self._counts.get((set_id, kind), 0)
        self._counts[set_id, kind] = count + 1
        return _name_of(kind, count)

    def submit(self, ticket: Ticket) -> Ticket:
        """Start a call: the members see it at once; the rest is done by whoever waits or polls.

        A ticket submitted before is left as it is, so that a caller that a signal handler broke off
        in here may say it again.

        Raises:
            ValueError: The name is too long, or this rank has a call of that name under way.
            ShutDownError: This rank has given up.
        """
        if ticket.is_submitted:
            return ticket
        if self.progress.abandoned:
            self.progress.refuse(ticket.what)
        if self._join is not None and not ticket.is_answer and ticket is not self._join:
            raise RuntimeError(
                f"{ticket.what}: this rank has joined; call join() again, until it returns"
            )
        key = ticket.key
        steps: list[Step] = []
        if ticket.counted_as:
            counter = (key[0], ticket.counted_as)
            count = self._counts.get(counter, 0)
            key = (key[0], _name_of(ticket.counted_as, count))
            steps = [
                (self._counts.__setitem__, counter, count + 1),
                (setattr, ticket, "key", key),
            ]
        if len(key[1]) > MAX_NAME_BYTES // 4 and len(key[1].encode()) > MAX_NAME_BYTES:
            raise ValueError(f"name of {len(key[1])} characters; at most {MAX_NAME_BYTES}")
        meeting = self._meeting(key)
        if meeting.tickets and any(other.is_waited_for for other in meeting.tickets):
            raise ValueError(
                f"{ticket.what}: a call of this name is still under way on rank {self.rank}; "
                "wait for it, or use another name"
            )
        self._serial += 1  # numbers must come to the peers in order, so each try has its own
        ticket.serial = self._serial
        data = ticket.data
        inline = data.tobytes() if data.size <= _INLINE_BYTES else None
        wire = _wire(ticket.signature)
        if len(wire) > _MAX_WIRE_BYTES:
            raise ValueError(f"{ticket.what}: shapes of too many dimensions")
        post = _Post(ticket.serial, self.epoch, wire, data.size, ticket.extra, inline)
        at_once(
            [
                *steps,
                (meeting.tickets.append, ticket),
                (self._meetings.__setitem__, key, meeting),
                (self._unposted.append, (ticket, post)),
                (setattr, ticket, "is_submitted", True),
            ]
        )
        self.progress.counters.negotiations += 1
        kind = ticket.kind
        self.progress.recorder.submitted(ticket.serial, kind, ticket.name, data.size)
        if self.progress.timeline is not None:
            self.progress.timeline.call_submitted(ticket.serial, kind, key[1], data.size)
        if len(self._unposted) % _RETRY == 1:  # there was room, or there may be again
            self.progress.nudge(self._post)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Any:
        """The ticket's result, once it is there.

        Raises:
            MismatchError: On every member: they do not make the same call.
            Exception: What `Progress.wait` raises; the call stays under way.
        """
        if not ticket.done:
            self.progress.wait(
                lambda: ticket.done,
                ticket.what,
                lambda: self.missing(ticket),
                None,
                timeout_s,
                lambda: self._story(ticket),
            )
        return self.result(ticket)

    def result(self, ticket: Ticket) -> Any:
        """[4] The result of a call that is over, made in the caller's own frame."""
        if ticket.error is not None:
            raise ticket.error
        if not ticket.is_finished:
            ticket.result = ticket.finish(ticket.parts)
            ticket.is_finished = True
            ticket.parts = ()
        return ticket.result

    def poll(self, ticket: Ticket) -> bool:
        """Whether the call was over; lets everything go on meanwhile, without waiting."""
        if not ticket.done:
            self.progress.nudge(self.progress.poll)
            return False
        if ticket.error is None:
            with suppress(Exception):  # who waits for it meets it again
                self.result(ticket)
        return True

    def call(self, ticket: Ticket) -> Any:
        """Submit and wait; a wait that is broken off leaves the call to finish by itself."""
        if self.progress.is_busy:
            self.progress.check_free(ticket.what)
        try:
            return self.wait(self.submit(ticket))
        except BaseException:
            ticket.abandoned = True
            raise

    def join(self, ranks: tuple[int, ...]) -> Ticket:
        """This rank has no more calls to make: it answers those of the others, until all joined.

        Again before the end: the same ticket; who waits for it gets the rank that joined last.
        """
        if self._join is None:
            self.control.poll(self._deliver)  # who has come before?
            earlier = sum(map(bool, self._meeting((0, _JOIN_NAME)).posts.values()))
            word = marshal.dumps((earlier, list(self._counts.items())))
            data = np.frombuffer(word, np.uint8)
            signature = (("kind", "join"),)
            self._join = Ticket(0, ranks, _JOIN_NAME, signature, data, self._end_join)
        self.progress.has_joined = True
        ticket = self.submit(self._join)
        self._woken.update(dict.fromkeys(self._meetings))  # what was called before is answered too
        return ticket

    @property
    def has_joined(self) -> bool:
        """Whether this rank waits in `join()`, or was broken off there."""
        return self._join is not None

    def _end_join(self, parts: Sequence[Array]) -> int:
        words = [marshal.loads(part.data) for part in parts]
        if self._join is not None:
            counts = dict(self._counts)  # those who joined early have made fewer calls
            for _, items in words:
                for counter, count in items:
                    counts[counter] = max(count, counts.get(counter, 0))
            at_once(
                [
                    (self._counts.update, counts),
                    (setattr, self, "epoch", self.epoch + 1),
                    (setattr, self.progress, "has_joined", False),
                    (setattr, self, "_join", None),
                ]
            )
        return max(range(len(words)), key=lambda r: (words[r][0], r))

    def missing(self, ticket: Ticket) -> list[int]:
        """Members whose part of the call is not here yet."""
        if ticket.is_matched:
            serials = {(author, post.serial) for author, post in ticket.posts.items()}
            pending = {
                author
                for (author, serial, _), incoming in self._incoming.items()
                if not incoming.complete and (author, serial) in serials
            }
            return sorted(pending) or [r for r in ticket.ranks if r != self.rank]
        posts = self._meeting(ticket.key).posts
        return [r for r in ticket.ranks if not posts.get(r)]

    def _story(self, ticket: Ticket) -> list[str]:
        """How far a call has come, for reports."""
        transfer = ticket.transfer
        if not ticket.is_matched or transfer is None:
            return []
        received = sum(incoming.received for incoming in transfer.incoming.values())
        sent = sum(outgoing.offset for outgoing in transfer.outgoing)
        return [f"all have called; {received} bytes have come and {sent} are out"]

    def unanswered(self, rank: int) -> list[str]:
        """What a rank has called and this one has not, for reports."""
        return [
            describe_call(marshal.loads(next(iter(posts.values())).wire)[0][1], name)
            for (_, name), meeting in list(self._meetings.items())
            if (posts := meeting.posts.get(rank)) and not meeting.tickets
        ]

    def advance(self) -> bool:
        """Read messages and go on with every call that can; whether anything moved."""
        moved = self.control.poll(self._deliver)
        if self._unposted:
            moved = self._post() or moved
        if self._woken:
            moved = self._go_on() or moved
        return moved

    def close(self, error: Exception) -> None:
        """End all calls of this rank that are not over; who waits for them raises `error`."""
        for meeting in self._meetings.values():
            for ticket in meeting.tickets:
                ticket.error, ticket.done = ticket.error or error, True
        self._meetings.clear()
        self._unposted.clear()

    def _meeting(self, key: Key) -> _Meeting:
        """The meeting of this name, perhaps one that nobody has come to yet."""
        return self._meetings.get(key) or _Meeting()

    def _post(self) -> bool:
        """[1] Post calls in order: the members tell a repeated post by its serial number.

        What had to wait for room travels together.
        """
        moved = False
        unposted = self._unposted
        while unposted:
            if unposted[0][0].is_posted:  # a signal handler had broken it off there
                unposted.popleft()
                continue
            others = self._others(unposted[0][0].ranks)
            batch = [unposted[0]] if len(unposted) == 1 else self._batch(others)
            if others:
                words = [(*ticket.key, *post) for ticket, post in batch]
                if not self.control.post(others, (_CALLS,), marshal.dumps(words)):
                    return moved
            for ticket, post in batch:
                self._meetings[ticket.key].posts.setdefault(self.rank, {})[post.serial] = post
                self._woken[ticket.key] = None
                ticket.is_posted = moved = True
                unposted.popleft()
        return moved

    def _batch(self, others: tuple[int, ...]) -> list[tuple[Ticket, _Post]]:
        """What goes to the same ranks, as much as fits into a message."""
        batch: list[tuple[Ticket, _Post]] = []
        room = min(_BATCH_BYTES, self.control.max_payload)
        for ticket, post in self._unposted:
            room -= post.room + 4 * len(ticket.name)
            if batch and (room < 0 or self._others(ticket.ranks) != others):
                break
            batch.append((ticket, post))
        return batch

    def _others(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return _without(ranks, self.rank)

    def _deliver(self, source: int, header: Header, payload: memoryview) -> None:
        if header[0] == _CALLS:
            filed = self._filed.get(source, 0)
            for set_id, name, serial, *rest in marshal.loads(payload):
                if serial > filed:
                    self._file(source, (set_id, name), _Post(serial, *rest))
        else:
            _, serial, stage, offset = header
            incoming = self._incoming.get((source, serial, stage))
            if incoming is not None:
                incoming.take(offset, payload)
                self._woken[incoming.key] = None
            elif (source, serial) in self._announced:
                self._early.setdefault((source, serial, stage), {})[offset] = bytes(payload)

    def _file(self, source: int, key: Key, post: _Post) -> None:
        meeting = self._meeting(key)
        meeting.posts.setdefault(source, {})[post.serial] = post
        self._meetings[key] = meeting
        if post.inline is None:
            self._announced.add((source, post.serial))
        if meeting.tickets or self._join is not None:
            self._woken[key] = None
        self._filed[source] = post.serial

    def _go_on(self) -> bool:
        """Do what can be done in the meetings that were woken; whether anything moved."""
        alike: dict[Any, list[Ticket]] = {}  # small calls whose reduction is the same object
        woken, stuck = tuple(self._woken), set()
        for key in woken:
            meeting = self._meetings.get(key)
            if meeting is None or not self._advance_meeting(key, meeting, alike):
                stuck.add(key)
        for tickets in alike.values():
            self._reduce_small(tickets)
        for key in woken:
            meeting = self._meetings.get(key)
            if meeting is None or (
                key in stuck and all(ticket.waits_for_messages for ticket in meeting.tickets)
            ):
                self._woken.pop(key, None)
        return len(stuck) < len(woken)

    def _advance_meeting(self, key: Key, meeting: _Meeting, alike: dict[Any, list[Ticket]]) -> bool:
        """Go on with the calls of one name, in order; whether anything moved."""
        moved = False
        for ticket in tuple(meeting.tickets):
            if ticket.done:
                self._retire(ticket)  # a signal handler had broken it off there
                continue
            if not ticket.is_matched:
                if not ticket.is_posted or not self._match(meeting, ticket):
                    break  # the later ones have their turn after it
                moved = True
            transfer = ticket.transfer
            if transfer is None:
                if ticket.error is None and not ticket.is_answer:
                    kind = (id(ticket.segments[0].reduction), ticket.active)
                    alike.setdefault(kind, []).append(ticket)
                else:
                    self._retire(ticket)
                moved = True
                continue
            moved = self._move(ticket, transfer) or moved
            if self._is_complete(ticket, transfer):
                ticket.parts = transfer.parts
                self._retire(ticket)
                moved = True
        if self._join is not None and self._wants_answer(meeting):
            members = self.members(key[0])
            if members is not None:
                set_id, name = key
                self.submit(Ticket(set_id, members, name, (), _NOTHING, list))
                moved = True
        if not meeting.tickets and not any(meeting.posts.values()):
            self._meetings.pop(key, None)
        return moved

    def _wants_answer(self, meeting: _Meeting) -> bool:
        """Whether others have made a call since this rank has joined, and it has not answered."""
        return not meeting.tickets and any(
            post.epoch == self.epoch for posts in meeting.posts.values() for post in posts.values()
        )

    def _match(self, meeting: _Meeting, ticket: Ticket) -> bool:
        """[2] Compare, once a post of every member is here; whether it is."""
        filed = meeting.posts
        if not ticket.posts:
            try:
                ticket.posts = {r: next(iter(filed[r].values())) for r in ticket.ranks}
            except (KeyError, StopIteration):
                return False
        for r, post in ticket.posts.items():
            filed[r].pop(post.serial, None)
        own = ticket.posts[self.rank]
        ticket.active = ticket.ranks
        wires = {post.wire for post in ticket.posts.values()}
        if len(wires) > 1 and _JOINED in wires and not ticket.is_answer:
            wires.remove(_JOINED)
            ticket.active = tuple(r for r, p in ticket.posts.items() if p.wire != _JOINED)
            if len(wires) == 1 and not ticket.bears_joined_ranks:
                gone = sorted(set(ticket.ranks) - set(ticket.active))
                ticket.error = HorovodInternalError(
                    f"{ticket.what}: ranks {gone} have joined; until all have, the others can only "
                    "do allreduce with Average or Sum, barrier, and optimizer steps"
                )
        if ticket.is_answer or ticket.error is not None:
            pass
        elif len(wires) > 1:
            signatures = {r: marshal.loads(ticket.posts[r].wire) for r in ticket.active}
            ticket.error = MismatchError(_explain(ticket, signatures))
        elif not ticket.segments or own.inline is None:
            if ticket.transfer is None:
                self._plan(ticket)
            assert ticket.transfer is not None
            incoming = ticket.transfer.incoming
            self._incoming.update(incoming)
            for where, stream in incoming.items():
                for offset, piece in sorted(self._early.get(where, {}).items()):
                    stream.take(offset, piece)
                self._early.pop(where, None)
        if self.progress.timeline is not None:
            self.progress.timeline.call_matched(ticket.serial)
        ticket.is_matched = True
        self.progress.recorder.mark(ticket.serial, MATCHED)
        return True

    def _plan(self, ticket: Ticket) -> None:
        """[3] Decide what comes from where."""
        transfer = _Transfer([])
        try:
            if ticket.segments:
                self._plan_reduction(ticket, transfer)
            else:
                self._plan_gather(ticket, transfer)
        except (MemoryError, ValueError) as exc:  # no room for the result: the others get theirs
            ticket.error = exc
            transfer.incoming, transfer.shares, transfer.is_reduced = {}, [], True
        self._count(ticket)
        ticket.transfer = transfer

    def _count(self, ticket: Ticket) -> None:
        if len(ticket.ranks) > 1:
            self.progress.counters.collectives += 1
            self.progress.counters.bytes += ticket.data.size

    def _plan_gather(self, ticket: Ticket, transfer: _Transfer) -> None:
        ranks, posts, pick, data = ticket.ranks, ticket.posts, ticket.pick, ticket.data
        others, me = self._others(ranks), ranks.index(self.rank)
        transfer.is_reduced = True
        if others and posts[self.rank].inline is None:
            if pick is None:
                transfer.outgoing.append(_Outgoing(others, ticket.serial, 0, data.data))
            else:
                transfer.outgoing += [
                    _Outgoing((r,), ticket.serial, 0, data[pick(ticket.extra, k)].data)
                    for k, r in enumerate(ranks)
                    if r != self.rank
                ]
        members = [posts[r] for r in ranks]
        pieces = [pick(post.extra, me) if pick else slice(0, post.nbytes) for post in members]
        sizes = [piece.stop - piece.start for piece in pieces]
        transfer.parts = ticket.place(sizes, [post.extra for post in members])
        for r, post, piece, target in zip(ranks, members, pieces, transfer.parts, strict=True):
            if r == self.rank:
                target[:] = data[piece]
            elif post.inline is not None:
                target[:] = np.frombuffer(post.inline, np.uint8)[piece]
            else:
                transfer.incoming[r, post.serial, 0] = _Incoming(target, ticket.key)

    def _plan_reduction(self, ticket: Ticket, transfer: _Transfer) -> None:
        """Too large to be sent to everybody: each member reduces its own share."""
        ranks, data, key = ticket.active, ticket.data, ticket.key
        others, me = self._others(ranks), ranks.index(self.rank)
        segments = ticket.segments
        if ranks != ticket.ranks:
            segments = [segment.over(len(ranks)) for segment in segments]
        for i, segment in enumerate(segments):
            for k, r in enumerate(ranks):
                if r != self.rank:
                    part = data[segment.share(k)].data
                    transfer.outgoing.append(_Outgoing((r,), ticket.serial, 2 * i, part))
        for i, segment in enumerate(segments):
            dtype, mine, start = segment.reduction.dtype, segment.share(me), segment.bounds[0]
            shift = mine.start if ticket.keeps_shares else start
            size = (mine.stop if ticket.keeps_shares else segment.bounds[-1]) - shift
            result = np.empty(size, np.uint8)
            operands = []
            for k, r in enumerate(ranks):
                operand = data[mine]
                if r != self.rank:
                    serial = ticket.posts[r].serial
                    operand = np.empty(mine.stop - mine.start, np.uint8)
                    transfer.incoming[r, serial, 2 * i] = _Incoming(operand, key)
                    if not ticket.keeps_shares:
                        share = segment.share(k)
                        target = result[share.start - shift : share.stop - shift]
                        transfer.incoming[r, serial, 2 * i + 1] = _Incoming(target, key)
                operands.append(operand.view(dtype))
            own = result[mine.start - shift : mine.stop - shift]
            transfer.parts.append(result)
            transfer.shares.append((operands, own.view(dtype)))
            if others and not ticket.keeps_shares:
                transfer.returns.append(_Outgoing(others, ticket.serial, 2 * i + 1, own.data))

    def _reduce_small(self, tickets: Sequence[Ticket]) -> None:
        """[3] All operands are here; calls that are reduced alike are reduced as one.

        The operands are left as they are, so doing this twice does no harm.
        """
        first = tickets[0]
        reduction, blocks = first.segments[0].reduction, self._block_elements
        if len(tickets) == len(first.segments) == 1 and not first.keeps_shares:
            posts = first.posts
            operands = [
                np.frombuffer(posts[r].inline or b"", reduction.dtype) for r in first.active
            ]
            with np.errstate(all="ignore"):  # as arithmetic.run() does
                first.parts = (reduction.reduce(operands, blocks).view(np.uint8),)
            self._count(first)
            self._retire(first)
            return
        plain = [t for t in tickets if len(t.segments) == 1 and not t.keeps_shares]
        with np.errstate(all="ignore"):  # as arithmetic.run() does
            if plain:
                inlines = [[t.posts[r].inline or b"" for r in t.active] for t in plain]
                joined = map(b"".join, zip(*inlines, strict=True))
                operands = [np.frombuffer(data, reduction.dtype) for data in joined]
                whole = reduction.reduce(operands, blocks).view(np.uint8)
                start = 0
                for ticket in plain:
                    stop = start + ticket.data.size
                    # A copy, so that who keeps one result does not keep all of them.
                    ticket.parts = (whole[start:stop].copy() if len(plain) > 1 else whole,)
                    start = stop
            for ticket in tickets:
                if len(ticket.segments) > 1 or ticket.keeps_shares:
                    ticket.parts = self._reduce_segments(ticket)
                self._count(ticket)
                self._retire(ticket)

    def _reduce_segments(self, ticket: Ticket) -> list[Array]:
        me = ticket.ranks.index(self.rank)
        inlines = [np.frombuffer(ticket.posts[r].inline or b"", np.uint8) for r in ticket.active]
        parts = []
        for segment in ticket.segments:
            piece = segment.share(me) if ticket.keeps_shares else segment.whole
            operands = [inline[piece].view(segment.reduction.dtype) for inline in inlines]
            reduced = segment.reduction.reduce(operands, self._block_elements)
            parts.append(reduced.view(np.uint8))
        return parts

    def _move(self, ticket: Ticket, transfer: _Transfer) -> bool:
        moved = False
        for outgoing in transfer.outgoing:
            moved = outgoing.pump(self.control) or moved
        if not transfer.is_reduced:
            operands_here = (s for (_, _, stage), s in transfer.incoming.items() if stage % 2 == 0)
            if not all(stream.complete for stream in operands_here):
                return moved
            for segment, (operands, own) in zip(ticket.segments, transfer.shares, strict=True):
                # The operands are left as they are, so doing this twice does no harm.
                run(blocked_steps(segment.reduction, operands, [own], self._block_elements))
            transfer.outgoing = [*transfer.outgoing, *transfer.returns]
            transfer.is_reduced = moved = True
            for outgoing in transfer.returns:
                outgoing.pump(self.control)
        return moved

    def _is_complete(self, ticket: Ticket, transfer: _Transfer) -> bool:
        return (
            transfer.is_reduced
            and all(incoming.complete for incoming in transfer.incoming.values())
            and all(outgoing.complete for outgoing in transfer.outgoing)
            and (not transfer.outgoing or self.control.flushed(self._others(ticket.active)))
        )

    def _retire(self, ticket: Ticket) -> None:
        """The call is over; every line bears being run twice."""
        self.progress.recorder.mark(ticket.serial, FAILED if ticket.error else DONE)
        ticket.done = True
        if self.progress.timeline is not None:
            self.progress.timeline.call_over(ticket.serial)
        for r, post in ticket.posts.items():
            if post.inline is None:
                self._announced.discard((r, post.serial))
                for stage in range(2 * max(1, len(ticket.segments))):
                    self._incoming.pop((r, post.serial, stage), None)
                    self._early.pop((r, post.serial, stage), None)
        ticket.transfer = None
        meeting = self._meetings.get(ticket.key)
        if meeting is not None:
            if len(meeting.tickets) > 1:
                meeting.tickets = [other for other in meeting.tickets if other is not ticket]
            elif ticket in meeting.tickets:
                meeting.tickets = []
            if not meeting.tickets and not any(meeting.posts.values()):
                self._meetings.pop(ticket.key, None)

    def exchange(self, set_id: int, ranks: tuple[int, ...], what: str, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order; internal calls, matched by a count of their own.

        Collective:
            All of `ranks`, in the same order among calls with the same `what`.
        """
        return list(self.call(self.object_ticket(set_id, ranks, what, value)))

    def object_ticket(
        self, set_id: int, ranks: tuple[int, ...], what: str, value: Any, name: str | None = None
    ) -> Ticket:
        """The call behind `exchange()`, for those who submit it and wait later."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        return Ticket(
            set_id,
            ranks,
            name and "\0" + name,
            (("kind", what),),
            data,
            lambda parts: [pickle.loads(part.data) for part in parts],
            counted_as="\0" + what,
        )

    def agree(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        what: str,
        error: Exception | None,
        content: Mapping[str, str],
    ) -> None:
        """Go on together, or raise together.

        Args:
            set_id: Process set of the constructor.
            ranks: Its members.
            what: Names the constructor in messages, e.g. "DistributedOptimizer".
            error: What this rank found wrong by itself; None: nothing.
            content: What must be equal on all ranks: item and description; order does not count.

        Raises:
            Exception: `error` itself, on the rank that handed it in.
            HorovodInternalError: Another rank handed one in; quoted.
            MismatchError: The contents differ; names items, ranks and descriptions.
        """
        if len(ranks) == 1:
            if error is not None:
                raise error
            return
        items = sorted(content.items())
        digest = hashlib.sha256(repr(items).encode()).hexdigest()
        said = self.exchange(set_id, ranks, what, (word_of(error), digest))
        if error is not None:
            raise error
        check_words(what, ranks, [text for text, _ in said])
        if len({d for _, d in said}) > 1:
            check_contents(what, ranks, self.exchange(set_id, ranks, what, items))


def _name_of(kind: str, count: int) -> str:
    return f"\0{kind}.noname.{count}"  # as no user can name a call


@lru_cache(4096)
def _wire(signature: Signature) -> bytes:
    """As it travels: without references, so that equal signatures are equal bytes."""
    return marshal.dumps(signature, 2)


@lru_cache(1024)
def _without(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(r for r in ranks if r != rank)


_JOINED = _wire(())  # of a rank that takes part in nothing any more


def word_of(error: Exception | None) -> str | None:
    """An error of this rank as the others are told it; None: there is none."""
    return None if error is None else f"{type(error).__name__}: {error}"


def check_words(what: str, ranks: Sequence[int], words: Sequence[str | None]) -> None:
    """Raise HorovodInternalError, quoting them, if any rank has handed in an error."""
    failed = [(r, text) for r, text in zip(ranks, words, strict=True) if text]
    if failed:
        quotes = "; ".join(f"rank {r}: {text}" for r, text in failed)
        raise HorovodInternalError(f"{what} failed on another rank, so on all: {quotes}")


def check_contents(
    what: str, ranks: Sequence[int], everything: Sequence[Sequence[tuple[str, str]]]
) -> None:
    """Raise MismatchError, naming at most ten items, unless all ranks have the same."""
    items: dict[str, dict[int, str]] = {}
    for r, pairs in zip(ranks, everything, strict=True):
        for item, text in pairs:
            items.setdefault(item, {})[r] = text
    lines = []
    for item, texts in items.items():
        lacking = [r for r in ranks if r not in texts]
        if lacking or len(set(texts.values())) > 1:
            by_text: dict[str, list[int]] = {}
            for r, text in texts.items():
                by_text.setdefault(text, []).append(r)
            parts = [f"{text} on ranks {who}" for text, who in by_text.items()]
            parts += [f"missing on ranks {lacking}"] if lacking else []
            lines.append(f"  {item}: " + "; ".join(parts))
    if lines:
        more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise MismatchError(
            "\n".join([f"{what}: the ranks do not pass the same", *lines[:10], *more])
        )


def separate(sizes: Sequence[int], _: Sequence[Any]) -> list[Array]:
    """One array a member, for calls without a layout of their own."""
    return [np.empty(size, np.uint8) for size in sizes]


def _explain(ticket: Ticket, signatures: Mapping[int, Signature]) -> str:
    """Which fields differ, and who has what."""
    fields: dict[str, dict[str, list[int]]] = {}
    for r, signature in signatures.items():
        for name, value in signature:
            fields.setdefault(name, {}).setdefault(str(value), []).append(r)
    lines = []
    for name, values in fields.items():
        if len(values) > 1 or sum(map(len, values.values())) < len(signatures):
            told = "; ".join(
                f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {value}"
                for value, who in values.items()
            )
            lines.append(f"  {name}: {told}")
    return (
        f"{ticket.what}: the ranks do not make the same call\n"
        + "\n".join(lines)
        + "\nNothing was reduced or sent; the next call works."
    )
