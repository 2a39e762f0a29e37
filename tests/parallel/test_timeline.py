"""The timeline on several ranks: a file for each that asked, the same results, and who waited."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.mpi(min_size=1)

PARAMS = {"a": np.zeros((40, 50)), "b": np.zeros(50), "c": np.zeros((50, 30), np.float32)}


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    yield Path(comm.bcast(str(tmp_path)))
    comm.Barrier()  # the folder goes with rank 0's fixture


@pytest.fixture
def recorded(hvd, folder):
    """The path of a timeline of all ranks."""
    hvd.start_timeline(folder / "t.json", all_ranks=True)
    yield folder / "t.json"
    hvd.stop_timeline()


def file_of(path, rank):
    return path.with_name(f"{path.name}.rank{rank}") if rank else path


def stop(hvd, path):
    """The events of this rank's file."""
    hvd.stop_timeline()
    return json.loads(file_of(path, hvd.rank()).read_text())


def train(hvd, steps, **options):
    """The averages of some steps, copied."""
    results = []

    def keep(grads):
        results.append({name: grad.copy() for name, grad in grads.items()})

    rng = np.random.default_rng(hvd.rank())
    options = {"fusion_threshold": 8192, "first_bucket": 4096} | options
    with hvd.DistributedOptimizer(keep, PARAMS, **options) as opt:
        for _ in range(steps):
            for name, param in PARAMS.items():
                grad = rng.normal(size=param.shape).astype(param.dtype)
                if options.get("gradient_as_bucket_view"):
                    opt.grads[name][...] = grad
                    opt.grad_ready(name)
                else:
                    opt.grad_ready(name, grad)
            opt.step()
    return results


def check_tracks(events):
    """Nothing overlaps on one track, unless it lies inside the other."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], -event["dur"], event["name"]))
    for spans in tracks.values():
        ends = []
        for start, negative, name in sorted(spans):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 1e-6, name
            ends.append(start - negative)


@pytest.mark.parametrize("views", [False, True])
def test_steps_are_recorded_on_every_rank_and_the_results_stay_the_same(hvd, comm, folder, views):
    expected = train(hvd, 4, gradient_as_bucket_view=views)
    hvd.start_timeline(folder / "t.json", mark_cycles=True, all_ranks=True)
    results = train(hvd, 4, gradient_as_bucket_view=views)
    events = stop(hvd, folder / "t.json")
    for result, plain in zip(results, expected, strict=True):
        assert result.keys() == plain.keys()
        assert all(result[name].tobytes() == plain[name].tobytes() for name in plain)
    check_tracks(events)
    assert {e["pid"] for e in events} == {hvd.rank()}
    by_name = {}
    for event in events:
        by_name.setdefault(event["name"].partition(" ")[0], []).append(event)
    assert [e["args"]["step"] for e in by_name["STEP"]] == [0, 1, 2, 3]
    assert len(by_name["APPLY"]) == 4
    assert ("MEMCPY_IN_FUSION_BUFFER" in by_name) != views
    if hvd.size() > 1:
        nbytes = sum(array.nbytes for array in PARAMS.values())
        for step in range(4):
            buckets = {
                name: [e for e in by_name[name] if e.get("args", {}).get("step") == step]
                for name in ("QUEUE", "LAUNCH", "ALLREDUCE")
            }
            assert len({len(found) for found in buckets.values()}) == 1, "each once a bucket"
            assert len(buckets["ALLREDUCE"]) > 1
            assert sum(e["args"]["bytes"] for e in buckets["ALLREDUCE"]) >= nbytes
        assert by_name["REDUCE"]
        assert by_name["CYCLE_START"]


def test_eager_calls_are_recorded_from_their_submission_to_their_end(hvd, recorded):
    size = hvd.size()
    handle = hvd.allreduce_async(np.ones(20000), op=hvd.Sum, name="large")
    assert hvd.allgather(np.ones(3), name="gathered").size == 3 * size
    assert (handle.wait() == size).all()
    hvd.grouped_allreduce([np.ones(2), np.ones(4)], name="group")
    with pytest.raises(hvd.MismatchError) if size > 1 else pytest.MonkeyPatch.context():
        hvd.allreduce(np.ones(1 + hvd.rank()), name="wrong")
    events = stop(hvd, recorded)
    calls = {}
    for event in events:
        if event["ph"] in "be":
            calls.setdefault(event["id2"]["local"], []).append(event)
    named = {found[0]["args"]["name"]: found for found in calls.values()}
    for name, kind in (
        ("large", "ALLREDUCE"),
        ("gathered", "ALLGATHER"),
        ("group", "GROUPED_ALLREDUCE"),
        ("wrong", "ALLREDUCE"),
    ):
        assert [(e["ph"], e["name"]) for e in named[name]] == [
            ("b", f"NEGOTIATE_{kind}"),
            ("e", f"NEGOTIATE_{kind}"),
            ("b", kind),
            ("e", kind),
        ]
        times = [e["ts"] for e in named[name]]
        assert times == sorted(times)
    assert named["large"][0]["args"]["bytes"] == 160000
    assert named["large"][0]["ts"] < named["gathered"][0]["ts"] < named["large"][3]["ts"]


def test_without_all_ranks_rank_0_alone_writes_and_all_have_started(hvd, comm, folder):
    hvd.start_timeline(folder / "t.json")
    with pytest.raises(RuntimeError, match="is being recorded"):
        hvd.start_timeline(folder / "other.json")
    hvd.barrier()
    hvd.stop_timeline()
    comm.Barrier()
    assert [path.name for path in folder.iterdir()] == ["t.json"]
    assert {e["pid"] for e in json.loads((folder / "t.json").read_text())} == {0}


@pytest.mark.mpi(min_size=2)
def test_a_wait_tells_for_whom_and_the_clocks_agree(hvd, comm, recorded):
    late = hvd.size() - 1
    opt = hvd.DistributedOptimizer(lambda _: None, {"w": np.zeros(1000)})
    comm.Barrier()
    if hvd.rank() == late:
        time.sleep(0.3)
    opt.step({"w": np.ones(1000)})
    opt.close()
    events = stop(hvd, recorded)
    comm.Barrier()
    if hvd.rank() != late:
        step = next(e for e in events if e["name"] == "STEP 0")
        wait = max(
            (e for e in events if e["name"] == "WAIT" and e["ts"] >= step["ts"]),
            key=lambda e: e["dur"],
        )
        assert wait["args"]["for"] == "step 0 of an optimizer"
        waited = wait["args"]["missing_us"]
        assert max(waited, key=waited.get) == str(late)
        assert waited[str(late)] > 100_000
        theirs = json.loads(file_of(recorded, late).read_text())
        launch = next(e for e in theirs if e["name"] == "LAUNCH")
        assert wait["ts"] < launch["ts"] < wait["ts"] + wait["dur"], "one clock"


@pytest.mark.mpi(min_size=2)
def test_a_long_wait_is_in_the_file_while_it_lasts(hvd, comm, recorded):
    hvd.barrier()  # the files are there
    others = list(range(1, hvd.size()))
    if hvd.rank() == 1:
        deadline, text = time.monotonic() + 30, ""
        while "STILL_WAITING" not in text and time.monotonic() < deadline:
            time.sleep(0.05)
            text = file_of(recorded, 0).read_text()
        (waiting,) = [e for e in json.loads(text) if e["name"] == "STILL_WAITING"]
        assert waiting["args"] == {"for": "allreduce 'long'", "missing": others}
        for other in others[1:]:
            comm.send(None, other)
    elif hvd.rank():
        comm.recv(source=1)
    hvd.allreduce(1.0, name="long")
