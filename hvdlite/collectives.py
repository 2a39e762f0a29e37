"""Collectives on arrays: thin verbs over the matching layer.

Calls meet by name, whatever their order on each rank; a call without a name is the n-th of its
kind in its process set.  Each verb comes blocking and as `_async`, which returns a `Handle` at
once; with a trailing underscore the result overwrites the array that was passed; `grouped_` verbs
take a list and give all results or, on an error, none.
"""

from typing import Any

from hvdlite.calls import (
    Call,
    alltoall_call,
    barrier_call,
    broadcast_call,
    gather_call,
    reduce_call,
)
from hvdlite.compression import Compression
from hvdlite.handle import Handle
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.types import Average, ReduceOp


def _wait(call: Call) -> Any:
    matcher, ticket = call
    return matcher.call(ticket)


def _wait_all(call: Call) -> list[Any]:
    return list(_wait(call))


def _start(call: Call) -> Handle[Any]:
    matcher, ticket = call
    matcher.submit(ticket)
    return Handle(matcher, ticket)


def poll(handle: Handle[Any]) -> bool:
    """`handle.done()`: whether `synchronize(handle)` would return at once.

    Raises:
        TypeError: It is no handle.
    """
    return _checked(handle, "poll").done()


def synchronize(handle: Handle[Any]) -> Any:
    """`handle.wait()`: the result, once it is there.

    Raises:
        TypeError: It is no handle.
        MismatchError, RankFailedError, ShutDownError: As `Handle.wait`.
    """
    return _checked(handle, "synchronize").wait()


def _checked(handle: object, what: str) -> Handle[Any]:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{what}: expected the Handle that an _async call returned, got {type(handle).__name__}"
        )
    return handle


def allreduce(
    array: Any,
    *,
    op: ReduceOp | str = Average,
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
        op: Average (default), Sum, Min, Max, Product or Adasum.
        name: Identifies the call on all ranks; default: a count per set and kind.
        prescale_factor: Multiplies every operand before the reduction; equal on all ranks.
        postscale_factor: Multiplies the result; equal on all ranks.
        compression: `Compression.none`, `fp16`, `bf16` or a subclass of `Compressor`.
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
        Up to 32 KiB one message to everybody; above, 2 (n-1)/n of the bytes per rank. Adasum: one
        message of all bytes to everybody.
    Source:
        MPI 4.1, MPI_Allreduce; names and defaults: Horovod. Adasum: arXiv:2006.02924.
    """
    call = reduce_call(
        "allreduce",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
    )
    return _wait(call)


def allreduce_async(
    array: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start an `allreduce` and go on; `Handle.wait()` gives its result.

    Collective:
        As `allreduce`, but waits for nothing.
    Takes:
        array: As `allreduce`; leave it alone until the call is over.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError: As `allreduce`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "allreduce",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
    )
    return _start(call)


def allreduce_(
    array: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`allreduce` into the array that was passed; returns it.

    Collective:
        As `allreduce`.
    Takes:
        array: A writable NumPy array of any layout, or a CPU torch tensor; overwritten by the
            result, unless an error is raised.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError: As `allreduce`; also for what cannot be overwritten.
        MismatchError, RankFailedError: As `allreduce`; the array is unchanged.
    """
    call = reduce_call(
        "allreduce",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        in_place=True,
    )
    return _wait(call)


def allreduce_async_(
    array: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start an `allreduce_`; the array is overwritten when the handle is waited for or done.

    Collective:
        As `allreduce`, but waits for nothing.
    Takes:
        array: As `allreduce_`; leave it alone until the call is over.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError: As `allreduce_`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "allreduce",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        in_place=True,
    )
    return _start(call)


def grouped_allreduce(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allreduce` of several arrays as one call: all results, or an error and none.

    Collective:
        All ranks of the process set; blocks until the results are there.
    Takes:
        arrays: A list of what `allreduce` takes; kinds, dtypes and shapes may be mixed, but are the
            same on all ranks.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Returns:
        A list of new arrays; [] for an empty list.
    Raises:
        TypeError, ValueError: As `allreduce`, for any of the arrays.
        MismatchError: On every rank: number, shapes, dtypes, op or factors differ.
        RankFailedError: A rank died or left.
    Cost:
        As one `allreduce` of all bytes; small arrays travel together.
    """
    call = reduce_call(
        "grouped_allreduce",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
    )
    return _wait_all(call)


def grouped_allreduce_async(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """`allreduce_async` of several arrays as one call; see `grouped_allreduce`.

    Collective:
        As `grouped_allreduce`, but waits for nothing.
    Takes:
        arrays: A list of what `allreduce_async` takes.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError: As `grouped_allreduce`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "grouped_allreduce",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
    )
    return _start(call)


def grouped_allreduce_(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allreduce_` of several arrays as one call; see `grouped_allreduce`.

    Collective:
        As `grouped_allreduce`.
    Takes:
        arrays: A list of what `allreduce_` takes.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError, MismatchError, RankFailedError: As `grouped_allreduce`;
            no array is changed then.
    """
    call = reduce_call(
        "grouped_allreduce",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
        in_place=True,
    )
    return _wait_all(call)


def grouped_allreduce_async_(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """`allreduce_async_` of several arrays as one call; see `grouped_allreduce`.

    Collective:
        As `grouped_allreduce`, but waits for nothing.
    Takes:
        arrays: A list of what `allreduce_async_` takes.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Raises:
        TypeError, ValueError: As `grouped_allreduce`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "grouped_allreduce",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
        in_place=True,
    )
    return _start(call)


def allgather(
    array: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    return _wait(gather_call("allgather", array, name, process_set))


def allgather_async(
    array: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start an `allgather` and go on; `Handle.wait()` gives its result.

    Collective:
        As `allgather`, but waits for nothing.
    Takes:
        array: As `allgather`; leave it alone until the call is over.
        name, process_set: As `allgather`.
    Raises:
        TypeError, ValueError: As `allgather`, at once. The other errors: `Handle.wait()`.
    """
    return _start(gather_call("allgather", array, name, process_set))


def grouped_allgather(
    arrays: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several arrays as one call: all results, or an error and none.

    Collective:
        All ranks of the process set; blocks until the results are there.
    Takes:
        arrays: A list of what `allgather` takes; as many on all ranks.
        name, process_set: As `allgather`.
    Returns:
        A list of new arrays; [] for an empty list.
    Raises:
        TypeError, ValueError, MismatchError, RankFailedError: As `allgather`, for any of them.
    """
    return _wait_all(gather_call("grouped_allgather", arrays, name, process_set, grouped=True))


def grouped_allgather_async(
    arrays: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start a `grouped_allgather` and go on; `Handle.wait()` gives the list.

    Collective:
        As `grouped_allgather`, but waits for nothing.
    Takes:
        arrays: As `grouped_allgather`; leave them alone until the call is over.
        name, process_set: As `allgather`.
    Raises:
        TypeError, ValueError: As `allgather`, at once. The other errors: `Handle.wait()`.
    """
    return _start(gather_call("grouped_allgather", arrays, name, process_set, grouped=True))


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
    return _wait(broadcast_call(array, root_rank, name, process_set))


def broadcast_(
    array: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`broadcast` into the array that was passed; returns it.

    Collective:
        As `broadcast`.
    Takes:
        array: A writable NumPy array of any layout, or a CPU torch tensor; on the root what is
            sent, elsewhere overwritten.
        root_rank, name, process_set: As `broadcast`.
    Raises:
        TypeError, ValueError: As `broadcast`; also for what cannot be overwritten.
        MismatchError, RankFailedError: As `broadcast`; the array is unchanged.
    """
    return _wait(broadcast_call(array, root_rank, name, process_set, in_place=True))


def broadcast_async(
    array: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start a `broadcast` and go on; `Handle.wait()` gives its result.

    Collective:
        As `broadcast`, but waits for nothing.
    Takes:
        array: As `broadcast`; leave it alone until the call is over.
        root_rank, name, process_set: As `broadcast`.
    Raises:
        TypeError, ValueError: As `broadcast`, at once. The other errors: `Handle.wait()`.
    """
    return _start(broadcast_call(array, root_rank, name, process_set))


def broadcast_async_(
    array: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start a `broadcast_`; the array is overwritten when the handle is waited for or done.

    Collective:
        As `broadcast`, but waits for nothing.
    Takes:
        array: As `broadcast_`; leave it alone until the call is over.
        root_rank, name, process_set: As `broadcast`.
    Raises:
        TypeError, ValueError: As `broadcast_`, at once. The other errors: `Handle.wait()`.
    """
    return _start(broadcast_call(array, root_rank, name, process_set, in_place=True))


def alltoall(
    array: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and get rows from every rank.

    Collective:
        All ranks of the process set; blocks until all rows are there.
    Args:
        array: This rank's rows: first those for the first member, and so on; not changed.
        splits: How many rows go to each member, a list of ints; rows beyond their sum stay here.
            None: equally many, and the number of rows must divide by the number of ranks.
        name: Identifies the call on all ranks; default: a count per set and kind.
        process_set: Who takes part.
    Shapes:
        (n_r, *rest), rest equal on all ranks  →  (rows received, *rest), in rank order.
    Returns:
        A new array of the same kind and dtype; with `splits` a pair: the array, and how many rows
        came from each member, an int32 array.
    Raises:
        ValueError: A 0-d array; splits of a wrong length, negative, or more than there are rows;
            a name that is still under way; an unregistered set.
        TypeError: The dtype cannot be sent (objects, strings).
        MismatchError: On every rank: dtypes or `rest` differ.
        RankFailedError: A rank died or left.
    Source:
        MPI 4.1, MPI_Alltoallv.
    """
    return _wait(alltoall_call(array, splits, name, process_set))


def alltoall_async(
    array: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start an `alltoall` and go on; `Handle.wait()` gives what `alltoall` returns.

    Collective:
        As `alltoall`, but waits for nothing.
    Takes:
        array: As `alltoall`; leave it alone until the call is over.
        splits, name, process_set: As `alltoall`.
    Raises:
        TypeError, ValueError: As `alltoall`, at once. The other errors: `Handle.wait()`.
    """
    return _start(alltoall_call(array, splits, name, process_set))


def reducescatter(
    array: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over all ranks; every rank gets some rows of the result.

    Collective:
        All ranks of the process set; blocks until the rows are there.
    Takes:
        array: This rank's operand, as `allreduce`; not changed.
        op: Average (default), Sum, Min, Max or Product.
        name: Identifies the call on all ranks; default: a count per set and kind.
        prescale_factor, postscale_factor, compression, process_set: As `allreduce`.
    Shapes:
        (n, *rest), equal on all ranks  →  (n_k, *rest): member k of m gets n // m rows, the first
        n % m members one more; member 0 the first ones.
    Returns:
        A new array of the same kind and dtype.
    Raises:
        ValueError: A 0-d array; Adasum; and as `allreduce`.
        TypeError: As `allreduce`.
        MismatchError: On every rank: shape, dtype, op or factors differ.
        RankFailedError: A rank died or left.
    Cost:
        Up to 32 KiB one message to everybody; above, (n-1)/n of the bytes per rank.
    Source:
        MPI 4.1, MPI_Reduce_scatter.
    """
    call = reduce_call(
        "reducescatter",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        scatters=True,
    )
    return _wait(call)


def reducescatter_async(
    array: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start a `reducescatter` and go on; `Handle.wait()` gives its result.

    Collective:
        As `reducescatter`, but waits for nothing.
    Takes:
        array: As `reducescatter`; leave it alone until the call is over.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `reducescatter`.
    Raises:
        TypeError, ValueError: As `reducescatter`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "reducescatter",
        array,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        scatters=True,
    )
    return _start(call)


def grouped_reducescatter(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`reducescatter` of several arrays as one call: all results, or an error and none.

    Collective:
        All ranks of the process set; blocks until the results are there.
    Takes:
        arrays: A list of what `reducescatter` takes; as many on all ranks.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `reducescatter`.
    Returns:
        A list of new arrays; [] for an empty list.
    Raises:
        TypeError, ValueError, MismatchError, RankFailedError: As `reducescatter`, for any of them.
    """
    call = reduce_call(
        "grouped_reducescatter",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
        scatters=True,
    )
    return _wait_all(call)


def grouped_reducescatter_async(
    arrays: Any,
    *,
    op: ReduceOp | str = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: object = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start a `grouped_reducescatter` and go on; `Handle.wait()` gives the list.

    Collective:
        As `grouped_reducescatter`, but waits for nothing.
    Takes:
        arrays: As `grouped_reducescatter`; leave them alone until the call is over.
        op, name, prescale_factor, postscale_factor, compression, process_set: As `reducescatter`.
    Raises:
        TypeError, ValueError: As `reducescatter`, at once. The other errors: `Handle.wait()`.
    """
    call = reduce_call(
        "grouped_reducescatter",
        arrays,
        op,
        name,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        grouped=True,
        scatters=True,
    )
    return _start(call)


def barrier(*, process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has come here; what is under way goes on meanwhile.

    Collective:
        All ranks of the process set.
    Raises:
        ValueError: The set is not registered, or this rank is no member.
        RankFailedError: A rank died or left.
    """
    _wait(barrier_call(process_set))
