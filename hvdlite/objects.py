"""Collectives on Python objects and on whole models: pickles, and fused parameters."""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.bucket import native
from hvdlite.calls import check_name, check_root
from hvdlite.context import Context, current
from hvdlite.negotiation import check_contents, check_words, word_of
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.ticket import Terms, Ticket, separate
from hvdlite.types import Array

_PACK_BYTES = 32 * 2**20  # parameters are sent in packs of this size, so that memory stays bounded


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root's object.

    Ranks trust each other: objects travel as pickles within the job.

    Collective:
        All ranks of the process set; blocks until the object is there.
    Args:
        obj: On the root any object that pickles, of any size; elsewhere ignored.
        root_rank: World rank of the root.
        name: Identifies the call on all ranks; default: a count per set.
        process_set: Who takes part.
    Returns:
        The object itself on the root, a copy elsewhere.
    Raises:
        ValueError: The root is no member of the set; the other ranks raise HorovodInternalError.
        HorovodInternalError: The root's object does not pickle (on the root: its own error).
        MismatchError: The ranks name different roots.
    """
    context = current()
    set_id, ranks = context.members(process_set, "broadcast_object")
    root, error = ranks[0], None
    try:
        root = check_root(root_rank, ranks, "broadcast_object")
    except (ValueError, TypeError) as exc:
        error = exc
    is_root = context.rank == root
    sends = is_root and error is None
    objects = _exchange(context, set_id, ranks, "broadcast_object", name, obj, sends, root, error)
    return obj if is_root else objects[ranks.index(root)]


def allgather_object(
    obj: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give every rank the objects of all, in rank order.

    Collective:
        All ranks of the process set; blocks until all are there.
    Args:
        obj: Any object that pickles, of any size.
        name: Identifies the call on all ranks; default: a count per set.
        process_set: Who takes part.
    Returns:
        A new list, one object a rank.
    Raises:
        HorovodInternalError: An object does not pickle (on its rank: its own error).
    """
    context = current()
    set_id, ranks = context.members(process_set, "allgather_object")
    return _exchange(context, set_id, ranks, "allgather_object", name, obj, True)


def _exchange(
    context: Context,
    set_id: int,
    ranks: tuple[int, ...],
    kind: str,
    name: str | None,
    obj: Any,
    sends: bool,
    root: int = -1,
    error: Exception | None = None,
) -> list[Any]:
    """Pickles from those who send to all; an error of one rank is told to all."""
    data = b""
    if sends:
        try:
            data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        except Exception as exc:
            error = exc  # whatever __reduce__ raises; raised below, once all ranks know
    check_name(kind, name)
    word = word_of(error)
    said: list[tuple[str | None, int]] = []

    def place(sizes: Sequence[int], extras: Sequence[Any]) -> list[Array]:
        said[:] = extras
        return separate(sizes, extras)

    ticket = Ticket(
        Terms(set_id, ranks, (("kind", kind),), place=place),
        name,
        np.frombuffer(data, np.uint8),
        lambda parts: parts,
        extra=(word and word[:200], root),
    )
    parts = context.matcher.call(ticket)
    if error is not None:
        raise error
    check_words(ticket.what, ranks, [text for text, _ in said])
    check_contents(ticket.what, ranks, [[("root_rank", str(r))] for _, r in said])
    return [pickle.loads(part.data) if part.size else None for part in parts]


def broadcast_parameters(
    params: Any, root_rank: int = 0, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite the parameters of all ranks by the root's, fused into few messages.

    Collective:
        All ranks of the process set; blocks until all parameters are equal.
    Args:
        params: A mapping name -> array, or (name, array) pairs; writable NumPy arrays of any
            layout, changed in place. Names are compared as a set; their order may differ.
        root_rank: World rank of the root.
        process_set: Who takes part.
    Returns:
        `params` (a list of the pairs if it was an iterator).
    Raises:
        ValueError, TypeError: This rank's parameters cannot be written; nothing was changed. The
            other ranks raise HorovodInternalError, which quotes it.
        MismatchError: On every rank: names, shapes or dtypes differ.
    Cost:
        One agreement, then one message per 32 MiB of parameters.
    """
    context = current()
    set_id, ranks = context.members(process_set, "broadcast_parameters")
    error: Exception | None = None
    named: dict[str, Array] = {}
    root = ranks[0]
    returned = params
    try:
        root = check_root(root_rank, ranks, "broadcast_parameters")
        if not isinstance(params, Mapping | Sequence):
            returned = params = list(named_arrays(params, "broadcast_parameters").items())
        named = named_arrays(params, "broadcast_parameters")
        check_writable(named, "broadcast_parameters")
    except Exception as exc:
        error = exc  # raised by agree(), once all ranks know
    content = {"root_rank": str(root), **describe_arrays(named)}
    context.matcher.agree(set_id, ranks, "broadcast_parameters", error, content)
    name = context.matcher.unnamed(set_id, "broadcast_parameters")
    ParameterBroadcast(context, name, set_id, ranks, root, lambda: named).run()
    return returned


class ParameterBroadcast:
    """A broadcast of agreed parameters, pack by pack.

    A wait that a signal handler breaks off loses nothing: `run()` again goes on.

    Args:
        context: Where.
        name: What the packs are matched by; unique among what is under way, equal on all ranks.
        set_id: Process set.
        ranks: Its members.
        root: World rank of the root.
        read: Gives the parameters; the same names, shapes and dtypes on all ranks, and always.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        set_id: int,
        ranks: tuple[int, ...],
        root: int,
        read: Callable[[], Mapping[str, Array]],
    ) -> None:
        self._matcher, self._is_root, self._read = context.matcher, context.rank == root, read
        num_packs = len(_packs(read())) if len(ranks) > 1 else 0
        terms = Terms(set_id, ranks, (("kind", "broadcast_parameters"),))
        self._tickets = [
            Ticket(
                terms,
                f"\0{name}.{k}",
                np.empty(0, np.uint8),
                lambda parts: parts[ranks.index(root)],
            )
            for k in range(num_packs)
        ]
        self._next = 0

    def announce(self) -> None:
        """Let the root know that this rank will take what it sends; waits for nothing."""
        if not self._is_root:
            for ticket in self._tickets:
                self._matcher.submit(ticket)

    def abandon(self) -> None:
        """Make this rank's part of what is left, and take nothing; so that no rank waits."""
        for ticket in self._tickets[self._next :]:
            self._matcher.submit(ticket).abandoned = True

    def run(self) -> None:
        """Send or receive what is left."""
        packs = _packs(self._read()) if self._tickets else []  # as they are bound now
        while self._next < len(packs):
            pack, ticket = packs[self._next], self._tickets[self._next]
            if self._is_root and not ticket.is_submitted:
                ticket.data = _pack(pack)
            received = self._matcher.wait(self._matcher.submit(ticket))
            if not self._is_root:
                _unpack(received, pack)
            self._next += 1
            ticket.result = None  # the memory of one pack at a time


def named_arrays(params: Any, what: str) -> dict[str, Array]:
    """A mapping or (name, array) pairs as a dict of NumPy arrays, in the order given.

    Raises:
        TypeError, ValueError: As `named_values`; also for what is no NumPy array.
    """
    named: dict[str, Array] = {}
    for name, array in named_values(params, what).items():
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{what}: parameter {name!r} is a {type(array).__name__}, not a NumPy array"
            )
        named[name] = array
    return named


def named_values(params: Any, what: str) -> dict[str, Any]:
    """A mapping or (name, value) pairs as a dict, in the order given.

    Raises:
        TypeError: A set, something that is no pair, a name that is no str.
        ValueError: A name twice.
    """
    if isinstance(params, set | frozenset):
        raise TypeError(f"{what}: a set has no order; pass a mapping or (name, array) pairs")
    if isinstance(params, Mapping):
        pairs: Iterable[Any] = params.items()
    elif isinstance(params, Iterable) and not isinstance(params, str | bytes | np.ndarray):
        pairs = params
    else:
        raise TypeError(
            f"{what}: parameters are a mapping name -> array or (name, array) pairs, got "
            f"{type(params).__name__}"
        )
    named: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{what}: expected a pair (name, array), got {type(pair).__name__}")
        name, value = pair
        if not isinstance(name, str):
            raise TypeError(f"{what}: a parameter's name is a str, got {name!r}")
        if name in named:
            raise ValueError(f"{what}: two parameters are named {name!r}; names must be unique")
        named[name] = value
    return named


def check_writable(named: Mapping[str, Array], what: str) -> None:
    """Raise ValueError for an array that cannot be overwritten, TypeError for one of objects."""
    for name, array in named.items():
        if array.dtype.hasobject or array.dtype.kind in "USmM":
            raise TypeError(f"{what}: parameter {name!r} has dtype {array.dtype}; use numbers")
        if not array.flags.writeable:
            raise ValueError(f"{what}: parameter {name!r} is read-only: it cannot be overwritten")


def describe_arrays(named: Mapping[str, Array]) -> dict[str, str]:
    """Shape and dtype by parameter, for comparison between ranks."""
    return {
        f"parameter {name!r}": f"shape {array.shape}, dtype {array.dtype.name}"
        for name, array in named.items()
    }


def _packs(named: Mapping[str, Array]) -> list[list[Array]]:
    """Arrays in name order, grouped up to 32 MiB; the same groups on all ranks."""
    packs: list[list[Array]] = []
    room = 0
    for name in sorted(named):
        array = named[name]
        if not packs or array.nbytes > room:
            packs.append([])
            room = _PACK_BYTES
        packs[-1].append(array)
        room -= array.nbytes
    return packs


def _pack(arrays: Sequence[Array]) -> Array:
    data = np.empty(sum(array.nbytes for array in arrays), np.uint8)
    for array, view in zip(arrays, _views(data, arrays), strict=True):
        np.copyto(view, array)
    return data


def _unpack(data: Array, arrays: Sequence[Array]) -> None:
    for array, view in zip(arrays, _views(data, arrays), strict=True):
        np.copyto(array, view)


def _views(data: Array, arrays: Sequence[Array]) -> list[Array]:
    """Where each array lies in a pack; native byte order."""
    views, start = [], 0
    for array in arrays:
        piece = data[start : start + array.nbytes]
        views.append(piece.view(native(array.dtype)).reshape(array.shape))
        start += array.nbytes
    return views
