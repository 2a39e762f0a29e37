"""Process sets: some ranks of the world that communicate among themselves."""

from collections.abc import Iterable

from hvdlite.errors import NotInitializedError


class ProcessSet:
    """Some ranks of the world, kept in ascending order; permutations are the same set.

    A set is usable once it is registered, by `init(process_sets=[...])` or `add_process_set()`.

    Args:
        ranks: Distinct world ranks, in any order.

    Raises:
        ValueError: Empty, negative or repeated ranks.
        TypeError: Something that is no int.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise TypeError(f"process set: ranks are a list of ints, got {ranks!r}")
        listed = list(ranks)
        for r in listed:
            if isinstance(r, bool) or not hasattr(r, "__index__"):
                raise TypeError(f"process set: ranks are ints, got {r!r}")
        listed = [int(r) for r in listed]
        if not listed:
            raise ValueError("process set: no ranks given; name at least one")
        if len(set(listed)) != len(listed) or min(listed) < 0:
            raise ValueError(f"process set: ranks must be distinct and >= 0, got {listed}")
        self._ranks: tuple[int, ...] | None = tuple(sorted(listed))
        self._id: int | None = None
        self._world_rank = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of the members, ascending."""
        if self._ranks is None:
            raise NotInitializedError(
                "global_process_set has no ranks yet: call hvdlite.init() first"
            )
        return self._ranks

    @property
    def process_set_id(self) -> int | None:
        """Number of the set in this job, 0 for the world; None while it is not registered."""
        return self._id

    def included(self) -> bool:
        """Whether this process is a member.

        Raises:
            ValueError: The set is not registered.
        """
        return self._bound() in self.ranks

    def rank(self) -> int:
        """Position of this process among the members.

        Raises:
            ValueError: The set is not registered, or this process is no member.
        """
        me = self._bound()
        if me not in self.ranks:
            raise ValueError(f"rank {me} is not a member of {self!r}")
        return self.ranks.index(me)

    def size(self) -> int:
        """Number of members.

        Raises:
            ValueError: The set is not registered.
        """
        self._bound()
        return len(self.ranks)

    def bind(self, set_id: int | None, world_rank: int, ranks: tuple[int, ...] | None) -> None:
        """Register (or, with None, unregister) the set; the Context's business alone."""
        self._id, self._world_rank, self._ranks = set_id, world_rank, ranks

    def _bound(self) -> int:
        if self._id is None:
            if self._ranks is None:
                raise NotInitializedError(
                    "global_process_set is not registered: call hvdlite.init() first"
                )
            raise ValueError(
                f"{self!r} is not registered: pass it to init(process_sets=[...]) or to "
                "add_process_set(), on every rank"
            )
        return self._world_rank

    def __repr__(self) -> str:
        if self._ranks is None:
            return "ProcessSet(the world)"
        return f"ProcessSet({list(self._ranks)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash(self._ranks)


def _make_global() -> ProcessSet:
    world = ProcessSet([0])
    world.bind(None, -1, None)
    return world


global_process_set = _make_global()
"""All ranks of the job; what `process_set=` means when it is not given."""
