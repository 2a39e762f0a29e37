"""`local`: one rank, nothing to move.  The same code runs, with no peer to wait for."""

from collections.abc import Sequence

import numpy as np

from hvdlite.backends.base import Agree, Deliver, Header, Jotting, RankState, Work
from hvdlite.types import Array


class LocalControl:
    """`Control` of a world of one: there is nobody to write to."""

    rank, size = 0, 1
    max_payload = 1 << 20

    def post(self, to: Sequence[int], header: Header, payload: memoryview | bytes = b"") -> bool:
        """See `Control.post`; `to` is always empty here."""
        return not to

    def poll(self, deliver: Deliver) -> bool:
        """See `Control.poll`."""
        return False

    def flushed(self, ranks: Sequence[int]) -> bool:
        """See `Control.flushed`."""
        return True

    def state(self, rank: int) -> tuple[RankState, str]:
        """See `Control.state`."""
        return RankState.ALIVE, ""

    def check_alive(self, ranks: Sequence[int]) -> None:
        """See `Control.check_alive`."""

    def announce(self, state: RankState, note: str = "") -> None:
        """See `Control.announce`."""

    def quitters(self) -> list[int]:
        """See `Control.quitters`."""
        return []

    def pid(self, rank: int) -> int:
        """See `Control.pid`."""
        return 0

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


class LocalStream:
    """`Stream` of one rank: every slice is its own result, the only record this rank's.

    Buckets of one rank are no works at all (see `Work.ranks`), so the program is empty.
    """

    name = "local"

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.buffers: list[Array] = []
        self._record = b""

    def grow(self, sizes: Sequence[int], record_nbytes: int, agree: Agree) -> None:
        """See `Stream.grow`."""
        self.buffers.append(aligned_zeros(sizes[0]))

    def program(self, works: Sequence[Work], num_positions: int) -> None:
        """See `Stream.program`."""

    def begin(self, base: int, parity: int, weight: float) -> None:
        """See `Stream.begin`."""

    def launch(self, i: int, record: bytes | None = None) -> None:
        """See `Stream.launch`."""

    def conclude(self, record: bytes) -> None:
        """See `Stream.conclude`."""
        self._record = record

    def advance(self) -> bool:
        """See `Stream.advance`."""
        return False

    def is_done(self, i: int) -> bool:
        """See `Stream.is_done`."""
        return True

    def finished(self) -> bool:
        """See `Stream.finished`."""
        return True

    def records(self) -> list[bytes]:
        """See `Stream.records`."""
        return [self._record]

    def missing(self) -> list[int]:
        """See `Stream.missing`."""
        return []

    def begun(self, base: int) -> bool:
        """See `Stream.begun`; there are no peers."""
        return False

    def arrived(self, rank: int) -> int:
        """See `Stream.arrived`."""
        return 0

    def close(self, base: int) -> None:
        """See `Stream.close`."""

    def closed_ranks(self) -> list[int]:
        """See `Stream.closed_ranks`."""
        return []


class LocalBackend:
    """`Backend` of one rank."""

    name = "local"

    def __init__(self) -> None:
        self.control = LocalControl()

    def open_stream(self, stream_id: int, ranks: tuple[int, ...], agree: Agree) -> LocalStream:
        """See `Backend.open_stream`; also serves one-rank sets of a larger world."""
        return LocalStream(ranks[0])

    def close(self) -> None:
        """See `Backend.close`."""


def aligned_zeros(nbytes: int) -> Array:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(nbytes + 63, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]
