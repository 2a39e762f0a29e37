"""The exception classes: what a user's `except` catches."""

import pickle

import pytest

from hvdlite import errors
from hvdlite.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    ConfigError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HvdliteError,
    MismatchError,
    MissingGradientError,
    NotInitializedError,
    RankFailedError,
    ShutDownError,
)

COLLECTIVE = [
    MismatchError,
    MissingGradientError,
    CollectiveTimeoutError,
    RankFailedError,
    ShutDownError,
]


@pytest.mark.parametrize("error", [NotInitializedError, ConfigError])
def test_errors_of_one_rank_are_value_errors(error):
    assert issubclass(error, HvdliteError)
    assert issubclass(error, ValueError)
    assert not issubclass(error, HorovodInternalError)


@pytest.mark.parametrize("error", COLLECTIVE)
def test_errors_of_all_ranks_are_horovod_internal_errors(error):
    assert issubclass(error, HorovodInternalError)
    assert issubclass(error, HvdliteError)
    assert issubclass(error, RuntimeError)
    assert not issubclass(error, ValueError)


def test_timeout_is_also_the_builtin_one():
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    assert [e for e in COLLECTIVE if issubclass(e, TimeoutError)] == [CollectiveTimeoutError]


def test_missing_backend_is_a_runtime_error_but_no_failed_collective():
    assert issubclass(BackendUnavailableError, HvdliteError)
    assert issubclass(BackendUnavailableError, RuntimeError)
    assert not issubclass(BackendUnavailableError, HorovodInternalError)


def test_hosts_updated_is_no_failure():
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert not issubclass(HostsUpdatedInterrupt, HvdliteError)
    assert HostsUpdatedInterrupt().skip_sync is False
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True


def test_timeout_keeps_its_whole_message():
    # OSError (TimeoutError's parent) would swallow a second argument as a file name
    assert str(CollectiveTimeoutError("allreduce 'w': rank 1 missing")) == (
        "allreduce 'w': rank 1 missing"
    )


@pytest.mark.parametrize(
    "error",
    [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HvdliteError)],
)
def test_errors_survive_a_pickle_and_are_documented(error):
    # they travel to other ranks and out of worker processes
    back = pickle.loads(pickle.dumps(error("what happened")))
    assert type(back) is error
    assert str(back) == "what happened"
    assert error.__doc__
