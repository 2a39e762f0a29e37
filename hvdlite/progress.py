"""The one loop in which this library ever waits.

Every collective is a small state machine that `advance`s without waiting.  Whoever waits - a step,
a barrier, a handle - runs `Progress.wait()`, which advances every state machine of the Context, not
only its own: so no stream starves another, whatever the order of calls on each rank, and every wait
runs signal handlers, sees ranks that died, and can say who is missing.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from hvdlite.backends.base import Control, RankState
from hvdlite.errors import CollectiveTimeoutError, RankFailedError
from hvdlite.timeline import Timeline, Watch

_SPINS = 20  # tries at full speed: a peer that is nearly there costs no system call
_YIELDS = 200  # tries that offer the core to others, for ranks > cores
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_CHECK_PERIOD_S = 0.01  # how often the missing ranks are looked at
_ABORT_GRACE_S = 2.0  # a rank that failed is about to end the job: let its message be the last
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

    Attributes:
        timeline: Where everybody in this Context records what happens; None: nowhere.
    """

    def __init__(self, control: Control, exit_grace_seconds: float) -> None:
        self.control = control
        self.counters = Counters()
        self.timeline: Timeline | None = None
        self._exit_grace_s = exit_grace_seconds
        self._active: dict[object, Callable[[], bool]] = {}
        self._busy = ""
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
        """Stop advancing anything."""
        self._active.clear()

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
            advance()

    @property
    def is_busy(self) -> bool:
        """Whether this process is waiting already."""
        return bool(self._busy)

    def check_free(self, what: str) -> None:
        """Raise where `wait()` would not be possible, before anything is begun.

        Raises:
            RuntimeError: Another thread, or the code that a signal handler interrupted, is waiting
                in this Context already.
        """
        if self._busy:
            raise RuntimeError(
                f"{what}: this process is already waiting in {self._busy}; hvdlite serves one "
                "thread at a time and cannot be called from a signal handler that interrupted it"
            )

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        check: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Advance everything until `ready()`.

        Args:
            ready: Tells the end; cheap, and true for ever once true.
            what: Names what is waited for, for messages.
            missing: Ranks whose part is not here yet.
            check: Called about every 10 ms; may raise.
            timeout_s: Seconds after which TimeoutError is raised; None: no limit.

        Raises:
            RuntimeError: Another thread, or the code that a signal handler interrupted, is waiting
                in this Context already.
            RankFailedError: A missing rank has failed, or left longer than the grace ago.
            CollectiveTimeoutError: `timeout_s` is over.
        """
        self.check_free(what)
        watch = None if self.timeline is None else self.timeline.watch(what)
        self._busy = what
        try:
            self._loop(ready, what, missing, check, timeout_s, watch)
        finally:
            self._busy = ""
            if watch is not None:
                watch.end()

    def _loop(
        self,
        ready: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        check: Callable[[], None] | None,
        timeout_s: float | None,
        watch: Watch | None,
    ) -> None:
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
            if watch is not None:
                watch.look(missing())
            now = time.monotonic()
            if not started:
                started, next_check = now, now + _CHECK_PERIOD_S
            if now >= next_check:
                next_check = now + _CHECK_PERIOD_S
                if check is not None:
                    check()
                self._look_for_failures(what, missing(), now)
                if timeout_s is not None and now - started > timeout_s:
                    raise CollectiveTimeoutError(
                        f"{what}: not finished after {timeout_s:g} s; "
                        f"missing: {_name_ranks(missing())}"
                    )
            if idle <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _look_for_failures(self, what: str, ranks: list[int], now: float) -> None:
        """Raise for a missing rank that will not come, after a grace in which the job may end."""
        self.control.check_alive(ranks)
        for rank in ranks:
            state, note = self.control.state(rank)
            if state < RankState.LEFT or rank == self.control.rank:
                continue
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


def _name_ranks(ranks: list[int]) -> str:
    return "rank" + "s" * (len(ranks) != 1) + " " + ", ".join(map(str, ranks))
