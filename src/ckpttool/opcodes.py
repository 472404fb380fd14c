"""The opcodes of a pickle, walked without building anything: what C's unpickler must not be trusted with.

Opcodes that no checkpoint has are refused. Every length and memo index is held against the stream, because C's
unpickler allocates what it is told to; tuples are weighed, because it hashes and compares nested ones without a bound.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Hashable, Iterable

from ckpttool.errors import BrokenCheckpoint, Refused

Check = Callable[[str, str], None]

WEIGHT_LIMIT = 1 << 18
"""Most elements that a (nested) tuple may have; each level of nesting counts as 64."""

_NESTING = 64

KEYS_LIMIT = 1 << 16
"""Most elements in all tuples together that are keys of dicts or elements of sets: their hashes can be made equal,
and then each is compared with every other."""

_LONG_MOST = 9  # bytes of an integer: the hashes of longer ones can be made equal as well

# What each opcode does, by kind: the frequent ones first, because the loop below asks in this order.
_GET1, _PUSHN, _MEMOIZE, _GET4, _TUPLE_N, _PUSH0 = range(6)
_TO_MARK, _BUILD, _MARK, _CALL, _PUT1, _COUNTED, _TUPLE, _GLOBAL = range(6, 14)
_POP1, _POP2, _PERSID, _STACK_GLOBAL, _NEWOBJ_EX, _PROTO, _FRAME, _STOP, _LONG = range(14, 23)
_KINDS: dict[int, bytes] = {
    _MEMOIZE: b"\x94",
    _GET1: b"h",
    _GET4: b"j",
    _PUSH0: b"N\x88\x89]})\x8f",  # None, booleans, empty list, dict, tuple and set
    _MARK: b"(",
    _BUILD: b"b",
    _CALL: b"R\x81",  # REDUCE, NEWOBJ
    _TO_MARK: b"ue\x90",  # SETITEMS, APPENDS, ADDITEMS
    _TUPLE_N: b"\x85\x86\x87",
    _PUT1: b"q",
    _COUNTED: b"X\x8c\x8dBC\x8e",  # strings, bytes
    _TUPLE: b"t\x91",  # TUPLE, FROZENSET
    _PUSHN: b"KMJG",  # BININT1, BININT2, BININT, BINFLOAT
    _POP1: b"a",  # APPEND
    _POP2: b"s",  # SETITEM
    _PERSID: b"Q",
    _GLOBAL: b"c",
    _STACK_GLOBAL: b"\x93",
    _NEWOBJ_EX: b"\x92",
    _PROTO: b"\x80",
    _FRAME: b"\x95",
    _STOP: b".",
    _LONG: b"\x8a",  # LONG1
}
_KIND = [next((kind for kind, ops in _KINDS.items() if op in ops), 99) for op in range(256)]
_FOUR = struct.Struct("<I")
_COUNT_BYTES = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1, 0x8E: 8}
_PUSHN_BYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4, 0x47: 8}
# Two idioms of protocol 4 make up most of a large .metadata; each is one step of the loop.
_NEW_OBJECT = b")\x81\x94}\x94("  # no arguments, NEWOBJ, its state dict, a mark
_CALL_WITH_TUPLE = b"\x94\x85\x94R\x94"  # after a tuple: the tuple as only argument, REDUCE (torch.Size)


def damaged(where: str, why: object) -> BrokenCheckpoint:
    """Return the error for a pickle that cannot be read."""
    return BrokenCheckpoint(f"{where}: not a readable pickle ({why})", code="unreadable-pickle")


KEPT_LENGTH, KEPT_STREAMS = 2 << 20, 4
"""Longest stream that is kept for comparison, and how many are."""

_passed: dict[tuple[Hashable, int], tuple[bytes, bytes]] = {}
"""Streams that have passed, and where their small numbers are; both packed."""


def vet(data: bytes, check: Check, where: str, *, rules: Hashable = None) -> None:
    """Walk the opcodes of a pickle once and raise unless C's unpickler can be trusted with it.

    ``check(module, name)`` is asked about every name that is spelt out in the stream; ``rules`` stands for what it
    answers. The files of several ranks often differ in a few small numbers only: the walk does not look at the
    argument of BININT1, so a stream that differs nowhere else from one that passed under the same rules has passed.
    The stack holds one number a value: how many elements hashing it may visit. Where this walk and C's unpickler
    would disagree about the stack (an item taken from below a mark), C's raises; POP, whose meaning depends on
    marks, is refused.
    """
    kept = len(data) <= KEPT_LENGTH and rules is not None
    key = (rules, len(data))
    if kept and key in _passed and _differ_in_numbers(data, *_passed[key]):
        return
    numbers = bytearray(len(data)) if kept else None
    try:
        _walk(data, check, where, numbers)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise damaged(where, "it ends too early or its stack runs empty") from error
    if numbers is not None:
        while len(_passed) >= KEPT_STREAMS:
            del _passed[next(iter(_passed))]
        _passed[key] = (zlib.compress(data, 1), zlib.compress(numbers, 1))


def _differ_in_numbers(data: bytes, other: bytes, numbers: bytes) -> bool:
    """Tell whether two streams of one length differ in nothing but bytes where ``numbers`` has all bits set."""
    both = int.from_bytes(data, "little") ^ int.from_bytes(zlib.decompress(other), "little")
    return both & ~int.from_bytes(zlib.decompress(numbers), "little") == 0


def _walk(data: bytes, check: Check, where: str, numbers: bytearray | None) -> None:  # noqa: C901
    """One loop, on purpose: the metadata of 1,024 ranks has ten million opcodes.

    Where the argument of a BININT1 is, ``numbers`` gets all bits set.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    hashed = 0
    push, pop, remember = stack.append, stack.pop, memo.append
    number, four, kinds, size, at = int.from_bytes, _FOUR.unpack_from, _KIND, len(data), 0
    while True:  # the end of the data raises IndexError
        op = data[at]
        at += 1
        if op == 0x72:  # LONG_BINPUT: protocol 2 has one after almost every other opcode
            (index,) = four(data, at)
            at += 4
            if index == len(memo):
                remember(stack[-1])
            else:
                _put(memo, index, stack[-1], where)
            continue
        kind = kinds[op]
        if kind < _TO_MARK:
            if kind == _GET1:
                push(memo[data[at]])
                at += 1
            elif kind == _PUSHN:
                if op == 0x4B and numbers is not None:
                    numbers[at] = 0xFF
                push(1)
                at += _PUSHN_BYTES[op]
            elif kind == _MEMOIZE:
                remember(stack[-1])
            elif kind == _GET4:
                push(memo[four(data, at)[0]])
                at += 4
            elif kind == _TUPLE_N:
                weight = _NESTING + pop()
                for _ in range(op - 0x85):
                    weight += pop()
                if data[at] == 0x94 and data[at : at + 5] == _CALL_WITH_TUPLE:
                    memo += (weight, weight, weight)
                    at += 5
                    stack[-1] = weight
                else:
                    push(weight)
                if weight > WEIGHT_LIMIT:
                    raise damaged(where, "a tuple is nested or filled beyond reason")
            elif op == 0x29 and data[at - 1 : at + 5] == _NEW_OBJECT:
                stack[-1] = 1
                memo += (1, 1)
                at += 5
                push(1)
                marks.append(len(stack))
            else:  # PUSH0
                push(1)
        elif kind < _POP1:
            if kind == _TO_MARK:
                start = marks.pop()
                keys = stack[start::2] if op == 0x75 else stack[start:] if op == 0x90 else ()
                if keys and max(keys) > 1:
                    hashed = _weigh_keys(hashed, keys, where)
                del stack[start:]
            elif kind == _BUILD:
                pop()
            elif kind == _MARK:
                marks.append(len(stack))
            elif kind == _CALL:
                weight = pop()
                stack[-1] = weight
            elif kind == _PUT1:
                _put(memo, data[at], stack[-1], where)
                at += 1
            elif kind == _COUNTED:
                width = _COUNT_BYTES[op]
                at += width + number(data[at : at + width], "little")
                push(1)
            elif kind == _TUPLE:
                start = marks.pop()
                weight = _NESTING + sum(stack[start:])
                stack[start:] = (weight,)
                if weight > WEIGHT_LIMIT:
                    raise damaged(where, "a tuple is nested or filled beyond reason")
            else:  # GLOBAL
                at = _vet_global(data, at, check, where)
                push(1)
        elif kind == _POP1:
            pop()
        elif kind == _POP2:
            pop()
            hashed = _weigh_keys(hashed, (pop(),), where)
        elif kind == _PERSID:
            stack[-1] = 1
        elif kind == _STACK_GLOBAL:  # find_class checks the names
            pop()
            stack[-1] = 1
        elif kind == _NEWOBJ_EX:
            pop()
            weight = pop()
            stack[-1] = weight
        elif kind == _PROTO:
            at += 1
        elif kind == _FRAME:
            if number(data[at : at + 8], "little") > size - at - 8:
                raise IndexError
            at += 8
        elif kind == _LONG:
            if data[at] > _LONG_MOST:
                raise damaged(where, f"an integer of {data[at]} bytes")
            at += 1 + data[at]
            push(1)
        elif kind == _STOP:
            return
        elif not _opcode_name(op):
            raise damaged(where, f"byte {op:#x} at {at - 1:,} is no instruction")
        else:
            raise Refused(
                f"{where}: the pickle has the opcode {_opcode_name(op)}, which no checkpoint needs",
                hint="Nothing was run; find out who wrote this file.",
            )


def _weigh_keys(hashed: int, keys: Iterable[int], where: str) -> int:
    hashed += sum(weight for weight in keys if weight > 1)
    if hashed > KEYS_LIMIT:
        raise damaged(where, "it has more tuples for keys than any checkpoint")
    return hashed


def _put(memo: list[int], index: int, weight: int, where: str) -> None:
    """Picklers number their memo in sequence; C's unpickler would grow its own to any index."""
    if index > len(memo):
        raise damaged(where, f"memo index {index} out of sequence")
    memo[index : index + 1] = [weight]


def _vet_global(data: bytes, at: int, check: Check, where: str) -> int:
    lines = data[at : at + 1024].split(b"\n", 2)
    if len(lines) < 3:
        raise IndexError
    module, name = lines[0].decode(), lines[1].decode()
    check(module, name)
    return at + len(lines[0]) + len(lines[1]) + 2


def _opcode_name(op: int) -> str:
    import pickletools

    known = pickletools.code2op.get(chr(op))  # type: ignore[attr-defined]
    return known.name if known else ""
