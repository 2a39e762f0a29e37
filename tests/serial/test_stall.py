"""Stalls without processes: what is recorded, what a report says, when a wait is given up."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from fakes import Network
from hvdlite import log, stall
from hvdlite.backends.base import Jotting, RankState
from hvdlite.backends.page import process_state
from hvdlite.config import Config
from hvdlite.errors import CollectiveTimeoutError, ShutDownError
from hvdlite.progress import Progress
from hvdlite.stall import DONE, FAILED, MATCHED, Recorder, Stall, Watch
from hvdlite.ticket import Terms, Ticket
from interrupts import Alarm, at_every_point


@pytest.fixture
def lines():
    """What is logged, message by message."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log.logger.addHandler(handler)
    yield messages
    log.logger.removeHandler(handler)


def ticket(name, ranks=(0, 1), data=b"12345678"):
    terms = Terms(0, ranks, (("kind", "test"),))
    return Ticket(terms, name, np.frombuffer(data, np.uint8), lambda parts: parts)


class Clock:
    """Drives a `Stall` by hand."""

    def __init__(self, check_s=10.0, shutdown_s=0.0, size=3, rank=0, story=list):
        self.control = Network(size).controls[rank]
        self.watch = Watch(self.control, check_s, shutdown_s, asks_stacks=True)
        self.now = 100.0
        self.stall = Stall(self.watch, "allreduce 'x'", story, self.now)

    def run(self, seconds, late=(1,)):
        """Look every 10 ms; whether the wait was given up."""
        for _ in range(round(seconds * 100)):
            self.now += 0.01
            if self.stall.look(list(late), self.now):
                return True
        return False


# ---- the flight recorder -----------------------------------------------------------------------


def test_the_recorder_tells_what_became_of_each_collective():
    recorder = Recorder(Network(1).controls[0])
    recorder.submitted(1, "allreduce", "a", 8)
    recorder.submitted(2, "allgather", "b", 16)
    recorder.submitted((7, 3), "step", "3", 32)
    recorder.mark(1, MATCHED)
    recorder.mark(1, DONE)
    recorder.mark(1, FAILED)  # said again after a signal handler broke it off: the first counts
    recorder.mark(2, MATCHED)
    recorder.mark(9, DONE)  # whose beginning is forgotten
    one, two, step = recorder.entries()
    assert (one.sequence, one.kind, one.name, one.nbytes, one.state) == (
        1,
        "allreduce",
        "a",
        8,
        DONE,
    )
    assert one.submitted <= one.matched <= one.ended
    assert abs(one.submitted - time.time()) < 60
    assert (two.state, two.ended) == (MATCHED, None)
    assert step.state == "submitted"
    assert list(one.as_dict()) == [
        *("sequence", "kind", "name", "bytes", "state", "submitted", "matched", "ended")
    ]
    text = "\n".join(recorder.lines())
    assert "allreduce 'a', 8 B" in text
    assert "submitted: step 3 of an optimizer, 32 B" in text
    assert len(recorder.lines(2)) == 3


def test_the_recorder_keeps_the_last_256():
    recorder = Recorder(Network(1).controls[0])
    for k in range(1000):
        recorder.submitted(k, "allreduce", f"x{k}", 8)
        recorder.mark(k, MATCHED)
        recorder.mark(k, DONE)
    entries = recorder.entries()
    assert [entry.sequence for entry in entries] == list(range(745, 1001))
    assert {entry.state for entry in entries} == {DONE}
    assert Recorder(Network(1).controls[0]).lines() == []


def test_eager_calls_are_recorded_to_their_end():
    net = Network(2)
    left, right = net.matchers()
    tickets = [left.submit(ticket("x")), right.submit(ticket("x"))]
    for _ in range(5):
        left.advance()
        right.advance()
    assert all(t.done for t in tickets)
    (entry,) = net.progress[0].recorder.entries()
    assert (entry.kind, entry.name, entry.nbytes, entry.state) == ("test", "x", 8, DONE)
    assert left.control.jotted(1).text == "test 'x'"
    assert not left.control.jotted(1).waits


def test_the_others_read_what_a_rank_waits_for():
    net = Network(2)
    left, _ = net.matchers()
    seen = []

    def look():
        seen.append(net.controls[1].jotted(0))
        return len(seen) > 50  # a short wait is not worth a word

    call = left.submit(ticket("x"))
    net.progress[0].wait(look, call.what, lambda: [1])
    assert (seen[0].text, seen[0].waits) == ("test 'x'", False)
    assert (seen[-1].text, seen[-1].waits) == ("test 'x'", True)
    after = net.controls[1].jotted(0)
    assert (after.text, after.waits) == ("test 'x'", False)


# ---- when a wait speaks ------------------------------------------------------------------------


def test_a_wait_is_reported_after_the_check_time_and_then_at_doubling_intervals(lines):
    clock = Clock(check_s=10)
    clock.run(9.5)
    assert lines == []
    clock.run(1.5)
    assert len(lines) == 1
    assert lines[0].startswith("allreduce 'x' has waited 10.")
    assert "for rank 1\n" in lines[0]
    clock.run(70)
    waited = [float(line.split(" has waited ")[1].split(" s")[0]) for line in lines]
    assert waited == pytest.approx([10, 20, 40, 80], abs=0.8)


def test_what_gets_on_is_no_stall(lines):
    received = [0]
    clock = Clock(check_s=10, shutdown_s=20, story=lambda: [f"{received[0]} bytes have come"])
    for _ in range(20):
        received[0] += 1000
        assert not clock.run(5)
    assert lines == []
    assert not clock.run(11)  # a stall at last
    assert len(lines) == 1
    assert "20000 bytes have come" in lines[0]
    assert not clock.run(9, late=[2])  # another rank is missing: a change
    assert clock.run(21, late=[2])


def test_what_this_process_slept_through_does_not_count(lines):
    clock = Clock(check_s=10, shutdown_s=20)
    clock.run(1)
    clock.now += 1000  # stopped, and woken up
    assert not clock.run(5)
    assert lines == []
    assert clock.run(15)


def test_no_time_no_report_and_no_end(lines):
    clock = Clock(check_s=0, shutdown_s=0)
    assert not clock.run(100)
    assert lines == []


def test_a_wait_can_be_given_up_without_a_report(lines):
    clock = Clock(check_s=0, shutdown_s=5)
    assert clock.run(6)
    assert lines == []


def test_a_waiting_rank_tells_for_whom_before_it_reports():
    clock = Clock(check_s=10)
    clock.watch.own = lambda: ["step 3 of an optimizer is open there, without 'w'"]
    clock.control.jot(True, "allreduce 'x'", 5)
    clock.run(6)
    story = clock.control.jotted(0).story
    assert story == "for rank 1; step 3 of an optimizer is open there, without 'w'"


# ---- what a report says ------------------------------------------------------------------------


def test_a_report_says_what_the_missing_ranks_do(lines):
    clock = Clock(check_s=10, size=4, story=lambda: ["bucket 2 of 3: not all gradients"])
    jottings = clock.control.jottings
    jottings[1] = Jotting("barrier", 7, True, 12.0, "for rank 0", False)
    jottings[2] = Jotting("allreduce 'loss'", 8, False, 60.0, "", False)
    jottings[3] = Jotting("", 0, False, 60.0, "", False)
    clock.watch.clues = lambda rank: ["has called what this rank has not: barrier"] * (rank == 1)
    clock.run(11, late=[1, 2, 3])
    assert lines[0].splitlines()[0].endswith("for ranks 1, 2, 3")
    assert lines[0].splitlines()[1:] == [
        "  bucket 2 of 3: not all gradients",
        "  rank 1 has waited 12.0 s in barrier (call 7 of that rank), for rank 0",
        "  rank 1 has called what this rank has not: barrier",
        "  rank 2 has been in its own code for 60.0 s; its last call, number 8, was "
        "allreduce 'loss'",
        "  rank 3 has called nothing since init()",
    ]


def test_the_lowest_of_those_that_wait_speaks_for_all(lines):
    clock = Clock(check_s=10, rank=2)
    clock.control.jottings[0] = Jotting("allreduce 'x'", 7, True, 12.0, "", False)
    clock.run(11)
    assert lines[0].endswith("for rank 1; rank 0 says more")


def test_many_ranks_are_not_all_named(lines):
    clock = Clock(check_s=10, size=100)
    clock.run(11, late=list(range(1, 100)))
    assert "ranks 1, 2, 3" in lines[0]
    assert "16 and 83 more" in lines[0]
    assert "rank 17" not in lines[0]


def test_a_stopped_process_is_named_as_stopped_and_not_asked(lines):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while process_state(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        clock = Clock(check_s=10)
        clock.control.pids[1] = child.pid
        clock.control.jottings[1] = Jotting("barrier", 1, False, 1.0, "", True)
        clock.run(11)
        assert f"rank 1 (pid {child.pid}) is stopped by a signal" in lines[0]
        assert "asked" not in lines[0]
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == "X"


def test_stacks_are_asked_for_once_and_only_where_they_are_offered(lines, monkeypatch):
    sent = []
    monkeypatch.setattr(stall.os, "kill", lambda *what: sent.append(what))
    clock = Clock(check_s=10, size=4)
    for rank in (1, 2, 3):
        clock.control.pids[rank] = os.getpid()
        clock.control.jottings[rank] = Jotting("barrier", 1, False, 1.0, "", rank != 2)
    clock.control.states[3] = (RankState.LEFT, "")
    clock.run(50, late=[1, 2, 3])
    assert sent == [(os.getpid(), stall.STACK_SIGNAL)]
    assert len(lines) == 3
    assert "asked rank 1 to print where its code stands" in lines[0]
    assert "asked" not in lines[1]
    sent.clear()
    watch = Watch(clock.control, 10, 0, asks_stacks=False)
    assert watch.ask_stacks([1]) == []
    assert sent == []


def test_a_handler_of_the_users_is_left_alone():
    program = """
import os, signal, sys
from hvdlite import stall
if sys.argv[1] == "theirs":
    signal.signal(stall.STACK_SIGNAL, lambda *_: print("theirs"))
print(stall.offer_stacks(), flush=True)
os.kill(os.getpid(), stall.STACK_SIGNAL)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, "theirs"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\ntheirs\n"
    ended = subprocess.run(
        [sys.executable, "-c", program, "none"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "True\n"
    assert 'File "<string>", line 7 in <module>' in ended.stderr


def test_what_another_rank_has_called_is_a_clue():
    net = Network(2)
    left, right = net.matchers()
    for name in ("a", "b"):
        right.submit(ticket(name))
    left.submit(ticket("b"))
    left.advance()
    assert left.unanswered(1) == ["test 'a'"]
    assert right.unanswered(0) == []


def test_names_of_calls_within_the_library_are_not_shown():
    assert stall.describe_call("segment", "\0\0segment.noname.3") == "segment"
    assert stall.describe_call("broadcast", "\0mine") == "broadcast 'mine'"
    assert stall.describe_call("barrier", "\0barrier.noname.0") == "barrier 'barrier.noname.0'"
    assert stall.describe_call("allreduce", "loss") == "allreduce 'loss'"


# ---- giving up ---------------------------------------------------------------------------------


def short_waits(net):
    """Progress of every rank that gives up after 50 ms."""
    net.progress = [
        Progress(control, 5.0, Watch(control, 0.02, 0.05, asks_stacks=False))
        for control in net.controls
    ]
    return net.matchers()


def test_a_rank_that_gives_up_refuses_every_call_and_tells_the_others(lines):
    net = Network(2)
    left, right = short_waits(net)
    told = []
    net.progress[0].on_give_up = told.append
    call = left.submit(ticket("x"))
    with pytest.raises(CollectiveTimeoutError) as caught:
        left.wait(call)
    text = str(caught.value)
    assert text.startswith("test 'x' has waited 0.1 s for rank 1, as long as it may")
    assert "stall_shutdown_time_seconds=0.05" in text
    assert "shutdown() and init()" in text
    assert any("submitted: test 'x', 8 B" in line for line in lines)
    for refused in (
        lambda: left.submit(ticket("y")),
        lambda: left.call(ticket("y")),
        lambda: net.progress[0].check_free("step()"),
        lambda: net.progress[0].wait(lambda: True, "barrier", list),
    ):
        with pytest.raises(
            ShutDownError, match=r"rank 0 gave up: test 'x' .*shutdown\(\) and init"
        ):
            refused()
    assert len(told) == 5  # each time: a signal handler may have broken it off
    assert net.controls[1].state(0)[0] is RankState.GAVE_UP
    with pytest.raises(CollectiveTimeoutError, match="rank 1 needs rank 0, which takes part in no"):
        right.call(ticket("z"))
    assert net.progress[1].abandoned


def test_a_handles_own_timeout_gives_nothing_up():
    net = Network(2)
    left, right = net.matchers()
    call = left.submit(ticket("x"))
    with pytest.raises(CollectiveTimeoutError):
        left.wait(call, timeout_s=0.01)
    assert not net.progress[0].abandoned
    right.submit(ticket("x"))
    right.advance()
    left.wait(call)


def test_an_alarm_at_every_point_of_giving_up_leaves_a_rank_that_refuses():
    def scenario(interrupter):
        net = Network(2)
        progress = net.progress[0]
        with suppress(Alarm), interrupter:
            progress.give_up("rank 0 gave up: a test")
        if not progress.abandoned:
            return  # it had not begun
        with pytest.raises(ShutDownError):
            progress.refuse("barrier")
        assert net.controls[1].state(0)[0] is RankState.GAVE_UP
        assert not progress._active

    assert at_every_point(scenario, Alarm, "progress.py") > 2


def test_an_alarm_at_every_point_of_a_wait_leaves_no_wait_behind(lines):
    def scenario(interrupter):
        net = Network(2)
        progress = Progress(net.controls[0], 5.0, Watch(net.controls[0], 1e-3, 0.0, False))
        start = time.monotonic()
        with suppress(Alarm), interrupter:
            progress.wait(lambda: time.monotonic() > start + 0.03, "a test", lambda: [1])
        assert not progress.is_busy
        progress.wait(lambda: True, "another", list)
        jotting = net.controls[1].jotted(0)
        assert jotting is None or not jotting.waits

    # Distinct places are few, but a wait passes them many times: the first dozens will do.
    class Enough(Exception):
        pass

    def limited(interrupter):
        if interrupter.target > 60:
            raise Enough
        scenario(interrupter)

    with pytest.raises(Enough):
        at_every_point(limited, Alarm, "progress.py", "stall.py")


def test_the_settings_reach_the_watch():
    config = Config(stall_check_time_seconds=3, stall_shutdown_time_seconds=9)
    assert config.stall_stacks
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (3, 9)
