"""The control page of one machine: a shared segment with a table of short messages per rank.

    row of rank r  (only r writes it)
    ┌────────────┬────────┬──────────────┬─────┬──────────────────────────┬───────┬───────────────┐
    │ pid  state │ posted │ seen[author] │ log │ entries: serial, lengths │ notes │ small, large  │
    └────────────┴────────┴──────────────┴─────┴──────────────────────────┴───────┴───────────────┘

A rank posts a message by filling a free entry of its own row, noting in its log which one, and then
raising `posted`.  Every other rank sees the counter, reads the entries that are for it, and raises
`seen[author]` in its own row; an entry is free again when all it was for have seen it.  Counters
only grow, so they are read without a lock; what was done is always derived from them, so that
nothing breaks when a signal handler raises in between.  The notes are for messages only: why a rank
failed, what it called last, and what it waits for.
"""

import marshal
import os
import platform
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

from hvdlite.arithmetic import Step
from hvdlite.backends.base import Deliver, Header, Jotting, RankState
from hvdlite.backends.segment import Segment
from hvdlite.errors import BackendUnavailableError

_WORD = 8
_LINE = 8  # words in a cache line
_PID, _STATE, _POSTED, _SEEN = 0, 1, _LINE, 2 * _LINE
_SERIAL, _HEADER_LENGTH, _PAYLOAD_LENGTH, _MASKS = 0, 1, 2, 3
_MASK_BITS, _NUM_MASKS = 62, 5
_ENTRY_WORDS = _LINE
_ENTRY = struct.Struct(f"={_ENTRY_WORDS}q")
_LOG_WORDS = 512  # the last so many messages are found without a search
MAX_RANKS = _MASK_BITS * _NUM_MASKS
_NOTE_BYTES = 1024
_TEXT_BYTES, _STORY_BYTES = 256, 768
_STANDING = struct.Struct("=qq")  # waits, since
_JOTTING = struct.Struct(f"=qqq{_TEXT_BYTES}s")  # and its number, and the text
_SINCE, _STORY_OF, _SHOWS_STACK = 1, _JOTTING.size // _WORD, _JOTTING.size // _WORD + 1  # words
_JOTTING_WORDS = 5 * _LINE
_HEADER_BYTES = 2048
_GAVE_UP = int(RankState.GAVE_UP)
_SMALL_BYTES = 4096  # header and payload of a small message
_NUM_SMALL = 256
_LARGE_BYTES = 128 * 1024


def _make_fence_steps() -> list[Step]:
    """What must stand between data and the flag that announces it, as calls for `run()`.

    x86 keeps the order of stores and of loads, so there nothing is needed.  Elsewhere two rounds
    of a lock do it: the release of the first is ordered before the acquisition of the second.
    """
    if platform.machine().lower() in ("x86_64", "amd64", "i686", "i386"):
        return []
    lock = threading.Lock()
    return [(lock.acquire,), (lock.release,)] * 2


FENCE_STEPS = _make_fence_steps()


def fence() -> None:
    """Keep what comes before in memory order before what comes after."""
    for step in FENCE_STEPS:
        step[0]()


class ControlPage:
    """`Control` over shared memory, for the ranks of one machine.

    Args:
        rank: This rank.
        size: Number of ranks.
        arena_bytes: Room for messages per rank, in bytes.
        share: Collective: called with this rank's text, returns everybody's (used once, to make
            the segment).

    Raises:
        BackendUnavailableError: On all ranks, when no segment can be shared.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        arena_bytes: int,
        share: Callable[[str | None], list[str | None]],
    ) -> None:
        self.rank, self.size = rank, size
        self.max_payload = _LARGE_BYTES - _HEADER_BYTES
        num_large = max(4, (arena_bytes - _NUM_SMALL * _SMALL_BYTES) // _LARGE_BYTES)
        self._num_entries = _NUM_SMALL + num_large
        self._log = _SEEN + -(-size // _LINE) * _LINE
        self._entries = self._log + _LOG_WORDS
        self._jotting = self._entries + self._num_entries * _ENTRY_WORDS
        note = self._jotting + _JOTTING_WORDS
        self._jotting_offset = self._jotting * _WORD
        self._note_offset = note * _WORD
        self._story_offset = self._note_offset + _NOTE_BYTES
        data = (self._story_offset + _STORY_BYTES + 4095) // 4096 * 4096
        self._data = [
            (
                data + i * _SMALL_BYTES
                if i < _NUM_SMALL
                else data + _NUM_SMALL * _SMALL_BYTES + (i - _NUM_SMALL) * _LARGE_BYTES
            )
            for i in range(self._num_entries)
        ]
        row_bytes = data + _NUM_SMALL * _SMALL_BYTES + num_large * _LARGE_BYTES
        too_many = f"{size} ranks on one machine; at most {MAX_RANKS}" if size > MAX_RANKS else None
        self.segment = shared_segment(row_bytes * size, rank == 0, share, too_many)
        whole = memoryview(self.segment.memory)
        self._bytes = [whole[r * row_bytes : (r + 1) * row_bytes] for r in range(size)]
        self._words = [row[: note * _WORD].cast("q") for row in self._bytes]
        self._mine = self._words[rank]
        self._peers = [r for r in range(size) if r != rank]
        self._next = {False: 0, True: _NUM_SMALL}  # where the search for a free entry starts
        self._readers: dict[int, tuple[int, ...]] = {}  # whom the message in an entry is for
        self._full: dict[bool, list[int]] = {}  # what all had seen when there was no room
        self._draft = 0  # the entry that was last begun, perhaps not posted
        self._gone: set[int] = set()
        self._mine[_PID] = os.getpid()
        self._mine[_STATE] = RankState.ALIVE

    def post(self, to: Sequence[int], header: Header, payload: memoryview | bytes = b"") -> bool:
        """See `Control.post`."""
        head = marshal.dumps(header)
        size, length = len(head), len(payload)
        large = size + length > _SMALL_BYTES
        if size > _HEADER_BYTES or length > self.max_payload:  # it would spoil its neighbour
            raise ValueError(f"a message of {size} + {length} bytes has no room on the page")
        mine, first = self._mine, self._entries
        draft = first + self._draft * _ENTRY_WORDS + _SERIAL
        posted = mine[_POSTED]
        if mine[draft] > posted:
            mine[draft] = 0  # a post that a signal handler broke off
        i = self._free_entry(large)
        if i < 0:
            return False
        to = tuple(to)
        self._draft = i
        self._readers[i] = to
        serial = posted + 1
        row, offset = self._bytes[self.rank], self._data[i]
        # A new serial number first: who still looks for the old message sees that it is gone.
        at = (first + i * _ENTRY_WORDS) * _WORD
        _ENTRY.pack_into(row, at, serial, size, length, *_masks(to))
        fence()
        middle = offset + size
        row[offset:middle] = head
        if length:
            row[middle : middle + length] = payload
        mine[self._log + serial % _LOG_WORDS] = i
        fence()
        mine[_POSTED] = serial
        self._next[large] = i + 1
        return True

    def _free_entry(self, large: bool) -> int:
        first, last = (_NUM_SMALL, self._num_entries) if large else (0, _NUM_SMALL)
        start = self._next[large] if self._next[large] < last else first
        if self._is_free(start):  # the one used longest ago, as a rule
            return start
        rows = [self._words[r] for r in self._peers]
        seen = [len(self._gone), *(row[k] for row in rows for k in (_SEEN + self.rank, _STATE))]
        if seen == self._full.get(large):
            return -1  # nobody has read anything since it was full
        for i in chain(range(start, last), range(first, start)):
            if self._is_free(i):
                return i
        self._full[large] = seen
        return -1

    def _is_free(self, i: int) -> bool:
        serial: int = self._mine[self._entries + i * _ENTRY_WORDS + _SERIAL]
        if not serial:
            return True
        seen = _SEEN + self.rank
        words, gone = self._words, self._gone
        for r in self._readers.get(i, ()):
            if words[r][seen] < serial and r not in gone and words[r][_STATE] < RankState.LEFT:
                return False
        return True

    def poll(self, deliver: Deliver) -> bool:
        """See `Control.poll`."""
        mine, words = self._mine, self._words
        found = False
        for author in self._peers:
            posted = words[author][_POSTED]
            if posted != mine[_SEEN + author]:
                fence()
                found = self._read(author, mine[_SEEN + author], posted, deliver) or found
                fence()
                mine[_SEEN + author] = posted
        return found

    def _read(self, author: int, seen: int, posted: int, deliver: Deliver) -> bool:
        row, data, first = self._words[author], self._bytes[author], self._entries
        word, bit = _MASKS + self.rank // _MASK_BITS, 1 << self.rank % _MASK_BITS
        found = False
        for serial, i in self._fresh(row, seen, posted):
            at = first + i * _ENTRY_WORDS
            # An entry with another serial is in use again, so its message was for others.  The
            # mask is read first: whoever uses an entry again takes the serial away before all else.
            is_mine = row[at + word] & bit
            fence()
            if is_mine and row[at + _SERIAL] == serial:
                start = self._data[i]
                middle = start + row[at + _HEADER_LENGTH]
                payload = data[middle : middle + row[at + _PAYLOAD_LENGTH]]
                deliver(author, marshal.loads(data[start:middle]), payload)
                found = True
        return found

    def _fresh(self, row: memoryview, seen: int, posted: int) -> list[tuple[int, int]]:
        """Serials and entries of the messages after `seen`, in order."""
        log = self._log
        serials = range(seen + 1, posted + 1)
        if len(serials) < _LOG_WORDS:
            fresh = [(serial, row[log + serial % _LOG_WORDS]) for serial in serials]
            if row[_POSTED] - seen < _LOG_WORDS:  # else the author has gone round meanwhile
                return fresh
        first, last = self._entries, self._entries + self._num_entries * _ENTRY_WORDS
        everything = row[first:last:_ENTRY_WORDS].tolist()
        return sorted((s, i) for i, s in enumerate(everything) if seen < s <= posted)

    def flushed(self, ranks: Sequence[int]) -> bool:
        """See `Control.flushed`; what is posted here lies where the others read it."""
        return True

    def state(self, rank: int) -> tuple[RankState, str]:
        """See `Control.state`."""
        state = RankState(self._words[rank][_STATE])
        if state >= RankState.FAILED:
            return state, self._text(rank, self._note_offset, _NOTE_BYTES)
        if rank in self._gone and state is RankState.ALIVE:
            return RankState.FAILED, f"its process (pid {self._words[rank][_PID]}) is gone"
        return state, ""

    def check_alive(self, ranks: Sequence[int]) -> None:
        """See `Control.check_alive`."""
        for r in ranks:
            pid = self._words[r][_PID]  # 0: it is not that far yet
            if pid and r != self.rank and not is_running(pid):
                self._gone.add(r)

    def announce(self, state: RankState, note: str = "") -> None:
        """See `Control.announce`."""
        if self._mine[_STATE] >= RankState.LEFT:
            return  # the first word stands
        raw = note.encode(errors="backslashreplace")[:_NOTE_BYTES]
        offset = self._note_offset
        self._bytes[self.rank][offset : offset + len(raw)] = raw
        fence()
        self._mine[_STATE] = state

    def quitters(self) -> list[int]:
        """See `Control.quitters`."""
        return [r for r in self._peers if self._words[r][_STATE] == _GAVE_UP]

    def pid(self, rank: int) -> int:
        """See `Control.pid`."""
        return self._words[rank][_PID]

    def jot(self, waits: bool, text: str | None = None, count: int = 0) -> None:
        """See `Control.jot`."""
        now = time.monotonic_ns()  # one clock for all processes of a machine
        row, at = self._bytes[self.rank], self._jotting_offset
        if text is None:
            _STANDING.pack_into(row, at, waits, now)
        else:
            raw = text.encode(errors="backslashreplace")
            _JOTTING.pack_into(row, at, waits, now, count, raw)

    def tell(self, story: str) -> None:
        """See `Control.tell`."""
        raw = story.encode(errors="backslashreplace")[:_STORY_BYTES].ljust(_STORY_BYTES, b"\0")
        offset = self._story_offset
        self._bytes[self.rank][offset : offset + _STORY_BYTES] = raw
        self._mine[self._jotting + _STORY_OF] = self._mine[self._jotting + _SINCE]

    def offer_stack(self) -> None:
        """See `Control.offer_stack`."""
        self._mine[self._jotting + _SHOWS_STACK] = 1

    def jotted(self, rank: int) -> Jotting | None:
        """See `Control.jotted`."""
        waits, since, number, raw = _JOTTING.unpack_from(self._bytes[rank], self._jotting_offset)
        words = self._words[rank][self._jotting : self._jotting + _JOTTING_WORDS]
        return Jotting(
            _text_of(raw),
            number,
            bool(waits),
            (time.monotonic_ns() - since) * 1e-9,
            self._text(rank, self._story_offset, _STORY_BYTES) if words[_STORY_OF] == since else "",
            bool(words[_SHOWS_STACK]),
        )

    def _text(self, rank: int, offset: int, length: int) -> str:
        return _text_of(bytes(self._bytes[rank][offset : offset + length]))

    def close(self) -> None:
        """See `Control.close`; the memory goes with its last user."""
        self.announce(RankState.LEFT)


@lru_cache(1024)
def _masks(to: tuple[int, ...]) -> tuple[int, ...]:
    """One bit for each reader of a message."""
    masks = [0] * _NUM_MASKS
    for reader in to:
        masks[reader // _MASK_BITS] |= 1 << reader % _MASK_BITS
    return tuple(masks)


def _text_of(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return process_state(pid) not in ("Z", "X")


def process_state(pid: int) -> str:
    """The letter that `ps` shows: R, S, D, T, ...; X: there is no such process; "": not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - ten times a second: no Path
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except FileNotFoundError:
        return "X"
    except OSError:
        return ""


def shared_segment(
    nbytes: int,
    is_maker: bool,
    share: Callable[[str | None], list[str | None]],
    refusal: str | None = None,
) -> Segment:
    """Make one segment and map it on every rank, or on none.

    Args:
        nbytes: Size.
        is_maker: True on exactly one rank.
        share: Collective exchange of one short text a rank.
        refusal: Why this rank does not want one; None: it does.

    Raises:
        BackendUnavailableError: On every rank, if any rank failed; the text says which and why.
    """
    segment: Segment | None = None
    word = f"!{refusal}" if refusal else None
    if is_maker and word is None:
        try:
            segment = Segment.create(nbytes)
            word = str(segment.path)
        except OSError as exc:
            word = f"!{exc}"
    try:
        said = [text for text in share(word) if text]
        bad = [text for text in said if text.startswith("!")]
        word = None
        if not bad and segment is None:
            try:
                segment = Segment.attach(Path(said[0]), nbytes)
            except OSError as exc:
                word = f"!{exc}"
        bad = bad or [text for text in share(word) if text]
    finally:
        if is_maker and segment is not None:
            segment.unlink()
    if bad or segment is None:
        reasons = "; ".join(sorted({text[1:] for text in bad}))
        raise BackendUnavailableError(f"no shared memory segment of {nbytes} bytes: {reasons}")
    return segment
