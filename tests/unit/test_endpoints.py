"""Addresses of sockets, and whose key answers there."""

import pytest

from seer.common.endpoints import check_endpoint, is_local
from seer.common.errors import ConfigError

KEY = "0a" * 32


@pytest.mark.parametrize("endpoint", ["tcp://host:7101", f"tcp://host:7101#{KEY}", "ipc:///tmp/a#b"])
def test_an_endpoint_may_say_a_key(endpoint):
    check_endpoint("endpoint", endpoint)


@pytest.mark.parametrize("key", ["", "0a", KEY + "0a", KEY.upper(), "z" * 64])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ConfigError, match=r"engines = .*no key of 64"):
        check_endpoint("engines", f"tcp://host:7101#{key}")


def test_what_only_this_machine_reaches():
    local = ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.8.9.1:*"]
    assert [is_local(each) for each in local] == [True] * 4
    assert not any(
        is_local(each) for each in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1")
    )
