"""Rows R14, R15 and R19: a world of one, no open port, and what parameters may be."""

import re
from pathlib import Path

import numpy as np
import pytest

from training import Recorder, assert_equal, counted, gradient, mean, zeros

pytestmark = pytest.mark.mpi(min_size=1)


# ---- R14: one process needs nobody -----------------------------------------------------------


def test_r14_a_world_of_one_has_the_whole_api_and_communicates_nothing(hvd, comm):
    hvd.shutdown()
    hvd.init(comm=[comm.rank])  # each rank for itself
    assert (hvd.rank(), hvd.size()) == (0, 1)
    assert hvd.describe()["backend"] == "local"
    params = {"a": np.full(3, 1.0 + comm.rank), "b": np.zeros((), np.float32)}
    inner = Recorder(params)

    def everything():
        for views in (False, True):
            opt = hvd.DistributedOptimizer(
                inner,
                params,
                bcast_period=1,
                backward_passes_per_step=2,
                gradient_as_bucket_view=views,
            )
            for step in range(2):
                with opt.no_sync():
                    opt.grad_ready("a", gradient(0, comm.rank, step))
                opt.grad_ready("a", gradient(1, comm.rank, step))
                reduced = opt.synchronize()
                expected = gradient(0, comm.rank, step) + gradient(1, comm.rank, step)
                assert_equal(reduced, {"a": expected})
                with opt.skip_synchronize():
                    opt.step()
                opt.step({"b": np.float32(comm.rank)}, weight=3.0)
                assert_equal(inner.last, {"b": np.asarray(comm.rank, np.float32)})
            opt.add_param_group({"params": {"c": np.zeros(2)}})
            opt.step()
        assert hvd.broadcast_parameters(params) is params
        assert hvd.broadcast_object(comm.rank) == comm.rank
        assert hvd.allgather_object(comm.rank) == [comm.rank]
        np.testing.assert_array_equal(hvd.allreduce(params["a"]), params["a"])
        np.testing.assert_array_equal(hvd.allgather(params["a"]), params["a"])
        assert hvd.average_metrics({"loss": comm.rank}) == {"loss": comm.rank}
        assert list(hvd.shard(4, shuffle=False)) == [0, 1, 2, 3]
        hvd.barrier()

    counts = counted(hvd, everything)
    assert counts["collectives"] == counts["bytes"] == counts["buckets"] == 0
    assert counts["steps"] == 10
    assert_equal(params, {"a": np.full(3, 1.0 + comm.rank), "b": np.zeros((), np.float32)})


def test_r14_a_world_of_one_does_not_disturb_the_others(hvd, comm):
    rank, n = comm.rank, comm.size
    hvd.shutdown()
    if rank == n - 1:
        hvd.init(comm=[rank])
        who = [rank]
    else:
        hvd.init(comm=list(range(n - 1)))
        who = range(n - 1)
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, zeros("a"))
    for step in range(3):
        opt.step({"a": gradient(0, rank, step)})
        assert_equal(inner.last, {"a": mean(0, who, step)})


# ---- R15: no port ----------------------------------------------------------------------------


def open_ports():
    """Inodes of this process's sockets that listen, or are bound for datagrams, on any network."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
        except FileNotFoundError:  # the directory's own descriptor
            continue
        if found:
            mine.add(found[1])
    ports = set()
    for protocol, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        table = Path("/proc/self/net", protocol)
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        ports |= {(protocol, f[9]) for f in map(str.split, rows) if f[3] == state and f[9] in mine}
    return ports


def test_r15_open_ports_would_be_seen(hvd):
    import socket

    with socket.create_server(("127.0.0.1", 0)):
        seen = open_ports()
    assert len(seen - open_ports()) == 1


@pytest.mark.parametrize("backend", ["shm", "mpi"], ids="backend={}".format)
def test_r15_objects_and_barriers_need_no_open_port(hvd, backend):
    hvd.shutdown()
    before = open_ports()  # those that MPI itself may have
    hvd.init(config={"backend": backend})
    rank, n = hvd.rank(), hvd.size()
    note = {"plan": list(range(1000)), "rank": rank}
    assert hvd.broadcast_object(note, root_rank=n - 1)["rank"] == n - 1
    assert [other["rank"] for other in hvd.allgather_object(note)] == list(range(n))
    opt = hvd.DistributedOptimizer(Recorder(), zeros("ab"), bcast_period=1)
    for step in range(3):
        opt.step({"a": gradient(0, rank, step)})
        hvd.barrier()
    assert open_ports() - before == set()


# ---- R19: what parameters may be -------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"a", "b"}, TypeError, "a set has no order"),
        (frozenset({"a"}), TypeError, "a set has no order"),
        ([("a", np.zeros(2)), ("a", np.zeros(2))], ValueError, "two parameters are named 'a'"),
        (
            [{"params": {"a": np.zeros(2)}}, {"params": {"a": np.zeros(3)}}],
            ValueError,
            "two parameters are named 'a'",
        ),
        ({"a": np.zeros((4, 4))[:, ::2]}, ValueError, "'a' is not contiguous"),
        ({"a": [1.0, 2.0]}, TypeError, "'a' is a list"),
        ({"a": 1.0}, TypeError, "'a' is a float"),
        ({3: np.zeros(2)}, TypeError, "name is a str, got 3"),
        ({"a": np.array(["x"])}, TypeError, "'a'.*dtype"),
        ({"a": np.array([None])}, TypeError, "'a'.*dtype"),
        ({"a": np.zeros(2, bool)}, TypeError, "'a'.*bool"),
        (np.zeros(3), TypeError, "ndarray"),
        ("ab", TypeError, "str"),
        (7, TypeError, "int"),
        ([np.zeros(3)], TypeError, "pair"),
        ([{"weights": {}}], TypeError, '"params"'),
        (None, TypeError, "named_parameters is missing"),
    ],
    ids=[
        "set",
        "frozenset",
        "twice",
        "two groups",
        "strided",
        "list",
        "number",
        "name",
        "strings",
        "objects",
        "bool",
        "array",
        "string",
        "int",
        "no pairs",
        "no params",
        "none",
    ],
)
def test_r19_what_cannot_be_parameters_is_refused_with_a_reason(hvd, params, error, words):
    with pytest.raises(error, match=words):
        hvd.DistributedOptimizer(list, params)


def test_r19_what_one_rank_alone_gets_wrong_is_told_to_all(hvd):
    n, rank = hvd.size(), hvd.rank()
    last = n - 1
    params = {"a": np.zeros((4, 4))[:, ::2] if rank == last else np.zeros((4, 2))}
    with pytest.raises(ValueError if rank == last else hvd.HorovodInternalError) as caught:
        hvd.DistributedOptimizer(Recorder(), params)
    assert caught.match("'a' is not contiguous")
    if rank != last:
        assert caught.match(f"rank {last}")


@pytest.mark.parametrize("kind", ["mapping", "pairs", "iterator", "groups", "attribute", "fortran"])
def test_r19_what_parameters_may_be(hvd, kind):
    rank, ranks = hvd.rank(), range(hvd.size())
    params = zeros("ab", (2, 3))
    if kind == "fortran":
        params["a"] = np.asfortranarray(params["a"])
    inner = Recorder(params)
    named = {
        "mapping": params,
        "pairs": list(params.items()),
        "iterator": iter(params.items()),
        "groups": [{"params": {"a": params["a"]}}, {"params": [("b", params["b"])]}],
        "attribute": None,
        "fortran": params,
    }[kind]
    opt = hvd.DistributedOptimizer(inner, named)
    opt.step({name: gradient(k, rank, 0, params[name]) for k, name in enumerate("ab")})
    assert_equal(inner.last, {name: mean(k, ranks, 0, params[name]) for k, name in enumerate("ab")})


def test_r19_an_optimizer_without_parameters_steps_too(hvd):
    inner = Recorder()
    opt = hvd.DistributedOptimizer(inner, {})
    opt.step()
    assert opt.plan.buckets == ()
    opt.add_param_group({"params": zeros("a")})
    opt.step({"a": gradient(0, hvd.rank())})
    assert_equal(inner.last, {"a": mean(0, range(hvd.size()))})


def test_a_second_init_returns_the_same_context_and_says_which_settings_stay(hvd, caplog):
    context = hvd.init()
    assert hvd.init(config={"fusion_threshold": context.config.fusion_threshold}) is context
    assert not caplog.records
    assert hvd.init(config={"fusion_threshold": 12345}) is context
    (record,) = caplog.records
    kept = f"fusion_threshold={context.config.fusion_threshold} (not 12345); call shutdown() first"
    assert kept in record.getMessage()
