"""Cut a CUDA library down to the machine code of one GPU architecture.

A library holds its kernels in fatbin containers: a header of 16 bytes (magic, version, size), then one entry for each
architecture. Containers stay at their offsets. Entries of other architectures are removed, the size in the header is
updated, and the rest of the container is filled with zeros, which compress well.
"""

from __future__ import annotations

import struct

from scripts.console import SetupError

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, size of the entry's header, size of its code
_ARCHITECTURE = 28  # offset of the architecture in an entry, 4 bytes
_CUBIN = 2  # kind: machine code; 1 is PTX


def one_architecture(library: bytes, sm: int) -> bytes:
    """Return the library with the machine code of sm_<sm> only, at its original length. Raises SetupError for a
    container without this architecture."""
    data, start = bytearray(library), 0
    while (start := data.find(_MAGIC, start)) >= 0:
        _, version, header, size = _HEADER.unpack(data[start : start + _HEADER.size].ljust(_HEADER.size, b"\0"))
        begin, end = start + header, start + header + size
        if version != 1 or header != _HEADER.size or end > len(data):
            start += len(_MAGIC)
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
        struct.pack_into("<Q", data, start + 8, len(entries))
        start = end
    return bytes(data)
