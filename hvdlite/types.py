"""The words that all floors share: reduce operations, arrays, sizes in bytes, ranges of steps."""

import math
import re
import sys
from enum import IntEnum
from typing import Any, Final

import numpy.typing as npt

from hvdlite.errors import ConfigError

Array = npt.NDArray[Any]


class ReduceOp(IntEnum):
    """How the values of the ranks become one; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average: Final = ReduceOp.AVERAGE
Sum: Final = ReduceOp.SUM
Adasum: Final = ReduceOp.ADASUM
Min: Final = ReduceOp.MIN
Max: Final = ReduceOp.MAX
Product: Final = ReduceOp.PRODUCT

_OP_WORDS: Final = {
    "average": Average,
    "mean": Average,
    "sum": Sum,
    "adasum": Adasum,
    "min": Min,
    "max": Max,
    "product": Product,
}


def parse_op(op: object) -> ReduceOp:
    """Turn what a user may give for `op` or `reduce_method` into a `ReduceOp`.

    Args:
        op: A `ReduceOp`, its number, or a word in any case: "average" or "mean", "sum", "adasum",
            "min", "max", "product".

    Raises:
        ValueError: It is none of these; the message lists them.
    """
    if isinstance(op, str):
        found = _OP_WORDS.get(op.strip().lower())
        if found is not None:
            return found
    elif isinstance(op, int) and not isinstance(op, bool) and op in ReduceOp._value2member_map_:
        return ReduceOp(op)
    known = ", ".join(f"{member.name.title()} ({member.value})" for member in ReduceOp)
    words = ", ".join(repr(word) for word in _OP_WORDS)
    raise ValueError(f"unknown reduce op {op!r}; known: {known}, or a word: {words}")


_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(size: object, name: str) -> int:
    """Read a size in bytes: an int, or a text such as "64MiB", "10 MB", "1.5GiB", "512".

    KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024, in any case; a fraction of a byte is
    dropped.

    Args:
        size: What the user gave.
        name: What to call it in the message.

    Raises:
        ConfigError: Negative, not finite, of another type, or in an unknown unit.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _UNITS.get(match[2].lower()) if match else None
        if match and factor is not None:
            number = match[1]
            return int(number) * factor if number.isdigit() else math.floor(float(number) * factor)
    elif not isinstance(size, bool):
        try:
            count = size.__index__()  # type: ignore[attr-defined]  # ints, also NumPy's
        except (AttributeError, TypeError):
            count = -1
        if count >= 0:
            return int(count)
    raise ConfigError(
        f"{name} must be a size >= 0: bytes as an int, or a text with one of the units B, KB, MB, "
        f'GB (powers of 1000) or KiB, MiB, GiB (powers of 1024), as in "64MiB"; got {size!r}'
    )


_STEPS: Final = re.compile(r"\s*([0-9]{0,15})\s*:\s*([0-9]{0,15})\s*", re.ASCII)


def parse_steps(steps: object, name: str) -> range:
    """Read a window of steps: a text such as "10:30" (10 to 29), "10:", ":30", a range or a pair.

    Args:
        steps: What the user gave; None or "": all steps.
        name: What to call it in the message.

    Raises:
        ConfigError: It is something else, or an empty window.
    """
    start, stop = 0, sys.maxsize
    match = _STEPS.fullmatch(steps) if isinstance(steps, str) else None
    if match:
        start, stop = int(match[1] or 0), int(match[2] or sys.maxsize)
    elif isinstance(steps, range) and steps.step == 1:
        start, stop = steps.start, steps.stop
    elif (
        isinstance(steps, tuple | list)
        and len(steps) == 2
        and all(isinstance(step, int) and not isinstance(step, bool) for step in steps)
    ):
        start, stop = steps
    elif steps is not None and steps != "":
        start = -1
    if not 0 <= start < stop:
        raise ConfigError(
            f'{name} must be a window of steps such as "10:30" (steps 10 to 29), "10:" or ":30"; '
            f"got {steps!r}"
        )
    return range(start, stop)
