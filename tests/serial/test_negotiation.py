"""The matching layer over a fake network of ranks: nothing is lost, mixed or doubled."""

import enum
import random
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import Network, together
from hvdlite import progress as progress_module
from hvdlite.arithmetic import Reduction
from hvdlite.backends.base import RankState
from hvdlite.errors import (
    CollectiveTimeoutError,
    HorovodInternalError,
    MismatchError,
    RankFailedError,
)
from hvdlite.ticket import Terms, Ticket, even_segment
from hvdlite.transfer import Transfer
from hvdlite.types import Average, Sum
from interrupts import Alarm, Interrupter, Timeout, at_every_point

PIECE = 40_000  # bytes; a call itself carries up to 32 KiB
SIZES = [0, 1, 1000, 32 * 1024, 32 * 1024 + 8, 100_000]


def gather(name, ranks, rank, nbytes, *, set_id=0, signature=()):
    """A call whose result is everybody's bytes."""
    data = np.full(nbytes + rank, 16 * rank + nbytes % 13, np.uint8)  # sizes may differ
    terms = Terms(set_id, ranks, (("kind", "gather"), *signature))
    return Ticket(terms, name, data, lambda parts: [part.tobytes() for part in parts])


def total(name, ranks, rank, nbytes, *, set_id=0, op=Sum):
    """A call whose result is the sum over the ranks."""
    data = np.arange(nbytes // 8, dtype=np.int64) * (rank + 1)
    segment = even_segment(Reduction(op, data.dtype, len(ranks)), 0, data.nbytes)
    terms = Terms(set_id, ranks, (("kind", "total"), ("dtype", "int64")), segments=[segment])
    bytes_of = data.view(np.uint8)
    return Ticket(terms, name, bytes_of, lambda parts: [part.tobytes() for part in parts])


def expected(ticket, rank):
    """What every member must get."""
    ranks, nbytes = ticket.terms.ranks, ticket.data.size
    if ticket.terms.kind == "total":
        weight = sum(r + 1 for r in ranks)
        return [(np.arange(nbytes // 8, dtype=np.int64) * weight).tobytes()]
    base = nbytes - rank
    return [bytes([16 * r + base % 13]) * (base + r) for r in ranks]


def assert_right(ticket, matcher):
    assert ticket.done
    assert matcher.wait(ticket) == expected(ticket, matcher.rank)


def assert_nothing_is_left(matchers):
    for matcher in matchers:
        for name in [
            "open",
            "meetings",
            "woken",
            "transfers",
            "incoming",
            "announced",
            "early",
            "unposted",
        ]:
            assert not getattr(matcher, f"_{name}"), f"rank {matcher.rank}: {name}"


def drive(matchers, tickets, rng=None, interrupter=None):
    """Advance the ranks, in random turns, until all is done; how often it was interrupted."""
    num_interrupts = 0
    for _ in range(3000):
        order = list(matchers)
        if rng is not None:
            rng.shuffle(order)
        for matcher in order:
            if interrupter is None:
                matcher.advance()
                continue
            try:
                with interrupter:
                    matcher.advance()
            except (Alarm, Timeout):
                num_interrupts += 1
        if all(ticket.done for ticket in tickets):
            return num_interrupts
    raise AssertionError(
        f"lost: {[(t.name, t.terms.ranks, t.serial, t.is_matched) for t in tickets if not t.done]}"
    )


@st.composite
def programs(draw, num_calls=6):
    """Ranks and the calls of a program: kind, members, size."""
    size = draw(st.integers(2, 4))
    sets = [s for s in ((0,), (0, 1), (1, 2), (0, 2, 3), tuple(range(size))) if max(s) < size]
    calls = draw(
        st.lists(
            st.tuples(
                st.sampled_from([gather, total]), st.sampled_from(sets), st.sampled_from(SIZES)
            ),
            min_size=1,
            max_size=num_calls,
        )
    )
    return size, [(kind, ranks, nbytes - nbytes % 8) for kind, ranks, nbytes in calls]


def submit_in_any_order(network, matchers, calls, rng, interrupter=None):
    """Each rank makes its calls in an order of its own, with random messages in between."""
    todo = []
    for rank, matcher in enumerate(matchers):
        own = [
            (matcher, kind(f"call {k}", ranks, rank, nbytes, set_id=hash(ranks)))
            for k, (kind, ranks, nbytes) in enumerate(calls)
            if rank in ranks
        ]
        rng.shuffle(own)
        todo.append(own)
    tickets = []
    while any(todo):
        own = rng.choice([own for own in todo if own])
        matcher, ticket = own.pop()
        matcher.submit(ticket)
        tickets.append((ticket, matcher))
        if rng.random() < 0.5:
            rng.choice(matchers).advance()
    drive(matchers, [ticket for ticket, _ in tickets], rng, interrupter)
    for ticket, matcher in tickets:
        assert_right(ticket, matcher)
    for _ in range(50):
        for matcher in matchers:
            matcher.advance()
    assert_nothing_is_left(matchers)


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.8]))
def test_calls_match_by_name_whatever_their_order(program, seed, refusals):
    size, calls = program
    rng = random.Random(seed)
    network = Network(size, rng, max_payload=PIECE, refusals=refusals)
    submit_in_any_order(network, network.matchers(), calls, rng)


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 2**32))
def test_messages_that_come_twice_do_no_harm(program, seed):
    size, calls = program
    rng = random.Random(seed)
    network = Network(size, rng, max_payload=PIECE, refusals=0.2, repeats=0.5)
    submit_in_any_order(network, network.matchers(), calls, rng)


@settings(max_examples=25, deadline=None)
@given(programs(num_calls=3), st.integers(0, 2**32), st.integers(1, 3000), st.booleans())
def test_an_alarm_anywhere_in_advance_loses_nothing(program, seed, target, is_exception):
    size, calls = program
    rng = random.Random(seed)
    network = Network(size, rng, max_payload=PIECE, refusals=0.2, repeats=0.2)
    interrupter = Interrupter(target, Timeout if is_exception else Alarm, "negotiation.py")
    submit_in_any_order(network, network.matchers(), calls, rng, interrupter)


@pytest.mark.parametrize("error", [Alarm, Timeout], ids=["BaseException", "Exception"])
@pytest.mark.parametrize("kind", [gather, total])
@pytest.mark.parametrize("nbytes", [800, 100_000], ids=["small", "large"])
def test_an_alarm_at_every_point_of_advance_gets_out_and_loses_nothing(kind, nbytes, error):
    def scenario(interrupter):
        network = Network(2, max_payload=PIECE)
        matchers = network.matchers()
        for _ in range(2):  # the second call of the same name works too
            tickets = [m.submit(kind("x", (0, 1), m.rank, nbytes)) for m in matchers[::-1]]
            before = interrupter.where
            num_interrupts = drive(matchers, tickets, interrupter=interrupter)
            assert num_interrupts == (interrupter.where != before), "the alarm was swallowed"
            for ticket, matcher in zip(tickets, matchers[::-1], strict=True):
                assert_right(ticket, matcher)
        for matcher in matchers:
            matcher.advance()
        assert_nothing_is_left(matchers)

    assert at_every_point(scenario, error, "negotiation.py") > 100


@pytest.mark.parametrize("interrupted", [0, 2])
@pytest.mark.parametrize("kind", [gather, total])
def test_an_alarm_while_the_others_make_the_next_call_of_that_name(kind, interrupted):
    def scenario(interrupter):
        matchers = Network(3).matchers()
        left = [[8, 16, 24] for _ in matchers]
        tickets = [m.submit(kind("x", (0, 1, 2), m.rank, left[m.rank].pop(0))) for m in matchers]
        for _ in range(40):
            for rank, matcher in enumerate(matchers):
                if rank == interrupted:
                    with suppress(Alarm), interrupter:
                        matcher.advance()
                else:
                    matcher.advance()
                if tickets[rank].done and left[rank]:
                    assert_right(tickets[rank], matcher)
                    tickets[rank] = matcher.submit(kind("x", (0, 1, 2), rank, left[rank].pop(0)))
        assert not any(left)
        for ticket, matcher in zip(tickets, matchers, strict=True):
            assert_right(ticket, matcher)
        assert_nothing_is_left(matchers)

    assert at_every_point(scenario, Alarm, "negotiation.py") > 100


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_calls_of_one_name_pair_up_in_the_order_in_which_each_rank_makes_them(seed, size, data):
    rng = random.Random(seed)
    network = Network(size, rng, max_payload=PIECE, refusals=0.3, repeats=0.3)
    matchers = network.matchers()
    ranks = tuple(range(size))
    sizes = data.draw(st.lists(st.sampled_from([8, 16, 40_000]), min_size=2, max_size=4))
    left = [list(sizes) for _ in matchers]
    current = [None] * size
    for _ in range(5000):
        for rank, matcher in enumerate(matchers):
            ticket = current[rank]
            if ticket is not None and ticket.done:
                assert_right(ticket, matcher)
                current[rank] = None
            if current[rank] is None and left[rank] and rng.random() < 0.5:
                current[rank] = matcher.submit(gather("loss", ranks, rank, left[rank].pop(0)))
            if rng.random() < 0.7:
                matcher.advance()
        if not any(left) and not any(current):
            break
    assert not any(left)
    assert not any(current)


def test_a_refused_call_is_not_overtaken_by_a_later_one():
    network = Network(2)
    matchers = network.matchers()
    post, refused = network.controls[0].post, []

    def refuse(to, header, payload=b""):
        if b"first" in payload and len(refused) < 3:
            refused.append(header)
            return False
        return post(to, header, payload)

    network.controls[0].post = refuse
    tickets = [
        matcher.submit(gather(name, (0, 1), matcher.rank, 8))
        for name in ("first", "second")
        for matcher in matchers
    ]
    drive(matchers, tickets)
    assert len(refused) == 3


def test_calls_that_had_to_wait_travel_together_as_many_as_fit():
    network = Network(2)
    matchers = network.matchers()
    for control in network.controls:
        control.max_payload = 10_000  # which the fake checks
    post, posts = network.controls[0].post, []
    network.controls[0].post = lambda *_: False  # no room
    tickets = [matchers[0].submit(gather(f"{k:0500}", (0, 1), 0, 3 * (k % 7))) for k in range(100)]
    network.controls[0].post = lambda *args: posts.append(args) or post(*args)
    tickets += [matchers[1].submit(gather(f"{k:0500}", (0, 1), 1, 3 * (k % 7))) for k in range(100)]
    drive(matchers, tickets)
    for ticket, matcher in zip(tickets, [matchers[0]] * 100 + [matchers[1]] * 100, strict=True):
        assert_right(ticket, matcher)
    assert 10 < len(posts) < 60


# --- mismatches


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 4),
    st.sampled_from([("shape", (3,), (4,)), ("dtype", "int8", "int16"), ("root_rank", 0, 1)]),
    st.data(),
)
def test_a_mismatch_is_the_same_error_on_every_member_and_the_next_call_works(
    seed, size, field, data
):
    rng = random.Random(seed)
    network = Network(size, rng, max_payload=PIECE, refusals=0.3, repeats=0.3)
    matchers = network.matchers()
    ranks = tuple(range(size))
    odd = data.draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=size - 1, unique=True))
    what, common, other = field
    nbytes = data.draw(st.sampled_from([8, 100_000]))
    tickets = [
        m.submit(
            gather(
                "x",
                ranks,
                m.rank,
                nbytes,
                signature=[("op", "Sum"), (what, other if m.rank in odd else common)],
            )
        )
        for m in matchers
    ]
    drive(matchers, tickets, rng)
    texts = set()
    for matcher, ticket in zip(matchers, tickets, strict=True):
        with pytest.raises(MismatchError, match=f"gather 'x'.*\n  {what}: ") as caught:
            matcher.wait(ticket)
        texts.add(str(caught.value))
    (text,) = texts
    for value, who in ((other, odd), (common, set(ranks) - set(odd))):
        listed = ", ".join(str(r) for r in sorted(who))
        assert f"rank{'s' * (len(who) > 1)} {listed}: {value}" in text
    assert "op" not in text  # what agrees is not told
    again = [m.submit(gather("x", ranks, m.rank, nbytes)) for m in matchers]
    drive(matchers, again, rng)
    for matcher, ticket in zip(matchers, again, strict=True):
        assert_right(ticket, matcher)


def test_a_field_that_one_rank_lacks_is_a_mismatch_that_names_it():
    matchers = Network(2).matchers()
    tickets = [
        matchers[0].submit(gather("x", (0, 1), 0, 8, signature=[("root_rank", 0)])),
        matchers[1].submit(gather("x", (0, 1), 1, 8)),
    ]
    drive(matchers, tickets)
    texts = []
    for matcher, ticket in zip(matchers, tickets, strict=True):
        with pytest.raises(MismatchError, match="root_rank: rank 0: 0") as caught:
            matcher.wait(ticket)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_equal_names_in_two_sets_are_two_calls():
    matchers = Network(3).matchers()
    tickets = [(m, m.submit(gather("x", (0, 1, 2), m.rank, 8, set_id=0))) for m in matchers]
    tickets += [
        (m, m.submit(gather("x", (0, 2), m.rank, 16, set_id=1))) for m in (matchers[0], matchers[2])
    ]
    drive(matchers, [ticket for _, ticket in tickets])
    for matcher, ticket in tickets:
        assert_right(ticket, matcher)


# --- how the data travels


def test_small_data_travels_with_the_call():
    network = Network(3)
    matchers = network.matchers()
    drive(matchers, [m.submit(gather("x", (0, 1, 2), m.rank, 32 * 1024 - 2)) for m in matchers])
    assert network.num_posted == 3


def test_a_large_gather_sends_each_byte_once():
    network = Network(3, max_payload=PIECE)
    matchers = network.matchers()
    drive(matchers, [m.submit(gather("x", (0, 1, 2), m.rank, 2 * PIECE)) for m in matchers])
    # Each: the call, and pieces of 40,000 bytes to all others at once.
    assert network.num_posted == 3 + (2 + 3 + 3)


def test_a_large_reduction_moves_two_shares_a_rank():
    network = Network(2, max_payload=PIECE)
    matchers = network.matchers()
    tickets = [m.submit(total("x", (0, 1), m.rank, 2 * PIECE)) for m in matchers]
    drive(matchers, tickets)
    for matcher, ticket in zip(matchers, tickets, strict=True):
        assert_right(ticket, matcher)
    assert network.num_posted == 2 + 2 + 2  # calls, shares to their owners, results back


def test_a_large_reduction_that_does_not_divide_by_the_ranks():
    for count in (4097, 4099, 5000):
        matchers = Network(3, max_payload=PIECE).matchers(block_elements=100)
        tickets = [m.submit(total("x", (0, 1, 2), m.rank, 8 * count)) for m in matchers]
        drive(matchers, tickets)
        for matcher, ticket in zip(matchers, tickets, strict=True):
            assert_right(ticket, matcher)


def test_the_callers_data_is_left_as_it_is():
    matchers = Network(2).matchers()
    for nbytes in (80, 80_000):
        tickets = [total("x", (0, 1), m.rank, nbytes, op=Average) for m in matchers]
        before = [t.data.tobytes() for t in tickets]
        for matcher, ticket in zip(matchers, tickets, strict=True):
            ticket.data.flags.writeable = False
            matcher.submit(ticket)
        drive(matchers, tickets)
        for matcher, ticket in zip(matchers, tickets, strict=True):
            assert matcher.wait(ticket) == [(np.arange(nbytes // 8) * 3 // 2).tobytes()]
        assert [t.data.tobytes() for t in tickets] == before


def test_a_set_of_one_rank_needs_no_message():
    network = Network(2)
    matcher = network.matchers()[1]
    for kind, nbytes in ((gather, 8), (gather, 10**5), (total, 80), (total, 8 * 10**4)):
        ticket = matcher.submit(kind("alone", (1,), 1, nbytes))
        assert not ticket.done  # whoever polls at once must see it under way
        matcher.advance()
        assert_right(ticket, matcher)
    assert network.num_posted == 0


def test_counters_count_calls_and_this_ranks_bytes():
    network = Network(2)
    matchers = network.matchers()
    drive(matchers, [m.submit(gather("x", (0, 1), m.rank, 100)) for m in matchers])
    counters = network.progress[1].counters
    assert (counters.collectives, counters.bytes, counters.negotiations) == (1, 101, 1)
    matchers[1].wait(matchers[1].submit(gather("alone", (1,), 1, 100)))
    assert (counters.collectives, counters.bytes, counters.negotiations) == (1, 101, 2)


# --- what goes wrong on one rank


def test_a_name_that_is_still_under_way_is_a_value_error_and_sends_nothing():
    network = Network(2)
    matcher = network.matchers()[0]
    matcher.submit(gather("x", (0, 1), 0, 8))
    posted = network.num_posted
    with pytest.raises(ValueError, match=r"gather 'x'.*still under way on rank 0"):
        matcher.submit(gather("x", (0, 1), 0, 8))
    assert network.num_posted == posted


def test_a_name_that_is_too_long_is_a_value_error():
    network = Network(2)
    matcher = network.matchers()[0]
    matcher.submit(gather("x" * 512, (0, 1), 0, 8))
    with pytest.raises(ValueError, match="513 characters"):
        matcher.submit(gather("x" * 513, (0, 1), 0, 8))
    with pytest.raises(ValueError, match="at most 512"):
        matcher.submit(gather("ä" * 300, (0, 1), 0, 8))  # 600 bytes


@pytest.mark.parametrize("step", ["place", "finish"])
def test_an_error_of_one_ranks_own_is_its_own_and_the_next_call_works(step):
    def fails(*_):
        raise MemoryError("too large")

    matchers = Network(2).matchers()
    broken = gather("x", (0, 1), 0, 8)
    setattr(broken if step == "finish" else broken.terms, step, fails)
    fine = matchers[1].submit(gather("x", (0, 1), 1, 8))
    matchers[0].submit(broken)
    drive(matchers, [broken, fine])
    with pytest.raises(MemoryError, match="too large"):
        matchers[0].wait(broken)
    assert_right(fine, matchers[1])
    again = [m.submit(gather("x", (0, 1), m.rank, 8)) for m in matchers]
    drive(matchers, again)
    for matcher, ticket in zip(matchers, again, strict=True):
        assert_right(ticket, matcher)


def test_calls_that_a_signal_handler_makes_in_the_middle_of_another_are_not_lost():
    matchers = Network(2).matchers()
    made = []

    def interrupted(name, prepare):
        """The handler comes after the call has its number, and makes another one."""

        def run(serial, epoch):
            prepare(serial, epoch)
            if name not in [ticket.name for ticket in made]:
                made.append(gather(name, (0, 1), 0, 8))
                matchers[0].submit(made[-1])

        return run

    outer = gather("outer", (0, 1), 0, 8)
    outer.prepare = interrupted("inner", outer.prepare)
    tickets = [outer, matchers[0].submit(outer) and made[0]]
    others = [matchers[1].submit(gather(t.name, (0, 1), 1, 8)) for t in tickets]
    drive(matchers, tickets + others)
    for ticket, matcher in zip(
        tickets + others, [matchers[0]] * 2 + [matchers[1]] * 2, strict=True
    ):
        assert_right(ticket, matcher)
    assert_nothing_is_left(matchers)


def test_a_name_of_a_kind_of_its_own_travels_as_plain_text():
    class Loss(enum.StrEnum):
        TOTAL = "total"

    for name in (Loss.TOTAL, np.str_("total"), type("Text", (str,), {})("total")):
        matchers = Network(2).matchers()
        tickets = [m.submit(gather(name, (0, 1), m.rank, 8)) for m in matchers]
        assert [type(ticket.name) for ticket in tickets] == [str, str]
        drive(matchers, tickets)
        for ticket, matcher in zip(tickets, matchers, strict=True):
            assert_right(ticket, matcher)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_without_memory_for_its_share_tells_the_others(size, seed, monkeypatch):
    network = Network(size, random.Random(seed), max_payload=PIECE, refusals=0.3, repeats=0.3)
    matchers, ranks = network.matchers(), tuple(range(size))
    tickets = [m.submit(total("x", ranks, m.rank, 10 * PIECE)) for m in matchers]

    def plan(self, ticket):
        if self._rank == 0:
            raise MemoryError("no room")
        plan_reduction(self, ticket)

    plan_reduction = Transfer._plan_reduction
    monkeypatch.setattr(Transfer, "_plan_reduction", plan)
    drive(matchers, tickets, network.rng)
    with pytest.raises(MemoryError, match="no room"):
        matchers[0].wait(tickets[0])
    for matcher, ticket in zip(matchers[1:], tickets[1:], strict=True):
        with pytest.raises(HorovodInternalError, match="rank 0: MemoryError: no room"):
            matcher.wait(ticket)
    monkeypatch.undo()
    again = [m.submit(total("x", ranks, m.rank, 10 * PIECE)) for m in matchers]
    drive(matchers, again, network.rng)
    for matcher, ticket in zip(matchers, again, strict=True):
        assert_right(ticket, matcher)
    for _ in range(50):
        for matcher in matchers:
            matcher.advance()
    assert_nothing_is_left(matchers)


def test_a_call_that_was_broken_off_finishes_by_itself_and_its_name_is_free():
    network = Network(2)
    matchers = network.matchers()

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    network.progress[0].add("alarm", stop)
    broken = gather("x", (0, 1), 0, 8)
    with pytest.raises(Stop):
        matchers[0].call(broken)
    network.progress[0].remove("alarm")
    second = matchers[0].submit(gather("x", (0, 1), 0, 16))
    others = [matchers[1].submit(gather("x", (0, 1), 1, 8))]
    drive(matchers, [broken, *others])
    assert not second.done
    others.append(matchers[1].submit(gather("x", (0, 1), 1, 16)))
    drive(matchers, [second, *others])
    for ticket, rank in ((broken, 0), (second, 0), (others[0], 1), (others[1], 1)):
        assert_right(ticket, matchers[rank])


@pytest.mark.parametrize("nbytes", [800, 100_000], ids=["small", "large"])
def test_a_call_that_an_alarm_broke_off_at_any_point_can_be_made_again(nbytes):
    def scenario(interrupter):
        network = Network(2, max_payload=PIECE)
        matchers = network.matchers()
        made = []

        def peer():
            with interrupter.paused():
                if len(made) < 2 and (not made or made[-1].done):
                    made.append(matchers[1].submit(gather("x", (0, 1), 1, nbytes)))
                return matchers[1].advance()

        network.progress[0].add("peer", peer)
        ticket = gather("x", (0, 1), 0, nbytes)
        try:
            with interrupter:
                result = matchers[0].call(ticket)
        except Alarm:
            result = matchers[0].call(gather("x", (0, 1), 0, nbytes))
        assert result == expected(ticket, 0)
        assert_right(made[0], matchers[1])

    assert at_every_point(scenario, Alarm, "negotiation.py", "progress.py") > 100


def test_a_call_whose_submission_an_alarm_broke_off_can_be_submitted_after_another():
    def scenario(interrupter):
        matchers = Network(2).matchers()
        first, second = (gather(name, (0, 1), 0, 8) for name in ("first", "second"))
        with suppress(Alarm), interrupter:
            matchers[0].submit(first)
        matchers[0].submit(second)
        matchers[0].submit(first)  # says nothing new, if the first time did
        others = [matchers[1].submit(gather(t.name, (0, 1), 1, 8)) for t in (first, second)]
        drive(matchers, [first, second, *others])
        for ticket in (first, second):
            assert_right(ticket, matchers[0])
        for ticket in others:
            assert_right(ticket, matchers[1])
        assert_nothing_is_left(matchers)

    assert at_every_point(scenario, Alarm, "negotiation.py") > 10


def test_a_call_made_while_this_rank_waits_is_refused_before_anything_is_sent():
    network = Network(2)
    matcher = network.matchers()[0]
    refused = []

    def call_again():
        posted = network.num_posted
        for call in (
            lambda: matcher.call(gather("y", (0, 1), 0, 8)),
            lambda: matcher.exchange(0, (0, 1), "thing", 1),
        ):
            with pytest.raises(RuntimeError, match="already waiting in gather 'x'"):
                call()
        assert network.num_posted == posted
        refused.append(True)
        network.progress[0].remove("handler")
        network.queues[1, 0].extend(network.queues[0, 1])  # the peer's call is just like ours
        return True

    network.progress[0].add("handler", call_again)
    assert len(matcher.call(gather("x", (0, 1), 0, 8))) == 2
    assert refused
    assert matcher.unnamed(0, "\0thing").endswith(".0")  # not counted either


# --- waiting


def test_missing_names_the_ranks_whose_part_is_not_here():
    network = Network(4, max_payload=PIECE)
    matchers = network.matchers()
    ranks = (0, 1, 2, 3)
    tickets = [matchers[0].submit(gather("x", ranks, 0, 100_000))]
    assert matchers[0].missing(tickets[0]) == [1, 2, 3]
    tickets.append(matchers[2].submit(gather("x", ranks, 2, 100_000)))
    matchers[0].advance()
    assert matchers[0].missing(tickets[0]) == [1, 3]
    tickets += [matchers[r].submit(gather("x", ranks, r, 100_000)) for r in (1, 3)]
    for matcher in (matchers[3], matchers[0]):  # 3 has matched and sent; 1 and 2 have not
        matcher.advance()
    matchers[0].advance()
    assert matchers[0].missing(tickets[0]) == [1, 2]
    drive(matchers, tickets)


def test_a_wait_that_times_out_leaves_the_call_under_way():
    matchers = Network(3).matchers()
    ticket = matchers[0].submit(gather("x", (0, 1, 2), 0, 8))
    others = [matchers[1].submit(gather("x", (0, 1, 2), 1, 8))]
    matchers[0].advance()
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"gather 'x': .* 0\.05 s; missing: rank 2"):
        matchers[0].wait(ticket, 0.05)
    assert time.monotonic() - start < 10
    others.append(matchers[2].submit(gather("x", (0, 1, 2), 2, 8)))
    drive(matchers, [ticket, *others])
    assert_right(ticket, matchers[0])


@pytest.mark.parametrize(
    ("state", "note", "words"),
    [
        (RankState.FAILED, "ValueError: boom", "rank 1, which failed: ValueError: boom"),
        (RankState.FAILED, "its process (pid 7) is gone", r"rank 1, .* \(pid 7\) is gone"),
        (RankState.LEFT, "", "rank 1, which has left"),
    ],
)
def test_a_rank_that_will_not_come_ends_the_wait(state, note, words, monkeypatch):
    network = Network(3)
    monkeypatch.setattr(progress_module, "_ABORT_GRACE_S", 0.02)
    monkeypatch.setattr(progress_module, "_GONE_GRACE_S", 0.02)
    network.progress[0]._exit_grace_s = 0.02
    matchers = network.matchers()
    network.controls[0].states[2] = (RankState.FAILED, "nobody waits for this one")
    network.controls[0].states[1] = (state, note)
    ticket = matchers[0].submit(gather("x", (0, 1), 0, 8))
    with pytest.raises(RankFailedError, match="gather 'x': rank 0 waits for " + words):
        matchers[0].wait(ticket)


# --- exchange and agree


def test_exchange_hands_out_everybodys_value_in_rank_order():
    matchers = Network(3).matchers()
    values = [{"a": 1}, "x" * 100_000, None]
    found = together(
        3, lambda r: [matchers[r].exchange(0, (0, 1, 2), "thing", values[r]) for _ in range(3)]
    )
    assert found == [[values] * 3] * 3


def test_agree_takes_contents_as_a_set():
    matchers = Network(2).matchers()
    contents = [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]
    assert together(2, lambda r: matchers[r].agree(0, (0, 1), "maker", None, contents[r])) == [
        None,
        None,
    ]


def test_agree_raises_a_ranks_own_error_there_and_quotes_it_elsewhere():
    matchers = Network(3).matchers()
    own = ValueError("bad lr")
    found = together(
        3,
        lambda r: matchers[r].agree(0, (0, 1, 2), "maker", own if r == 1 else None, {"r": str(r)}),
    )
    assert found[1] is own
    for r in (0, 2):
        assert type(found[r]) is HorovodInternalError
        assert "maker failed on another rank" in str(found[r])
        assert "rank 1: ValueError: bad lr" in str(found[r])


def test_agree_names_items_ranks_and_descriptions_that_differ():
    matchers = Network(3).matchers()
    contents = [
        {"w": "shape (2,)", "same": "1"},
        {"w": "shape (3,)", "same": "1"},
        {"w": "shape (2,)", "same": "1", "extra": "shape ()"},
    ]
    found = together(3, lambda r: matchers[r].agree(0, (0, 1, 2), "maker", None, contents[r]))
    assert {type(exc) for exc in found} == {MismatchError}
    (text,) = {str(exc) for exc in found}
    assert text.splitlines() == [
        "maker: the ranks do not pass the same",
        "  w: shape (2,) on ranks [0, 2]; shape (3,) on ranks [1]",
        "  extra: shape () on ranks [2]; missing on ranks [0, 1]",
    ]


def test_agree_tells_ten_items_at_most():
    matchers = Network(2).matchers()
    found = together(
        2,
        lambda r: matchers[r].agree(0, (0, 1), "m", None, {f"p{k:02d}": str(r) for k in range(13)}),
    )
    lines = str(found[0]).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "  and 3 more"
