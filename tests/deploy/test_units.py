"""The deployment files: what can be checked of them without root or a daemon."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from seer.common.config import load
from seer.common.process.notify import Notifier

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
UNITS = sorted(path.name for path in (COMPOSE / "systemd").glob("*.service"))
MAX_EXPOSURE = {"seer-engine@.service": 16, "seer-pool-owner.service": 15, "seer-gateway.service": 13}
"""Of 100, as `systemd-analyze security` counts; an unhardened service has over 90. Others have 12 at most."""


@pytest.fixture
def installed(tmp_path):
    """Copy the units as the install script does, with a program that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for file in (COMPOSE / "systemd").rglob("*"):
        if file.suffix in (".service", ".target", ".conf"):
            copy = tmp_path / file.relative_to(COMPOSE / "systemd")
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(file.read_text().replace("/opt/seer/bin/seer", sys.executable))
    return tmp_path


def analyze(folder, *command):
    return subprocess.run(
        ["systemd-analyze", *command],
        capture_output=True, text=True, timeout=60, check=False, env={"SYSTEMD_UNIT_PATH": f"{folder}:", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.mark.parametrize("name", [*UNITS, "seer.target"])
def test_systemd_finds_nothing_wrong(installed, name):
    name = name.replace("@.", "@0.")
    (installed / name).exists() or (installed / name).symlink_to(installed / name.replace("@0.", "@."))
    found = analyze(installed, "verify", "--man=no", str(installed / name))
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_check_notices_a_misspelt_setting(installed):
    unit = installed / UNITS[0]
    unit.write_text(unit.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "'WatchdogSecs'" in analyze(installed, "verify", "--man=no", str(unit)).stderr


@pytest.mark.parametrize("name", UNITS)
def test_units_are_hardened_restarted_and_watched(installed, name):
    found = analyze(
        installed,
        "security",
        "--offline=true",
        f"--threshold={MAX_EXPOSURE.get(name, 12)}",
        str(installed / name),
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    text = (installed / name).read_text() + (installed / "seer-.service.d" / "10-common.conf").read_text()
    for setting in (
        "Type=notify", "User=seer", "Restart=on-failure", "WatchdogSec=", "PartOf=seer.target", r"MemoryMax=\d+%",
        "MemorySwapMax=0",
    ):  # fmt: skip
        assert re.search(f"^{setting}", text, re.MULTILINE), setting


def test_units_may_listen_where_the_example_configuration_has_them():
    loaded = load(COMPOSE / "seer.toml")
    config, gateway = loaded.endpoints, loaded.gateway
    owns = {
        "buffer": [config.trainers, config.engines, config.events, config.event_snapshots],
        "context": [config.estimates, config.estimate_snapshots],
        "dgds": [config.dgds],
        "gateway": [gateway.data, gateway.control],
    }
    for name, endpoints in owns.items():
        text = (COMPOSE / "systemd" / f"seer-{name}.service").read_text()
        allowed = set()
        for first, last in re.findall(r"^SocketBindAllow=tcp:(\d+)-?(\d*)$", text, re.MULTILINE):
            allowed |= set(range(int(first), int(last or first) + 1))
        assert "\nSocketBindDeny=any\n" in text
        assert allowed == {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}


def test_the_install_script_says_what_it_wants():
    script = COMPOSE / "systemd" / "install.sh"
    for arguments, says in (
        (["node"], "give a number per model replica"),
        ([], "install.sh head"),
        (["x"], "PREFIX"),
    ):
        answer = subprocess.run(
            ["sh", script, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert answer.returncode != 0
        assert says in answer.stderr


def test_the_example_configuration_is_one():
    config = load(COMPOSE / "seer.toml")
    written = tomllib.loads((COMPOSE / "seer.toml").read_text())["endpoints"]
    assert written.items() <= {name: getattr(config.endpoints, name) for name in written}.items()


def test_every_container_has_a_limit_of_memory_that_can_be_set():
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        wanted = r"\$\{SEER_" + name.replace("-", "_").upper() + r"_MEMORY:-\d+g\}"
        assert re.fullmatch(wanted, service["mem_limit"]), name


SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_healthy_once_its_own_service_is_ready(name, tmp_path):
    """Whatever the master of a pool, or the buffer, does."""
    kind, command = SERVICES[name]["healthcheck"]["test"]
    file = SERVICES[name]["environment"]["SEER_ALIVE_FILE"]
    assert (kind, command.count(file)) == ("CMD-SHELL", 2)
    command = command.replace(file, str(tmp_path / "alive"))

    def healthy():
        done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    assert not healthy()
    notifier = Notifier({"SEER_ALIVE_FILE": str(tmp_path / "alive")})
    assert not healthy()
    notifier.ready()
    assert healthy()
    os.utime(tmp_path / "alive", (time.time() - 70,) * 2)
    assert not healthy()


def test_the_gateway_is_a_trainer_with_a_key_of_its_own():
    """systemd and compose give it the same one, and it asks whom it serves for theirs."""
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    service = compose["services"]["gateway"]
    (secret,) = service["secrets"]
    assert compose["secrets"][secret["source"]]["file"].endswith("/gateway-http.key")
    assert (
        "seer-gateway.service) key=$keys/gateway-http.key" in (COMPOSE / "systemd" / "install.sh").read_text()
    )
    environ = {
        name: value
        for name, value in service["environment"].items()
        if "GATEWAY" in name or "SECURITY" in name
    }
    config = load(None, environ)
    assert (config.gateway.data, config.gateway.control) == ("0.0.0.0:7110", "0.0.0.0:7111")
    assert (config.security.key, config.security.peers) == ("/run/secrets/key", "/etc/seer/keys/peers")
    assert service["ports"] == ["127.0.0.1:7110:7110", "127.0.0.1:7111:7111"]  # no TLS


@pytest.mark.parametrize("compose", [["docker-compose"], ["docker", "compose"]], ids=" ".join)
def test_compose_takes_the_file(compose):
    if shutil.which(compose[0]) is None:
        pytest.skip(f"{compose[0]} is not installed")
    if subprocess.run([*compose, "version"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"{' '.join(compose)} is not installed")
    files = ["-f", COMPOSE / "compose.yaml", "-f", COMPOSE / "compose.cuda.yaml"]
    profiles = [
        part for name in ("head", "node", "pool", "gateway", "metrics") for part in ("--profile", name)
    ]
    found = subprocess.run(
        [*compose, *files, *profiles, "config"], cwd=COMPOSE, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    limits = dict(re.findall(r"^SEER_(\w+)_MEMORY=(\d+)g$", (COMPOSE / ".env").read_text(), re.MULTILINE))
    for name, service in yaml.safe_load(found.stdout)["services"].items():
        size = int(limits[name.replace("-", "_").upper()])
        assert str(service["mem_limit"]) in (f"{size}g", str(size * 2**30)), name


def test_every_setting_of_compose_is_described_with_its_default():
    used = set(
        re.findall(r"\$\{(\w+):-([^}]*)\}", "".join(f.read_text() for f in COMPOSE.glob("compose*.yaml")))
    )
    described = dict(re.findall(r"^#? ?([A-Z_]+)=([^\s#]*)", (COMPOSE / ".env").read_text(), re.MULTILINE))
    for name, default in used:
        assert name in described, name
        if name != "SEER_HEAD":  # each service's own name
            assert described[name] == default, name


@pytest.mark.parametrize(
    ("service", "key", "folder"), [("buffer", "log", "log"), ("dgds", "remember_path", "remembered")]
)
def test_what_lasts_is_in_the_folder_that_its_unit_and_container_may_write(service, key, folder):
    unit = (COMPOSE / "systemd" / f"seer-{service}.service").read_text()
    environ = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
    assert getattr(getattr(load(None, environ, []), service), key) == f"/var/lib/seer/{folder}"
    assert "\nStateDirectory=seer\n" in unit
    container = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"][service]
    own = f"SEER_{service.upper()}"
    environ = {name: value for name, value in container["environment"].items() if name.startswith(own)}
    assert getattr(getattr(load(None, environ, []), service), key) == f"/var/cache/seer/{folder}"
    assert f"{service}-cache:/var/cache/seer" in container["volumes"]
