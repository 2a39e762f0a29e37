"""The timeline: what is in the file, that it can be read at any time, and that it harms nobody."""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import hvdlite
from hvdlite import context
from hvdlite.errors import ConfigError, NotInitializedError
from hvdlite.timeline import Timeline, now
from hvdlite.types import parse_steps
from interrupts import Alarm, at_every_point
from launch import job_environment

ROOT = Path(__file__).parents[2]
ALL = parse_steps(None, "steps")


def timeline_at(path, **options):
    return Timeline(
        str(path), 0, **{"mark_cycles": False, "steps": ALL, "max_bytes": 2**26} | options
    )


@pytest.fixture
def timeline(tmp_path):
    timeline = timeline_at(tmp_path / "t.json")
    yield timeline
    timeline.close()


@pytest.fixture
def hvd():
    hvdlite.init()
    yield hvdlite
    hvdlite.shutdown()


def events_of(path, *names):
    """The events of a file, in order; of these names alone if there are any."""
    events = json.loads(Path(path).read_text())
    return [e for e in events if e["name"] in names] if names else events


def check(events):
    """What makes a file that every viewer shows as it is meant."""
    spans, open_calls, tracks = defaultdict(list), {}, set()
    for event in events:
        assert set(event) <= {"name", "ph", "pid", "tid", "ts", "dur", "cat", "id2", "s", "args"}
        assert event["ph"] in "MXbei"
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert event["tid"] not in tracks, "two names for one track"
            tracks.add(event["tid"])
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event))
        elif event["ph"] in "be":
            key = event["pid"], event["id2"]["local"]
            if event["ph"] == "b":
                assert open_calls.get(key) is None, "a call has one thing open at a time"
                open_calls[key] = event["name"]
            else:
                assert open_calls.pop(key) == event["name"]
    for (_, tid), track in spans.items():
        assert tid in tracks, "a track without a name"
        ends = []
        for start, negative, event in sorted(track, key=lambda span: span[:2]):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            end = start - negative
            assert not ends or end <= ends[-1] + 1e-6, f"{event} overlaps another one"
            ends.append(end)
    return events


# --- the file


def test_a_file_begins_with_metadata_and_is_complete_from_the_start(timeline):
    events = check(events_of(timeline.path))
    assert [e["name"] for e in events] == [
        "process_name",
        "process_sort_index",
        "start_time_since_epoch_in_micros",
    ]
    assert all(e["pid"] == 0 for e in events)


def test_times_are_the_common_clock_and_the_metadata_say_when_that_was(timeline):
    import time

    before = time.time_ns() // 1000
    timeline.instant("cycles", "HERE", now())
    after = time.time_ns() // 1000
    timeline.flush()
    (start,) = events_of(timeline.path, "start_time_since_epoch_in_micros")
    (here,) = events_of(timeline.path, "HERE")
    epoch = start["args"]["start_time_since_epoch_in_micros"] + here["ts"]
    assert before - 1e5 < epoch < after + 1e5  # another program may set the clock a little
    assert abs(here["ts"] - now() / 1000) < 60e6


def test_it_is_valid_after_every_write_and_nothing_is_lost(timeline):
    rng = random.Random(1)
    count = 0
    for _ in range(200):
        for _ in range(rng.randrange(60)):
            timeline.span("wait", f"e{count}", now(), now(), {"text": 'ü\n"\\]' * rng.randrange(9)})
            count += 1
        timeline.flush()
        text = Path(timeline.path).read_text()
        assert text.endswith("\n]")
        names = [e["name"] for e in json.loads(text) if e["ph"] == "X"]
        assert names == [f"e{k}" for k in range(count)]


def test_a_reader_finds_valid_json_while_it_is_written(timeline):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for _ in range(5):
                timeline.span("wait", "e", now(), now(), {"for": "x" * 40})
            timeline.flush()
            stop.wait(0.0002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes = [len(events_of(timeline.path)) for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


KILLED = """\
import sys
import numpy as np
import hvdlite as hvd
hvd.init()
opt = hvd.DistributedOptimizer(lambda grads: None, {"w": np.zeros(8)})
hvd.start_timeline(sys.argv[1], mark_cycles=True)
while True:
    opt.step({"w": np.ones(8)})
    hvd.allreduce(1.0)
    sys.stdout.write(".")
    sys.stdout.flush()
"""


def test_a_file_grows_and_keeps_no_blanks(timeline):
    for k in range(5000):
        timeline.span("wait", f"e{k}", now(), now(), {"text": "x" * (k % 100)})
    sizes = [Path(timeline.path).stat().st_size]
    timeline.close()
    sizes.append(Path(timeline.path).stat().st_size)
    assert sizes[0] % 2**16 == 0
    assert 2**19 < sizes[1] < sizes[0]
    names = [e["name"] for e in check(events_of(timeline.path)) if e["ph"] == "X"]
    assert names == [f"e{k}" for k in range(5000)]
    assert [path.name for path in Path(timeline.path).parent.iterdir()] == ["t.json"]


def test_no_write_crosses_a_page(timeline, monkeypatch):
    pwrite, pages = os.pwrite, []

    def spy(fd, data, offset):
        pages.append((offset // 4096, (offset + len(data) - 1) // 4096))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    for k in range(300):
        timeline.span("wait", f"e{k}", now(), now(), {"text": "x" * (37 * k % 5000)})
        timeline.flush()
    assert len(pages) == 300
    assert all(first == last for first, last in pages)
    long = [e for e in events_of(timeline.path) if "left_out" in e.get("args", {})]
    assert len(long) > 10, "an event larger than a page loses its arguments"


def test_a_part_of_the_writes_is_valid_too(timeline):
    """A reader that is slow may see a later page and not yet an earlier one."""
    old = Path(timeline.path).read_bytes()
    for k in range(200):
        timeline.span("wait", f"e{k}", now(), now())
    timeline.flush()
    new = Path(timeline.path).read_bytes()
    assert len(old) == len(new)
    for seed in range(30):
        rng = random.Random(seed)
        pages = [rng.choice((old, new))[i : i + 4096] for i in range(0, len(new), 4096)]
        assert json.loads(b"".join(pages))


def test_a_killed_process_leaves_valid_json(tmp_path):
    path = tmp_path / "t.json"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        env=job_environment({"PYTHONPATH": str(ROOT)}),
        stdout=subprocess.PIPE,
    )
    with process, suppress(ProcessLookupError):
        process.stdout.read(50)
        process.send_signal(signal.SIGKILL)
    events = check(events_of(path))
    steps = [e for e in events if e["name"].startswith("STEP ")]
    assert len(steps) >= 49, "what had happened is there"


def test_a_reader_of_the_old_file_keeps_it_and_the_new_one_takes_its_place(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    with path.open() as old:
        timeline_at(path).close()
        assert old.read() == "old"
    assert len(events_of(path)) == 3
    assert os.listdir(tmp_path) == ["t.json"]  # noqa: PTH208 - names


def test_the_mode_is_the_one_of_any_new_file(timeline):
    other = Path(timeline.path).with_name("other")
    other.touch()
    assert stat.S_IMODE(Path(timeline.path).stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_no_link_is_followed_and_nothing_but_a_file_is_replaced(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    link, dangling, fifo = tmp_path / "link", tmp_path / "dangling", tmp_path / "fifo"
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    os.mkfifo(fifo)
    for path, kind in ((link, "a symbolic link"), (dangling, "a symbolic link")):
        with pytest.raises(ValueError, match=f"'{path}' is {kind}"):
            timeline_at(path)
    for path in (fifo, tmp_path):
        with pytest.raises(ValueError, match=f"'{path}' is no regular file"):
            timeline_at(path)
    with pytest.raises(FileNotFoundError, match=r"folder of .* does not exist; make it first"):
        timeline_at(tmp_path / "no" / "t.json")
    assert target.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_at_its_size_limit_it_ends_with_one_line_and_stays_valid(tmp_path, caplog):
    timeline = timeline_at(tmp_path / "t.json", max_bytes=6000)
    for k in range(200):
        timeline.span("wait", f"e{k}", now(), now())
        timeline.flush()
    assert len(caplog.records) == 1
    assert "it has reached timeline_max_bytes=6000; nothing more" in caplog.text
    assert not timeline.is_recording
    assert 5000 < Path(timeline.path).stat().st_size <= 6000
    names = [e["name"] for e in check(events_of(timeline.path)) if e["ph"] == "X"]
    assert names == [f"e{k}" for k in range(len(names))]
    timeline.close()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["pwrite", "write"])
def test_a_full_disk_ends_it_with_one_line(timeline, caplog, monkeypatch, where):
    timeline.span("wait", "kept", now(), now())
    timeline.flush()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)  # "write": there is no room for a larger file
    for k in range(2000):
        timeline.span("wait", f"e{k}", now(), now())
        timeline.flush()
    timeline.close()
    assert len(caplog.records) == 1
    assert "No space left on device; nothing more is recorded" in caplog.text
    assert len(events_of(timeline.path, "kept")) == 1
    assert len(check(events_of(timeline.path))) < (10 if where == "pwrite" else 1000)
    assert [path.name for path in Path(timeline.path).parent.iterdir()] == ["t.json"]


def test_a_write_that_is_cut_short_is_taken_back(timeline, caplog, monkeypatch):
    timeline.span("wait", "kept", now(), now())
    timeline.flush()
    whole, pwrite, calls = events_of(timeline.path), os.pwrite, []

    def short(fd, data, offset):
        calls.append(data)
        return pwrite(fd, data[:30] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    timeline.span("wait", "lost", now(), now())
    timeline.flush()
    assert events_of(timeline.path) == whole
    assert "no room for it on the device" in caplog.text


def test_an_old_event_is_written_without_a_flush(timeline):
    timeline.span("wait", "early", now(), now())
    assert not events_of(timeline.path, "early")
    timeline.span("wait", "late", now() + 10**9, now() + 10**9)
    assert len(events_of(timeline.path, "early", "late")) == 2
    for k in range(1000):
        timeline.span("wait", f"many{k}", 0, 0)
    assert events_of(timeline.path, "many900")


def test_an_alarm_at_every_point_of_a_write_tears_nothing(tmp_path):
    path = tmp_path / "t.json"

    def scenario(interrupter):
        timeline = timeline_at(path)
        for k in range(6):
            with suppress(Alarm), interrupter:
                timeline.span(f"track {k % 2}", f"e{k}", k, k + 1, {"text": "x" * 1500})
                timeline.flush()
            check_names(events_of(path))
        timeline.close()
        assert len(check_names(events_of(path))) >= 5

    def check_names(events):
        names = [e["name"] for e in events if e["ph"] == "X"]
        assert names == sorted(set(names)), "each once, in order"
        return names

    assert at_every_point(scenario, Alarm, "timeline.py") > 30


# --- what is recorded


def train(hvd, steps=3, **options):
    params = {"a": np.zeros(64), "b": np.zeros(3)}
    applied = []
    with hvd.DistributedOptimizer(applied.append, params, **options) as opt:
        for step in range(steps):
            for name, param in params.items():
                opt.grad_ready(name, np.full_like(param, step))
            opt.step()
    return applied


def test_steps_and_calls_of_one_rank_are_recorded(hvd, tmp_path):
    path = tmp_path / "t.json"
    hvd.start_timeline(path, mark_cycles=True)
    train(hvd)
    assert hvd.allreduce(2.0, name="loss") == 2.0
    hvd.barrier()
    hvd.stop_timeline()
    events = check(events_of(path))
    assert [e["args"]["step"] for e in events if e["name"].startswith("STEP")] == [0, 1, 2]
    assert [e["args"]["step"] for e in events if e["name"] == "APPLY"] == [0, 1, 2]
    packed = [e["args"] for e in events if e["name"] == "MEMCPY_IN_FUSION_BUFFER"]
    assert sum(e["bytes"] for e in packed) == 3 * 67 * 8
    assert all(e["busy_us"] > 0 for e in packed)
    calls = [(e["ph"], e["name"]) for e in events if e["name"].endswith("ALLREDUCE")]
    assert calls == [
        ("b", "NEGOTIATE_ALLREDUCE"),
        ("e", "NEGOTIATE_ALLREDUCE"),
        ("b", "ALLREDUCE"),
        ("e", "ALLREDUCE"),
    ]
    (submitted,) = [e for e in events if e["name"] == "NEGOTIATE_ALLREDUCE" and e["ph"] == "b"]
    assert submitted["args"] == {"name": "loss", "bytes": 8}
    assert any(e["name"] == "NEGOTIATE_BARRIER" for e in events)
    assert any(e["name"] == "CYCLE_START" for e in events)


def test_marks_of_cycles_are_asked_for(hvd, tmp_path):
    hvd.start_timeline(tmp_path / "t.json")
    hvd.allreduce(2.0)
    hvd.stop_timeline()
    assert not events_of(tmp_path / "t.json", "CYCLE_START")


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [("2:4", [2, 3]), ((3, 9), [3, 4]), (range(1), [0]), ("3:", [3, 4]), (":2", [0, 1])],
)
def test_a_window_of_steps_leaves_out_the_others(hvd, tmp_path, steps, recorded):
    path = tmp_path / "t.json"
    hvd.start_timeline(path, steps=steps)
    train(hvd, 5)
    hvd.allreduce(1.0)  # belongs to the last step
    hvd.stop_timeline()
    events = check(events_of(path))
    assert [e["args"]["step"] for e in events if e["name"].startswith("STEP")] == recorded
    assert bool(events_of(path, "ALLREDUCE")) == (4 in recorded)


def test_two_optimizers_have_tracks_of_their_own(hvd, tmp_path):
    path = tmp_path / "t.json"
    one, two = (hvd.DistributedOptimizer(lambda _: None, {"w": np.zeros(4)}) for _ in range(2))
    hvd.start_timeline(path)
    one.grad_ready("w", np.ones(4))
    two.grad_ready("w", np.ones(4))
    one.step()
    two.step()
    hvd.stop_timeline()
    tracks = {e["args"]["name"] for e in check(events_of(path)) if e["name"] == "thread_name"}
    assert {"step", "optimizer 1: step", "bucket 0", "optimizer 1: bucket 0"} <= tracks


def test_a_timeline_that_starts_and_ends_inside_a_step_changes_nothing(hvd, tmp_path):
    opt = hvd.DistributedOptimizer(lambda grads: grads, {"a": np.zeros(4), "b": np.zeros(4)})
    for k in range(3):
        opt.grad_ready("a", np.full(4, float(k)))
        hvd.start_timeline(tmp_path / f"{k}.json")
        opt.grad_ready("b", np.full(4, float(k)))
        assert (opt.step()["b"] == k).all()
        opt.grad_ready("b", np.full(4, 7.0))
        hvd.stop_timeline()
        opt.grad_ready("a", np.full(4, 7.0))
        assert all((array == 7).all() for array in opt.step().values())
        check(events_of(tmp_path / f"{k}.json"))


@pytest.mark.parametrize("views", [False, True])
def test_the_fast_path_is_left_only_while_it_records(hvd, tmp_path, views):
    opt = hvd.DistributedOptimizer(
        lambda _: None, {"a": np.zeros(4), "b": np.zeros(4)}, gradient_as_bucket_view=views
    )

    def is_fast():
        for name in "ab":  # the first one opens the step, which is never fast
            opt.grad_ready(name) if views else opt.grad_ready(name, np.ones(4))
        fast = "b" not in opt._reducer._announced.counts
        opt.step()
        return fast

    hvd.start_timeline(tmp_path / "t.json", steps=(3, 4))
    assert [is_fast() for _ in range(5)] == [True, True, True, False, True]
    hvd.stop_timeline()


def test_it_is_complete_after_each_call(hvd, tmp_path):
    path = tmp_path / "t.json"
    opt = hvd.DistributedOptimizer(lambda _: None, {"w": np.zeros(4)})
    hvd.start_timeline(path)
    opt.step({"w": np.ones(4)})
    assert [e["args"] for e in events_of(path, "STEP 0")] == [{"step": 0}]
    hvd.allreduce(1.0)
    assert [e["ph"] for e in events_of(path, "ALLREDUCE")] == ["b", "e"]
    hvd.shutdown()
    hvd.init()
    check(events_of(path))


def test_a_step_that_fails_is_marked(hvd, tmp_path):
    path = tmp_path / "t.json"
    hvd.start_timeline(path)
    opt = hvd.DistributedOptimizer(lambda _: None, {"w": np.zeros(4)}, missing="error")
    with pytest.raises(hvd.MissingGradientError):
        opt.step()
    (failed,) = events_of(path, "STEP 0")
    assert failed["args"] == {"step": 0, "failed": True}


def test_an_alarm_at_every_point_of_a_recorded_step_applies_it_once(hvd, tmp_path):
    path = tmp_path / "t.json"

    def scenario(interrupter):
        hvd.start_timeline(path)
        applied = []
        with hvd.DistributedOptimizer(applied.append, {"w": np.zeros(4)}) as opt:
            for step in range(2):
                grads = {"w": np.full(4, step + 1.0)}
                while len(applied) == step:
                    with suppress(Alarm), interrupter:
                        opt.step(grads)
                assert opt.comm_state()["num_steps"] == len(applied)
                assert (applied[step]["w"] == step + 1).all()
                check_spans(path)
        hvd.stop_timeline()

    def check_spans(path):
        check([e for e in events_of(path) if e["ph"] in "MX" and e["tid"] != 0])

    assert at_every_point(scenario, Alarm, "reducer.py", "timeline.py", "progress.py") > 50


def test_an_alarm_at_every_point_of_a_recorded_call_leaves_the_next_one_right(hvd, tmp_path):
    path = tmp_path / "t.json"

    def scenario(interrupter):
        hvd.start_timeline(path)
        with suppress(Alarm), interrupter:
            hvd.allreduce(3.0)
        assert hvd.allreduce(4.0) == 4.0
        events_of(path)
        hvd.stop_timeline()

    files = ("timeline.py", "negotiation.py", "progress.py")
    assert at_every_point(scenario, Alarm, *files) > 30


# --- starting and stopping


@pytest.mark.parametrize("call", ["start_timeline", "stop_timeline"])
def test_it_needs_init(call, monkeypatch):
    monkeypatch.setattr(context, "_was_shut_down", False)
    assert issubclass(NotInitializedError, ValueError)
    with pytest.raises(NotInitializedError, match="not initialized"):
        getattr(hvdlite, call)(*["t.json"] * call.startswith("start"))


def test_starting_twice_is_an_error_and_stopping_twice_is_none(hvd, tmp_path):
    hvd.start_timeline(tmp_path / "t.json")
    with pytest.raises(RuntimeError, match=r"t.json' is being recorded; call stop_timeline\(\)"):
        hvd.start_timeline(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.start_timeline(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"path": ""}, "start_timeline: path must be a path, got ''"),
        ({"path": 3}, "start_timeline: path must be a path, got 3"),
        ({"mark_cycles": 3}, "start_timeline: mark_cycles must be true or false"),
        ({"all_ranks": None}, "start_timeline: all_ranks must be true or false"),
        ({"steps": "5"}, 'start_timeline: steps must be a window of steps such as "10:30"'),
        ({"steps": (-1, 3)}, "start_timeline: steps must be a window"),
        ({"steps": range(0, 9, 2)}, "start_timeline: steps must be a window"),
        ({"max_bytes": 3}, "start_timeline: max_bytes must be 4 KiB to 1 TiB"),
        ({"max_bytes": "big"}, "start_timeline: max_bytes must be a size"),
    ],
)
def test_a_wrong_argument_starts_nothing(hvd, tmp_path, kwargs, message):
    with pytest.raises(ConfigError) as info:
        hvd.start_timeline(**{"path": tmp_path / "t.json"} | kwargs)
    assert str(info.value).startswith(message)
    assert not list(tmp_path.iterdir())
    hvd.start_timeline(tmp_path / "t.json")


def test_the_settings_start_one_with_init(tmp_path):
    path = tmp_path / "t.json"
    hvdlite.init(config={"timeline": path, "timeline_steps": "1:2"})
    try:
        train(hvdlite)
        with pytest.raises(RuntimeError, match="is being recorded"):
            hvdlite.start_timeline(path)
    finally:
        hvdlite.shutdown()
    names = [e["name"] for e in check(events_of(path))]
    assert [name for name in names if name.startswith("STEP")] == ["STEP 1"]


def test_a_path_that_cannot_be_is_an_error_of_init(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hvdlite.init(config={"timeline": tmp_path / "no" / "t.json"})
    assert not hvdlite.is_initialized()


def test_horovods_dynamic_starts_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvdlite.init()
    try:
        hvdlite.allreduce(1.0)
        hvdlite.start_timeline("t.json")
    finally:
        hvdlite.shutdown()
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork() beside threads
def test_a_forked_child_leaves_the_file_to_its_parent(hvd, tmp_path):
    path = tmp_path / "t.json"
    hvd.start_timeline(path)
    hvd.current().progress.timeline.span("wait", "parent's", now(), now())
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            hvd.stop_timeline()
        with suppress(BaseException):
            hvd.current().progress.timeline.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert not events_of(path, "parent's")
    hvd.stop_timeline()
    assert len(events_of(path, "parent's")) == 1


# --- the summary

SCRIPT = ROOT / "scripts" / "timeline_summary.py"


def summarize(*arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [
        [line.split() for line in part.splitlines()] for part in done.stdout.strip().split("\n\n")
    ]


@pytest.fixture
def two_steps(tmp_path):
    """A timeline with known times, in ms: two steps of 10, one bucket each."""
    path, ms = tmp_path / "t.json", 1_000_000
    timeline = timeline_at(path)

    def span(track, name, start, end, **args):
        timeline.span(track, name, start * ms, end * ms, args)

    for step, at in enumerate((0, 20)):
        packed = {"bytes": 8000, "gradients": 2, "busy_us": 500.0}
        span("bucket 0", "MEMCPY_IN_FUSION_BUFFER", at, at + 1, step=step, **packed)
        span("bucket 0", "QUEUE", at + 1, at + 1, step=step)
        span("bucket 0", "ALLREDUCE", at + 1, at + 9, step=step, bytes=8000)
        span("reduce", "REDUCE", at + 6, at + 8, step=step)
        waited = {"missing_us": {"0": 10.0, "1": 3000.0}}
        span("wait", "WAIT", at + 5, at + 9, **{"for": "it"}, **waited)
        span("apply", "APPLY", at + 9, at + 10, step=step)
        span("step", f"STEP {step}", at, at + 10, step=step)
    for serial in (1, 2):
        timeline.call_submitted(serial, "allreduce", "x", 1000)
        timeline.call_matched(serial)
        if serial == 1:
            timeline.call_over(serial)  # the other one is under way
    timeline.close()
    return path


def test_the_summary_adds_up(two_steps):
    check(events_of(two_steps))
    steps, waits, calls = summarize(two_steps)
    assert dict(zip(*steps, strict=True)) == {
        "rank": "0",
        "steps": "2",
        "buckets": "2",
        "MB": "0.02",
        "ms/step": "10.000",
        "pack": "0.500",
        "reduce": "2.000",
        "communicate": "8.000",
        "wait": "4.000",
        "optimizer": "1.000",
        "overlap": "50%",
        "GB/s": "0.00",
    }
    assert waits == [["waits", "for", "rank", "0", "rank", "1"], ["rank", "0", "-", "6.0"]]
    assert calls[1][:3] == ["0", "ALLREDUCE", "1"]


def test_the_summary_of_some_steps_leaves_out_the_waits_of_others(two_steps):
    steps, waits, _ = summarize(two_steps, "--steps", "1:")
    assert steps[1][1:3] == ["1", "1"]
    assert waits[1][-1] == "3.0"


def test_the_summary_joins_files_and_draws(two_steps, tmp_path):
    pytest.importorskip("matplotlib")
    png, joined = tmp_path / "t.png", tmp_path / "all.json"
    summarize(two_steps, "--png", png, "--join", joined)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert events_of(joined) == events_of(two_steps)


def test_the_summary_refuses_what_is_no_timeline(tmp_path):
    (tmp_path / "no.json").write_text("{")
    for name, message in (("no.json", "no timeline of hvdlite"), ("gone", "No such file")):
        command = [sys.executable, SCRIPT, tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_timeline_without_steps_is_summed_up_too(timeline):
    timeline.call_submitted(1, "barrier", "b", 0)
    timeline.flush()
    assert summarize(timeline.path)[0][1][:2] == ["0", "0"]
