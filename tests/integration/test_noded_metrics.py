"""The agent's metrics over HTTP: whoever connects and says nothing takes neither its threads nor its files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.request import urlopen

import pytest
from prometheus_client import Metric

from noded import metrics
from tests.support_service import HANG_SECONDS


class NoMetrics(metrics.NodeMetrics):
    def __init__(self) -> None: ...

    def collect(self) -> Iterator[Metric]:
        yield Metric("virial_noded_here", "1.", "gauge")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_metrics_are_served(host: str) -> None:
    try:
        port = metrics.serve_metrics(NoMetrics(), host, 0)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    shown = f"[{host}]" if ":" in host else host
    with urlopen(f"http://{shown}:{port}/metrics", timeout=HANG_SECONDS) as answer:
        assert b"# HELP virial_noded_here" in answer.read()


def test_silent_connections_to_the_metrics_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics._Handler.timeout == metrics.REQUEST_SECONDS  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(metrics._Handler, "timeout", 2.0)  # pyright: ignore[reportPrivateUsage]
    port = metrics.serve_metrics(NoMetrics(), "127.0.0.1", 0)
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_SECONDS))
            for _ in range(metrics.CONNECTIONS_MAX + 20)
        ]
        for one in silent[metrics.CONNECTIONS_MAX :]:
            assert one.recv(1) == b""
        assert threading.active_count() <= before + metrics.CONNECTIONS_MAX
        for one in silent:
            assert one.recv(1) == b""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS) as answer:
        assert answer.status == 200
