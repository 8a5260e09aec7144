"""Key files, the list of keys, and `seer keys`."""

import stat
import time

import pytest
import zmq
from click.testing import CliRunner

from seer.cli import keys
from seer.cli.keys import add, init, listed, revoke, rotate
from seer.cli.main import main
from seer.common.config import SecurityConfig
from seer.common.errors import ConfigError
from seer.common.net.keys import (
    ANYONE,
    ROLES,
    Peers,
    User,
    load_keys,
    name_under,
    new_name,
    parse_peers,
    read_secret,
    security_of,
)

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""A key; of no random one, since it is part of tests' names."""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "keys"
    init(made)
    return made


def public_of(path):
    return zmq.curve_public(read_secret(path)[1].encode()).decode()


def server(folder):
    return load_keys(SecurityConfig(key=str(folder / "server.key"), peers=str(folder / "public" / "peers")))


def test_init_makes_the_services_key_and_an_operators(folder):
    keys = server(folder)
    assert keys.server == keys.public == (folder / "public" / "server.pub").read_text().strip()
    assert keys.peers.find(keys.public) == User("server", "head")
    assert keys.peers.find(public_of(folder / "operator-owner.key")) == User("operator", "owner")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="has keys already"):
        init(folder)
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_who_is_added_can_be_found_until_it_is_revoked(folder):
    peers = server(folder).peers
    one, other = add(folder, ["trainer:run7", "engine:*"], "")
    assert peers.find(public_of(one)) == User("trainer", "run7")
    assert peers.find(public_of(other)) == User("engine", "*")
    with pytest.raises(ConfigError, match="has a key already"):
        add(folder, ["trainer:run7"], "")
    public = public_of(one)
    revoke(folder, ["trainer:run7"])
    assert peers.find(public) is None
    assert not one.exists()
    assert peers.find(public_of(other)) == User("engine", "*")
    with pytest.raises(ConfigError, match="has no key"):
        revoke(folder, ["trainer:run7"])


def test_of_two_who_make_keys_at_once_one_is_refused(tmp_path, monkeypatch):
    locked = keys._locked

    def meanwhile(folder):
        monkeypatch.setattr(keys, "_locked", locked)
        init(folder)
        return locked(folder)

    monkeypatch.setattr(keys, "_locked", meanwhile)
    with pytest.raises(ConfigError, match="has keys already"):
        init(tmp_path / "keys")
    assert listed(tmp_path / "keys").count("\n") == 2


def test_who_is_named_twice_gets_one_key(folder):
    before = listed(folder)
    with pytest.raises(ConfigError, match="trainer:a has a key already"):
        add(folder, ["trainer:a", "trainer:a"], "")
    assert listed(folder) == before


def test_a_key_expires(folder, monkeypatch):
    peers = server(folder).peers
    (path,) = add(folder, ["observer:grafana"], "2030-01-02")
    assert peers.find(public_of(path)) == User("observer", "grafana")
    monkeypatch.setattr(time, "time", lambda: 1_893_542_400.0)  # 2030-01-02
    assert peers.find(public_of(path)) is None


def test_a_rotated_key_holds_beside_the_new_one_until_it_is_dropped(folder):
    (path,) = add(folder, ["engine:node1"], "")
    peers, old = server(folder).peers, public_of(path)
    rotate(folder, ["engine:node1"], drop_old=False)
    new = public_of(path)
    assert new != old
    assert peers.find(old) == peers.find(new) == User("engine", "node1")
    rotate(folder, ["engine:node1"], drop_old=True)
    assert (peers.find(old), peers.find(new)) == (None, User("engine", "node1"))
    with pytest.raises(ConfigError, match="engine:node2 has no key"):
        rotate(folder, ["engine:node2"], drop_old=False)


def test_all_keys_are_rotated_at_once_also_the_services(folder):
    before = server(folder)
    add(folder, ["engine:node1"], "")
    rotate(folder, [], drop_old=False)
    after = server(folder)
    assert after.public == (folder / "public" / "server.pub").read_text().strip() != before.public
    assert after.peers.find(before.public) == after.peers.find(after.public) == User("server", "head")
    rotate(folder, [], drop_old=True)
    assert after.peers.find(before.public) is None
    assert len(parse_peers(listed(folder), "")) == 3


@pytest.mark.parametrize(
    ("users", "match"),
    [
        (["trainer"], "not ROLE:NAME"),
        (["admin:me"], "roles are server, trainer"),
        (["trainer:"], "not ROLE:NAME"),
        (["trainer:a b"], "not ROLE:NAME"),
        (["trainer:a\x1b[2J"], "not ROLE:NAME"),
        (["server:head"], "`seer keys init` makes"),
    ],
)
def test_a_user_that_cannot_be_is_refused_and_nothing_changes(folder, users, match):
    before = listed(folder)
    with pytest.raises(ConfigError, match=match):
        add(folder, ["trainer:good", *users], "")
    assert listed(folder) == before
    with pytest.raises(ConfigError, match="write a date as YYYY-MM-DD"):
        add(folder, ["trainer:good"], "tomorrow")
    assert listed(folder) == before


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("trainer:a", "write ROLE:NAME PUBLIC"),
        (f"trainer:a {KEY} until", "write ROLE:NAME PUBLIC"),
        (f"trainer:a {KEY} from 2030-01-01", "write ROLE:NAME PUBLIC"),
        (f"trainer:a {KEY[:-1]}", "no key of 40"),
        (f"trainer:a {'~' * 40}", "no key of 40"),
        (f"trainer:a {'ä' * 40}", "no key of 40"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, match):
    with pytest.raises(ConfigError, match=f"peers:3: .*{match}"):
        parse_peers(f"# keys\n\n{line}\n", "peers")


def test_a_secret_that_everybody_can_read_is_not_used(folder):
    path = folder / "server.key"
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=r"chmod 600"):
        server(folder)
    path.chmod(0o440)  # as Kubernetes mounts it
    assert server(folder)
    path.write_text("server:head nonsense")
    with pytest.raises(ConfigError, match="no key of 40"):
        server(folder)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"peers": "x"}, "security.key is empty"),
        ({"server": KEY}, "security.key is empty"),
        ({"key": "missing"}, "security.key = missing: No such file"),
    ],
)
def test_half_of_the_settings_is_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        load_keys(SecurityConfig(**settings))


def test_a_process_that_only_connects_needs_the_services_key(folder):
    (path,) = add(folder, ["trainer:run7"], "")
    with pytest.raises(ConfigError, match=r"security\.server is empty"):
        load_keys(SecurityConfig(key=str(path)))
    for given in (
        str(folder / "public" / "server.pub"),
        (folder / "public" / "server.pub").read_text().strip(),
    ):
        keys = load_keys(SecurityConfig(key=str(path), server=given))
        assert (keys.server, keys.peers) == (server(folder).public, None)
    environ = {"SEER_SECURITY__KEY": str(path), "SEER_SECURITY__SERVER": given, "SEER_ENGINE__NAME": "x"}
    assert load_keys(security_of(environ)) == keys
    assert new_name(keys).startswith("run7-") != new_name(keys)
    assert load_keys(security_of({})) is None
    assert (name_under(keys, "job"), name_under(None, "job")) == ("run7-job", "job")


def test_what_a_key_allows():
    assert User("trainer", "run").objection("trainer", "run") == ""
    assert User("trainer", "run").objection("trainer", "run-3") == ""
    assert User("trainer", "*").objection("trainer", "whatever") == ""
    assert User("engine", "a").objection("node", "a") == ""
    assert "not for the name 'runs'" in User("trainer", "run").objection("trainer", "runs")
    assert "not for the name 'x'" in User("generator", "run").objection("trainer", "x")
    assert User("generator", "run").share("run-3", {}) == "run"
    for role in ROLES:
        assert bool(User(role, "a").objection("ping", "host")) == (role == "http")
        assert bool(User(role, "a").objection("buffer", "buffer")) == (
            role not in ("server", "service", "operator")
        )
    assert ANYONE.objection("engine", "e0") == ""


def test_all_that_come_with_a_key_for_a_name_have_one_share():
    run = User("trainer", "run")
    assert {run.share(name, {}) for name in ("run", "run-3", "run-4")} == {"run"}
    assert run.share("run-3", {"run-3": 2.0}) == "run", "a name of its own brings nothing"
    shares = {"run": 1.0, "run-3": 2.0, "": 1.0, "host": 0.5}
    for user in (User("trainer", "*"), User("operator", "root"), ANYONE):
        assert user.share("run-3-x", shares) == "run-3"
        assert [user.share(name, shares) for name in ("run", "runs", "host-7", "x")] == [
            "run",
            "runs",
            "host",
            "x",
        ]


def test_a_gateway_says_by_whose_share_it_submits_and_nobody_else_does():
    shares = {"agents": 2.0}
    for user in (User("gateway", "web"), User("gateway", "*"), User("operator", "root")):
        assert user.share("web-1", shares, "agents") == "agents"
    assert User("gateway", "web").share("web-1", shares, "") == "web"
    for role in ("trainer", "generator", "engine", "observer"):
        assert User(role, "run").share("run-1", shares, "agents") == "run"
    assert User("trainer", "*").share("run-1", shares, "agents") == "run-1"


def test_a_list_that_is_replaced_is_read_again_and_one_that_breaks_is_not(tmp_path):
    path = tmp_path / "peers"
    path.write_text(f"trainer:a {KEY}\n")
    peers = Peers(path)
    path.write_text("broken\n")
    assert peers.find(KEY) == User("trainer", "a")
    path.unlink()
    assert peers.find(KEY) == User("trainer", "a")
    path.write_text(f"trainer:bb {KEY}\n")
    assert peers.find(KEY) == User("trainer", "bb")
    path.write_text("")
    assert peers.find(KEY) is None


def test_the_command_says_where_keys_lie_and_what_is_wrong(tmp_path):
    run = CliRunner().invoke
    folder = tmp_path / "keys"
    assert run(main, ["keys", "list", str(folder)]).exit_code == 2
    made = run(main, ["keys", "init", str(folder)])
    assert made.output.split() == [str(folder / "server.key"), str(folder / "operator-owner.key")]
    made = run(main, ["keys", "add", str(folder), "trainer:a", "engine:b", "--until", "2030-01-01"])
    assert made.output.split() == [str(folder / "trainer-a.key"), str(folder / "engine-b.key")]
    assert run(main, ["keys", "rotate", str(folder), "trainer:a"]).exit_code == 0
    assert run(main, ["keys", "rotate", str(folder), "--drop-old"]).exit_code == 0
    assert run(main, ["keys", "revoke", str(folder), "engine:b"]).exit_code == 0
    shown = run(main, ["keys", "list", str(folder)]).output
    assert [line.split()[0] for line in shown.splitlines()] == ["server:head", "operator:owner", "trainer:a"]
    wrong = run(main, ["keys", "add", str(folder), "root:x"])
    assert (wrong.exit_code, "roles are" in wrong.stderr) == (2, True)


def test_who_comes_to_ask_may_only_ask_whatever_its_key():
    for role in ("observer", "trainer", "engine", "operator"):
        assert User(role, "a").only_reads("status")
    assert User("observer", "a").only_reads("trainer")
    assert not User("trainer", "a").only_reads("trainer")
    assert not User("generator", "a").only_reads("trainer")
    assert not User("engine", "a").only_reads("engine")
    assert not User("service", "a").only_reads("context")
