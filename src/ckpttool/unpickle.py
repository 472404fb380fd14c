"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called.

Three gates, in this order:

1. :func:`vet` walks the opcodes once, without building anything. Opcodes that no torch pickle has are refused;
   every length, memo index and nesting is held against the size of the file, because C's unpickler allocates
   what the stream tells it to and hashes nested tuples without a bound.
2. ``find_class`` knows exact ``(module, name)`` pairs. Each becomes a :class:`Record` class of our own, or one of
   the few functions in ``SPECIAL``. With ``inert=True`` (``.metadata``, ``common.pt``) other names become records
   too, unless their module can act: those are refused by name.
3. Records refuse to have their class patched, so a stream cannot reach across to the next one.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from ckpttool.errors import Refused
from ckpttool.opcodes import damaged, vet

MOST_NAMES = 4096
"""Most distinct names that a pickle may use; those of Megatron use fewer than a hundred."""


class Record:
    """An object of the pickle, kept as its class name, constructor arguments and state."""

    __slots__ = ("args", "state")
    module: ClassVar[str] = ""
    name: ClassVar[str] = ""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        """Keep positional arguments; keyword arguments carry nothing that we read."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        """Take a dict, or the (dict, slots) pair that classes with ``__slots__`` write."""
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1] if not isinstance(state[0], dict) else {**state[0], **state[1]}
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Dict subclasses fill themselves this way; what an unknown class holds is not kept."""

    def append(self, item: Any) -> None:
        """List subclasses fill themselves this way; what an unknown class holds is not kept."""

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field of the state, or the default where there is no such field."""
        return self.state.get(field, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


class Plain(dict[Any, Any]):
    """A dict subclass of the pickle (``OrderedDict``), as a dict; attributes such as ``_metadata`` are dropped."""

    __slots__ = ()

    def __init__(self) -> None:
        """Start empty: pickles since Python 3 fill it item by item."""
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Drop instance attributes: they would shadow the methods of a dict."""


class _Words(reprlib.Repr):
    """``repr`` of bounded depth and length; lists that hold the same list twice, and so on, grow without one."""

    repr_Plain = reprlib.Repr.repr_dict  # noqa: N815

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 120

    def repr_type(self, value: type, _: int) -> str:
        """Name the class that a record class stands for."""
        return f"<class {value.module}.{value.name}>" if issubclass(value, Record) else repr(value)


said: Callable[[object], str] = _Words().repr
"""Write a value of a stream for a message, whatever it is."""


def name_of(key: object) -> str:
    """Return a key of a state dict as a name; one that is no string, which nothing writes, in words."""
    return key if type(key) is str else said(key)


class _Function:
    """A callable that a stream may call, and cannot patch."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a pickle may not set the state of a function")


def _size(dims: Any = ()) -> tuple[int, ...]:
    if not isinstance(dims, tuple) or not all(type(n) is int and 0 <= n < 1 << 63 for n in dims):
        raise pickle.UnpicklingError("torch.Size of something that is no shape")
    return tuple(dims)


def _set(items: Any = ()) -> frozenset[Any]:
    if not isinstance(items, list | tuple) or any(isinstance(item, tuple | frozenset) for item in items):
        raise pickle.UnpicklingError("a set of something else than plain values")
    return frozenset(items)


_GETATTR = ("builtins", "getattr")
_ATTRIBUTE = re.compile(r"[A-Za-z]\w{0,99}")

SPECIAL: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _Function(_size),
    ("collections", "OrderedDict"): Plain,
    ("builtins", "set"): _Function(_set),
    ("builtins", "frozenset"): _Function(_set),
}

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 speaks Python 2

_PLAIN_STDLIB: Mapping[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "_codecs": "encode",
        "argparse": "Namespace",
        "builtins": "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple type "
        "xrange",
        "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
        "copyreg": "_reconstructor",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "enum": "Enum Flag IntEnum IntFlag",
        "fractions": "Fraction",
        "functools": "partial",
        "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "random": "Random",
        "signal": "Handlers Sigmasks Signals",
        "types": "SimpleNamespace",
        "typing": "Any Callable Dict List Literal Optional Set Tuple Union",
        "uuid": "SafeUUID UUID",
        "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
    }.items()
}
_ACTING = (
    *("pip", "setuptools", "cloudpickle", "dill", "IPython", "six.moves", "numpy.testing", "numpy.f2py"),
    *("torch.hub", "torch.utils.cpp_extension", "torch.utils.collect_env", "torch.multiprocessing"),
)
_LOADERS = frozenset(("load", "compile", "script"))
_ACTING_NAMES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("torch", "torch.serialization", "torch.jit"), _LOADERS),
    "torch.storage": frozenset(("_load_from_bytes",)),
    "numpy": frozenset(("load",)),
}


def can_act(module: str, name: str) -> bool:
    """Tell whether something of this name could do harm if a careless reader called it.

    The standard library counts as able to act, but for the plain data of a short list; unknown libraries do not,
    because here they become inert records anyway.
    """
    if _is_standard(module.partition(".")[0]):
        return name not in _PLAIN_STDLIB.get(module, ())
    return (
        any(module == m or module.startswith(m + ".") for m in _ACTING)
        or name in _ACTING_NAMES.get(module, ())
        or _leads_elsewhere(name)
    )


def _is_standard(root: str) -> bool:
    return root in sys.stdlib_module_names or root in _RENAMED or root in ("nt", "posix")


def _leads_elsewhere(name: str) -> bool:
    """Tell whether a name with dots is a way through what a library has imported: ``torch`` and ``os.system``."""
    *steps, last = name.split(".")
    return bool(steps) and (
        any(_is_standard(step.strip("_")) for step in steps)
        or any(step.startswith("__") and step.endswith("__") for step in (*steps, last))
    )


_classes: dict[tuple[str, str], type[Record]] = {}


def record_class(module: str, name: str) -> type[Record]:
    """Return the record class that stands for ``module.name``."""
    key = (module, name)
    if key not in _classes:
        _classes[key] = type("Record", (Record,), {"__slots__": (), "module": module, "name": name})
    return _classes[key]


class _Unpickler(pickle.Unpickler):
    """C's unpickler with our ``find_class``; the base class's own is never reached."""

    def __init__(self, data: bytes, allowed: Collection[tuple[str, str]], *, inert: bool, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._inert = inert
        self._where = where
        self.globals: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        check_name(module, name, self._allowed, inert=self._inert, where=self._where)
        self._count(f"{module}.{name}")
        if (module, name) == _GETATTR:
            return _Function(self._attribute)
        return SPECIAL.get((module, name)) or record_class(module, name)

    def _count(self, name: str) -> None:
        """Remember a name; each makes a class, which is much larger than its name."""
        self.globals.add(name)
        if len(self.globals) > MOST_NAMES:
            raise pickle.UnpicklingError(f"it uses more than {MOST_NAMES:,} names")

    def _attribute(self, owner: Any, attribute: Any) -> type[Record]:
        """Stand in for ``getattr``, as nested classes and the enums of Python 3.11.0 to 3.11.3 are pickled: a name."""
        if isinstance(owner, type) and issubclass(owner, Record) and isinstance(attribute, str):
            module, name = owner.module, f"{owner.name}.{attribute}"
            is_enum = module == "signal"
            if _ATTRIBUTE.fullmatch(attribute) and name.count(".") <= 2 and (is_enum or not can_act(module, name)):
                self._count(f"{module}.{name}")
                return record_class(module, name)
        raise Refused(
            f"{self._where}: the pickle asks for attribute {said(attribute)} of {said(owner)}, which can run code",
            hint="Do not open this file with torch.load; find out who wrote it.",
        )

    def persistent_load(self, pid: Any) -> Any:
        """Keep torch's ``("storage", type, key, device, numel)`` as it is; the format's reader checks it."""
        return record_class("torch", "persistent id")(pid)


def check_name(module: str, name: str, allowed: Collection[tuple[str, str]], *, inert: bool, where: str) -> None:
    """Raise :class:`Refused` unless a stream may name ``module.name``."""
    module = _RENAMED.get(module, module)
    if (module, name) in allowed:
        return
    if can_act(module, name):
        raise Refused(
            f"{where}: the pickle calls for {module}.{name}, which can run code",
            hint="Do not open this file with torch.load; find out who wrote it.",
        )
    if not inert:
        raise Refused(
            f"{where}: the pickle calls for {module}.{name}, which is not part of a checkpoint shard",
            hint="Nothing was run. If a trainer you trust writes this, please report it.",
        )


def loads(
    data: bytes, allowed: Collection[tuple[str, str]], *, where: str, inert: bool = False
) -> tuple[Any, set[str]]:
    """Return the pickle's object made of records and plain data, and the dotted names that it used.

    Raises :class:`Refused` for a name or an opcode outside the allow-list, :class:`BrokenCheckpoint` for a stream
    that is damaged or asks for more than its size can justify.
    """
    rules = (frozenset(allowed), inert)
    vet(data, lambda module, name: check_name(module, name, allowed, inert=inert, where=where), where, rules=rules)
    unpickler = _Unpickler(data, allowed, inert=inert, where=where)
    try:
        with collector_paused():
            return unpickler.load(), unpickler.globals
    except Refused:
        raise
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise damaged(where, error) from error
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise damaged(where, error) from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """Millions of small objects make the cycle collector run in vain: five times the time, here."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
