"""The promise of one collective that was started and not waited for."""

from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Source(Protocol):
    """Where the calls behind handles are under way."""

    def poll(self, ticket: Any) -> bool:
        """Whether the call is over; never waits."""
        ...

    def wait(self, ticket: Any, timeout_s: float | None = None) -> Any:
        """Wait so many seconds (None: without end) and return the result."""
        ...


class Handle(Generic[T]):
    """What an `_async` collective returns; `wait()` may be called any number of times.

    The call goes on whenever this process waits or polls for anything in hvdlite, and it keeps what
    it reads and writes alive, so a handle may be dropped: the call then finishes by itself, and an
    array that it was to fill stays as it is.

    Args:
        source: Where the call is under way.
        ticket: The call; its `name` is what it is matched by.
    """

    __slots__ = ("_source", "_ticket")

    def __init__(self, source: Source, ticket: Any) -> None:
        self._source, self._ticket = source, ticket

    @property
    def name(self) -> str:
        """What the call is matched by."""
        return str(self._ticket.name)

    def done(self) -> bool:
        """Whether `wait()` would return (or raise) at once.

        Never waits, but lets what is under way go on, so a loop around it comes to an end. Asked
        for the first time, right after the call was started, it answers False, unless something
        else has waited meanwhile.
        """
        return self._source.poll(self._ticket)

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
        result: T = self._source.wait(self._ticket, timeout)
        return result

    def __repr__(self) -> str:
        return f"Handle({self.name!r})"
