"""`shm`: the ranks of one machine reduce each other's buffers where they lie.

Shared segments hold a row per rank: of flags, and of two step records and the fusion buffer.

    row of rank r   │ arrived  reduced  closed  weights │     │ records (two steps) │ buffer … │

A rank arrives at a bucket by raising `arrived`.  When all members have arrived, each reduces its
own share of the slice - out of all members' buffers, in rank order, in blocks that stay in the
cache - and writes the result back into all of them; then it raises `reduced`.  A bucket is done
when all members have.  No copy in, no copy out, and every rank ends with a result of its own.

    rank 0's buffer │▒▒▒▒ share 0 ▒▒▒▒│     share 1     │      rank 0 reads both buffers in share 0
    rank 1's buffer │▒▒▒▒ share 0 ▒▒▒▒│     share 1     │      and writes both; rank 1 likewise in 1
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hvdlite.arithmetic import Step, blocked_steps, run
from hvdlite.backends.base import Agree, Work
from hvdlite.backends.page import FENCE_STEPS, ControlPage, fence, shared_segment
from hvdlite.types import Array, ReduceOp

_WORD = 8
_LINE = 8  # words in a cache line
_ARRIVED, _REDUCED, _CLOSED, _WEIGHTS, _FLAG_WORDS = 0, _LINE, 2 * _LINE, 3 * _LINE, 4 * _LINE
_ROW_BYTES = 4096  # rows start on a page


class ShmStream:
    """`Stream` in one shared segment.  See the module's docstring for the picture."""

    name = "shm"

    def __init__(
        self, rank: int, ranks: tuple[int, ...], block_elements: int, agree: Agree
    ) -> None:
        self.ranks = ranks
        self.buffers: list[Array] = []
        self._rank, self._me = rank, ranks.index(rank)
        self._block_elements = block_elements
        flags = self._share([_FLAG_WORDS * _WORD] * len(ranks), agree)
        self._flags = [row.data.cast("q") for row in flags]
        self._weights = [row.data.cast("d") for row in flags]
        self._mine = self._flags[self._me]
        self._rows: list[list[Array]] = []  # per region: everybody's buffer
        self._records: list[Array] = []  # everybody's two records
        self._record_nbytes = self._record_slot = 0
        self._works: list[_CompiledWork] = []
        self._num_positions = 0
        self._base = 0  # position of the open step's first bucket
        self._next = 0  # first work whose share is not reduced yet, as far as known
        self._parity = 0
        self._concluded = 0  # position at which this rank's record stands; 0: not yet
        self._last: list[tuple[memoryview, int, int]] = []  # per peer: the last work we share

    def _share(self, sizes: Sequence[int], agree: Agree) -> list[Array]:
        """A row of at least `sizes[q]` bytes for every rank, in one segment."""
        rows = [-(-size // _ROW_BYTES) * _ROW_BYTES for size in sizes]
        segment = shared_segment(max(sum(rows), _ROW_BYTES), self._me == 0, agree)
        ends = list(accumulate(rows))
        return [segment.array[end - row : end] for end, row in zip(ends, rows, strict=True)]

    def grow(self, sizes: Sequence[int], record_nbytes: int, agree: Agree) -> None:
        """See `Stream.grow`."""
        slot = -(-record_nbytes // 64) * 64
        rows = self._share([2 * slot + size for size in sizes], agree)
        self._record_nbytes, self._record_slot, self._records = record_nbytes, slot, rows
        self._rows.append(
            [row[2 * slot : 2 * slot + size] for row, size in zip(rows, sizes, strict=True)]
        )
        self.buffers.append(self._rows[-1][self._me])

    def program(self, works: Sequence[Work], num_positions: int) -> None:
        """See `Stream.program`."""
        self._works = [
            _CompiledWork(
                work,
                [self.ranks.index(q) for q in work.ranks],
                self._me,
                self._flags,
                self._weights,
                self._rows[work.region],
                self._block_elements,
            )
            for work in works
        ]
        self._num_positions = num_positions
        last: dict[int, int] = {}
        for work in works:
            for q in work.ranks:
                last[q] = work.index + 1
        self._last = [
            (self._flags[self.ranks.index(q)], offset, q) for q, offset in sorted(last.items())
        ]

    def begin(self, base: int, parity: int, weight: float) -> None:
        """See `Stream.begin`."""
        self._base, self._parity = base, parity
        self._next = 0
        self._concluded = 0
        self._weights[self._me][_WEIGHTS + parity] = weight

    def launch(self, i: int, record: bytes | None = None) -> None:
        """See `Stream.launch`."""
        position = self._base + self._works[i].offset
        if record is not None:
            self._write_record(record)
            self._concluded = position
        if self._mine[_ARRIVED] < position:
            fence()
            self._mine[_ARRIVED] = position

    def conclude(self, record: bytes) -> None:
        """See `Stream.conclude`."""
        self._write_record(record)
        self._concluded = self._base + self._num_positions + 1
        fence()
        self._mine[_ARRIVED] = self._concluded

    def _write_record(self, record: bytes) -> None:
        start = self._parity * self._record_slot
        self._records[self._me][start : start + len(record)] = np.frombuffer(record, np.uint8)

    def advance(self) -> bool:
        """See `Stream.advance`."""
        works, mine, base = self._works, self._mine, self._base
        moved = False
        while self._next < len(works):
            work = works[self._next]
            position = base + work.offset
            if mine[_REDUCED] < position:
                if mine[_ARRIVED] < position:
                    return moved
                for flags in work.flags:
                    if flags[_ARRIVED] < position:
                        return moved
                fence()
                work.reduce(position, self._parity)
                moved = True
            self._next += 1
        return moved

    def is_done(self, i: int) -> bool:
        """See `Stream.is_done`."""
        work = self._works[i]
        position = self._base + work.offset
        return all(flags[_REDUCED] >= position for flags in work.flags)

    def finished(self) -> bool:
        """See `Stream.finished`."""
        base = self._base
        for flags, offset, _ in self._last:
            if flags[_REDUCED] < base + offset:
                return False
        concluded = self._concluded
        if not concluded:
            return False
        for flags in self._flags:
            if flags[_ARRIVED] < concluded:
                return False
        fence()
        return True

    def records(self) -> list[bytes]:
        """See `Stream.records`."""
        start = self._parity * self._record_slot
        return [row[start : start + self._record_nbytes].tobytes() for row in self._records]

    def missing(self) -> list[int]:
        """See `Stream.missing`."""
        late: set[int] = set()
        if self._next < len(self._works):
            work = self._works[self._next]
            position = self._base + work.offset
            late = {q for q in work.peers if self._flags[q][_ARRIVED] < position}
        if not late and self._concluded:
            late = {
                self.ranks.index(q)
                for flags, offset, q in self._last
                if flags[_REDUCED] < self._base + offset
            } | {q for q, flags in enumerate(self._flags) if flags[_ARRIVED] < self._concluded}
        return [self.ranks[q] for q in sorted(late)]

    def begun(self, base: int) -> bool:
        """See `Stream.begun`."""
        return any(flags[_ARRIVED] > base for flags in self._flags)

    def arrived(self, rank: int) -> int:
        """See `Stream.arrived`."""
        return self._flags[self.ranks.index(rank)][_ARRIVED]

    def close(self, base: int) -> None:
        """See `Stream.close`."""
        self._mine[_CLOSED] = base + 1

    def closed_ranks(self) -> list[int]:
        """See `Stream.closed_ranks`."""
        ends = [flags[_CLOSED] for flags in self._flags]
        return [q for q, end in zip(self.ranks, ends, strict=True) if 0 < end <= self._base + 1]


class _CompiledWork:
    """One bucket's flags and the NumPy calls that reduce this rank's share of it.

    The last call of the list raises this rank's `reduced`: reduction and bookkeeping are one C
    loop, which no signal handler can split.
    """

    def __init__(
        self,
        work: Work,
        rows: Sequence[int],
        me: int,
        flags: Sequence[memoryview],
        weights: Sequence["memoryview[float]"],
        buffers: Sequence[Array],
        block_elements: int,
    ) -> None:
        self.offset = work.index + 1
        self.peers = tuple(q for q in rows if q != me)
        self.flags = [flags[q] for q in self.peers]
        self._weights = [weights[q] for q in rows]
        self._say_reduced = flags[me].__setitem__
        self._is_average = work.op is ReduceOp.AVERAGE
        self._reduction = work.reduction()
        self._block_elements = block_elements
        start, stop = work.share(rows.index(me))
        self._shares = [
            buffers[q][s + start : s + stop].view(work.dtype)
            for q, s in zip(rows, work.starts, strict=True)
        ]
        self._steps = self._compile(None)

    def member_weights(self, parity: int) -> list[float]:
        """The members' weights of a step, in rank order."""
        return [weights[_WEIGHTS + parity] for weights in self._weights]

    def reduce(self, position: int, parity: int) -> None:
        """Reduce this rank's share and say so."""
        steps = self._steps
        if self._is_average:
            weights = self.member_weights(parity)
            if any(weight != 1.0 for weight in weights):
                steps = self._compile(weights)
        run([*steps, *FENCE_STEPS, (self._say_reduced, _REDUCED, position)])

    def _compile(self, weights: Sequence[float] | None) -> list[Step]:
        shares = self._shares
        return blocked_steps(self._reduction, shares, shares, self._block_elements, weights)


class ShmBackend:
    """`Backend` of the ranks of one machine.

    Args:
        control: The control page.
        block_elements: Elements that one NumPy call of a reduction handles.
    """

    name = "shm"

    def __init__(self, control: ControlPage, block_elements: int) -> None:
        self.control = control
        self._block_elements = block_elements

    def open_stream(self, stream_id: int, ranks: tuple[int, ...], agree: Agree) -> ShmStream:
        """See `Backend.open_stream`."""
        return ShmStream(self.control.rank, ranks, self._block_elements, agree)

    def close(self) -> None:
        """See `Backend.close`."""
        self.control.close()
