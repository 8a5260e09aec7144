"""Addresses of the configuration: free where services listen here, answered where they listen elsewhere; the
clock.

Invariants (tests/unit/test_doctor_machine.py asserts them):
- a port of this machine that something listens on fails, by the setting's name;
- an address of another machine is only connected to, and that nobody answers there yet is no failure.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from pathlib import Path

from msgspec.structs import asdict

from seer.common.config import Config
from seer.common.endpoints import shards
from seer.doctor.checked_config import given
from seer.doctor.report_lines import Report

CONNECT_SECONDS = 2.0
SLOW_CLOCK_NS = 1_000.0
"""A reading of the clock takes some 50 ns; one that leaves the process takes microseconds."""

_RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_FEW_PORTS = 1_000
_READINGS = 20_000
_YEAR = 2026
"""No clock that is right says an earlier year."""


def check(report: Report) -> None:
    """Check every address of the configuration, and this machine's own."""
    config = given(report)
    for field, host, port in addresses(config):
        judge_address(report, field, host, port)
    _check_loopback(report)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    kept = _RESERVED.read_text() if _RESERVED.is_file() else ""
    inside = [
        field for field, _, port in addresses(config) if first <= port <= last and not is_reserved(port, kept)
    ]
    text = (
        f"outgoing connections may take the port of {', '.join(inside)}"
        if inside
        else "no port lies among those"
    )
    report.prefer(
        not inside, f"{text} ({first}-{last})", "choose ports below that range, or reserve them: "
        "sysctl net.ipv4.ip_local_reserved_ports",
    )  # fmt: skip
    report.expect(last - first >= _FEW_PORTS, "there are ports for outgoing connections",
                  "sysctl -w net.ipv4.ip_local_port_range='32768 60999'", ports=last - first)  # fmt: skip


def addresses(config: Config) -> list[tuple[str, str, int]]:
    """Return the setting, host and port of each address where a service is to listen."""
    named = {
        f"endpoints.{name}": value for name, value in asdict(config.endpoints).items() if name != "bind_host"
    }
    found = [
        (field, each.removeprefix("tcp://"))
        for field, value in named.items()
        for each in shards(value)
        if each.startswith("tcp://")
    ]
    if config.pool.kind != "none":
        found += [("pool.master", config.pool.master), ("pool.metrics", config.pool.metrics)]
    parts = [(field, *address.rpartition(":")[::2]) for field, address in found]
    return [(field, host.strip("[]"), int(port)) for field, host, port in parts if int(port)]


def is_reserved(port: int, kept: str) -> bool:
    """Return whether outgoing connections leave a port alone, by the system's list: "8080,9148-9150"."""
    parts = (part.partition("-") for part in kept.strip().split(",") if part)
    return any(int(first) <= port <= int(last or first) for first, _, last in parts)


def judge_address(report: Report, field: str, host: str, port: int) -> None:
    """Judge one address."""
    text = f"{field}: {host}:{port}"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.replace("*", ""), port), family=family):
            report.expect(True, f"{text} is free", "")
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", 0) == errno.EADDRINUSE:
            fix = f"end what listens there (ss -ltnp 'sport = :{port}'), or set {field} to another port"
            report.expect(False, f"{text} is taken: another process listens there", fix)
        elif getattr(error, "errno", 0) == errno.EACCES:
            report.expect(False, f"{text} is not allowed to this user", f"set {field} to a port above 1023")
        else:
            report.note(f"{text} is not of this machine: {_answer(host, port)}")


def _answer(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return "something answers there"
    except (OSError, UnicodeError) as error:
        return f"nothing answers there now ({error})"


def _check_loopback(report: Report) -> None:
    problem = ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(socket.create_connection(server.getsockname(), CONNECT_SECONDS))
        except OSError as error:
            problem = str(error)
    report.expect(not problem, f"processes here reach each other by 127.0.0.1{problem and ': ' + problem}",
                  "bring the loopback interface up: ip link set lo up")  # fmt: skip


def clock(report: Report) -> None:
    """Check that clocks are right and quick to read: engines read them several times a step."""
    begun = time.perf_counter_ns()
    for _ in range(_READINGS):
        time.perf_counter_ns()
    judge_clock(report, time.gmtime().tm_year, (time.perf_counter_ns() - begun) / _READINGS)


def judge_clock(report: Report, year: int, reading_ns: float) -> None:
    """Judge the clock by the year that it says, and nanoseconds per reading."""
    fix = "set the time: the incarnation of a process is numbered by it (timedatectl set-ntp true)"
    report.expect(year >= _YEAR, f"the clock says the year {year}", fix)
    report.prefer(
        reading_ns <= SLOW_CLOCK_NS, f"reading the clock takes {reading_ns:.0f} ns",
        "use the processor's clock: /sys/devices/system/clocksource/clocksource0/current_clocksource",
    )  # fmt: skip
