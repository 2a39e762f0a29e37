"""What a rank did last, and what a wait says that takes too long.

    Recorder   every collective of this rank: a ring of events here, and for the others one short
               text in shared memory: the last call, and whether the rank waits in it
    Watch      what can be found out about another rank: its text, its process, its posted calls
    Stall      one wait: nothing has changed for the check time: a report; for the shutdown time:
               the wait is given up

A rank that waits also tells whom it waits for and which gradients it lacks itself, so the report of
the rank that waits for it can say so.

[Note: stacks]  A rank cannot show another one's Python stack, but it can ask for it: `init()`
registers `faulthandler` for a signal, and a report sends that signal to the missing ranks.  It is a
real-time signal, since programs have handlers of their own for SIGUSR1 and SIGUSR2 (schedulers
announce the end of a job by them), perhaps installed after `init()`.  It is sent only to ranks that
have said in shared memory that they take it, for its default action ends a process; for the same
reason it stays registered when a Context is closed.
"""

import faulthandler
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from hvdlite import log
from hvdlite.backends.base import Control, RankState
from hvdlite.backends.page import process_state

SUBMITTED, MATCHED, DONE, FAILED = "submitted", "matched", "done", "failed"
STACK_SIGNAL: Final = int(signal.SIGRTMAX) - 3

_KEPT = 256  # entries; each has up to three events
_DUMPED = 50  # entries that are shown when a wait is given up
_LAPSE_S = 1.0  # between two looks of a wait: this process itself stood still
_LOOKS = 16  # at what is missing, within the check time
_MAX_NAMED = 16  # ranks, in one line
_STATES = {
    "T": "is stopped by a signal; kill -CONT {} lets it go on",
    "t": "is held by a debugger",
    "D": "waits for a disk or a file system",
}


class Entry(NamedTuple):
    """One collective of this rank; times are seconds since the epoch."""

    sequence: int  # counts this rank's collectives, steps included
    kind: str
    name: str
    nbytes: int  # of this rank's data
    state: str
    submitted: float
    matched: float | None = None
    ended: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For `describe()`."""
        return {"bytes" if key == "nbytes" else key: v for key, v in self._asdict().items()}

    def line(self) -> str:
        """For a reader."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.submitted))
        took = "" if self.ended is None else f" after {(self.ended - self.submitted) * 1e3:.1f} ms"
        what = describe_call(self.kind, self.name)
        milli = int(self.submitted % 1 * 1000)
        return f"{self.sequence:6} {clock}.{milli:03} {self.state}{took}: {what}, {self.nbytes} B"


class Recorder:
    """The flight recorder of one rank.

    Args:
        control: Where the others read what this rank did last.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._jots = control.size > 1
        self._events: deque[tuple[Any, ...]] = deque(maxlen=3 * _KEPT)
        self._count = 0
        self._jotted = ""
        self.is_waiting = False

    def submitted(self, key: Hashable, kind: str, name: str, nbytes: int) -> None:
        """A collective begins; `key` tells it from the others that are under way."""
        self._count = count = self._count + 1
        self._events.append((time.monotonic(), key, SUBMITTED, count, kind, name, nbytes))

    def told(self, kind: str, name: str) -> None:
        """The others can know of it; now they can read that it is this rank's last one."""
        if self._jots:
            self._jotted = text = describe_call(kind, name)
            self._control.jot(False, text, self._count)

    def mark(self, key: Hashable, state: str) -> None:
        """It has come so far; of two equal or late words the first counts."""
        self._events.append((time.monotonic(), key, state))

    def waits(self, what: str) -> None:
        """This rank begins to wait."""
        self.is_waiting = True
        if not self._jots:
            return
        if what == self._jotted:
            self._control.jot(True)
        else:
            self._jotted = what
            self._control.jot(True, what, self._count)

    def goes_on(self) -> None:
        """It does not wait any more."""
        if self._jots:
            self._control.jot(False)
        self.is_waiting = False

    def entries(self) -> list[Entry]:
        """The last collectives, oldest first."""
        epoch = time.time() - time.monotonic()
        found: list[Entry] = []
        places: dict[Hashable, int] = {}
        for when, key, state, *facts in list(self._events):
            if state == SUBMITTED:
                places[key] = len(found)
                number, kind, name, nbytes = facts
                found.append(Entry(number, kind, name, nbytes, state, when + epoch))
                continue
            i = places.get(key, -1)
            if i < 0 or found[i].ended is not None:
                continue
            if state == MATCHED:
                found[i] = found[i]._replace(state=state, matched=when + epoch)
            else:
                found[i] = found[i]._replace(state=state, ended=when + epoch)
                if state == DONE and found[i].matched is None:  # it was matched and done in one go
                    found[i] = found[i]._replace(matched=when + epoch)
        return found[-_KEPT:]

    def lines(self, count: int = _DUMPED) -> list[str]:
        """The last `count` of them under a headline, for a reader; nothing if there are none."""
        lines = [entry.line() for entry in self.entries()[-count:]]
        return [f"the last collectives of this rank, {len(lines)}:", *lines] if lines else []


class Watch:
    """What this rank can find out about those that it waits for.

    Args:
        control: Knows what the ranks jotted down.
        check_s: After so many seconds without a change a wait is reported; 0: never.
        shutdown_s: After so many it is given up; 0: never.
        asks_stacks: Whether a report asks the missing ranks for their stacks.

    Attributes:
        clues: Say what else is known of a rank.
        own: Says what this rank has open, for the others' reports.
    """

    def __init__(
        self, control: Control, check_s: float, shutdown_s: float, asks_stacks: bool
    ) -> None:
        self.control, self.check_s, self.shutdown_s = control, check_s, shutdown_s
        self.clues: Callable[[int], list[str]] = lambda _: []
        self.own: Callable[[], list[str]] = list
        self._asks_stacks = asks_stacks

    def tell(self, late: Sequence[int]) -> None:
        """Let the others read whom this rank waits for, and what it has open."""
        self.control.tell("; ".join([f"for {name_ranks(late)}", *self.own()]))

    def about(self, rank: int) -> list[str]:
        """What a missing rank does, in lines."""
        pid = self.control.pid(rank)
        who = f"rank {rank}" + (f" (pid {pid})" if pid else "")
        lines = []
        state = process_state(pid) if pid else ""
        if state in _STATES:
            lines.append(f"{who} {_STATES[state].format(pid)}")
        jotting = self.control.jotted(rank)
        if jotting is None:
            lines.append(f"{who}: what it did last is not known without shared memory")
        elif jotting.waits:
            of = f" (call {jotting.number} of that rank)"
            story = f", {jotting.story}" if jotting.story else ""
            lines.append(f"{who} has waited {_s(jotting.age_s)} in {jotting.text}{of}{story}")
        elif jotting.text:
            lines.append(
                f"{who} has been in its own code for {_s(jotting.age_s)}; its last call, number "
                f"{jotting.number}, was {jotting.text}"
            )
        else:
            lines.append(f"{who} has called nothing since init()")
        lines += [f"rank {rank} {clue}" for clue in self.clues(rank)]
        return lines

    def speaker(self, what: str, late: Sequence[int]) -> int:
        """The lowest rank that is known to wait for the same; one report of many is enough."""
        for rank in range(self.control.rank):
            jotting = self.control.jotted(rank)
            if jotting and jotting.waits and jotting.text == what and rank not in late:
                return rank
        return self.control.rank

    def ask_stacks(self, ranks: Sequence[int]) -> list[int]:
        """See [Note: stacks]; the ranks that were asked."""
        asked = []
        for rank in ranks if self._asks_stacks else ():
            jotting, pid = self.control.jotted(rank), self.control.pid(rank)
            if jotting is None or not jotting.shows_stack or rank == self.control.rank:
                continue
            is_alive = self.control.state(rank)[0] is RankState.ALIVE
            if is_alive and process_state(pid) in ("R", "S", "D"):
                try:
                    os.kill(pid, STACK_SIGNAL)
                except OSError:  # gone this moment, or somebody else's
                    continue
                asked.append(rank)
        return asked


class Stall:
    """One wait, looked at every few milliseconds.

    The time that counts is that without any change of what is missing, so a large transfer that
    goes on is no stall; and it is this process's own: what it slept through does not count.

    Args:
        watch: The settings, and what is known of the ranks.
        what: What is waited for.
        story: Says in lines what is missing; changes as long as something comes.
        now: The clock.
    """

    def __init__(self, watch: Watch, what: str, story: Callable[[], list[str]], now: float) -> None:
        self._watch, self._what, self._story = watch, what, story
        self._since = self._looked = self._next = now
        times = [t for t in (watch.check_s, watch.shutdown_s) if t]
        self._first_s = min(times, default=0.0)
        self._report_s = watch.check_s
        self._key: tuple[list[int], list[str]] | None = None
        self._has_told = self._has_asked = False

    def look(self, late: list[int], now: float) -> bool:
        """Report if it is time to; whether the wait is to be given up."""
        lapse, self._looked = now - self._looked, now
        if not self._first_s:
            return False
        if lapse > _LAPSE_S:
            self._since += lapse
        if now < self._next:
            return False
        self._next = now + self._first_s / _LOOKS
        key = (late, self._story())
        if key != self._key:
            self._key, self._since = key, now
            self._report_s, self._has_told = self._watch.check_s, False
            return False
        waited = now - self._since
        if waited >= self._first_s / 2 and not self._has_told:
            self._has_told = True
            self._watch.tell(late)
        if self._report_s and waited >= self._report_s:
            self._report_s *= 2
            self._report()
        return bool(self._watch.shutdown_s) and waited >= self._watch.shutdown_s

    def headline(self) -> str:
        """What has waited, how long and for whom."""
        late = self._key[0] if self._key else []
        return f"{self._what} has waited {_s(self._looked - self._since)} for {name_ranks(late)}"

    def details(self) -> list[str]:
        """What is known of those that are missing."""
        late, story = self._key or ([], [])
        lines = list(story)
        for rank in late[:_MAX_NAMED]:
            lines += self._watch.about(rank)
        return lines

    def _report(self) -> None:
        late = self._key[0] if self._key else []
        speaker = self._watch.speaker(self._what, late)
        if speaker != self._watch.control.rank:
            log.logger.warning("%s; rank %d says more", self.headline(), speaker)
            return
        lines = [self.headline(), *self.details()]
        if not self._has_asked:
            self._has_asked = True
            asked = self._watch.ask_stacks(late)
            if asked:
                lines.append(f"asked {name_ranks(asked)} to print where its code stands (stderr)")
        log.logger.warning("%s", "\n  ".join(lines))


def offer_stacks() -> bool:
    """Print this process's stacks whenever it is asked; see [Note: stacks].

    Returns:
        False where somebody else handles that signal.
    """
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return False
    try:
        faulthandler.register(STACK_SIGNAL, file=2)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


@lru_cache(1024)  # a call asks for it several times
def describe_call(kind: str, name: str) -> str:
    """Names a collective in messages."""
    if kind == "step":
        return f"step {name} of an optimizer"
    name = name.removeprefix("\0")  # of what users cannot name
    if name.startswith("\0"):  # a count of our own
        name = ""
    return f"{kind} {name!r}" if name else kind


def name_ranks(ranks: Sequence[int]) -> str:
    """For messages."""
    if not ranks:
        return "data under way"
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {named}{more}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s"
