"""The bucket plan: a pure function, so any parameters at all must give one that keeps its rules."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.bucket import Bucket, Plan, TensorSpec, align, merge_orders, plan_buckets, spec_of
from hvdlite.errors import ConfigError

MIB = 2**20
ITEMSIZES = {
    "bool": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex128": 16,
}
SETS = [None, (0,), (0, 1), (1, 2), (0, 1, 2, 3), (2, 3), (1, 3)]  # overlapping, and local
RANKS = range(4)

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)  # 0-d and zero-size too
some = settings(max_examples=40)
thresholds = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 1000]), st.integers(0, 60_000))


@st.composite
def models(draw, sets=tuple(SETS), max_size=24):
    """Specs in registration order; most share few keys, so that buckets fill up."""
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.sampled_from(sets), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        )
    )
    members = draw(st.lists(st.tuples(shapes, st.sampled_from(kinds)), max_size=max_size))
    return [
        TensorSpec(f"p{k}", shape, dtype, ITEMSIZES[dtype], ranks, region)
        for k, (shape, (dtype, ranks, region)) in enumerate(members)
    ]


@st.composite
def planned(draw):
    """Specs, the order they were packed in, the order they become ready in, and their plan."""
    specs = draw(models())
    names = [spec.name for spec in specs]
    order = draw(st.permutations(names))
    launch_order = draw(st.one_of(st.none(), st.permutations(names)))
    thd, first = draw(thresholds), draw(thresholds)
    plan = plan_buckets(
        specs, order, fusion_threshold=thd, first_bucket=first, launch_order=launch_order
    )
    return specs, order, launch_order, plan


def of_key(plan, key):
    """The buckets of one key, in the order in which they were packed."""
    return [plan.buckets[i] for i in plan.memory if plan.buckets[i].key == key]


@some
@given(planned())
def test_every_name_is_in_exactly_one_bucket_of_its_own_key(case):
    specs, _, _, plan = case
    assert sorted(plan.names) == sorted(spec.name for spec in specs)
    keys = {spec.name: spec.key for spec in specs}
    for bucket in plan.buckets:
        assert bucket.names
        assert {keys[name] for name in bucket.names} == {bucket.key}


@some
@given(planned())
def test_no_bucket_exceeds_its_capacity_unless_one_gradient_does(case):
    _, _, _, plan = case
    for key in {bucket.key for bucket in plan.buckets}:
        for k, bucket in enumerate(of_key(plan, key)):
            first = min(plan.first_bucket, plan.fusion_threshold)
            capacity = plan.fusion_threshold if k else first
            assert len(bucket.names) == 1 or bucket.nbytes <= capacity


@some
@given(planned())
def test_no_bucket_is_closed_while_the_next_gradient_still_fits(case):
    specs, _, _, plan = case
    nbytes = {spec.name: spec.nbytes for spec in specs}
    for key in {bucket.key for bucket in plan.buckets}:
        for k, (bucket, following) in enumerate(pairwise(of_key(plan, key))):
            first = min(plan.first_bucket, plan.fusion_threshold)
            capacity = plan.fusion_threshold if k else first
            assert bucket.nbytes + align(nbytes[following.names[0]]) > capacity or capacity == 0


@some
@given(planned())
def test_slots_of_a_bucket_are_aligned_and_lie_end_to_end(case):
    specs, _, _, plan = case
    nbytes = {spec.name: spec.nbytes for spec in specs}
    for bucket in plan.buckets:
        end = 0
        for name, offset in zip(bucket.names, bucket.offsets, strict=True):
            assert offset == end
            assert offset % 64 == 0
            end = offset + -(-nbytes[name] // 64) * 64
        assert bucket.nbytes == end


@some
@given(planned())
def test_memory_of_a_rank_is_used_once_and_without_gaps(case):
    specs, _, _, plan = case
    nbytes = {spec.name: spec.nbytes for spec in specs}
    for rank in RANKS:
        starts, sizes = plan.layout(rank)
        held = [i for i, bucket in enumerate(plan.buckets) if bucket.is_for(rank)]
        assert sorted(starts) == held
        for region in {bucket.region for bucket in plan.buckets}:
            end = 0
            for i in plan.memory:
                if i in starts and plan.buckets[i].region == region:
                    assert starts[i] == end
                    end += plan.buckets[i].nbytes
            assert sizes.get(region, 0) == end
        slots = plan.slots(rank)
        mine = {s.name: s.region for s in specs if s.ranks is None or rank in s.ranks}
        assert {name: region for name, (region, _) in slots.items()} == mine
        spans = sorted((slots[n][0], slots[n][1], slots[n][1] + nbytes[n]) for n in mine)
        for (region, _, end), (next_region, start, _) in pairwise(spans):
            assert region != next_region or end <= start
        assert all(start % 64 == 0 and end <= sizes[region] for region, start, end in spans)


@some
@given(planned())
def test_buckets_of_a_key_are_neighbours_in_memory(case):
    _, _, _, plan = case
    keys = [plan.buckets[i].key for i in plan.memory]
    changes = sum(a != b for a, b in pairwise(keys))
    assert changes == max(len(set(keys)) - 1, 0)
    assert sorted(plan.memory) == list(range(len(plan.buckets)))


@some
@given(planned())
def test_names_of_a_key_lie_in_the_order_in_which_they_were_packed(case):
    specs, order, _, plan = case
    keys = {spec.name: spec.key for spec in specs}
    for key in set(keys.values()):
        packed = [name for bucket in of_key(plan, key) for name in bucket.names]
        assert packed == [name for name in order if keys[name] == key]


@some
@given(planned())
def test_a_bucket_is_launched_when_its_last_member_is_ready(case):
    _, order, launch_order, plan = case
    ready = {name: k for k, name in enumerate(launch_order or order)}
    last = [max(ready[name] for name in bucket.names) for bucket in plan.buckets]
    assert last == sorted(last)


@some
@given(models(), st.randoms(use_true_random=False), thresholds, thresholds)
def test_another_launch_order_moves_no_slot(specs, random, thd, first):
    names = [spec.name for spec in specs]
    ready = random.sample(names, len(names))
    sizes = {"fusion_threshold": thd, "first_bucket": first}
    before = plan_buckets(specs, names, **sizes)
    after = plan_buckets(specs, names, launch_order=ready, **sizes)
    assert {b.names for b in after.buckets} == {b.names for b in before.buckets}
    for rank in RANKS:
        assert after.slots(rank) == before.slots(rank)
        assert after.layout(rank)[1] == before.layout(rank)[1]


@some
@given(planned())
def test_equal_input_gives_an_equal_plan_and_another_plan_another_digest(case):
    specs, order, launch_order, plan = case
    again = plan_buckets(
        list(specs),
        list(order),
        fusion_threshold=plan.fusion_threshold,
        first_bucket=plan.first_bucket,
        launch_order=launch_order,
    )
    assert again == plan
    assert again.digest == plan.digest
    assert 0 <= plan.digest < 2**63
    assert str(again) == str(plan)
    others = [
        replace(plan, fusion_threshold=plan.fusion_threshold + 1),
        replace(plan, first_bucket=plan.first_bucket + 1),
        replace(plan, memory=(*plan.memory, len(plan.memory))),
        replace(plan, buckets=(*plan.buckets, Bucket(("new",), (0,), 64, "float32", (0, 1)))),
    ]
    for k, bucket in enumerate(plan.buckets[:3]):
        for change in (
            {"ranks": (5, 6)},
            {"region": 7},
            {"nbytes": 1},
            {"dtype": "int4"},
            {"names": ("?",)},
            {"offsets": (8,)},
        ):
            changed = [*plan.buckets]
            changed[k] = replace(bucket, **change)
            others.append(replace(plan, buckets=tuple(changed)))
    assert plan.digest not in {other.digest for other in others}


@some
@given(planned())
def test_plan_comes_back_from_its_dict_and_covers_its_specs(case):
    specs, _, _, plan = case
    back = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert back == plan
    assert back.digest == plan.digest
    back.check_covers(reversed(specs))


def test_plan_comes_back_from_a_file_and_replaces_an_old_one(tmp_path):
    specs = [spec("größe", (3,)), spec("a/b", ()), spec("\ud800", (0, 4))]
    plan = plan_buckets(specs, [s.name for s in specs], fusion_threshold=128, first_bucket=64)
    path = tmp_path / "plan.json"
    path.write_text("an older file, longer than the new one" * 100)
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).names == ("größe", "a/b", "\ud800")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    plan = plan_buckets([spec("a", (1,))], ["a"], fusion_threshold=1, first_bucket=1)
    object.__setattr__(plan, "fusion_threshold", object())  # JSON has no word for it
    with pytest.raises(TypeError):
        plan.save(path)
    assert path.read_text() == "old"


GOOD = {
    "buckets": [[["a"], [0], 64, "float32", [0, 1], 0], [["b"], [0], 64, "float32", None, 0]],
    "memory": [0, 1],
    "fusion_threshold": 64,
    "first_bucket": 64,
}


@pytest.mark.parametrize(
    "change",
    [
        {"memory": [0, 0]},
        {"memory": [0]},
        {"memory": [0, 1, 2]},
        {"memory": None},
        {"buckets": 3},
        {"buckets": [[["a"], [0], 64, "float32", [0, 1]]]},
        {"buckets": [[["a"], ["zero"], 64, "float32", None, 0]]},
        {"fusion_threshold": "many"},
        {"fusion_threshold": float("inf")},
        {"first_bucket": [1]},
    ],
    ids=str,
)
def test_what_is_no_plan_is_a_config_error(change, tmp_path):
    assert Plan.from_dict(GOOD).names == ("a", "b")
    with pytest.raises(ConfigError, match="no bucket plan"):
        Plan.from_dict(GOOD | change)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError, match="no bucket plan"):
        Plan.load(path)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_plan_without_one_of_its_parts_is_a_config_error(key):
    with pytest.raises(ConfigError, match=key):
        Plan.from_dict({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"{", b"\xff\xfe\x00binary", b"null"], ids=str
)
def test_a_file_that_holds_no_plan_is_a_config_error_that_names_it(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        Plan.load(path)


def test_a_plan_file_that_is_missing_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "absent")


# --- check_covers


def spec(name, shape=(4,), dtype="float32", ranks=(0, 1), region=0):
    return TensorSpec(name, shape, dtype, ITEMSIZES[dtype], ranks, region)


ABC = [spec("a"), spec("b", (40,)), spec("c", (2, 3))]


def plan_of(specs, thd=10**6, first=10**6, **kwargs):
    names = [s.name for s in specs]
    return plan_buckets(specs, names, fusion_threshold=thd, first_bucket=first, **kwargs)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([*ABC, spec("d")], r"lacks parameters \['d'\]"),
        (ABC[:2], "'c', which the optimizer does not have"),
        ([spec("a", (17,)), *ABC[1:]], "'b' has another size"),
        ([ABC[0], ABC[1], spec("c", (17,))], "bucket of 320 bytes holds 384"),
        ([spec("a", dtype="float64"), *ABC[1:]], "'a' is .*float64.* but .*float32"),
        ([spec("a", ranks=(0, 2)), *ABC[1:]], r"'a' is .*\(0, 2\).* but .*\(0, 1\)"),
        ([spec("a", ranks=None), *ABC[1:]], "'a' is .*None"),
        ([spec("a", region=1), *ABC[1:]], "'a' is "),
    ],
    ids=["new", "gone", "grown", "last grown", "dtype", "ranks", "local", "region"],
)
def test_a_plan_for_other_parameters_is_refused(specs, words):
    plan = plan_of(ABC)
    plan.check_covers(ABC)
    with pytest.raises(ConfigError, match=words):
        plan.check_covers(specs)


def test_a_plan_that_holds_a_name_twice_is_refused():
    one = plan_of(ABC[:1])
    twice = replace(one, buckets=one.buckets * 2, memory=(0, 1))
    with pytest.raises(ConfigError, match="'a', twice"):
        twice.check_covers(ABC[:1])


def test_a_plan_with_fewer_offsets_than_names_is_refused():
    good = plan_of(ABC)
    bad = replace(good, buckets=(replace(good.buckets[0], offsets=(0, 64)),))
    with pytest.raises(ConfigError):
        bad.check_covers(ABC)


def test_a_plan_still_fits_where_a_size_changed_within_its_slot():
    plan = plan_of(ABC)
    plan.check_covers([spec("a", (16,)), spec("b", (33,)), spec("c", (6,))])


@pytest.mark.parametrize(("thd", "first"), [(-1, 0), (0, -1)])
def test_a_negative_threshold_is_a_config_error_with_both_values(thd, first):
    with pytest.raises(ConfigError, match=f"{thd} and {first}"):
        plan_of(ABC, thd, first)


# --- literal plans


def picture(plan, unit=1):
    """One line a bucket, in launch order: names, size in `unit`, place in memory."""
    place = {index: k for k, index in enumerate(plan.memory)}
    return [
        f"{' '.join(b.names)} | {b.nbytes // unit} | {place[i]}" for i, b in enumerate(plan.buckets)
    ]


def test_plan_without_fusion():
    specs = [spec("a"), spec("b", (17,)), spec("c", ()), spec("d", (0,)), spec("e", (0,))]
    assert picture(plan_of(specs, thd=0)) == [
        "a | 64 | 0",
        "b | 128 | 1",
        "c | 64 | 2",
        "d | 0 | 3",
        "e | 0 | 4",
    ]


def test_plan_with_threshold_of_128_bytes():
    sizes = {"a": 16, "b": 1, "c": 16, "d": 17, "e": 33, "f": 16, "g": 16, "h": 16}
    specs = [spec(name, (count,)) for name, count in sizes.items()]
    assert picture(plan_of(specs, thd=128, first=64)) == [
        "a | 64 | 0",  # the first is small, so that communication starts early
        "b c | 128 | 1",
        "d | 128 | 2",
        "e | 192 | 3",  # alone above the threshold
        "f g | 128 | 4",
        "h | 64 | 5",
    ]


def test_plan_of_60_gradients_of_3_mib():
    # Row R4: the seed made 8 single packs and 13 of 12 MiB, beyond its threshold of 10 MiB.
    names = [f"{k:02d}" for k in range(60)]
    specs = [spec(name, (3 * MIB // 4,)) for name in names]
    order = merge_orders(specs, {})  # backward: the last layer first
    plan = plan_buckets(specs, order, fusion_threshold=10 * MIB, first_bucket=MIB)
    assert picture(plan, MIB) == [
        "59 | 3 | 0",
        "58 57 56 | 9 | 1",
        "55 54 53 | 9 | 2",
        "52 51 50 | 9 | 3",
        "49 48 47 | 9 | 4",
        "46 45 44 | 9 | 5",
        "43 42 41 | 9 | 6",
        "40 39 38 | 9 | 7",
        "37 36 35 | 9 | 8",
        "34 33 32 | 9 | 9",
        "31 30 29 | 9 | 10",
        "28 27 26 | 9 | 11",
        "25 24 23 | 9 | 12",
        "22 21 20 | 9 | 13",
        "19 18 17 | 9 | 14",
        "16 15 14 | 9 | 15",
        "13 12 11 | 9 | 16",
        "10 09 08 | 9 | 17",
        "07 06 05 | 9 | 18",
        "04 03 02 | 9 | 19",
        "01 00 | 6 | 20",
    ]


def test_plan_of_mixed_dtypes_and_sets_keeps_each_key_together_in_memory():
    specs = [
        spec("a32"),
        spec("a16", dtype="float16"),
        spec("local", ranks=None),
        spec("b32"),
        spec("pair", ranks=(0, 2)),
        spec("b16", dtype="float16"),
        spec("c32"),
    ]
    plan = plan_of(specs, thd=128, first=64)
    assert picture(plan) == [
        "a32 | 64 | 0",
        "a16 | 64 | 2",
        "local | 64 | 4",
        "pair | 64 | 5",
        "b16 | 64 | 3",
        "b32 c32 | 128 | 1",
    ]
    assert plan.layout(0) == ({0: 0, 5: 64, 1: 192, 4: 256, 2: 320, 3: 384}, {0: 448})
    assert plan.layout(1) == ({0: 0, 5: 64, 1: 192, 4: 256, 2: 320}, {0: 384})
    assert plan.layout(2) == ({2: 0, 3: 64}, {0: 128})
    assert plan.slots(2) == {"local": (0, 0), "pair": (0, 64)}


def test_plan_whose_launch_order_is_not_its_packing_order():
    specs = [spec(name, (16,)) for name in "abcdef"]
    plan = plan_of(specs, thd=128, first=128, launch_order=["f", "a", "e", "b", "d", "c"])
    assert picture(plan) == ["e f | 128 | 2", "a b | 128 | 0", "c d | 128 | 1"]
    assert plan.slots(0) == plan_of(specs, thd=128, first=128).slots(0)


def test_plan_of_nothing():
    plan = plan_of([])
    assert (plan.buckets, plan.names, plan.memory) == ((), (), ())
    assert plan.layout(0) == ({}, {})
    plan.check_covers([])
    assert Plan.from_dict(plan.to_dict()) == plan


def test_plan_of_more_than_2_31_elements_is_exact():
    huge = 2**33 + 1
    specs = [
        spec("a", (huge,)),
        spec("b", (3, huge), dtype="float64"),
        spec("c", (huge,)),
        spec("d", ()),
        spec("e", (2**31 + 7, 2), dtype="int8"),
        spec("f", (5,), dtype="int8"),
    ]
    plan = plan_of(specs, thd=2**40, first=2**40)
    slot = 2**35 + 64  # of 2**33 + 1 float32
    by_name = {bucket.names: bucket for bucket in plan.buckets}
    assert by_name["a", "c", "d"].offsets == (0, slot, 2 * slot)
    assert by_name["a", "c", "d"].nbytes == 2 * slot + 64
    assert by_name["b",].nbytes == 3 * 2**36 + 64
    assert by_name["e", "f"].offsets == (0, 2**32 + 64)
    assert plan.layout(1)[1] == {0: 2 * slot + 64 + 3 * 2**36 + 64 + 2**32 + 128}
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_printed_plan_says_sizes_sets_and_names():
    specs = [spec(name) for name in "abcde"] + [spec("l", ranks=None), spec("big", (10**6,))]
    text = str(plan_of(specs, thd=5 * 10**6, first=320))
    assert text.splitlines() == [
        "3 buckets, 7 gradients, threshold 5000000 B, first 320 B",
        "    0           320 B  float32    ranks 0,1      a, b, c, d, ...",
        "    1            64 B  float32    local          l",
        "    2     4,000,000 B  float32    ranks 0,1      big",
    ]


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_align(nbytes, expected):
    assert align(nbytes) == expected


def test_spec_of_an_array():
    import ml_dtypes
    import numpy as np

    assert spec_of("w", np.zeros((2, 3), ">f4"), (0, 1)) == spec("w", (2, 3))
    made = spec_of("w", np.zeros((), ml_dtypes.bfloat16), None, 3)
    assert made == TensorSpec("w", (), "bfloat16", 2, None, 3)
    assert made.nbytes == 2
    assert TensorSpec("w", (0, 5), "float64", 8, None).nbytes == 0


# --- merge_orders


@st.composite
def ready_orders(draw):
    """Specs, and for some of their groups the order that its deciding rank saw."""
    specs = draw(models())
    orders = {}
    for ranks in {s.ranks for s in specs}:
        if draw(st.booleans()):
            names = [s.name for s in specs if s.ranks == ranks]
            seen = draw(st.permutations(names))
            orders[ranks] = tuple(seen[: draw(st.integers(0, len(seen)))])
    if draw(st.booleans()):
        orders[9, 10] = ("p0", "stranger")  # of a group that is not there
    return specs, orders


@some
@given(ready_orders())
def test_merged_order_holds_every_name_once_and_keeps_each_groups_order(case):
    specs, orders = case
    merged = merge_orders(specs, orders)
    assert sorted(merged) == sorted(s.name for s in specs)
    for ranks in {s.ranks for s in specs}:
        registered = [s.name for s in specs if s.ranks == ranks]
        if ranks in orders:
            seen = list(orders[ranks])
            expected = seen + [name for name in registered if name not in seen]
        else:
            expected = registered[::-1]
        assert [name for name in merged if name in set(registered)] == expected


@some
@given(ready_orders())
def test_merged_order_is_a_pure_function(case):
    specs, orders = case
    backwards = dict(reversed(orders.items()))
    assert merge_orders(list(specs), backwards) == merge_orders(specs, orders)


@some
@given(ready_orders())
def test_merged_order_lets_no_group_wait_for_another(case):
    specs, orders = case
    merged = merge_orders(specs, orders)
    groups = {}
    for s in specs:
        groups.setdefault(s.ranks, set()).add(s.name)
    for names in groups.values():
        for other in groups.values():
            done = [0, 0]
            for name in merged:
                done[0] += name in names
                done[1] += name in other
                # Relative positions differ by no more than one name of either group.
                gap = abs(done[0] / len(names) - done[1] / len(other))
                assert gap <= 1 / len(names) + 1 / len(other)


def test_merged_order_of_two_groups():
    world, pair = [spec(n) for n in "abcd"], [spec(n, ranks=(0, 2)) for n in "xy"]
    registration = [world[0], pair[0], *world[1:], pair[1]]
    assert merge_orders(registration, {}) == ["d", "c", "y", "b", "a", "x"]
    ready = {(0, 1): ("b", "unknown", "a"), (0, 2): ("x",)}
    assert merge_orders(registration, ready) == ["b", "a", "x", "c", "d", "y"]
