"""The ranks of the benchmark: what is timed and how; `scripts/bench.py` starts them.

    python scripts/bench.py --worker --json FILE      by mpiexec, or alone for the local backend

Everything is timed in one process group.  In a round each contender takes one turn, in an order
that is drawn anew for each round: none always inherits another's caches.  A turn is: fill, barrier,
time, check the values.  What counts is the slowest rank of a turn, and the median over the rounds.
"""

# ruff: noqa: D102, D103 - a program: what its methods do is said once, at their base

import argparse
import importlib.util
import json
import math
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import hvdlite as hvd

Array = npt.NDArray[np.float32]
Shapes = list[tuple[int, ...]]

BLOCK = 2**15  # elements that one NumPy call of the bare reduction handles
LATE_S = 0.05

# --- the gradients -------------------------------------------------------------------------------


def resnet50() -> Shapes:
    """161 gradients, 25.6 M elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    fan_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions: Shapes = [
                (width, fan_in, 1, 1),
                (width, width, 3, 3),
                (width * 4, width, 1, 1),
            ]
            if block == 0:
                convolutions.append((width * 4, fan_in, 1, 1))
            for conv in convolutions:
                shapes += [conv, conv[:1], conv[:1]]  # each with its batch norm
            fan_in = width * 4
    return [*shapes, (1000, fan_in), (1000,)]


def gpt2_small() -> Shapes:
    """148 gradients, 124 M elements."""
    d = 768
    block: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *block * 12, (d,), (d,)]


def mlp(width: int) -> Shapes:
    """Six gradients of a network with two hidden layers."""
    return [(784, width), (width,), (width, width), (width,), (width, 10), (10,)]


WORKLOADS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "gpt2": gpt2_small,
    "tiny": lambda: [(1000,)] * 1000,
    "mlp-1M": lambda: mlp(256),
    "mlp-256K": lambda: mlp(76),
    "mlp-16K": lambda: mlp(5),
}
BUDGET_S = {"resnet50": 22.0, "gpt2": 30.0, "tiny": 6.0}  # of one workload on one number of ranks
SMALL_BUDGET_S = 3.0


class Gradients:
    """One rank's gradients: `tensors` are parts of `flat`; `scratch` is as large."""

    def __init__(self, shapes: Shapes, comm: MPI.Intracomm) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        self.shapes = shapes
        self.names = [f"g{i}" for i in range(len(shapes))]
        self.flat = np.zeros(sum(sizes), np.float32)
        self.scratch = np.zeros_like(self.flat)
        self.tensors = self.cut(self.flat)

    def cut(self, flat: Array) -> list[Array]:
        """The parts of a flat array that hold the tensors, in their shapes."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(s) for part, s in zip(np.split(flat, ends), self.shapes, strict=True)]

    def fill(self, tensors: Iterable[Array]) -> None:
        """Write this rank's gradients, each full of one value; no two neighbours have the same."""
        for i, tensor in enumerate(tensors):
            tensor.fill(self.value(i, self.own))

    def wrong(self, tensors: Iterable[Array], factor: float) -> int:
        """How many elements differ from `factor` times the pattern of `fill`."""
        count = 0
        for i, tensor in enumerate(tensors):
            low, high = (self.value(i, factor) * k for k in (1 - 1e-6, 1 + 1e-6))
            if not (low <= tensor.min() and tensor.max() <= high):  # a NaN fails both
                count += tensor.size - int(np.count_nonzero((tensor >= low) & (tensor <= high)))
        return count

    @property
    def own(self) -> float:
        """The factor of this rank's gradients; no two ranks have the same."""
        return self.ranks * 2.0**self.rank

    @property
    def average(self) -> float:
        """The factor of the averages; no rank's own."""
        return 2.0**self.ranks - 1

    @staticmethod
    def value(i: int, factor: float) -> float:
        return (i % 61 + 1) * factor


# --- the contenders ------------------------------------------------------------------------------


class Contender(ABC):
    """One way to average; only `run` is timed."""

    def __init__(self, name: str, grads: Gradients) -> None:
        self.name, self.grads = name, grads

    def prepare(self) -> None:
        """Write this rank's gradients to where `run` looks for them."""
        self.grads.fill(self.grads.tensors)

    @abstractmethod
    def run(self) -> None:
        """Turn what `prepare` wrote into the averages."""

    def finish(self) -> None:  # noqa: B027 - most need nothing here
        """Do what must follow the timed part."""

    def wrong(self) -> int:
        """How many elements of this rank are not what they should be."""
        return self.grads.wrong(self.grads.tensors, self.grads.average)


class Memcpy(Contender):
    """Copy the bytes once, on every rank at the same time."""

    def run(self) -> None:
        np.copyto(self.grads.scratch, self.grads.flat)

    def wrong(self) -> int:
        return self.grads.wrong(self.grads.cut(self.grads.scratch), self.grads.own)


class FlatAllreduce(Contender):
    """What one writes by hand when the gradients are one array already."""

    def run(self) -> None:
        flat = self.grads.flat
        self.grads.comm.Allreduce(MPI.IN_PLACE, flat)
        np.multiply(flat, np.float32(1 / self.grads.ranks), out=flat)


class AllreducePerTensor(Contender):
    """What one writes by hand otherwise."""

    def run(self) -> None:
        scale = np.float32(1 / self.grads.ranks)
        for tensor in self.grads.tensors:
            self.grads.comm.Allreduce(MPI.IN_PLACE, tensor)
            np.multiply(tensor, scale, out=tensor)


def shared_rows(comm: MPI.Intracomm, count: int) -> list[Array]:
    """A row of float32 for each rank, in memory that all of them map."""
    size = comm.size * count * 4
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(dir=folder) as own:
        own.truncate(size if comm.rank == 0 else 0)
        with Path(comm.bcast(own.name)).open("r+b") as file:
            rows = np.frombuffer(mmap.mmap(file.fileno(), size), np.float32)
        comm.Barrier()
    return list(rows.reshape(comm.size, count))


class BareReduction(Contender):
    """The sum and its scaling alone: NumPy calls on shared buffers, and nobody waits."""

    def __init__(self, name: str, grads: Gradients) -> None:
        super().__init__(name, grads)
        self.buffers = shared_rows(grads.comm, grads.flat.size)
        self.tensors = grads.cut(self.buffers[grads.rank])

    def prepare(self) -> None:
        self.grads.fill(self.tensors)

    def run(self) -> None:
        first, *others = self.buffers
        scale = np.float32(1 / self.grads.ranks)
        step = -(-first.size // self.grads.ranks)
        begin, end = step * self.grads.rank, min(step * (self.grads.rank + 1), first.size)
        for i in range(begin, end, BLOCK):
            part = slice(i, min(end, i + BLOCK))
            total = first[part]
            for other in others:
                np.add(total, other[part], out=total)
            np.multiply(total, scale, out=total)
            for other in others:
                np.copyto(other[part], total)

    def finish(self) -> None:
        self.grads.comm.Barrier()

    def wrong(self) -> int:
        return self.grads.wrong(self.tensors, self.grads.average)


class Gloo(Contender):
    """PyTorch's gloo as DDP uses it: buckets of 25 MB (the first 1 MB), gradients as views."""

    def __init__(self, name: str, grads: Gradients) -> None:
        super().__init__(name, grads)
        import torch
        import torch.distributed

        self.all_reduce = torch.distributed.all_reduce
        self.tensors = grads.cut(grads.scratch)
        flat = torch.from_numpy(grads.scratch)
        self.buckets, begin, end, limit = [], 0, 0, 2**20
        for tensor in self.tensors:
            end += tensor.size
            if (end - begin) * 4 >= limit:
                self.buckets.append(flat[begin:end])
                begin, limit = end, 25 * 2**20
        if begin < end:
            self.buckets.append(flat[begin:end])

    def prepare(self) -> None:
        self.grads.fill(self.tensors)

    def run(self) -> None:
        works = []
        for bucket in self.buckets:
            bucket.div_(self.grads.ranks)
            works.append(self.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()

    def wrong(self) -> int:
        return self.grads.wrong(self.tensors, self.grads.average)


class Hvdlite(Contender):
    """A whole step of the optimizer: every `grad_ready`, and `step()`."""

    def __init__(self, name: str, grads: Gradients, opt: hvd.DistributedOptimizer, views: bool):
        super().__init__(name, grads)
        self.opt, self.views = opt, views
        self.slots = [opt.grads[n] for n in grads.names] if views else grads.tensors
        self.last_first = list(zip(grads.names, self.slots, strict=True))[::-1]

    def prepare(self) -> None:
        self.grads.fill(self.slots)

    def run(self) -> None:
        self.announce(self.last_first)
        self.opt.step()

    def announce(self, part: Sequence[tuple[str, Array]]) -> None:
        ready = self.opt.grad_ready
        if self.views:
            for name, _ in part:
                ready(name)
        else:
            for name, grad in part:
                ready(name, grad)

    def wrong(self) -> int:
        averages = self.opt.received
        return self.grads.wrong([averages[n] for n in self.grads.names], self.grads.average)


class HvdliteSync(Hvdlite):
    """The synchronisation alone: the gradients are written (or packed) and announced before.

    All but the one that comes first in the plan: while its bucket is not full, none is launched.
    """

    def prepare(self) -> None:
        super().prepare()
        self.announce(self.last_first[1:])

    def run(self) -> None:
        self.announce(self.last_first[:1])
        self.opt.synchronize()

    def finish(self) -> None:
        with self.opt.skip_synchronize():
            self.opt.step()


class Sink:
    """The wrapped optimizer: keeps what it is given, and does nothing with it."""

    def __init__(self) -> None:
        self.received: dict[str, Array] = {}

    def step(self, grads: dict[str, Array]) -> None:
        self.received = grads


def optimizer(grads: Gradients, views: bool, **settings: Any) -> hvd.DistributedOptimizer:
    """An optimizer that has made a step, so that its plan is in the order last to first."""
    params = dict(zip(grads.names, grads.cut(grads.scratch), strict=True))  # never read or written
    opt = hvd.DistributedOptimizer(
        Sink(), params, gradient_as_bucket_view=views, bcast_period=-1, **settings
    )
    Hvdlite("first step", grads, opt, views).run()
    return opt


# --- timing --------------------------------------------------------------------------------------


def take_turns(
    contenders: Sequence[Contender], comm: MPI.Intracomm, budget_s: float, least: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Rounds of turns for about `budget_s`, `least` to 301 of them, after one to warm up.

    Returns:
        The time of the slowest rank by contender and round, and the wrong elements by contender.
    """
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    wrong = dict.fromkeys(times, 0)
    start, done, draw = time.perf_counter(), 0, random.Random(0)  # the same on all ranks
    while done <= least or (done <= 301 and comm.bcast(time.perf_counter() - start) < budget_s):
        for contender in draw.sample(contenders, len(contenders)):
            contender.prepare()
            comm.Barrier()
            begin = time.perf_counter()
            contender.run()
            elapsed = time.perf_counter() - begin
            contender.finish()
            slowest = comm.allreduce(elapsed, MPI.MAX)
            wrong[contender.name] += comm.allreduce(contender.wrong(), MPI.SUM)
            if done > 0:
                times[contender.name].append(slowest)
        done += 1
    return times, wrong


def bench_workload(name: str, comm: MPI.Intracomm, gloo: bool, quick: bool) -> list[dict[str, Any]]:
    """The rows of one workload's table."""
    grads = Gradients(WORKLOADS[name](), comm)
    contenders: list[Contender] = [Memcpy("memcpy", grads), FlatAllreduce("flat", grads)]
    contenders.append(AllreducePerTensor("per tensor", grads))
    if gloo:
        contenders.append(Gloo("gloo", grads))
    if name == "mlp-1M":
        contenders.append(BareReduction("reduction", grads))
    optimizers = []
    for kind in ("views", "packed"):
        opt = optimizer(grads, kind == "views")
        optimizers.append(opt)
        contenders.append(HvdliteSync(f"{kind} sync", grads, opt, kind == "views"))
        contenders.append(Hvdlite(f"{kind} step", grads, opt, kind == "views"))
    budget_s, least = (0.0, 3) if quick else (BUDGET_S.get(name, SMALL_BUDGET_S), 5)
    times, wrong = take_turns(contenders, comm, budget_s, least)
    for opt in optimizers:
        opt.close()
    common = {"workload": name, "ranks": comm.size, "tensors": len(grads.shapes)}
    common["bytes"] = grads.flat.nbytes
    return [common | {"contender": c, "times_s": times[c], "wrong": wrong[c]} for c in times]


# --- single figures ------------------------------------------------------------------------------


def median_of_slowest(times: list[float], comm: MPI.Intracomm) -> float:
    return float(statistics.median(np.max(comm.allgather(times), axis=0).tolist()))


def time_grad_ready(comm: MPI.Intracomm, views: bool, rounds: int) -> tuple[float, float]:
    """CPU microseconds that a `grad_ready` which completes no bucket takes, and a bare copy.

    The best round of the slowest rank, as timeit does it: the others tell of the machine.
    """
    grads = Gradients([(16,)] * 500, comm)
    opt = optimizer(grads, views, fusion_threshold="1GiB", first_bucket="1GiB")
    step = Hvdlite("", grads, opt, views)
    all_but_last, last = step.last_first[:-1], step.last_first[-1:]
    copies = grads.cut(grads.scratch)[1:]
    announcing, copying = [], []
    for _ in range(rounds + 1):
        step.prepare()
        comm.Barrier()
        start = time.thread_time()
        step.announce(all_but_last)
        middle = time.thread_time()
        for (_, grad), copy in zip(all_but_last, copies, strict=True):
            np.copyto(copy, grad)
        stop = time.thread_time()
        announcing.append(middle - start)
        copying.append(stop - middle)
        step.announce(last)
        opt.step()
    opt.close()
    scale = 1e6 / len(all_but_last)
    return (
        float(comm.allreduce(min(announcing), MPI.MAX)) * scale,
        float(comm.allreduce(min(copying), MPI.MAX)) * scale,
    )


def time_local_step(comm: MPI.Intracomm, rounds: int) -> float:
    """Seconds of `step()` in a world of one, ResNet-50's gradients as views."""
    grads = Gradients(resnet50(), comm)
    opt = optimizer(grads, views=True)
    step = Hvdlite("", grads, opt, views=True)
    times = []
    for _ in range(rounds + 1):
        step.announce(step.last_first)
        start = time.perf_counter()
        opt.step()
        times.append(time.perf_counter() - start)
    opt.close()
    return statistics.median(times[1:])


def time_eager_calls(comm: MPI.Intracomm, rounds: int) -> dict[str, float]:
    """Latency of eager calls on 1 KiB beside bare MPI, in turns, and of a thousand in flight."""
    array, out = np.ones(256, np.float32), np.empty(256, np.float32)
    calls = {
        "Allreduce": lambda: comm.Allreduce(array, out),
        "allreduce": lambda: hvd.allreduce(array, name="eager"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(100 * rounds):
        for name, call in calls.items():
            comm.Barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    bare, eager = (median_of_slowest(times[name], comm) * 1e6 for name in calls)
    names = [f"eager.{k}" for k in range(1000)]
    each = []
    for _ in range(rounds):
        comm.Barrier()
        start = time.perf_counter()
        handles = [hvd.allreduce_async(array, name=name) for name in names]
        for handle in handles:
            handle.wait()
        each.append(time.perf_counter() - start)
    many = median_of_slowest(each, comm) * 1e6 / len(names)
    return {"eager beyond 3 MPI, us": eager - 3 * bare, "eager async, us": many}


def cpu_of_waiting(comm: MPI.Intracomm, rounds: int) -> float:
    """CPU time that the hungriest waiter burns while the last rank is late, over its wait."""
    grads = Gradients(mlp(256), comm)
    opt = optimizer(grads, views=True)
    sync = HvdliteSync("", grads, opt, views=True)
    late = comm.rank == comm.size - 1
    shares = []
    for _ in range(rounds + 1):
        sync.prepare()
        comm.Barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        if late:
            time.sleep(LATE_S)
        sync.run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sync.finish()
        shares.append(0.0 if late else cpu / wall)
    opt.close()
    return float(comm.allreduce(statistics.median(shares[1:]), MPI.MAX))


def proportional_memory() -> int:
    """Bytes of this process, shared pages counted by their share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("no Pss line in /proc/self/smaps_rollup")


def memory_beyond_gradients(comm: MPI.Intracomm, views: bool) -> float:
    """What an optimizer adds on all ranks, beyond the gradients, in units of the gradients."""
    grads = Gradients(resnet50(), comm)
    grads.fill(grads.tensors)
    before = comm.allreduce(proportional_memory())
    opt = optimizer(grads, views)
    step = Hvdlite("", grads, opt, views)
    for _ in range(2):
        step.prepare()
        step.run()
    comm.Barrier()
    added = comm.allreduce(proportional_memory()) - before
    comm.Barrier()
    opt.close()
    return float(added / (comm.size * grads.flat.nbytes)) - (1 if views else 0)


def overlap_cost(comm: MPI.Intracomm, rounds: int) -> float:
    """A step that announces gradients during backward / backward first, and then the reduction."""
    width, layers = 768, 12
    grads = Gradients([(width, width)] * layers, comm)
    opt = optimizer(grads, views=True)
    step = Hvdlite("", grads, opt, views=True)
    inputs, delta = np.ones((128, width), np.float32), np.ones((128, width), np.float32)
    weights = np.ones((width, width), np.float32)

    def backward(announce: bool) -> None:
        for name, slot in step.last_first:
            np.matmul(inputs.T, delta, out=slot)
            np.matmul(delta, weights)
            if announce:
                opt.grad_ready(name)

    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * (rounds + 1)):
        announce = i % 2 == 0
        comm.Barrier()
        start = time.perf_counter()
        backward(announce)
        if not announce:
            step.announce(step.last_first)
        opt.step()
        times[announce].append(time.perf_counter() - start)
    opt.close()
    overlapped, separate = (median_of_slowest(times[k][1:], comm) for k in (True, False))
    return overlapped / separate


def single_figures(comm: MPI.Intracomm, quick: bool) -> dict[str, float]:
    """The figures that are no rows of a table, by name."""
    rounds = 3 if quick else 31
    if comm.size == 1:
        return {"local step, us": time_local_step(comm, rounds) * 1e6}
    figures = {"overlap, x": overlap_cost(comm, 3 if quick else 15)}
    figures |= time_eager_calls(comm, rounds)
    figures["late rank, %"] = cpu_of_waiting(comm, 3 if quick else 11) * 100
    for kind in ("views", "packed"):
        views = kind == "views"
        call_us, copy_us = time_grad_ready(comm, views, 10 * rounds)  # long enough for a quiet one
        figures[f"grad_ready {kind}, us"] = call_us - (0 if views else copy_us)
        figures["copyto of 64 bytes, us"] = copy_us
        if sys.platform == "linux":
            figures[f"memory {kind}, x"] = memory_beyond_gradients(comm, views)
    return figures


# --- the rank ------------------------------------------------------------------------------------


def start_gloo(comm: MPI.Intracomm) -> bool:
    """Start torch.distributed with a file as meeting point, where every rank has torch."""
    if not comm.allreduce(importlib.util.find_spec("torch") is not None, MPI.LAND):
        return False
    import torch
    import torch.distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp(prefix="hvdlite-bench-") if comm.rank == 0 else None)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size
    )
    comm.Barrier()
    return True


def run(args: argparse.Namespace) -> None:
    """Measure on all ranks; rank 0 writes `args.json`."""
    hvd.init()
    comm = MPI.COMM_WORLD
    result: dict[str, Any] = {
        "ranks": comm.size,
        "mpi": MPI.get_vendor()[0].replace(" ", "").lower(),
        "mpi library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        "figures": single_figures(comm, args.quick),
        "rows": [],
    }
    if comm.size > 1:
        gloo = not args.no_torch and start_gloo(comm)
        for name in args.workloads:
            if comm.rank == 0:
                print(f"{name} on {comm.size} ranks ...", file=sys.stderr, flush=True)
            result["rows"] += bench_workload(name, comm, gloo, args.quick)
        if gloo:
            import torch.distributed

            torch.distributed.destroy_process_group()
    if comm.rank == 0:
        Path(args.json).write_text(json.dumps(result))
    hvd.shutdown()
