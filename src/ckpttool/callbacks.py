"""What other programs implement and call: an event of a training run, and a callback that acts on it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

from ckpttool.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint that is finished: whole by the signal of the program that wrote it, and by its structure.

    ``run`` is the directory of the run, ``name`` the path of the checkpoint below it (``global_step_20/actor``), both
    without links resolved. ``path`` is where actions read: the checkpoint itself, or a tree of hard links to its files
    that the trainer's retention cannot pull away; ``original`` is the checkpoint in either case. ``role`` is empty
    where a step has no roles, ``kind`` the word that ``inspect`` has for it (``fsdp``, ``torch_dist``). ``attempt``
    counts from 1: a higher one was begun before, and failed or was killed, so that what it writes may be there
    already. ``rewritten`` tells that the trainer has saved this step anew since actions were done on it.
    """

    run: str
    name: str
    path: str
    original: str
    step: int
    role: str = ""
    kind: str = ""
    attempt: int = 1
    rewritten: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class CheckpointCallback:
    """A callback that does nothing. Override what you need, and take ``**kwargs``: more may be told one day."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def on_save(self, event: CheckpointEvent, **kwargs: Any) -> None:
        """Act on a checkpoint that is finished; whatever is raised is a failure of the action."""


def load_callback(name: str, config: Any = None) -> CheckpointCallback:
    """Return a callback made of the class that ``pkg.module:Class`` or ``pkg.module.Class`` names.

    It is made as ``Class(config=config)``, or as ``Class()`` where it takes none and none is given; it need not be a
    :class:`CheckpointCallback`. Raises :class:`UsageError` with the reason where that cannot be, or where its
    ``on_save`` could not be called with an event: before anything is trained or watched.
    """
    found = _named(name)
    if not isinstance(found, type):
        raise UsageError(f"{name}: no class ({type(found).__name__})", hint="The class itself is to be named.")
    made = _made(name, found, config)
    _check_on_save(name, getattr(made, "on_save", None))
    return cast(CheckpointCallback, made)


def tell(callback: CheckpointCallback, event: CheckpointEvent) -> None:
    """Call a callback with an event, by keyword where it takes it so alone."""
    if _takes(callback.on_save, event) or not _takes(callback.on_save, event=event):
        callback.on_save(event)
    else:
        callback.on_save(event=event)


def search_here(run: Path | str) -> bool:
    """Have modules found in the working directory, too, after all others; tell whether they are.

    They are not where it is, or lies in, the run that is watched: nothing of a checkpoint is executed.
    """
    if works_in(run):
        return False
    here = str(Path.cwd().resolve())
    if here not in sys.path:
        sys.path.append(here)
    return True


def works_in(run: Path | str) -> bool:
    """Tell whether the working directory is, or lies in, a run."""
    here, there = Path.cwd().resolve(), Path(run).resolve()
    return there in (here, *here.parents)


def _named(name: str) -> Any:
    """Import what a name means, module by module, then look up what remains of it in the last."""
    module, colon, path = name.partition(":")
    words = [*module.split("."), *(path.split(".") if colon else ())]
    if not all(word.isidentifier() for word in words) or len(words) < 2:
        hint = "A class is named like pkg.module:Class"
        raise UsageError(f"callback {name!r}: no name of a class", hint=f"{hint}{_NO_FILE if '/' in name else ''}.")
    modules = module.split(".")
    for count in [len(modules)] if colon else range(len(words) - 1, 0, -1):
        found = _imported(name, ".".join(words[:count]))
        if found is not None:
            return _looked_up(name, found, words[count:])
    missing = next(part for part in _beginnings(modules) if _imported(name, part) is None)
    around, _, last = missing.rpartition(".")
    hint = f"Where it lies has to be on PYTHONPATH, or it has to be installed{_NO_FILE if 'py' in words else ''}."
    raise UsageError(
        f"{name}: no module {missing}",
        hint=(_close(last, sys.modules[around]) if around else "") or hint,
        code="no-module",
    )


def _close(word: str, found: Any) -> str:
    """Name what a class, a module or a package has that is called alike; nothing where there is nothing."""
    inside = (module.name for module in pkgutil.iter_modules(getattr(found, "__path__", ())))
    close = get_close_matches(word, {*dir(found), *inside}, 3)
    return f"There is {', '.join(close)}." if close else ""


_NO_FILE = ", by the name of its module, not of a file"


def _beginnings(words: Sequence[str]) -> Iterator[str]:
    yield from (".".join(words[:count]) for count in range(1, len(words) + 1))


def _imported(name: str, module: str) -> Any:
    """Import a module; ``None`` where there is none. Raises :class:`UsageError` where importing it fails."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name in tuple(_beginnings(module.split("."))):
            return None
        raise _import_failed(name, module, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, module, error) from error


def _import_failed(name: str, module: str, error: BaseException) -> UsageError:
    if isinstance(error, SystemExit):
        return UsageError(f"{name}: {module} ends the program when it is imported{_place(error)}")
    return UsageError(f"{name}: {module} cannot be imported: {said(error)}{_place(error)}", code="import-failed")


def said(error: BaseException) -> str:
    """Write an exception in a line: its type, and its text where it has one."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def theirs(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception from the first frame on that is neither ours nor of Python's import."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    return Path(__file__).parent in Path(file).parents or file == importlib.__file__ or file.startswith("<frozen")


def _place(error: BaseException) -> str:
    """Say which line an exception comes from, where it does not say it itself."""
    frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(theirs(error))
    last = next((frame for frame in reversed(frames) if not _is_ours(frame.filename)), None)
    return f" ({last.filename}, line {last.lineno})" if last is not None else ""


def _looked_up(name: str, found: Any, words: Sequence[str]) -> Any:
    for word in words:
        where = found
        try:
            found = getattr(found, word)
        except AttributeError as error:
            what = "module" if isinstance(where, ModuleType) else "class"
            message = f"{name}: no {word} in {what} {where.__name__}"
            raise UsageError(message, hint=_close(word, where), code="no-class") from error
        except Exception as error:  # of a module that makes its names when they are asked for
            raise _import_failed(name, f"{where.__name__}.{word}", error) from error
    return found


def _made(name: str, kind: type, config: Any) -> Any:
    given = not (config is None or (isinstance(config, Mapping) and not config))
    arguments = {} if not given and not _takes(kind, config=config) else {"config": config}
    if not _takes(kind, **arguments):
        raise UsageError(
            f"{name}: cannot be made as {kind.__name__}({'config=...' if arguments else ''})",
            hint=f"It is {kind.__name__}{inspect.signature(kind)}; it may take config=None.",
        )
    try:
        return kind(**arguments)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}: cannot be made: {said(error)}{_place(error)}", code="not-made") from error


_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _check_on_save(name: str, on_save: Any) -> None:
    """Raise :class:`UsageError` for what is no ``on_save(event, **kwargs)``, or would do nothing when it is called."""
    hint = "It is called as on_save(event), one day perhaps with more: def on_save(self, event, **kwargs)."
    if not callable(on_save):
        raise UsageError(f"{name}: has no method on_save", hint=hint)
    if any(test(on_save) for test in _LATER):
        raise UsageError(f"{name}: on_save is asynchronous or a generator: a call of it does nothing", hint=hint)
    event = CheckpointEvent(run="", name="", path="", original="", step=0)
    if not _takes(on_save, event) and not _takes(on_save, event=event):
        raise UsageError(f"{name}: on_save{inspect.signature(on_save)} does not take an event alone", hint=hint)


def _takes(function: Callable[..., Any], *words: Any, **named: Any) -> bool:
    """Tell whether a call with these arguments is possible; where Python cannot say, it is."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return True
    try:
        signature.bind(*words, **named)
    except TypeError:
        return False
    return True
