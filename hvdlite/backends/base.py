"""What a backend is: the contract of moving bytes between the ranks of one machine or job.

A backend has two sides.  Its `Control` carries short messages and says who is still there; the
matching layer, constructors and objects use it.  Its `Stream`s reduce the fusion buffers of
optimizers in place.  Everything is advanced without waiting: `poll()` and `advance()` do what can
be done now and return, and whoever waits calls them from the one loop in `progress.py`.

Writing one:
 1. Subclass nothing; provide the attributes and methods of `Backend`, `Control` and `Stream`.
 2. Never block, except in `open_stream()` and `grow()`, where all ranks of the stream arrive.
 3. Every state change must survive an exception raised by a signal handler between any two byte
    codes: derive what was done from memory that one C call writes, and let the same call again
    do nothing.
 4. Add it to `tests/conformance/`; the suite decides whether it is a backend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdlite.arithmetic import Reduction
from hvdlite.types import Array, ReduceOp

Header = tuple[Any, ...]  # what `marshal` takes: None, bool, int, float, str, bytes, tuples of them
Deliver = Callable[[int, Header, memoryview], None]


class RankState(IntEnum):
    """What is known of a rank; only ever grows."""

    STARTING = 0
    ALIVE = 1
    LEFT = 2  # called shutdown() or came to its end
    FAILED = 3  # has said so itself, or its process is gone
    GAVE_UP = 4  # has waited too long, and takes part in nothing any more


class Jotting(NamedTuple):
    """What a rank has jotted down for the others, and when."""

    text: str  # its last call; "": none yet
    number: int  # of that call, counted on its rank
    waits: bool  # in that call; else it is in the user's code
    age_s: float
    story: str  # what it waits for, once that takes long
    shows_stack: bool


class Control(Protocol):
    """Short messages between ranks, in order of posting, and the state of every rank.

    Messages are never lost and never reordered between two ranks, but one may be delivered twice
    when a signal handler raises while it is handled: a handler must bear that.
    """

    rank: int
    size: int
    max_payload: int
    """Bytes one message can carry beside its header."""

    def post(self, to: Sequence[int], header: Header, payload: "memoryview | bytes" = b"") -> bool:
        """Send to some ranks (not to this one); False when there is no room now: try again.

        The payload is copied before the call returns.
        """
        ...

    def poll(self, deliver: Deliver) -> bool:
        """Hand every new message to `deliver(source, header, payload)`; whether there was one.

        The payload is valid only inside the call.
        """
        ...

    def flushed(self, ranks: Sequence[int]) -> bool:
        """Whether what was posted to these ranks reaches them without further help of this one."""
        ...

    def state(self, rank: int) -> tuple[RankState, str]:
        """What is known of a rank, and what it said when it failed.  Cheap."""
        ...

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Look whether the processes still exist and record those that are gone as FAILED."""
        ...

    def announce(self, state: RankState, note: str = "") -> None:
        """Tell everybody that this rank leaves or fails; waits for nobody."""
        ...

    def quitters(self) -> list[int]:
        """Ranks that are known to have given up.  Cheap."""
        ...

    def pid(self, rank: int) -> int:
        """Process id of a rank; 0 where it cannot be seen from here."""
        ...

    def jot(self, waits: bool, text: str | None = None, count: int = 0) -> None:
        """Note what this rank does now, for the others to read at any time.

        At most a microsecond; where there is no shared memory it does nothing.

        Args:
            waits: In the call, or not (any more).
            text: Names the call; None: as before.
            count: How many there were.
        """
        ...

    def tell(self, story: str) -> None:
        """Add to the note what this rank waits for; it goes with the next `jot()`."""
        ...

    def offer_stack(self) -> None:
        """Note that this process prints its stack when it gets the signal for that."""
        ...

    def jotted(self, rank: int) -> Jotting | None:
        """What a rank has noted; None where there is no shared memory."""
        ...

    def close(self) -> None:
        """Release everything; local."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One bucket, as a backend sees it: a slice of each member's buffer to be reduced in place.

    Attributes:
        index: Position in the plan's total order; the same on all ranks.
        region: Which of the stream's buffers the slice lies in.
        ranks: Members, world ranks ascending, more than one; this rank is one of them.
        starts: Byte offset of the slice in each member's buffer, in the order of `ranks`.
        nbytes: Length of the slice in bytes, a multiple of 64.
        dtype: Element type.
        op: Reduce op.
        prescale: Factor before the reduction.
        postscale: Factor after it.
    """

    index: int
    region: int
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int
    dtype: np.dtype[Any]
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def reduction(self) -> Reduction:
        """The arithmetic of this bucket."""
        return Reduction(self.op, self.dtype, len(self.ranks), self.prescale, self.postscale)

    def share(self, position: int) -> tuple[int, int]:
        """Bytes of the slice that member number `position` reduces: [start, stop)."""
        step = -(-self.nbytes // len(self.ranks) // 64) * 64
        return min(step * position, self.nbytes), min(step * (position + 1), self.nbytes)


class Stream(Protocol):
    """The reductions of one optimizer, step after step.

    A step: `begin(base, parity, weight)`, then `launch(i)` for each work of the program in order,
    then `conclude(record)` (or `launch(i, record)` for a last work that belongs to every rank of
    the stream), then `advance()` until `finished()`.  From `launch(i)` until `is_done(i)` the slice
    belongs to the backend; at all other times to this rank.  Positions never turn back: a launch
    said twice counts once.
    """

    name: str
    ranks: tuple[int, ...]
    buffers: list[Array]
    """This rank's own bytes (uint8), one array per `grow()`."""

    def grow(self, sizes: Sequence[int], record_nbytes: int, agree: "Agree") -> None:
        """Add memory; collective over `ranks`, between two steps.

        Args:
            sizes: Bytes each rank needs more, in the order of `ranks`.
            record_nbytes: Size of the coming records.
            agree: As in `Backend.open_stream`.

        Raises:
            BackendUnavailableError: On every rank, when the memory cannot be had.
        """
        ...

    def program(self, works: Sequence[Work], num_positions: int) -> None:
        """Set this rank's works for the coming steps; only between two steps.

        Args:
            works: The buckets this rank is a member of, in the plan's order.
            num_positions: Number of buckets of the whole plan, on all ranks.
        """
        ...

    def begin(self, base: int, parity: int, weight: float) -> None:
        """Open a step.

        Args:
            base: Sum over all steps before of their plans' number of buckets plus one; the same on
                all ranks.
            parity: Number of the step modulo 2.
            weight: This rank's weight.
        """
        ...

    def launch(self, i: int, record: bytes | None = None) -> None:
        """This rank arrives at its i-th work: the slice is final."""
        ...

    def conclude(self, record: bytes) -> None:
        """This rank has nothing more to add to the step; `record` goes to every rank."""
        ...

    def advance(self) -> bool:
        """Do what can be done without waiting; whether something was done."""
        ...

    def is_done(self, i: int) -> bool:
        """Whether the i-th work of the open step is reduced in this rank's buffer."""
        ...

    def finished(self) -> bool:
        """Whether all works of the step are done and everybody's record is here."""
        ...

    def records(self) -> list[bytes]:
        """The records of the finished step, in the order of `ranks`."""
        ...

    def missing(self) -> list[int]:
        """Ranks this rank waits for at present."""
        ...

    def begun(self, base: int) -> bool:
        """Whether a peer has arrived in the step that `begin(base, ...)` would open here."""
        ...

    def arrived(self, rank: int) -> int:
        """Up to which position a rank has come, as far as known; for messages.

        In a step that began at `base` it is past bucket k of the plan from `base + k + 1` on.
        """
        ...

    def close(self, base: int) -> None:
        """Tell the peers that this rank begins no more steps; local, and fit for `__del__`.

        A step that is under way is served on as long as somebody calls `advance()`.

        Args:
            base: The `begin()` position that would have come next: all steps before are finished.
        """
        ...

    def closed_ranks(self) -> list[int]:
        """Peers that have closed the stream and had not finished the open step."""
        ...


class Backend(Protocol):
    """Moves bytes between ranks; `name` is what users write in `HVDLITE_BACKEND`."""

    name: str

    @property
    def control(self) -> Control:
        """Its message side."""
        ...

    def open_stream(self, stream_id: int, ranks: tuple[int, ...], agree: "Agree") -> Stream:
        """Make the stream of one optimizer; collective over `ranks`.

        Args:
            stream_id: Number agreed by all ranks, unique in this Context.
            ranks: World ranks, ascending.
            agree: Exchanges a short text or None with all ranks of the stream.

        Raises:
            BackendUnavailableError: On every rank, when the memory cannot be had.
        """
        ...

    def close(self) -> None:
        """Release everything; local, waits for nobody."""
        ...


Agree = Callable[[str | None], list[str | None]]
"""Collective over a stream's ranks: hand in a text or None, get everybody's in rank order."""
