"""`python -m hvdlite`: what this installation and this process know of themselves."""

import sys

from hvdlite.context import describe
from hvdlite.topology import load_mpi


def main() -> int:
    """Print `describe()`, with the MPI library that `init()` would use."""
    import os

    mpi, reason = load_mpi(os.environ)
    facts = describe()
    if mpi is None:
        facts["mpi_library"] = f"none ({reason})"
    for key, value in facts.items():
        sys.stdout.write(f"{key:18} {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
