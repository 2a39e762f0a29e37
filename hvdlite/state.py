"""`broadcast_optimizer_state`: the root's state for everyone, in the arrays that are there.

The root takes its state apart into a description, which is small and travels as one object, and its
arrays, which travel in packs as parameters do.  The others lay the description over what they have:
an array of equal shape and dtype in the same place is overwritten, whatever else is made anew.  All
of it is made before the ranks agree that they can; what they have is changed only after that.
"""

import copy
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np

from hvdlite.arrays import empty, is_array, memory_of, to_numpy
from hvdlite.bucket import native
from hvdlite.calls import check_root
from hvdlite.context import current
from hvdlite.negotiation import check_contents, check_words, word_of
from hvdlite.objects import ParameterBroadcast
from hvdlite.optimizer import DistributedOptimizer, unwrapped
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.types import Array

_WHAT: Final = "broadcast_optimizer_state"
_ABSENT: Final = object()  # this rank has nothing in that place
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_KEYS: Final = (*_PLAIN, tuple, np.generic, Enum)  # found again by value on another rank
_DATA_MODULES: Final = sys.stdlib_module_names | {"numpy", "jax", "jaxlib"}
_ADVICE: Final = (
    "give the optimizer state_dict() and load_state_dict(state), or pass what is its state: a dict "
    "or a list"
)


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int = 0, *, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the root's optimizer state: momentum, step counters, learning rates.

    Takes no step to make a state that a rank lacks, and changes no parameter. What a rank has and
    the root lacks is removed. What can be called (functions, schedules, models) is no state and
    stays.

    Collective:
        All ranks of the process set; blocks until all states are equal.
    Args:
        optimizer: One of
            - an object with `state_dict()` and `load_state_dict(state)`, which the others call;
            - a dict or list of arrays, numbers, texts, None, and dicts, lists and tuples of those,
              changed in place; or a tuple, which cannot be: use what is returned;
            - any other object: its attributes, or `optimizer.state` if it has none, are such;
            - a `DistributedOptimizer` around one.
            Parameters, those of a `DistributedOptimizer` or in `optimizer.params`, are not sent:
            in their place every rank has its own.
        root_rank: World rank of the root.
        process_set: Who takes part.
    Shapes:
        Arrays (NumPy's, torch's on the CPU) of the root's shape and dtype are overwritten in place,
        so that references to them stay good; others are made anew. So are containers: attributes'
        dicts and lists stay the same objects. Anything else travels as a pickle.
    Returns:
        `optimizer`; for a tuple the root's, with arrays of this rank.
    Raises:
        TypeError, ValueError: On the rank at fault: what cannot be read or sent, wrong arguments;
            the other ranks raise HorovodInternalError, which quotes it. Nothing was changed.
        Exception: Likewise what `load_state_dict()` raises; arrays may have been changed.
        MismatchError: On every rank: the ranks name different roots.
    Cost:
        One message of the description, two agreements, and one message per 32 MiB of arrays.
    Source:
        Horovod's `broadcast_optimizer_state`.
    """
    context = current()
    set_id, ranks = context.members(process_set, _WHAT)
    matcher, root = context.matcher, ranks[0]
    error: Exception | None = None
    holder: _Holder | None = None
    own, data = None, b""
    arrays: dict[str, Array] = {}
    try:
        root = check_root(root_rank, ranks, _WHAT)
        holder = _holder_of(optimizer)
        own = holder.read()
        if context.rank == root:
            data, arrays = _taken_apart(own, holder.params)
    except Exception as exc:
        error = exc  # raised below, once all ranks know
    said = matcher.exchange(set_id, ranks, _WHAT, (word_of(error), str(root), data))
    if error is not None:
        raise error
    assert holder is not None
    check_words(_WHAT, ranks, [word for word, _, _ in said])
    check_contents(_WHAT, ranks, [[("root_rank", text)] for _, text, _ in said])
    builder: _Builder | None = None
    if context.rank != root:
        builder = _Builder(holder)
        arrays = builder.targets
        error = _error_of(partial(builder.build, said[ranks.index(root)][2], own))
    matcher.agree(set_id, ranks, _WHAT, error, {})
    name = matcher.unnamed(set_id, _WHAT)
    ParameterBroadcast(context, name, set_id, ranks, root, lambda: arrays).run()
    if builder is not None:
        error = _error_of(builder.commit)
    matcher.agree(set_id, ranks, _WHAT, error, {})
    if isinstance(optimizer, tuple):
        return own if builder is None else builder.new
    return optimizer


def _error_of(work: Callable[[], None]) -> Exception | None:
    """What it raises, for `agree()`."""
    try:
        work()
    except Exception as exc:
        return exc
    return None


# ---- where the state is ------------------------------------------------------------------------


@dataclass(slots=True)
class _Holder:
    """How the state of an optimizer is read and replaced.

    Attributes:
        read: Gives it; a container of its own at the top.
        write: Replaces it.
        keeps_containers: Containers inside are filled again; else others are made.
        params: This rank's parameters by name, which are not state.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    keeps_containers: bool = True
    params: Mapping[str, Any] = field(default_factory=dict)


def _holder_of(optimizer: Any) -> _Holder:
    """Find the state.

    Raises:
        TypeError: There is none.
    """
    inner, params = optimizer, None
    if isinstance(optimizer, DistributedOptimizer):
        inner, params = unwrapped(optimizer)
    read, load = (getattr(inner, name, None) for name in ("state_dict", "load_state_dict"))
    is_code = inspect.isroutine(inner) or isinstance(inner, type)
    holder: _Holder | None = None
    if callable(read) and callable(load) and not is_code:
        holder = _Holder(read, load, keeps_containers=False)
    elif (container := _container(inner)) is not None:
        return container
    elif hasattr(inner, "__dict__") and not is_code and not is_array(inner):
        holder = _attributes(inner)
    elif not isinstance(state := getattr(inner, "state", None), tuple):
        holder = _container(state)
    if holder is None:
        kind = type(inner).__name__
        raise TypeError(f"{_WHAT}: a {kind} has no state that can be seen; {_ADVICE}")
    holder.params = _arrays_in(getattr(inner, "params", None)) if params is None else params
    return holder


def _container(value: Any) -> _Holder | None:
    """A state that is a container itself."""
    if isinstance(value, MutableMapping):
        return _Holder(lambda: dict(value), lambda new: _refill(value, new))
    if isinstance(value, MutableSequence) and not isinstance(value, bytearray):
        return _Holder(lambda: list(value), lambda new: _refill(value, new))
    if isinstance(value, tuple):
        return _Holder(lambda: value, lambda _: None)
    return None


def _attributes(optimizer: Any) -> _Holder:
    """The state of an object that says nothing about it."""
    attributes: dict[str, Any] = vars(optimizer)

    def read() -> dict[str, Any]:
        found = {}
        for name, value in attributes.items():
            if is_array(value) or not callable(value):
                module = type(value).__module__.partition(".")[0]
                is_data = isinstance(value, dict | list | tuple | Enum) or is_array(value)
                if not is_data and module not in _DATA_MODULES:
                    raise TypeError(
                        f"{_WHAT}: attribute {name!r} is a {type(value).__name__}, of which nobody "
                        f"knows whether it is state; {_ADVICE}"
                    )
                found[name] = value
        return found

    def write(new: dict[str, Any]) -> None:
        for name in read().keys() - new.keys():
            del attributes[name]
        attributes.update(new)

    return _Holder(read, write)


def _arrays_in(value: Any, name: str = "") -> dict[str, Any]:
    """The arrays in nested mappings and lists, by a name for their place."""
    if is_array(value):
        return {name: value}
    pairs: Any = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    found: dict[str, Any] = {}
    for key, item in pairs:
        found |= _arrays_in(item, f"{name}[{key!r}]")
    return found


def _refill(container: Any, new: Any) -> None:
    """Give a container other contents; its order becomes the root's, too."""
    if isinstance(container, MutableMapping):
        if list(container) != list(new):
            container.clear()
        container.update(new)
    else:
        container[:] = new


# ---- the description ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Node:
    """Something that must be made on the other ranks; anything else stands for itself."""


@dataclass(slots=True, eq=False)
class _ArrayNode(_Node):
    number: int


@dataclass(slots=True, eq=False)
class _ParameterNode(_Node):
    name: str


@dataclass(slots=True, eq=False)
class _PickleNode(_Node):
    data: bytes


@dataclass(slots=True, eq=False)
class _MappingNode(_Node):
    kind: str
    items: list[tuple[Any, Any]]
    empty: bytes | None  # pickle of an empty one; None: that cannot be made elsewhere


@dataclass(slots=True, eq=False)
class _ListNode(_Node):
    items: list[Any]


@dataclass(slots=True, eq=False)
class _TupleNode(_Node):
    kind: bytes  # pickle of the class
    items: list[Any]


def _place(array: Any) -> Any:
    """What two arrays have in common that are one, or are views of the same elements."""
    if isinstance(array, np.ndarray):
        address, strides = array.__array_interface__["data"][0], array.strides
        return (address, array.shape, strides, array.dtype) if array.size else id(array)
    try:
        address, strides = array.data_ptr(), array.stride()
    except RuntimeError:  # a sparse tensor has neither
        return id(array)
    return (address, array.shape, strides, array.dtype) if array.numel() else id(array)


@dataclass(slots=True)
class _Description:
    """A state without its arrays.

    Attributes:
        top: Its outermost node.
        patterns: An empty array of each kind and dtype.
        arrays: Number of its pattern, and shape, of each array.
    """

    top: Any
    patterns: list[Any]
    arrays: list[tuple[int, tuple[int, ...]]]


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _label(number: int) -> str:
    """Names an array so that order by name is order by number."""
    return f"{number:012}"


def _taken_apart(state: Any, params: Mapping[str, Any]) -> tuple[bytes, dict[str, Array]]:
    """The pickled description of a state, and its arrays.

    Raises:
        TypeError, ValueError: Something cannot be sent; names its place.
    """
    reader = _Reader(params)
    top = reader.read(state, "state")
    description = _Description(top, reader.patterns, reader.arrays)
    return pickle.dumps(description, pickle.HIGHEST_PROTOCOL), reader.sent


class _Reader:
    """Takes a state apart.

    Args:
        params: This rank's parameters by name.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._names = {_place(array): name for name, array in params.items()}
        self.sent: dict[str, Array] = {}
        self.arrays: list[tuple[int, tuple[int, ...]]] = []
        self.patterns: list[Any] = []
        self._pattern_of: dict[Any, int] = {}
        self._nodes: dict[Any, _Node] = {}  # what is here twice is one object there, too
        self._open: set[int] = set()  # containers that are being read

    def read(self, value: Any, path: str) -> Any:
        """The node of a value, or a plain value itself."""
        if type(value) in _PLAIN or isinstance(value, np.generic):
            return value
        key = _place(value) if is_array(value) else id(value)
        node = self._nodes.get(key)
        if node is None:
            if id(value) in self._open:
                raise ValueError(f"{_WHAT}: {path} contains itself")
            self._open.add(id(value))
            node = self._nodes[key] = self._make(value, path)
            self._open.discard(id(value))
        return node

    def _make(self, value: Any, path: str) -> _Node:
        if is_array(value):
            name = self._names.get(_place(value))
            return self._array(value, path) if name is None else _ParameterNode(name)
        if isinstance(value, dict):
            return self._mapping(value, path)
        is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))
        if is_tuple or type(value) is list:
            items = [self.read(item, f"{path}[{k}]") for k, item in enumerate(value)]
            return _TupleNode(_pickled(type(value), path), items) if is_tuple else _ListNode(items)
        return _PickleNode(_pickled(value, path))

    def _array(self, value: Any, path: str) -> _Node:
        is_numpy = isinstance(value, np.ndarray)
        number = len(self.arrays)
        self.sent[_label(number)] = value if is_numpy else to_numpy(value, f"{_WHAT}: {path}")[0]
        key = (is_numpy, value.dtype)
        if key not in self._pattern_of:
            self._pattern_of[key] = len(self.patterns)
            self.patterns.append(empty(value, (0,)))
        self.arrays.append((self._pattern_of[key], tuple(value.shape)))
        return _ArrayNode(number)

    def _mapping(self, value: dict[Any, Any], path: str) -> _Node:
        for key in value:
            if not isinstance(key, _KEYS):
                raise TypeError(
                    f"{_WHAT}: {path} has a key of type {type(key).__name__}; keys are texts, "
                    "numbers, or tuples of them"
                )
        items = [(key, self.read(item, f"{path}[{key!r}]")) for key, item in value.items()]
        try:
            bare = pickle.dumps(_emptied(value))
        except Exception:  # a defaultdict with a lambda, say: kept where there is one
            bare = None
        return _MappingNode(_kind_of(value), items, bare)


def _pickled(value: Any, path: str) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as exc:  # whatever __reduce__ raises
        raise TypeError(
            f"{_WHAT}: {path} is a {type(value).__name__} that cannot be sent: {exc}"
        ) from exc


def _emptied(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Another one of its class."""
    twin = copy.copy(mapping)
    twin.clear()
    return twin


# ---- what another rank makes of it -------------------------------------------------------------


class _Builder:
    """Makes the root's state on another rank, out of what this rank has.

    Args:
        holder: Where the state will go.

    Attributes:
        new: The state.
        targets: Memory of each of its arrays, to be overwritten.
    """

    _description: _Description
    new: Any = None

    def __init__(self, holder: _Holder) -> None:
        self._holder = holder
        self.targets: dict[str, Array] = {}
        self._made: dict[int, Any] = {}  # by node
        self._refills: list[tuple[Any, Any]] = []
        self._kept: set[int] = set()  # containers that have a place in the new state already
        self._taken = {_place(array) for array in holder.params.values()}  # memory that has one

    def build(self, data: bytes, own: Any) -> None:
        """Make the new state; changes nothing of what this rank has.

        Args:
            data: The root's description.
            own: This rank's state.

        Raises:
            TypeError, ValueError: It cannot be made here.
        """
        self._description = pickle.loads(data)
        self.new = new = self._build(self._description.top, own, "state")
        is_alike = any(isinstance(new, k) and isinstance(own, k) for k in (dict, list, tuple))
        if self._holder.keeps_containers and not is_alike:
            raise TypeError(
                f"{_WHAT}: the root's state is a {type(new).__name__}, and this rank's a "
                f"{type(own).__name__}"
            )

    def commit(self) -> None:
        """Put the state, whose arrays have come, where it belongs."""
        for container, new in self._refills:
            _refill(container, new)
        self._holder.write(self.new)

    def _build(self, node: Any, own: Any, path: str) -> Any:
        if not isinstance(node, _Node):
            return node
        if id(node) not in self._made:
            self._made[id(node)] = self._make(node, own, path)
        return self._made[id(node)]

    def _make(self, node: _Node, own: Any, path: str) -> Any:
        if isinstance(node, _ArrayNode):
            return self._array(node, own)
        if isinstance(node, _MappingNode):
            return self._mapping(node, own, path)
        if isinstance(node, _ListNode | _TupleNode):
            return self._sequence(node, own, path)
        if isinstance(node, _ParameterNode):
            if node.name not in self._holder.params:
                raise ValueError(f"{_WHAT}: {path} is parameter {node.name}, which is not here")
            return self._holder.params[node.name]
        assert isinstance(node, _PickleNode)
        return pickle.loads(node.data)

    def _array(self, node: _ArrayNode, own: Any) -> Any:
        which, shape = self._description.arrays[node.number]
        value, target = own, _target(own, self._description.patterns[which], shape)
        if target is None or _place(own) in self._taken:
            value = empty(self._description.patterns[which], shape)
            target = memory_of(value, _WHAT)
        self._taken.add(_place(value))
        self.targets[_label(node.number)] = target
        return value

    def _mapping(self, node: _MappingNode, own: Any, path: str) -> Any:
        is_same = _kind_of(own) == node.kind
        items = {
            key: self._build(
                item, own.get(key, _ABSENT) if is_same else _ABSENT, f"{path}[{key!r}]"
            )
            for key, item in node.items
        }
        if is_same and self._keeps(own, items):
            return own
        if not is_same and node.empty is None:
            raise TypeError(
                f"{_WHAT}: {path} is a {node.kind} that does not pickle; make an empty one on "
                "every rank first"
            )
        made: dict[Any, Any] = _emptied(own) if is_same else pickle.loads(node.empty or b"")
        made.update(items)
        return made

    def _sequence(self, node: _ListNode | _TupleNode, own: Any, path: str) -> Any:
        olds = list(own) if isinstance(own, list | tuple) else []
        olds += [_ABSENT] * (len(node.items) - len(olds))
        items = [
            self._build(item, old, f"{path}[{k}]")
            for k, (item, old) in enumerate(zip(node.items, olds, strict=False))
        ]
        if isinstance(node, _ListNode):
            return own if type(own) is list and self._keeps(own, items) else items
        kind = pickle.loads(node.kind)
        return tuple(items) if kind is tuple else kind(*items)

    def _keeps(self, own: Any, new: Any) -> bool:
        """Whether this rank's container stays, to be filled with `new`."""
        if not self._holder.keeps_containers or id(own) in self._kept:
            return False
        self._kept.add(id(own))
        self._refills.append((own, new))
        return True


def _target(own: Any, pattern: Any, shape: tuple[int, ...]) -> Array | None:
    """The memory of this rank's array, if the root's values can be put there."""
    if not (is_array(own) and isinstance(own, type(pattern)) and tuple(own.shape) == shape):
        return None
    is_numpy = isinstance(own, np.ndarray)
    same = native(own.dtype) == native(pattern.dtype) if is_numpy else own.dtype == pattern.dtype
    if not same:
        return None
    try:
        return memory_of(own, _WHAT)
    except (TypeError, ValueError):  # read-only
        return None
