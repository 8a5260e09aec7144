import re

import pytest

from seer.common.config import Config, EngineConfig, LogConfig, SharedConfig, dump, load, shared_hash
from seer.common.errors import ConfigError
from seer.common.tables import REMOVED, fields


def test_nothing_given_is_the_default():
    assert load(None) == Config()


def test_precedence_is_file_then_environment_then_set(file):
    path = file('[engine]\nkv_blocks = 1\nname = "file"\nmax_num_seqs = 5\n')
    environ = {"SEER_ENGINE__KV_BLOCKS": "2", "SEER_ENGINE__NAME": "env", "PATH": "/bin", "SEER_OTHER": "x"}
    config = load(path, environ, ["engine.kv_blocks=3"])
    assert (config.engine.kv_blocks, config.engine.name, config.engine.max_num_seqs) == (3, "env", 5)


def test_text_takes_the_type_of_its_field():
    config = load(
        None,
        {"SEER_ENGINE__NAME": "007", "SEER_LOG__FORMAT": "json"},
        ["engine.load_seconds=1", "engine.kv_cache_gib=0.5", "shared.model = a=b", "engine.cpu_cores=0-3"],
    )
    assert config.engine.name == "007"
    assert config.log.format == "json"
    assert config.engine.load_seconds == 1.0
    assert config.engine.kv_cache_gib == 0.5
    assert config.shared.model == "a=b"
    assert config.engine.cpu_cores == "0-3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engin]\n", r"seer.toml: unknown key engin; did you mean engine\?"),
        ("[engine]\nkv_block = 1\n", r"unknown key engine.kv_block; did you mean engine.kv_blocks\?"),
        ("[zzz]\n", "unknown key zzz; valid: shared, endpoints"),
        ('[engine]\nkv_blocks = "many"\n', r"engine.kv_blocks"),
        ('[log]\nlevel = "loud"\n', r"log.level"),
        ("engine = 3\n", "engine"),
        (
            "[drafts]\nmax_draft = 129\n",
            r"drafts.max_draft = 129: give a whole number from 1 to 128; to draft nothing",
        ),
        (
            "[drafts]\nmax_paths = 0\n",
            r"drafts.max_paths = 0: give a whole number from 1 to 4_096; left out, as many",
        ),
        ('[drafts]\nsource = "all"\n', r"drafts.source"),
        ("[engine\n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_named_with_key_and_fix(file, text, says):
    with pytest.raises(ConfigError, match=says):
        load(file(text))


def test_a_setting_in_a_sections_place_is_named_though_one_of_its_keys_is_given_elsewhere(file):
    with pytest.raises(ConfigError, match=r"Expected `object`, got `int` - at `\$.engine`"):
        load(file("engine = 3\n"), {}, ["engine.replay.vocab_size=7"])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml: .*give a readable TOML file"):
        load(tmp_path / "nowhere.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(binary)


@pytest.mark.parametrize(
    ("environ", "overrides", "says"),
    [
        (
            {"SEER_ENGINE__KV_BLOCK": "1"},
            [],
            "environment SEER_ENGINE__KV_BLOCK: unknown key engine.kv_block",
        ),
        ({"SEER_ENGINE__KV_BLOCKS": "many"}, [], "environment SEER_ENGINE__KV_BLOCKS: engine.kv_blocks"),
        ({}, ["engine.kv_blocks"], "write --set section.key=value"),
        ({}, ["engine=1"], "--set engine=1"),
        ({}, ["nope.kv_blocks=1"], "unknown key nope"),
        ({}, ["engine.kv_blocks=many"], "--set engine.kv_blocks=many: engine.kv_blocks"),
        ({}, ["engine.backend=vlm"], "--set engine.backend=vlm: engine.backend"),
    ],
)
def test_a_bad_override_is_named(environ, overrides, says):
    with pytest.raises(ConfigError, match=says):
        load(None, environ, overrides)


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_that_there_was_once_is_refused_with_what_to_do(file, name):
    section, _, key = name.partition(".")
    says = re.escape(f"{name} is no longer a setting; {REMOVED[name]}")
    with pytest.raises(ConfigError, match=f"seer.toml: {says}"):
        load(file(f"[{section}]\n{key} = 1\n"))
    environ = {f"SEER_{section}__{key}".upper(): "1"}
    for arguments in ((None, environ), (None, {}, [f"{name}=1"])):
        with pytest.raises(ConfigError, match=says):
            load(*arguments)


def test_settings_that_there_were_once_are_none_now():
    names = {f"{name}.{key}" for name, kind in fields(Config).items() for key in fields(kind.type)}
    assert not names & set(REMOVED)


def test_a_dump_reads_back_equal(file):
    config = Config(
        engine=EngineConfig(name='quote " and é', kv_blocks=48, kv_cache_gib=0.25),
        log=LogConfig(format="json"),
    )
    assert load(file(dump(config))) == config
    assert load(file(dump(Config()))) == Config()


def test_the_shared_hash_covers_what_must_agree_and_nothing_else():
    base = shared_hash(SharedConfig(model="/models/tiny"))
    assert base == shared_hash(SharedConfig(model="/elsewhere/tiny"))
    assert base != shared_hash(SharedConfig(model="/models/other"))
    assert base != shared_hash(SharedConfig(model="/models/tiny", block_size=16))
