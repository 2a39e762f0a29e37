"""The control page: several ranks of one process look at one segment."""

import os
import random
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import together
from hvdlite.backends import page as page_module
from hvdlite.backends import segment as segment_module
from hvdlite.backends.base import Jotting, RankState
from hvdlite.backends.page import MAX_RANKS, ControlPage, fence, is_running, shared_segment
from hvdlite.errors import BackendUnavailableError
from interrupts import Alarm, at_every_point

ARENA = 2 * 2**20


class Share:
    """`MPI.Comm.allgather` for the ranks of one process, in two rounds at most."""

    def __init__(self, size):
        from threading import Barrier

        self.said = [None] * size
        self.barrier = Barrier(size, timeout=20)

    def of(self, rank):
        def share(word):
            self.said[rank] = word
            self.barrier.wait()
            everything = list(self.said)
            self.barrier.wait()
            return everything

        return share


def make_pages(size, arena=ARENA):
    share = Share(size)
    pages = together(size, lambda r: ControlPage(r, size, arena, share.of(r)))
    for made in pages:
        assert isinstance(made, ControlPage), made
    return pages


@pytest.fixture(scope="module")
def three():
    """Three ranks; every test starts and ends with empty tables, for all have read all."""
    return make_pages(3)


@pytest.fixture
def pages(three):
    yield three
    for page in three:
        page.poll(lambda *_: None)


def received(page):
    """What has come since the last time: (author, header, payload)."""
    messages = []
    page.poll(lambda author, header, payload: messages.append((author, header, bytes(payload))))
    return messages


def test_messages_come_to_their_readers_in_order_and_once(pages):
    a, b, c = pages
    assert a.post([1, 2], ("both", 1), b"xyz")
    assert a.post([1], ("b alone",))
    assert a.post([2], ("c alone", None, 2.5, True, ("nested", b"\0")), memoryview(b"")[:])
    assert received(b) == [(0, ("both", 1), b"xyz"), (0, ("b alone",), b"")]
    assert received(c) == [
        (0, ("both", 1), b"xyz"),
        (0, ("c alone", None, 2.5, True, ("nested", b"\0")), b""),
    ]
    for page in pages:
        assert not page.poll(lambda *_: pytest.fail("came twice"))


def test_a_message_for_nobody_is_read_by_nobody(pages):
    a, b, _ = pages
    assert a.post([], ("nobody",))
    assert received(b) == []


def test_payloads_of_every_size_arrive_whole(pages):
    a, b, _ = pages
    for size in (0, 1, 100, 2048, *range(4050, 4100, 3), 60_000, a.max_payload):
        payloads = [random.Random(size + k).randbytes(size) for k in range(3)]
        for payload in payloads:  # one that needs more than its entry would spoil its neighbour
            assert a.post([1], ("p", size), payload)
        assert received(b) == [(0, ("p", size), payload) for payload in payloads]


def test_a_payload_is_copied_before_post_returns(pages):
    a, b, _ = pages
    data = bytearray(b"before")
    assert a.post([1], ("p",), memoryview(data))
    data[:] = b"after!"
    assert received(b) == [(0, ("p",), b"before")]


def test_a_full_table_refuses_until_its_readers_have_read(pages):
    a, b, c = pages
    posted = 0
    while a.post([1, 2], (posted,)):
        posted += 1
        assert posted < 10_000
    assert posted >= 200
    assert a.post([1], ("large",), bytes(50_000))  # of which there is room
    assert [h for _, h, _ in received(b)] == [*((k,) for k in range(posted)), ("large",)]
    assert not a.post([1], ("more",))  # c has read nothing
    assert [h for _, h, _ in received(c)] == [(k,) for k in range(posted)]
    for k in range(posted):
        assert a.post([1, 2], (k,))
    assert not a.post([1, 2], ("more",))


def test_large_messages_have_room_of_their_own(pages):
    a, b, _ = pages
    posted = 0
    while a.post([1], (posted,), bytes([posted]) * 100_000):
        posted += 1
        assert posted < 10_000
    assert posted >= 4
    assert a.post([1], ("small",))
    assert received(b) == [
        *((0, (k,), bytes([k]) * 100_000) for k in range(posted)),
        (0, ("small",), b""),
    ]


def test_entries_are_used_again_thousands_of_times(pages):
    a, b, _ = pages
    for k in range(3000):
        assert a.post([1], (k,), bytes([k % 251]) * (k % 7))
        if k % 5 == 0:
            got = received(b)
    got = received(b)
    assert got == [(0, (k,), bytes([k % 251]) * (k % 7)) for k in (2996, 2997, 2998, 2999)]


def test_a_reader_that_lags_behind_thousands_of_messages_gets_its_own_in_order(pages):
    a, b, c = pages
    sent = []
    for k in range(2500):
        if k % 100 == 99:  # the last one too
            assert a.post([1, 2], ("b too", k))
            sent.append((0, ("b too", k), b""))
        else:
            assert a.post([2], ("c", k))
        assert len(received(c)) == 1
    assert received(b) == sent


class Slow:
    """A row as its reader or its author sees it: at the n-th access somebody else has a turn.

    Args:
        words: The row.
        turn: What the other one does.
        when: At which access, counted from 0.
    """

    def __init__(self, words, turn, when):
        self.words, self.turn, self.when = words, turn, when
        self.count = 0

    def _pass(self):
        self.count += 1
        if self.count == self.when + 1:
            self.turn()

    def __getitem__(self, key):
        value = self.words[key]
        self._pass()
        return value

    def __setitem__(self, key, value):
        self.words[key] = value
        self._pass()


def fill_with_messages_for_b(a, b):
    """All large entries hold messages that `b` has read, and `c` did not look at yet."""
    count = 0
    while a.post([1], ("b", count), bytes(5000)):
        count += 1
    received(b)
    assert count >= 4


def test_a_reader_never_takes_an_entry_that_is_used_again_for_the_old_message(pages):
    # A reader was descheduled between looking at the serial number and at the mask of an entry; its
    # author meanwhile used the entry again, for a message to this reader: that came too early, and
    # those before it were lost.
    a, b, c = pages
    words, count, when = c._words[0], 1, 0
    while when < count:
        received(c)
        fill_with_messages_for_b(a, b)
        assert a.post([2], ("c", 0), bytes(5000))
        assert a.post([2], ("c", 1), bytes(5000))
        slow = Slow(words, lambda: a.post([2], ("c", 2), bytes(5000)), when)
        c._words[0] = slow
        got = []
        try:
            for _ in range(3):
                got += [header for _, header, _ in received(c)]
        finally:
            c._words[0] = words
        got += [header for _, header, _ in received(c)]
        assert got == [("c", 0), ("c", 1), ("c", 2)], f"at access {when}"
        count, when = slow.count, when + 1
    assert when > 20


def test_a_reader_that_looks_in_the_middle_of_a_post_sees_nothing_of_it(pages):
    a, b, c = pages
    words, count, when = a._mine, 1, 0
    while when < count:
        received(c)
        fill_with_messages_for_b(a, b)
        got = []
        slow = Slow(words, lambda got=got: got.extend(received(c)), when)
        a._mine = slow
        try:
            assert a.post([2], ("c", when), b"x" * 5000)
        finally:
            a._mine = words
        got += received(c)
        assert got == [(0, ("c", when), b"x" * 5000)], f"at access {when}"
        count, when = slow.count, when + 1
    assert when > 4


def test_an_author_that_laps_a_slow_reader_loses_none_of_its_messages(pages):
    a, b, c = pages
    words = c._words[0]
    for when in (1, 2, 5):
        for k in range(4):
            assert a.post([2], ("c", k))

        def lap():
            for k in range(600):
                assert a.post([1], ("b", k))
                received(b)

        c._words[0] = Slow(words, lap, when)
        try:
            got = [header for _, header, _ in received(c)]
        finally:
            c._words[0] = words
        assert got + [header for _, header, _ in received(c)] == [("c", k) for k in range(4)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_program_of_posts_and_polls_keeps_the_order_and_loses_nothing(three, seed):
    rng = random.Random(seed)
    pages = three
    for page in pages:
        received(page)
    sent, got = defaultdict(list), defaultdict(list)

    def read(page):
        for author, header, payload in received(page):
            assert payload == bytes([header[0] % 256]) * header[1]
            got[author, page.rank].append(header)

    for k in range(rng.choice([30, 300])):
        page = rng.choice(pages)
        if rng.random() < 0.7:
            readers = [r for r in range(3) if r != page.rank and rng.random() < 0.7]
            length = rng.choice([0, 1, 100, 5000, 100_000])
            if page.post(readers, (k, length), bytes([k % 256]) * length):
                for reader in readers:
                    sent[page.rank, reader].append((k, length))
        else:
            read(page)
    for page in pages:
        read(page)
    assert {k: v for k, v in got.items() if v} == {k: v for k, v in sent.items() if v}


def test_messages_reach_ranks_beyond_the_first_mask():
    size, readers = 65, []

    def share(word):
        if word is None:  # the second round: all have mapped it, and it has its name still
            for rank in (61, 62, 64):
                said = iter([[path[0]], [None]])
                readers.append(ControlPage(rank, size, ARENA, lambda _, said=said: next(said)))
        else:
            path.append(word)
        return [word]

    path = []
    author = ControlPage(0, size, ARENA, share)
    assert author.post([61, 64], ("x",))
    assert author.post([62], ("y",))
    assert [[h for _, h, _ in received(page)] for page in readers] == [[("x",)], [("y",)], [("x",)]]


# --- interrupted


def test_an_alarm_at_every_point_of_post_and_poll_loses_nothing(pages):
    a, b, c = pages
    sizes = (0, 100, 9000)

    def scenario(interrupter):
        got = []
        for size in sizes:
            posted = False
            while not posted:  # as the matching layer does: try again
                with suppress(Alarm), interrupter:
                    posted = a.post([1, 2], ("m", size), bytes(size))
            with suppress(Alarm), interrupter:
                b.poll(lambda _, header, payload: got.append((header, len(payload))))
        for _ in range(2):
            b.poll(lambda _, header, payload: got.append((header, len(payload))))
        assert list(dict.fromkeys(got)) == [(("m", size), size) for size in sizes]
        first = [got.index((("m", size), size)) for size in sizes]
        assert first == sorted(first)
        assert len(got) <= 2 * len(sizes)
        assert [h for _, h, _ in received(c)][-1] == ("m", 9000)

    assert at_every_point(scenario, Alarm, "page.py") > 50
    assert a.post([1, 2], ("last",))
    assert received(b) == [(0, ("last",), b"")]


def test_a_handler_that_raises_gets_its_messages_again(pages):
    a, b, _ = pages
    for k in range(3):
        assert a.post([1], (k,))
    seen = []

    def deliver(_author, header, _payload):
        seen.append(header[0])
        if seen == [0, 1]:
            raise Alarm

    with pytest.raises(Alarm):
        b.poll(deliver)
    assert b.poll(deliver)
    assert seen == [0, 1, 0, 1, 2]


# --- who is there


def test_states_only_grow_and_the_first_word_stands():
    a, b = make_pages(2)
    assert b.state(0) == (RankState.ALIVE, "")
    a.announce(RankState.FAILED, "ValueError: größe")
    assert b.state(0) == (RankState.FAILED, "ValueError: größe")
    a.announce(RankState.LEFT)
    a.close()
    assert b.state(0) == (RankState.FAILED, "ValueError: größe")
    b.close()
    assert a.state(1) == (RankState.LEFT, "")


@pytest.mark.parametrize(
    ("note", "shown"),
    [("", ""), ("x" * 5000, "x" * 1024), ("path \udce9", "path \\udce9"), ("ä" * 600, "ä" * 512)],
    ids=["none", "long", "surrogate", "wide"],
)
def test_any_note_of_a_failed_rank_can_be_told(note, shown):
    a, b = make_pages(2)
    a.announce(RankState.FAILED, note)
    assert b.state(0) == (RankState.FAILED, shown)


def test_what_a_rank_jots_down_can_be_read():
    a, b = make_pages(2)
    assert b.jotted(0).text == ""
    a.jot(False, "allreduce 'größe \udce9'", 17)
    a.jot(True)
    seen = b.jotted(0)
    assert seen._replace(age_s=0.0) == Jotting(
        "allreduce 'größe \\udce9'", 17, True, 0.0, "", False
    )
    assert 0 <= seen.age_s < 60
    a.tell("for rank 1" * 1000)
    assert b.jotted(0).story == ("for rank 1" * 1000)[:768]
    a.jot(False, "x" * 1000)
    assert b.jotted(0).story == ""  # it belonged to the last one
    assert b.jotted(0).text == "x" * 256
    a.offer_stack()
    assert b.jotted(0).shows_stack
    assert not b.jotted(1).shows_stack
    assert b.pid(0) == os.getpid()
    assert b.quitters() == []
    a.announce(RankState.GAVE_UP, "rank 0 gave up")
    assert b.quitters() == [0]
    assert b.state(0) == (RankState.GAVE_UP, "rank 0 gave up")
    a.announce(RankState.FAILED, "no more")
    assert b.state(0) == (RankState.GAVE_UP, "rank 0 gave up")


@pytest.mark.parametrize("end", ["left", "failed", "gone"])
def test_the_messages_to_a_dead_rank_do_not_fill_the_table(end, monkeypatch):
    a, b, c = make_pages(3)
    while a.post([1, 2], ("x",)):
        pass
    received(c)
    assert not a.post([1, 2], ("y",))
    if end == "gone":
        monkeypatch.setattr(page_module, "is_running", lambda _: False)
        a.check_alive([1])
        monkeypatch.undo()
        assert a.state(1) == (RankState.FAILED, f"its process (pid {os.getpid()}) is gone")
        assert c.state(1) == (RankState.ALIVE, "")  # as far as c knows
    else:
        b.announce(RankState.LEFT if end == "left" else RankState.FAILED)
    for k in range(300):
        assert a.post([1, 2], (k,))
        assert received(c) == [(0, (k,), b"")]


def test_looking_at_the_living_changes_nothing():
    a, b = make_pages(2)
    a.check_alive([0, 1])
    assert a.state(1) == (RankState.ALIVE, "")
    b.announce(RankState.LEFT)
    a.check_alive([1])
    assert a.state(1) == (RankState.LEFT, "")


def test_a_rank_that_left_before_its_process_ended_has_left(monkeypatch):
    a, b = make_pages(2)
    b.announce(RankState.LEFT)
    monkeypatch.setattr(page_module, "is_running", lambda _: False)
    a.check_alive([0, 1])
    assert a.state(1) == (RankState.LEFT, "")
    assert a.state(0) == (RankState.ALIVE, "")  # nobody looks at itself


def test_a_rank_that_has_not_written_its_pid_yet_is_not_gone():
    # Its peers' first look came between the segment's last exchange and the line that writes the
    # pid; it counted as gone for ever.
    a, b = make_pages(2)
    pid, b._mine[page_module._PID] = b._mine[page_module._PID], 0
    b._mine[page_module._STATE] = RankState.STARTING
    a.check_alive([1])
    assert a.state(1) == (RankState.STARTING, "")
    b._mine[page_module._PID] = pid
    b._mine[page_module._STATE] = RankState.ALIVE
    assert a.state(1) == (RankState.ALIVE, "")


def test_what_was_posted_is_flushed_without_help():
    a, _ = make_pages(2)
    assert a.flushed([1])


def test_is_running():
    assert is_running(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # its end, or nearly
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(child.pid)  # a zombie
    child.wait()
    child.stdout.close()
    assert not is_running(child.pid)


def test_fence_returns_on_every_machine(monkeypatch):
    fence()
    monkeypatch.setattr(page_module.platform, "machine", lambda: "aarch64")
    for _ in range(3):
        for step in page_module._make_fence_steps():
            step[0]()


# --- making the segment


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_module, "DIRECTORY", tmp_path)
    return tmp_path


def make_segments(size, nbytes=8192, refusals=()):
    share = Share(size)
    return together(
        size,
        lambda r: shared_segment(
            nbytes, r == 0, share.of(r), f"rank {r} refuses" if r in refusals else None
        ),
    )


def test_a_segment_is_one_memory_for_all_and_has_no_name_left(directory):
    segments = make_segments(3)
    for k, segment in enumerate(segments):
        segment.array[k] = k + 1
    for segment in segments:
        assert segment.array[:4].tolist() == [1, 2, 3, 0]
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("refusals", [(0,), (2,), (0, 1, 2)])
def test_a_rank_that_refuses_is_heard_on_all(directory, refusals):
    found = make_segments(3, refusals=refusals)
    for error in found:
        assert isinstance(error, BackendUnavailableError)
        for rank in refusals:
            assert f"rank {rank} refuses" in str(error)
    assert list(directory.iterdir()) == []


def test_a_segment_that_one_rank_cannot_map_is_had_by_none(directory, monkeypatch):
    attach = segment_module.Segment.attach
    calls = []

    def fails_once(path, nbytes):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(2, "another mount namespace")
        return attach(path, nbytes)

    monkeypatch.setattr(segment_module.Segment, "attach", fails_once)
    for error in make_segments(3):
        assert isinstance(error, BackendUnavailableError)
        assert "another mount namespace" in str(error)
    assert list(directory.iterdir()) == []


def test_a_segment_that_cannot_be_made_is_had_by_none(directory, monkeypatch):
    monkeypatch.setattr(segment_module, "DIRECTORY", directory / "absent")
    for error in make_segments(2):
        assert isinstance(error, BackendUnavailableError)
        assert "8192 bytes" in str(error)
        assert "absent" in str(error)


def test_an_exchange_that_fails_leaves_no_file(directory):
    def share(_word):
        raise RuntimeError("peers are gone")

    with pytest.raises(RuntimeError, match="peers are gone"):
        shared_segment(4096, True, share)
    assert list(directory.iterdir()) == []


def test_too_many_ranks_are_refused_with_both_numbers():
    with pytest.raises(
        BackendUnavailableError, match=f"{MAX_RANKS + 1} ranks.*at most {MAX_RANKS}"
    ):
        ControlPage(0, MAX_RANKS + 1, ARENA, lambda word: [word])
