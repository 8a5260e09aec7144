"""Work on requests in processes of their own: `python -m seer.gateway.jobs FD MODEL TRUST CPU_SECONDS`.

One process reads tokenizer and processor, and forks another process for each job. A fork takes 10 ms, and the
forked process can be ended at any moment.

Invariants (tests/unit/test_gateway_jobs.py):
- a job ends when its asker closes the connection, after `CPU_SECONDS` of a core or ten times as long, and if
  it takes more than `MEMORY` bytes, also within a call into C that holds the interpreter;
- whatever a job is given, its answer is a result, or an error with status, message and field, or none: the
  job was ended;
- the process that forks has one thread, and does no job itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec

from seer.common.errors import SeerError
from seer.gateway.errors import HttpError, as_http
from seer.gateway.image_processor import ImageProcessor
from seer.gateway.text import ModelText

CPU_SECONDS = 20
"""Longest that a job may work: the largest images take seconds, a text of a million tokens one."""

MEMORY = 4 * 2**30
"""Bound on what a job takes. Bytes."""


class Answer(msgspec.Struct, array_like=True):
    """`status` 200, or an error."""

    result: Any = None
    status: int = 200
    error: str = ""
    param: str | None = None


def not_taken(field: str, error: Exception) -> HttpError:
    """Return what a client is told of an error that a library raised for its values."""
    said = f"{field}: cannot be taken: {type(error).__name__}: {error}"[:1000]
    return HttpError(400, said.encode(errors="replace").decode(), field)


class Jobs:
    """What can be asked for, by name."""

    def __init__(self, text: ModelText, images: ImageProcessor) -> None:
        self._text = text
        self._images = images

    def answer(self, request: bytes) -> Answer:
        """Do a job: its field, its name, its arguments."""
        field, name, arguments = msgspec.msgpack.decode(request)
        try:
            return Answer(self._done(name, *arguments))
        except SeerError as error:
            told = as_http(error)
            return Answer(None, told.status, str(told).encode(errors="replace").decode(), told.param or field)
        except Exception as error:  # noqa: BLE001 - libraries say no in their own ways
            return Answer(None, 400, str(not_taken(field, error)), field)

    def _done(self, name: str, *arguments: Any) -> object:  # noqa: ANN401 - of this program's own
        match name, arguments:
            case "pixels", [files]:  # of images, none of which is decoded: names of fields, and files
                return self._images.pixels(files)
            case "image", [where, data]:  # an image's name and bytes, and what made it
                image = self._images.prepared(where, data)
                return image.name, image.data.tobytes(), self._images.made_by
            case _:
                return text_work(self._text, name, *arguments)


def text_work(text: ModelText, name: str, *arguments: Any) -> object:  # noqa: ANN401 - of this program's own
    """Do the work of this name on text, here or as a job."""
    match name, arguments:
        case "chat", [messages, options, special]:  # a chat's token ids; `options` are of `ModelText.render`
            return text.encode(text.render(messages, **options), special=special)
        case "encode", [texts, special]:  # the token ids of each text
            return [text.encode(each, special=special) for each in texts]
        case "tokens", [token_ids]:  # each token's own text
            return text.tokens(token_ids)
        case "decode", [token_ids]:  # the text of tokens
            return text.decode(token_ids)
    raise SeerError(f"unknown job {name}")


def _serve(jobs: Jobs, end: socket.socket, seconds: int) -> None:
    """Do the one job that comes over a connection, in a process of its own."""
    request = bytearray()
    while part := end.recv(2**20):
        request += part
    os.nice(5)  # the event loop goes first
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY,) * 2)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    # SIGIO comes when the asker closes the connection, and its default is to end the process.
    flags = fcntl.fcntl(end, fcntl.F_GETFL)
    fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(end, fcntl.F_SETFL, flags | os.O_ASYNC)
    gone = select.poll()
    gone.register(end, 0)
    if gone.poll(0):
        return
    answer = msgspec.msgpack.encode(jobs.answer(bytes(request)))
    fcntl.fcntl(end, fcntl.F_SETFL, flags)
    end.sendall(answer)


def _data_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 2**33


def main(control: socket.socket, model: str, *, trust: bool, seconds: int) -> None:
    """Fork for each connection that comes over `control`, until that is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # who started this closes `control`
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # PIL has one for each tag of a bad file
    jobs = Jobs(ModelText.load(model, trust_templates=trust), ImageProcessor.load(model))
    gc.collect()
    gc.freeze()
    while True:
        message, fds, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            try:
                control.close()
                _serve(jobs, socket.socket(fileno=fds[0]), seconds)
            finally:
                os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        main(given, sys.argv[2], trust=sys.argv[3] == "1", seconds=int(sys.argv[4]))
