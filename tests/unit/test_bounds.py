"""Every number in settings has bounds, and none outside them gets in by any door."""

import math
import tomllib

import msgspec
import pytest

from seer.client import RolloutClient
from seer.common import bounds
from seer.common.bounds import Section, Within, check_seconds, numbers
from seer.common.config import Config, GatewayConfig, dump, load
from seer.common.errors import ConfigError, InvalidField
from seer.gateway.sockets import listen


def sections(kind=Config, name=""):
    """Yield every section of the configuration with its dotted name."""
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            dotted = f"{name}.{field.name}" if name else field.name
            yield dotted, field.type
            yield from sections(field.type, dotted)


def each_number():
    """Yield (dotted name, section, field, type, bounds) of every number."""
    for dotted, section in sections():
        for field in msgspec.structs.fields(section):
            for kind, within in numbers(field.type):
                yield pytest.param(section, field.name, kind, within, id=f"{dotted}.{field.name}")


NUMBERS = list(each_number())


def is_list(section, name):
    return "tuple" in str(next(each.type for each in msgspec.structs.fields(section) if each.name == name))


def is_table(section, name):
    return "dict" in str(next(each.type for each in msgspec.structs.fields(section) if each.name == name))


def given(section, name, value):
    value = {"a": value} if is_table(section, name) else value
    return {name: (value,) if is_list(section, name) else value}


def test_all_numbers_are_found():
    found = {each.id for each in NUMBERS}
    in_defaults = {
        f"{section}.{name}"
        for section, values in tomllib.loads(dump(Config())).items()
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert in_defaults < found
    assert {"buffer.chunk_size", "engine.vllm.cudagraph_capture_sizes", "engine.kv_cache_gib"} < found


@pytest.mark.parametrize(("section", "name", "kind", "within"), NUMBERS)
def test_every_number_has_bounds_and_is_refused_outside_them_by_name(section, name, kind, within):
    assert within is not None, "declare bounds beside the field"
    assert -1 < within.low < within.high < math.inf
    outside = [within.low - 1, -1, within.high * 2, True, "5", math.nan, math.inf, -math.inf]
    outside += [10**400, within.low + 0.5] if kind is int else [-0.001]
    for value in outside:
        with pytest.raises(ConfigError) as refused:
            section(**given(section, name, value))
        key = f"{name}.a" if is_table(section, name) else name
        start = f"{section.title}.{key} = {value!r}: give a"
        assert str(refused.value).startswith(start)
    for value in (within.low, within.high):
        section(**given(section, name, kind(value)))
    with pytest.raises(ConfigError, match=name):
        msgspec.structs.replace(section(), **given(section, name, -1))


def test_sections_are_refused_under_the_names_that_files_have():
    assert all(section.title == dotted for dotted, section in sections() if bounds._numbers(section))
    assert all(issubclass(section, Section) for _, section in sections())


@pytest.mark.parametrize(
    "override",
    [
        "buffer.max_requests=-1", "buffer.engine_silence_seconds=-3", "buffer.engine_silence_seconds=nan",
        "buffer.trainer_lease_seconds=0", "buffer.engine_silence_seconds=1.5", "buffer.result_bytes=-5", "engine.load_seconds=inf",
        "gateway.client_seconds=-inf", "engine.gpu_memory_utilization=1.5", "engine.vllm.cudagraph_capture_sizes=[0]",
    ],
)  # fmt: skip
def test_no_door_takes_what_makes_no_sense(override, tmp_path):
    name, _, value = override.partition("=")
    *section, key = name.split(".")
    file = tmp_path / "seer.toml"
    file.write_text(f"[{'.'.join(section)}]\n{key} = {value}\n")
    environ = {f"SEER_{'__'.join(section)}__{key}".upper(): value}
    for arguments in ((file,), (None, environ), (None, {}, [override])):
        with pytest.raises(ConfigError, match=rf"{name} = .*: give a (whole )?number from"):
            load(*arguments)


def test_bounds_say_what_to_set_instead():
    assert Within(1, 4, "0 is not off").refusal(0) == "give a number from 1 to 4; 0 is not off"
    assert Within(1, 2**31).refusal(0.5, whole=True) == "give a whole number from 1 to 2_147_483_648"
    assert Within(0.5, 4).refusal(0.5) == ""


def test_the_kernel_takes_what_the_gateway_may_be_told_of_clients():
    (kind,) = (each.type for each in msgspec.structs.fields(GatewayConfig) if each.name == "client_seconds")
    ((_, within),) = numbers(kind)
    for seconds in (within.low, within.high):
        listen("gateway.data", "127.0.0.1:0", seconds).close()


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_deadlines_of_callers_are_positive(value):
    with pytest.raises(InvalidField, match=r"connect_seconds = .*: must be positive"):
        RolloutClient("ipc://nowhere", connect_seconds=value)
    with pytest.raises(InvalidField, match="silence_seconds"):
        RolloutClient("ipc://nowhere", silence_seconds=value)
    assert check_seconds("x", None) is None
    assert check_seconds("x", math.inf) == math.inf
