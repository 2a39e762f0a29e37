"""Only the Context owns things (rule 9): whatever is made and dropped, for ever, leaves nothing."""

import gc
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hvdlite import context as context_file
from hvdlite.backends.segment import Segment
from training import Recorder, gradient, mean

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.timeout(240)]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SOME_BYTES = 8 * 2**20  # what allocators and MPI libraries may keep for themselves
SOME_OBJECTS = 200


@pytest.fixture
def live_comms(monkeypatch):
    """How many communicators are alive that hvdlite made of the one it is given: [count, comm]."""
    from mpi4py import MPI

    live = [0]

    class Counted(MPI.Intracomm):
        def Dup(self, *args):
            return self._made(super().Dup(*args))

        def Split(self, *args):
            return self._made(super().Split(*args))

        def Split_type(self, *args):
            return self._made(super().Split_type(*args))

        def Create_group(self, *args):
            return self._made(super().Create_group(*args))

        def Free(self):
            live[0] -= 1
            super().Free()

        def _made(self, comm):
            live[0] += 1
            return Counted(comm)

    monkeypatch.setattr(context_file, "_comms", {})  # or those of earlier tests would serve
    return live, Counted(MPI.COMM_WORLD)


@pytest.fixture
def segments(monkeypatch):
    """Paths of the segments that this rank makes."""
    made = []
    create = Segment.create.__func__

    def recording(cls, nbytes):
        segment = create(cls, nbytes)
        made.append(str(segment.path))
        return segment

    monkeypatch.setattr(Segment, "create", classmethod(recording))
    return made


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    return Path("/proc/self/maps").read_text().count("/hvdlite-")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Usage:
    """What this process holds now, and a check that it holds no more later."""

    def __init__(self):
        for _ in range(3):  # a tuple of numbers, in a tuple, is let go of one level at a time
            gc.collect()
        self.facts = descriptors(), mappings()
        self.objects = Counter(type(item).__name__ for item in gc.get_objects())
        self.resident = resident_bytes()

    def assert_no_more(self):
        now = Usage()
        assert now.facts == self.facts, "descriptors, mapped segments"
        more = now.objects - self.objects
        assert more.total() < SOME_OBJECTS, more.most_common(9)
        assert now.resident - self.resident < SOME_BYTES


def fill_the_recorder(hvd):
    """What the flight recorder keeps of past calls is bounded, and no leak."""
    for k in range(1000):
        hvd.current().progress.recorder.mark(k, "done")


def how_many(hvd, on_two_ranks):
    """The full number where two ranks have two cores; more ranks only see that it works."""
    return on_two_ranks if hvd.size() <= 2 else on_two_ranks // 20


@pytest.mark.parametrize(
    ("backend", "count"), [("shm", 5000), ("mpi", 2500)], ids=["backend=shm", "backend=mpi"]
)
def test_optimizers_made_and_dropped_leave_nothing(hvd, live_comms, segments, backend, count):
    live, comm = live_comms
    hvd.shutdown()
    hvd.init(comm, config={"backend": backend})
    ranks, rank = range(hvd.size()), hvd.rank()
    mine = random.Random(rank)
    params = {"a": np.zeros(100), "b": np.zeros((2, 3), np.float32)}
    held = []

    def make(number):
        inner = Recorder()
        opt = hvd.DistributedOptimizer(
            inner,
            params,
            bcast_period=-1 if number % 10 else 0,
            gradient_as_bucket_view=number % 2 == 0,
        )
        if number % 10 == 0:
            opt.step({n: gradient(k, rank, number, p) for k, (n, p) in enumerate(params.items())})
            assert (inner.last["a"] == mean(0, ranks, number, params["a"])).all()
        if number % 3 == 0:
            opt.close()
        # Some go at once, some later, and not at the same time on all ranks.
        held.append(opt)
        while len(held) > 4:
            del held[mine.randrange(4)]

    def make_many(first, number):
        for k in range(first, first + number):
            make(k)
        held.clear()

    make_many(0, 50)
    fill_the_recorder(hvd)
    before, comms = Usage(), live[0]
    make_many(50, how_many(hvd, count))
    before.assert_no_more()
    assert live[0] == comms
    assert not [path for path in segments if Path(path).exists()]
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_init_and_shutdown_again_and_again_leave_nothing(hvd, live_comms, segments, backend):
    live, comm = live_comms

    def cycle(number):
        sets = [[0]] if number % 2 and comm.size > 1 else []
        hvd.init(comm, config={"backend": backend}, process_sets=sets)
        rank, ranks = hvd.rank(), range(hvd.size())
        assert hvd.allreduce(rank + number, op=hvd.Sum) == sum(r + number for r in ranks)
        inner = Recorder()
        opt = hvd.DistributedOptimizer(inner, {"w": np.zeros(5)})
        opt.step({"w": gradient(0, rank, number, np.zeros(5))})
        assert (inner.last["w"] == mean(0, ranks, number, np.zeros(5))).all()
        hvd.shutdown()

    hvd.shutdown()
    for number in range(5):
        cycle(number)
    before, comms = Usage(), live[0]
    gc.disable()  # nothing may wait for the cycle collector, which is in no hurry
    try:
        for number in range(50):
            cycle(number)
        facts = descriptors(), mappings()
    finally:
        gc.enable()
    assert facts == before.facts
    before.assert_no_more()
    assert live[0] == comms
    assert not [path for path in segments if Path(path).exists()]


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_thousands_of_calls_leave_nothing(hvd, backend):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    size, rank = hvd.size(), hvd.rank()
    large = np.ones(20_000)

    def calls(number):
        assert hvd.allreduce(float(rank), name=f"call {number}") == (size - 1) / 2
        assert hvd.allgather_object((rank, number)) == [(r, number) for r in range(size)]
        assert len(hvd.allgather(np.ones((rank, 2)))) == size * (size - 1) // 2
        assert hvd.broadcast_object(number, number % size) == number
        hvd.barrier()
        if number % 20 == 0:
            assert (hvd.allreduce(large, op=hvd.Sum) == size).all()
            hvd.broadcast_parameters({"large": large})
            with suppress(hvd.MismatchError):
                hvd.allreduce(np.zeros(2 + (rank == 0)))

    for number in range(50):
        calls(number)
    fill_the_recorder(hvd)
    before = Usage()
    for number in range(50, 50 + how_many(hvd, 1000)):
        calls(number)
    before.assert_no_more()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_process_sets_and_groups_that_come_and_go_leave_nothing(hvd, live_comms, backend):
    live, comm = live_comms
    hvd.shutdown()
    hvd.init(comm, config={"backend": backend})
    rank, last = hvd.rank(), hvd.size() - 1

    def come_and_go(number):
        ps = hvd.add_process_set([last])
        opt = hvd.DistributedOptimizer(Recorder(), {"a": np.zeros(3)})
        opt.add_param_group({"params": {"b": np.zeros(2)}, "process_set": ps})
        opt.step({"a": np.ones(3)} | ({"b": np.ones(2)} if rank == last else {}))
        if rank == last:
            assert hvd.allreduce(number, process_set=ps) == number
        hvd.remove_process_set(ps)

    for number in range(20):
        come_and_go(number)
    fill_the_recorder(hvd)
    before, comms = Usage(), live[0]
    for number in range(how_many(hvd, 400)):
        come_and_go(number)
    before.assert_no_more()
    assert live[0] == comms


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_calls_that_were_broken_off_leave_nothing_once_the_others_have_come(hvd, comm, backend):
    hvd.shutdown()
    hvd.init(config={"backend": backend})

    class Alarm(Exception):
        pass

    def raise_alarm(_number, _frame):
        if not hvd.current().progress._busy:  # the call is not made yet: again, a little later
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            return
        raise Alarm

    def wave(count):
        comm.Barrier()
        if hvd.rank() == 0:
            for k in range(count):
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                with pytest.raises(Alarm):
                    hvd.allreduce(np.ones([3, 5000, 20_000][k % 3]), name=f"{k}")
        comm.Barrier()
        if hvd.rank() != 0:
            for k in range(count):
                assert (hvd.allreduce(np.ones([3, 5000, 20_000][k % 3]), name=f"{k}") == 1).all()
        hvd.barrier()

    previous = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        wave(30)
        fill_the_recorder(hvd)
        before = Usage()
        for _ in range(3):
            wave(60)
        before.assert_no_more()
    finally:
        signal.signal(signal.SIGALRM, previous)
