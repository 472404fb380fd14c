"""Pickles made to do harm, as a table: what a stream holds, and what has to come of it.

A payload is the instructions that push one value, so that it can stand wherever a value stands; a few are whole
streams. Those that act would create the marker if a careless reader loaded them.
"""

from __future__ import annotations

import io
import marshal
import os
import pickle
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests.hostile import PROTO, STOP, named, stacked, text

REFUSED, BROKEN, READ = "refused", "broken", "read"
"""Exit code 7; exit code 4; read as inert data, which is right where the classes of a trainer may stand."""


class Payload(NamedTuple):
    """``body`` pushes one value, or is the ``whole`` stream.

    ``strict`` and ``lenient`` say what has to come of it where only a checkpoint's own names may stand, and where
    other names are inert. ``acts`` is whether plain pickle would run it, with the libraries that it ``needs``.
    """

    body: bytes
    strict: str = REFUSED
    lenient: str = REFUSED
    acts: bool = False
    whole: bool = False
    needs: str = ""

    @property
    def stream(self) -> bytes:
        """The payload alone."""
        return self.body if self.whole else PROTO + self.body + STOP


def payloads(marker: Path) -> dict[str, Payload]:
    """The table; ``marker`` is the file that must never appear. ``{marker}.py`` holds its `script`."""
    return {
        **{name: Payload(body, acts=True) for name, body in _calls(marker).items()},
        **{name: Payload(body, acts=True) for name, body in _detours(marker).items()},
        "__builtin__.eval": Payload(
            b"\x80\x02" + call(named("__builtin__", "eval"), text(script(marker))) + STOP, acts=True, whole=True
        ),
        **_nested(marker),
        **_named(marker),
        **_opcodes(),
        **_odd(),
        **_bombs(),
    }


def script(marker: Path) -> str:
    """Python that creates the marker."""
    return f"open({str(marker)!r}, 'w').close()"


# Words of a stream


def call(function: bytes, *arguments: bytes) -> bytes:
    """REDUCE."""
    return function + b"(" + b"".join(arguments) + b"tR"


def raw(value: bytes) -> bytes:
    """BINBYTES."""
    return b"B" + len(value).to_bytes(4, "little") + value


def words(*values: str) -> bytes:
    """A list of strings."""
    return b"](" + b"".join(map(text, values)) + b"e"


def attribute(owner: bytes, name: str) -> bytes:
    """What ``getattr`` finds."""
    return call(named("builtins", "getattr"), owner, text(name))


def method(owner: bytes, name: str, *arguments: bytes) -> bytes:
    """Call a method, by the detour of `operator`."""
    return call(call(named("operator", "methodcaller"), text(name), *arguments), owner)


# Names that act


def _calls(marker: Path) -> dict[str, bytes]:
    """Functions that act, called by their names."""
    shell, python, path = text(f"touch {marker}"), text(script(marker)), text(str(marker))
    touch = words("touch", str(marker))
    return {
        "os.system": call(named("os", "system"), shell),
        "posix.system": call(named("posix", "system"), shell),
        "os.system in protocol 0": b"cos\nsystem\n(V" + f"touch {marker}".encode() + b"\ntR",
        "os.system by STACK_GLOBAL": call(stacked("os", "system"), shell),
        "os.execvp": call(named("os", "execvp"), text("touch"), touch),
        "subprocess.call": call(named("subprocess", "call"), touch),
        "pty.spawn": call(named("pty", "spawn"), touch),
        "builtins.eval": call(named("builtins", "eval"), python),
        "builtins.exec": call(stacked("builtins", "exec"), python),
        "builtins.open": call(named("builtins", "open"), path, text("w")),
        "_io.open": call(named("_io", "open"), path, text("w")),
        "runpy.run_path": call(named("runpy", "run_path"), text(f"{marker}.py")),
        "timeit.timeit": call(named("timeit", "timeit"), python, text("pass"), named("time", "time"), b"K\x01"),
        "cProfile.run": call(named("cProfile", "run"), python, text(f"{marker}.profile")),
        "shutil.copyfile": call(named("shutil", "copyfile"), text(f"{marker}.py"), path),
        "logging.FileHandler": call(named("logging", "FileHandler"), path),
        "zipfile.ZipFile": call(named("zipfile", "ZipFile"), path, text("w")),
        "INST": b"(V" + f"touch {marker}".encode() + b"\nios\nsystem\n",
        "OBJ": b"(" + named("os", "system") + shell + b"o",
    }


def _detours(marker: Path) -> dict[str, bytes]:
    """Functions that act, reached by way of others."""
    shell, python, path = text(f"touch {marker}"), text(script(marker)), text(str(marker))
    system, posix_path = named("os", "system"), named("pathlib", "PosixPath")
    module = call(named("importlib", "import_module"), text("posix"))
    code = raw(marshal.dumps(compile(script(marker), "payload", "exec")))
    made = call(named("types", "FunctionType"), call(named("marshal", "loads"), code), b"}")
    return {
        "builtins.map": call(named("builtins", "list"), call(named("builtins", "map"), system, b"](" + shell + b"e")),
        "__import__ and getattr": call(attribute(call(named("builtins", "__import__"), text("os")), "system"), shell),
        "importlib and attrgetter": call(call(call(named("operator", "attrgetter"), text("system")), module), shell),
        "getattr of a path": call(attribute(posix_path, "touch"), call(posix_path, path)),
        "code.InteractiveInterpreter": method(call(named("code", "InteractiveInterpreter")), "runsource", python),
        "socket.socket": method(call(named("socket", "socket"), b"K\x01"), "bind", path),
        "ctypes.CDLL": call(attribute(call(named("ctypes", "CDLL"), b"N"), "system"), raw(f"touch {marker}".encode())),
        "webbrowser.get": method(call(named("webbrowser", "get"), text("touch %s")), "open", path),
        "functools.partial": call(named("functools", "partial"), system, shell) + b")R",
        "types.FunctionType": made + b")R",
        "a class that is patched": named("argparse", "Namespace")
        + (b"N}" + text("__init__") + system + b"s\x86b")
        + (b"(" + shell + b"tR"),
        "a name with dots": method(call(stacked("collections", "_sys.modules.get"), text("os")), "system", shell),
    }


def _nested(marker: Path) -> dict[str, Payload]:
    """Pickles within pickles."""
    inner = PROTO + call(named("os", "system"), text(f"touch {marker}")) + STOP
    file = call(named("_io", "BytesIO"), raw(_archive(inner)))
    loads_of_torch = named("functools", "partial") + named("torch", "load") + b"\x85}" + text("weights_only") + b"\x89s"
    objects = call(named("_io", "BytesIO"), raw(_array_of_objects(inner)))
    reconstruct = call(
        named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), b"K\x00\x85", raw(b"b")
    )
    return {
        "pickle.loads": Payload(call(named("pickle", "loads"), raw(inner)), acts=True),
        "_pickle.loads": Payload(call(named("_pickle", "loads"), raw(inner)), acts=True),
        "torch.load": Payload(loads_of_torch + b"\x92(" + file + b"tR", acts=True, needs="torch"),
        "torch.storage._load_from_bytes": Payload(
            call(named("torch.storage", "_load_from_bytes"), raw(_archive(inner))), acts=True, needs="torch"
        ),
        "numpy.load": Payload(call(named("numpy", "load"), objects, b"N", b"\x88"), acts=True, needs="numpy"),
        "numpy's arrays": Payload(reconstruct + b"(K\x01K\x01\x85NN]" + text("x") + b"atb", lenient=READ),
        "bytes that are a pickle": Payload(raw(inner), strict=BROKEN, lenient=READ),
    }


def _archive(stream: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def _array_of_objects(stream: bytes) -> bytes:
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + stream


def _named(marker: Path) -> dict[str, Payload]:
    """Names of libraries, and names that look like others."""
    shell = text(f"touch {marker}")
    inert = {
        "a Cyrillic letter": call(stacked("\u043es", "system"), shell),
        "letters of full width": call(stacked("\uff4fs", "system"), shell),
        "a space before": call(named(" os", "system"), shell),
        "a carriage return": b"cos\r\nsystem\r\n(" + shell + b"tR",
        "a NUL": call(stacked("os\0", "system"), shell),
        "megatron": call(named("megatron.core.dist_checkpointing", "load"), shell),
        "_codecs.encode": call(named("_codecs", "encode"), text("x" * 99), text("zip")),
        "copyreg._reconstructor": call(
            named("copyreg", "_reconstructor"), named("a", "B"), named("builtins", "object"), b"N"
        ),
        "a class for itself": named("argparse", "Namespace") + b")\x81}" + text("__class__") + named("a", "B") + b"sb",
        "extra attributes": named("a", "B") + b")\x81}(" + text("__dict__") + b"}" + text("__reduce__") + b"Nub",
    }
    return {
        **{name: Payload(body, lenient=READ) for name, body in inert.items()},
        "no module": Payload(call(named("", "system"), shell), lenient=BROKEN),
        "a library's os": Payload(call(stacked("torch", "os.system"), shell), acts=True, needs="torch"),
        "getattr of a function": Payload(attribute(named("torch._utils", "_rebuild_tensor"), "__globals__")),
        "getattr of a value": Payload(attribute(b"]", "__class__")),
        "getattr with a number": Payload(call(named("builtins", "getattr"), named("torch", "device"), b"K\x01")),
        "STACK_GLOBAL of numbers": Payload(b"K\x01K\x02\x93", strict=BROKEN, lenient=BROKEN),
        "a name that is no text": Payload(b"c\xff\xfe\nx\n", strict=BROKEN, lenient=BROKEN),
    }


# Instructions


def _opcodes() -> dict[str, Payload]:
    """Instructions that nothing needs; whatever they do, it is not asked."""
    streams = {
        "EXT1": b"\x82\x01",
        "EXT2": b"\x83\x01\x00",
        "EXT4": b"\x84\x01\x00\x00\x00",
        "PERSID": b"Pos.system\n",
        "DUP": b"N2",
        "POP": b"NN0",
        "POP_MARK": b"N(N1",
        "PUT": b"Np999999999\n",
        "GET": b"Np0\ng0\n",
        "INT": b"I01\n",
        "STRING": b"S'a'\n",
        "LONG": b"L" + b"9" * 5000 + b"L\n",
        "LONG4": b"\x8b\xff\xff\xff\x7f",
        "BYTEARRAY8": b"\x96" + b"\xff" * 7 + b"\x7f",
        "NEXT_BUFFER": b"\x97",
        "READONLY_BUFFER": b"N\x98",
    }
    return {name: Payload(body) for name, body in streams.items()}


# Allowed names in places where nothing writes them


def _odd() -> dict[str, Payload]:
    """What is allowed, used in ways that nothing writes."""
    rebuild, size = named("torch._utils", "_rebuild_tensor_v2"), named("torch", "Size")
    ordered, device = named("collections", "OrderedDict"), named("torch", "device")
    storage = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    mesh = named("torch.distributed.device_mesh", "DeviceMesh") + b")\x81}"
    spec = named("torch.distributed.tensor._dtensor_spec", "DTensorSpec") + b")\x81}"
    dtensor = named("torch.distributed.tensor", "DTensor")
    broken = {
        "a size of strings": call(size, text("a") + b"\x85"),
        "a size below zero": call(size, b"J\xff\xff\xff\xff\x85"),
        "a dict with arguments": call(ordered, b"]"),
        "the state of a class": device + b"}" + text("__new__") + size + b"sb",
        "the state of a function": size + b"}" + text("__call__") + ordered + b"sb",
        "a call of a value": call(call(device), b"N"),
        "NEWOBJ of a function": size + b")\x81",
        "NEWOBJ_EX with numbers for names": device + b")}K\x01K\x02s\x92",
        "an unhashable key": b"}]Ns",
    }
    # what is built, and no tensor
    values = {
        "a tensor of storages": call(rebuild, storage, storage, storage, storage, b"\x89", call(ordered)),
        "a tensor of itself": rebuild + b"](" + b"K\x00" * 3 + b"e\x94h\x00h\x00h\x00\x87R",
        "a tensor that reaches out": call(
            rebuild, storage, b"K\x00", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", b"K\x01\x85", b"\x89", b"N"
        ),
        "a tensor of a million dimensions": call(
            rebuild, storage, b"K\x00", b"(" + b"K\x01" * 60_000 + b"t", b"(" + b"K\x01" * 60_000 + b"t", b"\x89", b"N"
        ),
        "a persistent id of a list": b"]Q",
        "a persistent id of itself": b"]\x94h\x00aQ",
        "a persistent id, nested": b"(" + text("storage") + storage + text("../../x") + b"NNtQ",
        "a record that names a file": b"(" + text("storage") + named("torch", "FloatStorage") + text("../x") + b"NNtQ",
        "a mesh of objects": dtensor
        + b")\x81}("
        + text("_local_tensor")
        + storage
        + text("_spec")
        + spec
        + text("mesh")
        + mesh
        + text("mesh")
        + b"]sbsbub",
    }
    return {
        **{name: Payload(body, strict=BROKEN, lenient=BROKEN) for name, body in broken.items()},
        **{name: Payload(body, strict=BROKEN, lenient=READ) for name, body in values.items()},
        "a set of lists": Payload(call(named("builtins", "set"), b"]]a"), lenient=BROKEN),
    }


# Much of little


def _doubled(start: bytes, step: bytes, times: int) -> bytes:
    """Each value holds the one before it twice."""
    return start + b"\x94" + b"".join(step.replace(b"#", bytes([n])) + b"\x94" for n in range(times))


def _bombs() -> dict[str, Payload]:
    """Streams that ask for much more than they are."""
    far = (1 << 31).to_bytes(4, "little")
    long = (1 << 40).to_bytes(8, "little")
    bombs = {
        "a memo index of 2^31": b"Nr" + far,
        "a memo index out of order": b"Nq\xff",
        "a memo index that is not there": b"j" + far,
        "a string of a terabyte": b"\x8d" + long,
        "bytes of a terabyte": b"\x8e" + long,
        "a frame that lies": b"\x95" + long,
        "tuples doubled": b"}" + _doubled(b")", b"h#h#\x86", 60) + b"Ns",
        "tuples in a set, doubled": b"\x8f(" + _doubled(b")", b"h#h#\x86", 60) + b"\x90",
        "tuples without end": b"}" + b")" + b"\x85" * 100_000 + b"Ns",
        "frozen sets without end": b"(" * 50_000 + b"\x91" * 50_000,
        "marks without end": b"(" * 500_000,
        "keys of one hash": b"}("
        + b"".join(
            b"\x8a\x02" + bytes([n % 256, n // 256]) + b"\x8a\x02" + bytes([n // 256, n % 256]) + b"\x86N"
            for n in range(3_000)
        )
        + b"u",
        "a name without end": b"ctorch\n" + b"a" * 500_000 + b"\n",
        "a number of 200 bytes": b"\x8a\xc8" + b"\xff" * 200,
    }
    deep = {
        "lists doubled": _doubled(b"]", b"](h#h#e", 60),
        "lists without end": b"]" * 100_000 + b"a" * 99_999,
        "dicts without end": b"}" + (text("a") + b"}") * 50_000 + b"s" * 50_000,
        "a list that holds itself": b"]\x94h\x00a",
        "a dict that holds itself": b"}\x94" + text("a") + b"h\x00s",
        "a state that holds itself": named("torch", "device") + b")\x81\x94}" + text("a") + b"h\x00sb",
    }
    return {
        **{name: Payload(body, strict=BROKEN, lenient=BROKEN) for name, body in bombs.items()},
        **{name: Payload(body, strict=BROKEN, lenient=READ) for name, body in deep.items()},
        "too many names": Payload(
            b"](" + b"".join(f"cm\nx{n}\n".encode() for n in range(9_000)) + b"e", lenient=BROKEN
        ),
        "no end": Payload(PROTO + b"N", strict=BROKEN, lenient=BROKEN, whole=True),
        "nothing": Payload(b"", strict=BROKEN, lenient=BROKEN, whole=True),
    }


# Whether they would act


def goes_off(payload: Payload, marker: Path) -> bool:
    """Load it as a careless reader would, in a child; tell whether the marker appeared."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            pickle.loads(payload.stream)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    went_off = marker.exists()
    marker.unlink(missing_ok=True)
    return went_off
