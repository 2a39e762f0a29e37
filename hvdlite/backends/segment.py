"""A piece of memory that several processes of one machine map: our own file in /dev/shm.

Created with a random name and mode 0600, filled by `posix_fallocate` (so a /dev/shm that is too
small fails here, with an error, and not later by SIGBUS), unlinked as soon as everyone has mapped
it: a job that is killed leaves nothing behind.
"""

import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from hvdlite.types import Array

DIRECTORY = Path("/dev/shm")


class Segment:
    """Shared bytes, zero at first; freed when the last array that looks into them is gone.

    Args:
        path: The file, while it has a name.
        fd: Open file descriptor; taken over and closed.
        nbytes: Size in bytes.
    """

    def __init__(self, path: Path, fd: int, nbytes: int) -> None:
        self.path = path
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.memory = mmap.mmap(fd, nbytes, flags=flags)
        finally:
            os.close(fd)
        self.array: Array = np.frombuffer(self.memory, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        """Make a new segment of `nbytes` bytes.

        Raises:
            OSError: /dev/shm is missing, not writable or too small.
        """
        path = DIRECTORY / f"hvdlite-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except BaseException:
                os.close(fd)
                raise
            return cls(path, fd, nbytes)
        except BaseException as exc:
            path.unlink()
            if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
                raise OSError(
                    exc.errno,
                    f"{DIRECTORY} has no room for {nbytes} bytes; enlarge it "
                    "(docker: --shm-size=2g; mount -o remount,size=2g /dev/shm)",
                ) from exc
            raise

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> "Segment":
        """Map a segment that another rank has made.

        Raises:
            OSError: It cannot be seen from here (another mount namespace) or has another size.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        found = os.fstat(fd)
        if found.st_size != nbytes or found.st_uid != os.getuid():
            os.close(fd)
            raise OSError(errno.EINVAL, f"{path} is not the segment of {nbytes} bytes it should be")
        return cls(path, fd, nbytes)

    def unlink(self) -> None:
        """Take the name away; the memory lives on with its mappings."""
        self.path.unlink(missing_ok=True)
