"""`DistributedOptimizer`: wraps anything that applies gradients; communicates while they come."""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final

import numpy as np

from hvdlite import log
from hvdlite.adasum import check_adasum
from hvdlite.arithmetic import check_reducible
from hvdlite.backends.base import Stream
from hvdlite.bucket import Plan, TensorSpec, native, spec_of
from hvdlite.compression import Codec, Compression, Compressor, check_compression
from hvdlite.context import Context, current
from hvdlite.deltas import Deltas, Group
from hvdlite.errors import BackendUnavailableError, ConfigError
from hvdlite.fusion import GradientViews
from hvdlite.negotiation import check_words, word_of
from hvdlite.objects import ParameterBroadcast, check_writable, describe_arrays, named_arrays
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.reducer import Reducer, ReducerOptions
from hvdlite.types import Array, ReduceOp, parse_bytes, parse_op

_WHAT: Final = "DistributedOptimizer"


@dataclass(slots=True)
class _Group:
    """One param group, as given: its parameters are read again at each broadcast."""

    params: Any
    process_set: ProcessSet | None
    ranks: tuple[int, ...] | None  # who reduces it; None: it stays on its rank
    set_id: int = -1
    registered: dict[str, str] = field(default_factory=dict)  # shape and dtype by name

    def is_shared_by(self, rank: int) -> bool:
        """Whether this rank reduces it with others."""
        return self.ranks is not None and len(self.ranks) > 1 and rank in self.ranks

    def shared(self) -> Group:
        """What `Deltas` needs of it."""
        assert self.process_set is not None
        return self.process_set, self.named

    def named(self) -> dict[str, Array]:
        """The parameters as they are bound now.

        Raises:
            ValueError, TypeError: Other names, shapes or dtypes than at first.
        """
        named = named_arrays(self.params, _WHAT)
        found = describe_arrays(named)
        if not self.registered:
            self.registered = found
        for item in found.keys() | self.registered.keys():
            before, now = self.registered.get(item), found.get(item)
            if before is None:
                raise ValueError(f"{_WHAT}: {item} is new; use add_param_group()")
            if before != now:
                raise ValueError(f"{_WHAT}: {item} had {before}, and now has {now or 'gone'}")
        return named


class DistributedOptimizer:
    """Averages gradients over all ranks as they become ready, then runs the wrapped optimizer.

        for name, grad in backward(params, batch):     # last layer first
            opt.grad_ready(name, grad)                 # communication starts here
        opt.step()

    Every other attribute is the wrapped optimizer's, for reading and writing (`opt.lr = 0.1`).

    Collective:
        All ranks of the process set construct it, and call `step()` equally often; it raises on
        all of them or on none. Ranks outside the set train alone.
    Args:
        optimizer: Anything that applies gradients: an object with `step(grads)`, or with
            `update(grads)`, or a callable `optimizer(grads)`; `grads` is a dict name -> array.
        named_parameters: Mapping name -> array (kept, and read again at each broadcast), an
            iterable of (name, array) pairs, or a list of param groups
            `{"params": ..., "process_set": ps or None}`; None: `optimizer.params`.
        op: Average (default) or Sum; also "mean", "sum". Adasum: the optimizer runs on this rank's
            own gradients, and what it has changed is combined; do not scale the learning rate by
            the number of ranks.
        compression: `Compression.none`, `fp16`, `bf16` or a subclass of `Compressor`: gradients are
            compressed when their last pass is complete, and reduced so.
        backward_passes_per_step: Passes whose sum is reduced as one.
        gradient_predivide_factor: Splits the division: 1/f before the sum, f/n after it.
        process_set: Who trains together.
        fusion_threshold: Capacity of a bucket, bytes or "64MiB"; 0: every gradient alone.
        first_bucket: Capacity of the first bucket of each kind.
        gradient_as_bucket_view: Gradients are written into `opt.grads[name]`; nothing is copied.
        plan: A `Plan`, or the path of a saved one, to be used for ever.
        bcast_period: -1: parameters are never broadcast; 0: now; N > 0: also before every N-th
            update.
        missing: What becomes of gradients that some rank lacks: "zero" (it counts as zeros),
            "skip" (absent unless every rank had it), "error" (MissingGradientError on all).
        divide_by: "active" ranks of the step, or "size"; the same until a rank calls `join()`.
        reduce_method: Alias of `op`.
        param_pack: False is `fusion_threshold=0`, True its default.
        param_pack_thd: Alias of `fusion_threshold`.
    Raises:
        TypeError: The optimizer, a parameter or its name is of the wrong kind.
        ValueError: A value out of range, names twice, excluded combinations, both an alias and
            its modern name.
        MismatchError: On every rank: names, shapes, dtypes, groups or options differ.
        HorovodInternalError: Another rank raised one of the former.
    Source:
        Horovod's `DistributedOptimizer`; buckets: Li et al. 2020, VLDB 13(12) 3005-3018.
    """

    _wrapped: Any
    _context: Context
    _reducer: Reducer
    _groups: list[_Group]
    _bcast_period: int
    _skips_synchronize: bool
    _synchronized: int | None  # number of the step that the caller has synchronized
    _has_warned: bool
    _broadcast: "_Broadcast | None"  # of the step that is under way
    _stream_id: int
    _compressor: type[Compressor]
    _deltas: Deltas | None  # with op=Adasum
    _set_id: int
    _ranks: tuple[int, ...]
    grad_ready: Callable[..., None]
    """grad_ready(name, grad, *, weight=None): gradient `name` of this pass is final.

    Its bucket is reduced as soon as it is full and its turn has come; never waits. The gradient is
    copied at once (any layout or byte order, read-only too); None says "none in this step"; with
    views leave it out.

    Raises:
        ValueError: Wrong shape or dtype, announced too often, a group this rank is not in, or a
            weight that is no finite number >= 0, not with the first gradient, or not for Average.
        KeyError: No such name.
        RuntimeError: The step is synchronized already, or another thread is in here.
    """

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Any = None,
        *,
        op: ReduceOp | str | None = None,
        compression: object = Compression.none,
        backward_passes_per_step: int = 1,
        gradient_predivide_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        fusion_threshold: int | str | None = None,
        first_bucket: int | str | None = None,
        gradient_as_bucket_view: bool = False,
        plan: Plan | str | os.PathLike[str] | None = None,
        bcast_period: int = 0,
        missing: str = "zero",
        divide_by: str = "active",
        reduce_method: str | None = None,
        param_pack: bool | None = None,
        param_pack_thd: int | str | None = None,
    ) -> None:
        context = current()
        set_id = context.set_id(process_set, _WHAT)
        ranks = process_set.ranks
        if context.rank not in ranks:
            ranks = (context.rank,)  # trains alone
        options = ReducerOptions()
        groups: list[_Group] = []
        specs: list[TensorSpec] = []
        dtypes: dict[str, np.dtype[Any]] = {}
        content: dict[str, str] = {}
        pinned: Plan | None = None
        error: Exception | None = None
        codecs: dict[str, Codec] = {}
        compressor: type[Compressor] = Compression.none
        try:
            compressor = check_compression(compression, _WHAT)
            options = _read_options(
                context,
                op,
                backward_passes_per_step,
                gradient_predivide_factor,
                fusion_threshold,
                first_bucket,
                gradient_as_bucket_view,
                missing,
                divide_by,
                reduce_method,
                param_pack,
                param_pack_thd,
            )
            _check_period(bcast_period)
            apply = _find_apply(optimizer)
            groups = _read_groups(context, optimizer, named_parameters, process_set, ranks)
            if compressor is not Compression.none and options.views:
                raise ValueError(
                    f"{_WHAT}: gradient_as_bucket_view=True leaves no room for compression"
                )
            specs, dtypes, content, codecs = _read_specs(
                groups, options, bcast_period, 0, set(), compressor
            )
            pinned = _read_plan(plan, specs)
            content |= {
                f"option {key}": str(value)
                for key, value in {
                    "op": "Adasum" if options.adasum else options.op.name.title(),
                    "backward_passes_per_step": options.passes,
                    "fusion_threshold": options.fusion_threshold,
                    "missing": missing,
                    "first_bucket": options.first_bucket,
                    "views": options.views,
                    "gradient_predivide_factor": options.prescale,
                    "bcast_period": bcast_period,
                    "plan": None if pinned is None else pinned.digest,
                    "divide_by": divide_by,
                    "compression": compressor.__name__,
                }.items()
            }
        except Exception as exc:
            error = exc
        context.matcher.agree(set_id, ranks, _WHAT, error, content)
        self._wrapped, self._apply = optimizer, apply
        self._context, self._groups = context, groups
        self._set_id, self._ranks = set_id, ranks
        self._bcast_period = bcast_period
        self._skips_synchronize = self._has_warned = False
        self._broadcast = self._synchronized = None
        is_lowest = context.rank == ranks[0]
        order, stream_id = self._from_lowest(
            ([s.name for s in specs], context.new_stream_id() if is_lowest else 0)
        )
        self._stream_id = stream_id
        specs = _in_order(specs, order)
        me = weakref.proxy(self)  # no cycle: a dropped optimizer is freed at once
        self._reducer = _make_reducer(
            context,
            set_id,
            ranks,
            stream_id,
            specs,
            dtypes,
            options,
            pinned,
            lambda: me._announce_broadcast(),
            codecs,
        )
        self._compressor, self._deltas = compressor, None
        if options.adasum:
            shared = [g.shared() for g in groups if g.is_shared_by(context.rank)]
            self._deltas = Deltas(str(stream_id), shared, compressor)
        context.adopt(self._reducer)
        self.grad_ready = self._reducer.grad_ready
        if bcast_period != -1:
            _Broadcast(context, set_id, ranks, groups, f"{stream_id}.first").run()

    def _from_lowest(self, value: Any) -> Any:
        """What the lowest rank of the set passes; collective."""
        if len(self._ranks) == 1:
            return value
        is_lowest = self._context.rank == self._ranks[0]
        return self._context.matcher.exchange(
            self._set_id, self._ranks, _WHAT, value if is_lowest else None
        )[0]

    # ---- gradients and steps ---------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The frozen bucket plan of the next step: names, order, sizes; printable, `save(path)`."""
        return self._reducer.plan

    @property
    def grads(self) -> GradientViews:
        """With `gradient_as_bucket_view`: the array to write each gradient into.

        A slot is yours from the end of a step until the `grad_ready(name)` that completes it; then
        again from `synchronize()` on, reduced.
        """
        if not self._reducer.options.views:
            raise AttributeError("grads")  # Python goes on to __getattr__, which says why
        reducer = self._reducer
        return GradientViews(lambda: reducer.views)

    def synchronize(self) -> dict[str, Array]:
        """Wait for the reduced gradients of this step, e.g. to clip them before `step()`.

        Collective:
            All ranks of the process set; blocks.
        Returns:
            A dict name -> writable array, the same on every rank of the name's set; valid until the
            first `grad_ready` of the next step. Again before `step()`: the same dict.
        Raises:
            MissingGradientError: On every rank, with `missing="error"`; the step is dropped.
            HorovodInternalError: On every rank: a rank's step failed; the step is dropped.
            RankFailedError: A rank died or left.
            RuntimeError: Inside `no_sync()`.
        """
        if self._deltas is not None:
            raise RuntimeError(
                "synchronize(): with op=Adasum step() combines what the optimizer has changed; "
                "there are no reduced gradients"
            )
        reduced = self._reducer.synchronize()
        self._synchronized = self._reducer.step_number
        return reduced

    def step(self, grads: Mapping[str, Any] | None = None, *, weight: float | None = None) -> Any:
        """Reduce what is left, and run the wrapped optimizer once.

        Collective:
            All ranks of the process set; blocks.
        Args:
            grads: Gradients that were not announced by `grad_ready`, by name.
            weight: This rank's weight in the average, if nothing was announced.
        Returns:
            What the wrapped optimizer returned.
        Raises:
            ValueError, TypeError, KeyError: As `grad_ready`; nothing is stored.
            RuntimeError: Inside `no_sync()`; `skip_synchronize()` without `synchronize()`.
            HorovodInternalError: As `synchronize()`.
        """
        reducer = self._reducer
        if self._deltas is not None and self._deltas.is_under_way:  # a wait was broken off
            return self._return(self._deltas.finish())
        if self._skips_synchronize:
            if not reducer.is_synchronized:
                raise RuntimeError("skip_synchronize(): call opt.synchronize() before this step()")
        elif not reducer.is_synchronized:
            reducer.check_can_step()
        elif self._synchronized == reducer.step_number and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "step() after synchronize() applies the synchronized gradients; nothing is "
                "reduced again. Write `with opt.skip_synchronize(): opt.step()`",
                stacklevel=2,
            )
        if grads is not None or weight is not None:
            reducer.submit({} if grads is None else grads, weight)
        reducer.synchronize()
        if self._broadcast is not None and reducer.has_joined_ranks:
            self._broadcast.abandon()
            self._broadcast = None
            log.info_once(
                ("no broadcast", self._stream_id),
                "periodic broadcasts are skipped while a rank has joined",
            )
        if self._broadcast is not None:
            try:
                self._broadcast.run()
            except BaseException:
                if self._broadcast.has_failed:  # on all ranks: the step is dropped
                    self._broadcast = None
                    reducer.drop_step()
                raise
            self._broadcast = None
        if self._deltas is None:
            return self._return(reducer.apply(self._apply))
        reducer.apply(partial(self._deltas.start, reducer.step_number, self._apply))
        return self._return(self._deltas.finish())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `grad_ready` accumulates on this rank and communicates nothing."""
        with self._reducer.no_sync():
            yield

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` applies what `synchronize()` returned, as the caller left it.

        Raises:
            RuntimeError: Nested.
        """
        if self._skips_synchronize:
            raise RuntimeError("skip_synchronize() inside skip_synchronize()")
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the views, and call the wrapped optimizer's `zero_grad` if it has one.

        Raises:
            RuntimeError: Gradients of this step are under way.
        """
        self._reducer.zero_views()
        inner = getattr(self._wrapped, "zero_grad", None)
        if callable(inner):
            inner(*args, **kwargs)

    # ---- parameters ------------------------------------------------------------------------

    def _announce_broadcast(self) -> None:
        """Called when a step is opened: one that ends with a broadcast says so before it waits.

        So a rank that steps two optimizers in another order than the root finds its part done.
        """
        period = self._bcast_period
        if period > 0 and (self._reducer.num_steps + 1) % period == 0 and self._broadcast is None:
            self._broadcast = _Broadcast(
                self._context,
                self._set_id,
                self._ranks,
                self._groups,
                f"{self._stream_id}.{self._reducer.step_number}",
            )
            self._broadcast.announce()

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters, broadcast them (unless `bcast_period` is -1) and plan anew.

        The wrapped optimizer's `add_param_group` is called too, if it has one.

        Collective:
            All ranks of the process set, between two steps.
        Raises:
            ValueError, TypeError: As the constructor; the optimizer stays as it was.
            RuntimeError: Gradients of this step are under way.
            MismatchError: On every rank: the groups differ.
        """
        reducer, context = self._reducer, self._context
        reducer.check_usable()
        error: Exception | None = None
        new: list[_Group] = []
        specs: list[TensorSpec] = []
        dtypes: dict[str, np.dtype[Any]] = {}
        content: dict[str, str] = {}
        codecs: dict[str, Codec] = {}
        try:
            if not reducer.is_idle:
                raise RuntimeError("add_param_group: between two steps only; call step() first")
            default = context.process_sets.get(self._set_id, global_process_set)
            new = [_read_group(context, group, default, self._ranks)]
            specs, dtypes, content, codecs = _read_specs(
                new,
                reducer.options,
                self._bcast_period,
                reducer.num_regions,
                reducer.names,
                self._compressor,
            )
        except Exception as exc:
            error = exc
        context.matcher.agree(self._set_id, self._ranks, "add_param_group", error, content)
        order = self._from_lowest([spec.name for spec in specs])
        reducer.add(_in_order(specs, order), dtypes, codecs)
        self._groups += new
        if self._deltas is not None:
            self._deltas.groups += [g.shared() for g in new if g.is_shared_by(context.rank)]
        if self._bcast_period != -1:
            name = f"{self._stream_id}.region{reducer.num_regions}"
            _Broadcast(context, self._set_id, self._ranks, new, name).run()
        inner = getattr(self._wrapped, "add_param_group", None)
        if callable(inner):
            inner(group)

    # ---- state, end, and the wrapped optimizer ---------------------------------------------

    def comm_state(self) -> dict[str, Any]:
        """What communication would lose over a restart: step counter and plan.

        Never part of `state_dict()`, which is the wrapped optimizer's alone.
        """
        return {"num_steps": self._reducer.num_steps, "plan": self.plan.to_dict()}

    def load_comm_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `comm_state()`; a plan for other ranks or parameters is made anew.

        All ranks load the same state, between two steps.

        Raises:
            ConfigError: It is no such state.
            RuntimeError: Gradients of this step are under way.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"load_comm_state: expected what comm_state() returned, got {type(state).__name__}"
            )
        try:
            num_steps, plan = int(state["num_steps"]), Plan.from_dict(state["plan"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"load_comm_state: this is no comm_state(): {exc!r}") from exc
        try:
            self._reducer.use(plan)
        except ConfigError as exc:
            log.logger.info("load_comm_state: the plan is made anew (%s)", exc)
        self._reducer.num_steps = num_steps
        self._broadcast = None  # one that was announced at another count, in a step that failed

    def close(self) -> None:
        """Give up communicating; local, waits for nobody.  The memory goes with its views."""
        self._reducer.close()

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped optimizer's; what returns it returns this wrapper."""
        if name.startswith("__") or "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        try:
            value = getattr(self._wrapped, name)
        except AttributeError:
            if name == "grads":
                raise AttributeError(
                    "opt.grads exists only with gradient_as_bucket_view=True"
                ) from None
            raise
        if getattr(value, "__self__", None) is not self._wrapped:
            return value

        @wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._return(value(*args, **kwargs))

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "grad_ready":
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise AttributeError(f"{name} belongs to DistributedOptimizer and cannot be set")
        else:
            setattr(self._wrapped, name, value)

    def _return(self, value: Any) -> Any:
        """Never hand out the inner optimizer: stepping it would train without communication."""
        return self if value is self._wrapped else value

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._wrapped!r}, {len(self.plan.buckets)} buckets)"


class _Broadcast:
    """The parameters of some groups, each from the lowest rank of its set.

    A wait that a signal handler breaks off loses nothing: `run()` again goes on.

    Args:
        context: Where.
        set_id: Process set of the optimizer.
        ranks: Its members.
        groups: The groups; those of other ranks are left to them.
        name: Tells this broadcast from all others; equal on all ranks.
    """

    def __init__(
        self,
        context: Context,
        set_id: int,
        ranks: tuple[int, ...],
        groups: Sequence[_Group],
        name: str,
    ) -> None:
        self._matcher, self._ranks = context.matcher, ranks
        self.has_failed = False
        self._error: Exception | None = None
        self._broadcasts: list[ParameterBroadcast] = []
        try:
            for k, group in enumerate(groups):
                if group.ranks is not None and context.rank in group.ranks:
                    check_writable(group.named(), _WHAT)
                    self._broadcasts.append(
                        ParameterBroadcast(
                            context,
                            f"parameters.{name}.{k}",
                            group.set_id,
                            group.ranks,
                            group.ranks[0],
                            group.named,
                        )
                    )
        except Exception as exc:  # raised once all ranks know
            self._error = exc
        self._agreement = context.matcher.object_ticket(
            set_id, ranks, "broadcast", word_of(self._error), f"broadcast.{name}"
        )

    def announce(self) -> None:
        """Say that this rank takes part; waits for nothing."""
        self._matcher.submit(self._agreement)
        if self._error is None:
            for broadcast in self._broadcasts:
                broadcast.announce()

    def abandon(self) -> None:
        """Say what was begun to the end, and change no parameter."""
        self._matcher.submit(self._agreement).abandoned = True
        for broadcast in self._broadcasts:
            broadcast.abandon()

    def run(self) -> None:
        """Agree, and send or receive what is left.

        Raises:
            ValueError, TypeError: This rank's parameters cannot be overwritten.
            HorovodInternalError: Another rank's cannot.
        """
        words = self._matcher.wait(self._matcher.submit(self._agreement))
        self.has_failed = any(words)
        if self._error is not None:
            raise self._error
        check_words(_WHAT, self._ranks, words)
        for broadcast in self._broadcasts:
            broadcast.run()


def unwrapped(optimizer: DistributedOptimizer) -> tuple[Any, dict[str, Array]]:
    """What a `DistributedOptimizer` wraps, and its parameters as they are bound now."""
    named: dict[str, Array] = {}
    for group in optimizer._groups:
        named |= group.named()
    return optimizer._wrapped, named


# ---- reading arguments -----------------------------------------------------------------------


def _find_apply(optimizer: Any) -> Callable[[dict[str, Array]], Any]:
    for method in ("step", "update"):
        found = getattr(optimizer, method, None)
        if callable(found):
            return found  # type: ignore[no-any-return]  # what it takes is documented
    if callable(optimizer):
        return optimizer  # type: ignore[no-any-return]  # likewise
    raise TypeError(
        f"{_WHAT}: optimizer must have step(grads), or update(grads), or be a callable "
        f"optimizer(grads); got {type(optimizer).__name__}"
    )


def _read_options(
    context: Context,
    op: object,
    passes: object,
    predivide: object,
    fusion_threshold: Any,
    first_bucket: Any,
    views: bool,
    missing: str,
    divide_by: str,
    reduce_method: str | None,
    param_pack: bool | None,
    param_pack_thd: Any,
) -> ReducerOptions:
    if reduce_method is not None:
        if op is not None:
            raise ValueError(f"{_WHAT}: reduce_method is an alias of op; pass one of them")
        op = reduce_method
    if fusion_threshold is not None and (param_pack is not None or param_pack_thd is not None):
        raise ValueError(
            f"{_WHAT}: param_pack and param_pack_thd are aliases of fusion_threshold; pass one"
        )
    if param_pack is False:
        if param_pack_thd is not None:
            raise ValueError(f"{_WHAT}: param_pack=False together with param_pack_thd")
        fusion_threshold = 0
    elif param_pack_thd is not None:
        fusion_threshold = param_pack_thd
    reduce_op = parse_op(ReduceOp.AVERAGE if op is None else op)
    is_adasum = reduce_op is ReduceOp.ADASUM
    if is_adasum:  # what the reducer does is to add up this rank's own passes
        if views:
            raise ValueError(f"{_WHAT}: Adasum reduces no gradients, so there are no views of them")
        reduce_op = ReduceOp.SUM
    if reduce_op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"{_WHAT}: op={reduce_op.name.title()}: gradients are reduced by Average or Sum"
        )
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"{_WHAT}: backward_passes_per_step must be an int >= 1, got {passes!r}")
    if isinstance(predivide, bool) or not isinstance(predivide, int | float | np.number):
        raise TypeError(f"{_WHAT}: gradient_predivide_factor is a number, got {predivide!r}")
    factor = float(predivide)
    if not (np.isfinite(factor) and factor > 0):
        raise ValueError(f"{_WHAT}: gradient_predivide_factor must be > 0, got {predivide!r}")
    if factor != 1.0 and reduce_op is not ReduceOp.AVERAGE:
        raise ValueError(f"{_WHAT}: gradient_predivide_factor works with op=Average only")
    if missing not in ("zero", "skip", "error"):
        raise ValueError(f'{_WHAT}: missing is "zero", "skip" or "error", got {missing!r}')
    if divide_by not in ("active", "size"):
        raise ValueError(f'{_WHAT}: divide_by is "active" or "size", got {divide_by!r}')
    config = context.config
    return ReducerOptions(
        op=reduce_op,
        prescale=1.0 / factor,
        postscale=factor,
        passes=passes,
        missing=missing,
        views=bool(views),
        adasum=is_adasum,
        joined_weight=1.0 if divide_by == "size" else 0.0,
        fusion_threshold=config.fusion_threshold
        if fusion_threshold is None
        else parse_bytes(fusion_threshold, "fusion_threshold"),
        first_bucket=config.first_bucket
        if first_bucket is None
        else parse_bytes(first_bucket, "first_bucket"),
        poison=config.poison_grads,
        check_views=config.check_views,
    )


def _check_period(period: object) -> None:
    if isinstance(period, bool) or not isinstance(period, int) or period < -1:
        raise ValueError(
            f"{_WHAT}: bcast_period is -1 (never), 0 (at construction) or N (also every N-th "
            f"step), got {period!r}"
        )


def _read_groups(
    context: Context,
    optimizer: Any,
    named_parameters: Any,
    default: ProcessSet,
    ranks: tuple[int, ...],
) -> list[_Group]:
    if named_parameters is None:
        named_parameters = getattr(optimizer, "params", None)
        if not isinstance(named_parameters, Mapping):
            raise TypeError(
                f"{_WHAT}: named_parameters is missing, and the optimizer has no mapping `params`"
            )
    if isinstance(named_parameters, Iterable) and not isinstance(
        named_parameters, Mapping | set | frozenset | str | bytes | np.ndarray
    ):
        named_parameters = list(named_parameters)
        first = named_parameters[:1]
        if first and isinstance(first[0], Mapping):
            return [_read_group(context, group, default, ranks) for group in named_parameters]
    return [_read_group(context, {"params": named_parameters}, default, ranks)]


def _read_group(
    context: Context, group: Any, default: ProcessSet, ranks: tuple[int, ...]
) -> _Group:
    if not isinstance(group, Mapping) or "params" not in group:
        found = f"one with {list(group)}" if isinstance(group, Mapping) else type(group).__name__
        raise TypeError(f'{_WHAT}: a param group is a mapping with the key "params", got {found}')
    params = group["params"]
    if not isinstance(params, Mapping):
        params = list(named_arrays(params, _WHAT).items())
    process_set = group.get("process_set", default)
    if process_set is None:
        return _Group(params, None, None)
    set_id = context.set_id(process_set, _WHAT)
    if process_set is default:
        return _Group(params, process_set, ranks, set_id)
    outside = sorted(set(process_set.ranks) - set(ranks))
    if outside and len(ranks) > 1:
        raise ValueError(
            f"{_WHAT}: the group's {process_set!r} has ranks {outside} that are not in the "
            f"optimizer's set {list(ranks)}"
        )
    if outside:  # a rank that trains alone
        return _Group(params, process_set, ranks, set_id)
    return _Group(params, process_set, process_set.ranks, set_id)


def _read_specs(
    groups: Sequence[_Group],
    options: ReducerOptions,
    bcast_period: int,
    region: int,
    taken: Iterable[str],
    compressor: type[Compressor],
) -> tuple[list[TensorSpec], dict[str, np.dtype[Any]], dict[str, str], dict[str, Codec]]:
    """Validate the parameters: what planning needs, dtypes, what ranks compare, compressions."""
    codecs: dict[str, Codec] = {}
    specs: list[TensorSpec] = []
    dtypes: dict[str, np.dtype[Any]] = {}
    content: dict[str, str] = {}
    seen = set(taken)
    for group in groups:
        named = group.named()
        for name, array in named.items():
            if name in seen:
                raise ValueError(
                    f"{_WHAT}: two parameters are named {name!r}; names must be unique"
                )
            seen.add(name)
            if not (array.flags.c_contiguous or array.flags.f_contiguous):
                raise ValueError(
                    f"{_WHAT}: parameter {name!r} is not contiguous (strides {array.strides} for "
                    f"shape {array.shape}); pass the whole array, or a copy"
                )
            label, wire = f"{_WHAT}: parameter {name!r}", array
            ranks = None if options.adasum else group.ranks
            if options.adasum:
                check_adasum(native(array.dtype), label)
            elif compressor is not Compression.none and ranks is not None and len(ranks) > 1:
                codecs[name] = Codec(compressor, array.shape, native(array.dtype), label)
                wire = codecs[name].wire
            check_reducible(options.op, wire.dtype, label)
            spec = spec_of(name, wire, ranks, region)
            specs.append(spec)
            dtypes[spec.dtype] = native(wire.dtype)
        if bcast_period != -1 and group.ranks is not None:
            check_writable(named, _WHAT)
        where = "local" if group.ranks is None else f"ranks {list(group.ranks)}"
        content |= {item: f"{text}, {where}" for item, text in describe_arrays(named).items()}
    return specs, dtypes, content, codecs


def _read_plan(plan: Any, specs: Sequence[TensorSpec]) -> Plan | None:
    if plan is None:
        return None
    if not isinstance(plan, Plan | str | os.PathLike):
        raise TypeError(f"{_WHAT}: plan is a Plan or the path of one, got {type(plan).__name__}")
    pinned = plan if isinstance(plan, Plan) else Plan.load(plan)
    pinned.check_covers(specs)
    return pinned


def _in_order(specs: Sequence[TensorSpec], order: Sequence[str]) -> list[TensorSpec]:
    by_name = {spec.name: spec for spec in specs}
    return [by_name[name] for name in order]


def _make_reducer(
    context: Context,
    set_id: int,
    ranks: tuple[int, ...],
    stream_id: int,
    specs: Sequence[TensorSpec],
    dtypes: Mapping[str, np.dtype[Any]],
    options: ReducerOptions,
    plan: Plan | None,
    on_begin: Callable[[], None],
    codecs: Mapping[str, Codec],
) -> Reducer:
    def make(stream: Stream) -> Reducer:
        return Reducer(
            specs,
            dtypes,
            context.rank,
            stream,
            context.progress,
            options,
            plan,
            context.agree_on(set_id, ranks),
            on_begin,
            codecs,
        )

    try:
        return make(context.open_stream(set_id, ranks, stream_id))
    except BackendUnavailableError as exc:  # the same on every rank
        return make(context.fall_back(set_id, ranks, stream_id, exc))
