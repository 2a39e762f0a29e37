"""The fixtures that the other parallel tests stand on."""

import pytest

from ranks import assert_all

pytestmark = pytest.mark.mpi(min_size=1)


def test_comm_is_a_private_copy_of_the_world(comm):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert MPI.Comm.Compare(comm, world) == MPI.CONGRUENT
    assert comm.allgather(comm.rank) == list(range(world.size))


def test_hvd_is_initialized_on_the_whole_world(hvd, comm):
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)


def test_hvd_is_initialized_again_after_a_test_shut_it_down(hvd):
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_hvd_serves_the_next_test(hvd):
    assert hvd.is_initialized()


def test_assert_all_fails_on_every_rank_and_names_those_at_fault(comm):
    last = comm.size - 1
    with pytest.raises(pytest.fail.Exception, match=rf"\{{{last}: 'rank {last} is last'\}}"):
        assert_all(comm, comm.rank != last, f"rank {comm.rank} is last")
    assert_all(comm, True, "never shown")
