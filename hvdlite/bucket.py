"""The bucket plan: which gradients travel together, and in which order.

A pure function of names, sizes and thresholds: no device, no rank, no array.  Equal input gives an
equal plan on every rank, and every rank launches the plan's buckets in the plan's order.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from hvdlite.errors import ConfigError

ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


def align(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What planning knows of one parameter.

    Attributes:
        name: Unique within the optimizer.
        shape: Shape of parameter and gradient.
        dtype: NumPy's name of the element type.
        itemsize: Bytes of an element.
        ranks: World ranks that reduce it, ascending; None: it stays on its rank.
        region: Piece of memory it lies in: 0 for those of the constructor, 1 for those of the first
            `add_param_group()`, and so on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    ranks: tuple[int, ...] | None
    region: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient itself."""
        return math.prod(self.shape) * self.itemsize

    @property
    def key(self) -> tuple[int, str, tuple[int, ...] | None]:
        """Gradients with one key may share a bucket."""
        return (self.region, self.dtype, self.ranks)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype and one process set, reduced by one collective.

    Attributes:
        names: In the order of their slots.
        offsets: Byte offset of each slot in the bucket, a multiple of 64.
        nbytes: Length of the bucket with its alignment gaps, a multiple of 64.
        dtype: NumPy's name of the element type.
        ranks: World ranks that reduce it; None: it stays on its rank.
        region: Piece of memory it lies in.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    nbytes: int
    dtype: str
    ranks: tuple[int, ...] | None
    region: int = 0

    @property
    def key(self) -> tuple[int, str, tuple[int, ...] | None]:
        """As `TensorSpec.key`."""
        return (self.region, self.dtype, self.ranks)

    def is_for(self, rank: int) -> bool:
        """Whether `rank` holds these gradients."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class Plan:
    """All buckets of one optimizer, in the order in which every rank launches them.

    Attributes:
        buckets: In launch order.
        memory: Indices of the buckets in the order in which they lie in memory, where the buckets
            of one key are neighbours.
        fusion_threshold: Capacity of a bucket, in bytes.
        first_bucket: Capacity of the first bucket of each key, in bytes.
    """

    buckets: tuple[Bucket, ...]
    memory: tuple[int, ...]
    fusion_threshold: int
    first_bucket: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, in launch order."""
        return tuple(name for bucket in self.buckets for name in bucket.names)

    @cached_property
    def digest(self) -> int:
        """63 bits of a hash of the whole plan: equal on two ranks if and only if the plans are."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def layout(self, rank: int) -> tuple[dict[int, int], dict[int, int]]:
        """Where the buckets lie in one rank's memory.

        Returns:
            Byte offset of each bucket that `rank` holds, by index, within its region; and the bytes
            that the rank needs in each region.
        """
        starts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for index in self.memory:
            bucket = self.buckets[index]
            start = sizes.setdefault(bucket.region, 0)
            if bucket.is_for(rank):
                starts[index] = start
                sizes[bucket.region] = start + bucket.nbytes
        return starts, sizes

    def slots(self, rank: int) -> dict[str, tuple[int, int]]:
        """Region and byte offset of every gradient in one rank's memory."""
        starts, _ = self.layout(rank)
        return {
            name: (self.buckets[index].region, start + offset)
            for index, start in starts.items()
            for name, offset in zip(
                self.buckets[index].names, self.buckets[index].offsets, strict=True
            )
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "buckets": [
                [
                    list(b.names),
                    list(b.offsets),
                    b.nbytes,
                    b.dtype,
                    None if b.ranks is None else list(b.ranks),
                    b.region,
                ]
                for b in self.buckets
            ],
            "memory": list(self.memory),
            "fusion_threshold": self.fusion_threshold,
            "first_bucket": self.first_bucket,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict()`.

        Raises:
            ConfigError: It is no plan.
        """
        try:
            buckets = tuple(
                Bucket(
                    tuple(map(str, names)),
                    tuple(map(int, offsets)),
                    int(nbytes),
                    str(dtype),
                    None if ranks is None else tuple(map(int, ranks)),
                    int(region),
                )
                for names, offsets, nbytes, dtype, ranks, region in values["buckets"]
            )
            memory = tuple(map(int, values["memory"]))
            plan = cls(
                buckets, memory, int(values["fusion_threshold"]), int(values["first_bucket"])
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(f"this is no bucket plan: {type(exc).__name__}: {exc}") from exc
        if sorted(memory) != list(range(len(buckets))):
            raise ConfigError(f"this is no bucket plan: memory order {memory}")
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced at once or not at all."""
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.to_dict()))
        beside.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save()` wrote.

        Raises:
            ConfigError: The file holds no plan.
        """
        try:
            values = json.loads(Path(path).read_text())
        except ValueError as exc:  # no JSON, or no text
            raise ConfigError(f"{path} holds no bucket plan: {exc}") from exc
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no bucket plan")
        return cls.from_dict(values)

    def check_covers(self, specs: Iterable[TensorSpec]) -> None:
        """Raise ConfigError unless the plan is one for exactly these parameters."""
        wanted = {spec.name: (spec, spec.key) for spec in specs}
        seen: set[str] = set()
        for bucket in self.buckets:
            end = 0
            if len(bucket.names) != len(bucket.offsets):
                raise ConfigError("plan: a bucket has not one offset for each name")
            for name, offset in zip(bucket.names, bucket.offsets, strict=True):
                spec, key = wanted.get(name, (None, None))
                if spec is None or name in seen:
                    reason = "twice" if spec else "which the optimizer does not have"
                    raise ConfigError(f"plan: it holds parameter {name!r}, {reason}")
                seen.add(name)
                if key != bucket.key:
                    raise ConfigError(
                        f"plan: parameter {name!r} is {key} here, but {bucket.key} in the plan"
                    )
                if offset != end:
                    raise ConfigError(
                        f"plan: parameter {name!r} has another size than when the plan was made"
                    )
                end = offset + align(spec.nbytes)
            if end != bucket.nbytes:
                raise ConfigError(f"plan: bucket of {bucket.nbytes} bytes holds {end}")
        lacking = sorted(wanted.keys() - seen)
        if lacking:
            raise ConfigError(f"plan: it lacks parameters {lacking[:5]}")

    def __str__(self) -> str:
        lines = [
            f"{len(self.buckets)} buckets, {len(self.names)} gradients, "
            f"threshold {self.fusion_threshold} B, first {self.first_bucket} B"
        ]
        for k, b in enumerate(self.buckets):
            where = "local" if b.ranks is None else f"ranks {','.join(map(str, b.ranks))}"
            shown = ", ".join(b.names[:4]) + (", ..." if len(b.names) > 4 else "")
            lines.append(f"  {k:3d}  {b.nbytes:>12,d} B  {b.dtype:<10} {where:<14} {shown}")
        return "\n".join(lines)


def plan_buckets(
    specs: Sequence[TensorSpec],
    order: Sequence[str],
    *,
    fusion_threshold: int,
    first_bucket: int,
    launch_order: Sequence[str] | None = None,
) -> Plan:
    """Group gradients greedily in `order`, one open bucket per key.

    A bucket is closed before it would exceed `fusion_threshold` (the first bucket of each key: the
    smaller of that and `first_bucket`), counting the 64-byte slots; a larger gradient gets a bucket
    of its own.  Buckets are launched in the order in which their last member is ready.

    Args:
        specs: All parameters; keys lie in memory by region, then in the order of this sequence, so
            that parameters added later move none of the old.
        order: Their names, in the order in which they are packed.
        fusion_threshold: Bytes; 0: every gradient alone.
        first_bucket: Bytes; small, so that communication starts early.
        launch_order: Their names in the order in which they become ready; default: `order`.

    Raises:
        ConfigError: A negative threshold.
    """
    if fusion_threshold < 0 or first_bucket < 0:
        raise ConfigError(
            f"fusion_threshold and first_bucket must be >= 0, got {fusion_threshold} "
            f"and {first_bucket}"
        )
    by_name = {spec.name: spec for spec in specs}
    open_: dict[Any, list[TensorSpec]] = {}
    closed: dict[Any, list[Bucket]] = {}
    filled: dict[Any, int] = {}
    for name in order:
        spec = by_name[name]
        key = spec.key
        group = open_.setdefault(key, [])
        capacity = fusion_threshold if key in closed else min(first_bucket, fusion_threshold)
        size = align(spec.nbytes)
        if group and (not capacity or filled[key] + size > capacity):
            closed.setdefault(key, []).append(_close(group))
            group.clear()
        filled[key] = size + (filled[key] if group else 0)
        group.append(spec)
    for key, group in open_.items():
        closed.setdefault(key, []).append(_close(group))
    keys = dict.fromkeys(sorted((spec.key for spec in specs), key=lambda key: key[0]))
    in_memory = [bucket for key in keys for bucket in closed[key]]
    ready = {name: k for k, name in enumerate(order if launch_order is None else launch_order)}
    launch = sorted(in_memory, key=lambda bucket: max(ready[name] for name in bucket.names))
    position = {id(bucket): k for k, bucket in enumerate(launch)}
    memory = tuple(position[id(bucket)] for bucket in in_memory)
    return Plan(tuple(launch), memory, fusion_threshold, first_bucket)


def merge_orders(
    registration: Sequence[TensorSpec], orders: Mapping[Any, Sequence[str]]
) -> list[str]:
    """One total order out of the readiness orders of several groups.

    Args:
        registration: All parameters in registration order.
        orders: Readiness order by group (the `ranks` of its parameters), as its deciding rank saw
            it; names that it lacked are absent and follow in registration order.  A group without
            an order keeps the reverse of the registration order.

    Returns:
        All names, interleaved by their relative position in their group.
    """
    groups: dict[Any, list[str]] = {}
    for spec in registration:
        groups.setdefault(spec.ranks, []).append(spec.name)
    placed: list[tuple[float, int, int, str]] = []
    for g, (ranks, names) in enumerate(groups.items()):
        if ranks in orders:
            known = set(names)
            first = [name for name in orders[ranks] if name in known]
            seen = set(first)
            sequence = first + [name for name in names if name not in seen]
        else:
            sequence = names[::-1]
        placed += [((k + 1) / len(sequence), g, k, name) for k, name in enumerate(sequence)]
    return [name for *_, name in sorted(placed)]


def _close(specs: Sequence[TensorSpec]) -> Bucket:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += align(spec.nbytes)
    first = specs[0]
    names = tuple(spec.name for spec in specs)
    return Bucket(names, tuple(offsets), end, first.dtype, first.ranks, first.region)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in this machine's byte order; NumPy's own object where there is one."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def spec_of(name: str, array: Any, ranks: tuple[int, ...] | None, region: int = 0) -> TensorSpec:
    """The spec of a NumPy parameter."""
    dtype = np.dtype(array.dtype)
    return TensorSpec(name, tuple(array.shape), dtype.name, dtype.itemsize, ranks, region)
