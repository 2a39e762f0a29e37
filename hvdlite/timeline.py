"""The timeline: what one rank did and when, as a file that Perfetto and chrome://tracing show.

One JSON array of events in Chrome's trace format, one line an event, one file a rank (`pid` is the
rank).  What can overlap never shares a track: each activity of the process has a track (`tid`) of
its own, each bucket has one, and eager calls are asynchronous events, told apart by their number.

    step, apply, wait, reduce     X on one track each
    bucket k                      X: MEMCPY_IN_FUSION_BUFFER, QUEUE, ALLREDUCE with LAUNCH in it
    eager calls                   b/e: NEGOTIATE_<KIND>, then <KIND>

Times are `time.monotonic_ns()`, one clock for all processes of a machine: the files of its ranks
may be joined as they are.  The metadata say what to add to get microseconds since 1970.

[Note: always valid]  A file ends in blanks and `]` from the start.  Events are written over the
blanks, some lines of `,{...}` at once that never cross the border of a page: the kernel copies a
page as a whole, also when this process is killed meanwhile.  Whatever part of the lines somebody
sees, it is valid JSON.  When the blanks are used up the file is copied to one of twice the size,
which is renamed to take its place; so is what `close()` leaves, without blanks.  There is no
thread: events are written after each wait and step, and every 50 ms while one lasts.

[Note: broken-off calls]  A signal handler may raise out of any of this.  An event is one `append`
to a list; what is written and what is not changes by one store after the write, and to write the
same again to the same place does no harm.  So an event may be lost, but no line is ever torn, and
nothing here changes what a step or a call returns: an error while writing ends the recording, in
one warning line.
"""

import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hvdlite import log

_PAGE: Final = 4096  # what the kernel copies as a whole; larger pages are multiples of it
_FIRST_CAPACITY: Final = 2**16
_CHUNK: Final = 2**20
_END: Final = b"\n]"
_MANY: Final = 1000  # events that wait to be written
_FLUSH_NS: Final = 50_000_000  # the oldest event that is not written yet is hardly older
_CYCLE_NS: Final = 100_000  # marks of cycles are at least so far apart
_FIRST_REPORT_NS: Final = 1_000_000_000  # of a wait that goes on; then after twice the time

_TRACKS: Final = {"step": 1, "apply": 2, "wait": 3, "reduce": 4, "cycles": 5}
_FIRST_BUCKET_TRACK: Final = 10

Event = tuple[str, int, str, int, int, dict[str, Any] | None]
# Phase, track (of b and e: the call), name, time and duration in ns, arguments.

now: Final = time.monotonic_ns


class Timeline:
    """Records the events of one rank and writes them to its file.

    Args:
        path: The file.  A regular file that is there is replaced, no link is followed.
        rank: This rank.
        mark_cycles: Also mark the passes of the progress loop that moved something.
        steps: Record only these steps of an optimizer, and what happens between them.
        max_bytes: The recording ends, with one warning, before the file is larger.

    Attributes:
        is_recording: Whether new activities are to be recorded now.

    Raises:
        ValueError: There is something at `path` that is no regular file.
        OSError: The file cannot be made.
    """

    def __init__(
        self, path: str, rank: int, *, mark_cycles: bool, steps: range, max_bytes: int
    ) -> None:
        self.path = path
        self._rank, self._max_bytes = rank, max_bytes
        self._steps = steps
        self._tracks: dict[str, int] = {}
        self._optimizers: dict[int, int] = {}  # id of a stream -> number of the optimizer
        self._calls: dict[int, tuple[str, str]] = {}  # serial number -> kind, name of what is open
        self._marks_cycles, self._last_cycle = mark_cycles, 0
        self._is_flushing = False
        self._flushed_at = now()
        events: list[Event] = []
        _check_path(path)
        head = "[" + "".join(_metadata(rank))[1:]
        # Where the next event goes; how many of those that were recorded are written.
        self._tail: tuple[int, int, list[Event]] = (len(head), 0, events)
        self._capacity = min(_FIRST_CAPACITY, max_bytes)
        self._fd = _replace(path, [head.encode("ascii")], self._capacity)
        self.is_recording = steps.start == 0

    # ---- recording -------------------------------------------------------------------------

    def span(
        self, track: str, name: str, start: int, end: int, args: dict[str, Any] | None = None
    ) -> None:
        """Something that lasted from `start` to `end`, in ns of `now()`."""
        self._add(("X", self._track(track), name, start, end - start, args))

    def _track(self, track: str) -> int:
        tid = self._tracks.get(track)
        if tid is None:
            tid = _TRACKS.get(track, _FIRST_BUCKET_TRACK + len(self._tracks))
            self._tracks[track] = tid
            events = self._tail[2]
            events.append(("M", tid, "thread_name", 0, 0, {"name": track}))
            events.append(("M", tid, "thread_sort_index", 0, 0, {"sort_index": tid}))
        return tid

    def _add(self, event: Event) -> None:
        if self._fd < 0:
            return
        events = self._tail[2]
        events.append(event)
        if event[3] + event[4] - self._flushed_at > _FLUSH_NS or len(events) >= _MANY:
            self.flush()

    def begin_step(self, step: int) -> bool:
        """An optimizer opens this step; whether it is to be recorded."""
        self.is_recording = is_recording = self._fd >= 0 and step in self._steps
        return is_recording

    def trace_step(
        self, step: int, stream: Any, works: Sequence[tuple[int, int]]
    ) -> "StepTrace | None":
        """Begin to watch a step of the optimizer that owns `stream`; None: it is not recorded.

        Args:
            step: Its number.
            stream: A `Stream`.
            works: Index in the plan and bytes of each of its buckets, in launch order.
        """
        if not self.begin_step(step):
            return None
        number = self._optimizers.setdefault(id(stream), len(self._optimizers))
        label = f"optimizer {number}: " if number else ""
        return StepTrace(self, label, step, stream.advance, stream.is_done, works)

    # ---- eager calls -----------------------------------------------------------------------

    def call_submitted(self, serial: int, kind: str, name: str, nbytes: int) -> None:
        """This rank has made a call; its members have not met yet."""
        if self.is_recording:
            name = name.replace("\0", "")  # a call of the library itself
            kind = kind.upper()
            opened = f"NEGOTIATE_{kind}"
            self._calls[serial] = (kind, opened)
            self._add(("b", serial, opened, now(), 0, {"name": name, "bytes": nbytes}))

    def call_matched(self, serial: int) -> None:
        """All members have made the call: now it is carried out.  Again: nothing."""
        kind, opened = self._calls.get(serial, ("", ""))
        if kind != opened:
            self._calls[serial] = (kind, kind)
            time_ns = now()
            self._add(("e", serial, opened, time_ns, 0, None))
            self._add(("b", serial, kind, time_ns, 0, None))

    def call_over(self, serial: int) -> None:
        """The call is over.  Again: nothing."""
        _, opened = self._calls.pop(serial, ("", ""))
        if opened:
            self._add(("e", serial, opened, now(), 0, None))

    # ---- waits -----------------------------------------------------------------------------

    def watch(self, what: str) -> "WaitTrace | None":
        """Begin to watch a wait."""
        return WaitTrace(self, what) if self.is_recording else None

    def cycle(self) -> None:
        """The progress loop has moved something."""
        if self._marks_cycles and self.is_recording:
            time_ns = now()
            if time_ns - self._last_cycle >= _CYCLE_NS:
                self._last_cycle = time_ns
                self.instant("cycles", "CYCLE_START", time_ns)

    def instant(
        self, track: str, name: str, time_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        """Something without duration."""
        self._add(("i", self._track(track), name, time_ns, 0, args))

    # ---- the file --------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was recorded; the file is complete afterwards."""
        if self._is_flushing or self._fd < 0 or not self._tail[2]:
            return  # the first: by a signal handler that has interrupted it
        try:
            self._is_flushing = True
            self._flushed_at = now()
            self._write()
        except OSError as exc:
            self._give_up(exc.strerror or str(exc))
        finally:
            self._is_flushing = False

    def flush_if_due(self, time_ns: int) -> None:
        """Write, if that was long ago."""
        if time_ns - self._flushed_at > _FLUSH_NS:
            self.flush()

    def _write(self) -> None:
        """See [Note: always valid] and [Note: broken-off calls]."""
        end, done, events = self._tail
        while done < len(events):
            text = _line(self._rank, events[done])
            start = self._make_room(end, len(text))
            if start < 0:
                self._give_up(f"it has reached timeline_max_bytes={self._max_bytes}")
                return
            count, limit = 1, self._page_end(start)
            for event in events[done + 1 : done + _MANY]:
                line = _line(self._rank, event)
                if start + len(text) + len(line) > limit:
                    break
                text += line
                count += 1
            if os.pwrite(self._fd, text.encode("ascii"), start) < len(text):
                raise OSError(0, "no room for it on the device")
            end = start + len(text)
            done += count
            self._tail = (end, done, events)
        self._tail = (end, 0, [])

    def _make_room(self, end: int, nbytes: int) -> int:
        """Where so many bytes have room in one page, at `end` or behind it; -1: nowhere."""
        while True:
            for start in (end, (end // _PAGE + 1) * _PAGE):
                if start + nbytes <= self._page_end(start):
                    return start
            if self._capacity >= self._max_bytes:
                return -1
            self._move(end, min(2 * self._capacity, self._max_bytes))

    def _page_end(self, position: int) -> int:
        return min((position // _PAGE + 1) * _PAGE, self._capacity - len(_END))

    def _move(self, end: int, capacity: int) -> None:
        """Go on in another file, with what is in this one up to `end`."""
        old = self._fd
        fd = _replace(self.path, _chunks(old, end), capacity)
        self._fd, self._capacity = fd, capacity
        os.close(old)

    def _give_up(self, why: str) -> None:
        """End the recording, with the file as it was after the last event that fitted."""
        end = self._tail[0]
        with suppress(OSError):  # what did not fit
            os.pwrite(self._fd, b" " * min(2 * _PAGE, self._capacity - len(_END) - end), end)
        self._end()
        log.logger.warning(
            "timeline %s: %s; nothing more is recorded, what it has stays readable", self.path, why
        )

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._end()

    def _end(self) -> None:
        """Close the file, without the blanks if there is room for a copy."""
        if self._fd < 0:
            return
        end = self._tail[0]
        with suppress(OSError):
            self._move(end, end + len(_END))
        fd, self._fd, self.is_recording = self._fd, -1, False
        self._tail = (end, 0, [])
        with suppress(OSError):
            os.close(fd)

    def disown(self) -> None:
        """In a forked child: the file is the parent's."""
        self._fd, self.is_recording = -1, False

    def __del__(self) -> None:
        """One that was never used, since `init()` failed."""
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)


class StepTrace:
    """Watches one step of one optimizer, for its reducer.

    It stands between the progress loop and the stream, so that it sees when something was reduced
    and which buckets are done: when this process looked, that is.

    Args:
        timeline: Where it is recorded.
        label: Begins the names of the tracks.
        step: Number of the step.
        advance: The stream's.
        is_done: The stream's.
        works: Index in the plan and bytes of each bucket, in launch order.
    """

    def __init__(
        self,
        timeline: Timeline,
        label: str,
        step: int,
        advance: Callable[[], bool],
        is_done: Callable[[int], bool],
        works: Sequence[tuple[int, int]],
    ) -> None:
        self._timeline, self._label, self._step = timeline, label, step
        self._advance, self._is_done, self._works = advance, is_done, works
        self._start = now()
        self._packed: dict[int, tuple[int, int, int, int, int]] = {}
        self._full_at: dict[int, int] = {}
        self._launched_at: dict[int, int] = {}
        self._num_launched = self._num_done = 0

    def packed(self, bucket: int, start: int, nbytes: int) -> None:
        """A gradient was copied into its slot, from `start` until now."""
        end = now()
        first, _, busy, total, count = self._packed.get(bucket, (start, 0, 0, 0, 0))
        self._packed[bucket] = (first, end, busy + end - start, total + nbytes, count + 1)

    def full(self, bucket: int) -> None:
        """The last gradient of a bucket has come, or it was filled up."""
        if bucket in self._full_at:
            return
        time_ns = self._full_at[bucket] = now()
        packed = self._packed.get(bucket)
        if packed is not None:
            first, last, busy, nbytes, count = packed
            args = {
                "step": self._step,
                "bytes": nbytes,
                "gradients": count,
                "busy_us": busy / 1000,  # the copies alone; between them the program computed
            }
            end = min(last, time_ns)
            self._timeline.span(
                self._track(bucket), "MEMCPY_IN_FUSION_BUFFER", first, max(first, end), args
            )

    def launched(self, i: int, start: int) -> None:
        """The i-th bucket of this rank was launched, from `start` until now.  Again: nothing."""
        if i in self._launched_at:
            return
        bucket, end = self._works[i][0], now()
        full_at = min(self._full_at.get(bucket, start), start)
        self._launched_at[i] = start
        self._num_launched = i + 1
        track, args = self._track(bucket), {"step": self._step}
        self._timeline.span(track, "QUEUE", full_at, start, args)
        self._timeline.span(track, "LAUNCH", start, end, args)

    def advance(self) -> bool:
        """As the stream's."""
        start = now()
        moved = self._advance()
        if moved:
            args = {"step": self._step}
            self._timeline.span(f"{self._label}reduce", "REDUCE", start, now(), args)
        self.look()
        return moved

    def look(self) -> None:
        """Record the buckets that are done."""
        while self._num_done < self._num_launched and self._is_done(self._num_done):
            start = self._launched_at.get(self._num_done)
            bucket, nbytes = self._works[self._num_done]
            self._num_done += 1
            if start is not None:  # else a signal handler has cost us the launch
                args = {"step": self._step, "bytes": nbytes}
                self._timeline.span(self._track(bucket), "ALLREDUCE", start, now(), args)

    def failed(self) -> None:
        """The step was dropped."""
        self._end({"step": self._step, "failed": True})

    def applied(self, start: int) -> None:
        """The wrapped optimizer has run from `start` until now, and the step is over."""
        args = {"step": self._step}
        self._timeline.span(f"{self._label}apply", "APPLY", start, now(), args)
        self._end(args)

    def _end(self, args: dict[str, Any]) -> None:
        self._timeline.span(f"{self._label}step", f"STEP {self._step}", self._start, now(), args)
        self._timeline.flush()

    def _track(self, bucket: int) -> str:
        return f"{self._label}bucket {bucket}"


class WaitTrace:
    """Watches one wait, for the progress loop: how long, and for whom.

    Args:
        timeline: Where it is recorded.
        what: What is waited for.
    """

    def __init__(self, timeline: Timeline, what: str) -> None:
        self._timeline, self._what = timeline, what.replace("\\x00", "")  # in the repr of a name
        self._start = self._looked_at = now()
        self._report_at = self._start + _FIRST_REPORT_NS
        self._missing: tuple[int, ...] = ()
        self._waited: dict[int, int] = {}  # rank -> ns for which it was missing

    def look(self, missing: Sequence[int]) -> None:
        """Called while nothing moves, with the ranks that are missing."""
        time_ns = now()
        self._charge(time_ns)
        self._missing = tuple(missing)
        if time_ns >= self._report_at:
            self._report_at = time_ns + (time_ns - self._start)
            args = {"for": self._what, "missing": list(missing)}
            self._timeline.instant("wait", "STILL_WAITING", time_ns, args)
        self._timeline.flush_if_due(time_ns)

    def _charge(self, time_ns: int) -> None:
        """The time since the last look counts for those who were missing then."""
        span, self._looked_at = time_ns - self._looked_at, time_ns
        for rank in self._missing:
            self._waited[rank] = self._waited.get(rank, 0) + span

    def end(self) -> None:
        """The wait is over, or was broken off."""
        time_ns = now()
        self._charge(time_ns)
        args: dict[str, Any] = {"for": self._what}
        if self._waited:
            args["missing_us"] = {str(r): ns / 1000 for r, ns in sorted(self._waited.items())}
        self._timeline.span("wait", "WAIT", self._start, time_ns, args)
        self._timeline.flush()


def _metadata(rank: int) -> list[str]:
    """The first lines of a file."""
    before, epoch, after = now(), time.time_ns(), now()
    offset = epoch - (before + after) // 2  # to be added to the times of the events
    facts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("process_name", {"name": f"rank {rank}"}),
        ("process_sort_index", {"sort_index": rank}),
        ("start_time_since_epoch_in_micros", {"start_time_since_epoch_in_micros": offset // 1000}),
    )
    return [_line(rank, ("M", 0, name, 0, 0, args)) for name, args in facts]


def _line(rank: int, event: Event) -> str:
    """One event as JSON, in ASCII, with the comma before it; never more than a page."""
    phase, track, name, time_ns, span_ns, _ = event
    line = f",\n{_json(rank, event)}"
    if len(line) <= _PAGE:
        return line
    short = {"left_out": f"{len(line)} bytes"}
    return f",\n{_json(rank, (phase, track, name[:80], time_ns, span_ns, short))}"


def _json(rank: int, event: Event) -> str:
    phase, track, name, time_ns, span_ns, args = event
    head = f'{{"name":{json.dumps(name)},"ph":"{phase}","pid":{rank}'
    tail = "}" if args is None else f',"args":{json.dumps(args)}}}'
    if phase == "M":
        return f'{head},"tid":{track}{tail}'
    head += f',"ts":{_micros(time_ns)}'
    if phase in "be":  # told apart inside this process, also when the files of ranks are joined
        return f'{head},"cat":"call","id2":{{"local":"{track:#x}"}},"tid":0{tail}'
    if phase == "X":
        return f'{head},"dur":{_micros(span_ns)},"tid":{track}{tail}'
    return f'{head},"s":"t","tid":{track}{tail}'


def _micros(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03}"


def _replace(path: str, chunks: Iterable[bytes], capacity: int) -> int:
    """Make the file with this content, blanks and the end; its descriptor.

    It is written beside `path` and renamed: who has the old file open keeps it.
    """
    beside = f"{path}.{os.getpid()}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        Path(beside).unlink()  # of a process that died here, with the same number
    fd = os.open(beside, flags, 0o666)
    try:
        blanks = capacity - len(_END)
        for chunk in chunks:
            _put(fd, chunk)
            blanks -= len(chunk)
        for i in range(0, blanks, _CHUNK):
            _put(fd, b" " * min(_CHUNK, blanks - i))
        _put(fd, _END)
        Path(beside).replace(path)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            Path(beside).unlink()
        raise
    return fd


def _chunks(fd: int, end: int) -> Iterator[bytes]:
    for start in range(0, end, _CHUNK):
        size = min(_CHUNK, end - start)
        chunk = os.pread(fd, size, start)
        if len(chunk) < size:
            raise OSError(0, "somebody has cut it short")
        yield chunk


def _put(fd: int, data: bytes) -> None:
    if os.write(fd, data) < len(data):
        raise OSError(0, "no room for it on the device")


def _check_path(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
            raise ValueError(f"timeline: {path!r} is {kind}; give the path of a file")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"timeline: the folder of {path!r} does not exist; make it first")
