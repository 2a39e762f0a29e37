"""The tagged log lines, and that nobody else's logging is touched."""

import io
import logging
import subprocess
import sys

import pytest

from hvdlite import log


@pytest.fixture(autouse=True)
def _clean():
    log.reset()
    yield
    log.reset()


def handlers():
    return [h for h in log.logger.handlers if isinstance(h, log.RankHandler)]


def test_lines_are_tagged_with_the_rank(capsys):
    log.configure(1, 4, "warning")
    log.logger.warning("%s is late", "rank 3")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[hvdlite rank 1/4] warning: rank 3 is late\n"


def test_every_line_of_a_message_is_tagged_in_one_write(monkeypatch):
    writes = []

    class Stream(io.StringIO):
        def write(self, text):
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    log.configure(0, 2, "error")
    log.logger.error("first\nsecond")
    assert writes == ["[hvdlite rank 0/2] error: first\n[hvdlite rank 0/2] second\n"]


def test_a_traceback_is_tagged_too(capsys):
    log.configure(0, 2, "error")
    try:
        raise KeyError("w7")
    except KeyError:
        log.logger.exception("bad")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "[hvdlite rank 0/2] KeyError: 'w7'"
    assert all(line.startswith("[hvdlite rank 0/2] ") for line in lines)


def test_configure_again_replaces_tag_and_level(capsys):
    log.configure(0, 2, "debug")
    log.configure(3, 4, "error")
    assert len(handlers()) == 1
    log.logger.info("hidden")
    log.logger.error("shown")
    assert capsys.readouterr().err == "[hvdlite rank 3/4] error: shown\n"


@pytest.mark.parametrize("level", log.LEVELS)
def test_level_shows_itself_and_what_is_above(level, capsys):
    log.configure(0, 1, level)
    for number in log.LEVELS.values():
        log.logger.log(number, "x")
    shown = [line.split()[3] for line in capsys.readouterr().err.splitlines()]
    words = list(log.LEVELS)
    assert shown == [f"{word}:" for word in words[words.index(level) :]]


def test_trace_is_below_debug(capsys):
    log.configure(0, 1, "debug")
    log.trace("hidden %s", 1)
    log.configure(0, 1, "trace")
    log.trace("shown %s", 2)
    assert capsys.readouterr().err == "[hvdlite rank 0/1] trace: shown 2\n"


def test_once_is_once_until_reset(capsys):
    log.configure(0, 1, "info")
    for _ in range(3):
        log.warn_once("cores", "100 % busy")
        log.info_once("cores", "another text of the same key")
        log.info_once("hosts", "b")
    assert capsys.readouterr().err == (
        "[hvdlite rank 0/1] warning: 100 % busy\n[hvdlite rank 0/1] info: b\n"
    )
    log.reset()
    log.configure(0, 1, "info")
    log.warn_once("cores", "again")
    assert capsys.readouterr().err == "[hvdlite rank 0/1] warning: again\n"


def test_root_logger_is_not_touched_and_sees_nothing(capsys):
    root = logging.getLogger()
    seen = []

    class Spy(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    spy = Spy()
    root.addHandler(spy)
    before = root.level, list(root.handlers)
    try:
        log.configure(0, 1, "info")
        log.logger.info("ours")
        assert (root.level, list(root.handlers)) == before
        assert seen == []
        assert capsys.readouterr().err.count("ours") == 1
    finally:
        root.removeHandler(spy)


def test_reset_restores_what_the_user_had():
    log.logger.setLevel(logging.ERROR)
    own = logging.NullHandler()
    log.logger.addHandler(own)
    try:
        log.configure(0, 1, "debug")
        log.configure(1, 2, "info")
        assert log.logger.propagate is False
        log.reset()
        assert log.logger.level == logging.ERROR
        assert log.logger.propagate is True
        assert own in log.logger.handlers
        assert handlers() == []
    finally:
        log.logger.removeHandler(own)
        log.logger.setLevel(logging.NOTSET)


def test_without_a_stderr_nothing_breaks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # pythonw, daemons
    log.configure(0, 1, "info")
    log.logger.info("into the void")
    assert len(handlers()) == 1


def test_import_adds_no_handler():
    code = "import logging, hvdlite.log as l; print(l.logger.handlers, logging.root.handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"
