"""Process sets: what a set of ranks is, before and after it is registered."""

import numpy as np
import pytest

import hvdlite
from hvdlite.errors import NotInitializedError
from hvdlite.process_set import ProcessSet, global_process_set


def registered(ranks, world_rank, set_id=3):
    made = ProcessSet(ranks)
    made.bind(set_id, world_rank, made.ranks)
    return made


def test_permutations_are_the_same_set():
    # Row R16
    made = ProcessSet([2, 0])
    assert made.ranks == (0, 2)
    assert made == ProcessSet((0, 2))
    assert hash(made) == hash(ProcessSet(iter([2, 0])))
    assert len({made, ProcessSet([0, 2]), ProcessSet([0])}) == 2
    assert made != ProcessSet([0, 1])
    assert made != (0, 2)
    assert repr(made) == "ProcessSet([0, 2])"


def test_ranks_may_be_numpys_integers():
    made = ProcessSet(np.array([3, 1], np.uint8))
    assert made.ranks == (1, 3)
    assert all(type(r) is int for r in made.ranks)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([], "no ranks"), ([0, 0], r"distinct.*\[0, 0\]"), ([1, -1], r">= 0.*\[1, -1\]")],
    ids=str,
)
def test_ranks_that_make_no_set_are_a_value_error(ranks, words):
    with pytest.raises(ValueError, match=words):
        ProcessSet(ranks)


@pytest.mark.parametrize("ranks", [[0.0], ["1"], "01", [True], [None], [np.bool_(1)], 5], ids=repr)
def test_what_is_no_int_is_a_type_error(ranks):
    with pytest.raises(TypeError):
        ProcessSet(ranks)


def test_rank_is_the_position_in_the_sorted_list():
    # Row R16
    assert [registered([5, 0, 3], r).rank() for r in (0, 3, 5)] == [0, 1, 2]
    made = registered([5, 0, 3], 3)
    assert made.size() == 3
    assert made.included()
    assert made.process_set_id == 3


def test_a_rank_outside_is_not_included_and_has_no_rank():
    made = registered([0, 2], 1)
    assert not made.included()
    assert made.size() == 2
    with pytest.raises(ValueError, match=r"rank 1 is not a member of ProcessSet\(\[0, 2\]\)"):
        made.rank()


@pytest.mark.parametrize("question", ["included", "rank", "size"])
def test_a_set_that_is_not_registered_says_what_to_do(question):
    made = ProcessSet([0, 1])
    assert made.process_set_id is None
    with pytest.raises(
        ValueError, match=r"ProcessSet\(\[0, 1\]\) is not registered.*add_process_set"
    ):
        getattr(made, question)()
    made.bind(1, 0, made.ranks)
    assert getattr(made, question)() in (True, 0, 2)
    made.bind(None, -1, made.ranks)
    with pytest.raises(ValueError, match="not registered"):
        getattr(made, question)()
    assert made.ranks == (0, 1)


def test_the_world_has_no_ranks_before_init():
    hvdlite.shutdown()  # of whatever test came before
    assert repr(global_process_set) == "ProcessSet(the world)"
    assert global_process_set.process_set_id is None
    for question in (
        global_process_set.included,
        global_process_set.rank,
        global_process_set.size,
        lambda: global_process_set.ranks,
    ):
        with pytest.raises(NotInitializedError, match=r"hvdlite\.init\(\)"):
            question()
