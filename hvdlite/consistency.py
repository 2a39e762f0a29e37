"""`check_consistency`: whether the ranks still hold the same parameters, bit for bit.

The ranks exchange one digest of everything.  Only if it differs do they exchange one for each
tensor, and for those that differ digests of ever smaller chunks, until the first element that
differs is found.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hvdlite.arrays import dtype_name, to_numpy
from hvdlite.calls import as_bytes, check_name
from hvdlite.context import Context, current
from hvdlite.errors import MismatchError
from hvdlite.negotiation import check_contents, check_words, word_of
from hvdlite.objects import named_values
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.types import Array

_MAX_TENSORS = 10  # that are looked into
_NUM_CHUNKS = 64  # of a tensor that differs, in each round


class Drift(NamedTuple):
    """A tensor that is not the same on all ranks.

    Attributes:
        name: Of the tensor.
        ranks: World ranks whose bits differ from those of the lowest rank.
        first_index: Of the first element that differs on any of them.
        values: That element, by world rank, for all ranks.
    """

    name: str
    ranks: tuple[int, ...]
    first_index: tuple[int, ...]
    values: Mapping[int, Any]


def check_consistency(
    params: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    raises: bool = True,
) -> list[Drift]:
    """Compare tensors over the ranks, bit for bit.

    NaN equals NaN of the same bits, and 0.0 differs from -0.0. Layout and byte order do not count.

    Collective:
        All ranks of the process set; blocks until the answer is there.
    Args:
        params: A mapping name -> array, or (name, array) pairs, of whatever `allreduce` takes; only
            read. Names are compared as a set; their order may differ.
        name: Identifies the call on all ranks; default: a count per set.
        process_set: Who takes part.
        raises: Whether a difference of values is an error.
    Returns:
        [] if all is equal; else, with `raises=False`, the first ten tensors that differ, in the
        order of the lowest rank; equal on all ranks.
    Raises:
        MismatchError: On every rank: values differ, if `raises`; names, shapes or dtypes differ.
        ValueError, TypeError: This rank's parameters cannot be read; the other ranks raise
            HorovodInternalError, which quotes it.
    Cost:
        Each rank hashes its tensors, about 1 GB/s, and sends one message of some hundred bytes. A
        difference costs another 3 to 8 small ones.
    """
    context = current()
    set_id, ranks = context.members(process_set, "check_consistency")
    label = check_name("check_consistency", name)
    call = _Call(context, set_id, ranks, name)
    error: Exception | None = None
    tensors: dict[str, _Tensor] = {}
    try:
        tensors = _read(params, label)
    except Exception as exc:
        error = exc  # raised below, once all ranks know
    facts = [(key, t.text, t.digest) for key, t in tensors.items()]
    said = call.exchange((word_of(error), _digest_of(repr(sorted(facts)).encode(), 32)))
    if error is not None:
        raise error
    check_words(label, ranks, [word for word, _ in said])
    if len({digest for _, digest in said}) == 1:
        return []
    everything: list[list[tuple[str, str, bytes]]] = call.exchange(facts)
    check_contents(label, ranks, [[(f"tensor {key!r}", t) for key, t, _ in f] for f in everything])
    digests = [{key: digest for key, _, digest in of_rank} for of_rank in everything]
    differing = [k for k, _, _ in everything[0] if any(d[k] != digests[0][k] for d in digests)]
    first = differing[:_MAX_TENSORS]
    found = call.find([to_numpy(tensors[key].array, label)[0] for key in first])
    drifts = [
        Drift(
            key,
            tuple(r for r, d in zip(ranks, digests, strict=True) if d[key] != digests[0][key]),
            index,
            values,
        )
        for key, (index, values) in zip(first, found, strict=True)
    ]
    if raises:
        raise MismatchError(_message(label, ranks[0], drifts, len(differing)))
    return drifts


@dataclass(slots=True)
class _Tensor:
    array: Any
    text: str  # shape and dtype
    digest: bytes


def _read(params: Any, label: str) -> dict[str, _Tensor]:
    """Every tensor with its digest; one copy at a time, and that only of an unusual layout."""
    tensors = {}
    for key, given in named_values(params, label).items():
        array, _ = to_numpy(given, f"{label}: {key!r}")
        text = f"shape {array.shape}, dtype {dtype_name(array.dtype)}"
        tensors[key] = _Tensor(given, text, _digest_of(as_bytes(array), 16))
    return tensors


def _digest_of(data: Any, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


class _Call:
    """The exchanges of one call.

    Args:
        context: Where.
        set_id: Process set.
        ranks: Its members.
        name: The user's, if any.
    """

    def __init__(
        self, context: Context, set_id: int, ranks: tuple[int, ...], name: str | None
    ) -> None:
        self._matcher, self._set_id, self._ranks, self._name = context.matcher, set_id, ranks, name
        self._round = 0

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order."""
        name = self._name and f"check_consistency.{self._name}.{self._round}"
        self._round += 1
        ticket = self._matcher.object_ticket(
            self._set_id, self._ranks, "check_consistency", value, name
        )
        return list(self._matcher.call(ticket))

    def find(self, arrays: Sequence[Array]) -> list[tuple[tuple[int, ...], dict[int, Any]]]:
        """Index of the first element that differs, and its values by rank, for each array."""
        ranges = [(0, array.size) for array in arrays]
        while any(stop - start > 1 for start, stop in ranges):
            cuts = [_cuts(start, stop) for start, stop in ranges]
            mine = [_chunk_digests(array, at) for array, at in zip(arrays, cuts, strict=True)]
            for k, of_ranks in enumerate(zip(*self.exchange(mine), strict=True)):
                chunks = zip(*of_ranks, strict=True)
                which = next((c for c, digests in enumerate(chunks) if len({*digests}) > 1), 0)
                ranges[k] = (cuts[k][which], cuts[k][which + 1])
        firsts = [start for start, _ in ranges]
        said = self.exchange(
            [array.reshape(-1)[k].tobytes() for array, k in zip(arrays, firsts, strict=True)]
        )
        return [
            (
                tuple(int(i) for i in np.unravel_index(first, array.shape)),
                {r: np.frombuffer(x, array.dtype)[0] for r, x in zip(self._ranks, of, strict=True)},
            )
            for array, first, of in zip(arrays, firsts, zip(*said, strict=True), strict=True)
        ]


def _cuts(start: int, stop: int) -> list[int]:
    """Where the chunks of a range begin, and where the last one ends."""
    width = -(-(stop - start) // _NUM_CHUNKS)
    return [*range(start, stop, width), stop]


def _chunk_digests(array: Array, cuts: Sequence[int]) -> list[bytes]:
    flat = array.reshape(-1)
    return [_digest_of(as_bytes(flat[a:b]), 8) for a, b in pairwise(cuts)]


def _message(label: str, lowest: int, drifts: Sequence[Drift], count: int) -> str:
    lines = [f"{label}: the ranks do not hold the same values"]
    for drift in drifts:
        by_bits: dict[bytes, list[int]] = {}
        for r, value in drift.values.items():
            by_bits.setdefault(value.tobytes(), []).append(r)
        texts = {bits: str(drift.values[who[0]]) for bits, who in by_bits.items()}
        if len(set(texts.values())) < len(texts):  # two NaN, say
            texts = {bits: f"{text} (bytes {bits.hex()})" for bits, text in texts.items()}
        told = ", ".join(f"{texts[bits]} on ranks {who}" for bits, who in by_bits.items())
        lines.append(
            f"  {drift.name!r}: ranks {list(drift.ranks)} differ from rank {lowest}, first at "
            f"index {drift.first_index}: {told}"
        )
    if count > len(drifts):
        lines.append(f"  and {count - len(drifts)} more")
    lines.append("broadcast_parameters() makes them equal; what made them drift may do it again.")
    return "\n".join(lines)
