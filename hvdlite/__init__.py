"""hvdlite: data-parallel training for whoever writes the training loop.

    import hvdlite as hvd

    hvd.init()
    opt = hvd.DistributedOptimizer(SGD(params, lr=0.1 * hvd.size()), params)
    for name, grad in backward(params, batch):
        opt.grad_ready(name, grad)
    opt.step()

Importing it loads neither MPI nor any framework; `init()` loads MPI.
"""

from difflib import get_close_matches
from typing import Any

from hvdlite.bucket import Bucket, Plan
from hvdlite.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from hvdlite.compression import Compression, Compressor
from hvdlite.config import Config
from hvdlite.consistency import check_consistency
from hvdlite.context import Context, current, describe, init, is_initialized, shutdown
from hvdlite.data import average_metrics, shard
from hvdlite.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    ConfigError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HvdliteError,
    MismatchError,
    MissingGradientError,
    NotInitializedError,
    RankFailedError,
    ShutDownError,
    UnknownNameError,
)
from hvdlite.handle import Handle
from hvdlite.join import Join, join
from hvdlite.objects import allgather_object, broadcast_object, broadcast_parameters
from hvdlite.optimizer import DistributedOptimizer
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.queries import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from hvdlite.state import broadcast_optimizer_state
from hvdlite.types import Adasum, Average, Max, Min, Product, ReduceOp, Sum

__version__ = "0.1.0"

_LATER = frozenset(("elastic",))


class _Later:
    """A name of the contract that this version lacks: says so when it is used."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: object, **__: object) -> None:
        raise HvdliteError(
            f"hvdlite.{self.__name__} comes with a later version; this is {__version__}"
        )

    def __getattr__(self, name: str) -> None:
        if not name.startswith("__"):
            self()
        raise AttributeError(name)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return _Later(name)
    near = get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module 'hvdlite' has no attribute {name!r}{hint}")


__all__ = [
    "Adasum",
    "Average",
    "BackendUnavailableError",
    "Bucket",
    "CollectiveTimeoutError",
    "Compression",
    "Compressor",
    "Config",
    "ConfigError",
    "Context",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "HvdliteError",
    "Join",
    "Max",
    "Min",
    "MismatchError",
    "MissingGradientError",
    "NotInitializedError",
    "Plan",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "ReduceOp",
    "ShutDownError",
    "Sum",
    "UnknownNameError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "current",
    "ddl_built",
    "describe",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]
