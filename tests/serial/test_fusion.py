"""The fusion buffer: views of one piece of memory, where the plan says, that never overlap."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.bucket import TensorSpec, merge_orders, plan_buckets
from hvdlite.fusion import FusionBuffer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    np.dtype(d).name: np.dtype(d)
    for d in (
        *("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64"),
        *("longdouble", "complex64", "complex128", BFLOAT16),
    )
}
SETS = [None, (0, 1), (0, 2), (1, 2), (0, 1, 2)]
GUARD = 64  # bytes before and after each region that nobody may touch
CANARY = 0xA5


def region_of(nbytes):
    """Aligned bytes as a backend hands them out, and the guards around them."""
    raw = np.full(nbytes + 2 * GUARD + 63, CANARY, np.uint8)
    start = -raw.ctypes.data % 64 + GUARD
    memory = raw[start : start + nbytes]
    memory.fill(0)
    return memory, (raw[:start], raw[start + nbytes :])


@st.composite
def buffers(draw):
    """A plan, its specs, and one rank's buffer with the regions that it looks into."""
    members = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), max_size=3).map(tuple),
                st.sampled_from(sorted(DTYPES)),
                st.sampled_from(SETS),
                st.integers(0, 1),
            ),
            max_size=12,
        )
    )
    specs = {
        f"p{k}": TensorSpec(f"p{k}", shape, dtype, DTYPES[dtype].itemsize, ranks, region)
        for k, (shape, dtype, ranks, region) in enumerate(members)
    }
    order = draw(st.permutations(list(specs)))
    plan = plan_buckets(
        list(specs.values()),
        order,
        fusion_threshold=draw(st.integers(0, 2000)),
        first_bucket=128,
        launch_order=merge_orders(list(specs.values()), {}),
    )
    rank = draw(st.integers(0, 2))
    sizes = plan.layout(rank)[1]
    regions = [region_of(sizes.get(k, 0)) for k in range(2)]
    memory = [m for m, _ in regions]
    return (
        plan,
        specs,
        rank,
        memory,
        [g for _, gs in regions for g in gs],
        FusionBuffer(plan, rank, memory, specs, DTYPES),
    )


@settings(max_examples=40)
@given(buffers())
def test_views_have_the_shapes_and_dtypes_of_this_ranks_gradients(case):
    _, specs, rank, _, _, buffer = case
    mine = {n for n, s in specs.items() if s.ranks is None or rank in s.ranks}
    assert set(buffer.views) == mine
    for name, view in buffer.views.items():
        assert view.shape == specs[name].shape
        assert view.dtype == DTYPES[specs[name].dtype]
        assert view.flags.c_contiguous
        assert view.flags.writeable
        assert view.flags.aligned


@settings(max_examples=40)
@given(buffers())
def test_views_lie_where_the_plan_says(case):
    plan, _, rank, memory, _, buffer = case
    slots = plan.slots(rank)
    for name, view in buffer.views.items():
        region, offset = slots[name]
        if view.size:
            assert view.ctypes.data == memory[region].ctypes.data + offset
            assert view.ctypes.data % 64 == 0


@settings(max_examples=40)
@given(buffers())
def test_views_alias_the_buffer_and_not_each_other(case):
    _, _, _, memory, guards, buffer = case
    full = [v for v in buffer.views.values() if v.size]
    spans = sorted((v.ctypes.data, v.ctypes.data + v.nbytes) for v in full)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for k, view in enumerate(full):
        view.reshape(-1).view(np.uint8).fill(k + 1)
    for k, view in enumerate(full):  # each still holds what was written into it
        assert (view.reshape(-1).view(np.uint8) == k + 1).all()
    written = sum((m != 0).sum() for m in memory)  # and it was written into the regions
    assert written == sum(view.nbytes for view in full)
    assert all((guard == CANARY).all() for guard in guards)


@settings(max_examples=40)
@given(buffers())
def test_poison_reaches_every_element_and_nothing_outside(case):
    _, _, _, _, guards, buffer = case
    buffer.poison()
    for view in buffer.views.values():
        if view.dtype.kind in "iu":
            assert (view == np.iinfo(view.dtype).max).all()
        elif view.dtype.kind == "b":
            assert view.all()
        else:
            assert np.isnan(view).all()
    assert all((guard == CANARY).all() for guard in guards)


@pytest.mark.parametrize("launch", ["abcd", "dcba", "cadb"])
def test_views_do_not_move_with_the_launch_order(launch):
    specs = {n: TensorSpec(n, (20,), "float32", 4, (0, 1)) for n in "abcd"}
    memory, _ = region_of(512)
    kwargs = {"fusion_threshold": 256, "first_bucket": 128}
    before = plan_buckets(list(specs.values()), "abcd", **kwargs)
    after = plan_buckets(list(specs.values()), "abcd", launch_order=launch, **kwargs)
    old = FusionBuffer(before, 0, [memory], specs, DTYPES).views
    new = FusionBuffer(after, 0, [memory], specs, DTYPES).views
    for name in "abcd":
        old[name].fill(ord(name))
        assert (new[name] == ord(name)).all()
        assert new[name].ctypes.data == old[name].ctypes.data


def test_views_of_two_ranks_hold_the_same_bucket_at_their_own_places():
    specs = {
        "lower": TensorSpec("lower", (16,), "float32", 4, (0, 1)),
        "both": TensorSpec("both", (2, 8), "float32", 4, (0, 1, 2)),
    }
    plan = plan_buckets(
        list(specs.values()), ["lower", "both"], fusion_threshold=64, first_bucket=64
    )
    offsets = {}
    for rank in (0, 2):
        memory, _ = region_of(plan.layout(rank)[1][0])
        view = FusionBuffer(plan, rank, [memory], specs, DTYPES).views["both"]
        offsets[rank] = view.ctypes.data - memory.ctypes.data
    assert offsets == {0: 64, 2: 0}
