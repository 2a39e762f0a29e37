"""Every exception of hvdlite.

Two families, never mixed.  What one rank can see by itself (a wrong argument, a wrong setting) is
also a `ValueError`, or a plain `ValueError`/`TypeError`/`KeyError`, and is raised at the call,
before anything is stored.  What only the comparison of ranks shows is a `HorovodInternalError`, of
the same subclass on every rank concerned: catch that one to restart a step, as Horovod scripts do.
"""


class HvdliteError(Exception):
    """The root of what hvdlite raises on its own account."""


class NotInitializedError(HvdliteError, ValueError):
    """A call that needs the ranks came before `hvdlite.init()`."""


class ConfigError(HvdliteError, ValueError):
    """A setting or an argument has a name, a value or a unit that cannot be used."""


class HorovodInternalError(HvdliteError, RuntimeError):
    """A collective failed, on every rank that took part in it."""


class MismatchError(HorovodInternalError):
    """Ranks made the same call with different shapes, dtypes, operations or roots."""


class MissingGradientError(HorovodInternalError):
    """Some rank had no gradient for a parameter, and `missing="error"` asked to be told."""


class CollectiveTimeoutError(HorovodInternalError, TimeoutError):
    """A rank did not come in time; the message names it, the call and the setting."""


class RankFailedError(HorovodInternalError):
    """A rank died, raised, or left while others were waiting for it."""


class ShutDownError(HorovodInternalError):
    """A call came after `hvdlite.shutdown()`, or after this rank has given up waiting."""


class BackendUnavailableError(HvdliteError, RuntimeError):
    """What was asked for cannot be had here; the message says what is missing."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed: not a failure, the training loop starts over on the new set."""

    def __init__(self, skip_sync: bool = False) -> None:
        """Make one; `skip_sync`: the state need not be broadcast again, as ranks only left."""
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class UnknownNameError(HvdliteError, KeyError, ValueError):
    """A name that the optimizer does not have; also a KeyError and a ValueError."""

    def __str__(self) -> str:
        """The text as it is; KeyError would put it in quotes."""
        return Exception.__str__(self)
