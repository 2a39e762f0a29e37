"""What happens between *gradient ready* and *optimizer step*.  THE file to read.

    training loop                     reducer                               backend
    grad_ready("w7") ───────────────▶ [1] copied into its slot of bucket 2 (views: it is there)
                                      [2] bucket 2 full, and 0, 1 launched? ─▶ [3] this rank arrives
                                                                               [4] all there: reduce
    opt.step(): synchronize() ◀────── [5] step record agreed, buckets done
                                      [6] dict of views handed out

Buckets are launched in the plan's order on every rank, whatever the order in which gradients come:
bucket k only after 0..k-1.  So all ranks issue the same collectives in the same order without a
word of negotiation.  What a rank knows only at the end of its step (which gradients it had, its
weight, an error) travels in the step record, on the last bucket where that belongs to everybody.

[Note: fast path]  `grad_ready` is called once a tensor and step, so its common case (first pass,
not inside no_sync) is a closure over two dicts: `open_`, which holds the slots while nothing about
a call can be out of the ordinary and nothing otherwise, and `touched`, the names that have come in
this step.  Everything else takes `_announce`, which may be slow and clear.

[Note: broken-off waits]  A signal handler may raise out of any of this.  Nothing is lost: a
gradient is stored and counted in one go or not at all, each stage of `synchronize()` bears being
run again, and the next `synchronize()` or `step()` goes on where it stopped, unless the step was
applied.
"""

import math
import os
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hvdlite import log
from hvdlite.arithmetic import Step, run
from hvdlite.backends.base import RankState, Stream, Work
from hvdlite.backends.local import aligned_zeros
from hvdlite.bucket import Plan, TensorSpec, merge_orders, native, plan_buckets
from hvdlite.compression import Codec
from hvdlite.errors import (
    ConfigError,
    HorovodInternalError,
    HvdliteError,
    MissingGradientError,
    RankFailedError,
    ShutDownError,
    UnknownNameError,
)
from hvdlite.fusion import FusionBuffer
from hvdlite.progress import Progress
from hvdlite.stall import DONE, FAILED, name_ranks
from hvdlite.timeline import StepTrace
from hvdlite.types import Array, ReduceOp

_FULL, _ERROR, _REPLAN, _JOINED = 1, 2, 4, 8  # flags of a step record
_RECORD = struct.Struct("=qqqqdq")  # flags, step, applied, digest of plan, weight, order size
# Then one presence bit a parameter, and with _REPLAN the readiness order as parameter numbers.

_ORDER_DTYPE = np.dtype(np.uint32)

ABSENT: Any = object()  # "no gradient argument": it is in its view already
GradReady = Callable[..., None]


class _Phase(Enum):
    IDLE = "between steps"
    OPEN = "gradients are coming"
    CLOSING = "being synchronized"
    SYNCHRONIZED = "synchronized"


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How one optimizer wants its gradients reduced; arguments of `DistributedOptimizer`."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    passes: int = 1  # backward_passes_per_step
    missing: str = "zero"
    views: bool = False  # gradient_as_bucket_view
    fusion_threshold: int = 25 * 2**20
    first_bucket: int = 2**20
    poison: bool = False
    check_views: bool = False
    adasum: bool = False  # everything stays on this rank; see deltas.py
    joined_weight: float = 0.0  # of a rank that has joined: 0, or 1 with divide_by="size"


@dataclass(eq=False, slots=True)
class _BucketState:
    """One bucket of the plan on this rank."""

    names: tuple[str, ...]
    left: int = 0  # gradients that are not final yet
    work: int = -1  # number among this rank's works; -1: it stays on this rank
    index: int = -1  # in the plan


@dataclass(eq=False, slots=True)
class _Slot:
    """One gradient of this rank: of the parameter's shape and dtype, or compressed."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    view: Array
    bucket: _BucketState
    codec: Codec | None = None


class _Record(NamedTuple):
    """What one rank says of its step; see `_RECORD`."""

    flags: int
    step: int
    num_steps: int
    digest: int
    weight: float
    order_nbytes: int
    tail: bytes

    def presence(self, num_specs: int) -> Array:
        """Which parameters the rank had a gradient for."""
        if self.flags & _FULL:
            return np.ones(num_specs, np.bool_)
        raw = np.frombuffer(self.tail, np.uint8)
        return np.unpackbits(raw, count=num_specs).astype(np.bool_)

    def order(self, num_specs: int) -> list[int]:
        """Parameters in the order in which they became ready, as far as the rank decides it."""
        start = -(-num_specs // 8)
        raw = self.tail[start : start + self.order_nbytes]
        return [int(k) for k in np.frombuffer(raw, _ORDER_DTYPE)]


@dataclass(slots=True)
class _Announced:
    """What is known of the names that did not take the fast path in this step."""

    counts: dict[str, int] = field(default_factory=dict)  # passes outside no_sync
    nones: set[str] = field(default_factory=set)  # "none in this step", and none before
    closed: set[str] = field(default_factory=set)  # no further pass may come


class Reducer:
    """Reduces the gradients of one optimizer, step after step.

    Args:
        specs: All parameters, in the registration order of the lowest rank; equal on all ranks.
        dtypes: NumPy dtype by name.
        rank: This world rank.
        stream: Where buckets are reduced; `stream.ranks` are the optimizer's ranks.
        progress: Where waits happen.
        options: See `ReducerOptions`.
        plan: A pinned plan; None: planned here, and again once the readiness order is known.
        agree: Exchanges a text with all ranks of the stream, for growing memory.
        on_begin: Called when a step is opened, before its first gradient; may be called again for
            the same step.
        codecs: Compressions by name; `specs` and `dtypes` are then of what travels.
    """

    grad_ready: GradReady

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        dtypes: Mapping[str, np.dtype[Any]],
        rank: int,
        stream: Stream,
        progress: Progress,
        options: ReducerOptions,
        plan: Plan | None,
        agree: Callable[[str | None], list[str | None]],
        on_begin: Callable[[], None] = lambda: None,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        self.options, self.stream = options, stream
        self._rank, self._progress, self._agree = rank, progress, agree
        self._on_begin = on_begin
        self._is_pinned = plan is not None
        self._specs: list[TensorSpec] = []
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._phase = _Phase.IDLE
        self.num_steps = 0  # that were applied
        self._step = 0
        self._base = 0  # of the step's positions, see `Stream.begin`
        self._weight = 1.0
        self._weight_given = False
        self._in_no_sync = False
        self._is_joined = False  # in the open step, which this rank only serves
        self.has_joined_ranks = False  # in the step that was synchronized last
        self._is_closed = ""
        self._open: dict[str, _Slot] = {}  # see [Note: fast path]
        self._touched: dict[str, Any] = {}  # announced in this step -> weak reference to the array
        self._announced = _Announced()
        self._launched = 0  # of this rank's works
        self._record: bytes | None = None  # of the open step, once it is final
        self._is_filled = False  # slots of missing gradients are zero
        self._failure: Exception | None = None  # this rank's own, told to all by the record
        self._result: dict[str, Array] | None = None
        self._warned: set[tuple[str, ...]] = set()  # sets of missing names already told
        self._checksums: dict[str, int] = {}
        self._orders: dict[Any, tuple[str, ...]] = {}  # readiness order by group, agreed
        self._recorded: dict[str, None] = {}  # names of groups this rank decides, as they came
        self._next_plan: Plan | None = None
        self._codecs: dict[str, Codec] = dict(codecs or {})
        self._sums: dict[str, Array] = {}  # of passes that are to be compressed, in full precision
        self._contexts: dict[str, Any] = {}  # what decompressing needs
        self._decoded: dict[str, Array] = {}  # what was handed out of them
        self._trace: StepTrace | None = None  # of the open step, if a timeline records it
        self._advance = stream.advance  # or the trace's
        self._grow(specs, dtypes, plan)
        self._make_fast_path()
        self._pid = os.getpid()

    # ---- plan and memory -------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The bucket plan that the next step uses."""
        return self._next_plan or self._plan

    @property
    def views(self) -> Mapping[str, Array]:
        """This rank's slots by name."""
        return self._buffer.views

    def add(
        self,
        specs: Sequence[TensorSpec],
        dtypes: Mapping[str, np.dtype[Any]],
        codecs: Mapping[str, Codec],
    ) -> None:
        """Take more parameters; collective over the optimizer's ranks, between two steps.

        The views that exist stay where they are; the new ones get memory of their own.
        """
        self._is_pinned = False
        self._codecs |= codecs
        self._grow(specs, dtypes, None)

    def _grow(
        self, specs: Sequence[TensorSpec], dtypes: Mapping[str, np.dtype[Any]], plan: Plan | None
    ) -> None:
        all_specs = [*self._specs, *specs]
        plan = plan or self._make_plan(all_specs, self._orders)
        region = len(self.stream.buffers)
        sizes = [plan.layout(q)[1].get(region, 0) for q in self.stream.ranks]
        num_bytes = _RECORD.size + -(-len(all_specs) // 8) + _ORDER_DTYPE.itemsize * len(all_specs)
        self.stream.grow(sizes, num_bytes, self._agree)
        self._specs, self._dtypes = all_specs, {**self._dtypes, **dtypes}
        self._by_name = {spec.name: spec for spec in all_specs}
        self._bits = {spec.name: k for k, spec in enumerate(all_specs)}
        self._next_plan = None
        self._adopt(plan)

    def _make_plan(self, specs: Sequence[TensorSpec], orders: Mapping[Any, Any]) -> Plan:
        registration = merge_orders(specs, {})
        ready = merge_orders(specs, orders)
        return plan_buckets(
            specs,
            registration if self.options.views else ready,
            fusion_threshold=self.options.fusion_threshold,
            first_bucket=self.options.first_bucket,
            launch_order=ready,
        )

    def _adopt(self, plan: Plan) -> None:
        """Make slots, views and works for `plan`."""
        self._plan = plan
        self._buffer = FusionBuffer(
            plan, self._rank, self.stream.buffers, self._by_name, self._dtypes
        )
        self._given = self._buffer  # what was handed out last
        views = self._buffer.views
        layouts = {q: plan.layout(q)[0] for q in self.stream.ranks}
        self._buckets: list[_BucketState] = []
        self._sequence: list[_BucketState] = []  # those with a work, in launch order
        works: list[Work] = []
        self._slots: dict[str, _Slot] = {}
        for index, bucket in enumerate(plan.buckets):
            if not bucket.is_for(self._rank):
                continue
            state = _BucketState(bucket.names, index=index)
            self._buckets.append(state)
            for name in bucket.names:
                view, codec = views[name], self._codecs.get(name)
                given = codec or view
                self._slots[name] = _Slot(name, given.shape, given.dtype, view, state, codec)
            if bucket.ranks is not None and len(bucket.ranks) > 1:
                state.work = len(works)
                self._sequence.append(state)
                starts = tuple(layouts[q][index] for q in bucket.ranks)
                works.append(
                    Work(
                        index,
                        bucket.region,
                        bucket.ranks,
                        starts,
                        bucket.nbytes,
                        self._dtypes[bucket.dtype],
                        self.options.op,
                        self.options.prescale,
                        self.options.postscale,
                    )
                )
        self._works = works
        self._work_nbytes = sum(work.nbytes for work in works)
        self._record_rides = bool(
            works
            and works[-1].index == len(plan.buckets) - 1
            and works[-1].ranks == self.stream.ranks
        )
        self.stream.program(works, len(plan.buckets))
        decided = {
            spec.ranks
            for spec in self._specs
            if spec.ranks
            and spec.ranks[0] == self._rank
            and len(spec.ranks) > 1
            and spec.ranks not in self._orders
        }
        self._is_recording = bool(decided) and not self._is_pinned
        self._decides = (
            {spec.name for spec in self._specs if spec.ranks in decided}
            if self._is_recording
            else set()
        )

    # ---- [1] gradients come ----------------------------------------------------------------

    def _make_fast_path(self) -> None:
        """Build `grad_ready`.  See [Note: fast path]."""
        open_, touched, absent = self._open, self._touched, ABSENT
        ref = weakref.ref
        get = weakref.ref(self)  # no cycle: a dropped optimizer is freed at once
        busy = False

        def me() -> Reducer:
            reducer = get()
            if reducer is None:
                raise ShutDownError(
                    "this DistributedOptimizer was dropped; keep it in a variable while its "
                    "grad_ready is used"
                )
            return reducer

        def slow(name: str, grad: Any, weight: float | None) -> None:
            me()._announce(name, grad, weight)

        if self.options.views:

            def grad_ready(name: str, grad: Any = absent, *, weight: float | None = None) -> None:
                nonlocal busy
                if busy:
                    me()._refuse_second_thread(name)
                busy = True
                try:
                    slot = open_.get(name)
                    if slot is None or name in touched or grad is not absent or weight is not None:
                        return slow(name, grad, weight)
                    touched[name] = None
                    bucket = slot.bucket
                    bucket.left = left = bucket.left - 1
                    if not left:
                        me()._launch_ready()
                finally:
                    busy = False

        else:

            def grad_ready(name: str, grad: Any = absent, *, weight: float | None = None) -> None:
                nonlocal busy
                if busy:
                    me()._refuse_second_thread(name)
                busy = True
                try:
                    try:
                        slot = open_[name]
                        is_plain = (
                            grad.shape == slot.shape
                            and grad.dtype is slot.dtype
                            and name not in touched
                            and weight is None
                        )
                        word = ref(grad)
                    except (KeyError, AttributeError, TypeError):  # not open, or no array
                        is_plain = False
                    if not is_plain:
                        return slow(name, grad, weight)
                    slot.view[...] = grad  # half the overhead of np.copyto
                    touched[name] = word
                    bucket = slot.bucket
                    bucket.left = left = bucket.left - 1
                    if not left:
                        me()._launch_ready()
                finally:
                    busy = False

        self.grad_ready = grad_ready

    def _refuse_second_thread(self, name: str) -> None:
        raise RuntimeError(
            f"grad_ready({name!r}): another thread (or the code that a signal handler interrupted) "
            "is inside this optimizer; announce gradients from one thread"
        )

    def _announce(self, name: str, grad: Any, weight: float | None, by_step: bool = False) -> None:
        """[1] The general case: validate all, then store."""
        if self._is_joined:
            raise RuntimeError("grad_ready(): this rank has joined; call join() again")
        label = _label(name, by_step)
        slot = self._check_name(name, label)
        source = self._check_gradient(slot, grad, label)
        self._check_weight(weight)
        if source is None and self._in_no_sync:
            return  # this pass adds nothing
        if self._phase is _Phase.IDLE:
            self._begin(1.0 if weight is None else float(weight), weight is not None)
            slot = self._slots[name]  # a new plan may have moved it
        announced, touched, view = self._announced, self._touched, slot.view
        is_later_pass = name in touched
        is_counted = source is not None and not self._in_no_sync
        count = announced.counts.get(name, 0) + is_counted
        is_last = source is None or count == self.options.passes
        steps: list[Step] = []
        if slot.codec is not None and (source is not None or is_later_pass):
            steps = self._compressing_steps(slot, source, is_last)
        elif source is None:
            if not is_later_pass:
                steps += [(view.fill, 0), (announced.nones.add, name)]
        elif source is not ABSENT:
            if is_later_pass:
                add = partial(np.add, view, np.asarray(source), out=view, casting="unsafe")
                steps.append((add,))
            else:
                steps.append((view.__setitem__, ..., source))
        trace = self._trace
        word = weakref.ref(source) if isinstance(source, np.ndarray) else None
        steps += [(touched.__setitem__, name, word), (announced.counts.__setitem__, name, count)]
        if is_last:
            steps.append((announced.closed.add, name))
        started = 0 if trace is None else time.monotonic_ns()
        run(steps)  # an alarm finds all of it done or nothing: no gradient is lost or added twice
        if trace is not None and source is not None and source is not ABSENT:
            trace.packed(slot.bucket.index, started, view.nbytes)
        if is_counted and self._is_recording and not by_step and name in self._decides:
            self._recorded.pop(name, None)
            self._recorded[name] = None
        if is_last:
            if source is not None and self.options.check_views:  # the slot is the library's now
                self._checksums[name] = zlib.crc32(_bytes_of(view))
            self._complete(slot)

    def _compressing_steps(self, slot: _Slot, source: Any, is_last: bool) -> list[Step]:
        """Add up in full precision; what the last pass has made complete is compressed."""
        assert slot.codec is not None
        total = self._sums.get(slot.name)
        if source is not None:
            given = np.asarray(source)
            total = given.astype(slot.dtype) if total is None else total + given
        if not is_last:
            return [(self._sums.__setitem__, slot.name, total)]
        wire, context = slot.codec.compress(np.asarray(total, order="C"))
        return [
            (slot.view.__setitem__, ..., wire),
            (self._contexts.__setitem__, slot.name, context),
            (self._sums.pop, slot.name, None),
        ]

    def _check_name(self, name: str, label: str) -> _Slot:
        self.check_usable()
        if self._phase in (_Phase.SYNCHRONIZED, _Phase.CLOSING):
            raise RuntimeError(f"{label}: this step is already synchronized; call step() first")
        slot = self._slots.get(name)
        if slot is None:
            spec = self._by_name.get(name)
            if spec is not None:
                raise ValueError(
                    f"{label}: rank {self._rank} is not in the process set of this "
                    f"parameter's group, ranks {list(spec.ranks or ())}"
                )
            near = get_close_matches(str(name), self._by_name, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(f"{label}: the optimizer has no such name{hint}")
        if self._phase is _Phase.OPEN and (name in self._announced.closed or self._is_final(name)):
            raise ValueError(
                f"{label}: announced more often than backward_passes_per_step="
                f"{self.options.passes} in this step; use no_sync() for passes that only accumulate"
            )
        return slot

    def _is_final(self, name: str) -> bool:
        """Whether the fast path has taken it in this step."""
        return name in self._touched and name not in self._announced.counts

    def _check_gradient(self, slot: _Slot, grad: Any, label: str) -> Any:
        """What is to be stored: the array, ABSENT (it is in its view) or None."""
        if grad is None:
            return None
        if grad is ABSENT:
            if self.options.views:
                return ABSENT
            raise TypeError(
                f"{label}: the gradient is missing; only with "
                "gradient_as_bucket_view=True it is in opt.grads already"
            )
        if not isinstance(grad, np.ndarray | np.generic):
            raise TypeError(f"{label}: a gradient is a NumPy array, got {type(grad).__name__}")
        if self.options.views and _is_same_memory(grad, slot.view):
            return ABSENT
        if grad.shape != slot.shape or native(grad.dtype) != slot.dtype:
            raise ValueError(
                f"{label}: gradient of shape {grad.shape} and dtype {grad.dtype}"
                f", but the parameter has shape {slot.shape} and dtype {slot.dtype}"
            )
        return grad

    def _check_weight(self, weight: float | None) -> None:
        if weight is None:
            return
        if self.options.op is not ReduceOp.AVERAGE:
            raise ValueError(f"weight={weight!r}: only op=Average has weights")
        value = float(weight)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"weight must be finite and >= 0, got {weight!r}")
        if self._phase is not _Phase.IDLE and not (self._weight_given and value == self._weight):
            raise ValueError(
                f"weight={weight!r}: the weight of a step goes with its first gradient; this step "
                f"has {self._weight:g} already"
            )

    def _begin(self, weight: float, weight_given: bool = False) -> None:
        """Open a step: everything this rank had is forgotten, the slots are its own to fill."""
        if not self._is_joined:
            if self._progress.has_joined:
                raise RuntimeError("this rank has joined; call join() again, until it returns")
            self._on_begin()
        poisons = self.options.poison and not self.options.views
        if poisons:
            self._given.poison()  # kept from the last step without a copy: now it shows
        if self._next_plan is not None:
            self._adopt(self._next_plan)
            self._next_plan = None
        if poisons:
            self._buffer.poison()
        for bucket in self._buckets:
            bucket.left = len(bucket.names)
        self._weight, self._weight_given = weight, weight_given
        self._launched = 0
        self._record = None
        self._is_filled = False
        self._announced = _Announced()
        self._sums, self._contexts, self._decoded = {}, {}, {}
        self._touched.clear()
        self._result = self._failure = None
        self._trace_step()
        self.stream.begin(self._base, self._step & 1, weight)
        recorder, step = self._progress.recorder, self._step
        recorder.submitted((id(self), step), "step", str(step), self._work_nbytes)
        recorder.told("step", str(step))
        self._phase = _Phase.OPEN
        self._open_fast_path()

    def _trace_step(self) -> None:
        timeline, trace = self._progress.timeline, None
        if timeline is not None:
            works = [(work.index, work.nbytes) for work in self._works]
            trace = timeline.trace_step(self._step, self.stream, works)
        self._trace = trace
        self._advance = self.stream.advance if trace is None else trace.advance

    def _open_fast_path(self) -> None:
        if (
            self._phase is _Phase.OPEN
            and self.options.passes == 1
            and not self._in_no_sync
            and not self._is_recording
            and not self.options.check_views
            and not self._codecs
            and self._trace is None
        ):
            self._open.update(self._slots)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate on this rank only.

        Raises:
            RuntimeError: Inside another `no_sync()`.
        """
        if self._in_no_sync:
            raise RuntimeError("no_sync() inside no_sync()")
        self._open.clear()
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False
            self._open_fast_path()

    # ---- [2] [3] buckets leave -------------------------------------------------------------

    def _complete(self, slot: _Slot) -> None:
        slot.bucket.left -= 1
        if not slot.bucket.left:
            if self._trace is not None:
                self._trace.full(slot.bucket.index)
            self._launch_ready()

    def _launch_ready(self) -> None:
        """[2] Launch what is full and has its turn; then [4] reduce what needs no waiting."""
        if self.options.check_views and self._phase is not _Phase.CLOSING:
            return  # held back until the slots have been checked
        sequence, trace = self._sequence, self._trace
        while self._launched < len(sequence) and not sequence[self._launched].left:
            i = self._launched
            record = None
            if self._record_rides and i == len(sequence) - 1:
                if any(bucket.left for bucket in self._buckets):
                    return  # the record is not final yet
                record = self._final_record()
            self._progress.add(self.stream, self._advance)
            started = 0 if trace is None else time.monotonic_ns()
            self.stream.launch(i, record)  # [3]
            self._launched = i + 1
            if trace is not None:
                trace.launched(i, started)
        if (
            not self._record_rides
            and self._launched == len(sequence)
            and not any(bucket.left for bucket in self._buckets)
        ):
            # Everything is final: the others need not wait until this rank synchronizes.
            self._progress.add(self.stream, self._advance)
            self.stream.conclude(self._final_record())
            self._progress.nudge(self._advance)
        elif self._launched:
            self._progress.nudge(self._advance)

    def _final_record(self) -> bytes:
        """This step's record: made once, so that a resumed step says the same again."""
        if self._record is None:
            self._record = self._make_record()
        return self._record

    def _make_record(self) -> bytes:
        """What the other ranks must know of this rank's step."""
        touched, nones = self._touched, self._announced.nones
        flags = _FULL if len(touched) - len(nones) == len(self._slots) else 0
        if self._failure is not None:
            flags |= _ERROR
        if self._is_joined:
            flags |= _JOINED
        order = b""
        if self._is_recording and self._recorded:
            flags |= _REPLAN
            order = np.array([self._bits[n] for n in self._recorded], _ORDER_DTYPE).tobytes()
        head = _RECORD.pack(
            flags, self._step, self.num_steps, self._plan.digest, self._weight, len(order)
        )
        if flags & _FULL and not order:
            return head
        bits = np.zeros(len(self._specs), np.bool_)
        bits[[self._bits[name] for name in touched.keys() - nones]] = True
        return head + np.packbits(bits).tobytes() + order

    # ---- [5] the end of the step -----------------------------------------------------------

    def synchronize(self) -> dict[str, Array]:
        """Wait for the reduced gradients of this step.

        Returns:
            Name -> array, writable views of the fusion buffer, the same on all ranks of the name's
            set; valid until the first `grad_ready` of the next step.

        Raises:
            MissingGradientError: On every rank, under `missing="error"`.
            HorovodInternalError: On every rank, when a rank's step failed.
        """
        self.check_usable()
        if self._in_no_sync:
            raise RuntimeError("synchronize() inside no_sync(): leave the block first")
        self._progress.check_free("synchronize()")  # before anything is launched
        if self._phase is _Phase.SYNCHRONIZED and self._result is not None:
            return self._result
        if self._phase is _Phase.IDLE:
            self._begin(1.0)
        elif self._is_joined:
            raise RuntimeError("synchronize(): this rank has joined; call join() again")
        stream = self.stream
        what = f"step {self._step} of an optimizer"
        self._close_step()
        if not stream.finished():
            self._progress.wait(
                stream.finished,
                what,
                stream.missing,
                self._check_peers,
                story=self._late_buckets,
            )
        self._progress.check_quitters(what, stream.ranks)
        return self._end_step()

    def serve(self, may_open: bool) -> bool:
        """Take part, with nothing, in a step that others have begun; never waits.

        For a rank that has joined: its gradients are zeros of weight 0 (with `divide_by="size"`
        of weight 1), and count neither as had nor as missing.

        Args:
            may_open: Whether a step that others have begun is to be opened here.

        Returns:
            Whether anything moved.
        """
        if self._is_closed:
            return False
        if self._phase is _Phase.IDLE:
            if not may_open or not self.stream.begun(self._base):
                return False
            self._is_joined = True
            self._begin(self.options.joined_weight, True)
        self._close_step()
        if not self.stream.finished():
            return self.stream.advance()
        self._progress.check_quitters("join()", self.stream.ranks)
        with suppress(HvdliteError):  # those who train are told
            self._end_step()
            self._phase, self._result = _Phase.IDLE, None
            self.num_steps += 1
        return True

    def _close_step(self) -> None:
        """Nothing more comes from this rank: launch what is left."""
        if self._phase is _Phase.OPEN:
            self._open.clear()
            self._check_views()
            self._phase = _Phase.CLOSING
        self._launch_rest()

    def _end_step(self) -> dict[str, Array]:
        """[5] All is here: the verdict, and what comes of it."""
        self._progress.remove(self.stream)
        if self._trace is not None:
            self._trace.look()  # for the last time
        records = self._read_records()
        if any(record.flags & _REPLAN for record in records):
            self._replan(records)
        result: dict[str, Array] | None = None
        failure: HvdliteError | None = None
        try:
            result = self._evaluate(records)
        except HvdliteError as exc:  # the step is dropped, the next one works
            failure = exc
        phase = _Phase.SYNCHRONIZED if failure is None else _Phase.IDLE
        state = DONE if failure is None else FAILED
        self._progress.recorder.mark((id(self), self._step), state)
        base = self._base + len(self._plan.buckets) + 1
        has_joined_ranks = any(record.flags & _JOINED for record in records)
        counters, num_works = self._progress.counters, len(self._works)
        # Plain stores, no call between them: a signal handler sees all of them or none.
        counters.buckets += num_works
        counters.collectives += num_works
        counters.bytes += self._work_nbytes
        self.has_joined_ranks = has_joined_ranks
        self._is_joined = False
        self._result = result
        self._phase = phase
        self._step += 1
        self._base = base
        if result is None:
            if self._trace is not None:
                self._trace.failed()
            raise failure or HvdliteError("the step failed")
        return result

    def _launch_rest(self) -> None:
        """Fill what is missing with zeros and launch all that is left; nothing is sent stale."""
        if not self._is_filled:
            if len(self._touched) < len(self._slots):
                for name in self._slots.keys() - self._touched.keys():
                    self._slots[name].view.fill(0)
            for name in tuple(self._sums):  # fewer passes than there might have been
                run(self._compressing_steps(self._slots[name], None, is_last=True))
            self._is_filled = True
        for bucket in self._buckets:
            if self._trace is not None:
                self._trace.full(bucket.index)
            bucket.left = 0
        self._launch_ready()

    def _check_views(self) -> None:
        for name, checksum in self._checksums.items():
            if zlib.crc32(_bytes_of(self._slots[name].view)) != checksum:
                self._failure = HvdliteError(
                    f"gradient {name!r} was changed after grad_ready() and before synchronize(), "
                    "while its slot belonged to the library"
                )
        self._checksums = {}

    def _check_peers(self) -> None:
        # A rank that has left altogether is the loop's to name, after its grace.
        state = self._progress.control.state
        closed = set(self.stream.closed_ranks()) & set(self.stream.missing())
        closed = {q for q in closed if state(q)[0] < RankState.LEFT}
        if closed:
            raise RankFailedError(
                f"step {self._step} of an optimizer: ranks {sorted(closed)} have closed or dropped "
                "theirs"
            )

    def _late_buckets(self) -> list[str]:
        """What of the ranks that this one waits for is missing, for reports."""
        waiting: dict[int, list[int]] = {}
        buckets = self._plan.buckets
        for q in self.stream.missing():
            launched = self.stream.arrived(q) - self._base
            left = (
                k
                for k, bucket in enumerate(buckets)
                if k >= launched and bucket.ranks is not None and q in bucket.ranks
            )
            waiting.setdefault(next(left, -1), []).append(q)
        return [
            f"bucket {k} of {len(buckets)} ({_some(buckets[k].names)}): not all gradients have "
            f"come on {name_ranks(ranks)}"
            if k >= 0
            else f"all gradients of {name_ranks(ranks)} have come, but not the end of the step"
            for k, ranks in waiting.items()
        ]

    def story(self) -> str:
        """Which gradients of this rank have not come, if a step is open; for reports."""
        if self._phase is not _Phase.OPEN:
            return ""
        missing = [name for name in self._slots if name not in self._touched]
        left = f"without {_some(missing)}" if missing else "with all gradients"
        return f"step {self._step} of an optimizer is open there, {left}"

    def _read_records(self) -> list[_Record]:
        return [
            _Record._make((*_RECORD.unpack_from(raw), raw[_RECORD.size :]))
            for raw in self.stream.records()
        ]

    def _evaluate(self, records: Sequence[_Record]) -> dict[str, Array]:
        """[5] The same verdict on every rank, from the same records; [6] the dict."""
        ranks = self.stream.ranks
        mine = records[ranks.index(self._rank)]
        for q, record in zip(ranks, records, strict=True):
            if record[1:4] != mine[1:4]:
                raise HorovodInternalError(
                    f"ranks are at different steps or plans: rank {self._rank} at step {mine.step}"
                    f", {mine.num_steps} applied, plan {mine.digest:x}; rank {q} at step "
                    f"{record.step}, {record.num_steps} applied, plan {record.digest:x}. After "
                    "load_comm_state() every rank must have loaded the same state"
                )
        if self._failure is not None:
            raise self._failure
        failed = [q for q, r in zip(ranks, records, strict=True) if r.flags & _ERROR]
        if failed:
            raise HorovodInternalError(
                f"step {mine.step}: failed on ranks {failed}, so on all; its gradients are dropped"
            )
        result = dict(self._hand_out())
        if any(record.weight != 1.0 for record in records):
            weights = {q: record.weight for q, record in zip(ranks, records, strict=True)}
            self._drop_weightless(result, weights)
        if not all(record.flags & (_FULL | _JOINED) for record in records):
            result = self._drop_missing(result, records)
        for name, codec in self._codecs.items():
            if name in result:
                context = self._contexts.get(name, codec.context)
                try:
                    made = codec.decompress(result[name].copy(), context)
                except Exception as exc:  # the same on every rank
                    raise HvdliteError(f"decompressing gradient {name!r}: {exc!r}") from exc
                result[name] = self._decoded[name] = made
        return result

    def _hand_out(self) -> Mapping[str, Array]:
        """The reduced gradients: the slots; to be poisoned later, copies of them."""
        self._given = self._buffer
        if self.options.poison and not self.options.views:
            copies = [aligned_zeros(region.size) for region in self.stream.buffers]
            for copy, region in zip(copies, self.stream.buffers, strict=True):
                copy[:] = region
            self._given = FusionBuffer(self._plan, self._rank, copies, self._by_name, self._dtypes)
        return self._given.views

    def _drop_weightless(self, result: dict[str, Array], weights: Mapping[int, float]) -> None:
        """Gradients whose ranks all have weight 0 count as had by none."""
        for bucket in self._plan.buckets:
            if bucket.ranks is not None and not sum(weights[q] for q in bucket.ranks):
                for name in bucket.names:
                    result.pop(name, None)

    def _drop_missing(
        self, result: dict[str, Array], records: Sequence[_Record]
    ) -> dict[str, Array]:
        """Apply the policy for gradients that some rank lacks."""
        count = len(self._specs)
        had = {
            q: record.presence(count)
            for q, record in zip(self.stream.ranks, records, strict=True)
            if not record.flags & _JOINED
        }
        policy = self.options.missing
        lacking: dict[str, list[int]] = {}
        for k, spec in enumerate(self._specs):
            group = self.stream.ranks if spec.ranks is None else spec.ranks
            members = [q for q in group if q in had]  # those that have not joined
            without = [q for q in members if not had[q][k]]
            if not members:
                result.pop(spec.name, None)
            elif without:
                lacking[spec.name] = without
                if spec.ranks is None:
                    is_absent = self._rank in without
                else:
                    is_absent = policy == "skip" or len(without) == len(members)
                if is_absent:
                    result.pop(spec.name, None)
        if lacking and policy == "error":
            told = "; ".join(f"{name!r} on ranks {qs}" for name, qs in list(lacking.items())[:8])
            raise MissingGradientError(
                f"step {records[0].step}: no gradient for {told}"
                + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
                + ". Nothing was applied; the next step works."
            )
        mine = sorted(name for name, qs in lacking.items() if self._rank in qs)
        if mine and tuple(mine) not in self._warned:
            self._warned.add(tuple(mine))
            log.logger.warning(
                "rank %d had no gradient for %d of %d parameters: %s (missing=%r)",
                self._rank,
                len(mine),
                len(self._slots),
                ", ".join(mine[:8]) + (", ..." if len(mine) > 8 else ""),
                policy,
            )
        return result

    def _replan(self, records: Sequence[_Record]) -> None:
        """Plan the coming steps by the readiness orders that came with the records."""
        for record in records:
            if not record.flags & _REPLAN:
                continue
            by_group: dict[Any, list[str]] = {}
            for k in record.order(len(self._specs)):
                spec = self._specs[k]
                by_group.setdefault(spec.ranks, []).append(spec.name)
            for ranks, names in by_group.items():
                self._orders.setdefault(ranks, tuple(names))
        self._next_plan = self._make_plan(self._specs, self._orders)
        self._recorded = {}
        self._is_recording = False

    # ---- between steps ---------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """Number of the step that is under way or comes next, dropped ones counted."""
        return self._step

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way here; a closed optimizer has none."""
        return self._phase is _Phase.IDLE or bool(self._is_closed)

    @property
    def is_synchronized(self) -> bool:
        """Whether `synchronize()` has returned and `step()` has not."""
        return self._phase is _Phase.SYNCHRONIZED

    def submit(self, grads: Mapping[str, Any], weight: float | None) -> None:
        """Take what `step(grads)` was given and `grad_ready` was not; all of it or nothing.

        Raises:
            ValueError, TypeError, KeyError: As `grad_ready`; nothing is stored.
        """
        if not isinstance(grads, Mapping):
            raise TypeError(f"step(grads): a mapping name -> array, got {type(grads).__name__}")
        self.check_usable()
        fresh: dict[str, Any] = {}
        for name, grad in grads.items():
            if (
                self._phase is _Phase.SYNCHRONIZED
                and name in self._given.views
                and _is_same_memory(grad, self._decoded.get(name, self._given.views[name]))
            ):
                continue  # from the dict that synchronize() returned
            if self._phase is not _Phase.IDLE and name in self._touched:
                self._check_same(name, grad)
                continue
            label = _label(name, by_step=True)
            self._check_gradient(self._check_name(name, label), grad, label)
            fresh[name] = grad
        if weight is not None:
            self._check_weight(weight)
            if self._phase is _Phase.IDLE:
                self._begin(float(weight), True)
        for name, grad in fresh.items():
            self._announce(name, grad, None, by_step=True)

    def _check_same(self, name: str, grad: Any) -> None:
        """What was both announced and given must be one array."""
        announced = self._touched[name]
        is_same = grad is not None and announced is not None and announced() is grad
        if grad is None:
            is_same = name in self._announced.nones
        slot = self._slots[name]
        if not is_same and (slot.codec or not _is_same_memory(grad, slot.view)):
            raise ValueError(
                f"step(grads): {name!r} was announced by grad_ready() already, with another array; "
                "give each gradient once"
            )

    def apply(self, function: Callable[[dict[str, Array]], Any]) -> Any:
        """Run the wrapped optimizer on the reduced gradients; that ends the step, or its error."""
        reduced = self.synchronize()
        idle, counters = _Phase.IDLE, self._progress.counters
        trace = self._trace
        started = 0 if trace is None else time.monotonic_ns()
        try:
            return function(reduced)
        finally:
            # Plain stores, no call between them: no signal handler sees a step half over, so none
            # is applied twice.
            self._phase = idle
            self._result = None
            self.num_steps += 1
            counters.steps += 1
            if trace is not None:
                trace.applied(started)

    def drop_step(self) -> None:
        """Forget a synchronized step that is not to be applied."""
        self._phase = _Phase.IDLE
        self._result = None

    def check_can_step(self) -> None:
        """Raise RuntimeError where a step cannot end."""
        self.check_usable()
        if self._in_no_sync:
            raise RuntimeError("step() inside no_sync(): leave the block first")
        self._progress.check_free("step()")  # before anything is stored

    @property
    def names(self) -> list[str]:
        """All parameters, of other ranks' groups too."""
        return list(self._by_name)

    @property
    def num_regions(self) -> int:
        """How often memory was laid out."""
        return len(self.stream.buffers)

    def use(self, plan: Plan) -> None:
        """Use this plan from the next step on; all ranks say so.

        Raises:
            ConfigError: It is a plan for other parameters, ranks or (views) another memory layout.
            RuntimeError: Gradients of this step are under way.
        """
        if self._phase is not _Phase.IDLE:
            raise RuntimeError("load_comm_state: between two steps only; call step() first")
        plan.check_covers(self._specs)
        if self.options.views and plan.slots(self._rank) != self._plan.slots(self._rank):
            raise ConfigError("plan: it lays out memory in another way, and views never move")
        self._next_plan = plan
        self._is_pinned = True
        self._is_recording = False

    def zero_views(self) -> None:
        """Fill the views with zeros.

        Raises:
            RuntimeError: Gradients of this step are under way.
        """
        self.check_usable()
        if self._phase in (_Phase.OPEN, _Phase.CLOSING):
            raise RuntimeError("zero_grad(): gradients of this step are under way; step() first")
        if self.options.views:
            for view in self.views.values():
                view.fill(0)

    def check_usable(self) -> None:
        """Raise if the optimizer is closed, its Context is gone, or this is a forked child."""
        if self._is_closed:
            raise ShutDownError(f"this DistributedOptimizer cannot be used: {self._is_closed}")

    def close(self, why: str = "close() was called on it") -> None:
        """Local: no step can follow on this rank; the peers are told when they wait for one."""
        if not self._is_closed:
            self._is_closed = why
            self._open.clear()
            self._phase = _Phase.IDLE
            self._progress.remove(self.stream)
            self.stream.close(self._base)
            self._progress.nudge(self._progress.poll)  # so that the word goes out now

    def __del__(self) -> None:
        """A dropped optimizer is a closed one: a local word, nothing collective.

        What it has launched is still served: the peers need this rank's shares of it.
        """
        if getattr(self, "_pid", 0) != os.getpid() or self._is_closed:  # or a forked child
            return
        stream, progress = self.stream, self._progress
        stream.close(self._base)

        def serve() -> bool:
            moved = stream.advance()
            if stream.finished():
                progress.remove(stream)
            return moved

        progress.hand_over(stream, serve)

    def disown(self, why: str) -> None:
        """Refuse every use, say nothing and leave the memory alone; whose it is now says `why`."""
        self._is_closed = why
        self._open.clear()


def _label(name: object, by_step: bool) -> str:
    """Names the call in messages."""
    return f"step(grads), {name!r}" if by_step else f"grad_ready({name!r})"


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(map(repr, names[:6])) + more


def _bytes_of(view: Array) -> memoryview:
    return view.reshape(-1).view(np.uint8).data


def _is_same_memory(a: Any, b: Array) -> bool:
    """Whether two arrays are one and the same piece of memory, looked at in the same way."""
    return a is b or (
        isinstance(a, np.ndarray)
        and a.ctypes.data == b.ctypes.data
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
    )
