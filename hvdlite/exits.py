"""How one rank's death ends the whole job.

Under MPI a rank that raises, or calls `sys.exit(3)`, stays in MPI_Finalize until the others come,
and they wait for it in a collective: the job hangs.  While an `Exits` is installed, such a rank
says in one tagged block what happened, marks itself as failed, and aborts the job:

    uncaught exception, any thread ─▶ sys.excepthook, threading.excepthook ─▶ block, abort(1)
    sys.exit(3) that nobody catches ─▶ the code is recorded ─▶ atexit ─▶ line, abort(3)
    end of the script, or sys.exit(0) ─▶ atexit ─▶ on_leave()

`raise SystemExit(3)` cannot be seen from Python: it ends like the last row, and the other ranks'
patience with a rank that left (`exit_grace_seconds`) covers it.  `os._exit()` and signals pass by
Python altogether; there the launcher ends the job.

[Note: which sys.exit() ends the program]
`sys.exit()` raises an exception like any other, and a caught one must count for nothing.  If nobody
catches it, the interpreter itself drops it, with no Python frame left on the stack, before it runs
the atexit hooks; whoever catches it drops it inside a frame.  So `RecordedExit.__del__` looks
whether a frame is above it.  An exception that something still holds in the end (a task of asyncio,
a `with` that kept it) tells by its traceback: if it left the outermost frame that it names, that
frame still stands at the instruction that raised, or at one that raises again; a frame that caught
it went on to another, its return in the end.
"""

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from opcode import opmap
from types import ModuleType, TracebackType
from typing import Any, Final

_FORWARD_SECONDS: Final = 0.2  # for the launcher to pass on what was written before it kills
_SUMMARY_CHARS: Final = 200  # of an exception's text, for the other ranks

_RERAISE: Final = opmap["RERAISE"]  # the end of a `finally` or `with`
_RAISE: Final = bytes([opmap["RAISE_VARARGS"], 0])  # a bare `raise`

_getframe = sys._getframe  # a name of our own: it is needed while modules are being torn down


class RecordedExit(SystemExit):
    """What `sys.exit()` raises; tells its `Exits` if it ends the program."""

    exits: "Exits | None" = None

    def __del__(self) -> None:
        """See [Note: which sys.exit() ends the program]."""
        if self.exits is not None and _getframe().f_back is None:
            self.exits._record(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as what it stands for."""
        return SystemExit, self.args


class Exits:
    """Watches how this process ends, and ends the job with it.

    Args:
        rank: This process's rank in the world.
        size: Number of ranks.
        abort: Ends the job with a code; does not return.
        on_failure: Told in one line why this rank fails, just before `abort`; it may run in any
            thread and must not wait for other ranks.
        on_leave: Called when the process ends without a failure; must not wait either.
        enabled: False leaves exceptions and exit codes to Python; only `on_leave` is called, at
            every end.
        recent: Lines about what this rank did last, shown above a traceback.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        abort: Callable[[int], None],
        on_failure: Callable[[str], None],
        on_leave: Callable[[], None],
        enabled: bool,
        recent: Callable[[], list[str]] = list,
    ) -> None:
        """Only remember; `install()` acts."""
        self._abort, self._on_failure, self._on_leave = abort, on_failure, on_leave
        self._enabled, self._recent = enabled, recent
        self._pid = os.getpid()
        self._tag = f"[hvdlite rank {rank}/{size} {os.uname().nodename} {self._pid} "
        # Ready-made for the case that there is no memory left to make anything.
        self._last_words = f"{self._tag}?] the traceback cannot be shown\n".encode()
        self._swaps: list[_Swap] = []
        self._installed = False
        self._failure: BaseException | None = None  # the reported one
        self._is_ended = False  # by a sys.exit()
        self._code: object = None  # its argument
        self._newest: weakref.ref[RecordedExit] | None = None

    def install(self) -> None:
        """Replace the hooks; does nothing if they are in place."""
        if self._installed:
            return
        self._installed = True
        self._pid = os.getpid()
        if self._enabled:
            self._swaps = [
                _Swap(sys, "excepthook", self._main_raised),
                _Swap(threading, "excepthook", self._thread_raised),
                _Swap(sys, "exit", self._exit),
            ]
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Put back what was there; a hook that somebody has wrapped since only passes on."""
        if not self._installed:
            return
        self._installed = False
        atexit.unregister(self._at_exit)
        for swap in reversed(self._swaps):
            swap.undo()
        self._swaps = []
        self._is_ended, self._code, self._newest = False, None, None

    def _main_raised(
        self,
        previous: Callable[..., Any],
        kind: type[BaseException],
        exc: BaseException,
        tb: TracebackType | None,
    ) -> None:
        if self._in_fork():
            previous(kind, exc, tb)
            return
        if previous is not sys.__excepthook__:  # the user's own; ours says the rest
            with suppress(BaseException):
                previous(kind, exc, tb)
        self._fail(kind, exc, tb, threading.current_thread().name)

    def _thread_raised(self, previous: Callable[..., Any], args: threading.ExceptHookArgs) -> None:
        if self._in_fork():
            previous(args)
            return
        if issubclass(args.exc_type, SystemExit):  # ends the thread alone, as in Python
            return
        if previous is not threading.__excepthook__:
            with suppress(BaseException):
                previous(args)
        exc = args.exc_value if args.exc_value is not None else args.exc_type()
        name = args.thread.name if args.thread is not None else str(threading.get_ident())
        self._fail(args.exc_type, exc, args.exc_traceback, name)

    def _exit(self, previous: Callable[..., Any], *args: object) -> None:
        is_main = threading.get_ident() == threading.main_thread().ident
        if self._in_fork() or not is_main:
            previous(*args)
            return
        try:
            previous(*args)
            return  # somebody's own sys.exit(), which does not exit
        except SystemExit as plain:
            if type(plain) is not SystemExit or plain in args:  # the caller's own object
                raise
            exc = RecordedExit(*plain.args)
        exc.exits = self
        self._newest = weakref.ref(exc)
        try:
            raise exc
        finally:
            del exc  # its traceback holds this frame: it would wait for the cycle collector

    def _record(self, exc: RecordedExit) -> None:
        # The first to die ended the program; it takes those with it in whose handler it was raised.
        if self._installed and not self._is_ended and not self._in_fork():
            self._is_ended, self._code = True, exc.code

    def _at_exit(self) -> None:
        """Runs before MPI is finalized: mpi4py does that after Python's own hooks."""
        if self._in_fork() or self._failure is not None:
            return
        newest = self._newest() if self._newest is not None else None
        if newest is not None and _has_left(newest):
            self._record(newest)
        code = _exit_code(self._code)
        if code == 0:
            self.remove()  # what happens from here on is no other rank's affair
            self._on_leave()
            return
        text = f"exit code {code}"
        # Python has printed above what is no code.
        words = "" if isinstance(self._code, int) else f": {_shorten(str(self._code))}"
        head = f"{text} of sys.exit(), ending the job{words}"
        self._end(head, "MainThread", text + words, code)

    def _fail(
        self, kind: type[BaseException], exc: BaseException, tb: TracebackType | None, thread: str
    ) -> None:
        if exc is self._failure:
            return
        self._failure = exc
        try:
            summary = f"{kind.__name__}: {_shorten(str(exc))}"
        except Exception:  # a __str__ of the user's that fails, or no memory
            summary = kind.__name__
        text = _describe(kind, exc, tb)
        if not issubclass(kind, MemoryError):
            with suppress(Exception):
                recent = self._recent()
                if recent:
                    text = "\n".join([*recent, text])
        self._end(text, thread, summary, 1)

    def _end(self, text: str, thread: str, summary: str, code: int) -> None:
        """Write, tell, give the launcher time, abort; nothing may keep this rank from the last."""
        with suppress(BaseException):
            self._write(text, thread)
        with suppress(BaseException):
            self._on_failure(summary)
        with suppress(BaseException):  # a second Ctrl-C shortens the sleep
            time.sleep(_FORWARD_SECONDS)
        try:
            self._abort(code)
        except BaseException:
            os._exit(code)

    def _write(self, text: str, thread: str) -> None:
        """One write for the whole block, so that the blocks of two ranks do not mix."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        try:
            tag = f"{self._tag}{thread}] "
            block = "".join(f"{tag}{line}\n" for line in text.splitlines())
            left = block.encode("utf-8", "backslashreplace")
        except MemoryError:
            left = self._last_words
        with suppress(OSError):
            while left:
                left = left[os.write(2, left) :]

    def _in_fork(self) -> bool:
        """Whether this is a forked child, which is no rank: Python's own behaviour is right."""
        return os.getpid() != self._pid


class _Swap:
    """One function of a module, replaced by `handler(previous, *args)` until `undo()`."""

    def __init__(self, module: ModuleType, name: str, handler: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        self._previous: Callable[..., Any] = getattr(module, name)
        self._handler: Callable[..., Any] | None = handler

        @wraps(self._previous)
        def hook(*args: Any) -> Any:
            if self._handler is not None:
                return self._handler(self._previous, *args)
            return self._previous(*args)

        self._hook: Callable[..., Any] | None = hook
        setattr(module, name, hook)

    def undo(self) -> None:
        """Put the previous function back, unless somebody else has replaced ours since."""
        if getattr(self._module, self._name) is self._hook:
            setattr(self._module, self._name, self._previous)
        # No cycle through the hook is left: what the handler holds is freed at once.
        self._handler = self._hook = None


def _exit_code(status: object) -> int:
    """What the process returns after `sys.exit(status)`."""
    if status is None:
        return 0
    if isinstance(status, int):
        return status & 0xFF
    return 1


def _has_left(exc: BaseException) -> bool:
    """See [Note: which sys.exit() ends the program]."""
    outermost = exc.__traceback__
    if outermost is None:
        return False
    last, code = outermost.tb_frame.f_lasti, outermost.tb_frame.f_code.co_code
    return last == outermost.tb_lasti or code[last] == _RERAISE or code[last : last + 2] == _RAISE


def _describe(kind: type[BaseException], exc: BaseException, tb: TracebackType | None) -> str:
    try:
        if not issubclass(kind, MemoryError):
            return "".join(traceback.format_exception(kind, exc, tb))
        # The formatter reads whole source files; the places alone need next to nothing.
        lines = ["Traceback (most recent call last):"]
        while tb is not None:
            code = tb.tb_frame.f_code
            lines.append(f'  File "{code.co_filename}", line {tb.tb_lineno}, in {code.co_name}')
            tb = tb.tb_next
        lines.append(f"{kind.__name__}: {exc}")
        return "\n".join(lines)
    except Exception as reason:  # a __str__ of the user's that fails, or no memory
        return f"{kind.__name__} (its traceback cannot be shown: {type(reason).__name__})"


def _shorten(text: str) -> str:
    """The first line of a text, for one line of another rank's log."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _SUMMARY_CHARS else f"{line[: _SUMMARY_CHARS - 3]}..."
