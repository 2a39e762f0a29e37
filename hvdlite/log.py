"""The logger of hvdlite and the one handler that tags its lines with the rank.

The handler sits on the logger `hvdlite` alone; the root logger and everybody else's are never
touched.  While it is there the logger does not propagate, since a script that has set up the root
logger would see every line twice.  To send the lines elsewhere too, add a handler to `logger`.
"""

import logging
import sys
from collections.abc import Hashable
from typing import Final

logger: Final = logging.getLogger("hvdlite")

TRACE: Final = 5  # below DEBUG: one line a collective

LEVELS: Final = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_WORDS: Final = {number: word for word, number in LEVELS.items()}

_said: Final[set[Hashable]] = set()  # keys of what was to be said once


class RankHandler(logging.Handler):
    """Writes `[hvdlite rank 1/4] warning: ...` to what `sys.stderr` is at that moment.

    Each line of a message is tagged, and the message goes out in one write, so that the lines of
    two ranks do not mix.
    """

    def __init__(self, rank: int, size: int, before: tuple[int, bool]) -> None:
        """Remember the tag, and level and propagation that the logger had before."""
        super().__init__()
        self.tag = f"[hvdlite rank {rank}/{size}] "
        self.before = before

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a stream that is gone or closed is nobody's failure."""
        try:
            word = _WORDS.get(record.levelno, record.levelname.lower())
            lines = f"{word}: {self.format(record)}".splitlines()
            if sys.stderr is not None:
                sys.stderr.write("".join(f"{self.tag}{line}\n" for line in lines))
                sys.stderr.flush()
        except RecursionError:
            raise
        except Exception:  # logging's own rule: a line that cannot be written ends no program
            self.handleError(record)


def configure(rank: int, size: int, level: str) -> None:
    """Tag the lines with this rank and show those of `level` and above.

    Calling it again replaces the tag and the level; there is never more than one handler.

    Args:
        rank: This process's rank in the world.
        size: Number of ranks.
        level: One of `LEVELS`.
    """
    old = _installed()
    before = old.before if old is not None else (logger.level, logger.propagate)
    if old is not None:
        logger.removeHandler(old)
    logger.addHandler(RankHandler(rank, size, before))
    logger.setLevel(LEVELS[level])
    logger.propagate = False


def reset() -> None:
    """Take the handler off, restore the logger, and forget what was said once."""
    handler = _installed()
    if handler is not None:
        logger.removeHandler(handler)
        level, logger.propagate = handler.before
        logger.setLevel(level)
    _said.clear()


def trace(text: str, *args: object) -> None:
    """Log below DEBUG; the arguments are formatted only if the line is shown."""
    logger.log(TRACE, text, *args)


def warn_once(key: Hashable, text: str) -> None:
    """Warn, unless a line with this key was given since the last `reset()`."""
    _once(logging.WARNING, key, text)


def info_once(key: Hashable, text: str) -> None:
    """Inform, unless a line with this key was given since the last `reset()`."""
    _once(logging.INFO, key, text)


def _once(level: int, key: Hashable, text: str) -> None:
    if key not in _said:
        _said.add(key)
        logger.log(level, "%s", text)


def _installed() -> RankHandler | None:
    return next((h for h in logger.handlers if isinstance(h, RankHandler)), None)
