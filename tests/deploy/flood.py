"""`python flood.py HOST PORT`: one ZeroMQ message of endlessly many parts, until the other side is gone.

Standard library alone: libzmq itself would keep the parts until the last one. ZMTP 3.0, https://rfc.zeromq.org/spec/23/
"""

import socket
import struct
import sys

PART = 2**20
MOST = 2000
"""Parts; more than any limit that a test sets."""


def property_of(name, value):
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def flood(host, port):
    """Return how many parts went out."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + property_of(b"Socket-Type", b"DEALER") + property_of(b"Identity", b"")
    with socket.create_connection((host, port), 10) as stream:
        stream.sendall(greeting)
        answer = b""
        while len(answer) < len(greeting):
            part = stream.recv(len(greeting) - len(answer))
            if not part:  # it wants keys
                return 0
            answer += part
        stream.sendall(b"\x04" + bytes([len(ready)]) + ready)
        for sent in range(MOST):
            try:
                stream.sendall(b"\x03" + struct.pack(">Q", PART) + bytes(PART))  # long, more to come
            except OSError:
                return sent
    return MOST


if __name__ == "__main__":
    print(flood(sys.argv[1], int(sys.argv[2])))
