"""Calls meet by name: whatever the order in which each rank starts its calls and waits for them.

All ranks draw the same calls, and each puts them into an order of its own.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from training import process_sets

pytestmark = pytest.mark.mpi(min_size=2)

NUM_CALLS = 200
ROUNDS = 2
COUNTS = (0, 1, 3, 50, 700, 12_000)  # the last ones are sent in pieces
DTYPES = ("int16", "int64", "float32", "float64", "complex128", ">i4")
KINDS = (
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "broadcast_",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
)
OPS = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "average": lambda parts: np.sum(parts, axis=0) // len(parts),
}


@pytest.fixture
def hvd(hvd_on_each_backend):
    return hvd_on_each_backend


@dataclass
class Planned:
    """One call, the same on all ranks."""

    k: int
    kind: str
    ps: Any
    count: int
    dtype: str
    op: str
    root: int
    name: str | None


def draw(rng, sets, k, kind=None, name=None):
    """The next call of a sequence that all ranks draw alike."""
    ps = rng.choice(sets)
    count = rng.choices(COUNTS, weights=(1, 2, 2, 2, 2, 1))[0]
    dtype = rng.choice(DTYPES)
    op = rng.choice(["sum", "max", "average"] if dtype != "complex128" else ["sum"])
    drawn = rng.choice(KINDS)
    return Planned(k, kind or drawn, ps, count, dtype, op, rng.choice(ps.ranks), name)


def value(call, rank, part=0, extra_rows=0):
    """What a rank hands in: multiples of 12, so that averages over 1 to 4 ranks are whole."""
    rows = np.arange(call.count + part + extra_rows) % 11
    return (12 * (rows + rank * (call.k % 3 + 1) + call.k % 29)).astype(call.dtype)


def rows_for(call, sender, receiver):
    """How many rows an alltoall sends; none to some."""
    return (call.count * ((sender + receiver + call.k) % 3)) // 2


def rows_to_send(call, sender):
    """All rows that a rank hands to an alltoall."""
    num_rows = sum(rows_for(call, sender, r) for r in call.ps.ranks)
    return np.resize(value(call, sender, 1), num_rows).astype(call.dtype)


def start(hvd, call, way):
    """Make this rank's call; returns what the verb returned."""
    rank, ranks = hvd.rank(), call.ps.ranks
    verb = call.kind.rstrip("_") + way + "_" * call.kind.endswith("_")
    options = {"name": call.name, "process_set": call.ps}
    if "reduce" in call.kind:
        options["op"] = call.op
    if call.kind.startswith("grouped"):
        args = ([value(call, rank, part) for part in range(3)],)
    elif call.kind.startswith("broadcast"):
        args = (value(call, rank), call.root)
    elif call.kind == "allgather":
        args = (value(call, rank, extra_rows=rank),)
    elif call.kind == "alltoall":
        splits = [rows_for(call, rank, r) for r in ranks]
        args = (rows_to_send(call, rank), splits)
    else:
        args = (value(call, rank),)
    return getattr(hvd, verb)(*args, **options)


def expected(call, rank):
    """A list of arrays, by NumPy alone."""
    ranks = call.ps.ranks
    parts = range(3) if call.kind.startswith("grouped") else range(1)
    if "reduce" in call.kind:
        found = [OPS[call.op]([value(call, r, p) for r in ranks]) for p in parts]
        found = [array.astype(call.dtype) for array in found]
        if "scatter" in call.kind:
            found = [np.array_split(array, len(ranks))[ranks.index(rank)] for array in found]
        return found
    if call.kind.startswith("broadcast"):
        return [value(call, call.root)]
    if call.kind == "grouped_allgather":
        return [np.concatenate([value(call, r, p) for r in ranks]) for p in parts]
    if call.kind == "allgather":
        return [np.concatenate([value(call, r, extra_rows=r) for r in ranks])]
    pieces = []
    for r in ranks:
        counts = [rows_for(call, r, other) for other in ranks]
        first = sum(counts[: ranks.index(rank)])
        pieces.append(rows_to_send(call, r)[first : first + counts[ranks.index(rank)]])
    return [np.concatenate(pieces)]


def check(call, rank, result):
    """Values, dtypes and shapes, exactly."""
    found = result
    if call.kind == "alltoall":
        array, received = result
        assert received.tolist() == [rows_for(call, r, rank) for r in call.ps.ranks]
        found = [array]
    elif not call.kind.startswith("grouped"):
        found = [result]
    wanted = expected(call, rank)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == np.dtype(call.dtype), call
        assert one.shape == other.shape, call
        np.testing.assert_array_equal(one, other, err_msg=str(call))


def pause(own):
    """Sometimes come late, so that peers see this rank in every state."""
    if own.random() < 0.03:
        time.sleep(own.uniform(0, 0.005))


def wait_somehow(hvd, own, handle):
    """Wait in one of the ways there are."""
    way = own.randrange(4)
    if way == 0:
        while not handle.done():
            pass
    elif way == 1:
        while True:
            try:
                return handle.wait(timeout=0.01)
            except TimeoutError:
                pass
    elif way == 2:
        return hvd.synchronize(handle)
    return handle.wait()


@pytest.mark.parametrize("seed", range(10))
def test_calls_started_and_waited_for_in_another_order_on_every_rank(hvd, seed):
    size, rank = hvd.size(), hvd.rank()
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    with process_sets(hvd, range(size), range(min(2, size)), range(1, size)) as sets:
        for turn in range(ROUNDS):
            # Names come again in the next round, when the calls of this one are over.
            drawn = [draw(common, sets, k, name=f"call {k}") for k in range(NUM_CALLS)]
            # Calls without a name, the same kind one after the other; some ranks have started
            # more of the named ones than others when they come to them.
            kind = common.choice(KINDS)
            unnamed = [draw(common, sets, k + turn, kind) for k in range(15)]
            mine = [call for call in drawn if rank in call.ps.ranks]
            in_between = [call for call in unnamed if rank in call.ps.ranks]
            own.shuffle(mine)
            places = sorted(own.randrange(len(mine) + 1) for _ in in_between)
            handles = []
            for i in range(len(mine) + 1):
                while places and places[0] == i:
                    places.pop(0)
                    call = in_between.pop(0)
                    check(call, rank, start(hvd, call, ""))
                if i < len(mine):
                    pause(own)
                    handles.append((mine[i], start(hvd, mine[i], "_async")))
            own.shuffle(handles)
            for call, handle in handles:
                pause(own)
                check(call, rank, wait_somehow(hvd, own, handle))


@pytest.mark.parametrize("seed", range(10, 20))
def test_calls_are_waited_for_while_others_are_still_being_started(hvd, seed):
    # No rank waits for a call before it has started all that come before it in the common order,
    # so the first call that anybody waits for can always be finished.
    size, rank = hvd.size(), hvd.rank()
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    with process_sets(hvd, range(size), range(min(2, size)), range(1, size)) as sets:
        for _ in range(ROUNDS):
            drawn = [draw(common, sets, k, name=f"call {k}") for k in range(NUM_CALLS)]
            mine = [call for call in drawn if rank in call.ps.ranks]
            ahead, under_way = list(mine), {}
            while ahead or under_way:
                pause(own)
                # Started early, out of order, by up to 30 places.
                if ahead and own.random() < 0.55:
                    call = ahead.pop(own.randrange(min(30, len(ahead))))
                    under_way[call.k] = (call, start(hvd, call, "_async"))
                first_left = ahead[0].k if ahead else NUM_CALLS
                ready = [k for k in under_way if k < first_left]
                if ready and own.random() < 0.5:
                    call, handle = under_way.pop(own.choice(ready))
                    check(call, rank, wait_somehow(hvd, own, handle))
                elif ahead and own.random() < 0.2:
                    # A blocking call is one that is started and waited for at once.
                    call = ahead.pop(0)
                    check(call, rank, start(hvd, call, ""))
