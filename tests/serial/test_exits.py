"""Rule 8's exits, each in a process of its own whose `abort` tells and ends it."""

import os
import pickle
import re
import subprocess
import sys
from ast import literal_eval
from dataclasses import dataclass
from textwrap import dedent

import pytest

from hvdlite import exits as exits_file
from hvdlite.exits import Exits, RecordedExit

# The file alone, without the package: a hundred processes that load NumPy would take their time.
ALONE = f"""
import importlib.util, os, sys, threading, time

spec = importlib.util.spec_from_file_location("exits_alone", {exits_file.__file__!r})
exits_alone = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits_alone)
"""
PRELUDE = (
    ALONE
    + """
def say(text):
    os.write(1, (text + "\\n").encode())

def abort(code):
    say(f"ABORT {code} after {time.monotonic() - told:.3f}")
    os._exit(100 + code)

def on_failure(summary):
    global told
    told = time.monotonic()
    say("FAIL " + summary)

def make(enabled=True):
    return exits_alone.Exits(1, 4, abort, on_failure, lambda: say("LEAVE"), enabled)

exits = make()
"""
)
INSTALLED = PRELUDE + "exits.install()\n"


@dataclass
class Ended:
    """What a process left behind."""

    code: int
    out: list[str]
    err: list[str]

    @property
    def events(self):
        """Standard output, without the times."""
        return [re.sub(r" after .*", "", line) for line in self.out]

    @property
    def block(self):
        """Lines of standard error with our tag, without it."""
        tag = re.compile(rf"\[hvdlite rank 1/4 {re.escape(os.uname().nodename)} \d+ (.+?)\] (.*)")
        return [match.groups() for match in map(tag.fullmatch, self.err) if match]


def run(code, prelude=INSTALLED, before=""):
    """Run a script with `python -c`; aborts show as 100 + code."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", dedent(before) + prelude + dedent(code)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())


def assert_left(ended, code=0):
    """The process ended as without us, and told that it leaves."""
    assert ended.events[-1] == "LEAVE"
    assert not any(line.startswith(("FAIL", "ABORT")) for line in ended.out)
    assert ended.block == []
    assert ended.code == code


# --- exceptions


def test_exception_in_main_ends_the_job_with_one_tagged_traceback():
    ended = run("def train():\n    raise ValueError('bad loss')\ntrain()")
    assert ended.events == ["FAIL ValueError: bad loss", "ABORT 1"]
    assert ended.code == 101
    assert len(ended.block) == len(ended.err)  # every line is tagged
    assert {thread for thread, _ in ended.block} == {"MainThread"}
    assert ended.block[0][1] == "Traceback (most recent call last):"
    assert ended.block[-1][1] == "ValueError: bad loss"
    assert any("in train" in line for _, line in ended.block)


def test_abort_waits_until_the_launcher_has_passed_the_text_on():
    ended = run("raise ValueError")
    assert 0.2 <= float(ended.out[-1].split()[-1]) < 5


def test_block_is_one_write_after_what_was_printed_before():
    # fd 2 as a datagram socket keeps the boundaries of the writes
    code = """
        import socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        os.dup2(theirs.fileno(), 2)
        def abort(code):
            ours.setblocking(False)
            say(repr([ours.recv(1 << 16), ours.recv(1 << 16)]))
            try:
                ours.recv(1 << 16)
            except BlockingIOError:
                say("no third write")
            os._exit(0)
        exits._abort = abort
        sys.stderr.write("printed before, no newline")
        raise ValueError("first\\nsecond")
    """
    ended = run(code)
    before, block = literal_eval(ended.out[1])
    assert before == b"printed before, no newline"
    assert block.count(b"[hvdlite rank 1/4 ") == block.count(b"\n") >= 4
    assert ended.out[2] == "no third write"


def test_standard_output_is_flushed_before_the_block():
    # of a thread's exception: for the main thread Python does it
    ended = run(
        """
        print("epoch 3", end="")
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(30)
        """
    )
    assert ended.out[0].startswith("epoch 3FAIL")


def test_exception_chains_and_groups_are_shown_whole():
    ended = run(
        """
        try:
            {}["w7"]
        except KeyError as exc:
            raise ExceptionGroup("several", [OSError("disk"), TypeError("kind")]) from exc
        """
    )
    text = "\n".join(line for _, line in ended.block)
    for part in ("KeyError: 'w7'", "direct cause", "OSError: disk", "TypeError: kind"):
        assert part in text
    assert ended.events[0] == "FAIL ExceptionGroup: several (2 sub-exceptions)"


def test_exception_in_a_thread_ends_the_job_and_names_the_thread():
    ended = run(
        """
        def work():
            raise KeyError("w7")
        threading.Thread(target=work, name="loader 3").start()
        time.sleep(30)
        """
    )
    assert ended.events == ["FAIL KeyError: 'w7'", "ABORT 1"]
    assert {thread for thread, _ in ended.block} == {"loader 3"}
    assert ended.block[-1][1] == "KeyError: 'w7'"


def test_keyboard_interrupt_is_handled_alike():
    ended = run("import signal\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)")
    assert ended.events == ["FAIL KeyboardInterrupt: ", "ABORT 1"]
    assert ended.block[-1][1] == "KeyboardInterrupt"


def test_memory_error_is_told_without_reading_source_files():
    ended = run(
        """
        import linecache
        def refuse(*args, **kwargs):
            raise MemoryError
        linecache.getline = linecache.getlines = linecache.updatecache = refuse
        def train():
            raise MemoryError("no 3 GiB")
        train()
        """
    )
    assert ended.events == ["FAIL MemoryError: no 3 GiB", "ABORT 1"]
    lines = [line for _, line in ended.block]
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(r'  File "<string>", line \d+, in train', lines[2])
    assert lines[-1] == "MemoryError: no 3 GiB"


def test_no_memory_for_the_block_leaves_the_last_words():
    ended = run(
        """
        class NoMemory(str):
            def splitlines(self):
                raise MemoryError
        exits_alone._describe = lambda *args: NoMemory("x")
        raise ValueError("x")
        """
    )
    assert ended.block == [("?", "the traceback cannot be shown")]
    assert ended.code == 101


def test_exception_that_cannot_be_shown_still_ends_the_job():
    ended = run(
        """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        raise Odd
        """
    )
    assert ended.code == 101
    assert any("Odd" in line for _, line in ended.block)


def test_odd_characters_are_written():
    ended = run(r"raise ValueError('é \ud800 \x00')")
    assert ended.block[-1][1] == "ValueError: é \\ud800 \x00"
    assert ended.code == 101


def test_a_long_text_is_short_for_the_other_ranks():
    ended = run("raise ValueError('x' * 5000 + '\\nsecond line')")
    assert ended.events[0] == "FAIL ValueError: " + "x" * 197 + "..."
    assert ended.block[-1][1] == "second line"


def test_failing_callbacks_do_not_keep_the_rank_alive():
    ended = run(
        """
        def fail(text):
            raise RuntimeError
        exits._on_failure = fail
        exits._abort = fail
        import atexit
        atexit.register(say, "MPI_Finalize, which would wait for the others")
        raise ValueError("x")
        """
    )
    assert ended.block[-1][1] == "ValueError: x"
    assert ended.out == []
    assert ended.code == 1


def test_an_exception_is_reported_once():
    ended = run(
        """
        exits._abort = lambda code: say("ABORT")
        import atexit
        atexit.register(lambda: say("user's atexit"))
        inner = sys.excepthook
        def twice(*args):
            inner(*args)
            inner(*args)
        sys.excepthook = twice
        raise ValueError("x")
        """
    )
    assert ended.events == ["FAIL ValueError: x", "ABORT", "user's atexit"]
    assert [line for _, line in ended.block].count("ValueError: x") == 1


def test_users_own_excepthook_is_called_before():
    ended = run(
        "raise ValueError('x')",
        before="""
            import sys
            def own(kind, exc, tb):
                print("own", kind.__name__, exc, file=sys.stderr)
                raise RuntimeError("and it fails")
            sys.excepthook = own
        """,
    )
    assert ended.err[0] == "own ValueError x"
    assert ended.block[-1][1] == "ValueError: x"
    assert ended.events == ["FAIL ValueError: x", "ABORT 1"]


def test_users_own_threading_excepthook_is_called_before():
    ended = run(
        """
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(30)
        """,
        before="""
            import sys, threading
            threading.excepthook = lambda args: print("own", args.exc_value, file=sys.stderr)
        """,
    )
    assert ended.err[0] == "own division by zero"
    assert ended.events == ["FAIL ZeroDivisionError: division by zero", "ABORT 1"]


def test_exception_that_a_with_keeps_is_reported():
    ended = run(
        """
        class Keep:
            def __enter__(self):
                return self
            def __exit__(self, *args):
                self.args = args
        keep = Keep()
        with keep:
            raise ValueError("kept")
        """
    )
    assert ended.events == ["FAIL ValueError: kept", "ABORT 1"]


# --- sys.exit


@pytest.mark.parametrize("status", ["3", "(3,)", "256 + 3", "-253"])
def test_exit_code_ends_the_job_with_it(status):
    ended = run(f"def main():\n    return {status}\nsys.exit(main())")
    assert ended.events == ["FAIL exit code 3", "ABORT 3"]
    assert ended.block == [("MainThread", "exit code 3 of sys.exit(), ending the job")]
    assert len(ended.err) == 1
    assert ended.code == 103
    assert 0.2 <= float(ended.out[-1].split()[-1]) < 5


@pytest.mark.parametrize("status", ["", "None", "0", "False", "256", "()"])
def test_exit_without_a_code_is_a_quiet_leave(status):
    assert_left(run(f"sys.exit({status})"))


def test_exit_with_a_text_is_code_1_and_printed_by_python():
    ended = run("sys.exit('no data\\nin here')")
    assert ended.err[:2] == ["no data", "in here"]
    assert ended.block == [("MainThread", "exit code 1 of sys.exit(), ending the job: no data")]
    assert ended.events == ["FAIL exit code 1: no data", "ABORT 1"]


@pytest.mark.parametrize(("status", "code"), [("True", 1), ("(1, 2)", 1), ("2.0", 1), ("[]", 1)])
def test_exit_with_other_objects(status, code):
    ended = run(f"sys.exit({status})")
    assert ended.events[-1] == f"ABORT {code}"


CAUGHT = {
    "at the top": """
        try:
            sys.exit(3)
        except SystemExit as exc:
            assert exc.code == 3
    """,
    "in a function": """
        def f():
            try:
                sys.exit(3)
            except BaseException:
                return
        f()
    """,
    "and kept": """
        try:
            sys.exit(3)
        except SystemExit as exc:
            kept = exc
    """,
    "and kept in a cycle": """
        def f():
            try:
                sys.exit(3)
            except SystemExit as exc:
                kept = exc
                kept.me = kept
        f()
    """,
    "in a loop, kept": """
        kept = []
        for _ in range(3):
            try:
                sys.exit(3)
            except SystemExit as exc:
                kept.append(exc)
    """,
    "by a with": """
        from contextlib import suppress
        with suppress(SystemExit):
            sys.exit(3)
    """,
    "and kept by a with": """
        class Keep:
            def __enter__(self):
                return self
            def __exit__(self, kind, exc, tb):
                self.exc = exc
                return True
        keep = Keep()
        with keep:
            sys.exit(3)
    """,
    "by argparse's caller": """
        import argparse
        try:
            argparse.ArgumentParser(prog="p").parse_args(["--what"])
        except SystemExit as exc:
            assert exc.code == 2
    """,
    "by a future": """
        from concurrent.futures import Future
        f = Future()
        try:
            sys.exit(3)
        except BaseException as exc:
            f.set_exception(exc)
    """,
}


@pytest.mark.parametrize("code", CAUGHT.values(), ids=CAUGHT)
def test_a_caught_exit_counts_for_nothing(code):
    assert_left(run(code + "\n        say('went on')"))


def test_a_caught_exit_followed_by_another_end():
    ended = run("try:\n    sys.exit(3)\nexcept SystemExit as exc:\n    kept = exc\nsys.exit(4)")
    assert ended.events == ["FAIL exit code 4", "ABORT 4"]
    # the first is the context of the second, and dies with it
    assert_left(run("try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit(0)"))
    ended = run("try:\n    sys.exit(0)\nfinally:\n    sys.exit(3)")
    assert ended.events == ["FAIL exit code 3", "ABORT 3"]


UNCAUGHT = {
    "through finally": """
        try:
            sys.exit(3)
        finally:
            say("cleaning up")
    """,
    "raised again": """
        def f():
            try:
                sys.exit(3)
            except SystemExit as exc:
                kept = exc
                raise
        f()
    """,
    "while catching another": """
        try:
            sys.exit(3)
        finally:
            try:
                sys.exit(4)
            except SystemExit:
                pass
    """,
    "kept by a with at the top": """
        class Keep:
            def __enter__(self):
                return self
            def __exit__(self, kind, exc, tb):
                self.exc = exc
        keep = Keep()
        with keep:
            sys.exit(3)
    """,
    "kept by a with in a function": """
        class Keep:
            def __enter__(self):
                return self
            def __exit__(self, kind, exc, tb):
                self.exc = exc
        keep = Keep()
        def f():
            with keep:
                sys.exit(3)
        f()
    """,
    "kept by a with inside a finally": """
        class Keep:
            def __enter__(self):
                return self
            def __exit__(self, kind, exc, tb):
                self.exc = exc
        keep = Keep()
        def f():
            try:
                with keep:
                    sys.exit(3)
            finally:
                say("cleaning up")
        f()
    """,
    "while handling another": """
        try:
            {}["w7"]
        except KeyError as exc:
            kept = exc
            sys.exit(3)
    """,
    "in asyncio": """
        import asyncio
        async def main():
            await asyncio.sleep(0)
            sys.exit(3)
        asyncio.run(main())
    """,
    "in a generator": """
        def g():
            with open(os.devnull):
                yield 1
                sys.exit(3)
        for _ in g():
            pass
    """,
    "from a signal handler": """
        import signal
        signal.signal(signal.SIGALRM, lambda *args: sys.exit(3))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(30)
    """,
    "by the name of another module": """
        import argparse
        argparse._sys.exit(3)
    """,
    "with a frozen cycle collector": """
        import gc
        gc.disable()
        def f():
            me = []
            me.append(me)
            sys.exit(3)
        f()
    """,
}


@pytest.mark.parametrize("code", UNCAUGHT.values(), ids=UNCAUGHT)
def test_an_uncaught_exit_is_seen(code):
    ended = run(code)
    assert ended.events[-2:] == ["FAIL exit code 3", "ABORT 3"]
    assert ended.code == 103


def test_exit_code_from_a_script_file_and_a_module(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(INSTALLED + "if __name__ == '__main__':\n    sys.exit(3)\n")
    for args in ([str(path)], ["-m", "job"]):
        done = subprocess.run(
            [sys.executable, "-S", *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 103, done.stderr
        assert done.stdout.startswith("FAIL exit code 3\nABORT 3 ")


def test_exit_in_a_thread_ends_the_thread_alone():
    ended = run(
        """
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
        import _thread
        _thread.start_new_thread(sys.exit, (3,))
        time.sleep(0.1)
        say("went on")
        """
    )
    assert ended.err == []
    assert_left(ended)


def test_raise_system_exit_is_invisible():
    ended = run("raise SystemExit(3)")
    assert ended.err == []
    assert_left(ended, code=3)


def test_exit_with_an_exception_object_raises_that_object():
    ended = run("class Mine(SystemExit):\n    pass\nsys.exit(Mine(3))")
    assert_left(ended, code=3)
    assert_left(run("sys.exit(SystemExit(3))"), code=3)


def test_end_of_the_script_is_a_quiet_leave():
    ended = run("say('trained')")
    assert ended.out == ["trained", "LEAVE"]
    assert ended.err == []
    assert_left(ended)


def test_after_a_leave_the_hooks_are_pythons_own():
    late = "lambda: say(str((sys.excepthook, sys.exit) == before))"
    ended = run(
        "exits.install()",
        prelude=PRELUDE
        + f"import atexit\nbefore = sys.excepthook, sys.exit\natexit.register({late})\n",
    )
    assert ended.out == ["LEAVE", "True"]


def test_atexit_hooks_of_the_user_run_before_the_abort():
    ended = run("import atexit\natexit.register(lambda: say('saved'))\nsys.exit(3)")
    assert ended.events == ["saved", "FAIL exit code 3", "ABORT 3"]


def test_users_own_exit_is_called():
    ended = run(
        "sys.exit(3)\nsay('it does not exit')",
        before="""
            import os, sys
            sys.exit = lambda code: os.write(1, b"own\\n")
        """,
    )
    assert ended.out == ["own", "it does not exit", "LEAVE"]


# --- install, remove, disabled, forks


def hooks():
    return """
        before = sys.excepthook, threading.excepthook, sys.exit
        def now():
            return sys.excepthook, threading.excepthook, sys.exit
    """


def test_install_and_remove_twice_restore_what_was_there():
    ended = run(
        hooks()
        + """
        exits.install()
        installed = now()
        exits.install()
        say(str(now() == installed and not any(map(lambda a, b: a is b, installed, before))))
        exits.remove()
        say(str(all(map(lambda a, b: a is b, now(), before))))
        exits.remove()
        exits.install()
        exits.remove()
        say(str(all(map(lambda a, b: a is b, now(), before))))
        sys.exit(3)
        """,
        prelude=PRELUDE,
    )
    assert ended.out == ["True", "True", "True"]  # and no LEAVE
    assert ended.code == 3
    assert ended.err == []


def test_exception_after_remove_is_pythons_own():
    ended = run("exits.remove()\nraise ValueError('x')")
    assert ended.out == []
    assert ended.err[0] == "Traceback (most recent call last):"
    assert ended.code == 1


def test_remove_leaves_the_hooks_of_others_and_passes_on():
    ended = run(
        """
        ours, our_exit = sys.excepthook, sys.exit
        def theirs(*args):
            say("theirs")
            ours(*args)
        sys.excepthook = theirs
        def their_exit(code):
            say("their exit")
            our_exit(code)
        sys.exit = their_exit
        exits.remove()
        say(str(sys.excepthook is theirs and sys.exit is their_exit))
        try:
            sys.exit(3)
        except SystemExit as exc:
            say(type(exc).__name__)
        raise ValueError("x")
        """
    )
    assert ended.out == ["True", "their exit", "SystemExit", "theirs"]
    assert ended.err[-1] == "ValueError: x"
    assert ended.block == []
    assert ended.code == 1


def test_install_again_over_a_foreign_wrapper_does_not_recurse():
    ended = run(
        """
        ours = sys.excepthook
        sys.excepthook = lambda *args: ours(*args)
        exits.remove()
        exits.install()
        raise ValueError("x")
        """
    )
    assert ended.events == ["FAIL ValueError: x", "ABORT 1"]
    assert ended.block[-1][1] == "ValueError: x"


def test_a_second_context_reports_alone():
    ended = run("exits.remove()\nother = make()\nother.install()\nsys.exit(3)")
    assert ended.events == ["FAIL exit code 3", "ABORT 3"]


def test_exit_on_the_way_through_remove_is_not_ours_any_more():
    # try: train() finally: hvd.shutdown()
    ended = run("try:\n    sys.exit(3)\nfinally:\n    exits.remove()")
    assert ended.out == []
    assert ended.code == 3


def test_disabled_leaves_everything_to_python_but_tells_the_leave():
    code = "exits = make(enabled=False)\nexits.install()\n"
    for end, returned in (("raise ValueError('x')", 1), ("sys.exit(3)", 3), ("", 0)):
        assert_left(run(code + end, prelude=PRELUDE), code=returned)


FORKED = {
    "sys.exit(3)": 3,
    "raise ValueError('in the child')": 1,
    "raise SystemExit(4)": 4,
    "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()": 0,
    "pass": 0,
}


@pytest.mark.parametrize(("end", "code"), FORKED.items(), ids=FORKED)
def test_a_forked_child_ends_as_pythons_own(end, code):
    ended = run(
        f"""
        import warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            {end}
            sys.exit()
        say(f"child {{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}}")
        """
    )
    assert ended.out == [f"child {code}", "LEAVE"]
    assert ended.block == []
    assert ended.code == 0


def test_a_forked_worker_of_multiprocessing_does_not_abort():
    ended = run(
        """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        for target in (lambda: sys.exit(3), lambda: 1 / 0):
            child = context.Process(target=target)
            child.start()
            child.join()
            say(f"child {child.exitcode}")
        """
    )
    assert ended.out == ["child 3", "child 1", "LEAVE"]
    assert ended.block == []


def test_constructor_alone_changes_nothing():
    before = sys.excepthook, sys.exit
    Exits(0, 1, print, print, print, enabled=True)
    assert (sys.excepthook, sys.exit) == before


def test_recorded_exit_travels_as_a_plain_one():
    exc = RecordedExit(3)
    exc.exits = Exits(0, 1, print, print, print, enabled=True)
    back = pickle.loads(pickle.dumps(exc))
    assert type(back) is SystemExit
    assert back.code == 3


def test_exit_keeps_its_name_and_its_help():
    ended = run("say(sys.exit.__name__)\nsay(str('SystemExit' in sys.exit.__doc__))")
    assert ended.out[:2] == ["exit", "True"]
