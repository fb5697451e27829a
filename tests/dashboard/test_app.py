"""What the dashboard answers: to whom, what, and that nothing a stranger sends disturbs it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.dashboard.served import DEADLINE_S, Client, served

from keepstep.dashboard import wire
from keepstep.dashboard.process import TOKEN
from keepstep.trace.timeline.run import Run

PATHS = [
    "/",
    "/api/stream",
    "/api/phases?begin=0&end=1",
    "/api/overview",
    "/metrics",
    "/report",
]
PATHS += ["/static/app.js", "/nothing"]


@pytest.fixture(scope="module")
def client(recorded: Path) -> Iterator[Client]:
    with served(recorded) as found:
        yield found


# ---- To whom --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eA=="}, {"cookie": "keepstep-1=x"}]
)
def test_without_the_token_nothing_is_shown(client: Client, path: str, headers: dict[str, str]) -> None:
    answer = httpx.get(client.base + path, headers=headers, trust_env=False, timeout=DEADLINE_S)
    assert answer.status_code == 401
    assert "Open the link that keepstep printed" in answer.text
    assert client.token not in answer.text


def test_only_health_is_open(client: Client) -> None:
    answer = httpx.get(client.base + "/healthz", trust_env=False, timeout=DEADLINE_S)
    assert (answer.status_code, answer.text) == (200, "ok\n")


def test_the_link_lets_a_browser_in(client: Client) -> None:
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as browser:
        answer = browser.get(client.link)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert f"keepstep-{client.port}=" in cookie
        assert browser.get(client.base + "/").status_code == 200
        assert browser.get(client.base + "/api/overview").status_code == 200


@pytest.mark.parametrize("path", ["/api/overview?token=", "/?token=wrong", "/?token="])
def test_a_token_in_an_address_counts_on_the_first_page_only(client: Client, path: str) -> None:
    address = client.base + path + (client.token if path.startswith("/api") else "")
    assert httpx.get(address, trust_env=False, timeout=DEADLINE_S).status_code == 401


def test_the_token_lies_where_its_owner_only_can_read_it(client: Client, recorded: Path) -> None:
    assert (recorded / TOKEN).read_text().strip() == client.token
    assert stat.S_IMODE(os.stat(recorded / TOKEN).st_mode) == 0o600
    assert len(client.token) >= 32


def test_the_token_stays_and_one_that_others_could_read_does_not(recorded: Path, client: Client) -> None:
    with served(recorded) as again:
        assert again.token == client.token
    os.chmod(recorded / TOKEN, 0o644)
    with served(recorded) as other:
        assert other.token != client.token
        assert stat.S_IMODE(os.stat(recorded / TOKEN).st_mode) == 0o600
    (recorded / TOKEN).write_text(client.token + "\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "NONSENSE"])
@pytest.mark.parametrize("path", ["/", "/api/stream", "/api/anything"])
def test_nothing_acts(client: Client, method: str, path: str) -> None:
    answer = client.http.request(method, path, content=b"x" * 1000)
    assert answer.status_code in (400, 405)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_from_outside_can_run_in_the_page(client: Client, path: str) -> None:
    with client.http.stream("GET", path) as answer:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        if answer.headers.get("content-type", "").startswith("text/html"):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'unsafe" not in policy
            assert "http" not in policy


def test_the_page_asks_for_nothing_from_elsewhere(client: Client) -> None:
    static = Path(wire.__file__).with_name("static")
    names = sorted(path.name for path in static.iterdir())
    assert "index.html" in names
    for path in static.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "eval(" not in text
        assert "innerHTML" not in text
    for name in names:
        assert client.get("/" if name == "index.html" else f"/static/{name}").status_code == 200


# ---- What -----------------------------------------------------------------------------------------------------------


def test_a_page_gets_the_whole_run_when_it_opens(client: Client, shown: Run) -> None:
    with client.stream() as events:
        name, data = next(events)
    assert name == "snapshot"
    assert data["run"]["id"] == shown.info.run
    assert data["run"]["ended"]["exit_code"] == 0
    assert data["run"]["is_alive"] is False
    assert data["job"] == json.loads(json.dumps(wire.describe_job(shown)))
    assert len(data["recoveries"]) == len(shown.scenes) > 1
    for told, scene in zip(data["recoveries"], shown.scenes, strict=True):
        assert told["milliseconds"] == scene.record.milliseconds()
        assert [failure["rank"] for failure in told["failures"]] == [each.rank for each in scene.record.failures]
        assert sum(len(each["ranks"]) for each in told["spans"]) == len(scene.spans())
    assert len(data["events"]) == min(len(shown.events), wire.MAX_EVENTS)
    phases = data["phases"]
    assert len({len(column) for column in phases.values()}) == 1
    assert len(phases["t"]) == len(shown.history.newest(1 << 30))
    assert data["now"] >= max(phases["t"])


def test_any_stretch_of_the_past_can_be_asked_for(client: Client, shown: Run) -> None:
    end = wire.micros(shown, shown.now_s)
    whole = client.get(f"/api/phases?begin=-1000&end={end}").json()
    assert not whole["truncated"]
    assert len(whole["phases"]["t"]) == len(shown.history.newest(1 << 30))
    middle = whole["phases"]["t"][len(whole["phases"]["t"]) // 2]
    half = client.get(f"/api/phases?begin={middle}&end={end}").json()
    workers = {w for t, w in zip(half["phases"]["t"], half["phases"]["w"], strict=True) if t < middle}
    before = {w for t, w in zip(whole["phases"]["t"], whole["phases"]["w"], strict=True) if t < middle}
    assert workers == before != set()


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("", "begin='': a whole number of microseconds is needed"),
        ("?begin=1", "end='': a whole number"),
        ("?begin=x&end=1", "begin='x'"),
        ("?begin=1.5&end=2", "begin='1.5'"),
        ("?begin=5&end=4", "begin=5 is after end=4"),
        ("?begin=0&end=99999999999999999999", "longer than any run"),
    ],
)
def test_a_stretch_that_makes_no_sense_is_refused(client: Client, query: str, problem: str) -> None:
    answer = client.get("/api/phases" + query)
    assert answer.status_code == 400
    assert problem in answer.text


def test_the_overview_counts_every_step(client: Client, shown: Run) -> None:
    found = client.get("/api/overview").json()
    assert sum(found["steps"]) == sum(shown.pace.buckets) > 0


def test_the_report_is_one_file(client: Client, shown: Run) -> None:
    answer = client.get("/report")
    assert answer.headers["content-type"].startswith("text/html")
    assert shown.info.run in answer.text


def test_metrics_can_be_scraped(client: Client, shown: Run) -> None:
    text = client.get("/metrics").text
    assert "# HELP keepstep_recoveries_total" in text
    counted = [line for line in text.splitlines() if line.startswith("keepstep_recoveries_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == len(shown.scenes)


# ---- Whatever is sent -----------------------------------------------------------------------------------------------


def raw(client: Client, data: bytes, end: bool = True) -> bytes:
    """What is answered to some bytes; empty where the connection is closed without a word."""
    address = ("127.0.0.1", client.port)
    with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=DEADLINE_S) as line:
        line.sendall(data)
        if end:
            line.shutdown(socket.SHUT_WR)
        return line.recv(1 << 16)
    return b""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400))
@example(b"GET / HTTP/1.1\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"GET /static/../app.py HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"GET /%00%ff HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
def test_garbage_is_refused_and_the_next_one_is_answered(client: Client, data: bytes) -> None:
    answer = raw(client, data)
    assert not answer.startswith(b"HTTP/1.1 200")
    assert not answer.startswith(b"HTTP/1.1 500")
    assert client.token.encode() not in answer
    assert client.get("/healthz").status_code == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n#?/"), max_size=40))
def test_no_path_breaks_it(client: Client, name: str) -> None:
    for path in (f"/{name}", f"/static/{name}", f"/recovery/{name}", f"/api/phases?begin={name}&end=1"):
        with contextlib.suppress(httpx.InvalidURL), client.http.stream("GET", path) as answer:
            assert answer.status_code < 500


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "//etc/passwd"])
def test_nothing_but_the_page_is_served(client: Client, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\nConnection: close\r\n\r\n"
    answer = raw(client, request.encode(), end=False)
    assert b" 404 " in answer.split(b"\r\n")[0]


def test_endless_headers_are_cut_off(client: Client) -> None:
    endless = b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * (1 << 20)
    assert b"200 OK" not in raw(client, endless, end=False)


def test_a_websocket_is_refused(client: Client) -> None:
    request = (
        f"GET /api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b" 101 " not in raw(client, request.encode(), end=False).split(b"\r\n")[0]
