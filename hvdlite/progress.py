"""The one loop in which this library ever waits.

Every collective is a small state machine that `advance`s without waiting.  Whoever waits - a step,
a barrier, a handle - runs `Progress.wait()`, which advances every state machine of the Context, not
only its own: so no stream starves another, whatever the order of calls on each rank, and every wait
runs signal handlers, sees ranks that died, and can say who is missing.

[Note: giving up]  A rank whose wait has taken too long takes part in nothing any more: it tells the
others, advances nothing, and refuses every call until `shutdown()` and `init()`.  So whatever the
missing rank does later, nobody gets half of a sum: what this rank had not reduced stays undone, and
who needs it meets an error; what it had reduced was right.  A rank that ends a step looks once more
whether anybody gave up meanwhile, for whoever has may have written into its gradients since.  Its
memory is not used again: another Context makes its own.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from hvdlite.backends.base import Control, RankState
from hvdlite.errors import CollectiveTimeoutError, RankFailedError, ShutDownError
from hvdlite.log import logger
from hvdlite.stall import Recorder, Stall, Watch, name_ranks
from hvdlite.timeline import Timeline, WaitTrace

_SPINS = 5  # tries at full speed: a peer that is nearly there costs no system call
_YIELDS = 200  # tries that offer the core to others, for ranks > cores
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_ALERT_S = 0.1  # so long sleeps stay short: a rank that is a little late costs its peers no more
_CHECK_PERIOD_S = 0.01  # how often the missing ranks are looked at
_ABORT_GRACE_S = 2.0  # a rank that failed is about to end the job: let its message be the last
_ADVICE = "call shutdown() and init() to start again"
_GONE_GRACE_S = 1.0  # a process that vanished: the launcher is about to end the job


@dataclass(slots=True)
class Counters:
    """What `stats()` shows: plain counts since `init()`."""

    collectives: int = 0  # issued to a backend
    bytes: int = 0  # of this rank's data in them
    buckets: int = 0  # reduced for optimizers
    negotiations: int = 0  # calls matched by name, constructors included
    steps: int = 0  # of all optimizers

    def as_dict(self) -> dict[str, int]:
        """A copy of the counts."""
        return asdict(self)


class Progress:
    """Advances everything that is under way in one Context.

    Args:
        control: Tells the state of the ranks.
        exit_grace_seconds: How long to wait for a rank that has left before raising.
        watch: When to report a wait, and when to give up; None: never.

    Attributes:
        recorder: What this rank did last.
        abandoned: Why this rank takes part in nothing any more; "": it does.
        on_give_up: Told the reason when this rank gives up; perhaps more than once.
        timeline: Where everybody in this Context records what happens; None: nowhere.
    """

    def __init__(
        self, control: Control, exit_grace_seconds: float, watch: Watch | None = None
    ) -> None:
        self.control = control
        self.counters = Counters()
        self.watch = watch or Watch(control, 0.0, 0.0, False)
        self.recorder = Recorder(control)
        self.abandoned = ""
        self.on_give_up: Callable[[str], None] = lambda _: None
        self.timeline: Timeline | None = None
        self._exit_grace_s = exit_grace_seconds
        self._active: dict[object, Callable[[], bool]] = {}
        self._busy = ""
        self.has_joined = False  # this rank only serves the others; see `Matcher.join`
        self._suspect_since: dict[int, float] = {}

    def add(self, key: object, advance: Callable[[], bool]) -> None:
        """Advance this too from now on; saying it twice is harmless."""
        self._active[key] = advance

    def hand_over(self, key: object, advance: Callable[[], bool]) -> None:
        """Advance it in another way from now on, if it is advanced at all."""
        if key in self._active:
            self._active[key] = advance

    def remove(self, key: object) -> None:
        """Stop advancing it."""
        self._active.pop(key, None)

    def clear(self) -> None:
        """Stop advancing anything, and forget whom to ask or tell: nothing is held in a cycle."""
        self._active.clear()
        self.on_give_up = lambda _: None
        self.watch.clues, self.watch.own = lambda _: [], list

    def poll(self) -> bool:
        """Advance everything once, without waiting; whether anything moved."""
        moved = False
        for advance in tuple(self._active.values()):
            if advance():
                moved = True
        if moved and self.timeline is not None:
            self.timeline.cycle()
        return moved

    def nudge(self, advance: Callable[[], bool]) -> None:
        """Advance one thing, unless a wait that this call has interrupted is doing so."""
        if not self._busy:
            self._busy = "a poll"
            try:
                advance()
            finally:
                self._busy = ""

    @property
    def is_busy(self) -> bool:
        """Whether this process is waiting already."""
        return bool(self._busy)

    def check_free(self, what: str) -> None:
        """Raise where `wait()` would not be possible, before anything is begun.

        Raises:
            RuntimeError: Another thread, or the code that a signal handler interrupted, is waiting
                in this Context already.
            ShutDownError: This rank has given up.
        """
        if self.abandoned:
            self.refuse(what)
        if self._busy:
            raise RuntimeError(
                f"{what}: this process is already waiting in {self._busy}; hvdlite serves one "
                "thread at a time and cannot be called from a signal handler that interrupted it"
            )

    def refuse(self, what: str) -> NoReturn:
        """Raise for a call that comes after this rank has given up."""
        self.give_up(self.abandoned)  # a signal handler may have broken that off
        raise ShutDownError(f"{what}: {self.abandoned}; {_ADVICE}")

    def give_up(self, why: str) -> None:
        """Take part in nothing any more.  See [Note: giving up]; bears being said twice."""
        self.abandoned = self.abandoned or why
        self._active.clear()
        self.control.announce(RankState.GAVE_UP, self.abandoned)
        self.on_give_up(f"{self.abandoned}; {_ADVICE}")

    def check_quitters(self, what: str, ranks: Sequence[int]) -> None:
        """Raise, and give up too, if one of these ranks has given up.

        Raises:
            CollectiveTimeoutError: One has; what was received with it may not be used.
        """
        for rank in self.control.quitters():
            if rank in ranks:
                self._follow(what, rank, self.control.state(rank)[1])

    def _follow(self, what: str, rank: int, note: str) -> NoReturn:
        me = self.control.rank
        self._abandon(
            f"rank {me} gave up {what} because of rank {rank}: {note}",
            f"{what}: rank {me} needs rank {rank}, which takes part in nothing any more: {note}",
        )

    def _time_out(self, stall: Stall) -> NoReturn:
        """A wait has taken longer than it may."""
        what, limit_s = stall.headline(), self.watch.shutdown_s
        head = f"{what}, as long as it may (stall_shutdown_time_seconds={limit_s:g})"
        self._abandon(
            f"rank {self.control.rank} gave up: {what}", "\n  ".join([head, *stall.details()])
        )

    def _abandon(self, why: str, text: str) -> NoReturn:
        """Give up with an error, and show what this rank did last."""
        self.give_up(why)
        recent = self.recorder.lines()
        if recent:
            logger.error("%s", "\n  ".join(recent))
        raise CollectiveTimeoutError(
            f"{text}\nSo rank {self.control.rank} takes part in nothing any more; {_ADVICE}"
        )

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        check: Callable[[], None] | None = None,
        timeout_s: float | None = None,
        story: Callable[[], list[str]] = list,
    ) -> None:
        """Advance everything until `ready()`.

        Args:
            ready: Tells the end; cheap, and true for ever once true.
            what: Names what is waited for, for messages.
            missing: Ranks whose part is not here yet.
            check: Called about every 10 ms; may raise.
            timeout_s: Seconds after which TimeoutError is raised; None: no limit.
            story: Says in lines what of the missing ranks is missing; a report quotes it, and a
                change of it shows that the wait gets on.

        Raises:
            RuntimeError: Another thread, or the code that a signal handler interrupted, is waiting
                in this Context already.
            RankFailedError: A missing rank has failed, or left longer than the grace ago.
            CollectiveTimeoutError: `timeout_s` is over; or this rank gives up, or a missing one
                has: see [Note: giving up].
        """
        self.check_free(what)
        trace = None if self.timeline is None else self.timeline.watch(what)
        self._busy = what
        try:
            self._loop(ready, what, missing, check, timeout_s, story, trace)
        finally:
            self._busy = ""
            if self.recorder.is_waiting:
                self.recorder.goes_on()
            if trace is not None:
                trace.end()

    def _loop(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        check: Callable[[], None] | None,
        timeout_s: float | None,
        story: Callable[[], list[str]],
        trace: WaitTrace | None,
    ) -> None:
        stall: Stall | None = None
        idle, sleep_s = 0, _FIRST_SLEEP_S
        next_check = 0.0
        started = 0.0
        while not ready():
            if self.poll():
                idle, sleep_s = 0, _FIRST_SLEEP_S
                continue
            idle += 1
            if idle <= _SPINS:
                continue
            if trace is not None:
                trace.look(missing())
            now = time.monotonic()
            if not started:
                self.recorder.waits(what)
                started, next_check = now, now + _CHECK_PERIOD_S
            if now >= next_check:
                next_check = now + _CHECK_PERIOD_S
                if check is not None:
                    check()
                late = missing()
                self._look_for_failures(what, late, now)
                if stall is None:
                    stall = Stall(self.watch, what, story, now)
                if stall.look(late, now):
                    self._time_out(stall)
                if timeout_s is not None and now - started > timeout_s:
                    raise CollectiveTimeoutError(
                        f"{what}: not finished after {timeout_s:g} s; "
                        f"missing: {name_ranks(missing())}"
                    )
            if idle <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(sleep_s)
                if now - started > _ALERT_S:
                    sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _look_for_failures(self, what: str, ranks: list[int], now: float) -> None:
        """Raise for a missing rank that will not come, after a grace in which the job may end."""
        self.control.check_alive(ranks)
        for rank in ranks:
            state, note = self.control.state(rank)
            if state < RankState.LEFT or rank == self.control.rank:
                continue
            if state is RankState.GAVE_UP:
                self._follow(what, rank, note)
            since = self._suspect_since.setdefault(rank, now)
            if state is RankState.LEFT:
                grace, story = self._exit_grace_s, "has left (shutdown() or the end of its script)"
            else:
                grace = _GONE_GRACE_S if note.endswith("is gone") else _ABORT_GRACE_S
                story = f"failed: {note}"
            if now - since >= grace:
                raise RankFailedError(
                    f"{what}: rank {self.control.rank} waits for rank {rank}, which {story}"
                )
