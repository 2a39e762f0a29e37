"""The settings of one job: one frozen class, read once, every knob with unit, default and range.

Precedence: the argument of a call > `init(config=)` > `HVDLITE_<FIELD>` in the environment >
Horovod's name, where it means the same > the default.  Nothing is read at import.
"""

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from hvdlite.errors import ConfigError
from hvdlite.log import LEVELS, info_once
from hvdlite.types import parse_bytes, parse_steps

PREFIX: Final = "HVDLITE_"
HOROVOD_PREFIX: Final = "HOROVOD_"
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_WEEK: Final = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Knob:
    """What is known about one setting besides its default."""

    doc: str  # one line, for the settings table
    unit: str  # "bytes", "elements", "seconds", "flag", "word", "path" or "steps"
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()  # of a word
    horovod: str = ""  # Horovod's environment name, if it means the same
    horovod_off: str = ""  # Horovod's flag that sets it to 0

    def check(self, value: object, label: str) -> object:
        """Turn a value or its text into the field's type.

        Args:
            value: From the environment (a text) or from the user (a text or the value itself).
            label: What to call the setting in the message.

        Raises:
            ConfigError: The value cannot be read, or lies outside the range.
        """
        if self.unit == "path":
            return self._path(value, label)
        if self.unit == "steps":
            steps = parse_steps(value, label)
            return value.strip() if isinstance(value, str) else f"{steps.start}:{steps.stop}"
        if self.unit == "bytes":
            number: float = parse_bytes(value, label)
        elif self.unit == "flag":
            word = value.strip().lower() if isinstance(value, str) else None
            flag = value if isinstance(value, bool) else _BOOLEANS.get(word or "")
            if flag is None:
                raise self._refused(value, label)
            return flag
        elif self.unit == "word":
            word = value.strip().lower() if isinstance(value, str) else None
            if word not in self.choices:
                raise self._refused(value, label)
            return word
        else:
            try:
                if isinstance(value, bool) or not isinstance(value, int | float | str):
                    raise ValueError
                number = float(value)
                if self.unit == "elements":
                    if not number.is_integer():
                        raise ValueError
                    number = int(number)
            except (ValueError, OverflowError):
                raise self._refused(value, label) from None
        if not self.low <= number <= self.high:
            raise self._refused(value, label)
        return number

    def range(self) -> str:
        """The values that are accepted, as text."""
        if self.unit == "flag":
            return "true or false"
        if self.unit == "word":
            return ", ".join(self.choices)
        if self.unit in ("path", "steps"):
            return {"path": "a path", "steps": "`10:30` is steps 10 to 29"}[self.unit]
        return f"{self.show(self.low)} to {self.show(self.high)}"

    def show(self, value: object) -> str:
        """One value as a user would write it."""
        if self.unit == "flag":
            return str(value).lower()
        if self.unit in ("word", "path", "steps"):
            return str(value) or {"path": "none", "steps": "all"}[self.unit]
        assert isinstance(value, int | float)
        if self.unit == "bytes":
            for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
                if value and value % 2**power == 0:
                    return f"{int(value) >> power} {name}"
        return f"{int(value)}" if float(value).is_integer() else f"{value:g}"

    def _path(self, value: object, label: str) -> str:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(path, str) or "\0" in path:
            raise self._refused(value, label)
        return path

    def _refused(self, value: object, label: str) -> ConfigError:
        words = {"flag": " (also 1/0, yes/no, on/off)", "word": "", "bytes": "", "path": ""}
        unit = words.get(self.unit, f" {self.unit}")
        return ConfigError(f"{label} must be {self.range()}{unit}, got {value!r}")


def _knob(default: object, doc: str, unit: str, **facts: Any) -> Any:
    """A dataclass field that carries its `Knob`."""
    return field(default=default, metadata={"knob": Knob(doc, unit, **facts)})


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one job.  The environment name of a field is HVDLITE_ + its name in capitals.

    A value may be given as text, as in the environment: `Config(fusion_threshold="64MiB")`.
    """

    fusion_threshold: int = _knob(
        25 * 2**20,
        "Capacity of a bucket: gradients up to this size travel together (0: no fusion).",
        "bytes",
        high=2**40,
        horovod="HOROVOD_FUSION_THRESHOLD",
    )
    first_bucket: int = _knob(
        2**20,
        "Capacity of the first bucket, small so that communication starts early.",
        "bytes",
        high=2**40,
    )
    backend: str = _knob(
        "auto",
        "What moves the bytes: shared memory, MPI, or the best that is there.",
        "word",
        choices=("auto", "shm", "mpi"),
    )
    deterministic: bool = _knob(
        False,
        "Sum in rank order; every backend of this version does so anyway.",
        "flag",
    )
    abort_on_error: bool = _knob(
        True,
        "End the whole job when one rank dies of an exception or exits with a code.",
        "flag",
    )
    exit_grace_seconds: float = _knob(
        5.0,
        "How long a rank that left quietly is waited for before it is named.",
        "seconds",
        high=_WEEK,
    )
    poison_grads: bool = _knob(
        False,
        "Fill the packed gradients of the last step with NaN, to find stale uses (debugging).",
        "flag",
    )
    check_views: bool = _knob(
        False,
        "Raise when a gradient view is written while the backend owns it (debugging).",
        "flag",
    )
    log_level: str = _knob(
        "warning",
        "The least important lines to show.",
        "word",
        choices=tuple(LEVELS),
        horovod="HOROVOD_LOG_LEVEL",
    )
    stall_check_time_seconds: float = _knob(
        60.0,
        "Say who is missing after this time of waiting, and what it does (0: never).",
        "seconds",
        high=_WEEK,
        horovod="HOROVOD_STALL_CHECK_TIME_SECONDS",
        horovod_off="HOROVOD_STALL_CHECK_DISABLE",
    )
    stall_shutdown_time_seconds: float = _knob(
        0.0,
        "Give up after this time of waiting: CollectiveTimeoutError (0: never).",
        "seconds",
        high=_WEEK,
        horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        horovod_off="HOROVOD_STALL_CHECK_DISABLE",
    )
    stall_stacks: bool = _knob(
        True,
        "Let the ranks that are missing print where their code stands (a signal asks them).",
        "flag",
    )
    eager_arena: int = _knob(
        4 * 2**20,
        "Shared memory of each rank for calls outside an optimizer; larger arrays go in chunks.",
        "bytes",
        low=2 * 2**20,
        high=2**30,
    )
    block_elements: int = _knob(
        2**15,
        "Elements that one NumPy call of the reduction handles; they should fit in the cache.",
        "elements",
        low=1024,
        high=2**22,
    )
    timeline: str = _knob(
        "",
        "Record a timeline from the start, in this file; `DYNAMIC` is none, as in Horovod.",
        "path",
        horovod="HOROVOD_TIMELINE",
    )
    timeline_all_ranks: bool = _knob(
        False,
        "Every rank records one: rank 0 in the file `timeline`, rank N in the same with `.rankN`.",
        "flag",
    )
    timeline_mark_cycles: bool = _knob(
        False,
        "The timeline shows each pass of the progress loop that moved something.",
        "flag",
        horovod="HOROVOD_TIMELINE_MARK_CYCLES",
    )
    timeline_steps: str = _knob(
        "",
        "Steps of an optimizer that the timeline records, with what lies between them.",
        "steps",
    )
    timeline_max_bytes: int = _knob(
        64 * 2**20,
        "Size at which the timeline ends, with a warning.",
        "bytes",
        low=2**12,
        high=2**40,
    )

    def __post_init__(self) -> None:
        """Check every field, and turn texts into values."""
        for name, knob in _KNOBS.items():
            value = knob.check(getattr(self, name), f"{name} ({_env_name(name)})")
            object.__setattr__(self, name, value)  # frozen only for everyone else

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the environment.

        Args:
            env: `os.environ`, or any mapping.

        Raises:
            ConfigError: A name with our prefix that is no setting, or a value that cannot be used.
        """
        return cls(**_read_env(env))

    @classmethod
    def resolve(cls, config: Self | Mapping[str, object] | None, env: Mapping[str, str]) -> Self:
        """Combine what the user gave to `init()` with the environment.

        Args:
            config: A mapping wins with every field that it names, a `Config` with the fields that
                differ from the default.
            env: `os.environ`, or any mapping.

        Raises:
            ConfigError: An unknown name, or a value that cannot be used.
            TypeError: `config` is something else.
        """
        values = _read_env(env)
        if isinstance(config, Config):
            values |= {
                f.name: getattr(config, f.name)
                for f in fields(cls)
                if getattr(config, f.name) != f.default
            }
        elif isinstance(config, Mapping):
            for name in config:
                if name not in _KNOBS:
                    raise ConfigError(f"unknown setting {name!r} in config{_near(name, _KNOBS)}")
            values |= config
        elif config is not None:
            raise TypeError(
                f"config must be a hvdlite.Config, a mapping of its fields, or None, "
                f"got {type(config).__name__}"
            )
        return cls(**values)

    @classmethod
    def table(cls) -> str:
        """All settings as a Markdown table, for the README."""
        lines = [
            "| field | environment | default | range | what it does |",
            "| --- | --- | --- | --- | --- |",
        ]
        for f in fields(cls):
            knob = _KNOBS[f.name]
            names = " or ".join(f"`{n}`" for n in (_env_name(f.name), knob.horovod) if n)
            unit = f" {knob.unit}" if knob.unit in ("elements", "seconds") else ""
            lines.append(
                f"| `{f.name}` | {names} | {knob.show(f.default)}{unit} | {knob.range()}{unit} "
                f"| {knob.doc} |"
            )
        return "\n".join(lines) + "\n"


_KNOBS: Final[dict[str, Knob]] = {f.name: f.metadata["knob"] for f in fields(Config)}


_FLAG: Final = Knob("", "flag")


def check_setting(field_name: str, value: object, label: str) -> Any:
    """What an argument that stands for a setting means; raises ConfigError as the setting does."""
    return _KNOBS[field_name].check(value, label)


def note_ignored(env: Mapping[str, str]) -> None:
    """Say in one info line which of Horovod's settings have no meaning here.

    To be called once logging is configured: reading the environment comes before.
    """
    known = {word for knob in _KNOBS.values() for word in (knob.horovod, knob.horovod_off)}
    ignored = sorted(n for n in env if n.startswith(HOROVOD_PREFIX) and n not in known)
    if ignored:
        info_once("horovod settings", f"settings without a meaning here: {', '.join(ignored)}")


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    names = {_env_name(name): name for name in _KNOBS}
    values: dict[str, Any] = {}
    for name, knob in _KNOBS.items():
        if knob.horovod and knob.horovod in env:
            values[name] = knob.check(env[knob.horovod], knob.horovod)
        if _FLAG.check(env.get(knob.horovod_off, "0"), knob.horovod_off):
            values[name] = 0.0
    for key in sorted(k for k in env if k.startswith(PREFIX)):
        if key not in names:
            raise ConfigError(f"unknown setting {key} in the environment{_near(key, names)}")
        values[names[key]] = _KNOBS[names[key]].check(env[key], key)
    return values


def _env_name(name: str) -> str:
    return PREFIX + name.upper()


def _near(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; the common prefix does not count as likeness."""
    bare = {k.removeprefix(PREFIX).lower(): k for k in known}
    found = difflib.get_close_matches(str(name).removeprefix(PREFIX).lower(), bare, n=1)
    return f"; did you mean {bare[found[0]]}?" if found else f"; known: {', '.join(bare.values())}"
