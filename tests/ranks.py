"""The ranks of one MPI job run the same tests together; conftest.py hooks this into pytest.

After each phase of a test (setup, call, teardown) all ranks meet, so that

* a test that fails on one rank fails on all of them, and the message names the rank;
* a rank that fails early calls its peers out of their wait, and the next test starts level;
* a rank that never comes prints its stacks and ends the job when the test's time is up.

Only rank 0 reports to the terminal; the failures of another rank go to stderr, with its number.
"""

import contextlib
import faulthandler
import hashlib
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

from launch import SIZE_NAMES

if TYPE_CHECKING:
    from mpi4py import MPI

_START_S = 60.0  # for all ranks to start and to collect the same tests
_LAST_RESORT_S = 5.0  # between the dump of a test's stacks and the end of the job


class PeerFailed(pytest.fail.Exception):  # type: ignore[name-defined,misc]  # an attribute of a function
    """This rank is fine, or was waiting; another one failed in the same phase of the same test."""


def assert_all(comm: "MPI.Intracomm", ok: bool, why: str = "", *, limit_s: float = 30.0) -> None:
    """Assert on every rank of `comm`, or on none.

    Collective:
        All ranks of `comm`.  A rank that does not come within `limit_s` fails the assertion.
    Args:
        comm: Who takes part.
        ok: What this rank found.
        why: What to say about this rank if it is not ok.
        limit_s: How long to wait for the others, in seconds.
    """
    flags = np.zeros(comm.size, np.uint8)
    request = comm.Iallgather(np.array([ok], np.uint8), flags)
    deadline = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > deadline:
            missing = f"not all ranks came to this assertion within {limit_s:g} s"
            pytest.fail(f"{missing}; rank {comm.rank}: ok={ok} {why}")
        time.sleep(0)
    if not flags.all():
        reasons = comm.allgather(why)
        bad = {rank: reasons[rank] for rank in range(comm.size) if not flags[rank]}
        pytest.fail(f"failed on ranks {bad}")


class Voice:
    """Prints to the real stderr, which no capturing replaces, each line with the rank.

    Args:
        rank: Of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.file = os.fdopen(os.dup(2), "w")

    def say(self, text: str) -> None:
        """Print all of it at once, so that the lines of two ranks are not mixed."""
        self.file.write("".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines()))
        self.file.flush()


class Meeting:
    """A place where all ranks meet without blocking in MPI, and tell each other how it went.

    Args:
        comm: Who meets; duplicated, so that no message of a test is mistaken for one of ours.
        voice: For what must be seen while a test hangs.
    """

    def __init__(self, comm: "MPI.Intracomm", voice: Voice) -> None:
        self._may_interrupt = False
        signal.signal(signal.SIGUSR1, self._on_call)  # first: a peer may call at once
        self._comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self._voice = voice
        self._pids: list[int] = comm.allgather(os.getpid())
        self._number = 0  # of the meeting to come; a message carries it, so none is mistaken
        self._said: dict[int, dict[int, str]] = {}  # meeting -> rank -> its failure, "" if none
        self._sent: list[MPI.Request] = []
        self._interrupted = -np.inf  # when, on the monotonic clock

    def begin(self) -> None:
        """From here to `meet()` a peer's failure interrupts this rank with PeerFailed."""
        self._may_interrupt = True

    def meet(self, failure: str, deadline: float) -> dict[int, str]:
        """Wait for all ranks.

        Args:
            failure: What went wrong on this rank, "" if nothing did.
            deadline: On the monotonic clock; after it the job is aborted.

        Returns:
            The failures of all ranks, by rank; the same on every rank.
        """
        self._may_interrupt = False
        said = self._said.setdefault(self._number, {})
        said[self.rank] = failure
        for peer in range(self.size):
            if peer != self.rank:
                self._sent.append(self._comm.isend((self._number, self.rank, failure), peer))
        start = call_again = time.monotonic()
        if failure.startswith("Skipped"):
            call_again += 2  # the others will skip it, too, unless they are in the test already
        told = False
        while len(said) < self.size:
            self._receive()
            now = time.monotonic()
            late = [peer for peer in range(self.size) if peer not in said]
            if failure and late and now >= call_again:
                self._call(late)
                call_again = now + 0.25
            if failure and late and not told and now > start + 2:
                self._voice.say(f"{failure}\n(waiting for ranks {late} to leave this test)")
                told = True
            if now > deadline:
                self._abort(f"ranks {late} did not come; this rank: {failure or 'fine'}")
            time.sleep(0 if now < start + 0.01 else 0.001)
        del self._said[self._number]
        self._sent = [request for request in self._sent if not request.Test()]
        self._number += 1
        return {rank: text for rank, text in sorted(said.items()) if text}

    def _receive(self) -> None:
        while (message := self._comm.improbe()) is not None:
            number, rank, failure = message.recv()
            self._said.setdefault(number, {})[rank] = failure

    def _call(self, late: list[int]) -> None:
        for peer in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[peer], signal.SIGUSR1)

    def _on_call(self, _number: int, _frame: FrameType | None) -> None:
        """Leave the test that a peer failed in; the peer keeps calling until this rank comes."""
        __tracebackhide__ = True
        if not self._may_interrupt or time.monotonic() < self._interrupted + 2:
            return  # on its way already; give its `finally` blocks time
        self._receive()
        failures = {r: text for r, text in self._said.get(self._number, {}).items() if text}
        if failures:
            self._interrupted = time.monotonic()
            raise PeerFailed(_of_peers(failures))

    def _abort(self, text: str) -> NoReturn:
        self._voice.say(text)
        self._comm.Abort(1)
        raise SystemExit(1)


class Together:
    """The pytest plugin of a rank: meetings after the phases of a test, a watchdog, quiet peers.

    Args:
        config: Of this pytest run, which was started with --with-mpi or --only-mpi by a launcher.
        rank: As the launcher says; MPI is asked later.
    """

    def __init__(self, config: pytest.Config, rank: int) -> None:
        self._voice = Voice(rank)
        self._meeting: Meeting | None = None
        self._deadline = np.inf
        self.failed = False  # in any phase of the running test, on any rank
        if rank != 0:
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            config.pluginmanager.unregister(reporter)
            nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the reporter
            quiet = pytest.TerminalReporter(config, nowhere)
            config.pluginmanager.register(quiet, "terminalreporter")

    def pytest_sessionstart(self) -> None:
        """Start MPI, and see that the launcher is the one of this MPI."""
        # A rank that ended before it came here would leave the others in MPI_Init.
        faulthandler.dump_traceback_later(_START_S, exit=True, file=self._voice.file)
        from mpi4py import MPI

        expected = next((int(os.environ[n]) for n in SIZE_NAMES if n in os.environ), None)
        if expected not in (None, MPI.COMM_WORLD.size):
            raise pytest.UsageError(
                f"the launcher started {expected} ranks, MPI sees {MPI.COMM_WORLD.size}: "
                "use the mpiexec of the same MPI"
            )
        self._meeting = Meeting(MPI.COMM_WORLD, self._voice)
        faulthandler.cancel_dump_traceback_later()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks must have collected the same tests, or the first one would never be met."""
        names = "\n".join(item.nodeid for item in session.items)
        digest = hashlib.sha256(names.encode()).hexdigest()[:12]
        mine = f"{len(session.items)} tests ({digest}), {session.testsfailed} errors"
        found = self._meet(mine, time.monotonic() + _START_S)
        if len(set(found.values())) > 1:
            pytest.exit(f"the ranks collected different tests: {found}", returncode=1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch one test; after it, give up a library state that a failure left uneven."""
        limit = item.stash[LIMIT]
        self._deadline = time.monotonic() + limit + _LAST_RESORT_S
        self.failed = False
        faulthandler.dump_traceback_later(limit, file=self._voice.file)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self.failed:
                shut_down()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        """Meet after the fixtures of a test are set up."""
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Meet after the test itself."""
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """Meet after the fixtures of a test are torn down."""
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show what failed on this rank where rank 0's terminal does not."""
        report = yield
        if report.failed and self._voice.rank != 0 and not isinstance(_error(call), PeerFailed):
            captured = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
            where = f"FAILED {report.nodeid} ({report.when})"
            self._voice.say(f"{where}\n{report.longreprtext}{captured}")
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Show what this rank could not import."""
        if report.failed and self._voice.rank != 0:
            self._voice.say(f"ERROR {report.nodeid}\n{report.longreprtext}")

    def pytest_sessionfinish(self) -> None:
        """Take hvdlite's exit hooks off: pytest's exit code is not a rank's failure."""
        shut_down()

    def _phase(self) -> Generator[None, None, None]:
        assert self._meeting is not None
        self._meeting.begin()
        try:
            yield
        except PeerFailed:
            self._meet("", self._deadline)
            raise
        except BaseException as error:
            self._meet(f"{type(error).__name__}: {error}"[:500], self._deadline)
            raise
        if failures := self._meet("", self._deadline):
            raise PeerFailed(_of_peers(failures), pytrace=False)

    def _meet(self, failure: str, deadline: float) -> dict[int, str]:
        assert self._meeting is not None
        failures = self._meeting.meet(failure, deadline)
        self.failed = self.failed or bool(failures)
        return failures


LIMIT = pytest.StashKey[float]()  # of a test: seconds until its stacks are printed


def limit_of(item: pytest.Item) -> float:
    """The time that a test has, in seconds: its `timeout` mark, or the setting."""
    mark = item.get_closest_marker("timeout")
    if mark is None:
        return float(item.config.getoption("timeout") or item.config.getini("timeout"))
    return float(mark.args[0] if mark.args else mark.kwargs["timeout"])


def watch(item: pytest.Item) -> None:
    """Print a test's stacks on every rank when its time is up; pytest-timeout ends it later."""
    item.stash[LIMIT] = limit_of(item)
    last = pytest.mark.timeout(item.stash[LIMIT] + 2 * _LAST_RESORT_S, method="thread")
    item.add_marker(last, append=False)


def shut_down() -> None:
    """Close hvdlite's Context, if a test left one open."""
    hvdlite = sys.modules.get("hvdlite")
    if hvdlite is not None and hvdlite.is_initialized():
        hvdlite.shutdown()


def _error(call: pytest.CallInfo[None]) -> BaseException | None:
    return None if call.excinfo is None else call.excinfo.value


def _of_peers(failures: dict[int, str]) -> str:
    return "; ".join(f"failed on rank {rank}: {text}" for rank, text in failures.items())
