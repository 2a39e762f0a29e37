"""Raises where CPython would run a signal handler: at every such point of hvdlite, one by one.

    def scenario(interrupter):
        with suppress(Alarm), interrupter:
            matcher.advance()          # raises at one point, in each run of the scenario at another
        assert ...                     # nothing was lost
    at_every_point(scenario)

A handler runs when a function is entered, after a call has returned and when a loop goes round; a
trace function sees these places and raises at one of them.  A test that takes them one by one knows
that nothing is lost wherever the alarm comes.
"""

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hvdlite

_PACKAGE = str(Path(hvdlite.__file__).parent)
_CALLS = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
    and not name.endswith("NO_INTERRUPT")
    and "INTRINSIC" not in name
)


class Alarm(BaseException):
    """What the handler raises; like KeyboardInterrupt no `except Exception` catches it."""


class Timeout(Exception):
    """What most handlers raise."""


class Interrupter:
    """Raises at the `target`-th point of hvdlite's own code that runs inside `with`.

    Args:
        target: Which point, counted from 1 over all uses of this object; 0: only count.
        error: What is raised.
        only: Files to look at, e.g. "negotiation.py"; none: all of hvdlite.
        distinct: Count a place in the code once, however often it is passed.

    Attributes:
        seen: Points that have passed.
        where: Where it was raised; "" if it was not.
    """

    def __init__(
        self, target: int, error: type[BaseException] = Alarm, *only: str, distinct: bool = False
    ) -> None:
        self.target, self.error, self.only = target, error, only
        self._places: set[tuple[CodeType, int]] | None = set() if distinct else None
        self.seen = 0
        self.where = ""
        self._of: dict[CodeType, bool] = {}

    def __enter__(self) -> "Interrupter":
        if not self.where:
            sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside nothing counts and nothing is raised."""
        before = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter_frame(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if code not in self._of:
            path = Path(code.co_filename)
            self._of[code] = code.co_filename.startswith(_PACKAGE) and (
                not self.only or path.name in self.only
            )
        if not self._of[code]:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        words, handlers = code.co_code, dis.Bytecode(code).exception_entries
        last = -1

        def is_handled_alike(offset: int, other: int) -> bool:
            return all((h.start <= offset < h.end) == (h.start <= other < h.end) for h in handlers)

        def trace(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal last
            if event == "opcode":
                # The handler runs at the end of the call, we raise before what follows it: where
                # `return f()` leaves a `try` that is outside, and no such point.
                is_point = last >= 0 and words[last] in _CALLS
                is_point = is_point and is_handled_alike(last, frame.f_lasti)
                if is_point and self._is_new(code, frame.f_lasti):
                    self.seen += 1
                    if self.seen == self.target:
                        self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                        raise self.error
                last = frame.f_lasti
            elif event == "exception":
                last = -1  # a call that raised is no place where a handler runs
            return trace

        return trace

    def _is_new(self, code: CodeType, offset: int) -> bool:
        if self._places is None:
            return True
        if (code, offset) in self._places:
            return False
        self._places.add((code, offset))
        return True


def at_every_point(
    scenario: Callable[[Interrupter], None], error: type[BaseException] = Alarm, *only: str
) -> int:
    """Run a scenario once for each point, until it ends without meeting the next one.

    Args:
        scenario: Runs hvdlite inside `with interrupter`, catches what it raises, goes on, and
            asserts that nothing was lost.
        error: What is raised.
        only: Files to look at.

    Returns:
        How many points there were.
    """
    point = 0
    gc.freeze()  # what a run leaves behind is collected between two runs, at little cost
    gc.disable()
    try:
        while True:
            point += 1
            interrupter = Interrupter(point, error, *only)
            try:
                scenario(interrupter)
            except BaseException as exc:
                exc.add_note(f"at point {point}: {interrupter.where or 'never interrupted'}")
                raise
            gc.collect()
            if not interrupter.where:
                return point - 1
    finally:
        gc.enable()
        gc.unfreeze()
