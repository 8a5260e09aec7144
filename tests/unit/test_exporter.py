"""Who may read metrics, and how the exporter's HTTP server holds up: no buffer is needed to know."""

import asyncio
import base64
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from statuses import status

from seer.common.clock import LoopClock
from seer.common.config import Config, SecurityConfig
from seer.common.errors import ConfigError
from seer.common.wire import ServiceStatus
from seer.observe import http
from seer.observe.access import Access, read_password
from seer.observe.exporter import Exporter
from seer.observe.http import MetricsServer
from seer.observe.observer import Seen


def hello(environ, start):
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"metrics"]


@pytest.fixture
def server():
    """Starts servers of `hello` behind an `Access`."""
    started = []

    def start(access=None, app=hello):
        access = access or Access()
        started.append(MetricsServer("127.0.0.1", 0, access.guard(app), access.context()))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


def get(port, scheme="http", context=None, **headers):
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return {"certificate": folder / "cert.pem", "key": folder / "key.pem"}


def test_beyond_loopback_it_needs_tls_and_a_reason_to_trust(certificate, tmp_path):
    password = tmp_path / "password"
    Access().check("127.0.0.1", insecure=False)
    Access().check("localhost", insecure=False)
    Access().check("0.0.0.0", insecure=True)
    for access in (Access(), Access(password_file=password), Access(**certificate)):
        with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0: beyond loopback give --tls-certificate"):
            access.check("0.0.0.0", insecure=False)
    Access(**certificate, password_file=password).check("0.0.0.0", insecure=False)
    Access(**certificate, client_ca=certificate["certificate"]).check("0.0.0.0", insecure=False)
    with pytest.raises(ConfigError, match="belong together"):
        Access(key=certificate["key"]).check("127.0.0.1", insecure=False)
    with pytest.raises(ConfigError, match="--tls-client-ca needs"):
        Access(client_ca=certificate["key"]).check("127.0.0.1", insecure=False)
    with pytest.raises(ConfigError, match="cannot be used"):
        Access(certificate=certificate["key"], key=certificate["certificate"]).context()


def test_a_password_is_one_line_that_others_cannot_read(tmp_path):
    file = tmp_path / "password"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_password(file)
    for text in ("", "grafana", ":x", "a:\n", "a:b\nc:d\n"):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match="one line, USER:PASSWORD"):
            read_password(file)
    file.write_text("grafana:s:3\n")
    assert read_password(file) == b"grafana:s:3"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        read_password(file)


def test_who_does_not_know_the_password_gets_nothing(server, tmp_path):
    file = tmp_path / "password"
    file.write_text("grafana:secret")
    file.chmod(0o600)
    port = server(Access(password_file=file)).port

    def basic(text):
        return "Basic " + base64.b64encode(text.encode()).decode()

    wrong = (
        "",
        "Basic",
        "Basic ***",
        basic("grafana"),
        basic("grafana:secre"),
        basic("x:secret"),
        "Bearer secret",
    )
    for header in wrong:
        assert get(port, Authorization=header) == (401, ""), header
    assert get(port, Authorization=basic("grafana:secret")) == (200, "metrics")


def test_it_serves_tls_and_asks_for_certificates(server, certificate):
    trusting = ssl.create_default_context(cafile=certificate["certificate"])
    assert get(server(Access(**certificate)).port, "https", trusting) == (200, "metrics")
    port = server(Access(**certificate, client_ca=certificate["certificate"])).port
    with pytest.raises(OSError, match=r"certificate required|reset|closed|EOF|Remote end"):
        get(port, "https", trusting)
    trusting.load_cert_chain(certificate["certificate"], certificate["key"])
    assert get(port, "https", trusting) == (200, "metrics")


def test_who_does_not_finish_delays_nobody_and_is_disconnected(server, certificate, monkeypatch):
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 1.0)
    trusting = ssl.create_default_context(cafile=certificate["certificate"])
    port = server(Access(**certificate)).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    assert get(port, "https", trusting) == (200, "metrics")
    for each in silent:
        each.settimeout(10)
        assert each.recv(1) == b"", "a handshake that does not come is ended"
        each.close()
    for slow in (
        socket.create_connection(("127.0.0.1", server().port)),
        trusting.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1"),
    ):
        until_ended(slow)


def until_ended(slow):
    """Send bytes, each of which comes in time, of a request that never does."""
    slow.settimeout(0.1)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"reset|[Bb]roken pipe|over|EOF"):
        while time.monotonic() < began + 10:
            slow.sendall(b"G")
            try:
                if slow.recv(1) == b"":
                    raise OSError("over")
            except TimeoutError:
                pass
    slow.close()


def test_connections_are_bounded(server):
    busy, free = threading.Barrier(http.MOST_AT_ONCE + 1), threading.Event()

    def slow(environ, start):
        busy.wait(10)
        free.wait(10)
        return hello(environ, start)

    port = server(app=slow).port
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(get(port)[0])) for _ in range(http.MOST_AT_ONCE)
    ]
    for each in threads:
        each.start()
    busy.wait(10)
    with pytest.raises(OSError, match=r"closed|reset|Remote end"):
        get(port)
    free.set()
    for each in threads:
        each.join()
    assert answers == [200] * http.MOST_AT_ONCE
    assert get(server().port)[0] == 200


def test_connections_for_which_there_is_no_thread_take_no_place(server, monkeypatch):
    running = server()

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(http.ThreadingMixIn, "process_request", lambda *_: start(None))
        patched.setattr(running, "handle_error", lambda *_: None)
        for _ in range(http.MOST_AT_ONCE + 1):
            with pytest.raises(OSError, match=r"closed|reset|Remote end"):
                get(running.port)
    assert get(running.port)[0] == 200
    assert not running._since


def exporter(**access):
    config = Config(security=SecurityConfig())
    transport = MemoryTransport(MemoryNetwork())
    return Exporter(
        config,
        transport,
        LoopClock(),
        connect="tcp://127.0.0.1:1",
        listen=("127.0.0.1", 0),
        access=Access(**access),
    )


async def test_a_buffer_that_is_away_is_a_metric_and_no_error():
    it = exporter()
    url = (await it.start())["metrics"]
    running = asyncio.create_task(it.run())
    port = int(url.split(":")[2].split("/")[0])
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": "0.5"}
    began = time.monotonic()
    code, text = await asyncio.to_thread(lambda: get(port, **headers))
    assert code == 200
    assert "seer_up 0.0" in text
    assert text.count("\n") == 3, "nothing else is known"
    assert time.monotonic() - began < 4.0, "it answers in time, also for who does not wait long"
    it._observer.look = lambda seconds: asyncio.sleep(
        0, Seen(status=status(), services={"dgds": ServiceStatus()})
    )
    assert "seer_up 1.0" in (await asyncio.to_thread(get, port))[1]
    it.drain()
    await running
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(get, port)


async def test_an_address_of_no_use_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--listen 192\.0\.2\.1:0"):
        MetricsServer("192.0.2.1", 0, hello, None)
    with pytest.raises(ConfigError, match="--connect"):
        Exporter(Config(), None, LoopClock(), connect="head:7101", listen=("127.0.0.1", 0), access=Access())
