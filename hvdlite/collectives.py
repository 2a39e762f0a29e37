"""Blocking collectives on arrays: thin verbs over the matching layer.

Calls meet by name, whatever their order on each rank; a call without a name is the n-th of its
kind in its process set.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from hvdlite.arithmetic import Reduction, check_reducible
from hvdlite.arrays import to_numpy
from hvdlite.context import Context, current
from hvdlite.errors import HvdliteError
from hvdlite.negotiation import Signature, Ticket, separate
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.types import Array, ReduceOp, parse_op

Bytes = list[Array]


class Compression:
    """Ways to shrink what travels; this version has `none` alone."""

    none: Final = "none"
    fp16: Final = "fp16"
    bf16: Final = "bf16"


def check_compression(compression: object, what: str) -> None:
    """Refuse what is not there yet.

    Raises:
        HvdliteError: fp16 or bf16.
        ValueError: Anything else but none.
    """
    if compression == Compression.none:
        return
    if compression in (Compression.fp16, Compression.bf16):
        raise HvdliteError(
            f"{what}: compression {compression!r} comes with a later version of hvdlite; "
            "use Compression.none"
        )
    raise ValueError(f"{what}: compression must be one of Compression's, got {compression!r}")


def check_op(op: object, what: str) -> ReduceOp:
    """The reduce op, unless this version lacks it."""
    parsed = parse_op(op)
    if parsed is ReduceOp.ADASUM:
        raise HvdliteError(f"{what}: Adasum comes with a later version of hvdlite; use Average")
    return parsed


def allreduce(
    array: Any,
    *,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks; everyone gets the result.

    Collective:
        All ranks of the process set; blocks until the result is there.
    Args:
        array: This rank's operand: a NumPy array of any layout or byte order, a scalar, a CPU torch
            tensor or a JAX array; not changed.
        op: Average (default), Sum, Min, Max or Product.
        name: Identifies the call on all ranks; default: a count per set and kind.
        prescale_factor: Multiplies every operand before the reduction; equal on all ranks.
        postscale_factor: Multiplies the result; equal on all ranks.
        compression: `Compression.none`.
        process_set: Who takes part.
    Shapes:
        Any, equal on all ranks, zero-size and 0-d too.
    Returns:
        A new array of the same kind, shape and dtype. 16-bit floats are summed in float32 and
        rounded once; integer averages truncate toward zero, integer sums wrap.
    Raises:
        TypeError: The dtype cannot be reduced by `op` (Average of bool, Min of complex, objects).
        ValueError: A name still under way, an unregistered set, a factor that is not finite.
        MismatchError: On every rank: shape, dtype, op or factors differ. The next call works.
        RankFailedError: A rank died or left.
    Cost:
        Up to 32 KiB one message to everybody; above, 2 (n-1)/n of the bytes per rank.
    Source:
        MPI 4.1, MPI_Allreduce; names and defaults: Horovod.
    """
    context = current()
    reduce_op = check_op(op, "allreduce")
    check_compression(compression, "allreduce")
    set_id, ranks = context.members(process_set, "allreduce")
    what = f"allreduce {name!r}" if name else "allreduce"
    operand, restore = to_numpy(array, what)
    prescale = _finite(prescale_factor, "prescale_factor", what)
    postscale = _finite(postscale_factor, "postscale_factor", what)
    check_reducible(reduce_op, operand.dtype, what, prescale, postscale)
    signature: Signature = (
        ("kind", "allreduce"),
        ("dtype", operand.dtype.name),
        ("shape", operand.shape),
        ("op", reduce_op.name.title()),
        ("prescale_factor", prescale),
        ("postscale_factor", postscale),
    )
    reduction = Reduction(reduce_op, operand.dtype, len(ranks), prescale, postscale)

    def finish(parts: Bytes) -> Array:
        return parts[0].view(operand.dtype).reshape(operand.shape)

    ticket = Ticket(
        set_id,
        ranks,
        call_name(context, set_id, "allreduce", name),
        signature,
        as_bytes(operand),
        place=separate,
        finish=finish,
        reduction=reduction,
    )
    return restore(context.matcher.call(ticket))


def allgather(
    array: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    Collective:
        All ranks of the process set; blocks until the result is there.
    Args:
        array: This rank's rows; not changed.
        name: Identifies the call on all ranks; default: a count per set and kind.
        process_set: Who takes part.
    Shapes:
        (n_r, *rest), where n_r may differ and may be 0, rest equal  →  (sum of n_r, *rest).
    Returns:
        A new array of the same kind and dtype.
    Raises:
        ValueError: A 0-d array; a name that is still under way; an unregistered set.
        TypeError: The dtype cannot be sent (objects, strings).
        MismatchError: On every rank: dtypes or `rest` differ.
        RankFailedError: A rank died or left.
    Source:
        MPI 4.1, MPI_Allgatherv.
    """
    context = current()
    set_id, ranks = context.members(process_set, "allgather")
    what = f"allgather {name!r}" if name else "allgather"
    rows, restore = to_numpy(array, what)
    if rows.ndim == 0:
        raise ValueError(f"{what}: a 0-d array has no rows to gather; pass one of shape (1,)")
    rest = rows.shape[1:]
    signature: Signature = (
        ("kind", "allgather"),
        ("dtype", rows.dtype.name),
        ("number of dimensions", rows.ndim),
        ("shape after the first dimension", rest),
    )
    whole: list[Array] = []

    def place(sizes: Sequence[int], counts: Sequence[Any]) -> Bytes:
        whole[:] = [np.empty((sum(counts), *rest), rows.dtype)]
        flat = as_bytes(whole[0])
        ends = np.cumsum([0, *sizes])
        return [flat[a:b] for a, b in pairwise(ends)]

    ticket = Ticket(
        set_id,
        ranks,
        call_name(context, set_id, "allgather", name),
        signature,
        as_bytes(rows),
        place=place,
        finish=lambda _: whole[0],
        extra=rows.shape[0],
    )
    return restore(context.matcher.call(ticket))


def broadcast(
    array: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank a copy of the root's array.

    Collective:
        All ranks of the process set; blocks until the copy is there.
    Args:
        array: On the root what is sent; elsewhere a pattern of the same shape and dtype; not
            changed.
        root_rank: World rank of the root, a member of the set.
        name: Identifies the call on all ranks; default: a count per set and kind.
        process_set: Who takes part.
    Shapes:
        Any, equal on all ranks.
    Returns:
        A new array of the same kind.
    Raises:
        ValueError: The root is no member; a name that is still under way; an unregistered set.
        TypeError: The dtype cannot be sent (objects, strings).
        MismatchError: On every rank: root, shape or dtype differ.
        RankFailedError: A rank died or left.
    Source:
        MPI 4.1, MPI_Bcast.
    """
    context = current()
    set_id, ranks = context.members(process_set, "broadcast")
    what = f"broadcast {name!r}" if name else "broadcast"
    pattern, restore = to_numpy(array, what)
    root = check_root(root_rank, ranks, what)
    signature: Signature = (
        ("kind", "broadcast"),
        ("dtype", pattern.dtype.name),
        ("shape", pattern.shape),
        ("root_rank", root),
    )
    data = as_bytes(pattern) if context.rank == root else np.empty(0, np.uint8)

    def finish(parts: Bytes) -> Array:
        return parts[ranks.index(root)].view(pattern.dtype).reshape(pattern.shape)

    ticket = Ticket(
        set_id,
        ranks,
        call_name(context, set_id, "broadcast", name),
        signature,
        data,
        place=separate,
        finish=finish,
    )
    return restore(context.matcher.call(ticket))


def barrier(*, process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has come here; gradients under way go on meanwhile.

    Collective:
        All ranks of the process set.
    Raises:
        ValueError: The set is not registered, or this rank is no member.
        RankFailedError: A rank died or left.
    """
    context = current()
    set_id, ranks = context.members(process_set, "barrier")
    ticket = Ticket(
        set_id,
        ranks,
        call_name(context, set_id, "barrier", None),
        (("kind", "barrier"),),
        np.empty(0, np.uint8),
        place=separate,
        finish=lambda _: None,
    )
    context.matcher.call(ticket)


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


def as_bytes(array: Array) -> Array:
    """A C-contiguous array's memory, 1-D uint8, not copied."""
    return array.reshape(-1).view(np.uint8)


def call_name(context: Context, set_id: int, kind: str, name: str | None) -> str:
    """What the call is matched by: the user's name, or the next count of its kind.

    Raises:
        ValueError: The user's name is no string that can be sent.
    """
    if name is None:
        context.progress.check_free(kind)  # before the call is counted
        return context.matcher.unnamed(set_id, kind)
    if not isinstance(name, str) or not name or name[0] == "\0":
        raise ValueError(f"{kind}: name must be a non-empty string, got {name!r}")
    return name


def _finite(value: object, label: str, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{what}: {label} is a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what}: {label} must be finite, got {value!r}")
    return number
