"""Fakes of a backend: a network between ranks of one process, and a stream that keeps a log."""

import marshal
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.backends.base import Agree, Deliver, Header, Jotting, RankState, Work
from hvdlite.backends.local import aligned_zeros
from hvdlite.negotiation import Matcher
from hvdlite.progress import Progress
from hvdlite.types import Array


def together(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Run `function(rank)` in a thread for each rank; the results, or what was raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


class Network:
    """Messages between the ranks of one process; keeps what `Control` promises, and no more.

    Args:
        size: Number of ranks.
        rng: Chooses what comes when, what comes twice and what is refused; None: all at once.
        max_payload: As `Control.max_payload`.
        refusals: Share of posts that find no room.
        repeats: Share of polls whose messages come again with the next one.
    """

    def __init__(
        self,
        size: int,
        rng: random.Random | None = None,
        *,
        max_payload: int = 1 << 20,
        refusals: float = 0.0,
        repeats: float = 0.0,
    ) -> None:
        self.rng, self.refusals, self.repeats = rng, refusals, repeats
        self.queues: dict[tuple[int, int], deque[tuple[bytes, bytes]]] = {
            (a, b): deque() for a in range(size) for b in range(size)
        }
        self.num_posted = 0
        self.controls = [NetworkControl(self, r, size, max_payload) for r in range(size)]
        self.progress = [Progress(control, 5.0) for control in self.controls]

    def matchers(self, block_elements: int = 1000) -> list[Matcher]:
        """The matching layer of every rank."""
        return [
            Matcher(control, progress, block_elements)
            for control, progress in zip(self.controls, self.progress, strict=True)
        ]


_NOTHING = Jotting("", 0, False, 0.0, "", False)


class NetworkControl:
    """`Control` of one rank of a `Network`."""

    def __init__(self, network: Network, rank: int, size: int, max_payload: int) -> None:
        self.rank, self.size = rank, size
        self.max_payload = max_payload
        self.states = [(RankState.ALIVE, "")] * size
        self.pids: dict[int, int] = {}
        self.jottings: dict[int, Jotting] = {}
        self._network = network

    def post(self, to: Sequence[int], header: Header, payload: memoryview | bytes = b"") -> bool:
        """See `Control.post`."""
        assert self.rank not in to
        assert len(payload) <= self.max_payload
        net = self._network
        if net.rng is not None and net.rng.random() < net.refusals:
            return False
        net.num_posted += 1
        for reader in to:
            net.queues[self.rank, reader].append((marshal.dumps(header), bytes(payload)))
        return True

    def poll(self, deliver: Deliver) -> bool:
        """See `Control.poll`; messages of one author stay until all of them were handled."""
        net, found = self._network, False
        authors = [r for r in range(self.size) if net.queues[r, self.rank]]
        if net.rng is not None:
            net.rng.shuffle(authors)
        for author in authors:
            queue = net.queues[author, self.rank]
            count = len(queue) if net.rng is None else net.rng.randint(0, len(queue))
            for header, payload in list(queue.copy())[:count]:
                deliver(author, marshal.loads(header), memoryview(bytearray(payload)))
                found = True
            if net.rng is None or net.rng.random() >= net.repeats:
                for _ in range(count):
                    queue.popleft()
        return found

    def flushed(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002 - as the protocol says
        """See `Control.flushed`."""
        return True

    def state(self, rank: int) -> tuple[RankState, str]:
        """See `Control.state`."""
        return self.states[rank] if rank < len(self.states) else (RankState.ALIVE, "")

    def check_alive(self, ranks: Sequence[int]) -> None:
        """See `Control.check_alive`."""

    def announce(self, state: RankState, note: str = "") -> None:
        """See `Control.announce`."""
        if self.states[self.rank][0] < RankState.LEFT:
            for control in self._network.controls:
                control.states[self.rank] = (state, note)

    def quitters(self) -> list[int]:
        """See `Control.quitters`."""
        return [r for r, (state, _) in enumerate(self.states) if state is RankState.GAVE_UP]

    def pid(self, rank: int) -> int:
        """See `Control.pid`."""
        return self.pids.get(rank, 0)

    def jot(self, waits: bool, text: str | None = None, count: int = 0) -> None:
        """See `Control.jot`."""
        for control in self._network.controls:
            old = control.jottings.get(self.rank, _NOTHING)
            new = old if text is None else old._replace(text=text, number=count)
            control.jottings[self.rank] = new._replace(waits=waits, story="")

    def tell(self, story: str) -> None:
        """See `Control.tell`."""
        for control in self._network.controls:
            old = control.jottings.get(self.rank, _NOTHING)
            control.jottings[self.rank] = old._replace(story=story)

    def offer_stack(self) -> None:
        """See `Control.offer_stack`."""

    def jotted(self, rank: int) -> Jotting | None:
        """See `Control.jotted`."""
        return self.jottings.get(rank)

    def close(self) -> None:
        """See `Control.close`."""


class LoggingStream:
    """`Stream` of one rank that does what the test tells it and writes down what it is told.

    The bytes stay as they are: what a reduction would make of them is a backend's business.

    Args:
        rank: This rank.
        ranks: Members.

    Attributes:
        log: What happened, e.g. "begin 0 0 1", "launch 2", "launch 3 with record", "conclude".
        sent: Bytes of each work at the moment of its launch.
        peers: Streams of the ranks that take part; the others say what this one says.
        change_record: Changes the record of another rank on its way.
        on_advance: Called by `advance()`; may raise, as a signal handler does.
        is_released: Whether the peers have come, so that what was launched is done.
        late: What `missing()` says until then.
        arrivals: What `arrived()` says.
        closed: What `closed_ranks()` says.
    """

    name = "fake"

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.buffers: list[Array] = []
        self.log: list[str] = []
        self.works: list[Work] = []
        self.sent: dict[int, bytes] = {}
        self.peers: dict[int, LoggingStream] = {rank: self}
        self.change_record: Callable[[int, bytes], bytes] = lambda _, record: record
        self.on_advance: Callable[[], None] = lambda: None
        self.is_released = True
        self.late: list[int] = []
        self.arrivals: dict[int, int] = {}
        self.closed: list[int] = []
        self.record: bytes | None = None
        self._rank = rank
        self._num_launched = 0
        self._record_nbytes = 0

    def grow(
        self,
        sizes: Sequence[int],
        record_nbytes: int,
        agree: Agree,  # noqa: ARG002 - likewise
    ) -> None:
        """See `Stream.grow`."""
        self.log.append(f"grow {list(sizes)}")
        self.buffers.append(aligned_zeros(sizes[self.ranks.index(self._rank)]))
        self._record_nbytes = record_nbytes

    def program(self, works: Sequence[Work], num_positions: int) -> None:
        """See `Stream.program`."""
        self.log.append(f"program {[work.index for work in works]} of {num_positions}")
        self.works = list(works)

    def begin(self, base: int, parity: int, weight: float) -> None:
        """See `Stream.begin`."""
        self.log.append(f"begin {base} {parity} {weight:g}")
        self._num_launched = 0
        self.record = None
        self.sent = {}

    def launch(self, i: int, record: bytes | None = None) -> None:
        """See `Stream.launch`."""
        assert i <= self._num_launched, "out of order"
        if record is not None:
            self._take_record(record)
        if i == self._num_launched:  # said twice counts once
            work = self.works[i]
            start = work.starts[work.ranks.index(self._rank)]
            self.sent[i] = self.buffers[work.region][start : start + work.nbytes].tobytes()
            self.log.append(f"launch {work.index}" + (" with record" if record else ""))
            self._num_launched = i + 1

    def conclude(self, record: bytes) -> None:
        """See `Stream.conclude`."""
        assert self._num_launched == len(self.works), "before all were launched"
        if self.record is None:
            self.log.append("conclude")
        self._take_record(record)

    def _take_record(self, record: bytes) -> None:
        assert len(record) <= self._record_nbytes
        assert self.record in (None, record), "a peer may have read the other one"
        self.record = record

    def advance(self) -> bool:
        """See `Stream.advance`."""
        self.on_advance()
        return False

    def is_done(self, i: int) -> bool:
        """See `Stream.is_done`."""
        return self.is_released and i < self._num_launched

    def finished(self) -> bool:
        """See `Stream.finished`."""
        return self.is_released and all(peer.record is not None for peer in self.peers.values())

    def records(self) -> list[bytes]:
        """See `Stream.records`; of full length, as shared memory has them."""
        assert self.finished()
        found = []
        for q in self.ranks:
            record = (self.peers.get(q, self).record or b"").ljust(self._record_nbytes, b"\0")
            found.append(record if q == self._rank else self.change_record(q, record))
        return found

    def missing(self) -> list[int]:
        """See `Stream.missing`."""
        return [] if self.finished() else self.late

    def arrived(self, rank: int) -> int:
        """See `Stream.arrived`."""
        return self.arrivals.get(rank, 0)

    def close(self, base: int) -> None:
        """See `Stream.close`."""
        self.log.append(f"close {base}")

    def closed_ranks(self) -> list[int]:
        """See `Stream.closed_ranks`."""
        return self.closed
