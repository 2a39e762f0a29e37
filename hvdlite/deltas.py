"""Adasum in an optimizer: each rank takes its own step, and the changes are combined.

The local optimizer runs on this rank's own gradients.  What it did to the parameters, their deltas,
is what Adasum reduces; every rank then stands at the old parameters plus the combined delta.

Source:
    Maleki et al. 2020, arXiv:2006.02924; Horovod's `DistributedOptimizer` with op=Adasum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.calls import Call, reduce_call
from hvdlite.compression import Compressor
from hvdlite.process_set import ProcessSet
from hvdlite.types import Adasum, Array

Group = tuple[ProcessSet, Callable[[], Mapping[str, Array]]]  # who shares them; how to read them


class Deltas:
    """Combines the changes that the local optimizer makes, step after step.

    A wait that a signal handler breaks off loses nothing: `finish()` again goes on.

    Args:
        name: Tells the calls of this optimizer from all others; equal on all ranks.
        groups: Parameters that this rank shares with others.
        compression: Of the deltas.
    """

    def __init__(self, name: str, groups: Sequence[Group], compression: type[Compressor]) -> None:
        self.groups, self._name, self._compression = list(groups), name, compression
        self._before: list[dict[str, Array]] = []
        self._calls: list[Call] = []
        self._value: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether `finish()` has something to do."""
        return bool(self._calls)

    def start(
        self, step: int, function: Callable[[dict[str, Array]], Any], grads: dict[str, Array]
    ) -> None:
        """Run the local optimizer and send what it changed; waits for nothing.

        An exception of the optimizer is passed on; what it has changed until then is sent all the
        same, for the others count on it.

        Args:
            step: Number of the step, the same on all ranks.
            function: The local optimizer.
            grads: This rank's gradients.
        """
        self._before = [{n: p.copy() for n, p in read().items()} for _, read in self.groups]
        try:
            self._value = function(grads)
        finally:
            self._send(step)

    def _send(self, step: int) -> None:
        calls = []
        for k, ((process_set, read), before) in enumerate(
            zip(self.groups, self._before, strict=True)
        ):
            now = read()
            calls.append(
                reduce_call(
                    "grouped_allreduce",
                    [now[name] - before[name] for name in sorted(before)],
                    Adasum,
                    f"adasum.{self._name}.{k}.{step}",
                    1.0,
                    1.0,
                    self._compression,
                    process_set,
                    grouped=True,
                )
            )
        for matcher, ticket in calls:
            matcher.submit(ticket)
        self._calls = calls

    def finish(self) -> Any:
        """Wait for the combined changes and apply them; what the local optimizer returned.

        Raises:
            HorovodInternalError: They cannot be combined; the parameters are as before the step.
        """
        try:
            combined = [matcher.wait(ticket) for matcher, ticket in self._calls]
        except Exception as exc:
            if all(ticket.done for _, ticket in self._calls):  # else it can be waited for again
                self._set([{n: np.zeros_like(b) for n, b in d.items()} for d in self._before])
                self._calls = []
            raise exc from None
        self._set(
            [
                dict(zip(sorted(before), arrays, strict=True))
                for before, arrays in zip(self._before, combined, strict=True)
            ]
        )
        self._calls = []
        return self._value

    def _set(self, deltas: Sequence[Mapping[str, Array]]) -> None:
        for (_, read), before, delta in zip(self.groups, self._before, deltas, strict=True):
            for name, param in read().items():
                np.add(before[name], delta[name], out=param, casting="unsafe")
