"""Cuts the GPU code in shared libraries down to what one GPU runs.

A library has its kernels in sections of containers, each with the same kernels compiled for several
architectures, as machine code (cubin) or as PTX. Public tools list them (`cuobjdump`), but none cuts a linked
library: `nvprune` takes objects and static libraries alone.

Invariants:
- every container stays at its address, with at least one entry, so that nothing else in the library changes;
- machine code that the GPU runs is kept, else the newest PTX that it may compile, else the smallest entry;
- what is dropped becomes zeros, which compress to nothing; the file's size stays the same;
- anything that is not such a container is an error, never skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes behind it
_ARCH_AT = 0x1C
"""Where an entry's header has its architecture, uint32: 90 for sm_90 and sm_90a."""


@dataclass(frozen=True)
class Entry:
    """Code for one architecture; `at` and `size` in bytes, with its header."""

    at: int
    size: int
    kind: int
    arch: int


def sections(elf: bytes | bytearray) -> Iterator[tuple[str, int, int]]:
    """Yield name, place and bytes of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    found = [struct.unpack_from("<IIQQQQ", elf, table + row * size) for row in range(count)]
    for name, _, _, _, at, length in found:
        begin = found[names][4] + name
        yield elf[begin : elf.index(b"\0", begin)].decode(), at, length


def containers(elf: bytes | bytearray, at: int, size: int) -> Iterator[tuple[int, int, list[Entry]]]:
    """Yield place, end and entries of each container of a section. Raises `ValueError` for anything else."""
    end = at + size
    while at < end:
        if not any(elf[at : at + 8]):  # padding
            at += 8
            continue
        magic, _, header, length = _CONTAINER.unpack_from(elf, at)
        stop = at + header + length
        if magic != MAGIC or stop > end:
            raise ValueError(f"no container of GPU code at byte {at}")
        entries, place = [], at + header
        while place < stop:
            kind, _, head, payload = _ENTRY.unpack_from(elf, place)
            (arch,) = struct.unpack_from("<I", elf, place + _ARCH_AT)
            entries.append(Entry(place, head + payload, kind, arch))
            place += head + payload
        if place != stop:
            raise ValueError(f"the entry of GPU code before byte {place} ends beyond its container")
        yield at, stop, entries
        at = stop


def runs_on(entries: list[Entry], arch: int) -> list[Entry]:
    """Return those that a GPU of this architecture needs; see the module."""
    same = [each.arch for each in entries if each.kind == CUBIN and arch // 10 * 10 <= each.arch <= arch]
    if same:
        return [each for each in entries if each.kind == CUBIN and each.arch == max(same)]
    older = [each.arch for each in entries if each.kind == PTX and each.arch <= arch]
    if older:
        return [each for each in entries if each.kind == PTX and each.arch == max(older)]
    return [min(entries, key=lambda each: each.size)] if entries else []


def cut(elf: bytearray, arch: int) -> tuple[int, int]:
    """Cut a library in place; return the bytes of GPU code before and after, 0 if it is none or has none."""
    before = after = 0
    if elf[:5] != b"\x7fELF\x02":
        return 0, 0
    for name, at, size in sections(elf):
        for begin, stop, entries in containers(elf, at, size) if name in SECTIONS else ():
            kept = b"".join(bytes(elf[each.at : each.at + each.size]) for each in runs_on(entries, arch))
            magic, version, header, length = _CONTAINER.unpack_from(elf, begin)
            _CONTAINER.pack_into(elf, begin, magic, version, header, len(kept))
            elf[begin + header : stop] = kept.ljust(length, b"\0")
            before, after = before + length, after + len(kept)
    return before, after
