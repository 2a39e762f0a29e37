"""Settings: where they come from, what is refused, and with which words."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from hvdlite import log
from hvdlite.config import Config, note_ignored
from hvdlite.errors import ConfigError

FIELDS = [f.name for f in dataclasses.fields(Config)]


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(Config()) == {
        "fusion_threshold": 25 * 2**20,
        "first_bucket": 2**20,
        "backend": "auto",
        "deterministic": False,
        "abort_on_error": True,
        "exit_grace_seconds": 5.0,
        "poison_grads": False,
        "check_views": False,
        "log_level": "warning",
        "stall_check_time_seconds": 60.0,
        "stall_shutdown_time_seconds": 0.0,
        "stall_stacks": True,
        "eager_arena": 4 * 2**20,
        "block_elements": 2**15,
        "timeline": "",
        "timeline_all_ranks": False,
        "timeline_mark_cycles": False,
        "timeline_steps": "",
        "timeline_max_bytes": 64 * 2**20,
    }
    assert Config.from_env({}) == Config()


def test_config_is_frozen_hashable_and_survives_a_pickle():
    config = Config(backend="shm")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.backend = "mpi"
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(Config(backend="shm"))


def test_every_field_is_read_from_its_environment_name():
    env = {
        "HVDLITE_FUSION_THRESHOLD": "64MiB",
        "HVDLITE_FIRST_BUCKET": "4096",
        "HVDLITE_BACKEND": "MPI",
        "HVDLITE_DETERMINISTIC": "yes",
        "HVDLITE_ABORT_ON_ERROR": "0",
        "HVDLITE_EXIT_GRACE_SECONDS": "2.5",
        "HVDLITE_POISON_GRADS": "on",
        "HVDLITE_CHECK_VIEWS": "TRUE",
        "HVDLITE_LOG_LEVEL": "Trace",
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1e2",
        "HVDLITE_STALL_STACKS": "no",
        "HVDLITE_EAGER_ARENA": "1 GiB",
        "HVDLITE_BLOCK_ELEMENTS": "2048",
        "HVDLITE_TIMELINE": "/tmp/Trace.json",
        "HVDLITE_TIMELINE_ALL_RANKS": "1",
        "HVDLITE_TIMELINE_MARK_CYCLES": "on",
        "HVDLITE_TIMELINE_STEPS": "10:30",
        "HVDLITE_TIMELINE_MAX_BYTES": "1MiB",
        "PATH": "/bin",
        "HVDLITEX": "not ours",
    }
    assert {k for k in env if k.startswith("HVDLITE_")} == {f"HVDLITE_{n.upper()}" for n in FIELDS}
    assert Config.from_env(env) == Config(
        fusion_threshold=64 * 2**20,
        first_bucket=4096,
        backend="mpi",
        deterministic=True,
        abort_on_error=False,
        exit_grace_seconds=2.5,
        poison_grads=True,
        check_views=True,
        log_level="trace",
        stall_check_time_seconds=1.0,
        stall_shutdown_time_seconds=100.0,
        stall_stacks=False,
        eager_arena=2**30,
        block_elements=2048,
        timeline="/tmp/Trace.json",
        timeline_all_ranks=True,
        timeline_mark_cycles=True,
        timeline_steps="10:30",
        timeline_max_bytes=2**20,
    )


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "on", " on "])
def test_booleans_true(text):
    assert Config.from_env({"HVDLITE_DETERMINISTIC": text}).deterministic is True


@pytest.mark.parametrize("text", ["0", "false", "False", "NO", "off"])
def test_booleans_false(text):
    assert Config.from_env({"HVDLITE_ABORT_ON_ERROR": text}).abort_on_error is False


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("HVDLITE_DETERMINISTIC", "maybe", "true or false"),
        ("HVDLITE_DETERMINISTIC", "", "true or false"),
        ("HVDLITE_DETERMINISTIC", "2", "true or false"),
        ("HVDLITE_BACKEND", "gloo", "auto, shm, mpi"),
        ("HVDLITE_LOG_LEVEL", "loud", "trace, debug, info, warning, error, fatal"),
        ("HVDLITE_EXIT_GRACE_SECONDS", "-1", "0 to 604800 seconds"),
        ("HVDLITE_EXIT_GRACE_SECONDS", "nan", "0 to 604800 seconds"),
        ("HVDLITE_EXIT_GRACE_SECONDS", "inf", "0 to 604800 seconds"),
        ("HVDLITE_EXIT_GRACE_SECONDS", "five", "0 to 604800 seconds"),
        ("HVDLITE_EAGER_ARENA", "1MiB", "2 MiB to 1 GiB"),
        ("HVDLITE_EAGER_ARENA", "2GiB", "2 MiB to 1 GiB"),
        ("HVDLITE_BLOCK_ELEMENTS", "1023", "1024 to 4194304 elements"),
        ("HVDLITE_BLOCK_ELEMENTS", "4194305", "1024 to 4194304 elements"),
        ("HVDLITE_BLOCK_ELEMENTS", "2048.5", "1024 to 4194304 elements"),
        ("HVDLITE_FUSION_THRESHOLD", "2000GiB", "0 to 1 TiB"),
        ("HVDLITE_FUSION_THRESHOLD", "-1", '"64MiB"'),
        ("HVDLITE_FUSION_THRESHOLD", "64 megs", '"64MiB"'),
        ("HOROVOD_FUSION_THRESHOLD", "-1", '"64MiB"'),
        ("HOROVOD_LOG_LEVEL", "loud", "trace, debug"),
        ("HVDLITE_TIMELINE", "a\0b", "a path"),
        ("HVDLITE_TIMELINE_STEPS", "30:10", '"10:30" (steps 10 to 29)'),
        ("HVDLITE_TIMELINE_STEPS", "ten", '"10:30" (steps 10 to 29)'),
        ("HVDLITE_TIMELINE_MAX_BYTES", "1KiB", "4 KiB to 1 TiB"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_the_range(name, text, accepted):
    with pytest.raises(ConfigError) as info:
        Config.from_env({name: text})
    message = str(info.value)
    assert message.startswith(f"{name} must be ")
    assert accepted in message
    assert message.endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HVDLITE_FUSION_TRESHOLD", "HVDLITE_FUSION_THRESHOLD"),
        ("HVDLITE_BACKENDS", "HVDLITE_BACKEND"),
        ("HVDLITE_STALL_CHECK_TIME", "HVDLITE_STALL_CHECK_TIME_SECONDS"),
        ("HVDLITE_log_level", "HVDLITE_LOG_LEVEL"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name, meant):
    with pytest.raises(ConfigError, match=f"unknown setting {name} .*did you mean {meant}"):
        Config.from_env({name: "1"})


def test_an_unknown_name_like_no_other_gets_the_list():
    with pytest.raises(ConfigError, match=r"unknown setting HVDLITE_X .*known: HVDLITE_FUSION"):
        Config.from_env({"HVDLITE_X": "1"})


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"fusion_threshold": -1}, "fusion_threshold"),
        ({"first_bucket": True}, "first_bucket"),
        ({"backend": None}, "backend"),
        ({"deterministic": 1}, "deterministic"),
        ({"deterministic": None}, "deterministic"),
        ({"exit_grace_seconds": True}, "exit_grace_seconds"),
        ({"exit_grace_seconds": float("nan")}, "exit_grace_seconds"),
        ({"exit_grace_seconds": 10**400}, "exit_grace_seconds"),
        ({"block_elements": 10}, "block_elements"),
        ({"block_elements": [2048]}, "block_elements"),
        ({"timeline": 3}, "timeline"),
        ({"timeline": b"bytes"}, "timeline"),
        ({"timeline_steps": (3, 3)}, "timeline_steps"),
        ({"timeline_steps": 3}, "timeline_steps"),
    ],
)
def test_a_bad_value_of_the_user_names_field_and_variable(kwargs, field):
    with pytest.raises(ConfigError) as info:
        Config(**kwargs)
    assert str(info.value).startswith(f"{field} (HVDLITE_{field.upper()}) must be ")


def test_values_may_be_given_as_text_and_come_out_in_the_fields_type():
    config = Config(fusion_threshold="64MiB", exit_grace_seconds=3, deterministic="on")
    assert config.fusion_threshold == 64 * 2**20
    assert type(config.exit_grace_seconds) is float
    assert config.deterministic is True
    assert type(Config(block_elements="4096").block_elements) is int
    assert Config(timeline=Path("a/b")).timeline == "a/b"
    assert Config(timeline_steps=(10, 30)).timeline_steps == "10:30"


@pytest.mark.parametrize("name", ["exit_grace_seconds", "stall_check_time_seconds"])
def test_seconds_are_floats_from_the_environment(name):
    assert type(getattr(Config.from_env({f"HVDLITE_{name.upper()}": "3"}), name)) is float


def test_horovods_names_count_where_they_mean_the_same():
    env = {
        "HOROVOD_FUSION_THRESHOLD": "1048576",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_TIMELINE": "DYNAMIC",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    assert Config.from_env(env) == Config(
        fusion_threshold=2**20,
        log_level="debug",
        timeline="DYNAMIC",
        timeline_mark_cycles=True,
    )


def test_our_name_wins_over_horovods():
    env = {"HOROVOD_FUSION_THRESHOLD": "1", "HVDLITE_FUSION_THRESHOLD": "2"}
    assert Config.from_env(env).fusion_threshold == 2


def test_a_mapping_wins_with_the_fields_that_it_names():
    env = {"HVDLITE_BACKEND": "mpi", "HVDLITE_FUSION_THRESHOLD": "7"}
    config = Config.resolve({"backend": "auto"}, env)
    assert config.backend == "auto"
    assert config.fusion_threshold == 7


def test_a_config_wins_with_the_fields_that_differ_from_the_default():
    env = {"HVDLITE_BACKEND": "mpi", "HVDLITE_FUSION_THRESHOLD": "7"}
    config = Config.resolve(Config(fusion_threshold=9), env)
    assert config.fusion_threshold == 9
    assert config.backend == "mpi"


def test_resolve_without_a_config_is_the_environment():
    assert Config.resolve(None, {"HVDLITE_BACKEND": "mpi"}) == Config(backend="mpi")


def test_resolve_refuses_unknown_fields_with_a_suggestion():
    with pytest.raises(ConfigError, match="setting 'first_buket' in config; did you mean first_b"):
        Config.resolve({"first_buket": 1}, {})
    with pytest.raises(ConfigError, match="unknown setting 3 in config; known: "):
        Config.resolve({3: 1}, {})


def test_resolve_refuses_another_type():
    with pytest.raises(TypeError, match=r"config must be a .*got str"):
        Config.resolve("shm", {})


def test_resolve_checks_the_environment_even_where_the_user_wins():
    with pytest.raises(ConfigError, match="HVDLITE_BACKEND"):
        Config.resolve({"backend": "shm"}, {"HVDLITE_BACKEND": "x"})


def test_horovods_other_names_give_one_info_line(capsys):
    env = {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_FUSION_THRESHOLD": "1",
    }
    assert Config.from_env(env).fusion_threshold == 1
    log.configure(0, 1, "info")
    try:
        note_ignored(env)
        note_ignored({"HOROVOD_LOG_LEVEL": "info", "PATH": ""})
        assert capsys.readouterr().err == (
            "[hvdlite rank 0/1] info: settings without a meaning here: "
            "HOROVOD_CACHE_CAPACITY, HOROVOD_CYCLE_TIME\n"
        )
    finally:
        log.reset()


def test_table_has_every_field_with_its_default_and_range():
    lines = Config.table().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0].strip("`") for row in rows] == FIELDS
    assert all(len(row) == 5 and all(row) for row in rows)
    by_name = {row[0].strip("`"): row for row in rows}
    assert by_name["fusion_threshold"][1:4] == [
        "`HVDLITE_FUSION_THRESHOLD` or `HOROVOD_FUSION_THRESHOLD`",
        "25 MiB",
        "0 to 1 TiB",
    ]
    assert by_name["exit_grace_seconds"][2:4] == ["5 seconds", "0 to 604800 seconds"]
    assert by_name["deterministic"][2:4] == ["false", "true or false"]
    assert by_name["timeline"][2:4] == ["none", "a path"]
    assert by_name["block_elements"][2:4] == ["32768 elements", "1024 to 4194304 elements"]


def test_horovods_stall_settings_are_read_and_its_switch_turns_both_off():
    env = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
    }
    config = Config.from_env(env)
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (7, 20)
    env["HOROVOD_STALL_CHECK_DISABLE"] = "0"
    assert Config.from_env(env) == config
    env["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    config = Config.from_env(env)
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (0, 0)
    env["HVDLITE_STALL_CHECK_TIME_SECONDS"] = "3"  # ours wins
    assert Config.from_env(env).stall_check_time_seconds == 3


def test_a_switch_of_horovods_that_is_no_flag_is_refused():
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_DISABLE must be true or false"):
        Config.from_env({"HOROVOD_STALL_CHECK_DISABLE": "perhaps"})
