"""Shared segments: our own files, of one user, that fail early and leave nothing behind."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hvdlite.backends import segment as segment_module
from hvdlite.backends.segment import Segment
from interrupts import Alarm, at_every_point


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """In place of /dev/shm; empty after each test, as the last check of all."""
    monkeypatch.setattr(segment_module, "DIRECTORY", tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_real_segments_lie_in_shared_memory(monkeypatch):
    monkeypatch.undo()
    assert Path("/dev/shm") == segment_module.DIRECTORY


def test_a_segment_is_zero_at_first_and_one_memory_for_all_who_map_it():
    made = Segment.create(5000)
    other = Segment.attach(made.path, 5000)
    made.unlink()
    assert made.array.dtype == np.uint8
    assert made.array.shape == other.array.shape == (5000,)
    assert not made.array.any()
    made.array[17] = 5
    other.array[4999] = 6
    assert other.array[17] == 5
    assert made.array[4999] == 6


def test_a_segment_is_its_users_alone_whatever_the_umask():
    before = os.umask(0)
    try:
        made = Segment.create(4096)
    finally:
        os.umask(before)
    try:
        mode = made.path.stat().st_mode
        assert stat.S_ISREG(mode)
        assert stat.S_IMODE(mode) == 0o600
    finally:
        made.unlink()


def test_names_are_random():
    segments = [Segment.create(64) for _ in range(5)]
    assert len({s.path.name for s in segments}) == 5
    for segment in segments:
        assert segment.path.name.startswith("hvdlite-")
        assert len(segment.path.name) >= len("hvdlite-") + 16
        segment.unlink()
        segment.unlink()  # harmless


def test_memory_lives_on_without_a_name_and_without_the_segment():
    made = Segment.create(4096)
    made.unlink()
    array = made.array
    del made
    array[:] = 7
    assert array.sum() == 7 * 4096


def test_no_descriptor_stays_open():
    before = num_descriptors()
    kept = []
    for _ in range(3):
        kept.append(Segment.create(4096))
        kept.append(Segment.attach(kept[-1].path, 4096))
        kept[-2].unlink()
    # mmap keeps one of its own for each mapping
    assert num_descriptors() <= before + len(kept)
    with pytest.raises(OSError, match="should be"):
        Segment.attach(Path(__file__), 4096)
    del kept
    assert num_descriptors() == before


def test_the_memory_is_there_before_anybody_writes(directory):
    made = Segment.create(3 * 2**20)
    assert made.path.stat().st_blocks * 512 >= 3 * 2**20  # a hole would be a later SIGBUS
    made.unlink()


def test_too_little_room_is_an_os_error_that_says_what_to_type(directory, monkeypatch):
    def full(_fd, _offset, _length):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = num_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"no room for 12345 bytes.*--shm-size=.*remount,size="
    ) as caught:
        Segment.create(12345)
    assert caught.value.errno == errno.ENOSPC
    assert str(directory) in str(caught.value)
    assert num_descriptors() == before


@pytest.mark.parametrize("place", ["posix_fallocate", "mmap"])
def test_any_other_failure_comes_as_it_is_and_leaves_no_file(place, monkeypatch):
    def fails(*_args, **_kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    module = os if place == "posix_fallocate" else segment_module.mmap
    before = num_descriptors()
    monkeypatch.setattr(module, place, fails)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Segment.create(4096)
    assert num_descriptors() == before


def test_a_directory_that_is_not_there_is_an_os_error(directory, monkeypatch):
    monkeypatch.setattr(segment_module, "DIRECTORY", directory / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        Segment.create(4096)


def test_a_segment_of_another_size_is_refused(directory):
    made = Segment.create(4096)
    before = num_descriptors()
    with pytest.raises(OSError, match="not the segment of 8192 bytes"):
        Segment.attach(made.path, 8192)
    assert num_descriptors() == before
    made.unlink()
    with pytest.raises(FileNotFoundError):
        Segment.attach(made.path, 4096)


def test_a_segment_of_another_user_is_refused(monkeypatch):
    made = Segment.create(4096)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(OSError, match="not the segment"):
        Segment.attach(made.path, 4096)
    made.unlink()


def test_no_symbolic_link_is_followed(directory, monkeypatch):
    target = directory / "target"
    target.write_bytes(bytes(4096))
    link = directory / "hvdlite-0000"
    link.symlink_to(target)
    with pytest.raises(OSError, match="hvdlite-0000"):
        Segment.attach(link, 4096)
    monkeypatch.setattr(segment_module.secrets, "token_hex", lambda _: "0000")
    with pytest.raises(FileExistsError):
        Segment.create(4096)
    assert target.read_bytes() == bytes(4096)
    link.unlink()
    target.unlink()


def test_an_alarm_while_a_segment_is_made_leaves_no_file_where_that_can_be_helped(directory):
    left_at = []

    def scenario(interrupter):
        made = None
        with suppress(Alarm), interrupter:
            made = Segment.create(4096)
        if made is None:
            for path in directory.iterdir():
                left_at.append(interrupter.where)
                path.unlink()
        else:
            made.unlink()

    assert at_every_point(scenario, Alarm, "segment.py") >= 5
    # Right after the file was opened, and after the last line, nobody holds it yet.
    assert len(left_at) <= 2, left_at
