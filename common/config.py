"""Configuration: one TOML file for all services, overridden by environment and `--set`.

Invariants:
- every number has bounds (`common/bounds.py`);
- an unknown key is an error that suggests the nearest valid name, or what to do instead of one that there was
  once (`common/tables.py`); a wrong type is an error that names the key;
- precedence: defaults < file < environment (`SEER_ENGINE__KV_BLOCKS=48`) < `--set engine.kv_blocks=48`;
- `shared_hash` covers only what must agree everywhere, never a node's own ports and sizes.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from seer.common import tables
from seer.common.bounds import (
    MAX_SECONDS,
    Bytes,
    Count,
    Gibibytes,
    Interval,
    Seconds,
    Section,
    Tokens,
    Within,
)
from seer.common.endpoints import check_address, check_endpoint, shards
from seer.common.errors import ConfigError
from seer.common.types import LogprobMode
from seer.common.vllm_settings import VllmSettings


class SharedConfig(Section, frozen=True):
    """Settings that must be equal in all processes of a system; their hash is part of the handshake."""

    title = "shared"

    model: str = ""
    """Hugging Face model folder with safetensors files (pickles are not read). Nodes may have it at different
    paths, but it must have the same name and tokenizer."""
    block_size: Annotated[int, Within(1, 65_536)] | None = None
    """Tokens per KV block; default: 32, or 64 for models with MLA on GPUs."""


class SecurityConfig(Section, frozen=True):
    """Keys for TCP sockets: who may connect, and as what (docs/security.md)."""

    key: str = ""
    """File of this process's secret key; default: no keys are used."""
    peers: str = ""
    """File of the keys that are admitted, in processes that others connect to. Read again when it changes."""
    server: str = ""
    """The services' public key, or its file; default: that of `key`."""
    insecure: bool = False
    """Whether to bind beyond this machine's loopback without keys: for networks that all may trust."""


class Endpoints(Section, frozen=True):
    """Addresses of the services. The owner binds there, the others connect.

    `tcp://host:port` or `ipc://path`; port 0: the operating system chooses one, and the owner reports it.
    """

    trainers: str = "tcp://127.0.0.1:7101"
    """Buffer, ROUTER: trainers' clients."""
    engines: str = "tcp://127.0.0.1:7102"
    """Buffer, ROUTER: engines."""
    events: str = "tcp://127.0.0.1:7103"
    """Buffer, PUB: progress of groups and requests."""
    event_snapshots: str = "tcp://127.0.0.1:7104"
    """Buffer, ROUTER: snapshots for subscribers of `events` that join or miss a message."""
    estimates: str = "tcp://127.0.0.1:7105"
    """Context, PUB: length estimates."""
    estimate_snapshots: str = "tcp://127.0.0.1:7106"
    """Context, ROUTER: snapshots for subscribers of `estimates`."""
    dgds: str = "tcp://127.0.0.1:7107"
    """Dgds, ROUTER: token streams. Several, separated by commas: groups are sharded over as many
    processes."""
    bind_host: str = ""
    """Replaces the host when binding TCP, e.g. `*`; empty binds the host as written."""


class BufferConfig(Section, frozen=True):
    """Request lifecycle and scheduling."""

    title = "buffer"

    policy: str = "seer"
    chunk_size: Tokens | None = None
    """Most tokens of a chunk; default: a 64th of a response's `max_tokens`, but at least 256."""
    shares: dict[str, Annotated[float, Within(0.001, 1000.0)]] = {}
    """Weights by which trainers share the engines, by the names of their keys, or of clients without keys;
    default: 1 each: docs/scheduling.md."""
    max_requests: Count = 200_000
    """Bound on a trainer's unfinished requests; all trainers together may have four times as many."""
    engine_wait_seconds: Seconds = 600.0
    """How long accepted work may wait for a first engine before it is failed."""
    engine_silence_seconds: Annotated[float, Within(2.0, MAX_SECONDS, "engines report every second")] = 20.0
    """An engine that sends nothing for this long counts as lost; its chunks run on other engines."""
    result_ttl_seconds: Seconds = 3600.0
    """How long a finished group waits for its trainer's acknowledgement."""
    update_seconds: Seconds = 3600.0
    """Deadline of each phase of a weight update: checking, finishing running requests, loading.

    Over HTTP, of the whole, of sleep, of waking, and of a pause that waits for requests under way.
    """
    log: str = ""
    """Folder for the log of what happened and was decided, at most 2 GiB: docs/log.md.

    Default: one of the run's own in `seer up` and `seer rollout`; else the last minutes are in memory, and a
    crash writes them to the temporary folder.
    """
    keep_chunks: bool = False
    """Keep responses in that folder, 8 bytes a token: after it was killed, the buffer goes on from them."""
    spool: str = ""
    """Folder for weights that trainers stream, in `seer-spool`: room for two versions. Default: a temporary
    one."""
    images: str = ""
    """Folder for the images of prompts, in `seer-images`; they outlast the buffer there. Default: a temporary
    one."""
    image_bytes: Bytes = 16 * 2**30
    """Bound on them; beyond it, those that no prompt needs go, the least recently used first. One trainer's
    prompts may need three quarters of it."""
    result_bytes: Bytes | None = None
    """Bound on finished groups that wait; beyond it the oldest is dropped of the trainer that has most for
    its share, and generated again if asked for. Default: a quarter of the process's memory limit, at most
    8 GiB."""
    unfinished_bytes: Bytes | None = None
    """Bound on tokens and logprobs of unfinished groups, 8 bytes each; beyond it the newest groups fail of
    the trainer that has most for its share. Default: a third of the process's memory limit, at most 16 GiB.
    """
    trainer_lease_seconds: Annotated[float, Within(10.0, MAX_SECONDS, "trainers are heard every 5 s")] = (
        3600.0
    )
    """The unfinished work of a trainer that sends nothing for this long is dropped."""


class ContextConfig(Section, frozen=True):
    """Length estimates."""

    title = "context"

    remember_prompts: Annotated[int, Within(0, 2**31)] = 0
    """Most prompts whose response lengths are remembered for their next groups; 0: none.

    For policies with the `posterior` estimator. A prompt id must be the same prompt in all rollouts.
    """


class DgdsConfig(Section, frozen=True):
    """Grouped token streams."""

    title = "dgds"

    max_tokens: Annotated[int, Within(1, 2**40)] | None = None
    """Bound on tokens kept (3 bytes each); the least recently used groups are dropped first. Default: two
    fifths of the process's memory limit, at most 500 million."""
    shard: Annotated[int, Within(0, 4096)] = 0
    """Which of `endpoints.dgds` this process serves, counted from 0."""
    remember_tokens: Annotated[int, Within(0, 2**40)] | None = None
    """Bound on tokens kept of past groups (3 bytes each), to draft from for the same prompts' next groups; 0:
    none. The least recently used prompts are dropped first. Default: a tenth of the process's memory limit,
    at most 50 million."""
    remember_path: str = ""
    """File in which they survive restarts; default: none."""


MAX_DRAFT = 128
"""Bound on `drafts.max_draft`: every running request reserves KV for this many more tokens."""


class DraftsConfig(Section, frozen=True):
    """Speculative decoding: responses of one group draft for each other. Never changes a token."""

    title = "drafts"

    source: Literal["off", "own", "grouped", "random", "late"] = "grouped"
    """Whose tokens drafts come from: `own`, the request's; `grouped`, those of its whole group, from all
    engines.

    For `seer verify`, as not even these change a token: `random` tokens; `late`, as `grouped`, but drafts
    come late or not at all.
    """
    max_draft: Annotated[int, Within(1, MAX_DRAFT, "to draft nothing, set drafts.source to off")] = 8
    """Most tokens drafted per request and step (K_max); each step chooses how many of them pay."""
    max_paths: Annotated[int, Within(1, 4096, "left out, as many as pay are verified")] | None = None
    """Most draft paths verified per request and step; default: as many as pay."""
    head: str = ""
    """A trained drafter beside the trees: the folder of an EAGLE or EAGLE-3 head, or `mtp` for the model's
    own layers of multi-token prediction. In a step each request drafts from whichever promises more."""
    cache: str = ""
    """Folder of step-time profiles; default: `seer` in the user's cache folder."""


class ReplayConfig(Section, frozen=True):
    """Engines without a model (`engine.backend = "replay"`), for tests and studies."""

    title = "engine.replay"

    trace: str = ""
    """JSONL of recorded responses; empty: tokens and lengths are a function of the key."""
    step_seconds: Interval = 0.002
    """Duration of a step at batch 1."""
    row_seconds: Interval = 0.0001
    """Added duration per running request."""
    vocab_size: Count = 151_936
    mean_tokens: Tokens = 256
    """Without a trace: mean length of responses, which are heavy-tailed."""


CPU_KV_SHARE = 0.1
"""Default share of free memory for the KV of all CPU engines of a machine; zeroing a GiB takes seconds."""


class EngineConfig(Section, frozen=True):
    """One model replica."""

    title = "engine"

    name: str = ""
    """Unique name; default: host name and process id."""
    backend: Literal["vllm", "replay"] = "vllm"
    tensor_parallel: Annotated[int, Within(1, 4096)] = 1
    nodes: Annotated[int, Within(1, 4096)] = 1
    """Machines that its ranks are on, equally many on each; all run `seer engine`: docs/models.md."""
    node_rank: Annotated[int, Within(0, 4095)] = 0
    """Number of this machine. Machine 0, the leader, is the engine; the others run its further ranks."""
    leader: str = ""
    """Where they meet, an address of the leader: `tcp://host:port`."""
    kv_blocks: Count | None = None
    """Usable KV blocks, of all KV cache groups together; default: as many as fit the memory budget. Of each
    data-parallel rank."""
    kv_cache_gib: Gibibytes | None = None
    """KV memory of each rank on CPUs; default: a share of free memory."""
    gpu_memory_utilization: Annotated[float, Within(0.001, 1.0)] | None = None
    """Share of a GPU's memory for the engine; default: 0.9, or what others leave free on the device, divided
    among the engines that share it."""
    max_num_seqs: Count | None = None
    """Most requests that run at once; default: 64 on CPUs, 1,024 on GPUs of 70 GiB, 256 on others. On each
    data-parallel rank."""
    max_num_batched_tokens: Count | None = None
    """Most tokens of a step; default: 16,384 on GPUs of 70 GiB, 8,192 on others, vLLM's own on CPUs."""
    max_model_len: Tokens | None = None
    """Longest sequence: prompt, output and room for drafts; default: the model's own limit."""
    dtype: str = "auto"
    batch_invariant: bool = False
    """vLLM's batch-invariant kernels: not even last bits depend on the batch, but steps take longer. GPUs."""
    async_scheduling: bool | None = None
    """Begin a step before the host has read the last one; default: on GPUs: docs/gpu.md."""
    weights_root: str = ""
    """Only folders below this one, with links resolved, are accepted as new weights; default: any folder."""
    weights_endpoint: str = ""
    """Where it sends streamed weights on to engines of other machines, `tcp://host:port`; `off`: nowhere.

    For those that join later, too, it keeps the live version's stream in TMPDIR. Default: a free port of the
    address by which it reaches the buffer; nowhere if that is its own machine.
    """
    routed_experts: bool = False
    """Keep which experts each token went to, for rollouts that ask for them: docs/models.md."""
    finite_weights: bool = True
    """Refuse weights with NaN or infinities, by name; false for models that have some on purpose."""
    in_place_updates: bool = False
    """Let trainers write over live weights, whose bytes are not checked then: docs/weights.md#in-place."""
    in_place_seconds: Seconds = 300.0
    """Deadline for such an update: an engine that lacks weights then ends, and starts again."""
    load_seconds: Seconds = 900.0
    """Deadline for loading the model."""
    leave_notice: str = ""
    """File or `http://` URL that tells that this machine is about to go: docs/deployment.md#spot-machines."""
    image_bytes: Bytes = 4 * 2**30
    """Bound on images of prompts kept in host memory; beyond it, those that no chunk here needs go."""
    cpu_cores: str = ""
    """Cores for a CPU engine's threads, in vLLM's syntax (`0-3`); default: vLLM's own choice."""
    vllm: VllmSettings = VllmSettings()
    """Settings that are passed on to vLLM: `common/vllm_settings.py`."""
    replay: ReplayConfig = ReplayConfig()


POOL_SHARE = 0.1
"""Default bound on a pool owner's memory, as a share of free memory; the memory is allocated as it fills."""


class PoolConfig(Section, frozen=True):
    """A KV pool that all engines share: Mooncake Store. Its ports have no authentication."""

    title = "pool"

    kind: Literal["auto", "mooncake", "none"] = "auto"
    """`auto`: Mooncake for a whole system on one machine if it can be imported, else none.

    Of either, engines use as much as is faster than computing: `pull_tokens`.
    """
    master: str = "127.0.0.1:7108"
    """Host and port of Mooncake's master."""
    metrics: str = "127.0.0.1:7109"
    """Host and port of the master's HTTP metrics."""
    host: str = ""
    """This machine's address for other members of the pool; default: the one used to reach the master."""
    ports: str = "23000-23999"
    """First and last port of owners and engines, two each, which Mooncake opens on all interfaces."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    """RDMA devices, comma-separated; default: all."""
    dram_gib: Gibibytes | None = None
    """Memory that the pool's owner provides; default: a share of free memory."""
    ssd_gib: Annotated[float, Within(0.0, 2**30, "0: none")] = 0.0
    """Size of a disk tier below that memory; 0: none."""
    ssd_path: str = ""
    """Folder of the disk tier; default: a temporary one."""
    lease_seconds: Seconds = 5.0
    """Blocks are not evicted for this long after a look-up or read."""
    staging_mib: Annotated[int, Within(1, 2**20)] = 128
    """Memory of each engine rank for KV that is copied to or from the pool."""
    pull_tokens: Annotated[int, Within(0, 2**24)] | None = None
    """Fewer tokens than this are computed again instead of read from the pool; default: as many as take less
    time to compute, as measured by each engine."""


class GatewayConfig(Section, frozen=True):
    """HTTP for trainers and agents: docs/gateway.md."""

    title = "gateway"

    data: str = "127.0.0.1:7110"
    """Host and port for generation alone; port 0: the operating system chooses one."""
    control: str = "127.0.0.1:7111"
    """Host and port for all routes, also those that pause, update weights and put engines to sleep."""
    workers: Annotated[int, Within(1, 1024)] = 1
    """Processes that serve both addresses."""
    tls_certificate: str = ""
    """File of a certificate chain (PEM), with which both addresses speak HTTPS; default: HTTP."""
    tls_key: str = ""
    """File of its key (PEM)."""
    model_name: str = ""
    """The model's name in requests and answers; default: the name of `shared.model`'s folder.

    The path of that folder is accepted, too.
    """
    on_update: Literal["restart", "abort", "refuse"] = "restart"
    """What an update does to requests under way: start them again with the new weights, or end them in
    an error; `refuse`: the update is refused while there are any."""
    logprobs: LogprobMode = "scaled"
    """Distribution of returned logprobs: `SamplingParams` explains it."""
    routed_experts: bool = False
    """Answers of `/inference/v1/generate` have the experts that tokens went to: docs/models.md."""
    tool_parser: Literal["", "hermes"] = ""
    """How tool calls are read from a chat's text, by vLLM's name; empty: requests with `tool_choice` auto are
    refused."""
    trust_chat_templates: bool = False
    """Run chat templates that requests bring."""
    max_requests: Count = 4096
    """Bound on open requests of each process; further ones get 503."""
    max_body_bytes: Bytes = 32 * 2**20
    """Bound on a request's body."""
    image_bytes: Bytes = 2**30
    """Bound on the images that each process holds in memory, as tensors; past it requests get 503."""
    request_seconds: Seconds = 3600.0
    """Deadline of a generation request; it goes on while generation is paused."""
    client_seconds: Annotated[float, Within(0.001, 32_767.0, "the kernel waits for no peer for longer")] = (
        60.0
    )
    """An HTTP client that takes longer to send a request, or reads nothing of its answer for as long, is
    disconnected."""


class LogConfig(Section, frozen=True):
    """Structured logs on stderr."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(Section, frozen=True):
    """The whole file."""

    shared: SharedConfig = SharedConfig()
    endpoints: Endpoints = Endpoints()
    security: SecurityConfig = SecurityConfig()
    buffer: BufferConfig = BufferConfig()
    context: ContextConfig = ContextConfig()
    dgds: DgdsConfig = DgdsConfig()
    engine: EngineConfig = EngineConfig()
    drafts: DraftsConfig = DraftsConfig()
    pool: PoolConfig = PoolConfig()
    gateway: GatewayConfig = GatewayConfig()
    log: LogConfig = LogConfig()


ENV_PREFIX = "SEER_"


def load(
    path: Path | None, environ: Mapping[str, str] | None = None, overrides: Iterable[str] = ()
) -> Config:
    """Read the file, apply environment variables and `a.b=c` overrides, and check everything.

    Raises `ConfigError` naming the source, the key and the fix.
    """
    return load_with_sources(path, environ, overrides)[0]


def load_with_sources(
    path: Path | None, environ: Mapping[str, str] | None = None, overrides: Iterable[str] = ()
) -> tuple[Config, dict[str, str]]:
    """Return what `load` does, and where each setting that was given comes from, by its dotted name."""
    table: dict[str, object] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}; give a readable TOML file") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config file {path}: not valid TOML: {error}") from error
    tables.refuse_unknown(Config, table, str(path))
    sources = dict.fromkeys(dict(tables.settings(table)), "file")
    for name, text in sorted((environ or {}).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            dotted = name[len(ENV_PREFIX) :].lower().replace("__", ".")
            sources[dotted] = f"environment {name}"
            tables.put(Config, table, dotted, text, sources[dotted])
        elif name.startswith(tuple(f"{ENV_PREFIX}{section.upper()}_" for section in tables.fields(Config))):
            raise ConfigError(f"environment {name}: write two underscores after the section's name")
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write --set section.key=value")
        sources[key.strip()] = f"--set {item}"
        tables.put(Config, table, key.strip(), text.strip(), sources[key.strip()])
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
    _check_relations(config)
    return config, sources


def _check_relations(config: Config) -> None:
    for name, endpoint in msgspec.structs.asdict(config.endpoints).items():
        if name != "bind_host":
            for each in shards(endpoint) if name == "dgds" else [endpoint]:
                check_endpoint(f"endpoints.{name}", each)
    check_address("pool.master", config.pool.master)
    check_address("pool.metrics", config.pool.metrics)
    for name in ("data", "control"):
        address = getattr(config.gateway, name)
        check_endpoint(f"gateway.{name}", f"tcp://{address}", written="host:port")


def dump(config: Config) -> str:
    """Write a configuration as TOML that `load` reads back equal."""
    sections = msgspec.to_builtins(config).items()
    return "\n".join(line for section, values in sections for line in tables.lines(section, values))


def shared_hash(shared: SharedConfig) -> str:
    """Digest what must be equal everywhere; of the model's path only the folder's name counts."""
    agreed = msgspec.structs.replace(shared, model=Path(shared.model).name)
    return hashlib.blake2b(msgspec.json.encode(agreed, order="sorted"), digest_size=8).hexdigest()
