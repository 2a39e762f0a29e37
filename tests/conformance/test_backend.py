"""What every backend must do.  Add yours to `BACKENDS`; when this passes, it is one.

`local` runs without a launcher, the others on the ranks of a job.  Streams are driven as the
reducer drives them, and the sums compared with a reference that knows nothing of the library.
"""

import importlib
import inspect
import os
import pkgutil
import random
import time
from contextlib import suppress
from itertools import combinations

import numpy as np
import pytest

import hvdlite
from hvdlite import backends
from hvdlite.arithmetic import Reduction
from hvdlite.backends import mpi as mpi_backend
from hvdlite.backends.base import RankState, Work
from hvdlite.errors import MismatchError
from hvdlite.ticket import Terms, Ticket, even_segment
from hvdlite.types import Average, Max, Min, Product, Sum
from interrupts import Alarm, Interrupter
from launch import SIZE_NAMES
from reference import DTYPES, OPS, assert_reduced, assert_same, has_meaning, operands, reference

BACKENDS = ["local", "shm", "mpi"]
PARAMS = [
    pytest.param(
        name,
        id=f"backend={name}",
        marks=[] if name == "local" else [pytest.mark.mpi(min_size=1)],
    )
    for name in BACKENDS
]
FLOAT32 = np.dtype("float32")


def test_every_backend_of_the_package_is_tested():
    names = set()
    for module in pkgutil.iter_modules(backends.__path__, "hvdlite.backends."):
        for name, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if name.endswith("Backend") and name != "Backend":
                names.add(kind.name)
    assert names == set(BACKENDS)


@pytest.fixture(scope="module", params=PARAMS)
def backend(request):
    """Name of the backend; the tests of one come together."""
    return request.param


@pytest.fixture
def ctx(backend):
    """A Context on that backend; one serves all its tests until one fails."""
    context = hvdlite.init() if hvdlite.is_initialized() else None
    if context is None or context.config.backend != backend:
        hvdlite.shutdown()
        config = {"backend": "auto" if backend == "local" else backend, "block_elements": 1024}
        context = hvdlite.init(config=config)
    assert context.backend.name == ("local" if context.size == 1 else backend)
    yield context
    if context.config.deterministic:
        hvdlite.shutdown()


# --- driving a stream


def lag(rng, longest_s=0.002):
    """Comes late, now and then."""
    if rng.random() < 0.3:
        time.sleep(rng.random() * longest_s)


class Bucket:
    """A piece of work on all ranks, and the operands that each of them brings.

    Args:
        ranks: Members.
        dtype: Of the elements.
        op: Reduce op.
        count: Number of elements.
        prescale: Factor before.
        postscale: Factor after.
    """

    def __init__(self, ranks, dtype=FLOAT32, op=Sum, count=16, prescale=1.0, postscale=1.0):
        self.ranks, self.dtype, self.op, self.count = ranks, np.dtype(dtype), op, count
        self.factors = (prescale, postscale)
        self.nbytes = -(-count * self.dtype.itemsize // 64) * 64

    def operands(self, seed):
        return operands(self.dtype, len(self.ranks), self.count, seed, limit=4)

    def expected(self, seed):
        blocks = self.operands(seed)
        if self.op is Sum and self.dtype.kind in "iu" and self.factors == (1.0, 1.0):
            return np.sum(blocks, axis=0, dtype=np.int64).astype(self.dtype)  # of any size
        return reference(self.op, self.dtype, blocks, *self.factors)


class Driver:
    """One rank's side of a stream, driven as the reducer drives it.

    Args:
        ctx: The Context.
        buckets: Of all ranks, in the plan's order.
        ranks: Members of the stream.
    """

    def __init__(self, ctx, buckets, ranks=None):
        self.ctx, self.rank = ctx, ctx.rank
        self.ranks = ranks or tuple(range(ctx.size))
        is_lowest = self.rank == self.ranks[0]
        numbers = ctx.matcher.exchange(
            0, self.ranks, "id", ctx.new_stream_id() if is_lowest else None
        )
        self.stream = ctx.open_stream(0, self.ranks, numbers[0])
        self.base = self.step = 0
        self.seed = None
        self.grow_and_program(buckets)

    def grow_and_program(self, buckets, regions=None):
        """Add a region for these buckets (or for some of them) and program them."""
        region = len(self.stream.buffers)
        self.buckets = buckets
        self.regions = regions or [region] * len(buckets)
        sizes = [
            sum(
                b.nbytes
                for b, k in zip(buckets, self.regions, strict=True)
                if k == region and q in b.ranks
            )
            for q in self.ranks
        ]
        self.stream.grow(sizes, 100, self.ctx.agree_on(0, self.ranks))
        assert len(self.stream.buffers) == region + 1
        buffer = self.stream.buffers[region]
        assert (buffer.dtype, buffer.shape) == (np.uint8, (sizes[self.ranks.index(self.rank)],))
        assert not buffer.size or buffer.ctypes.data % 64 == 0
        self.program()

    def program(self):
        ends = {(k, q): 0 for k in self.regions for q in self.ranks}
        self.works, self.mine, self.where = [], [], []
        for index, (bucket, region) in enumerate(zip(self.buckets, self.regions, strict=True)):
            starts = tuple(ends[region, q] for q in bucket.ranks)
            for q in bucket.ranks:
                ends[region, q] += bucket.nbytes
            if self.rank not in bucket.ranks:
                continue
            start = starts[bucket.ranks.index(self.rank)]
            view = self.stream.buffers[region][start : start + bucket.nbytes].view(bucket.dtype)
            self.mine.append(bucket)
            self.where.append(view[: bucket.count])
            if len(bucket.ranks) > 1:
                self.works.append(
                    (
                        len(self.mine) - 1,
                        Work(
                            index,
                            region,
                            bucket.ranks,
                            starts,
                            bucket.nbytes,
                            bucket.dtype,
                            bucket.op,
                            *bucket.factors,
                        ),
                    )
                )
        self.stream.program([work for _, work in self.works], len(self.buckets))

    def fill(self, seed):
        """This rank's operands for a step; each is written when its turn has come."""
        self.seed = seed
        for where in self.where:
            where.reshape(-1).view(np.uint8).fill(0x55)  # nobody may look at it yet

    def write(self, k):
        """Write the operand of this rank's k-th bucket."""
        if self.seed is not None:
            bucket = self.mine[k]
            self.where[k][:] = bucket.operands(self.seed)[bucket.ranks.index(self.rank)]

    def record(self):
        return f"{self.rank} says {self.step} ".encode().ljust(100, b".")[: 40 + self.rank]

    def launch(self, rng=None, *, weight=1.0, rides=False, twice=False):
        """One step, as far as this rank needs nobody for it."""
        stream = self.stream
        stream.begin(self.base, self.step & 1, weight)
        self.ctx.progress.add(stream, stream.advance)
        last = len(self.works) - 1
        written = 0
        for i, (k, _) in enumerate(self.works):
            if rng is not None:
                lag(rng)
            for number in range(written, k + 1):  # with those that stay on this rank
                self.write(number)
            written = k + 1
            stream.launch(i, self.record() if rides and i == last else None)
            for again in range(i if twice else -1, -1, -1):  # said again it says nothing new
                stream.launch(again, self.record() if rides and again == last else None)
            if rng is None or rng.random() < 0.5:
                stream.advance()
        for number in range(written, len(self.mine)):
            self.write(number)
        if not (rides and self.works):
            for _ in range(1 + twice):
                stream.conclude(self.record())

    def wait(self):
        """Until the step is finished."""
        self.ctx.progress.wait(self.stream.finished, "a step", self.stream.missing)
        self.ctx.progress.remove(self.stream)

    def run(self, rng=None, **kwargs):
        """One step, up to the moment when it is finished."""
        self.launch(rng, **kwargs)
        self.wait()

    def end(self):
        """Check the records and make ready for the next step."""
        expected = [
            f"{q} says {self.step} ".encode().ljust(100, b".")[: 40 + q] for q in self.ranks
        ]
        for found, wanted in zip(self.stream.records(), expected, strict=True):
            assert found[: len(wanted)] == wanted
        assert all(self.stream.is_done(i) for i in range(len(self.works)))
        assert self.stream.missing() == []
        self.base += len(self.buckets) + 1
        self.step += 1

    def check(self, seed):
        """The sums of a step that `fill(seed)` began."""
        for bucket, where in zip(self.mine, self.where, strict=True):
            if len(bucket.ranks) > 1:
                assert_reduced(where, bucket.expected(seed), bucket.op)
            else:  # no work: it stays as it is
                assert_same(where, bucket.operands(seed)[0])

    def steps(self, seed, count, **kwargs):
        rng = random.Random(seed * 1000 + self.rank)
        for k in range(count):
            self.fill(seed + k)
            self.run(rng, **kwargs)
            self.end()
            self.check(seed + k)


def subsets(size):
    return [s for n in range(1, size + 1) for s in combinations(range(size), n)]


# --- streams


def test_every_dtype_and_op_in_place(ctx):
    world = tuple(range(ctx.size))
    buckets = [
        Bucket(world, dtype, op, count=21)
        for dtype in DTYPES
        for op in OPS
        if has_meaning(op, dtype)
    ]
    driver = Driver(ctx, buckets)
    driver.steps(seed=1, count=2)


def test_factors_before_and_after(ctx):
    world = tuple(range(ctx.size))
    factors = [(0.5, 1.0), (1.0, 3.0), (2.0, 0.25), (0.0, 1.0), (0.3, 0.7)]
    buckets = [
        Bucket(world, dtype, op, 9, *pair)
        for dtype in DTYPES
        if dtype.kind != "b"
        for op in (Average, Max if dtype.kind != "c" else Product)
        for pair in factors
    ]
    driver = Driver(ctx, buckets)
    driver.steps(seed=2, count=1)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1023, 1024, 5000, 40_000])
def test_every_size(ctx, count):
    world = tuple(range(ctx.size))
    buckets = [Bucket(world, np.int32, Sum, count), Bucket(world, np.int8, Sum, count)]
    driver = Driver(ctx, buckets)
    for k in range(2):
        for bucket, where in zip(buckets, driver.where, strict=True):
            where[:] = (np.arange(bucket.count) % 7 + ctx.rank + k).astype(bucket.dtype)
        driver.run()
        driver.end()
        for bucket, where in zip(buckets, driver.where, strict=True):
            whole = sum(np.arange(bucket.count) % 7 + q + k for q in world)
            if ctx.size > 1:
                np.testing.assert_array_equal(where, np.asarray(whole).astype(bucket.dtype))


@pytest.mark.parametrize("seed", range(4))
def test_overlapping_sets_with_lags(ctx, seed):
    rng = random.Random(seed)  # the same on all ranks
    sets = subsets(ctx.size) * 3
    rng.shuffle(sets)
    buckets = [
        Bucket(
            ranks,
            rng.choice([np.int64, np.float32, np.float16]),
            rng.choice([Sum, Average]),
            rng.choice([1, 16, 100]),
        )
        for ranks in sets
    ]
    driver = Driver(ctx, buckets)
    driver.steps(seed, 5)
    driver.steps(seed, 2, twice=True)


def test_many_steps_in_a_row_keep_records_and_sums_apart(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int32), Bucket(world, np.float32)])
    driver.steps(seed=3, count=30)
    driver.steps(seed=3, count=30, rides=True)
    driver.steps(seed=3, count=5, rides=True, twice=True)
    for k in range(100):
        driver.run(rides=k % 2 == 0)
        driver.end()


def test_records_come_without_any_work(ctx):
    driver = Driver(ctx, [])
    for _ in range(5):
        driver.run(twice=True)
        driver.end()


def test_a_rank_outside_all_buckets_hears_the_records(ctx):
    rest = tuple(range(1, ctx.size)) or (0,)
    driver = Driver(ctx, [Bucket(rest, np.int32)] * 3)
    driver.steps(seed=4, count=5)


def test_sums_run_in_rank_order_on_every_rank(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.float32, count=1000)])
    mine = np.random.default_rng(ctx.rank).normal(size=1000).astype(np.float32) * 10.0**ctx.rank
    everybodys = ctx.matcher.exchange(0, world, "operands", mine)
    driver.where[0][:] = mine
    driver.run()
    driver.end()
    expected = everybodys[0]
    for operand in everybodys[1:]:
        expected = expected + operand
    assert_same(driver.where[0], expected)


@pytest.mark.parametrize(
    "weights", [[0.5, 2.0, 1.0, 3.0], [0.0, 1.0, 0.0, 2.0], [2.0] * 4, [1.0] * 4]
)
def test_weights_make_the_average_of_the_joint_batch(ctx, weights):
    world = tuple(range(ctx.size))
    pair = world[-2:]
    buckets = [
        Bucket(world, dtype, Average, 20) for dtype in ("float32", "float64", "float16", "int32")
    ]
    buckets += [Bucket(pair, np.float32, Average, 20)]
    driver = Driver(ctx, buckets)
    for k in range(4):
        now = weights[k:] + weights[:k]  # others in each step
        for bucket, where in zip(driver.mine, driver.where, strict=True):
            where[:] = np.arange(20) % 5 + 4 * bucket.ranks.index(ctx.rank)
            if not now[ctx.rank] and bucket.dtype.kind == "f":
                where[:] = np.nan  # it counts for nothing, whatever it holds
        driver.run(weight=now[ctx.rank])
        driver.end()
        for bucket, where in zip(driver.mine, driver.where, strict=True):
            total = sum(now[q] for q in bucket.ranks)
            whole = sum(
                now[q] * (np.arange(20) % 5 + 4 * bucket.ranks.index(q)) for q in bucket.ranks
            ) / (total or 1)
            if len(bucket.ranks) > 1:
                if bucket.dtype.kind == "i":
                    whole = np.trunc(whole + 1e-9)
                np.testing.assert_allclose(where, whole, rtol=2e-3)


def test_weights_touch_averages_alone(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int32, op) for op in (Sum, Max, Min, Product)])
    driver.fill(5)
    driver.run(weight=float(ctx.rank))
    driver.end()
    driver.check(5)


def test_what_a_rank_does_with_its_result_is_its_own_affair(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int64, count=3000)] * 4)
    rng = random.Random(ctx.rank)
    for k in range(20):
        driver.fill(k)
        driver.run(rng if k % 2 else None)
        driver.end()
        lag(rng)
        driver.check(k)
        for where in driver.where:  # at once, while others may still be about to look
            where[:] = -ctx.rank - 7


def test_memory_is_added_and_the_old_stays_in_use(ctx):
    world = tuple(range(ctx.size))
    first = [Bucket(world, np.int32, count=5), Bucket(world, np.float32, count=50)]
    driver = Driver(ctx, first)
    driver.steps(seed=6, count=3)
    old = driver.stream.buffers[0]
    driver.grow_and_program(
        [first[0], Bucket((ctx.size - 1,), np.int8), Bucket(world, np.int64, count=70), first[1]],
        [0, 1, 1, 0],
    )
    assert driver.stream.buffers[0] is old
    driver.steps(seed=7, count=3, rides=True)


def test_memory_of_every_size_is_all_there(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [])
    for nbytes in range(3584, 4300, 64):  # about a page, which is what memory may be rounded to
        bucket = Bucket(world, np.int8, count=nbytes)
        region = len(driver.stream.buffers)
        driver.grow_and_program([bucket], [region])  # looks at the buffer's size
        driver.steps(seed=nbytes, count=1)


def test_another_program_between_two_steps(ctx):
    world = tuple(range(ctx.size))
    three = [Bucket(world, np.int32, count=16) for _ in range(3)]
    driver = Driver(ctx, three)
    driver.steps(seed=8, count=2)
    for count in (1, 3, 2):
        driver.buckets, driver.regions = three[:count], [0] * count
        driver.program()
        driver.steps(seed=9 + count, count=2, rides=count == 2)


def test_several_streams_are_driven_by_one_wait(ctx):
    # Rule 1: whatever the order in which the ranks wait for two optimizers.
    world = tuple(range(ctx.size))
    drivers = [Driver(ctx, [Bucket(world, np.int32)] * 3) for _ in range(3)]
    rng = random.Random(ctx.rank)
    for k in range(10):
        for driver in drivers:
            driver.fill(k)
        for driver in rng.sample(drivers, 3):
            driver.launch(rng)
        for driver in rng.sample(drivers, 3):
            driver.wait()
        for driver in drivers:
            driver.end()
            driver.check(k)


def test_streams_of_overlapping_sets_side_by_side(ctx):
    if ctx.size < 3:
        everybody = tuple(range(ctx.size))
        chosen = [everybody]
    else:
        chosen = [tuple(range(ctx.size)), tuple(range(1, ctx.size)), (0, ctx.size - 1)]
    registered = [
        hvdlite.global_process_set if len(ranks) == ctx.size else hvdlite.add_process_set(ranks)
        for ranks in chosen
    ]
    try:
        drivers = []
        for ranks, process_set in zip(chosen, registered, strict=True):
            if ctx.rank in ranks:
                drivers.append(SetDriver(ctx, ranks, process_set.process_set_id))
        rng = random.Random(ctx.rank)
        for k in range(5):
            for driver in rng.sample(drivers, len(drivers)):
                driver.fill(k)
                driver.launch(rng)
            for driver in rng.sample(drivers, len(drivers)):
                driver.wait()
                driver.end()
                driver.check(k)
    finally:
        for process_set in registered[1:]:
            hvdlite.remove_process_set(process_set)


class SetDriver(Driver):
    """A driver whose stream belongs to a process set."""

    def __init__(self, ctx, ranks, set_id):
        self.set_id = set_id
        self.ctx, self.rank, self.ranks = ctx, ctx.rank, ranks
        is_lowest = ctx.rank == ranks[0]
        numbers = ctx.matcher.exchange(
            set_id, ranks, "id", ctx.new_stream_id() if is_lowest else None
        )
        self.stream = ctx.open_stream(set_id, ranks, numbers[0])
        self.base = self.step = 0
        self.seed = None
        self.buckets = [Bucket(ranks, np.int32), Bucket(ranks[-2:], np.float32)]
        self.regions = [0, 0]
        sizes = [sum(b.nbytes for b in self.buckets if q in b.ranks) for q in ranks]
        self.stream.grow(sizes, 100, ctx.agree_on(set_id, ranks))
        self.program()


def test_a_late_rank_is_missing_on_the_others_and_nobody_is_in_the_end(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int32), Bucket(world, np.int32)])
    driver.fill(1)
    for k in range(2):
        driver.write(k)
    stream = driver.stream
    stream.begin(0, 0, 1.0)
    ctx.progress.add(stream, stream.advance)
    if ctx.rank != 0:
        stream.launch(0)
        stream.launch(1, driver.record())
    hvdlite.barrier()  # a wait that drives the stream, too
    if ctx.rank != 0:
        deadline = time.monotonic() + 20
        while stream.missing() != [0] and time.monotonic() < deadline:
            ctx.progress.poll()  # the others' arrivals may be on their way
        assert stream.missing() == [0]
        assert not stream.finished()
        assert not stream.is_done(0)
    hvdlite.barrier()
    if ctx.rank == 0 and driver.works:
        stream.launch(0)
        stream.launch(1, driver.record())
    elif ctx.rank == 0:
        stream.conclude(driver.record())
    driver.wait()
    driver.end()
    driver.check(1)


def test_a_closed_stream_is_known_to_whoever_begins_another_step(ctx):
    world = tuple(range(ctx.size))
    drivers = [Driver(ctx, [Bucket(world, np.int32)]) for _ in range(2)]
    for driver in drivers:
        driver.steps(seed=1, count=2)
        assert driver.stream.closed_ranks() == []
    first, last = drivers[0], ctx.size - 1
    if ctx.rank == last:
        first.stream.close(first.base)
        first.stream.close(first.base)  # twice is once
    hvdlite.barrier()
    for _ in range(100):
        ctx.progress.poll()
    assert first.stream.closed_ranks() == []  # it has finished the step that is open
    if ctx.rank != last:
        first.stream.begin(first.base, first.step & 1, 1.0)
        deadline = time.monotonic() + 20
        while not first.stream.closed_ranks() and time.monotonic() < deadline:
            ctx.progress.poll()
        assert first.stream.closed_ranks() == [last]
    assert drivers[1].stream.closed_ranks() == []
    drivers[1].steps(seed=2, count=2)
    hvdlite.barrier()


def test_a_step_under_way_is_served_after_close(ctx):
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int32, count=3000)] * 3)
    driver.fill(3)
    driver.launch()
    driver.stream.close(driver.base)
    driver.wait()
    driver.end()
    driver.check(3)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file that was just being opened
@pytest.mark.parametrize("rides", [True, False])
def test_an_alarm_anywhere_in_a_step_changes_nothing(ctx, rides):
    world = tuple(range(ctx.size))
    buckets = [Bucket(world, np.int32, count=3000), Bucket(world, np.float16, Average, 100)]
    if ctx.size > 1:
        buckets.insert(1, Bucket(world[:2], np.int64))
    driver = Driver(ctx, buckets)
    stream, progress = driver.stream, ctx.progress
    files = ("shm.py", "mpi.py", "page.py", "local.py", "arithmetic.py", "progress.py", "base.py")
    num_interrupts = 0
    for k in range(150):
        driver.fill(k)
        if k < 100:  # every place in the backend's own code, at its first turn
            interrupter = Interrupter(1 + k, Alarm, *files[:4], distinct=True)
        else:
            interrupter = Interrupter(1 + 7 * (k - 100) + 3 * ctx.rank, Alarm, *files)

        def insist(call, interrupter=interrupter):
            """As whoever was broken off and does it again."""
            while True:
                with suppress(Alarm), interrupter:
                    return call()

        insist(lambda: stream.begin(driver.base, driver.step & 1, 1.0))
        progress.add(stream, stream.advance)
        last = len(driver.works) - 1
        for i, (number, _) in enumerate(driver.works):
            driver.write(number)
            record = driver.record() if rides and i == last else None
            insist(lambda i=i, record=record: stream.launch(i, record))
            insist(stream.advance)
        if not driver.works:
            for number in range(len(driver.mine)):
                driver.write(number)
        if not (rides and driver.works):
            insist(lambda: stream.conclude(driver.record()))
        insist(lambda: progress.wait(stream.finished, "a step", stream.missing))
        progress.remove(stream)
        driver.end()
        driver.check(k)
        num_interrupts += bool(interrupter.where)
    assert num_interrupts > (0 if ctx.size == 1 else 10)


# --- eager calls

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
def test_allreduce_of_every_dtype_and_shape(ctx, op):
    for dtype in DTYPES:
        if not has_meaning(op, dtype):
            with pytest.raises(TypeError):
                hvdlite.allreduce(np.zeros(3, dtype), op=op)
            continue
        for shape in SHAPES:
            count = int(np.prod(shape))
            blocks = operands(dtype, ctx.size, count, 7)
            array = blocks[ctx.rank].reshape(shape)
            before = array.tobytes()
            found = hvdlite.allreduce(array, op=op)
            assert_reduced(found, reference(op, dtype, blocks).reshape(shape), op)
            assert type(found) is np.ndarray
            assert found.flags.writeable
            assert not np.shares_memory(found, array)
            found.fill(0)
            assert array.tobytes() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_allreduce_of_arrays_that_travel_in_pieces(ctx, dtype):
    for count in (32 * 1024 // dtype.itemsize + 1, 300_001 // dtype.itemsize):
        pattern = np.arange(count) % 5
        array = (pattern % 2 if dtype.kind == "b" else pattern * (ctx.rank % 2)).astype(dtype)
        array.flags.writeable = False
        found = hvdlite.allreduce(array, op=Max if dtype.kind == "b" else Sum)
        if dtype.kind == "b":
            expected = (pattern % 2).astype(dtype)
        else:
            expected = (pattern * (ctx.size // 2)).astype(dtype)
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("prescale", "postscale"), [(0.5, 1.0), (1.0, 0.25), (2.0, 3.0), (-1.0, 0.5)]
)
def test_allreduce_with_factors(ctx, prescale, postscale):
    for dtype in map(np.dtype, ("int32", "float16", "float32", "float64", "complex64")):
        for op in (Sum, Average, Product) + ((Min, Max) if dtype.kind != "c" else ()):
            blocks = operands(dtype, ctx.size, 8, 11, limit=4)
            found = hvdlite.allreduce(
                blocks[ctx.rank], op=op, prescale_factor=prescale, postscale_factor=postscale
            )
            assert_reduced(found, reference(op, dtype, blocks, prescale, postscale), op)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_allgather_of_every_dtype_with_ragged_rows(ctx, dtype):
    for rest in ((), (3,), (2, 0), (1, 2)):
        for counts in ([0] * 4, [2, 0, 3, 1], [0, 1, 0, 0], [700, 9000, 1, 0]):
            parts = [
                operands(dtype, 1, counts[q] * int(np.prod(rest)), 100 + q)[0].reshape(
                    counts[q], *rest
                )
                for q in range(ctx.size)
            ]
            found = hvdlite.allgather(parts[ctx.rank])
            assert_same(found, np.concatenate(parts))
            assert found.flags.writeable
            assert found.flags.c_contiguous
    with pytest.raises(ValueError, match="0-d"):
        hvdlite.allgather(np.zeros((), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_broadcast_of_every_dtype_from_every_root(ctx, dtype):
    for root in range(ctx.size):
        for shape in (*SHAPES, (50, 1000)):
            blocks = operands(dtype, ctx.size, int(np.prod(shape)), 13 + root)
            array = blocks[ctx.rank].reshape(shape)
            before = array.tobytes()
            found = hvdlite.broadcast(array, root)
            assert_same(found, blocks[root].reshape(shape))
            assert found.flags.writeable
            assert not np.shares_memory(found, array)
            found.fill(0)
            assert array.tobytes() == before


def in_layout(array, number):
    """The same numbers, in one of several layouts."""
    makers = [
        np.ascontiguousarray,
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=0)[::2],
        lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
        lambda a: a.astype(a.dtype.newbyteorder()),
        lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),  # read-only
        lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    ]
    return makers[number % len(makers)](array)


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64", "complex128"])
def test_every_rank_may_have_a_layout_of_its_own(ctx, dtype):
    dtype = np.dtype(dtype)
    plain = np.arange(12).reshape(3, 4)
    for number in range(7):
        own = in_layout((plain + ctx.rank).astype(dtype), number + ctx.rank)
        total = sum(plain + q for q in range(ctx.size)).astype(dtype)
        for found, expected in (
            (hvdlite.allreduce(own, op=Sum), total),
            (hvdlite.broadcast(own, ctx.size - 1), (plain + ctx.size - 1).astype(dtype)),
            (
                hvdlite.allgather(own),
                np.concatenate([(plain + q).astype(dtype) for q in range(ctx.size)]),
            ),
        ):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == own.dtype  # byte order and all


def test_calls_in_one_order_here_and_in_another_there(ctx):
    names = [f"x{k}" for k in range(6)]
    for seed in range(5):
        # Blocking calls meet in one order only; objects and arrays of one name do not.
        found = {n: hvdlite.allreduce(np.full(3, len(n) + ctx.rank), op=Sum, name=n) for n in names}
        assert all(
            array.tolist() == [sum(len(n) + q for q in range(ctx.size))] * 3
            for n, array in found.items()
        ), seed


def test_a_mismatch_is_told_to_all_and_the_next_call_works(ctx):
    for call in (
        lambda: hvdlite.allreduce(np.zeros(3 + (ctx.rank == 0))),
        lambda: hvdlite.allreduce(np.zeros(3, "float32" if ctx.rank == 0 else "float64")),
        lambda: hvdlite.allreduce(np.zeros(20_000), op=Sum if ctx.rank == 0 else Max),
        lambda: hvdlite.allgather(np.zeros((3, 2 + (ctx.rank == 0)))),
        lambda: hvdlite.broadcast(np.zeros(3), 0 if ctx.rank == 0 else ctx.size - 1),
    ):
        if ctx.size == 1:
            call()
            continue
        with pytest.raises(MismatchError, match="rank"):
            call()
        assert hvdlite.allreduce(np.ones(2), op=Sum).tolist() == [ctx.size] * 2


def test_eager_calls_of_a_set_leave_the_others_alone(ctx):
    chosen = [[0, 2], [1, 2]] if ctx.size > 2 else [[0], [1]] if ctx.size > 1 else []
    sets = [hvdlite.add_process_set(ranks) for ranks in chosen]
    try:
        for k in range(20):
            # Rank 2 is in both and keeps one order; for the others there is nothing to keep.
            for process_set in sets:
                if ctx.rank in process_set.ranks:
                    found = hvdlite.allreduce(
                        np.full(5000, float(ctx.rank + k)), op=Sum, process_set=process_set
                    )
                    assert (found == sum(q + k for q in process_set.ranks)).all()
    finally:
        for process_set in sets:
            hvdlite.remove_process_set(process_set)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_alarm_anywhere_in_the_wait_for_a_call_loses_nothing(ctx):
    world = tuple(range(ctx.size))
    num_interrupts = 0
    for k in range(60):
        count = 5 if k % 2 else 20_000
        own = np.arange(count, dtype=np.int64) * (ctx.rank + k)
        reduction = Reduction(Sum, own.dtype, ctx.size) if k % 4 < 2 else None
        segments = [even_segment(reduction, 0, own.nbytes)] if reduction else []
        ticket = Ticket(
            Terms(0, world, (("kind", "test"),), segments=segments),
            "interrupted",
            own.view(np.uint8),
            lambda parts: [part.view(np.int64) for part in parts],
        )
        ctx.matcher.submit(ticket)
        interrupter = Interrupter(1 + 3 * k + ctx.rank * (k % 7))
        found = None
        while found is None:
            with suppress(Alarm), interrupter:
                found = ctx.matcher.wait(ticket)
        num_interrupts += bool(interrupter.where)
        everybodys = [np.arange(count) * (q + k) for q in world]
        for part, expected in zip(
            found, [sum(everybodys)] if reduction else everybodys, strict=True
        ):
            np.testing.assert_array_equal(part, expected)
    assert num_interrupts > 10 or ctx.size == 1


# --- messages


class Post:
    """Messages of this test over the Context's `Control`; what else comes goes its own way.

    Args:
        ctx: The Context.
    """

    def __init__(self, ctx):
        self.control, self.matcher = ctx.backend.control, ctx.matcher
        self.got = []

    def poll(self, on_message=lambda _: None):
        def deliver(source, header, payload):
            if header[0] != "test":
                self.matcher._deliver(source, header, payload)
                return
            self.got.append((source, header[1], bytes(payload)))
            on_message(header[1])

        return self.control.poll(deliver)

    def send(self, to, number, payload):
        deadline = time.monotonic() + 30
        while not self.control.post(to, ("test", number), payload):
            self.poll()
            assert time.monotonic() < deadline

    def wait_for(self, count, on_message=lambda _: None):
        deadline = time.monotonic() + 30
        while len(set(self.got)) < count:
            self.poll(on_message)
            assert time.monotonic() < deadline, len(set(self.got))


def payload_of(source, number):
    """Told by source and number alone, of sizes from nothing to the longest."""
    rng = random.Random(1000 * source + number)
    return rng.randbytes(rng.choice([0, 1, 7, 500, 3000, 20_000, 100_000]))


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_whole_in_order_and_once(ctx, seed):
    plan = random.Random(seed)  # the same on all ranks: who writes to whom
    sent = []
    for number in range(120):
        source = plan.randrange(ctx.size)
        to = [q for q in range(ctx.size) if q != source and plan.random() < 0.6]
        sent.append((source, to, number))
    post = Post(ctx)
    assert post.control.max_payload >= 100_000
    rng = random.Random(ctx.rank)
    for source, to, number in sent:
        if source == ctx.rank:
            post.send(to, number, payload_of(source, number))
        if rng.random() < 0.2:
            post.poll()
    mine = [(source, number) for source, to, number in sent if ctx.rank in to]
    post.wait_for(len(mine))
    hvdlite.barrier()
    post.poll()
    assert len(post.got) == len(mine)
    for source in range(ctx.size):
        got = [(number, data) for q, number, data in post.got if q == source]
        assert got == [(n, payload_of(q, n)) for q, n in mine if q == source]


def test_the_longest_message_arrives_whole(ctx):
    post = Post(ctx)
    others = [q for q in range(ctx.size) if q != ctx.rank]
    data = random.Random(ctx.rank).randbytes(post.control.max_payload)
    for number in range(3):
        post.send(others, number, memoryview(data))
    post.wait_for(3 * len(others))
    for source, _, found in post.got:
        assert found == random.Random(source).randbytes(post.control.max_payload)
    deadline = time.monotonic() + 30
    while not post.control.flushed(others) and time.monotonic() < deadline:
        post.poll()
    assert post.control.flushed(others)
    hvdlite.barrier()


def test_messages_whose_handler_raised_come_again_and_in_order(ctx):
    others = [q for q in range(ctx.size) if q != ctx.rank]
    post = Post(ctx)
    for number in range(20):
        post.send(others, number, bytes([number]))
    raised = []

    def on_message(number):
        if number % 5 == 3 and raised.count(number) < 2:
            raised.append(number)
            raise Alarm

    deadline = time.monotonic() + 30
    while len(set(post.got)) < 20 * len(others) and time.monotonic() < deadline:
        with suppress(Alarm):
            post.poll(on_message)
    for source in others:
        got = [number for q, number, _ in post.got if q == source]
        assert list(dict.fromkeys(got)) == list(range(20))
    assert len(raised) == (8 if others else 0)
    hvdlite.barrier()


def test_everybody_is_alive(ctx):
    control = ctx.backend.control
    hvdlite.barrier()
    control.check_alive(range(ctx.size))
    assert [control.state(q) for q in range(ctx.size)] == [(RankState.ALIVE, "")] * ctx.size
    hvdlite.barrier()


# --- settings, and sizes


@pytest.mark.parametrize("count", [8, 20_000])
def test_deterministic_sums_are_those_of_rank_order(backend, count):
    hvdlite.shutdown()
    ctx = hvdlite.init(
        config={"backend": "auto" if backend == "local" else backend, "deterministic": True}
    )
    assert ctx.config.deterministic
    rows = np.random.default_rng(5).normal(size=(ctx.size, count)).astype(np.float32)
    rows *= 10.0 ** np.arange(ctx.size, dtype=np.float32)[:, None]
    expected = rows[0]
    for row in rows[1:]:
        expected = expected + row
    assert_same(hvdlite.allreduce(rows[ctx.rank], op=Sum), expected)
    driver = Driver(ctx, [Bucket(tuple(range(ctx.size)), np.float32, count=count)])
    driver.where[0][:] = rows[ctx.rank]
    driver.run()
    driver.end()
    assert_same(driver.where[0], expected)
    hvdlite.shutdown()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("chunk", [64, 1000, 4096])
def test_buckets_larger_than_a_message(chunk, monkeypatch):
    monkeypatch.setattr(mpi_backend, "CHUNK_BYTES", chunk)
    hvdlite.shutdown()
    ctx = hvdlite.init(config={"backend": "mpi"})
    world = tuple(range(ctx.size))
    driver = Driver(ctx, [Bucket(world, np.int16, count=n) for n in (3000, 0, 31, 2048, 5000)])
    driver.steps(seed=21, count=4)
    pieces = [piece for (piece, _), _, _ in mpi_backend._messages(np.arange(10_000) % 7, 0, 0)]
    assert max(len(piece) for piece in pieces) <= chunk
    assert np.concatenate(pieces).tolist() == [k % 7 for k in range(10_000)]
    hvdlite.shutdown()


HUGE = 2**30 + 64  # elements; two ranks hold more than 2^31 bytes


def backends_for_huge_buckets():
    """On two ranks, the backends that this machine has the memory for; the same on both."""
    sizes = [int(os.environ[name]) for name in SIZE_NAMES if name in os.environ]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = os.statvfs("/dev/shm")
    if sizes[:1] != [2] or memory < 8e9:
        return []
    return BACKENDS[1:] if shared.f_blocks * shared.f_frsize > 3e9 else ["mpi"]


if backends_for_huge_buckets():

    @pytest.mark.mpi(min_size=2)
    @pytest.mark.timeout(170)
    @pytest.mark.parametrize("name", backends_for_huge_buckets(), ids="backend={}".format)
    def test_more_than_2_30_elements(name):
        hvdlite.shutdown()
        ctx = hvdlite.init(config={"backend": name})
        driver = Driver(ctx, [Bucket((0, 1), np.uint8, count=HUGE)])
        marks = np.array([0, 1, 2**29 - 1, 2**29 + 31, 2**29 + 32, 2**30 - 1, 2**30, HUGE - 1])
        where = driver.where[0]
        where.fill(3 + ctx.rank)
        where[marks] = np.arange(8) * (ctx.rank + 1)
        driver.run()
        driver.end()
        np.testing.assert_array_equal(where[marks], np.arange(8) * 3)
        assert (where == 7).sum() == HUGE - 8
        hvdlite.shutdown()
