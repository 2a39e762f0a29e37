"""Random programs: any order of gradients, any lag of a rank; no hang, exact sums (rule 1).

A watchdog (see ranks.py) prints the stacks of all ranks when a test's time is up.
"""

import random
import time

import numpy as np
import pytest

from training import Recorder, assert_equal, process_sets, rotated

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.timeout(120)]

STEPS = 50
LONGEST_LAG_S = 0.002


class Model:
    """One optimizer over groups on overlapping sets, and what its steps should give.

    Args:
        hvd: The module.
        rng: Equal on all ranks.
        sets: Process sets that groups may live on.
        label: Makes the names unique.
    """

    def __init__(self, hvd, rng, sets, label):
        self.rank, self.world = hvd.rank(), tuple(range(hvd.size()))
        self.members = {}  # name -> ranks that reduce it; None: local
        self.like = {}
        groups = []
        for g in range(rng.randint(1, 4)):
            ps = rng.choice([hvd.global_process_set, *sets, None]) if g else hvd.global_process_set
            params = {}
            for k in range(rng.randint(1, 5)):
                name = f"{label}{g}.{k}"
                shape = rng.choice([(), (0,), (1,), (7,), (3, 5), (40, 30)])
                params[name] = np.zeros(shape, rng.choice([np.float64, np.float32, np.int32]))
                self.members[name] = None if ps is None else ps.ranks
                self.like[name] = params[name]
            groups.append(
                {"params": params}
                if ps is hvd.global_process_set
                else {"params": params, "process_set": ps}
            )
        rng.shuffle(groups)
        self.missing = rng.choice(["zero", "skip"])
        self.passes = rng.choice([1, 1, 2])
        self.views = rng.random() < 0.5
        self.is_average = rng.random() < 0.5
        self.inner = Recorder()
        self.opt = hvd.DistributedOptimizer(
            self.inner,
            groups,
            missing=self.missing,
            backward_passes_per_step=self.passes,
            gradient_as_bucket_view=self.views,
            op="average" if self.is_average else "sum",
            fusion_threshold=rng.choice([0, 500, 5000, "25MiB"]),
            first_bucket=rng.choice([0, 200, "1MiB"]),
        )

    def names_of(self, rank):
        return [n for n, ranks in self.members.items() if ranks is None or rank in ranks]

    def draw(self, rng, rank):
        """What a rank announces in a step: (name, value) in the order of announcement."""
        whole = rng.random() < 0.7  # else some are missing
        passes = []
        for _ in range(self.passes):
            names = [n for n in self.names_of(rank) if whole or rng.random() < 0.7]
            rng.shuffle(names)
            passes += [(n, 12 * rng.randint(-50, 50)) for n in names]
        return passes

    def announce(self, drawn):
        """Announce one gradient after the other; a generator, so that others come in between."""
        added = {}
        for name, value in drawn:
            grad = np.full_like(self.like[name], value)
            if not self.views:
                self.opt.grad_ready(name, grad)
            else:
                view = self.opt.grads[name]
                view[...] = view + grad if name in added else grad
                added[name] = True
                self.opt.grad_ready(name)
            yield

    def expected(self, drawn_by_rank):
        """The dict of this rank, by NumPy alone."""
        result = {}
        for name in self.names_of(self.rank):
            like = self.like[name]
            members = self.members[name] or (self.rank,)
            sums = {
                r: sum(v for n, v in drawn_by_rank[r] if n == name)
                for r in members
                if any(n == name for n, _ in drawn_by_rank[r])
            }
            is_local = self.members[name] is None
            if not sums or (self.missing == "skip" and len(sums) < len(members)):
                continue
            value = sum(sums.values())
            if self.is_average and not is_local:
                value //= len(members)
            result[name] = np.full_like(like, value)
        return result


@pytest.mark.parametrize(
    ("backend", "seed"),
    [*(("shm", seed) for seed in range(20)), *(("mpi", seed) for seed in range(20, 28))],
    ids=lambda value: f"backend={value}" if isinstance(value, str) else f"seed={value}",
)
def test_random_orders_and_lags_give_exact_sums(hvd, backend, seed):
    hvd.shutdown()
    hvd.init(config={"backend": backend})
    size, rank = hvd.size(), hvd.rank()
    common = random.Random(seed)
    mine = random.Random(1000 * seed + rank)
    wanted = [common.sample(range(size), common.randint(1, size)) for _ in range(2)]
    with process_sets(hvd, *wanted) as sets:
        models = [Model(hvd, common, sets, label) for label in "ab"]
        for step in range(STEPS):
            drawn = [
                {r: model.draw(random.Random(f"{seed}.{step}.{m}.{r}"), r) for r in range(size)}
                for m, model in enumerate(models)
            ]
            left = [model.announce(d[rank]) for model, d in zip(models, drawn, strict=True)]
            while left:  # gradients of both, shuffled like two packs of cards
                turn = mine.choice(left)
                if next(turn, "end") == "end":
                    left.remove(turn)
                if mine.random() < 0.02:
                    time.sleep(mine.uniform(0, LONGEST_LAG_S))
            # A rank that lacks a gradient says so in its step() alone, so then the order is common.
            free = mine if all_full(models, drawn, size) else common
            when = free.randrange(3)  # the metric comes before, between or after the steps
            for place, model in enumerate([*rotated(models, free.randrange(2)), None]):
                if place == when:
                    metric = hvd.allreduce(float(rank * step), name=f"{step}", op=hvd.Sum)
                    assert metric == step * size * (size - 1) // 2
                if model is not None:
                    model.opt.step()
            for model, d in zip(models, drawn, strict=True):
                assert_equal(model.inner.last, model.expected(d))
                model.inner.given.clear()


def all_full(models, drawn, size):
    """Whether every rank has announced all there is, so that any order of waits must work."""
    return all(
        len(d[r]) == model.passes * len(model.names_of(r))
        for model, d in zip(models, drawn, strict=True)
        for r in range(size)
    )
