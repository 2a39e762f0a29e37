"""The matching layer: eager calls meet by name, whatever the order in which ranks make them.

 [1] A rank posts its call to the members of the process set: name, signature, size, and small data.
 [2] When a rank holds one post of every member it compares the signatures.  All members compare the
     same posts, so all raise the same `MismatchError`, or none does.
 [3] Larger data follows in pieces, only now: so whoever gets a piece knows where to put it.
       gather   every rank's bytes to all others (a broadcast is the case where one rank has any)
       reduce   share j to member j, who reduces it in rank order and sends the result to all
 [4] When everything is here the call's own `finish` makes the result, in the frame of who waits.

No order, no server, no extra round for small data.  Every effect of a message can be repeated
without harm (serial numbers, offsets), because a signal handler may raise in the middle of one.
"""

import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.arithmetic import Reduction, blocked_steps, run
from hvdlite.backends.base import Control, Header
from hvdlite.errors import HorovodInternalError, MismatchError
from hvdlite.progress import Progress
from hvdlite.types import Array

_CALL, _PIECE = 1, 2
_INLINE_BYTES = 32 * 1024  # up to here the data travels with the call itself
_MAX_NAME_BYTES = 512

Signature = tuple[tuple[str, Any], ...]  # field and value, e.g. ("dtype", "float32")


@dataclass(frozen=True, slots=True)
class _Post:
    """One rank's announcement of a call."""

    serial: int
    signature: Signature
    nbytes: int
    extra: Any
    inline: bytes | None


@dataclass(slots=True)
class _Incoming:
    """Bytes on their way here, in order."""

    target: Array
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

    `incoming` is keyed as the messages are: author, serial number, stage.  Stage 0 carries what the
    ranks contribute, stage 1 the reduced shares.
    """

    targets: list[Array]
    incoming: dict[tuple[int, int, int], _Incoming]
    outgoing: list[_Outgoing]
    operands: list[Array] = field(default_factory=list)  # everybody's part of our share
    share: Array | None = None  # where our reduced share goes
    returns: _Outgoing | None = None


@dataclass(eq=False)
class Ticket:
    """One eager call of this rank, from its submission to its result.

    Attributes:
        set_id: Process set.
        ranks: Its members, world ranks ascending.
        name: What the members' calls are matched by.
        signature: What must be equal on all members.
        data: This rank's contribution, uint8.
        place: Called once all sizes are known, with the bytes each member contributes and each
            member's `extra`; returns one uint8 array a member for the bytes.
        finish: Makes the result from what `place` returned (or from the reduced bytes).
        reduction: The arithmetic, for calls that reduce; None for those that gather.
        extra: A number or short text that may differ between members.
    """

    set_id: int
    ranks: tuple[int, ...]
    name: str
    signature: Signature
    data: Array
    place: Callable[[Sequence[int], Sequence[Any]], list[Array]]
    finish: Callable[[list[Array]], Any]
    reduction: Reduction | None = None
    extra: Any = None
    serial: int = 0
    done: bool = False
    parts: list[Array] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None
    abandoned: bool = False
    is_submitted: bool = False
    is_posted: bool = False
    is_finished: bool = False
    posts: dict[int, _Post] = field(default_factory=dict)
    transfer: _Transfer | None = None
    is_moving: bool = False

    @property
    def waits_for_messages(self) -> bool:
        """Whether nothing can be done for it until a message comes."""
        transfer = self.transfer
        if self.done:
            return True
        if transfer is None or not self.is_posted:
            return self.is_posted and not self.is_moving
        sent = all(outgoing.complete for outgoing in transfer.outgoing)
        return sent and not all(incoming.complete for incoming in transfer.incoming.values())

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody still wants the result."""
        return not (self.done or self.abandoned)

    @property
    def what(self) -> str:
        """Names the call in messages."""
        kind = dict(self.signature).get("kind", "call")
        return f"{kind} {self.name!r}"


class Matcher:
    """Matches and carries out the eager calls of one Context.

    Args:
        control: Carries the messages.
        progress: Where waits happen.
        block_elements: Elements that one NumPy call of a reduction handles.
    """

    def __init__(self, control: Control, progress: Progress, block_elements: int) -> None:
        self.control, self.progress = control, progress
        self.rank = control.rank
        self._block_elements = block_elements
        self._serial = 0
        self._filed: dict[int, int] = {}  # per author: last call whose post is filed
        self._posts: dict[tuple[int, str], dict[int, dict[int, _Post]]] = {}
        self._tickets: dict[tuple[int, str], list[Ticket]] = {}
        self._incoming: dict[tuple[int, int, int], _Incoming] = {}
        self._announced: set[tuple[int, int]] = set()  # calls whose data comes in pieces
        self._early: dict[tuple[int, int, int], dict[int, bytes]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._unposted: deque[tuple[Ticket, _Post]] = deque()  # in order of their serial numbers
        self._is_sending = False  # some call can go on without a message
        if control.size > 1:
            progress.add(self, self.advance)

    def unnamed(self, set_id: int, kind: str) -> str:
        """The name of the next call without one: a count per process set and kind."""
        count = self._counts.get((set_id, kind), 0)
        self._counts[set_id, kind] = count + 1
        return f"{kind}.noname.{count}"

    def submit(self, ticket: Ticket) -> Ticket:
        """Start a call; it goes on whenever this process waits for anything.

        A ticket submitted before is left as it is, so that a caller that a signal handler broke off
        in here may say it again.

        Raises:
            ValueError: The name is too long, or this rank has a call of that name under way.
        """
        if ticket.is_submitted:
            return ticket
        key = (ticket.set_id, ticket.name)
        if len(ticket.name.encode()) > _MAX_NAME_BYTES:
            raise ValueError(f"name of {len(ticket.name)} characters; at most {_MAX_NAME_BYTES}")
        under_way = [other for other, _ in self._unposted] + self._tickets.get(key, [])
        for other in under_way:
            if other is not ticket and (other.set_id, other.name) == key and other.is_waited_for:
                raise ValueError(
                    f"{ticket.what}: a call of this name is still under way on rank {self.rank}; "
                    "wait for it, or use another name"
                )
        if ticket.is_posted or any(other is ticket for other, _ in self._unposted):
            ticket.is_submitted = True  # a signal handler had broken it off behind the append
            return ticket
        self._serial += 1  # numbers must come to the peers in order, so each try has its own
        ticket.serial = self._serial
        inline = ticket.data.tobytes() if ticket.data.size <= _INLINE_BYTES else None
        post = _Post(ticket.serial, ticket.signature, ticket.data.size, ticket.extra, inline)
        self._unposted.append((ticket, post))  # from here on the call is made
        ticket.is_submitted = True
        self.progress.counters.negotiations += 1
        self.progress.nudge(self.advance)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Any:
        """The ticket's result, once it is there.

        Raises:
            MismatchError: On every member: they do not make the same call.
            Exception: What `Progress.wait` raises; the call stays under way.
        """
        if not ticket.done:
            self.progress.wait(
                lambda: ticket.done, ticket.what, lambda: self.missing(ticket), None, timeout_s
            )
        if ticket.error is not None:
            raise ticket.error
        if not ticket.is_finished:  # [4] in the caller's own frame, where it may raise
            ticket.result = ticket.finish(ticket.parts)
            ticket.is_finished = True
        return ticket.result

    def call(self, ticket: Ticket) -> Any:
        """Submit and wait; a wait that is broken off leaves the call to finish by itself."""
        self.progress.check_free(ticket.what)
        try:
            return self.wait(self.submit(ticket))
        except BaseException:
            ticket.abandoned = True
            raise

    def missing(self, ticket: Ticket) -> list[int]:
        """Members whose part of the call is not here yet."""
        if ticket.is_moving:
            pending = {
                author
                for (author, serial, _), inc in self._incoming.items()
                if not inc.complete
                and author in ticket.posts
                and ticket.posts[author].serial == serial
            }
            return sorted(pending) or [r for r in ticket.ranks if r != self.rank]
        posts = self._posts.get((ticket.set_id, ticket.name), {})
        return [r for r in ticket.ranks if not posts.get(r)]

    def advance(self) -> bool:
        """Read messages and go on with every call; whether anything moved."""
        moved = self.control.poll(self._deliver)
        if not self._is_sending and not self._unposted:
            return moved  # every call waits for a message
        self._is_sending = True  # until it is known better
        moved = self._post() or moved
        is_sending = bool(self._unposted)
        for key, tickets in tuple(self._tickets.items()):
            for ticket in tuple(tickets):
                if self._advance_ticket(key, ticket):
                    moved = True
                is_sending = is_sending or not ticket.waits_for_messages
        self._is_sending = is_sending
        return moved

    def _post(self) -> bool:
        """[1] Post calls in order: the members tell a repeated post by its serial number."""
        moved = False
        while self._unposted:
            ticket, post = self._unposted[0]
            if not ticket.is_posted:
                key = (ticket.set_id, ticket.name)
                self._posts.setdefault(key, {}).setdefault(self.rank, {})[ticket.serial] = post
                tickets = self._tickets.setdefault(key, [])
                if ticket not in tickets:
                    tickets.append(ticket)
                others = tuple(r for r in ticket.ranks if r != self.rank)
                header = (
                    _CALL,
                    post.serial,
                    *key,
                    post.signature,
                    post.nbytes,
                    post.extra,
                    post.inline is not None,
                )
                if others and not self.control.post(others, header, post.inline or b""):
                    return moved
                ticket.is_posted = moved = True
            self._unposted.popleft()
        return moved

    def _deliver(self, source: int, header: Header, payload: memoryview) -> None:
        self._is_sending = True  # some call may go on now
        if header[0] == _CALL:
            _, serial, set_id, name, signature, nbytes, extra, is_inline = header
            if serial > self._filed.get(source, 0):
                inline = bytes(payload) if is_inline else None
                post = _Post(serial, signature, nbytes, extra, inline)
                self._posts.setdefault((set_id, name), {}).setdefault(source, {})[serial] = post
                if not is_inline:
                    self._announced.add((source, serial))
                self._filed[source] = serial
        else:
            _, serial, stage, offset = header
            incoming = self._incoming.get((source, serial, stage))
            if incoming is not None:
                incoming.take(offset, payload)
            elif (source, serial) in self._announced:
                self._early.setdefault((source, serial, stage), {})[offset] = bytes(payload)

    def _advance_ticket(self, key: tuple[int, str], ticket: Ticket) -> bool:
        if ticket.done:
            self._retire(key, ticket)  # a signal handler had broken it off there
            return False
        others = tuple(r for r in ticket.ranks if r != self.rank)
        moved = False
        if not ticket.is_moving:
            if not ticket.is_posted:
                return False
            if not ticket.posts and ticket is not self._tickets[key][0]:
                return moved
            if not self._match(key, ticket):
                return moved
            moved = True
        if ticket.error is None and ticket.transfer is not None:
            moved = self._move(ticket, ticket.transfer) or moved
            if not self._is_complete(ticket.transfer, others):
                return moved
            ticket.parts = ticket.transfer.targets
        self._retire(key, ticket)
        return True

    def _match(self, key: tuple[int, str], ticket: Ticket) -> bool:
        """[2] Compare, once a post of every member is here; whether it is."""
        filed = self._posts.setdefault(key, {})
        if not ticket.posts:
            if not all(filed.get(r) for r in ticket.ranks):
                return False
            ticket.posts = {r: filed[r][min(filed[r])] for r in ticket.ranks}
        for r, post in ticket.posts.items():
            filed.get(r, {}).pop(post.serial, None)
        if not any(filed.values()):
            self._posts[key] = {}
        signatures = {r: ticket.posts[r].signature for r in ticket.ranks}
        if len(set(signatures.values())) > 1:
            ticket.error = MismatchError(_explain(ticket, signatures))
        else:
            if ticket.transfer is None:
                try:
                    ticket.transfer = self._plan_transfer(ticket)
                except (MemoryError, ValueError) as exc:  # no room for the result
                    ticket.error = exc
                    ticket.transfer = _Transfer([], {}, [])
            incoming = ticket.transfer.incoming
            self._incoming.update(incoming)
            for where, stream in incoming.items():
                for offset, piece in sorted(self._early.get(where, {}).items()):
                    stream.take(offset, piece)
                self._early.pop(where, None)
        ticket.is_moving = True
        return True

    def _plan_transfer(self, ticket: Ticket) -> _Transfer:
        """[3] Decide what comes from where; small data is here already."""
        posts = ticket.posts
        others = tuple(r for r in ticket.ranks if r != self.rank)
        counters = self.progress.counters
        counters.collectives += bool(others)
        counters.bytes += ticket.data.size if others else 0
        if ticket.reduction is not None and posts[self.rank].inline is None:
            return self._plan_reduction(ticket, others)
        members = [posts[r] for r in ticket.ranks]
        targets = ticket.place([p.nbytes for p in members], [p.extra for p in members])
        transfer = _Transfer(targets, {}, [])
        for r, target in zip(ticket.ranks, targets, strict=True):
            post = posts[r]
            if r == self.rank:
                target[:] = ticket.data
            elif post.inline is not None:
                target[:] = np.frombuffer(post.inline, np.uint8)
            else:
                transfer.incoming[r, post.serial, 0] = _Incoming(target)
        if others and posts[self.rank].inline is None:
            data = ticket.data.data
            transfer.outgoing.append(_Outgoing(others, ticket.serial, 0, data))
        if ticket.reduction is not None:
            transfer.operands = [t.view(ticket.reduction.dtype) for t in targets]
            transfer.share = np.empty(ticket.data.size, np.uint8)
        return transfer

    def _plan_reduction(self, ticket: Ticket, others: tuple[int, ...]) -> _Transfer:
        """Too large to be sent to everybody: each member reduces its own share."""
        assert ticket.reduction is not None
        dtype, num_ranks = ticket.reduction.dtype, len(ticket.ranks)
        result = np.empty(ticket.data.size, np.uint8)
        count = result.size // dtype.itemsize
        bounds = [count * k // num_ranks * dtype.itemsize for k in range(num_ranks + 1)]
        shares = {r: slice(bounds[k], bounds[k + 1]) for k, r in enumerate(ticket.ranks)}
        mine = shares[self.rank]
        transfer = _Transfer([result], {}, [], share=result[mine])
        for r in ticket.ranks:
            if r == self.rank:
                operand = ticket.data[mine]
            else:
                operand = np.empty(mine.stop - mine.start, np.uint8)
                serial = ticket.posts[r].serial
                transfer.incoming[r, serial, 0] = _Incoming(operand)
                transfer.incoming[r, serial, 1] = _Incoming(result[shares[r]])
                part = ticket.data[shares[r]].data
                transfer.outgoing.append(_Outgoing((r,), ticket.serial, 0, part))
            transfer.operands.append(operand.view(dtype))
        if others:
            transfer.returns = _Outgoing(others, ticket.serial, 1, result[mine].data)
        return transfer

    def _move(self, ticket: Ticket, transfer: _Transfer) -> bool:
        moved = False
        for outgoing in transfer.outgoing:
            moved = outgoing.pump(self.control) or moved
        if transfer.share is not None and ticket.reduction is not None:
            if not all(inc.complete for key, inc in transfer.incoming.items() if key[2] == 0):
                return moved
            out = transfer.share.view(ticket.reduction.dtype)
            # The operands are left as they are, so doing this twice does no harm.
            run(blocked_steps(ticket.reduction, transfer.operands, [out], self._block_elements))
            if transfer.returns is not None:
                transfer.outgoing = [*transfer.outgoing, transfer.returns]
                moved = transfer.returns.pump(self.control) or moved
            else:
                transfer.targets = [transfer.share]
            transfer.share = None
        return moved

    def _is_complete(self, transfer: _Transfer, others: tuple[int, ...]) -> bool:
        return (
            transfer.share is None
            and all(incoming.complete for incoming in transfer.incoming.values())
            and all(outgoing.complete for outgoing in transfer.outgoing)
            and self.control.flushed(others)
        )

    def _retire(self, key: tuple[int, str], ticket: Ticket) -> None:
        """The call is over; every line bears being run twice."""
        ticket.done = True
        for r, post in ticket.posts.items():
            self._announced.discard((r, post.serial))
            for stage in (0, 1):
                self._incoming.pop((r, post.serial, stage), None)
                self._early.pop((r, post.serial, stage), None)
        rest = [other for other in self._tickets.get(key, ()) if other is not ticket]
        if rest:
            self._tickets[key] = rest
        else:
            self._tickets.pop(key, None)
            if not any(self._posts.get(key, {}).values()):
                self._posts.pop(key, None)
        ticket.transfer = None

    def exchange(self, set_id: int, ranks: tuple[int, ...], what: str, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order; internal calls, matched by a count of their own.

        Collective:
            All of `ranks`, in the same order among calls with the same `what`.
        """
        self.progress.check_free(what)  # before the call is counted
        return list(self.call(self.object_ticket(set_id, ranks, what, value)))

    def object_ticket(
        self, set_id: int, ranks: tuple[int, ...], what: str, value: Any, name: str | None = None
    ) -> Ticket:
        """The call behind `exchange()`, for those who submit it and wait later."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        name = "\0" + (name or self.unnamed(set_id, "\0" + what))
        return Ticket(
            set_id,
            ranks,
            name,
            (("kind", what),),
            data,
            place=separate,
            finish=lambda parts: [pickle.loads(part.data) for part in parts],
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
