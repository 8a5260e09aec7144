"""Every kind of file that Seer reads: what whole ones look like, and what reads them, in this process."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from logged_buffer import LoggedBuffer
from process.file_mutations import BINARY, JSON, TEXT, Mutation, changed, some_bytes

from seer.client.results import Group, Response
from seer.client.text import load_tokenizer
from seer.client.turns.turn_journal import Journal as Answers
from seer.common import config as configuration
from seer.common.errors import SeerError
from seer.common.net.keys import Peers, read_public, read_secret
from seer.common.weights.in_place import PLAN, read_plan
from seer.common.weights.lora import read_config
from seer.common.weights.safetensors import metadata, stored
from seer.gateway.image_processor import model_of
from seer.rollout.files import model_facts, read_prompts
from seer.rollout.rollout_journal import Journal
from seer.services.buffer.events import Weights
from seer.services.buffer.log import chunk_file, log_folder, replay
from seer.services.buffer.log.chunk_file import Output
from seer.services.buffer.log.kept_chunks import KeptChunks, SoFar
from seer.services.buffer.weights.spool_folder import SpoolFolder
from seer.services.dgds import past_groups_file
from seer.services.engine.replay.responses import TraceResponses
from seer.services.engine.vllm.drafts import step_times
from seer.sim.files import load_workload

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "countdown"
RUN = {"model": "m", "prompts": "p", "seed": "0"}


class Wrong(Exception):  # noqa: N818 - it is a finding
    """A file with a checksum was read as something that was never written."""


@dataclass
class Kind:
    """`errors` are those that the reader names."""

    name: str
    files: list[bytes]
    read: Callable[[bytes], object]
    mutations: tuple[Mutation, ...]
    errors: tuple[type[Exception], ...] = (SeerError,)
    weight: float = 1.0

    def mutated(self, rng: random.Random) -> bytes:
        """Return a file with something wrong in it; rarely with nothing."""
        data = rng.choice(self.files)
        for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2, 3))):
            data = rng.choice(self.mutations)(rng, data)
        return data


@dataclass
class Folder:
    """Where files are written to be read."""

    path: Path
    made: list[Path] = field(default_factory=list)

    def file(self, name: str, data: bytes) -> Path:
        """Write a file, and return it."""
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        return file

    def fresh(self, name: str) -> Path:
        """Return an empty folder."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / name).mkdir()
        return self.path / name


def kinds(path: Path) -> Iterator[Kind]:
    """Yield all kinds; their files are written below `path`."""
    folder = Folder(path)
    yield from of_settings(folder)
    yield from of_prompts(folder)
    yield from of_logs(folder)
    yield from of_journals(folder)
    yield from of_weights(folder)
    yield from of_engines(folder)
    yield from of_simulator(folder)


# --- settings and keys -------------------------------------------------------------------


def of_settings(folder: Folder) -> Iterator[Kind]:
    whole = configuration.dump(configuration.Config()).encode()
    few = b'[buffer]\nmax_requests = 100\nlog = ""\n[engine]\ngpu_memory_utilization = 0.5\n[endpoints]\ndgds = "tcp://a:1,tcp://b:2"\n'
    parts = [part for part in whole.split(b"\n\n") if part]
    read = lambda data: configuration.load(folder.file("seer.toml", data))  # noqa: E731
    yield Kind("configuration", [few, *parts], read, TEXT)
    public, secret = (key.decode() for key in zmq.curve_keypair())

    def read_key(data: bytes) -> object:
        file = folder.file("trainer.key", data)
        file.chmod(0o600)
        return read_secret(file)

    yield Kind("secret key", [f"trainer:me {secret}\n".encode()], read_key, TEXT, weight=0.5)
    yield Kind(
        "public key", [f"{public}\n".encode()], lambda data: read_public(str(folder.file("a.pub", data))), TEXT,
        weight=0.5,
    )  # fmt: skip
    peers = f"# who\ntrainer:me {public}\nengine:* {public} until 2030-01-01\nobserver:o {public}\n".encode()

    def read_peers(data: bytes) -> object:
        return Peers(folder.file("peers", data)).find(public)

    yield Kind("peers", [peers], read_peers, TEXT)


# --- prompts -----------------------------------------------------------------------------


def of_prompts(folder: Folder) -> Iterator[Kind]:
    tokenizer = load_tokenizer(EXAMPLE / "model")
    texts = b"".join((EXAMPLE / "prompts.jsonl").read_bytes().splitlines(keepends=True)[:4])
    ids = b'{"id":"7","prompt_token_ids":[1,2,65],"k":{"a":[1]}}\n{"id":"8","prompt_token_ids":[4]}\n'
    images = b'{"id":"0","prompt":"what is #","images":["pictures/00.png"]}\n'

    def read(data: bytes) -> object:
        return read_prompts(folder.file("prompts.jsonl", data), tokenizer)

    yield Kind("prompts", [texts, ids, images + ids], read, JSON, weight=2)
    vocabulary = (EXAMPLE / "model" / "tokenizer.json").read_bytes()
    compact = json.dumps(json.loads(vocabulary)).encode()

    def read_tokenizer(data: bytes) -> object:
        found = load_tokenizer(folder.file("tokenizer/tokenizer.json", data).parent)
        return found.decode(found.encode("1 2 3"))

    yield Kind("tokenizer.json", [compact], read_tokenizer, JSON, weight=0.5)
    model = [
        (EXAMPLE / "model" / "config.json").read_bytes().replace(b"\n", b""),
        b'{"architectures":["A"],"text_config":{"vocab_size":9,"rope_parameters":{"rope_type":"yarn"}},"vision_config":{}}',
    ]

    def read_model(data: bytes) -> object:
        where = folder.file("model/config.json", data).parent
        model_of(str(where))
        return model_facts(where)

    yield Kind("config.json", model, read_model, JSON)


# --- the buffer's files ------------------------------------------------------------------


def of_logs(folder: Folder) -> Iterator[Kind]:
    buffer = LoggedBuffer(folder.path / "log")
    buffer.roll(1, prompts=2)
    buffer.log.flush()
    begins = next((folder.path / "log").glob("*.jsonl")).read_bytes()
    buffer.log.close()
    again = LoggedBuffer(None)
    again.roll(1)
    files = [begins]

    def read_log(data: bytes) -> object:
        where = folder.path / "segments"
        where.mkdir(exist_ok=True)
        file = where / f"{1:016x}-000000.jsonl"
        file.write_bytes(data)
        log_folder.submitted(file)
        log_folder.Pruner(where).prune()
        return list(replay.replay_incarnation([file]))

    yield Kind("buffer's log", files, read_log, JSON, weight=2)
    from seer.services.buffer.log.rows import Header
    from seer.services.buffer.log.snapshot import snapshot

    state = snapshot(again.machine)
    header = msgspec.json.encode(
        Header(
            policy="seer", limits=again.machine.requests.limits, update_seconds=60.0, state=msgspec.Raw(state)
        )
    )
    yield Kind("snapshot", [header + b"\n"], read_log, JSON, weight=2)
    yield from of_kept(folder)
    notes = b'{"size":8,"token":"t","whole":true}'

    def read_notes(data: bytes) -> object:
        spool = SpoolFolder(str(folder.fresh("spool")))
        (spool.root / "v1").mkdir(parents=True)
        (spool.root / "v1" / "stream.json").write_bytes(data)
        (spool.root / "v1" / "model.safetensors").write_bytes(bytes(8))
        return spool.inherited()

    yield Kind("notes of a spool", [notes], read_notes, JSON, weight=0.2)


def of_kept(folder: Folder) -> Iterator[Kind]:
    prompt, where = np.arange(7, dtype=np.int32), folder.fresh("kept")
    has: dict[str, dict[int, Output]] = {"r/p": {}, "r/q": {}}
    kept = KeptChunks(str(where), 100.0, 0.0, lambda name: SoFar(77, prompt, Weights(3, "d"), has[name]))
    rng = np.random.default_rng(0)
    for group in ("p", "q"):
        kept.open("r", group)
        for index, count, finish in ((0, 9, ""), (1, 5, "stop"), (0, 4, "")):
            arrays = rng.integers(0, 99, count).astype(np.int32), -rng.random(count).astype(np.float32)
            beside = {"x |u1 3": np.zeros(3 * count, np.uint8)} if index else {}
            has[f"r/{group}"][index] = Output(*arrays, (finish, ""), beside)
            kept.keep(f"r/{group}", index, has[f"r/{group}"][index])
    kept.close()
    (file,) = where.glob("*")
    whole = file.read_bytes()
    written = _chunks(file)

    def read(data: bytes, *, sealed: bool = False) -> object:
        (at := folder.fresh("kept") / file.name).write_bytes(data)
        chunks = _chunks(at)
        if not sealed and not chunks <= written:
            raise Wrong(f"{len(chunks - written)} chunks were never written")
        opened = KeptChunks(str(at.parent), 100.0, 0.0, lambda _: None)
        try:
            for group in ("p", "q"):
                opened.open("r", group)
                if opened.offer("r", group, 77, prompt) is not None:
                    opened.restore(f"r/{group}")
        finally:
            opened.close()
        return chunks

    yield Kind("kept chunks", [whole], read, BINARY, weight=1)

    def sealed(rng: random.Random, data: bytes) -> bytes:
        """Change a record's head, and write its checksum anew."""
        records = list(_records(whole))
        place = rng.randrange(len(records))
        head, arrays = records[place]
        if rng.random() < 0.5:
            head = msgspec.msgpack.encode(_like(rng, msgspec.msgpack.decode(head)))
        else:
            head, arrays = some_bytes(rng, head), arrays[: 8 * rng.randrange(len(arrays) // 8 + 1)]
        records[place] = head, arrays
        return b"".join(
            struct.pack("<III", len(h), len(a) // 8, zlib.crc32(a, zlib.crc32(h))) + h + a for h, a in records
        )

    yield Kind(
        "kept chunks, sealed again", [whole], lambda data: read(data, sealed=True), (sealed,), weight=1
    )


def _chunks(file: Path) -> set[tuple[str, int, int, bytes]]:
    _, groups, _ = chunk_file.read_groups(file)
    found = set()
    for name, group in groups.items():
        for index, (tokens, logprobs, *_) in chunk_file.read_outputs(file, group).items():
            for _, size, *_ in group.chunks[index]:
                found.add((name, index, size, tokens[:size].tobytes() + logprobs[:size].tobytes()))
                tokens, logprobs = tokens[size:], logprobs[size:]
    return found


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while data:
        size, count, _ = struct.unpack("<III", data[:12])
        yield data[12 : 12 + size], data[12 + size : 12 + size + 8 * count]
        data = data[12 + size + 8 * count :]


def _like(rng: random.Random, value: Any) -> Any:
    """Return a value of msgpack with one part of another type or size."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _like(rng, value[place]), *value[place + 1 :]]
    return rng.choice(
        (None, -1, 2**63, 1.5, "", "x" * 500, b"", b"\xff" * 7, [], [[]], {}, {"a": 1}, True, 0)
    )


# --- journals ----------------------------------------------------------------------------


def of_journals(folder: Folder) -> Iterator[Kind]:
    out = folder.path / "out.jsonl"
    journal = Journal.open(out, RUN, resume=False)
    arrays = np.array([1, 2], np.int32), np.array([-0.5, -0.25], np.float32)
    for prompt_id in ("a", "b"):
        response = Response(0, *arrays, "x", "stop", "2")
        journal.add(Group(prompt_id, arrays[0], {"k": [1]}, 3, "d", (response,), 1, 0, 0))
    journal.close()
    whole = journal.path.read_bytes()
    own = set(whole.splitlines(keepends=True)[1:])

    def read(data: bytes) -> object:
        journal.path.write_bytes(data)
        opened = Journal.open(out, RUN, resume=True)
        try:
            opened.publish(sorted(opened.done))
        finally:
            opened.close()
        return own

    yield Kind("journal of a rollout", [whole], read, JSON)
    with Answers(folder.path / "answers", "turns") as answers:
        for number in range(3):
            answers.write(f"c{number}", "digest", {"said": [number, None, "x"]})
    turns = (folder.path / "answers").read_bytes()

    def read_turns(data: bytes) -> object:
        with Answers(folder.file("answers", data), "turns") as found:
            return [found.read(f"c{number}", "digest") for number in range(3) if f"c{number}" in found]

    yield Kind("journal of turns", [turns], read_turns, JSON)


# --- weights -----------------------------------------------------------------------------


def of_weights(folder: Folder) -> Iterator[Kind]:
    read_from = (ValueError, OSError)
    texts = {"adapter_config": '{"peft_type":"LORA","r":2,"lora_alpha":4}'}
    tensors: dict[str, object] = {
        "__metadata__": texts,
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
    header = json.dumps(tensors).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(24)

    def in_header(rng: random.Random, data: bytes) -> bytes:
        text = changed(rng, json.loads(header))
        return struct.pack("<Q", len(text)) + text + data[-rng.choice((0, 1, 24, 24, 24)) :]

    def read(data: bytes) -> object:
        where = folder.file("weights/model.safetensors", data).parent
        metadata(where / "model.safetensors")
        found = stored(where)
        if sum(each.size for each in found) > len(data):
            raise Wrong("tensors of more bytes than the file has")
        return found

    yield Kind("safetensors", [whole], read, (*BINARY, in_header, in_header, in_header), read_from, 2)
    index = b'{"weight_map":{"a.weight":"model.safetensors"}}'

    def read_index(data: bytes) -> object:
        return stored(folder.file("indexed/model.safetensors.index.json", data).parent)

    folder.file("indexed/model.safetensors", whole)
    yield Kind("index of shards", [index], read_index, JSON, read_from, 0.5)
    settings = (
        b'{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["q"],"rank_pattern":{"^a.*b":3},'
        b'"alpha_pattern":{"q":1.5},"use_rslora":true,"bias":"none","layers_pattern":null}'
    )
    read_adapter = lambda data: read_config(folder.file("lora/adapter_config.json", data).parent)  # noqa: E731
    yield Kind("adapter_config.json", [settings], read_adapter, JSON, read_from)
    plan = json.dumps({
        "name": "n", "transport": "shared", "host": "", "port": 0, "step_seconds": 30.0,
        "buckets": [{"size": 256, "tensors": [["a", "F32", [2, 2], 0]], "memory": {"type": "SharedFile", "name": "x"}}],
    }).encode()  # fmt: skip

    def read_a_plan(data: bytes) -> object:
        entry = {PLAN: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
        head = json.dumps(entry).encode()
        return read_plan(
            folder.file("plan/model.safetensors", struct.pack("<Q", len(head)) + head + data).parent
        )

    yield Kind("plan of an update", [plan], read_a_plan, JSON, read_from, 0.5)


# --- engines, dgds and the simulator -----------------------------------------------------


def of_engines(folder: Folder) -> Iterator[Kind]:
    file = folder.path / "past"
    entries = [(7, (b"\1\0\0" * 5, b"\2\0\0" * 3)), (2**63, (b"\3\0\0",))]
    past_groups_file.save(file, "shared", entries)
    whole = file.read_bytes()
    head = whole[: len(whole) - len(msgspec.msgpack.encode(("shared", entries)))]
    magic = head[:-16]

    def read(data: bytes, *, sealed: bool = False) -> object:
        found = past_groups_file.load(folder.file("past", data), "shared")
        if not sealed and found != entries:
            raise Wrong("groups that were never written")
        return [len(stream) // 3 for _, streams in found for stream in streams]

    yield Kind("past groups", [whole], read, BINARY)

    def sealed(rng: random.Random, data: bytes) -> bytes:
        body = whole[len(head) :]
        if rng.random() < 0.5:
            body = msgspec.msgpack.encode(_like(rng, msgspec.msgpack.decode(body)))
        else:
            body = some_bytes(rng, body)
        return magic + past_groups_file._digest(body) + body

    yield Kind("past groups, sealed again", [whole], lambda data: read(data, sealed=True), (sealed,))
    costs = (
        b'{"batches":[1,4],"drafts":[0,2],"grid":[[0.01,0.02],[0.02,0.03]],"sibling":0.1,"context":10,'
        b'"reading":[0.0,1e-6]}'
    )
    yield Kind("profile of drafts", [costs], lambda data: step_times._read(folder.file("costs", data)), JSON)
    trace = b'{"id":"a","token_ids":[1,2,3],"logprobs":[-1.0,-2,0]}\n{"id":"a","token_ids":[4],"index":7}\n'
    read_trace = lambda data: TraceResponses(folder.file("trace.jsonl", data), 100)  # noqa: E731
    yield Kind("trace to replay", [trace], read_trace, JSON)


def of_simulator(folder: Folder) -> Iterator[Kind]:
    recorded = (
        b'{"id":"a","length":5}\n{"id":"a","length":7}\n'
        b'{"id":"b","responses":[{"token_ids":[1,2]},{"length":3,"index":1}]}\n'
    )

    def read_recorded(data: bytes) -> object:
        return load_workload(str(folder.file("w.jsonl", data)), "moonlight")

    yield Kind("trace to simulate", [recorded], read_recorded, JSON)
    described = (
        b'like = "moonlight"\ninstances = 4\ngroups = 8\ngroup_size = 2\nmean = 100\ncap = 1000\nsigma = 0.5\n'
        b"between = 0.5\noutliers = 0.1\nturns = 2\n[model]\nstep = 0.01\nkv_tokens = 100000\nblock_size = 16\n"
    )
    load = lambda data: load_workload(str(folder.file("w.toml", data)))  # noqa: E731
    yield Kind("workload", [described], load, TEXT)
