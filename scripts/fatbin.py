"""Cut a CUDA library down to the machine code of one GPU architecture.

A library holds its kernels in fatbin containers: a header of 16 bytes (magic, version, size), then one entry for each
architecture. Each container keeps its place, entries of other architectures go, and its size says so. Nothing else in
the file moves; what is left behind the kept entries is zeros, which compress to nothing.
"""

from __future__ import annotations

import struct

from scripts.console import SetupError

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of the entry's header, size of its code
_ARCHITECTURE = 28  # offset in an entry, 4 bytes
_CUBIN = 2  # kind: machine code; 1 is PTX


def one_architecture(library: bytes, sm: int) -> bytes:
    """The library with the machine code of sm_<sm> alone, as long as before. Raises SetupError for a container without
    it."""
    data, place = bytearray(library), 0
    while (place := data.find(_MAGIC, place)) >= 0:
        _, version, header, size = _HEADER.unpack(data[place : place + _HEADER.size].ljust(_HEADER.size, b"\0"))
        begin, end = place + header, place + header + size
        if version != 1 or header != _HEADER.size or end > len(data):
            place += len(_MAGIC)
            continue
        entries, at = b"", begin
        while at < end:
            kind, _, head, code = _ENTRY.unpack_from(data, at)
            (found,) = struct.unpack_from("<I", data, at + _ARCHITECTURE)
            if kind == _CUBIN and found == sm:
                entries += data[at : at + head + code]
            if not head:
                raise SetupError(f"the library holds something else than code at byte {at}")
            at += head + code
        if not entries:
            raise SetupError(f"the library has no machine code for sm_{sm}")
        data[begin:end] = entries.ljust(size, b"\0")
        struct.pack_into("<Q", data, place + 8, len(entries))
        place = end
    return bytes(data)
