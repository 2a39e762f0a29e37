"""`mpi`: NumPy buffers over nonblocking point-to-point MPI, where no memory can be shared.

Every member of a bucket owns a share of it.  It receives that share from all others, reduces it in
rank order, and sends the result back:

    rank 0   share 0 ◀── share 0 of ranks 1, 2      reduce      share 0 ──▶ ranks 1, 2
    rank 1   share 1 ◀── share 1 of ranks 0, 2      reduce      share 1 ──▶ ranks 0, 2

That is 2 (n-1)/n of the bytes per rank, as the best allreduce, the same sum on all ranks whatever
the MPI library, and it needs no order of calls beyond the plan's: messages carry the stream and the
position in their tag, so one pair of communicators serves every optimizer for ever.
"""

import marshal
import struct
from collections import deque
from collections.abc import Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from hvdlite.arithmetic import blocked_steps, run
from hvdlite.backends.base import Agree, Deliver, Header, Jotting, RankState, Work
from hvdlite.backends.local import aligned_zeros
from hvdlite.backends.page import is_running
from hvdlite.errors import BackendUnavailableError
from hvdlite.types import Array

if TYPE_CHECKING:
    from mpi4py import MPI

_CONTROL_TAG = 1
_STREAM, _STATE = "stream", "state"  # first words of messages that stay inside the backend
_ARRIVED, _RECORD, _CLOSED = "arrived", "record", "closed"
_PREFIX = 32  # bytes: serial, length of the header, length of the payload, generation
_HEADER_BYTES = 2048
_MAX_PAYLOAD = 256 * 1024 - _HEADER_BYTES
_TIDIED, _MAX_OUTSTANDING = 16, 64  # messages on the way to one rank
CHUNK_BYTES = 2**30  # Open MPI's counts end at 2^31 - 1
_ANNOUNCE_TRIES = 1000  # by the last word of a rank, which cannot wait
_NUM_TAG_NUMBERS = 4096  # of streams alive at a time; with 9 bits for the rest of a tag
_WINDOW = 2  # buckets exchanged at the same time


class MpiControl:
    """`Control` over MPI messages.

    One persistent receive per peer; the serial number in its buffer, which this rank zeroes before
    it starts the receive again, tells a new message from one already handled.

    Args:
        comm: A communicator of its own.
        pids: Process id of every rank, 0 where it cannot be seen from here.
        generation: Tells this use of the communicator from earlier ones, whose last words may still
            be under way: a rank that leaves waits for nobody.
        unfinished: Takes the sends that are under way at the end; lives as long as `comm`.
    """

    max_payload = _MAX_PAYLOAD

    def __init__(
        self,
        comm: "MPI.Intracomm",
        pids: Sequence[int],
        generation: int,
        unfinished: list[Any],
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.streams: WeakValueDictionary[int, MpiStream] = WeakValueDictionary()
        self._pids = list(pids)
        self._states: dict[int, tuple[RankState, str]] = {}
        self._serial = 0
        self._generation, self._unfinished = generation, unfinished
        self._is_closed = False
        self._later: deque[tuple[list[int], Header]] = deque()  # words of streams that were dropped
        self._sends: dict[int, list[Any]] = {r: [] for r in range(self.size)}
        self._peers = [r for r in range(self.size) if r != self.rank]
        length = _PREFIX + _HEADER_BYTES + _MAX_PAYLOAD
        self._inboxes = {r: np.zeros(length, np.uint8) for r in self._peers}
        self._prefixes = {r: self._inboxes[r].data[:_PREFIX].cast("q") for r in self._peers}
        self._receives = {
            r: comm.Recv_init([self._inboxes[r], _byte()], source=r, tag=_CONTROL_TAG)
            for r in self._peers
        }

    def post(self, to: Sequence[int], header: Header, payload: memoryview | bytes = b"") -> bool:
        """See `Control.post`."""
        if self._is_closed:
            return True
        to = [r for r in to if self.state(r)[0] < RankState.LEFT]
        for r in to:
            sends = self._sends[r]
            if sends and len(sends) % _TIDIED == 0:  # those that have arrived need not be kept
                sends = self._sends[r] = [request for request in sends if not request.Test()]
            if len(sends) >= _MAX_OUTSTANDING:
                return False
        head = marshal.dumps(header)
        self._serial += 1
        prefix = struct.pack("=4q", self._serial, len(head), len(payload), self._generation)
        message = b"".join((prefix, head, payload))
        for r in to:  # one C call: the request is kept as soon as it exists
            self._sends[r].extend(starmap(self.comm.Isend, [([message, _byte()], r, _CONTROL_TAG)]))
        return True

    def poll(self, deliver: Deliver) -> bool:
        """See `Control.poll`."""
        while self._later and self.post(*self._later[0]):
            self._later.popleft()
        found = False
        for r in self._peers:
            receive, prefix = self._receives[r], self._prefixes[r]
            while receive.Test():  # also true while it has not been started
                if prefix[0] and prefix[3] == self._generation:
                    middle = _PREFIX + prefix[1]
                    inbox = self._inboxes[r].data
                    header = marshal.loads(inbox[_PREFIX:middle])
                    self._route(r, header, inbox[middle : middle + prefix[2]], deliver)
                    found = True
                prefix[0] = 0
                receive.Start()
        return found

    def post_later(self, to: list[int], header: Header) -> None:
        """Post at the next `poll()`; may be called while anything is collected as garbage."""
        self._later.append((to, header))

    def _route(self, source: int, header: Header, payload: memoryview, deliver: Deliver) -> None:
        if header[0] == _STREAM:
            stream = self.streams.get(header[1])
            if stream is not None:
                stream.take(source, header, payload)
        elif header[0] == _STATE:
            self._states[source] = (RankState(header[1]), header[2])
        else:
            deliver(source, header, payload)

    def flushed(self, ranks: Sequence[int]) -> bool:
        """See `Control.flushed`."""
        return all(_all_done(self._sends[r]) for r in ranks)

    def state(self, rank: int) -> tuple[RankState, str]:
        """See `Control.state`."""
        return self._states.get(rank, (RankState.ALIVE, ""))

    def check_alive(self, ranks: Sequence[int]) -> None:
        """See `Control.check_alive`."""
        for r in ranks:
            pid = self._pids[r]
            if pid and r != self.rank and r not in self._states and not is_running(pid):
                self._states[r] = (RankState.FAILED, f"its process (pid {pid}) is gone")

    def announce(self, state: RankState, note: str = "") -> None:
        """See `Control.announce`."""
        if self.state(self.rank)[0] < RankState.LEFT:
            self._states[self.rank] = (state, note)
            word = (_STATE, int(state), note[:512].encode(errors="backslashreplace").decode())
            for r in self._peers:
                for _ in range(_ANNOUNCE_TRIES):
                    if self.post([r], word):
                        break

    def quitters(self) -> list[int]:
        """See `Control.quitters`."""
        return [r for r, (state, _) in self._states.items() if state is RankState.GAVE_UP]

    def pid(self, rank: int) -> int:
        """See `Control.pid`."""
        return self._pids[rank]

    def jot(self, waits: bool, text: str | None = None, count: int = 0) -> None:
        """See `Control.jot`."""

    def tell(self, story: str) -> None:
        """See `Control.tell`."""

    def offer_stack(self) -> None:
        """See `Control.offer_stack`."""

    def jotted(self, rank: int) -> Jotting | None:
        """See `Control.jotted`."""
        return None

    def close(self) -> None:
        """See `Control.close`."""
        self.announce(RankState.LEFT)
        self._is_closed = True
        for receive in self._receives.values():
            if not receive.Test():
                receive.Cancel()
                receive.Wait()
            receive.Free()
        for requests in self._sends.values():
            self._unfinished.extend(request for request in requests if not request.Test())


class MpiStream:
    """`Stream` over point-to-point messages.  See the module's docstring for the picture."""

    name = "mpi"

    def __init__(
        self,
        control: MpiControl,
        data: "MPI.Intracomm",
        stream_id: int,
        tag_number: int,
        ranks: tuple[int, ...],
        block_elements: int,
    ) -> None:
        self.ranks = ranks
        self.buffers: list[Array] = []
        self._control, self._data, self._id = control, data, stream_id
        self.tag_number = tag_number
        self._block_elements = block_elements
        self._others = [q for q in ranks if q != control.rank]
        self._works: list[_Exchange] = []
        self._scratch: list[Array] = []
        self._base = self._next = self._launched = 0
        self._unsent: dict[tuple[str, int], tuple[Sequence[int], Header, bytes]] = {}
        self._arrived = dict.fromkeys(ranks, 0)
        self._weights: dict[tuple[int, int], float] = {}  # (base of the step, rank)
        self._records: dict[tuple[int, int], bytes] = {}
        self._closed: dict[int, int] = {}  # rank -> base of the step it did not finish any more
        self._is_closed = False
        control.streams[stream_id] = self

    def grow(self, sizes: Sequence[int], record_nbytes: int, agree: Agree) -> None:
        """See `Stream.grow`."""
        self.buffers.append(aligned_zeros(sizes[self.ranks.index(self._control.rank)]))

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """One message of a peer's stream with the same number; twice is as good as once."""
        kind = header[2]
        if kind == _ARRIVED:
            _, _, _, base, position, weight = header
            self._weights[base, source] = weight
            self._arrived[source] = max(self._arrived[source], position)
        elif kind == _RECORD:
            self._records[header[3], source] = bytes(payload)
        else:
            self._closed[source] = header[3]

    def program(self, works: Sequence[Work], num_positions: int) -> None:
        """See `Stream.program`."""
        me, blocks = self._control.rank, self._block_elements
        self._works = [_Exchange(work, me, self.buffers[work.region], blocks) for work in works]
        longest = max((work.scratch_nbytes for work in self._works), default=0)
        self._scratch = [aligned_zeros(longest) for _ in range(min(_WINDOW, len(works)))]

    def begin(self, base: int, parity: int, weight: float) -> None:
        """See `Stream.begin`."""
        for past in [key for key in self._weights if key[0] < base]:
            self._weights.pop(past, None)
        for past in [key for key in self._records if key[0] < base]:
            self._records.pop(past, None)
        self._base = base
        self._next = self._launched = 0
        for work in self._works:
            work.reset()
        self._weights[self._base, self._control.rank] = weight

    def launch(self, i: int, record: bytes | None = None) -> None:
        """See `Stream.launch`."""
        if record is not None:
            self.conclude(record)
        if i >= self._launched:
            work, base = self._works[i], self._base
            position = base + work.index + 1
            weight = self._weights[base, self._control.rank]
            header = (_STREAM, self._id, _ARRIVED, base, position, weight)
            self._unsent[_ARRIVED, position] = (work.others, header, b"")
            self._launched = i + 1

    def conclude(self, record: bytes) -> None:
        """See `Stream.conclude`."""
        base = self._base
        if (base, self._control.rank) not in self._records:
            self._unsent[_RECORD, base] = (self._others, (_STREAM, self._id, _RECORD, base), record)
            self._records[base, self._control.rank] = record

    def advance(self) -> bool:
        """See `Stream.advance`."""
        moved = False
        for key, (to, header, payload) in list(self._unsent.items()):
            if not self._control.post(to, header, payload):
                break
            self._unsent.pop(key, None)
            moved = True
        for i in range(self._next, min(self._launched, self._next + _WINDOW)):
            work = self._works[i]
            if not work.begun:
                position = self._base + work.index + 1
                if any(self._arrived[q] < position for q in work.others):
                    break
                weights = [self._weights[self._base, q] for q in work.ranks]
                tag = self.tag_number << 9 | (position % 128) << 2
                work.begin(self._data, self._scratch[i % _WINDOW], tag, weights)
                moved = True
            moved = work.advance(self._data) or moved
            if i == self._next and work.done:
                self._next += 1
        return moved

    def is_done(self, i: int) -> bool:
        """See `Stream.is_done`."""
        return i < self._next

    def finished(self) -> bool:
        """See `Stream.finished`."""
        records, base = self._records, self._base
        return (
            self._next == len(self._works)
            and not self._unsent
            and all((base, q) in records for q in self.ranks)
        )

    def records(self) -> list[bytes]:
        """See `Stream.records`."""
        return [self._records[self._base, q] for q in self.ranks]

    def missing(self) -> list[int]:
        """See `Stream.missing`."""
        if self._next < self._launched:
            work = self._works[self._next]
            position = self._base + work.index + 1
            late = [q for q in work.others if self._arrived[q] < position]
            return late or work.late() or list(work.others)
        return [q for q in self.ranks if (self._base, q) not in self._records]

    def begun(self, base: int) -> bool:
        """See `Stream.begun`."""
        others = self._others
        return any(self._arrived[q] > base or (base, q) in self._records for q in others)

    def arrived(self, rank: int) -> int:
        """See `Stream.arrived`."""
        return self._arrived[rank]

    def close(self, base: int) -> None:
        """See `Stream.close`; said at the next `poll()`, for garbage is collected anywhere."""
        if not self._is_closed:
            self._is_closed = True
            self._control.post_later(self._others, (_STREAM, self._id, _CLOSED, base))

    def closed_ranks(self) -> list[int]:
        """See `Stream.closed_ranks`."""
        return sorted(q for q, base in self._closed.items() if base <= self._base)


class _Exchange:
    """One bucket over MPI: out to the owners of the shares, reduce, and back.

    What was begun is told by the request lists alone, each filled by one C call.
    """

    def __init__(self, work: Work, me: int, buffer: Array, block_elements: int) -> None:
        self.index, self.ranks = work.index, work.ranks
        self.others = [q for q in work.ranks if q != me]
        self._dtype = work.dtype
        self._reduction = work.reduction()
        self._block_elements = block_elements
        start = work.starts[work.ranks.index(me)]
        self._slices = {
            q: buffer[start + low : start + high]
            for q, (low, high) in zip(
                work.ranks, map(work.share, range(len(work.ranks))), strict=True
            )
        }
        self._own = self._slices[me]
        self._me = work.ranks.index(me)
        self.scratch_nbytes = self._own.size * len(work.ranks)
        self._out: list[Any] = []
        self._back: list[Any] = []
        self._out_sources: list[int] = []  # of the receives, which come first in `_out`
        self._back_sources: list[int] = []
        self._operands: list[Array] = []
        self._weights: list[float] = []
        self._tag = 0
        self.begun = self.done = False

    def reset(self) -> None:
        """Forget the last step."""
        self._out, self._back = [], []
        self.begun = self.done = False

    def begin(self, comm: "MPI.Intracomm", scratch: Array, tag: int, weights: list[float]) -> None:
        """All members have arrived: send what is theirs, receive what is ours."""
        if not self._out:
            size = self._own.size
            self._operands = [scratch[k * size : (k + 1) * size] for k in range(len(self.ranks))]
            self._weights, self._tag = weights, tag
            np.copyto(self._operands[self._me], self._own)
            receives = [
                piece
                for q in self.others
                for piece in _messages(self._operands[self.ranks.index(q)], q, tag)
            ]
            sends = [piece for q in self.others for piece in _messages(self._slices[q], q, tag)]
            self._out_sources = [q for _, q, _ in receives]
            self._out.extend(chain(starmap(comm.Irecv, receives), starmap(comm.Isend, sends)))
        self.begun = True

    def late(self) -> list[int]:
        """Ranks whose part has not come, once it has begun."""
        sources, requests = self._out_sources, self._out
        if self._back:
            sources, requests = self._back_sources, self._back
        waiting = zip(sources, requests, strict=False)
        return sorted({q for q, request in waiting if not request.Test()})

    def advance(self, comm: "MPI.Intracomm") -> bool:
        """Go on as far as messages have come; whether something was done."""
        if not self._back:
            if not _all_done(self._out):
                return False
            weights = None if all(w == 1.0 for w in self._weights) else self._weights
            if self._reduction.op.name != "AVERAGE":
                weights = None
            operands = [operand.view(self._dtype) for operand in self._operands]
            outs = [self._own.view(self._dtype)]
            run(blocked_steps(self._reduction, operands, outs, self._block_elements, weights))
            tag = self._tag | 1
            receives = [piece for q in self.others for piece in _messages(self._slices[q], q, tag)]
            sends = [piece for q in self.others for piece in _messages(self._own, q, tag)]
            self._back_sources = [q for _, q, _ in receives]
            self._back.extend(chain(starmap(comm.Irecv, receives), starmap(comm.Isend, sends)))
        if self.done or not _all_done(self._back):
            return False
        self.done = True
        return True


class MpiBackend:
    """`Backend` over two communicators, one for messages and one for data.

    Args:
        control: The message side.
        data: A communicator of its own, for the bytes of buckets.
        block_elements: Elements that one NumPy call of a reduction handles.
    """

    name = "mpi"

    def __init__(self, control: MpiControl, data: "MPI.Intracomm", block_elements: int) -> None:
        self.control = control
        self._data = data
        self._block_elements = block_elements

    def open_stream(self, stream_id: int, ranks: tuple[int, ...], agree: Agree) -> MpiStream:
        """See `Backend.open_stream`."""
        number = self._free_tag_number(stream_id, agree)
        stream = MpiStream(self.control, self._data, stream_id, number, ranks, self._block_elements)
        agree(None)  # nobody sends before everybody listens
        return stream

    def _free_tag_number(self, stream_id: int, agree: Agree) -> int:
        """A number for the tags of a new stream that no living stream of any member uses.

        The search starts at the stream's own number, so that one that was just given up, whose
        last messages may be under way, is the last to be taken again.

        Raises:
            BackendUnavailableError: On every rank: there is none.
        """
        mine = [str(stream.tag_number) for stream in self.control.streams.values()]
        taken = {int(word) for text in agree(",".join(mine)) if text for word in text.split(",")}
        for k in range(_NUM_TAG_NUMBERS):
            number = (stream_id + k) % _NUM_TAG_NUMBERS
            if number not in taken:
                return number
        raise BackendUnavailableError(
            f"{_NUM_TAG_NUMBERS} optimizers are alive; opt.close() and drop those that are done"
        )

    def close(self) -> None:
        """See `Backend.close`."""
        self.control.close()


def _messages(array: Array, rank: int, tag: int) -> list[tuple[Any, int, int]]:
    """Arguments of Isend or Irecv for `array`, in chunks that any MPI can count."""
    pieces = range(0, max(array.size, 1), CHUNK_BYTES)
    return [([array[i : i + CHUNK_BYTES], _byte()], rank, tag) for i in pieces]


def _all_done(requests: list[Any]) -> bool:
    from mpi4py import MPI

    return bool(MPI.Request.Testall(requests))


def _byte() -> "MPI.Datatype":
    from mpi4py import MPI

    return MPI.BYTE
