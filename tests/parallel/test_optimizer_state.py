"""`broadcast_optimizer_state`: the root's state for everyone, in the arrays that are there."""

import collections
import copy
import enum
import pickle
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pytest

from training import counted, gradient, needs, process_sets

pytestmark = pytest.mark.mpi(min_size=1)


class Moments(NamedTuple):
    first: np.ndarray
    second: np.ndarray


class Mode(enum.Enum):
    WARM = 1
    COLD = 2


class Plain:
    """An optimizer whose state is its attributes; momentum comes with the first step."""

    def __init__(self, params, lr=0.1):
        self.params, self.lr = params, lr
        self.velocity = {}
        self.steps = 0
        self.schedule = lambda step: 1 / (1 + step)

    def step(self, grads):
        self.steps += 1
        for name, grad in grads.items():
            velocity = self.velocity.setdefault(name, np.zeros_like(grad))
            velocity *= 0.5
            velocity += grad
            self.params[name] -= self.lr * self.schedule(self.steps) * velocity


class WithDict(Plain):
    """One that says what its state is, and copies what it loads."""

    loaded = 0

    def state_dict(self):
        return {"lr": self.lr, "steps": self.steps, "velocity": self.velocity}

    def load_state_dict(self, state):
        self.loaded += 1
        self.lr, self.steps = state["lr"], state["steps"]
        self.velocity.clear()  # so what is loaded must not be this very dict
        self.velocity.update(state["velocity"])


class Slots:
    """Nothing but `state`."""

    __slots__ = ("state",)

    def __init__(self, state):
        self.state = state


def make_state(seed):
    """Values of all kinds, nested, different for each seed."""
    rng = np.random.default_rng(seed)
    return {
        "m": {
            dtype: rng.integers(0, 9, (2, 3)).astype(dtype)
            for dtype in ("?", "i1", "u8", "f2", "f4", "f8", ">f8", "c16")
        },
        "layouts": [
            np.asfortranarray(rng.normal(size=(3, 4))),
            rng.normal(size=(4, 6))[::2, ::-3],
            rng.normal(size=()),
            np.zeros((0, 3)),
            np.full(3, np.nan) * seed,
        ],
        "moments": Moments(rng.normal(size=3), rng.normal(size=3)),
        ("a", 1): (seed, 0.5 + seed, 1j * seed, None, True, "text" * seed, b"\0" * seed),
        7: {"betas": (0.9, 0.9 + seed), "groups": [{"lr": seed}, {"lr": np.float32(seed)}]},
        "others": [
            {seed, 2},
            collections.deque([np.arange(seed)], maxlen=4),
            Mode(seed % 2 + 1),
            np.array(["x", "y" * (seed + 1)]),
            np.random.default_rng(seed),
            np.ma.masked_array([1, seed], [0, 1]),
        ],
        "ordered": collections.OrderedDict((str(k), k) for k in range(seed + 1)),
        "lists": collections.defaultdict(list, {"x": [np.full(2, seed)]}),
    }


def same(one, other):
    """Whether two states are equal, in types, dtypes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ma.MaskedArray):
        return same(one.filled(0), other.filled(0)) and same(one.mask, other.mask)
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state == other.bit_generator.state
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def arrays_in(state):
    """The NumPy arrays in nested dicts, lists and tuples, in order."""
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, list | tuple):
        return [state] if type(state) is np.ndarray and state.dtype.kind in "biufc" else []
    return [array for item in state for array in arrays_in(item)]


# ---- all kinds of state -------------------------------------------------------------------------


@pytest.mark.parametrize("has", ["the-same", "nothing", "other-things"])
def test_a_dict_of_all_kinds_becomes_the_roots(hvd, has):
    rank, n = hvd.rank(), hvd.size()
    for root in {0, n - 1}:
        state = make_state(3 + rank)
        if rank != root and has == "nothing":
            state = {}
        if rank != root and has == "other-things":
            state["m"] = [np.zeros(2)]
            state["layouts"] = {"x": 1}
            state["moments"] = np.zeros(3)
            state["ordered"] = dict(state["ordered"])
            state["more"] = state["others"][0] = np.ones(4)
        assert hvd.broadcast_optimizer_state(state, root_rank=root) is state
        assert same(state, make_state(3 + root))
        assert state["layouts"][0].flags.writeable


def test_arrays_and_containers_that_fit_stay_the_same_objects(hvd):
    state = make_state(hvd.rank())
    containers = [state["m"], state["layouts"], state["lists"], state[7]["groups"][0]]
    arrays = arrays_in(state)
    hvd.broadcast_optimizer_state(state)
    assert same(state, make_state(0))
    found = [state["m"], state["layouts"], state["lists"], state[7]["groups"][0]]
    assert all(a is b for a, b in zip(containers, found, strict=True))
    assert all(a is b for a, b in zip(arrays, arrays_in(state), strict=True))


def test_an_array_of_another_shape_or_dtype_is_made_anew_and_a_read_only_one(hvd):
    is_root = hvd.rank() == 0
    value = 7.0 if is_root else 1.0
    state = {
        "shape": np.full(3 if is_root else 4, value),
        "dtype": np.full(2, value, np.float64 if is_root else np.float32),
        "fixed": np.full(2, value),
    }
    state["fixed"].flags.writeable = is_root
    before = dict(state)
    hvd.broadcast_optimizer_state(state)
    assert same(state, {name: np.full(3 if name == "shape" else 2, 7.0) for name in before})
    assert all((state[name] is array) == is_root for name, array in before.items())
    assert is_root or (before["fixed"] == 1).all()


def test_lists_and_tuples(hvd):
    rank = hvd.rank()
    state = [np.full(2, float(rank)), {"step": rank}, *range(rank)]
    inner = state[:2]
    assert hvd.broadcast_optimizer_state(state) is state
    assert same(state, [np.zeros(2), {"step": 0}])
    assert all(a is b for a, b in zip(state, inner, strict=True))
    given = Moments(np.full(2, float(rank)), np.full(3, rank))
    back = hvd.broadcast_optimizer_state(given)
    assert same(back, Moments(np.zeros(2), np.zeros(3, int)))
    assert back.first is given.first
    assert same(hvd.broadcast_optimizer_state((rank,) if rank == 0 else ()), (0,))


def test_what_is_one_array_on_the_root_is_one_everywhere_and_the_reverse(hvd):
    is_root = hvd.rank() == 0
    shared = np.zeros(3)
    state = {"a": shared, "b": np.zeros(3) if is_root else shared, "x": [shared, shared, {}]}
    state["y"] = state["x"][2] if is_root else {}
    if is_root:
        state["b"] += 5
        state["y"]["k"] = 1
    hvd.broadcast_optimizer_state(state)
    assert state["a"] is state["x"][0] is state["x"][1]
    assert state["b"] is not state["a"]
    assert same(state["a"], np.zeros(3))
    assert same(state["b"], np.full(3, 5.0))
    assert state["y"] is state["x"][2]
    assert state["y"] == {"k": 1}


def test_views_of_one_buffer_are_filled_where_they_are(hvd):
    flat = np.full(10, float(hvd.rank()))
    state = {"a": flat[:4], "b": flat[4:].reshape(2, 3), "whole": flat, "again": flat[:]}
    views = dict(state)
    if hvd.rank() == 0:
        flat[:] = np.arange(10)
    hvd.broadcast_optimizer_state(state)
    assert same(flat, np.arange(10.0))
    assert all(state[name] is views[name] for name in ("a", "b", "whole"))
    assert np.shares_memory(state["again"], flat)


def test_a_dict_with_an_unpicklable_factory_is_filled_where_there_is_one(hvd):
    rank = hvd.rank()
    state = {"v": collections.defaultdict(lambda: 0.0, {rank: np.full(2, rank)})}
    hvd.broadcast_optimizer_state(state)
    assert same(dict(state["v"]), {0: np.zeros(2, int)})
    assert state["v"]["new"] == 0.0
    if rank == hvd.size() - 1 > 0:
        state = {}
    others = hvd.HorovodInternalError if rank != hvd.size() - 1 else TypeError
    if hvd.size() > 1:
        with pytest.raises(others, match=r"state\['v'\] is a collections.defaultdict"):
            hvd.broadcast_optimizer_state(state)


def test_a_large_state_comes_whole_in_packs(hvd):
    rank, n = hvd.rank(), hvd.size()
    state = {"big": np.full(5_000_000, rank, np.float64), "x": np.full(10, rank)}
    big = state["big"]
    if rank == 0:
        big[:] = np.arange(5_000_000)
    if rank == n - 1 > 0:
        del state["x"]
    counts = counted(hvd, lambda: hvd.broadcast_optimizer_state(state))
    assert state["big"] is big
    assert big[-1] == 4_999_999
    assert (np.diff(big) == 1).all()
    assert same(state["x"], np.zeros(10, int))
    assert counts["collectives"] <= 5 * (n > 1)  # one description, two packs, two agreements


# ---- where the state is -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Plain, WithDict])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_state_of_steps_that_only_the_root_took(hvd, kind, wrapped):
    """The ranks then take the same steps: momentum, counters and rates were all there is."""
    rank, n = hvd.rank(), hvd.size()
    for root in {0, n - 1}:
        params = {"v": np.full(2, 1.0), "w": np.full((2, 2), 2.0)}
        opt = inner = kind(params, lr=0.5 + rank)
        if rank == root:
            inner.step(
                {"w": gradient(0, 5, like=params["w"]), "v": gradient(1, 5, like=params["v"])}
            )
        if wrapped:
            opt = hvd.DistributedOptimizer(inner, params, bcast_period=-1)
        before = {name: array.copy() for name, array in params.items()}
        bound = dict(params)
        schedule, velocity = inner.schedule, inner.velocity
        assert hvd.broadcast_optimizer_state(opt, root_rank=root) is opt
        assert same(params, before)  # no step was taken, no parameter sent
        assert inner.params is params
        assert all(params[name] is array for name, array in bound.items())
        assert inner.velocity is velocity
        assert inner.schedule is schedule
        assert (inner.lr, inner.steps, list(velocity)) == (0.5 + root, 1, ["w", "v"])
        expected = gradient(0, 5, like=params["w"])
        np.testing.assert_array_equal(velocity["w"], expected)
        if kind is WithDict:
            assert inner.loaded == (rank != root)
        hvd.broadcast_parameters(params, root_rank=root)
        inner.step({"w": gradient(0, 1, like=params["w"]), "v": gradient(1, 1, like=params["v"])})
        assert hvd.check_consistency(params | {f"m{k}": velocity[k] for k in velocity}) == []


def test_attributes_come_go_and_keep_their_arrays(hvd):
    rank = hvd.rank()
    opt = Plain({"w": np.zeros(2)})
    opt.buffer, opt.best = np.full(3, rank), (np.full(2, rank), None)
    kept = opt.buffer, opt.best[0]
    if rank == 0:
        opt.only_here = {"x": [1, np.ones(2)]}
    else:
        opt.only_there = np.zeros(2)
    hvd.broadcast_optimizer_state(opt)
    assert not hasattr(opt, "only_there")
    assert same(opt.only_here, {"x": [1, np.ones(2)]})
    assert opt.buffer is kept[0]
    assert opt.best[0] is kept[1]
    assert same(opt.best, (np.zeros(2, int), None))
    assert set(vars(opt)) == {
        *("params", "lr", "velocity", "steps", "schedule", "buffer", "best", "only_here")
    }


def test_an_object_without_attributes_shows_its_state(hvd):
    rank = hvd.rank()
    state = {"v": np.full(2, float(rank)), "t": rank}
    opt = Slots(state)
    array = state["v"]
    assert hvd.broadcast_optimizer_state(opt) is opt
    assert opt.state is state
    assert state["v"] is array
    assert same(state, {"v": np.zeros(2), "t": 0})


def test_an_optimizer_without_state_is_left_alone(hvd):
    opt = Plain({})
    for name in list(vars(opt)):
        delattr(opt, name)
    hvd.broadcast_optimizer_state(opt)
    assert vars(opt) == {}
    assert hvd.broadcast_optimizer_state([]) == []


def test_parameters_in_the_state_are_those_of_each_rank(hvd):
    rank, n = hvd.rank(), hvd.size()
    params = {"a": np.full(2, float(rank)), "b": np.full(2, 10.0 + rank)}
    inner = Plain(None)
    del inner.params
    inner.weights = [*params.values(), np.full(2, 20.0 + rank)]
    inner.swap = np.full(2, 30.0)
    if rank == 0:
        inner.swap = params["b"][:]  # an alias on the root becomes one elsewhere
    elif rank == n - 1:
        inner.weights[2] = params["a"]  # and must not be overwritten where there was one
    opt = hvd.DistributedOptimizer(inner, params, bcast_period=-1)
    hvd.broadcast_optimizer_state(opt)
    assert same(params, {"a": np.full(2, float(rank)), "b": np.full(2, 10.0 + rank)})
    assert inner.weights[0] is params["a"]
    assert inner.weights[1] is params["b"]
    assert np.shares_memory(inner.swap, params["b"])
    assert same(inner.weights[2], np.full(2, 20.0))


def test_parameters_of_an_optimizer_that_is_not_wrapped(hvd):
    rank = hvd.rank()
    layers = [(np.full(2, float(rank)), np.full(1, rank)), {"w": np.full(3, rank)}]
    opt = Plain(layers, lr=rank)
    opt.best = [layers[0][0], 1]
    hvd.broadcast_optimizer_state(opt)
    assert opt.params is layers
    assert same(layers, [(np.full(2, float(rank)), np.full(1, rank)), {"w": np.full(3, rank)}])
    assert opt.best[0] is layers[0][0]
    assert opt.lr == 0


# ---- errors -------------------------------------------------------------------------------------


def fails(hvd, state, at, kind, text, **kwargs):
    """The call fails on every rank: by `kind` on rank `at`, quoted on the others."""
    own = hvd.rank() == at
    with pytest.raises(kind if own else hvd.HorovodInternalError, match=text) as caught:
        hvd.broadcast_optimizer_state(state, **kwargs)
    assert own or f"rank {at}: {kind.__name__}" in str(caught.value)


class Stubborn:
    """Neither state that can be seen nor a pickle."""

    def __reduce__(self):
        raise RuntimeError("no pickles here")


def circle():
    """A state that is part of itself."""
    state = {}
    state["s"] = [state]
    return state


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: {"f": [lambda: 0]}, TypeError, r"state\['f'\]\[0\] is a function that cannot"),
        (lambda: {"x": Stubborn()}, TypeError, r"state\['x'\] is a Stubborn .*no pickles here"),
        (lambda: {np.float64: 1}, TypeError, "state has a key of type type"),
        (circle, ValueError, "contains itself"),
        (lambda: None, TypeError, "a NoneType has no state.*give the optimizer state_dict"),
        (lambda: np.zeros(3), TypeError, "a ndarray has no state"),
        (lambda: fails, TypeError, "a function has no state"),
        (lambda: Plain, TypeError, "a type has no state"),
        (lambda: Slots((1,)), TypeError, "a Slots has no state"),
    ],
)
def test_what_the_root_cannot_send_is_an_error_on_all_and_changes_nothing(hvd, wrong, kind, text):
    rank, n = hvd.rank(), hvd.size()
    for root in {0, n - 1}:
        state = wrong() if rank == root else make_state(rank)
        fails(hvd, state, root, kind, text, root_rank=root)
        assert rank == root or same(state, make_state(rank))
        state = {"x": np.full(3, rank)}
        hvd.broadcast_optimizer_state(state, root_rank=root)  # the next call works
        assert same(state, {"x": np.full(3, root)})


def test_an_attribute_that_may_be_state_is_an_error_on_all(hvd):
    rank, n = hvd.rank(), hvd.size()
    opt = Plain({"w": np.zeros(1)}, lr=rank)
    if rank == n - 1:
        opt.helper = Stubborn()
    fails(hvd, opt, n - 1, TypeError, "'helper' is a Stubborn, of which nobody knows.*state_dict")
    assert opt.lr == rank


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "other", [[1], (1,), {"w": 1}, None], ids=["list", "tuple", "dict", "none"]
)
def test_states_of_two_kinds_are_an_error_on_all(hvd, other):
    rank, n = hvd.rank(), hvd.size()
    at, state = n - 1, Plain({}) if isinstance(other, list) else [np.full(2, rank)]
    if isinstance(other, list):
        state = {"w": rank}
    mine = copy.deepcopy(other) if rank == at else state
    fails(hvd, mine, at, TypeError, "no state|the root's state is a")
    assert mine == other if rank == at else mine is state


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_cannot_load_is_an_error_on_all(hvd, monkeypatch):
    rank, n = hvd.rank(), hvd.size()
    opt = WithDict({"w": np.zeros(2)})
    opt.step({"w": np.full(2, 1.0 + rank)})
    if rank == n - 1:
        monkeypatch.setattr(opt, "load_state_dict", lambda state: state["no such key"])
    fails(hvd, opt, n - 1, KeyError, "no such key")
    if rank == n - 1:
        monkeypatch.undo()
        monkeypatch.setattr(opt, "state_dict", lambda: 1 / 0)
    fails(hvd, opt, n - 1, ZeroDivisionError, "division by zero")
    if rank == n - 1:
        monkeypatch.undo()
    hvd.broadcast_optimizer_state(opt)
    assert same(opt.velocity, {"w": np.full(2, 1.0)})


class NotHere:
    """Pickles, but rank 0 alone can make one."""

    def __reduce__(self):
        return make_not_here, ()


def make_not_here():
    import hvdlite

    if hvdlite.rank() != 0:
        raise RuntimeError("it cannot be made here")
    return NotHere()


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_cannot_make_is_an_error_on_all_and_changes_nothing(hvd):
    rank, n = hvd.rank(), hvd.size()
    state = {"a": np.full(2, rank), "z": [NotHere() if rank == 0 else None]}
    with pytest.raises(RuntimeError if rank else hvd.HorovodInternalError, match="made here"):
        hvd.broadcast_optimizer_state(state)
    assert same(state["a"], np.full(2, rank))
    assert n > 1


def test_wrong_roots(hvd):
    n = hvd.size()
    state = {"a": np.full(2, hvd.rank())}
    with pytest.raises(ValueError, match=f"root_rank {n} is not among the ranks"):
        hvd.broadcast_optimizer_state(state, root_rank=n)
    with pytest.raises(TypeError, match="root_rank is a world rank"):
        hvd.broadcast_optimizer_state(state, root_rank="0")
    if n > 1:
        with pytest.raises(hvd.MismatchError, match=r"root_rank: 0 on ranks .*; 1 on ranks"):
            hvd.broadcast_optimizer_state(state, root_rank=int(hvd.rank() == n - 1))
    assert same(state, {"a": np.full(2, hvd.rank())})


# ---- who takes part -----------------------------------------------------------------------------


def test_process_sets_have_states_of_their_own(hvd):
    rank, n = hvd.rank(), hvd.size()
    odd, even = list(range(1, n, 2)) or [0], list(range(0, n, 2))
    with process_sets(hvd, odd, even) as sets:
        for ps in sets:
            state = {"a": np.full(2, rank), "t": rank}
            if rank in ps.ranks:
                root = ps.ranks[-1]
                hvd.broadcast_optimizer_state(state, root, process_set=ps)
                assert same(state, {"a": np.full(2, root), "t": root})
            else:
                with pytest.raises(ValueError, match="not a member"):
                    hvd.broadcast_optimizer_state(state, ps.ranks[0], process_set=ps)


# ---- torch --------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return import_module("torch")


@needs("torch")
@pytest.mark.parametrize(
    "bfloat16",
    [False, pytest.param(True, marks=needs("ml_dtypes"))],
    ids=["float32", "bfloat16"],
)
def test_torch_tensors_in_a_dict(hvd, torch, bfloat16):
    rank = hvd.rank()
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    state = {"a": torch.full((2, 3), 1.5 * rank, dtype=dtype).t(), "t": torch.tensor(rank)}
    kept = dict(state)
    if rank == 0:
        state["new"] = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        state["array"] = np.zeros(2)
    else:
        state["array"] = torch.zeros(2, dtype=torch.float64)
    hvd.broadcast_optimizer_state(state)
    assert all(state[name] is tensor for name, tensor in kept.items())
    assert torch.equal(state["a"], torch.zeros((3, 2), dtype=dtype))
    assert state["t"].item() == 0
    assert torch.equal(state["new"], torch.ones(3, dtype=dtype))
    assert same(state["array"], np.zeros(2))


@needs("torch")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.5}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", {}),
        ("RMSprop", {"centered": True, "momentum": 0.1}),
        ("Adagrad", {}),
        ("Adamax", {}),
    ],
)
def test_torch_optimizers_that_only_the_root_has_stepped(hvd, torch, name, options, steps):
    rank = hvd.rank()
    torch.manual_seed(9)
    model = torch.nn.Linear(3, 2)
    opt = getattr(torch.optim, name)(model.parameters(), **options)
    opt.param_groups[0]["lr"] *= 1 + rank

    def step():
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        opt.step()

    for _ in range(steps * (rank == 0)):
        step()
    before = pickle.dumps([p.tolist() for p in model.parameters()])
    hvd.broadcast_optimizer_state(opt)
    assert before == pickle.dumps([p.tolist() for p in model.parameters()])
    for tensor in model.parameters():
        tensor.data = hvd.broadcast(tensor.data, 0)
    for _ in range(2):
        step()
    said = hvd.allgather_object([p.tolist() for p in model.parameters()])
    assert all(values == said[0] for values in said)
