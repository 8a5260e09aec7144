"""`seer config check`: every setting with its source, and advice that is quiet once it is taken."""

from __future__ import annotations

import json
import tomllib

import msgspec
import pytest
from click.testing import CliRunner

from seer.cli.main import main
from seer.common.config import Config, dump, load, load_with_sources
from seer.common.policy.device_defaults import Device
from seer.common.process.memory_bounds import buffer_bounds, dgds_bounds
from seer.common.process.memory_limit import bounds
from seer.config_check.advice import advice
from seer.config_check.facts import Facts, held
from seer.config_check.settings import LEFT_OPEN, VLLMS, rank_text, rows

GIB = 2**30
LARGE = Device(name="0", total_bytes=80 * GIB, free_bytes=80 * GIB)
HEAD = {"buffer": 16 * GIB, "dgds": 4 * GIB, "engine": 64 * GIB}
WEIGHTS_72B = 144 * 10**9


def cluster(engines=64, **changes):
    given = {"devices": [LARGE], "memory": HEAD, "weight_bytes": 16 * 10**9, "room_bytes": 10**12}
    return Facts(engines, **(given | changes))


def asked(facts, *sets):
    """Return the advice by what it is about."""
    config, sources = load_with_sources(None, overrides=sets)
    return {each.what: each for each in advice(config, sources, facts)}


def test_every_setting_is_a_row_with_its_value_and_source(tmp_path):
    file = tmp_path / "seer.toml"
    file.write_text(
        '[buffer]\nmax_requests = 7\n[engine.vllm]\nenforce_eager = true\n[log]\nlevel = "error"\n'
    )
    config, sources = load_with_sources(
        file, {"SEER_DGDS__SHARD": "0"}, ["pool.kind=none", "log.level=debug"]
    )
    assert config == load(file, {"SEER_DGDS__SHARD": "0"}, ["pool.kind=none", "log.level=debug"])
    found = rows(config, sources, cluster())
    keys = [row.key for row in found]
    assert len(set(keys)) == len(keys)

    def flat(table, prefix=""):
        for key, value in table.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]

    settings = {key for key in flat(msgspec.to_builtins(Config())) if not key.startswith("engine.replay.")}
    assert set(keys) == settings
    by_key = {row.key: row for row in found}
    assert by_key["buffer.max_requests"][2:] == ("7", "file")
    assert by_key["engine.vllm.enforce_eager"][2:] == ("true", "file")
    assert by_key["dgds.shard"][2:] == ("0", "environment SEER_DGDS__SHARD")
    assert by_key["pool.kind"][2:] == ('"none"', "--set pool.kind=none")
    assert by_key["log.level"][2:] == ('"debug"', "--set log.level=debug")
    assert by_key["buffer.images"][2:] == ('""', "default")
    assert "engine.replay.trace" in {
        row.key for row in rows(load(None, overrides=["engine.backend=replay"]), {}, cluster())
    }


def test_what_is_left_open_is_derived_or_explained():
    derived = {row.key: row for row in rows(Config(), {}, cluster())}
    for limit, role, wanted in ((16 * GIB, "buffer", buffer_bounds), (4 * GIB, "dgds", dgds_bounds)):
        listed = wanted(getattr(Config(), role))
        for bound, value in zip(listed, bounds(listed, limit), strict=True):
            assert int(derived[bound.key].value) == held(bound, limit) == value
            assert derived[bound.key].source.startswith("default")
    assert derived["engine.max_num_seqs"][2:] == ("1_024", "default: on a GPU of 80 GiB")
    assert derived["engine.gpu_memory_utilization"].value == "0.9"
    on_cpus = {row.key: row.value for row in rows(Config(), {}, cluster(devices=()))}
    assert on_cpus["engine.max_num_seqs"] == "64"
    own = {key for key, value in on_cpus.items() if value == f"({VLLMS})" and "engine.vllm." not in key}
    assert own == {"engine.max_num_batched_tokens", "engine.gpu_memory_utilization"}
    written = tomllib.loads(dump(Config()))
    assert not [key for key in LEFT_OPEN if key.partition(".")[2] in written[key.partition(".")[0]]]


def test_what_fits_needs_no_advice():
    assert not asked(cluster(8))


@pytest.mark.parametrize(
    ("facts", "sets", "what", "taken"),
    [
        (cluster(1024), [], "buffer.max_requests", ["buffer.max_requests={wanted}"]),
        (cluster(), [], "buffer.unfinished_bytes", ["buffer.unfinished_bytes={wanted}"]),
        (
            cluster(1024), [], "dgds, by endpoints.dgds",
            ["endpoints.dgds=tcp://a:1,tcp://a:2,tcp://a:3,tcp://a:4"],
        ),
        (cluster(), ["gateway.workers=2"], "gateway.workers", ["gateway.workers={wanted}"]),
        (cluster(8, weight_bytes=WEIGHTS_72B), [], "engine.tensor_parallel", ["engine.tensor_parallel={wanted}"]),
        (cluster(8), ["dgds.shard=1"], "dgds.shard", ["dgds.shard=0"]),
        (cluster(8), ["buffer.policy=best"], "buffer.policy", ["buffer.policy=seer"]),
        (
            cluster(8, elsewhere=True), ["endpoints.trainers=tcp://h:1", "endpoints.engines=tcp://h:2"],
            "endpoints.dgds", ["endpoints.dgds=tcp://h:3"],
        ),
        (cluster(8), ["dgds.max_tokens=2000000000"], "memory of a dgds", ["dgds.max_tokens=500000000"]),
        (
            cluster(8), [f"buffer.unfinished_bytes={15 * GIB}"],
            "memory of the buffer", [f"buffer.unfinished_bytes={8 * GIB}"],
        ),
    ],
)  # fmt: skip
def test_advice_that_is_taken_is_not_given_again(facts, sets, what, taken):
    found = asked(facts, *sets)
    assert what in found
    wanted = found[what].wanted.replace("_", "")
    again = asked(facts, *sets, *(each.format(wanted=wanted) for each in taken))
    assert what not in again


def test_advice_has_the_figures_it_follows_from():
    many = asked(cluster(1024))
    assert many["buffer.max_requests"][1:3] == ("200_000", "2_097_152")
    assert "1,024 engines run 1,048,576 requests at once" in many["buffer.max_requests"].why
    assert many["dgds, by endpoints.dgds"][1:3] == ("1", "4")
    assert many["buffer.unfinished_bytes"].wanted == f"{128 * GIB:_}"
    assert many["memory of the buffer"][1:3] == ("16 GiB", "176 GiB")
    assert "dgds, by endpoints.dgds" not in asked(cluster(1024), "drafts.source=own")


def test_room_for_two_versions_of_the_weights_with_all_else_that_the_buffer_writes():
    kubernetes = ["buffer.spool=/s", "buffer.log=/l", "buffer.images=/i", "buffer.keep_chunks=true"]
    found = asked(cluster(8, weight_bytes=WEIGHTS_72B, room_bytes=100 * GIB), *kubernetes)
    disk = found["disk of the buffer (/s)"]
    assert (disk.now, disk.wanted) == ("100 GiB", "296 GiB")
    assert "2 versions of the weights 268 GiB" in disk.why
    assert "kept chunks 9.33 GiB, images 16 GiB" in disk.why
    assert found["memory of an engine"].wanted == "143 GiB"
    small = cluster(8, weight_bytes=WEIGHTS_72B, room_bytes=300 * GIB, memory=HEAD | {"engine": 143 * GIB})
    assert not asked(small, *kubernetes, "engine.tensor_parallel=4")
    on_cpus = asked(cluster(2, devices=(), weight_bytes=40 * GIB), "engine.kv_cache_gib=10")
    assert on_cpus["memory of an engine"].wanted == "94 GiB"


MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64}


@pytest.mark.parametrize(
    ("sets", "model", "what", "wanted"),
    [
        (["engine.tensor_parallel=2"], MIXTURE, "engine.tensor_parallel", "1"),
        (["engine.nodes=2"], MIXTURE, "engine.nodes", "1"),
        (["engine.in_place_updates=true"], MIXTURE, "engine.in_place_updates", "false"),
        (["engine.cpu_cores=0|1|2"], MIXTURE, "engine.cpu_cores", "8 parts, as 0-3|4-7"),
        ([], {"architectures": ["Qwen3ForCausalLM"]}, "engine.vllm.data_parallel_size", "1"),
    ],
)
def test_what_data_parallel_ranks_refuse_is_advice(sets, model, what, wanted):
    ranks = ["engine.vllm.data_parallel_size=8"]
    facts = cluster(1, model=model, weight_bytes=0)
    assert asked(facts, *ranks, *sets)[what].wanted == wanted
    assert not asked(facts, *sets), "without data-parallel ranks none of it is refused"
    assert not asked(cluster(1, model=MIXTURE, weight_bytes=0), *ranks)
    assert not asked(facts, "engine.backend=replay", *ranks, *sets)


def test_each_data_parallel_rank_has_what_is_no_expert_s_whole():
    sizes = {"weight_bytes": 500 * GIB, "memory": {}, "room_bytes": 2000 * GIB}
    mixture = cluster(1, model=MIXTURE, expert_bytes=480 * GIB, **sizes)
    ranks = "engine.vllm.data_parallel_size={}".format
    found = asked(mixture, ranks(8))["engine.vllm.data_parallel_size"]
    assert (found.now, found.wanted) == ("8", "16")
    assert "each data-parallel rank has 20 GiB of them whole" in found.why
    assert not asked(mixture, ranks(16), f"buffer.unfinished_bytes={2 * GIB}")
    config, _ = load_with_sources(None, overrides=[ranks(16)])
    assert rank_text(config, mixture) == (
        "each of an engine's 16 data-parallel ranks: weights of 50 GiB (20 GiB as every other, and its part of the "
        "experts), KV in what 90% of a GPU leaves: 22 GiB, 1_024 requests at once, 128 MiB between KV and the pool"
    )
    assert mixture.running(config) == 16 * 1024
    large = cluster(1, model=MIXTURE, expert_bytes=400 * GIB, **sizes)
    assert asked(large, ranks(16))["memory of a GPU"].wanted == "more than 148 GiB"


def test_on_cpus_ranks_take_memory_and_cores_each():
    facts = cluster(
        2,
        devices=(),
        model=MIXTURE,
        weight_bytes=40 * GIB,
        expert_bytes=32 * GIB,
        memory={"engine": 64 * GIB},
    )
    sets = [
        "engine.vllm.data_parallel_size=4",
        "engine.kv_blocks=70",
        "pool.kind=none",
        "engine.cpu_cores=0|1|2|3",
    ]
    assert asked(facts, *sets)["memory of an engine"].wanted == "144 GiB"  # 4 x (2 x 16 + 4)
    config, _ = load_with_sources(None, overrides=sets)
    assert rank_text(config, facts) == (
        "each of an engine's 4 data-parallel ranks: weights of 16 GiB (8 GiB as every other, and its part of the "
        "experts), 70 KV blocks, 64 requests at once, cores 0|1|2|3"
    )
    unknown = cluster(2, devices=(), model=MIXTURE, weight_bytes=40 * GIB, memory={"engine": GIB})
    assert not asked(unknown, *sets), "an index alone does not say how large the experts are"
    assert "weights of unknown size, 70 KV blocks" in rank_text(config, unknown)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def check(*options):
    return CliRunner().invoke(main, ["config", "check", *map(str, options)])


def test_the_command_reads_the_models_index_and_exits_by_what_it_found(tmp_path, model):
    file = tmp_path / "seer.toml"
    file.write_text("[engine]\ntensor_parallel = 4\n")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": WEIGHTS_72B}, "weight_map": {}}))
    options = [
        "--model", model, "--engines", 1, "--gpu-gib", 80, "--memory", "buffer=16", "--memory", "dgds=4",
        "--memory", "engine=160",
    ]  # fmt: skip
    full = check(file, *options, "--disk", 100)
    assert full.exit_code == 1, full.output
    assert (
        "change disk of the buffer (the temporary folder, which buffer.spool replaces): 100 GiB"
        in full.output
    )
    assert "judged for 1 engines on GPUs of 80 GiB, weights of 134 GiB; memory: buffer 16 GiB" in full.output
    fits = check(file, *options, "--disk", 300)
    assert fits.exit_code == 0, fits.output
    assert fits.output.endswith("nothing to change\n")
    index.write_text("[")
    (model / "a.safetensors").write_bytes(bytes(3 * 2**20))
    assert "weights of 3 MiB" in check(file, *options, "--disk", 300).output


def test_weights_of_no_size_and_folders_that_nobody_may_read_are_no_traceback(tmp_path, model):
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1e999}}')
    file = tmp_path / "seer.toml"
    file.write_text(
        f'[buffer]\nspool = "{tmp_path}/{"x" * 300}"\n'
    )  # as one that is another user's: it raises
    assert "weights of unknown size" in check(file, "--model", model).output
    (model / "a.safetensors").symlink_to("gone")
    told = check(file, "--model", model, "--disk", 1).output
    assert f"--model = {str(model)!r}"[:60] in told
    assert "a.safetensors: No such file or directory; give a complete Hugging Face model folder" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "head=3"], "'head=3': give ROLE=GIB, with a role of buffer, dgds, engine"),
        (["--memory", "buffer=nan"], "give ROLE=GIB"),
        (["--model", "/nonexistent"], "--model = '/nonexistent': give a folder with the model's config.json"),
        (["--set", "buffer.nonsense=1"], "unknown key buffer.nonsense"),
        (["--engines", "0"], "Invalid value for '--engines'"),
    ],
)
def test_bad_input_is_named(tmp_path, options, told):
    file = tmp_path / "seer.toml"
    file.write_text("")
    result = check(file, *options)
    assert result.exit_code == 2
    assert told in result.output


def test_a_file_that_is_missing_is_named(tmp_path):
    result = check(tmp_path / "none.toml")
    assert result.exit_code == 2
    assert "none.toml: No such file or directory; give a readable TOML file" in result.output


def test_files_of_environment_variables_are_read_as_a_role_would(tmp_path):
    first, second = tmp_path / "all.env", tmp_path / "head.env"
    first.write_text("# of all\nSEER_LOG__FORMAT=json\n\nSEER_BUFFER__LOG=/old\n")
    second.write_text("SEER_BUFFER__LOG=/var/lib/seer/log")
    result = check(first, second, "--disk", 1000)
    lines = [line.split() for line in result.output.splitlines()]
    assert ["buffer.log", '"/var/lib/seer/log"', "environment", "SEER_BUFFER__LOG"] in lines
    assert ["log.format", '"json"', "environment", "SEER_LOG__FORMAT"] in lines
    second.write_text("SEER_BUFFER__LOGS=/x")
    assert "environment SEER_BUFFER__LOGS: unknown key buffer.logs" in check(first, second).output
    assert "cannot be read" in check(tmp_path / "none.env").output
    assert "give one configuration" in check(tmp_path / "a.toml", tmp_path / "b.toml").output
