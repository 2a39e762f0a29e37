"""The promise of one collective that was started and not waited for."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """What an `_async` collective returns; `wait()` may be called any number of times.

    The call goes on whenever this process waits or polls for anything in hvdlite, and it keeps what
    it reads and writes alive, so a handle may be dropped: the call then finishes by itself, and an
    array that it was to fill stays as it is.

    Args:
        name: What the call is matched by.
        poll: Tells whether the call is over; never waits.
        wait: Waits so many seconds (None: without end) and returns the result.
    """

    __slots__ = ("_poll", "_wait", "name")

    def __init__(
        self, name: str, poll: Callable[[], bool], wait: Callable[[float | None], T]
    ) -> None:
        self.name, self._poll, self._wait = name, poll, wait

    def done(self) -> bool:
        """Whether `wait()` would return (or raise) at once.

        Never waits, but lets what is under way go on, so a loop around it comes to an end. Asked
        for the first time, right after the call was started, it answers False, unless something
        else has waited meanwhile.
        """
        return self._poll()

    def wait(self, timeout: float | None = None) -> T:
        """The result, once it is there; the same one each time.

        Args:
            timeout: Seconds; None: no limit.

        Raises:
            TimeoutError: The time is over; the call is still under way and may be waited for again.
            MismatchError: On every rank: they did not make the same call. Again each time.
            RankFailedError: A rank died or left.
            ShutDownError: hvdlite was shut down before the call was over.
        """
        return self._wait(timeout)

    def __repr__(self) -> str:
        return f"Handle({self.name!r})"
