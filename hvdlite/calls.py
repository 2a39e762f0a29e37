"""How a collective on arrays becomes a call of the matching layer: what is compared, sent, made.

Every function checks what one rank can see alone, before anything is stored or sent, and returns a
`Ticket` and the layer to hand it to.  Whether somebody waits for it is the verbs' business.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hvdlite.adasum import adasum, check_adasum
from hvdlite.arithmetic import Reduction, check_reducible
from hvdlite.arrays import dtype_name, store_into, to_numpy
from hvdlite.compression import Codec, Compression, Compressor, check_compression
from hvdlite.context import Context, current
from hvdlite.negotiation import MAX_NAME_BYTES, Matcher
from hvdlite.process_set import ProcessSet
from hvdlite.ticket import Segment, Signature, Terms, Ticket, even_segment
from hvdlite.types import Array, ReduceOp, parse_op

Call = tuple[Matcher, Ticket]

_MAX_DESCRIBED = 8  # arrays of a group whose shapes are told one by one
_MAX_USUAL = 4096  # calls that are remembered
_ALIGN = 16  # bytes; where each tensor of a group begins
_NOTHING = np.empty(0, np.uint8)


def reduce_call(
    kind: str,
    arrays: Any,
    op: ReduceOp | str,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    compression: object,
    process_set: ProcessSet,
    *,
    grouped: bool = False,
    in_place: bool = False,
    scatters: bool = False,
) -> Call:
    """Allreduce and reducescatter, of one array or of a group; see `hvdlite.allreduce`."""
    context = current()
    key: Any = None
    is_usual = not (grouped or in_place or scatters) and compression is Compression.none
    if is_usual and type(arrays) is np.ndarray and type(op) in (ReduceOp, str):
        flags = arrays.flags
        is_usual = type(prescale_factor) is type(postscale_factor) is float
        if is_usual and flags.c_contiguous and flags.aligned:
            dtype, shape = arrays.dtype, arrays.shape
            key = (kind, op, dtype, shape, prescale_factor, postscale_factor, id(process_set))
            usual = context.usual_calls.get(key)
            if usual is not None:
                check_name(kind, name)
                return usual(name, arrays)
    set_id, ranks = context.members(process_set, kind)
    label = check_name(kind, name)
    reduce_op = op if type(op) is ReduceOp else _parsed(op, label)
    arithmetic = _Arithmetic(
        reduce_op,
        len(ranks),
        _finite(prescale_factor, "prescale_factor", label),
        _finite(postscale_factor, "postscale_factor", label),
    )
    compressor = check_compression(compression, label)
    if scatters and reduce_op is ReduceOp.ADASUM:
        raise ValueError(f"{label}: reducescatter has no Adasum; use Average or Sum")
    group = _Group(grouped)
    for array in _listed(arrays, label) if grouped else (arrays,):
        operand, decode, make = _operand(array, label, compressor, in_place, is_part=scatters)
        arithmetic.check(operand.dtype, label)
        if scatters:
            _check_rows(operand, label, "scatter")
        group.add(operand, decode, make)
    if not grouped and not scatters and reduce_op is not ReduceOp.ADASUM:
        call = _usual_call(context, kind, set_id, ranks, arithmetic, group)
        if key is not None and group.operands[0] is arrays:  # nothing depends on its values
            if len(context.usual_calls) >= _MAX_USUAL:
                context.usual_calls.clear()
            context.usual_calls[key] = call
        return call(name, group.operands[0])
    described = _described(group.operands, grouped)
    signature = _reduction_signature(kind, described, reduce_op, *arithmetic.factors)
    data, starts = _joined(group.operands)
    finish: Callable[[Sequence[Array]], Any]
    if not group.operands:  # an empty group is compared, too
        terms, finish = Terms(set_id, ranks, signature), _nothing
    elif reduce_op is ReduceOp.ADASUM:
        terms = Terms(set_id, ranks, signature)
        finish = partial(_combine, group, starts, arithmetic.factors)
    elif scatters:
        me = ranks.index(context.rank)
        segments, finish = _scattered(group, starts, arithmetic, me)
        terms = Terms(set_id, ranks, signature, segments=segments, keeps_shares=True)
    else:
        segments = _runs(group.operands, starts, data.size, arithmetic)
        terms = Terms(set_id, ranks, signature, segments=segments)
        finish = partial(_separate, group, starts, segments, data.size)
    return context.matcher, Ticket(terms, name, data, finish)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """How the operands of a call are reduced."""

    op: ReduceOp
    num_ranks: int
    prescale: float
    postscale: float

    @property
    def factors(self) -> tuple[float, float]:
        """Pre- and postscale."""
        return self.prescale, self.postscale

    def check(self, dtype: np.dtype[Any], label: str) -> None:
        """Raise TypeError where the op has no meaning for `dtype`."""
        if self.op is ReduceOp.ADASUM:
            check_adasum(dtype, label)
        else:
            check_reducible(self.op, dtype, label, *self.factors)

    def of(self, dtype: np.dtype[Any]) -> Reduction:
        """The one object for all that is reduced alike."""
        return _reduction(self.op, dtype, self.num_ranks, *self.factors)


class _Group:
    """The arrays of a call: what travels, and how the caller's results are made of what comes back.

    Args:
        grouped: The caller passed a list, and gets one.
    """

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self.operands: list[Array] = []
        self.decoders: list[Callable[[Array], Array]] = []
        self.makers: list[Callable[[Array], Any]] = []

    def add(
        self, operand: Array, decode: Callable[[Array], Array], make: Callable[[Array], Any]
    ) -> None:
        """One array more."""
        self.operands.append(operand)
        self.decoders.append(decode)
        self.makers.append(make)

    def results(self, arrays: Sequence[Array]) -> Any:
        """What the caller gets; all are decoded before the first overwrites anything."""
        decoded = [decode(array) for decode, array in zip(self.decoders, arrays, strict=True)]
        made = [make(array) for make, array in zip(self.makers, decoded, strict=True)]
        return made if self.grouped else made[0]


def _usual_call(
    context: Context,
    kind: str,
    set_id: int,
    ranks: tuple[int, ...],
    arithmetic: _Arithmetic,
    group: _Group,
) -> Callable[[str | None, Array], Call]:
    """An allreduce of one array: makes the same call of any array like it."""
    operand, matcher = group.operands[0], context.matcher
    dtype, shape = operand.dtype, operand.shape
    # It is kept, so it must not keep the array.
    decode, make = group.decoders[0], group.makers[0]
    described = (("dtype", dtype_name(dtype)), ("shape", shape))
    signature = _reduction_signature(kind, described, arithmetic.op, *arithmetic.factors)
    segments = (even_segment(arithmetic.of(dtype), 0, operand.nbytes),)
    terms = Terms(set_id, ranks, signature, segments=segments)

    is_flat = len(shape) == 1

    def finish(parts: Sequence[Array]) -> Any:
        return make(decode(parts[0] if is_flat else parts[0].reshape(shape)))

    def call(name: str | None, operand: Array) -> Call:
        data = operand.view(np.uint8) if is_flat else as_bytes(operand)
        return matcher, Ticket(terms, name, data, finish)

    return call


def _combine(
    group: _Group, starts: Sequence[int], factors: tuple[float, float], parts: Sequence[Array]
) -> Any:
    """Adasum, of all members' arrays."""
    members = [_cut(part, starts, group.operands) for part in parts]
    return group.results([adasum(tensor, *factors) for tensor in zip(*members, strict=True)])


def _scattered(
    group: _Group, starts: Sequence[int], arithmetic: _Arithmetic, me: int
) -> tuple[list[Segment], Callable[[Sequence[Array]], Any]]:
    """Rows for each member, and how this one cuts its own."""
    operands = group.operands
    rows = [even_rows(operand.shape[0], arithmetic.num_ranks) for operand in operands]
    segments = [
        Segment(
            arithmetic.of(operand.dtype),
            tuple(start + end * _row_bytes(operand) for end in accumulate(counts, initial=0)),
        )
        for operand, start, counts in zip(operands, starts, rows, strict=True)
    ]

    def finish(parts: Sequence[Array]) -> Any:
        return group.results(
            [
                part.reshape(counts[me], *operand.shape[1:])
                for part, operand, counts in zip(parts, operands, rows, strict=True)
            ]
        )

    return segments, finish


def _runs(
    operands: Sequence[Array], starts: Sequence[int], size: int, arithmetic: _Arithmetic
) -> list[Segment]:
    """Neighbours of one dtype are reduced as one, with what fills up the room between them."""
    firsts = [k for k, o in enumerate(operands) if k == 0 or operands[k - 1].dtype != o.dtype]
    bounds = [*(starts[k] for k in firsts), size]
    return [
        even_segment(arithmetic.of(operands[k].dtype), start, stop)
        for k, (start, stop) in zip(firsts, pairwise(bounds), strict=True)
    ]


def _separate(
    group: _Group,
    starts: Sequence[int],
    segments: Sequence[Segment],
    size: int,
    parts: Sequence[Array],
) -> Any:
    whole = np.empty(size, np.uint8)
    for part, segment in zip(parts, segments, strict=True):
        whole[segment.whole] = part.view(np.uint8)
    return group.results(_cut(whole, starts, group.operands))


def gather_call(
    kind: str, arrays: Any, name: str | None, process_set: ProcessSet, *, grouped: bool = False
) -> Call:
    """Allgather of one array or of a group; see `hvdlite.allgather`."""
    context = current()
    set_id, ranks = context.members(process_set, kind)
    label = check_name(kind, name)
    listed = _listed(arrays, label) if grouped else (arrays,)
    operands, restores = [], []
    for array in listed:
        operand, restore = to_numpy(array, label)
        _check_rows(operand, label, "gather")
        operands.append(operand)
        restores.append(restore)
    signature = (("kind", kind), *_described(operands, grouped, first_may_differ=True))
    if not grouped:
        rows, restore = operands[0], restores[0]
        whole: list[Array] = []

        def place(sizes: Sequence[int], counts: Sequence[Any]) -> list[Array]:
            whole[:] = [_room_for(sum(counts), rows)]
            return _split(whole[0], sizes)

        terms = Terms(set_id, ranks, signature, place=place)
        return context.matcher, Ticket(
            terms, name, as_bytes(rows), lambda _: restore(whole[0]), extra=rows.shape[0]
        )
    terms = Terms(set_id, ranks, signature)
    if not operands:  # an empty group is compared, too
        return context.matcher, Ticket(terms, name, _NOTHING, _nothing)
    # Each rank's numbers of rows come first.
    counts = np.array([operand.shape[0] for operand in operands])

    def finish(parts: Sequence[Array]) -> list[Any]:
        pieces: list[list[Array]] = [[] for _ in operands]
        for part in parts:
            theirs = part[: counts.nbytes].view(counts.dtype)
            start = _aligned(counts.nbytes)
            for operand, n, found in zip(operands, theirs, pieces, strict=True):
                size = int(n) * _row_bytes(operand)
                piece = part[start : start + size].view(operand.dtype)
                found.append(piece.reshape(int(n), *operand.shape[1:]))
                start += _aligned(size)
        return [
            restore(np.concatenate(found)) for restore, found in zip(restores, pieces, strict=True)
        ]

    return context.matcher, Ticket(terms, name, _joined([counts, *operands])[0], finish)


def broadcast_call(
    array: Any,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
) -> Call:
    """Broadcast; see `hvdlite.broadcast`."""
    context = current()
    set_id, ranks = context.members(process_set, "broadcast")
    label = check_name("broadcast", name)
    pattern, restore = to_numpy(array, label)
    make = store_into(array, label) if in_place else restore
    root = check_root(root_rank, ranks, label)
    signature = (("kind", "broadcast"), *_described([pattern], False), ("root_rank", root))
    is_root, at = context.rank == root, ranks.index(root)

    def finish(parts: Sequence[Array]) -> Any:
        if is_root and in_place:
            return array
        return make(parts[at].view(pattern.dtype).reshape(pattern.shape))

    data = as_bytes(pattern) if is_root else _NOTHING
    return context.matcher, Ticket(Terms(set_id, ranks, signature), name, data, finish)


def alltoall_call(array: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Call:
    """Alltoall; see `hvdlite.alltoall`."""
    context = current()
    set_id, ranks = context.members(process_set, "alltoall")
    label = check_name("alltoall", name)
    rows, restore = to_numpy(array, label)
    _check_rows(rows, label, "exchange")
    counts = _check_splits(splits, rows.shape[0], len(ranks), label)
    signature = (("kind", "alltoall"), *_described([rows], False, first_may_differ=True))
    row_bytes, me = _row_bytes(rows), ranks.index(context.rank)
    received: list[int] = []
    whole: list[Array] = []

    def pick(counts: Any, k: int) -> slice:
        start = sum(counts[:k])
        return slice(start * row_bytes, (start + counts[k]) * row_bytes)

    def place(sizes: Sequence[int], extras: Sequence[Any]) -> list[Array]:
        received[:] = [counts[me] for counts in extras]
        whole[:] = [_room_for(sum(received), rows)]
        return _split(whole[0], sizes)

    def finish(_: Sequence[Array]) -> Any:
        result = restore(whole[0])
        return result if splits is None else (result, np.array(received, np.int32))

    terms = Terms(set_id, ranks, signature, place=place, pick=pick)
    return context.matcher, Ticket(terms, name, as_bytes(rows), finish, extra=counts)


def barrier_call(process_set: ProcessSet) -> Call:
    """Barrier; see `hvdlite.barrier`."""
    context = current()
    set_id, ranks = context.members(process_set, "barrier")
    terms = Terms(set_id, ranks, (("kind", "barrier"),))
    return context.matcher, Ticket(terms, None, _NOTHING, lambda _: None)


# ---- what is checked -----------------------------------------------------------------------------


def check_name(kind: str, name: Any) -> str:
    """Name the call in messages.

    Raises:
        ValueError: The user's name is no string that can be sent.
    """
    if name is None:
        return kind
    if isinstance(name, str):  # its plain text, which is what travels
        return _check_text(kind, name if type(name) is str else str.__str__(name))
    raise ValueError(f"{kind}: name must be a non-empty string, got {name!r}")


@lru_cache(4096)
def _check_text(kind: str, name: str) -> str:
    if not name or name[0] == "\0":
        raise ValueError(f"{kind}: name must be a non-empty string, got {name!r}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{kind}: the name {name!r} is no valid text") from None
    if size > MAX_NAME_BYTES:
        raise ValueError(f"{kind}: a name of {size} bytes; at most {MAX_NAME_BYTES}")
    return f"{kind} {name!r}"


def check_root(root_rank: object, ranks: Sequence[int], what: str) -> int:
    """The root as an int.

    Raises:
        ValueError: It is no member of the set.
        TypeError: It is no int.
    """
    if isinstance(root_rank, bool) or not hasattr(root_rank, "__index__"):
        raise TypeError(f"{what}: root_rank is a world rank, an int; got {root_rank!r}")
    root = int(root_rank)
    if root not in ranks:
        raise ValueError(f"{what}: root_rank {root} is not among the ranks {list(ranks)}")
    return root


def even_rows(num_rows: int, n: int) -> tuple[int, ...]:
    """So many rows over n ranks: the first ones get one more."""
    return tuple(num_rows // n + (k < num_rows % n) for k in range(n))


def as_bytes(array: Array) -> Array:
    """A C-contiguous array's memory, 1-D uint8, not copied."""
    return array.reshape(-1).view(np.uint8)


def _listed(arrays: Any, what: str) -> tuple[Any, ...]:
    if isinstance(arrays, str | bytes | dict) or not isinstance(arrays, Iterable):
        raise TypeError(f"{what}: a group is a list of arrays, got {type(arrays).__name__}")
    try:
        return tuple(arrays)
    except TypeError as exc:  # a 0-d array
        raise TypeError(f"{what}: a group is a list of arrays: {exc}") from exc


def _parsed(op: object, what: str) -> ReduceOp:
    try:
        return parse_op(op)
    except ValueError as exc:
        raise ValueError(f"{what}: {exc}") from None


def _finite(value: object, label: str, what: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value + 0.0  # there is one zero
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{what}: {label} is a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what}: {label} must be finite, got {value!r}")
    return number + 0.0


def _check_rows(array: Array, what: str, verb: str) -> None:
    if array.ndim == 0:
        raise ValueError(f"{what}: a 0-d array has no rows to {verb}; pass one of shape (1,)")


def _check_splits(splits: Any, num_rows: int, n: int, what: str) -> tuple[int, ...]:
    """Rows for each member."""
    if splits is None:
        if num_rows % n:
            raise ValueError(
                f"{what}: {num_rows} rows do not divide by {n} ranks; pass splits=[...]"
            )
        return (num_rows // n,) * n
    try:
        listed = np.asarray(splits) if isinstance(splits, list | tuple) else splits
    except ValueError:  # lists of unequal length
        listed = np.empty((0, 0))
    found, _ = to_numpy(listed, f"{what}: splits")
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        raise ValueError(f"{what}: splits is a 1-D list of integers, got {splits!r}")
    counts = tuple(int(count) for count in found)
    if len(counts) != n:
        raise ValueError(f"{what}: splits has {len(counts)} entries for {n} ranks")
    if min(counts) < 0 or sum(counts) > num_rows:
        raise ValueError(
            f"{what}: splits must be >= 0 and add up to at most the {num_rows} rows, got "
            f"{list(counts)}"
        )
    return counts


# ---- what is compared and sent -------------------------------------------------------------------


def _operand(
    array: Any, what: str, compressor: type[Compressor], in_place: bool, *, is_part: bool
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Any]]:
    """What travels of an array; how to decode what comes back, and to make the result of that."""
    operand, restore = to_numpy(array, what)
    make = store_into(array, what) if in_place else restore
    if compressor is Compression.none:
        return operand, _as_it_is, make
    codec = Codec(compressor, operand.shape, operand.dtype, what)
    compressed, context = codec.compress(operand)

    def decode(wire: Array) -> Array:
        return codec.decompress(wire, context, is_part=is_part)

    return to_numpy(compressed, what)[0], decode, make


def _nothing(_: Sequence[Array]) -> list[Any]:
    return []  # of an empty group


def _as_it_is(array: Array) -> Array:
    return array


def _described(
    operands: Sequence[Array], grouped: bool, *, first_may_differ: bool = False
) -> Signature:
    """Dtype and shape of each, as fields of a signature."""
    fields: list[tuple[str, Any]] = []
    if grouped:
        fields.append(("number of arrays", len(operands)))
    if len(operands) > _MAX_DESCRIBED:  # more than a message has room for
        each = -(-len(operands) // _MAX_DESCRIBED)
        for first in range(0, len(operands), each):
            some = operands[first : first + each]
            text = repr([_described([o], False, first_may_differ=first_may_differ) for o in some])
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            last = first + len(some) - 1
            fields.append((f"digest of dtypes and shapes of arrays {first} to {last}", digest))
        return tuple(fields)
    for k, operand in enumerate(operands):
        of = f" of array {k}" if grouped else ""
        fields.append((f"dtype{of}", dtype_name(operand.dtype)))
        if first_may_differ:
            fields.append((f"number of dimensions{of}", operand.ndim))
            fields.append((f"shape after the first dimension{of}", operand.shape[1:]))
        else:
            fields.append((f"shape{of}", operand.shape))
    return tuple(fields)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _joined(operands: Sequence[Array]) -> tuple[Array, list[int]]:
    """All of them in one piece of memory, and where each begins; one alone stays where it is."""
    if len(operands) == 1:
        return as_bytes(operands[0]), [0]
    starts = list(accumulate((_aligned(o.nbytes) for o in operands), initial=0))
    data = np.zeros(starts[-1], np.uint8)
    for operand, start in zip(operands, starts, strict=False):
        data[start : start + operand.nbytes] = as_bytes(operand)
    return data, starts[:-1]


def _cut(data: Array, starts: Sequence[int], operands: Sequence[Array]) -> list[Array]:
    """The arrays of joined memory, each a copy: who keeps one does not keep all."""
    return [
        data[start : start + o.nbytes].view(o.dtype).reshape(o.shape).copy()
        for start, o in zip(starts, operands, strict=True)
    ]


def _room_for(num_rows: int, like: Array) -> Array:
    """Rows such as those of an array."""
    return np.empty((num_rows, *like.shape[1:]), like.dtype)


def _split(array: Array, sizes: Sequence[int]) -> list[Array]:
    """An array's memory, in consecutive pieces of so many bytes."""
    flat = as_bytes(array)
    return [flat[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def _reduction_signature(
    kind: str, described: Signature, op: ReduceOp, prescale: float, postscale: float
) -> Signature:
    return (
        ("kind", kind),
        *described,
        ("op", op.name.title()),
        ("prescale_factor", prescale),
        ("postscale_factor", postscale),
    )


@lru_cache(256)
def _reduction(
    op: ReduceOp, dtype: np.dtype[Any], n: int, prescale: float, postscale: float
) -> Reduction:
    """One object for all that is reduced alike, so that small calls can be reduced together."""
    return Reduction(op, dtype, n, prescale, postscale)
