"""Times what HTTP clients may send at its worst: images of every format, bodies of many values.

`python bench/services/http_bodies.py` prints, for each, its bytes and its seconds: `loop`, in the gateway's
own process, where no other request goes on meanwhile, or `apart`, in a process that can be ended; or that it
is refused. The ratio is to an ordinary one of its kind in the same run.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.hardware import machine

from seer.client.image_files import decoded, opened
from seer.common.errors import SeerError
from seer.gateway.request_bodies import ChatBody, CompletionBody, read_body

MI = 2**20


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return the file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, color: int, numbers: int, interlaced: int) -> bytes:
    """Return a PNG of zeros, each row by the filter that costs most."""
    head = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, interlaced)
    rows = zlib.compress((b"\4" + bytes(width * numbers)) * height * (1 + interlaced), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND")


def images() -> dict[str, bytes]:
    """Return files by name; the first is an ordinary one: a screen."""
    side = 5792
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8))
    flat = Image.new("RGB", (side, side))
    scans, small = saved(flat, "JPEG", progressive=True), saved(noise.crop((0, 0, 8, 8)), "PNG")
    last = scans[scans.rindex(b"\xff\xda") : -2]
    tables = (b"\xff\xdb\0\x43\0" + b"\1" * 64) * 65_000
    jpeg = saved(noise.crop((0, 0, 8, 8)), "JPEG")
    entries = b"".join(struct.pack("<HHII", 1000 + each, 7, 10**6, 40) for each in range(60_000))
    exif = struct.pack("<2sHIHHHII", b"II", 42, 8, 60_001, 0x0112, 3, 1, 6) + entries + bytes(10**6)
    return {
        "screen, PNG": saved(noise.crop((0, 0, 1920, 1080)), "PNG"),
        "PNG, most pixels": png(side, side, 6, 4, 0),
        "PNG, interlaced": png(side, side, 2, 3, 1),
        "PNG, a column": png(1, side * side, 2, 3, 0),
        "PNG, most chunks": small[:33] + chunk(b"abCd", bytes(488)) * 65_000 + small[33:],
        "PNG, EXIF": small[:33] + chunk(b"eXIf", exif) + small[33:],
        "JPEG, most pixels": saved(noise, "JPEG", progressive=True, quality=60),
        "JPEG, four colors": saved(
            noise.convert("CMYK"), "JPEG", progressive=True, quality=30, subsampling=0
        ),
        "JPEG, most scans": scans[:-2] + last * 21 + b"\xff\xd9",
        "JPEG, most tables": jpeg[:2] + tables + jpeg[2:],
        "JPEG, 500 scans": scans[:-2] + last * 490 + b"\xff\xd9",
        "WebP, most pixels": saved(noise, "WEBP", quality=50, method=0),
        "WebP, lossless": saved(noise.crop((0, 0, 3300, 3300)), "WEBP", lossless=True, method=0, quality=0),
    }


def bodies() -> dict[str, tuple[type, bytes]]:
    """Return bodies by name; the first is an ordinary one: a prompt of 4,096 tokens."""

    def many(before: bytes, each: bytes, count: int, after: bytes) -> bytes:
        return before + b",".join([each] * count) + after

    biases = b",".join(b'"%d":1' % token for token in range(MI // 2 - 8))
    messages = many(b'{"messages":[', b'{"role":"a"}', MI // 4 - 4, b"]}")
    return {
        "4,096 tokens": (CompletionBody, many(b'{"prompt":[', b"12345", 4096, b"]}")),
        "most tokens": (CompletionBody, many(b'{"prompt":[', b"12345", 3 * MI - 4, b"]}")),
        "too many tokens": (CompletionBody, many(b'{"prompt":[', b"1", 15 * MI, b"]}")),
        "most arrays": (CompletionBody, many(b'{"prompt":"a","x":[', b"[]", MI // 2 - 4, b"]}")),
        "most messages": (ChatBody, messages),
        "most biases": (CompletionBody, b'{"prompt":"a","logit_bias":{' + biases + b"}}"),
        "ten million arrays": (CompletionBody, many(b'{"prompt":"a","x":[', b"[]", 10 * MI, b"]}")),
        "a text of 32 MiB": (CompletionBody, b'{"prompt":"' + b"a" * (32 * MI - 20) + b'"}'),
        "escapes": (CompletionBody, b'{"prompt":"' + b"\\u1234" * (5 * MI) + b'"}'),
    }


def timed(work: Callable[[], object], size: int) -> dict[str, object]:
    began = time.perf_counter()
    refused = ""
    try:
        work()
    except SeerError as error:
        refused = str(error)
    seconds = round(time.perf_counter() - began, 4)
    return {"bytes": size, "seconds": seconds} | ({"refused": refused} if refused else {})


def read(kind: type, body: bytes) -> None:
    """Do what the event loop does with a body, before it is submitted."""
    found = read_body(kind, body)
    found.sampling("scaled")
    if isinstance(found, CompletionBody):
        for prompt in found.prompts():
            if isinstance(prompt, list):
                min(prompt), max(prompt), np.asarray(prompt, np.int32)


def main() -> None:
    """Print it."""
    warnings.simplefilter("ignore")
    shown: dict[str, Any] = {"machine": machine(), "apart": {}, "loop": {}}
    for name, data in images().items():
        shown["apart"][name] = timed(lambda data=data: decoded(opened(data, "f"), "f"), len(data))
    for name, (kind, body) in bodies().items():
        shown["loop"][name] = timed(lambda kind=kind, body=body: read(kind, body), len(body))
    for kind in ("apart", "loop"):
        ordinary = next(iter(shown[kind].values()))["seconds"]
        longest = max(each["seconds"] for each in shown[kind].values())
        shown[f"longest, {kind}"] = {"seconds": longest, "ratio": round(longest / ordinary, 1)}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
