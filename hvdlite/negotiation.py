"""The matching layer: eager calls meet by name, whatever the order in which ranks make them.

 [1] A rank posts its call to the members of the process set: name, signature, size, and small data.
 [2] When a rank holds one post of every member it compares the signatures.  All members compare the
     same posts, so all raise the same `MismatchError`, or none does.
 [3] Small data is here already: calls that reduce alike are reduced together, in one go.  Larger
     data follows in pieces, only now (`transfer.py`).
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
from operator import itemgetter
from typing import Any

import numpy as np

from hvdlite.arithmetic import Step, at_once, quietly
from hvdlite.backends.base import Control, Header
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.progress import Progress
from hvdlite.stall import DONE, FAILED, MATCHED, describe_call
from hvdlite.ticket import (
    EPOCH,
    INLINE,
    KEY,
    SERIAL,
    WIRE,
    Key,
    Post,
    Signature,
    Terms,
    Ticket,
    has_joined,
    most_bytes,
    signature_of,
)
from hvdlite.transfer import CALLS, REFUSED, Incoming, Place, Transfer, others, reduce_inline
from hvdlite.types import Array

_RETRY = 32  # submissions between two looks for room
_BATCH_BYTES = 64 * 1024  # calls that had to wait travel together up to here
MAX_NAME_BYTES = 512
_inline = itemgetter(INLINE)
_JOIN_NAME = "\0join"
_NOTHING = np.empty(0, np.uint8)


class _Meeting:
    """Calls of one name in one process set.

    Attributes:
        posts: What each author has announced first and is not yet matched.
        later: What came after it, in order: author and post.
        tickets: This rank's calls, in the order in which they were made.
    """

    __slots__ = ("later", "posts", "tickets")

    def __init__(self) -> None:
        self.posts: dict[int, Post] = {}
        self.later: Sequence[tuple[int, Post]] = ()
        self.tickets: list[Ticket] = []

    def add(self, author: int, post: Post) -> None:
        """File a post; one that is filed already does no harm."""
        first = self.posts.setdefault(author, post)
        if first is not post:
            last = [other for who, other in self.later if who == author] or [first]
            if post[SERIAL] > last[-1][SERIAL]:
                self.later = [*self.later, (author, post)]

    def drop(self, author: int, post: Post) -> None:
        """Forget a first post, which is matched; saying it twice is harmless."""
        if self.later:
            self._drop_before_others(author, post)
        elif self.posts.get(author) is post:
            del self.posts[author]

    def _drop_before_others(self, author: int, post: Post) -> None:
        self._keep_later()
        if self.posts.get(author) is post:
            successors = (other for who, other in self.later if who == author)
            successor = next(successors, None)
            if successor is None:
                del self.posts[author]
            else:
                self.posts[author] = successor
                self._keep_later()

    def _keep_later(self) -> None:
        """What has become the first one is no later one; a signal handler may come in between."""
        self.later = [(who, post) for who, post in self.later if self.posts.get(who) is not post]

    @property
    def is_over(self) -> bool:
        """Whether nobody is here any more."""
        return not self.tickets and not self.posts


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
        self._serial = self._posted = 0  # of the last call that was numbered, that was posted
        self._filed: dict[int, int] = {}  # per author: last call whose post is filed
        self._open: dict[Key, Ticket] = {}  # the latest call of each name, perhaps not posted yet
        self._meetings: dict[Key, _Meeting] = {}
        self._woken: dict[Key, None] = {}  # meetings where something may be done now
        self._transfers: dict[int, Transfer] = {}  # by serial number of this rank's call
        self._incoming: dict[Place, Incoming] = {}
        self._announced: set[tuple[int, int]] = set()  # calls whose data comes in pieces
        self._early: dict[Place, dict[int, bytes]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._unposted: deque[Ticket] = deque()  # in order of their serial numbers
        # The message there was no room for: its first call, how many, whether more do not fit
        self._refused: tuple[int, int, bool, bytes] = (0, 0, False, b"")
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
        if ticket.is_submitted or (ticket.serial and ticket in self._unposted):
            return ticket
        terms, unposted = ticket.terms, self._unposted
        if self.progress.abandoned or self._join is not None:
            self._check_open(ticket)
        counting: Step = ()
        if ticket.is_counted:
            counter = (terms.set_id, terms.counted_as)
            count = self._counts.get(counter, 0)
            counting = (self._counts.__setitem__, counter, count + 1)
            ticket.key = (terms.set_id, _name_of(terms.counted_as, count))
        key = ticket.key
        if len(key[1]) > MAX_NAME_BYTES // 4 and len(key[1].encode()) > MAX_NAME_BYTES:
            raise ValueError(f"name of {len(key[1])} characters; at most {MAX_NAME_BYTES}")
        earlier = self._open.get(key)
        if earlier is not None and earlier.is_waited_for:
            raise ValueError(
                f"{ticket.what}: a call of this name is still under way on rank {self.rank}; "
                "wait for it, or use another name"
            )
        self._serial = serial = self._serial + 1  # so each try has its own, and they come in order
        ticket.prepare(serial, self.epoch)
        self._open[key] = ticket
        if counting:  # a call of this rank is counted if, and only if, it is made
            at_once([counting, (unposted.append, ticket)])
        else:
            unposted.append(ticket)
        ticket.is_submitted = True
        self.progress.counters.negotiations += 1
        self.progress.recorder.submitted(serial, terms.kind, key[1], ticket.data.size)
        if self.progress.timeline is not None:
            self.progress.timeline.call_submitted(serial, terms.kind, key[1], ticket.data.size)
        if len(unposted) % _RETRY == 1:  # there was room, or there may be again
            self.progress.nudge(self._post)
        return ticket

    def _check_open(self, ticket: Ticket) -> None:
        """Raise where this rank makes no calls any more."""
        if self.progress.abandoned:
            self.progress.refuse(ticket.what)
        if not ticket.terms.is_answer and ticket is not self._join:
            raise RuntimeError(
                f"{ticket.what}: this rank has joined; call join() again, until it returns"
            )

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
            earlier = len(self._meeting((0, _JOIN_NAME)).posts)
            word = marshal.dumps((earlier, list(self._counts.items())))
            data = np.frombuffer(word, np.uint8)
            terms = Terms(0, ranks, (("kind", "join"),))
            self._join = Ticket(terms, _JOIN_NAME, data, self._end_join)
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
        ranks = ticket.terms.ranks
        if ticket.is_matched:
            serials = {(r, post[SERIAL]) for r, post in zip(ranks, ticket.posts, strict=False)}
            pending = {
                author
                for (author, serial, _), incoming in self._incoming.items()
                if not incoming.complete and (author, serial) in serials
            }
            return sorted(pending) or [r for r in ranks if r != self.rank]
        posts = self._meeting(ticket.key).posts
        return [r for r in ranks if r not in posts]

    def _story(self, ticket: Ticket) -> list[str]:
        """How far a call has come, for reports."""
        transfer = self._transfers.get(ticket.serial)
        return [f"all have called; {transfer.story()}"] if transfer is not None else []

    def unanswered(self, rank: int) -> list[str]:
        """What a rank has called and this one has not, for reports."""
        return [
            describe_call(signature_of(post)[0][1], name)
            for (set_id, name), meeting in list(self._meetings.items())
            if (post := meeting.posts.get(rank)) and (set_id, name) not in self._open
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
        for ticket in self._open.values():
            if not ticket.done:
                ticket.error, ticket.done = ticket.error or error, True
        self._open.clear()
        self._meetings.clear()
        self._transfers.clear()
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
            ticket = unposted[0]
            if ticket.is_posted:  # a signal handler had broken it off there
                self._posted = max(self._posted, ticket.serial)
                unposted.popleft()
                continue
            self._number(ticket, self._posted)
            readers = others(ticket.terms.ranks, self.rank)
            first, count, is_full, payload = self._refused
            if not readers:
                count = 1
            elif first != ticket.serial or not (is_full or count == len(unposted)):
                batch = [ticket.post] if len(unposted) == 1 else self._batch(readers)
                first, count, payload = ticket.serial, len(batch), marshal.dumps(batch)
                is_full = count < len(unposted)
            if readers and not self.control.post(readers, (CALLS,), payload):
                self._refused = (first, count, is_full, payload)
                return moved
            for _ in range(count):
                ticket = unposted[0]
                ticket.is_submitted = True  # a signal handler may have come before that was noted
                key = ticket.key
                meeting = self._meetings.get(key)
                if meeting is None:
                    meeting = self._meetings[key] = _Meeting()
                if not meeting.tickets or meeting.tickets[-1] is not ticket:
                    meeting.tickets.append(ticket)
                meeting.add(self.rank, ticket.post)
                self._wake(key, meeting)
                ticket.is_posted = moved = True
                self._posted = ticket.serial
                unposted.popleft()
            self.progress.recorder.told(ticket.terms.kind, ticket.key[1])
        return moved

    def _batch(self, readers: tuple[int, ...]) -> list[Post]:
        """What goes to the same ranks, as much as fits into a message."""
        batch: list[Post] = []
        room = min(_BATCH_BYTES, self.control.max_payload)
        last = self._posted
        for ticket in tuple(self._unposted):  # a signal handler may append to it
            self._number(ticket, last)
            room -= most_bytes(ticket.post)
            if batch and (room < 0 or others(ticket.terms.ranks, self.rank) != readers):
                break
            batch.append(ticket.post)
            last = ticket.serial
        return batch

    def _number(self, ticket: Ticket, last: int) -> None:
        """Serial numbers come in order, also when a signal handler has made a call in between."""
        if ticket.serial <= last:
            self._serial = max(self._serial, last) + 1
            ticket.prepare(self._serial, ticket.post[EPOCH])

    def _deliver(self, source: int, header: Header, payload: memoryview) -> None:
        if header[0] == CALLS:
            for post in marshal.loads(payload):
                if post[SERIAL] > self._filed.get(source, 0):
                    self._file(source, post)
        else:
            _, serial, stage, offset = header
            if stage == REFUSED:
                self._refuse(source, serial, bytes(payload))
                return
            incoming = self._incoming.get((source, serial, stage))
            if incoming is not None:
                incoming.take(offset, payload)
                self._woken[incoming.key] = None
            elif (source, serial) in self._announced:
                self._early.setdefault((source, serial, stage), {})[offset] = bytes(payload)

    def _file(self, source: int, post: Post) -> None:
        key, serial = post[KEY], post[SERIAL]
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting()
        meeting.add(source, post)
        if post[INLINE] is None:
            self._announced.add((source, serial))
        self._wake(key, meeting)
        self._filed[source] = serial

    def _refuse(self, source: int, serial: int, word: bytes) -> None:
        """A member cannot reduce its share of a call, so nobody gets a result."""
        for ticket in [t for meeting in self._meetings.values() for t in meeting.tickets]:
            members = zip(ticket.terms.ranks, ticket.posts, strict=False)
            if ticket.serial in self._transfers and (source, serial) in (
                (r, post[SERIAL]) for r, post in members
            ):
                ticket.error = ticket.error or HorovodInternalError(
                    f"{ticket.what} failed on another rank, so on all: rank {source}: "
                    + word.decode(errors="replace")
                )
                self._woken[ticket.key] = None
                self._transfers.pop(ticket.serial, None)
                return
        if (source, serial) in self._announced:  # this rank has not matched it yet
            self._early[source, serial, REFUSED] = {0: word}

    def _wake(self, key: Key, meeting: _Meeting) -> None:
        """Look at a meeting soon, if a post of every member is there, or has to be answered."""
        tickets = meeting.tickets
        if (
            tickets and len(meeting.posts) >= len(tickets[0].terms.ranks)
        ) or self._join is not None:
            self._woken[key] = None

    def _go_on(self) -> bool:
        """Do what can be done in the meetings that were woken; whether anything moved."""
        moved = False
        alike: dict[int, list[Ticket]] = {}  # small calls whose reduction is the same object
        for key in tuple(self._woken):
            meeting = self._meetings.get(key)
            if meeting is None:
                self._woken.pop(key, None)
            elif (ticket := self._match_small(meeting)) is not None:
                reduction = id(ticket.terms.segments[0].reduction)
                if reduction in alike:
                    alike[reduction].append(ticket)
                else:
                    alike[reduction] = [ticket]
            elif self._advance_meeting(key, meeting):
                moved = True
            elif all(map(self._waits_for_messages, meeting.tickets)):
                self._woken.pop(key, None)
        for tickets in alike.values():
            self._reduce_alike(tickets)
            moved = True
        return moved

    def _waits_for_messages(self, ticket: Ticket) -> bool:
        """Whether nothing can be done for a call until a message comes."""
        transfer = self._transfers.get(ticket.serial)
        if transfer is None:
            return ticket.is_posted and not ticket.is_matched
        return transfer.waits_for_messages

    def _match_small(self, meeting: _Meeting) -> Ticket | None:
        """[2] Match the usual call: small, one of its name, reduced alike, by all and everywhere.

        Every other one, every difference, and what was begun and broken off, is left to `_match`.
        """
        if meeting.later or len(meeting.tickets) != 1:
            return None
        ticket = meeting.tickets[0]
        terms, posts = ticket.terms, meeting.posts
        ranks, wire = terms.ranks, terms.wire
        if not terms.reduces_whole or len(posts) != len(ranks) or ticket.posts:
            return None
        for post in posts.values():
            if post[WIRE] != wire or post[INLINE] is None:
                return None
        ticket.posts, ticket.active = [*map(posts.__getitem__, ranks)], ranks
        return ticket

    def _reduce_alike(self, tickets: Sequence[Ticket]) -> None:
        """[3] Reduce matched small calls as one.

        The operands are left as they are, so doing this twice does no harm.
        """
        reduction = tickets[0].terms.segments[0].reduction
        dtype = reduction.dtype
        columns = zip(*[ticket.posts for ticket in tickets], strict=True)
        operands = [np.frombuffer(b"".join(map(_inline, column)), dtype) for column in columns]
        whole = quietly(reduction.reduce, operands, self._block_elements)
        if len(tickets) == 1:
            tickets[0].parts = (whole,)
        else:  # copies, so that who keeps one result does not keep all of them
            start = 0
            for ticket in tickets:
                stop = start + ticket.data.size // dtype.itemsize
                ticket.parts = (whole[start:stop].copy(),)
                start = stop
        counters, timeline, mark = (
            self.progress.counters,
            self.progress.timeline,
            self.progress.recorder.mark,
        )
        for ticket in tickets:
            serial, key = ticket.serial, ticket.key
            if timeline is not None:
                timeline.call_matched(serial)
            ticket.is_matched = ticket.done = True
            if self._open.get(key) is ticket:
                self._open.pop(key, None)
            self._meetings.pop(key, None)  # it was alone there
            self._woken.pop(key, None)
            mark(serial, DONE)
            if len(ticket.posts) > 1:
                counters.collectives += 1
                counters.bytes += ticket.data.size
            if timeline is not None:
                timeline.call_over(serial)

    def _advance_meeting(self, key: Key, meeting: _Meeting) -> bool:
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
            transfer = self._transfers.get(ticket.serial)
            if transfer is None:
                if ticket.error is None and not ticket.terms.is_answer:
                    self._reduce(ticket)
                self._retire(ticket)
                moved = True
                continue
            moved = transfer.advance(ticket, self.control) or moved
            if transfer.is_complete(self.control):
                ticket.parts = transfer.parts
                self._retire(ticket)
                moved = True
        if self._join is not None and self._wants_answer(key, meeting):
            members = self.members(key[0])
            if members is not None:
                set_id, name = key
                self.submit(Ticket(Terms(set_id, members, ()), name, _NOTHING, list))
                moved = True
        if meeting.is_over:
            self._forget(key)
        return moved

    def _wants_answer(self, key: Key, meeting: _Meeting) -> bool:
        """Whether others have made a call since this rank has joined, and it has not answered."""
        if meeting.tickets or any(ticket.key == key for ticket in tuple(self._unposted)):
            return False
        return any(
            post[EPOCH] == self.epoch
            for post in [*meeting.posts.values(), *(post for _, post in meeting.later)]
        )

    def _match(self, meeting: _Meeting, ticket: Ticket) -> bool:
        """[2] Compare, once a post of every member is here; whether it is."""
        terms = ticket.terms
        ranks = terms.ranks
        if not ticket.posts:
            if len(meeting.posts) < len(ranks):
                return False
            ticket.posts = [meeting.posts[r] for r in ranks]
        posts = dict(zip(ranks, ticket.posts, strict=True))
        for r, post in posts.items():
            meeting.drop(r, post)
        ticket.active = ranks
        wires = {post[WIRE] for post in ticket.posts}
        if len(wires) > 1 and not terms.is_answer and any(map(has_joined, ticket.posts)):
            ticket.active = tuple(r for r in ranks if not has_joined(posts[r]))
            wires = {posts[r][WIRE] for r in ticket.active}
            if len(wires) == 1 and not terms.bears_joined_ranks:
                gone = sorted(set(ranks) - set(ticket.active))
                ticket.error = HorovodInternalError(
                    f"{ticket.what}: ranks {gone} have joined; until all have, the others can only "
                    "do allreduce with Average or Sum, barrier, and optimizer steps"
                )
        if terms.is_answer or ticket.error is not None:
            pass
        elif len(wires) > 1:
            signatures = {r: signature_of(posts[r]) for r in ticket.active}
            ticket.error = MismatchError(_explain(ticket, signatures))
        elif not terms.segments or posts[self.rank][INLINE] is None:
            transfer = self._transfers.get(ticket.serial)
            if transfer is None:
                transfer = Transfer(ticket, self.rank, self._block_elements)
                self._count(ticket)
                self._transfers[ticket.serial] = transfer
            self._expect(transfer)
        if self.progress.timeline is not None:
            self.progress.timeline.call_matched(ticket.serial)
        ticket.is_matched = True
        self.progress.recorder.mark(ticket.serial, MATCHED)
        return True

    def _expect(self, transfer: Transfer) -> None:
        """Let what comes find its place; some may have come already."""
        self._incoming.update(transfer.incoming)
        for where, stream in transfer.incoming.items():
            for offset, piece in sorted(self._early.get(where, {}).items()):
                stream.take(offset, piece)
            self._early.pop(where, None)
        for author, serial in {(author, serial) for author, serial, _ in transfer.incoming}:
            for word in self._early.pop((author, serial, REFUSED), {}).values():
                self._refuse(author, serial, word)

    def _reduce(self, ticket: Ticket) -> None:
        """[3] Reduce what travelled with the calls.  The operands are left as they are."""
        members = zip(ticket.terms.ranks, ticket.posts, strict=True)
        inlines = [post[INLINE] or b"" for r, post in members if r in ticket.active]
        me = ticket.active.index(self.rank)
        ticket.parts = quietly(reduce_inline, ticket.terms, inlines, me, self._block_elements)
        self._count(ticket)

    def _count(self, ticket: Ticket) -> None:
        if len(ticket.terms.ranks) > 1:
            self.progress.counters.collectives += 1
            self.progress.counters.bytes += ticket.data.size

    def _retire(self, ticket: Ticket) -> None:
        """The call is over; every line bears being run twice."""
        self.progress.recorder.mark(ticket.serial, FAILED if ticket.error else DONE)
        ticket.done = True
        if self.progress.timeline is not None:
            self.progress.timeline.call_over(ticket.serial)
        key, terms = ticket.key, ticket.terms
        meeting = self._meetings.get(key)
        for r, post in zip(terms.ranks, ticket.posts, strict=False):
            if meeting is not None:
                meeting.drop(r, post)
            if post[INLINE] is None:
                serial = post[SERIAL]
                self._announced.discard((r, serial))
                for stage in (REFUSED, *range(2 * max(1, len(terms.segments)))):
                    self._incoming.pop((r, serial, stage), None)
                    self._early.pop((r, serial, stage), None)
        self._transfers.pop(ticket.serial, None)
        if self._open.get(key) is ticket:
            self._open.pop(key, None)
        if meeting is not None:
            if ticket in meeting.tickets:
                meeting.tickets = [other for other in meeting.tickets if other is not ticket]
            if meeting.is_over:
                self._forget(key)

    def _forget(self, key: Key) -> None:
        self._meetings.pop(key, None)
        self._woken.pop(key, None)

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
        terms = Terms(set_id, ranks, (("kind", what),), counted_as="\0" + what)
        return Ticket(
            terms,
            name and "\0" + name,
            data,
            lambda parts: [pickle.loads(part.data) for part in parts],
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
