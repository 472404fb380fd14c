"""The restricted unpickler: which names a stream may use, and that nothing it names ever runs."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import gc
import pickle
import re
import signal
import string
from pathlib import Path, PosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Refused
from ckpttool.formats.torchzip import open_archive
from ckpttool.records import METADATA_NAMES, SHARD_NAMES
from ckpttool.unpickle import Plain, Record, can_act, check_name, collector_paused, loads, name_of, record_class, said
from tests.conftest import DATA
from tests.hostile import PROTO, STOP, bomb, named, stacked, text

ALLOWED = {False: SHARD_NAMES, True: METADATA_NAMES}


def load(data: bytes, *, inert: bool = False) -> Any:
    return loads(data, ALLOWED[inert], where="stream", inert=inert)[0]


# Plain data


keys = st.one_of(st.text(max_size=8), st.integers(-(1 << 63), 1 << 63), st.booleans(), st.none())
leaves = st.one_of(keys, st.floats(allow_nan=False), st.integers(-(1 << 71), (1 << 71) - 1), st.text(max_size=300))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
        st.tuples(inner).map(lambda pair: [pair, pair]),
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(values, st.integers(2, 5))
def test_plain_data_is_what_pickle_reads(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert load(data) == pickle.loads(data) == value


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sets(keys), st.frozensets(keys), st.binary(max_size=300), st.integers(4, 5))
def test_sets_and_bytes_are_what_pickle_reads(one: Any, other: Any, raw: bytes, protocol: int) -> None:
    value = [one, other, raw]
    assert load(pickle.dumps(value, protocol)) == value


def test_what_is_shared_stays_shared() -> None:
    shared = [1]
    first, second = load(pickle.dumps([shared, shared], 4))
    assert first is second
    loop: list[Any] = []
    loop.append(loop)
    found = load(pickle.dumps(loop, 2))
    assert found[0] is found


class Trainer:
    """A class of nobody's library."""

    def __init__(self) -> None:
        self.arguments = argparse.Namespace(lr=0.1, names={"a"}, paths=[PosixPath("/x")])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_other_classes_become_inert_records(protocol: int) -> None:
    found = load(pickle.dumps(Trainer(), protocol), inert=True)
    assert (type(found).module, type(found).name, repr(found)) == (
        *(Trainer.__module__, "Trainer"),
        f"<{Trainer.__module__}.Trainer>",
    )
    arguments = found.get("arguments")
    assert (arguments.get("lr"), arguments.get("names"), arguments.get("absent", 7)) == (0.1, {"a"}, 7)
    assert PosixPath(*arguments.get("paths")[0].args) == PosixPath("/x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_plain_data_of_a_training_is_no_alarm(protocol: int) -> None:
    value = [
        *({1, 2}, frozenset({3}), b"", b"x", bytearray(b"y"), 1j, range(3), slice(1)),
        *(dt.timedelta(1), signal.SIGTERM, collections.deque([1]), collections.defaultdict(list)),
        argparse.Namespace(a=1),
    ]
    found = load(pickle.dumps(value, protocol), inert=True)
    assert len(found) == len(value)
    assert set(found[0]) == {1, 2}


def test_an_ordered_dict_keeps_items_and_loses_attributes() -> None:
    value = collections.OrderedDict(b=1, a=2)
    value._metadata = {"keys": "hidden"}  # type: ignore[attr-defined]
    found = load(pickle.dumps(value, 2))
    assert (type(found), list(found.items())) == (Plain, [("b", 1), ("a", 2)])
    assert not hasattr(found, "_metadata")


def test_names_that_were_used_are_returned() -> None:
    _, used = loads(pickle.dumps(Trainer(), 2), METADATA_NAMES, where="stream", inert=True)
    assert used >= {f"{Trainer.__module__}.Trainer", "argparse.Namespace"}


# The allow-list


def test_every_allowed_name_is_known_by_both_spellings() -> None:
    for inert, allowed in ALLOWED.items():
        for module, name in allowed:
            for spelt in (named(module, name), stacked(module, name)):
                found = load(PROTO + spelt + STOP, inert=inert)
                assert callable(found)
                assert not isinstance(found, type) or issubclass(found, Record | Plain)


NEAR_MISSES = [
    *(("torch", "OrderedDict"), ("torch", "load"), ("torch.nn.modules.linear", "Linear"), ("torch", "Size ")),
    *(("torch", "Size.__new__"), ("collections", "OrderedDict.update"), ("collections", "defaultdict")),
    *(("torch._utils", "_rebuild_sparse_tensor"), ("torch.storage", "_load_from_bytes"), ("Torch", "Size")),
    *(("torch.distributed.tensor", "DTensor.from_local"), ("megatron.core", "X"), ("", ""), ("builtins", "set")),
    *(("torch.distributed.checkpoint.metadata", "Metadata"), ("argparse", "Namespace"), ("numpy", "ndarray")),
]


@pytest.mark.parametrize(("module", "name"), NEAR_MISSES)
def test_a_shard_may_name_nothing_else(module: str, name: str) -> None:
    for spelt in (named(module, name), stacked(module, name)):
        with pytest.raises(Refused) as caught:
            load(PROTO + spelt + STOP)
        assert f"{module}.{name}" in caught.value.message


words = st.text(string.ascii_letters + "._0123456789", min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(SHARD_NAMES)), words, st.booleans())
def test_changed_names_are_refused(pair: tuple[str, str], more: str, in_module: bool) -> None:
    module, name = (pair[0] + more, pair[1]) if in_module else (pair[0], pair[1] + more)
    with pytest.raises(Refused):
        check_name(module, name, SHARD_NAMES, inert=False, where="stream")


def test_the_lists_name_nothing_that_acts() -> None:
    acting = {pair for pair in SHARD_NAMES | METADATA_NAMES if can_act(*pair)}
    assert acting == {("builtins", "getattr")}  # ours, which looks nothing up


def test_real_shards_use_only_names_of_the_list() -> None:
    """And the list is not much longer than what they use."""
    used: set[str] = set()
    for path in sorted((DATA / "fsdp").rglob("*.pt")):
        used |= loads(open_archive(path).read("data.pkl"), SHARD_NAMES, where=path.name)[1]
    assert used <= {f"{module}.{name}" for module, name in SHARD_NAMES} | {_GROUP_STATE}
    assert len(used) > 20


_GROUP_STATE = "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState"

# What could act


ACTING = [
    *("os.system", "posix.system", "nt.system", "subprocess.Popen", "subprocess.check_output", "pty.spawn"),
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.open", "builtins.__import__", "__builtin__.eval"),
    *("builtins.setattr", "builtins.delattr", "builtins.vars", "builtins.breakpoint", "__builtin__.input"),
    *("importlib.import_module", "importlib._bootstrap._load", "imp.load_source", "runpy.run_path", "pkgutil.get_data"),
    *("sys.exit", "sys.modules", "sys.settrace", "ctypes.CDLL", "ctypes.util.find_library", "_ctypes.dlopen"),
    *("shutil.rmtree", "tempfile.mktemp", "io.open", "_io.FileIO", "codecs.open", "fileinput.input", "glob.glob"),
    *("socket.socket", "urllib.request.urlopen", "http.client.HTTPConnection", "ftplib.FTP", "smtplib.SMTP"),
    *("pickle.loads", "_pickle.loads", "marshal.loads", "shelve.open", "dbm.open", "copyreg.__newobj__"),
    *("types.FunctionType", "types.CodeType", "types.MethodType", "operator.attrgetter", "operator.methodcaller"),
    *("functools.reduce", "functools.partialmethod", "itertools.starmap", "builtins.map", "builtins.getattr.x"),
    *("code.interact", "codeop.compile_command", "timeit.timeit", "cProfile.run", "pdb.run", "trace.Trace"),
    *("threading.Thread", "multiprocessing.Process", "asyncio.run", "concurrent.futures.Executor", "atexit.register"),
    *("signal.signal", "signal.raise_signal", "signal.pthread_kill", "signal.alarm", "gc.get_objects", "inspect.stack"),
    *(
        "webbrowser.open",
        "antigravity.x",
        "platform.popen",
        "logging.config.listen",
        "venv.create",
        "ensurepip.bootstrap",
    ),
    # an allowed module is no way to what it imported
    *("pathlib.os.system", "pathlib.Path.unlink", "pathlib.os", "enum.sys.exit", "typing.sys.modules", "typing.sys"),
    *("collections._sys.exit", "datetime.sys", "dataclasses.make_dataclass", "collections.namedtuple", "random._os"),
    *("typing.get_type_hints", "typing.ForwardRef", "argparse.ArgumentParser", "argparse._os.system", "random._exec"),
    *("builtins.dict.__subclasses__", "builtins.object.__subclasses__", "types.SimpleNamespace.__class__"),
    *("pip.main", "pip._internal.main", "setuptools.setup", "cloudpickle.loads", "dill.loads", "IPython.embed"),
    *("numpy.testing._private.utils.runstring", "numpy.f2py.crackfortran.getlincoef"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "torch.compile", "torch.serialization.load"),
    *("torch.utils.cpp_extension.load", "torch.utils.collect_env.run", "torch.multiprocessing.spawn"),
    *("torch.storage._load_from_bytes", "numpy.load", "six.moves.builtins.eval"),
]


@pytest.mark.parametrize("dotted", ACTING)
def test_what_can_act_is_refused_by_name_everywhere(dotted: str) -> None:
    parts = dotted.split(".")
    at = next((n for n, part in enumerate(parts[1:], 1) if part[:1].isupper() or part in ("os", "sys")), len(parts) - 1)
    for split in {at, len(parts) - 1}:
        module, name = ".".join(parts[:split]), ".".join(parts[split:])
        for spelt in (named(module, name), stacked(module, name)):
            for inert in (False, True):
                with pytest.raises(Refused) as caught:
                    load(PROTO + spelt + STOP, inert=inert)
                assert dotted.replace("__builtin__", "builtins") in caught.value.message


@pytest.mark.parametrize(
    "name",
    ["os.system", "_os.system", "sys.modules.get", "nn.init.__globals__.get", "Tensor.__subclasses__", "io.os.popen"],
)
def test_no_name_leads_through_a_library_to_what_acts(name: str) -> None:
    """From protocol 4 on a name may have dots: pickle follows them through whatever a module has imported."""
    with pytest.raises(Refused, match=re.escape(f"torch.{name}")):
        load(PROTO + stacked("torch", name) + STOP, inert=True)


def test_a_nested_class_is_no_way_to_anything() -> None:
    for name in ("Trainer.State", "Trainer.State.Kind", "WriteItemType.TENSOR", "__private"):
        assert load(PROTO + stacked("my_trainer", name) + STOP, inert=True) is record_class("my_trainer", name)


def test_the_alarm_is_not_raised_for_other_libraries() -> None:
    for module, name in (("megatron.core.optimizer", "X"), ("my_trainer", "State"), ("transformers", "Config")):
        assert load(PROTO + named(module, name) + STOP, inert=True) is record_class(module, name)


# Streams that try to act with what they are given


ONE_TUPLE = text("x") + b"\x85"
STATE = b"}" + text("__class__") + b"Ns"
DEVICE = named("torch", "device")
OD = named("collections", "OrderedDict")
SIZE = named("torch", "Size")
GETATTR = named("__builtin__", "getattr")

HOSTILE = {
    "build on a class": DEVICE + STATE + b"b",
    "build on a class, with slots": DEVICE + b"N}" + text("__new__") + b"Ns\x86b",
    "build on a function": SIZE + STATE + b"b",
    "build on getattr": GETATTR + STATE + b"b",
    "build on a list": b"]" + STATE + b"b",
    "build on a string": text("x") + STATE + b"b",
    "call a string": text("x") + b")R",
    "call a record": DEVICE + b")R)R",
    "call an ordered dict": OD + b")R)R",
    "new of a function": SIZE + b")\x81",
    "new of a string": text("x") + b")\x81",
    "size of a list": SIZE + b"](K\x01e\x85R",
    "size of a negative": SIZE + b"J\xff\xff\xff\xff\x85\x85R",
    "size of a flag": SIZE + b"\x88\x85\x85R",
    "size of sizes": SIZE + b")\x85\x85R",
    "ordered dict of pairs": OD + b"](" + text("a") + b"K\x01\x86e\x85R",
    "append to a size": SIZE + b")\x85RK\x01a",
    "item of a function": SIZE + text("a") + b"Ns",
    "item of a class": DEVICE + text("a") + b"Ns",
    "an unhashable key": b"}]Ns",
    "a set of lists": b"\x8f(]\x90",
    "getattr of a function": GETATTR + SIZE + text("__globals__") + b"\x86R",
    "getattr of a dict": GETATTR + OD + text("update") + b"\x86R",
    "getattr of a list": GETATTR + b"]" + text("append") + b"\x86R",
    "getattr of getattr": GETATTR + GETATTR + text("__call__") + b"\x86R",
    "getattr of a hidden name": GETATTR + DEVICE + text("__subclasses__") + b"\x86R",
    "getattr of a path": GETATTR + DEVICE + text("a.b") + b"\x86R",
    "getattr of no name": GETATTR + DEVICE + b"K\x01\x86R",
    "getattr of nothing": GETATTR + b")R",
    "getattr without end": GETATTR + GETATTR + GETATTR + DEVICE + (text("a") + b"\x86R") * 3,
    "stack global of numbers": b"K\x01K\x02\x93",
}


@pytest.mark.parametrize("inert", [False, True])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_stream_cannot_act_with_what_is_allowed(what: str, inert: bool) -> None:
    with pytest.raises((Refused, BrokenCheckpoint)):
        load(PROTO + HOSTILE[what] + STOP, inert=inert)
    assert load(pickle.dumps(collections.OrderedDict(a=1), 2)) == {"a": 1}  # the next stream is as before
    assert not {"__class__", "__new__"} & vars(record_class("torch", "device")).keys()


def test_methods_of_an_ordered_dict_cannot_be_shadowed() -> None:
    found = load(PROTO + OD + b")R}" + text("items") + b"Nsb" + STOP)
    assert found == {}
    assert callable(found.items)
    assert not hasattr(found, "__dict__")


def test_what_a_record_is_filled_with_is_not_kept() -> None:
    found = load(PROTO + DEVICE + b")\x81(" + text("a") + b"Nu(K\x01K\x02eK\x03a" + STOP)
    assert (found.args, found.state) == ((), None)


@pytest.mark.parametrize("inert", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reduce_runs_nothing(tmp_path: Path, protocol: int, inert: bool) -> None:
    marker = tmp_path / "went-off"
    data = pickle.dumps(pickle.loads, protocol)
    for stream in (bomb(marker), data):
        with pytest.raises(Refused):
            load(stream, inert=inert)
    assert not marker.exists()


def test_every_member_of_an_enum_of_early_python_3_11_is_a_record() -> None:
    """Python 3.11.0 to 3.11.3 wrote ``getattr(Enum, "NAME")``; the index of every DCP checkpoint has such enums."""
    home = "torch.distributed.checkpoint.metadata"
    found = load(PROTO + GETATTR + named(home, "_MEM_FORMAT_ENCODING") + text("TORCH_X") + b"\x86R" + STOP, inert=True)
    assert found is record_class(home, "_MEM_FORMAT_ENCODING.TORCH_X")
    path = PROTO + GETATTR + named("pathlib", "Path") + text("unlink") + b"\x86R" + STOP
    with pytest.raises(Refused, match="unlink"):
        load(path, inert=True)


# Words for messages


def test_a_message_is_short_whatever_it_quotes() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    twice: list[Any] = []
    for _ in range(22):
        twice = [twice, twice]
    wide = Plain()
    wide.update(dict.fromkeys(range(100_000)))
    for value in (deep, twice, wide, "x" * 10_000, record_class("a", "b" * 9000)(), record_class("a", "b" * 9000)):
        assert len(said(value)) < 20_000
    assert said(wide) == "{0: None, 1: None, 2: None, 3: None, ...}"
    assert said(record_class("torch", "device")) == "<class torch.device>"
    assert said(record_class("torch", "device")()) == "<torch.device>"
    assert (name_of("weight"), name_of(("a", 1)), name_of(None)) == ("weight", "('a', 1)", "None")


def test_the_collector_runs_again_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(CkpttoolError):
        load(PROTO + b"}]Ns" + STOP)
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
