"""Ranks with less data than the others: `join()` lets those go on alone."""

from types import TracebackType
from typing import Self

from hvdlite.context import Context, current


def join() -> int:
    """This rank is out of data; help the others until all of them have come here.

    Until then this rank adds zeros to what the others reduce: steps of an optimizer average over
    the ranks that still train (over all with `divide_by="size"`), an eager Average divides by the
    full size. The parameters here stay as they were meanwhile, so bring all ranks level by
    `broadcast_parameters(params, root_rank=hvd.join())`.

    Collective:
        All ranks of the world, each when it has no more data; blocks until all have come.
    Returns:
        World rank of the rank that joined last; the same on all ranks.
    Raises:
        RuntimeError: In the middle of a step of an optimizer; call its `step()` first.
        RankFailedError: A rank died or left.
    Source:
        Horovod's `join`.
    """
    context = current()
    if not context.matcher.has_joined:
        for reducer in context.reducers:
            if not reducer.is_idle:
                raise RuntimeError("join() in the middle of a step: call the optimizer's step()")
        context.progress.check_free("join()")
    ticket = context.matcher.join(tuple(range(context.size)))

    def serve() -> bool:
        # Once all have joined, a step that somebody begins is one of those to come.
        moved = False
        for reducer in context.reducers:
            moved = reducer.serve(not ticket.done) or moved
        return moved

    context.progress.add(join, serve)
    try:
        context.progress.wait(
            lambda: ticket.done and _all_idle(context),
            "join()",
            lambda: context.matcher.missing(ticket),
        )
    finally:
        context.progress.remove(join)
    return int(context.matcher.result(ticket))


def _all_idle(context: Context) -> bool:
    return all(reducer.is_idle for reducer in context.reducers)


class Join:
    """`with hvd.Join() as joined:` around a loop over unequal data: leaving it is `join()`.

    An exception inside is passed on, and nothing is joined.

    Attributes:
        last_rank: What `join()` returned; -1 inside the block.
    """

    def __init__(self) -> None:
        self.last_rank = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is None:
            self.last_rank = join()
