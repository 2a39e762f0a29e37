"""One eager call: what its members must agree on, and how far it has come on this rank."""

import marshal
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from hvdlite.arithmetic import Reduction
from hvdlite.stall import describe_call
from hvdlite.types import Array

Signature = tuple[tuple[str, Any], ...]  # field and value, e.g. ("dtype", "float32")
Key = tuple[int, str]  # process set and name: what calls meet by

# One rank's announcement of a call, as it travels, and where in it what stands: a plain tuple, for
# a program may make thousands of calls a second.
Post = tuple[Key, int, int, bytes, int, Any, bytes | None]
KEY: Final = 0
SERIAL: Final = 1
EPOCH: Final = 2  # how often all ranks had joined
WIRE: Final = 3  # the signature as bytes: equal signatures are equal bytes
NBYTES: Final = 4
EXTRA: Final = 5
INLINE: Final = 6  # the data, if it is small; None: it follows

INLINE_BYTES = 32 * 1024  # up to here the data travels with the call itself
_MAX_WIRE_BYTES = 1024
_JOINED = marshal.dumps((), 2)  # the wire of a rank that takes part in nothing any more


class Segment(NamedTuple):
    """A run of elements that are reduced alike; a group of tensors has several.

    `bounds` are byte offsets in the call's data: member k's share goes from `bounds[k]` to
    `bounds[k + 1]`.
    """

    reduction: Reduction
    bounds: tuple[int, ...]

    @property
    def whole(self) -> slice:
        """All of it."""
        return slice(self.bounds[0], self.bounds[-1])

    def share(self, k: int) -> slice:
        """What member k reduces."""
        return slice(self.bounds[k], self.bounds[k + 1])

    def over(self, n: int) -> "Segment":
        """The same with even shares for n members."""
        start, itemsize = self.bounds[0], self.reduction.dtype.itemsize
        count = (self.bounds[-1] - start) // itemsize
        bounds = tuple(start + count * k // n * itemsize for k in range(n + 1))
        return Segment(self.reduction, bounds)


def even_segment(reduction: Reduction, start: int, stop: int) -> Segment:
    """Shares of equal size, up to one element."""
    return Segment(reduction, (start, stop)).over(reduction.num_ranks)


def separate(sizes: Sequence[int], _: Sequence[Any]) -> list[Array]:
    """One array a member, for calls without a layout of their own."""
    return [np.empty(size, np.uint8) for size in sizes]


class Terms:
    """What all calls alike have in common; made once for many.

    Args:
        set_id: Process set.
        ranks: Its members, world ranks ascending.
        signature: What must be equal on all members, the kind of call first; names, numbers, texts
            and tuples of them.
        place: For calls that do not reduce; called once all sizes are known, with the bytes each
            member contributes and each member's `extra`; returns one uint8 array a member for them.
        segments: The arithmetic, for calls that reduce.
        keeps_shares: The reduced shares stay where they are.
        pick: For calls that scatter: what of a member's contribution is for member k, given its
            `extra` and k.
        counted_as: What calls without a name are counted by; default: the kind.

    Attributes:
        wire: The signature as it travels.
        reduces_whole: All of it is reduced alike, and everybody gets all of it.

    Raises:
        ValueError: The signature is too long to travel.
    """

    __slots__ = (
        "counted_as",
        "keeps_shares",
        "kind",
        "pick",
        "place",
        "ranks",
        "reduces_whole",
        "segments",
        "set_id",
        "signature",
        "wire",
    )

    def __init__(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        signature: Signature,
        *,
        place: Callable[[Sequence[int], Sequence[Any]], list[Array]] = separate,
        segments: Sequence[Segment] = (),
        keeps_shares: bool = False,
        pick: Callable[[Any, int], slice] | None = None,
        counted_as: str = "",
    ) -> None:
        self.set_id, self.ranks, self.signature = set_id, ranks, signature
        self.place, self.segments, self.keeps_shares = place, segments, keeps_shares
        self.pick = pick
        self.kind = str(signature[0][1]) if signature else "joined"
        self.counted_as = counted_as or self.kind
        self.reduces_whole = len(segments) == 1 and not keeps_shares
        self.wire = _wire(signature)
        if len(self.wire) > _MAX_WIRE_BYTES:
            raise ValueError(f"{self.kind}: shapes of too many dimensions")

    @property
    def is_answer(self) -> bool:
        """Whether it only tells the others that this rank has joined."""
        return not self.signature

    @property
    def bears_joined_ranks(self) -> bool:
        """Whether a member that has joined can be left out."""
        reduces = self.segments and all(s.reduction.is_linear for s in self.segments)
        return self.kind == "barrier" or (bool(reduces) and not self.keeps_shares)


class Ticket:
    """One eager call of this rank, from its submission to its result.

    Args:
        terms: What the members agree on.
        name: What the members' calls are matched by; None: the next count of `terms.counted_as`.
        data: This rank's contribution, uint8.
        finish: Makes the result from the parts: what `terms.place` returned, or for each segment
            the reduced elements (with `keeps_shares` this member's share of them).
        extra: A number, short text or tuple that may differ between members.

    Attributes:
        post: Its announcement, once it is submitted.
        done: The call is over; `error` tells how.
        abandoned: Nobody wants the result any more; the call goes on by itself.
        posts: Once matched: what each member has announced, in the order of `terms.ranks`.
        active: Once matched: the members that have not joined.
    """

    serial = 0
    post: Post
    done = False
    abandoned = False
    is_submitted = is_posted = is_matched = is_finished = False
    result: Any = None
    error: Exception | None = None
    parts: Sequence[Array] = ()
    posts: Sequence[Post] = ()
    active: tuple[int, ...] = ()

    def __init__(
        self,
        terms: Terms,
        name: str | None,
        data: Array,
        finish: Callable[[Sequence[Array]], Any],
        extra: Any = None,
    ) -> None:
        self.terms, self.data, self.finish, self.extra = terms, data, finish, extra
        if type(name) is not str:  # only exact types travel: no enum, no NumPy text
            name = str.__str__(name) if name else ""
        self.key = (terms.set_id, name)
        self.is_counted = not name

    @property
    def name(self) -> str:
        """What the members' calls are matched by."""
        return self.key[1]

    @property
    def what(self) -> str:
        """Names the call in messages."""
        return describe_call(self.terms.kind, self.key[1])

    @property
    def is_waited_for(self) -> bool:
        """Whether it is under way and somebody still wants the result."""
        return self.is_submitted and not (self.done or self.abandoned)

    def prepare(self, serial: int, epoch: int) -> None:
        """Make its announcement."""
        data, self.serial = self.data, serial
        size = data.size
        inline = data.tobytes() if size <= INLINE_BYTES else None
        self.post = (self.key, serial, epoch, self.terms.wire, size, self.extra, inline)


@lru_cache(4096)
def _wire(signature: Signature) -> bytes:
    """As it travels: without references, so that equal signatures are equal bytes."""
    return marshal.dumps(signature, 2)


def has_joined(post: Post) -> bool:
    """Whether its author takes part in nothing any more."""
    return post[WIRE] == _JOINED


def signature_of(post: Post) -> Signature:
    """What its author would have all members agree on."""
    signature: Signature = marshal.loads(post[WIRE])
    return signature


def most_bytes(post: Post) -> int:
    """What a post takes at most in a message."""
    (_, name), inline = post[KEY], post[INLINE]
    extra = 64 if post[EXTRA] is None else 4096
    return len(inline or b"") + len(post[WIRE]) + extra + 4 * len(name)
