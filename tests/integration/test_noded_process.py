"""The process at its edges: settings, exit codes, one message without a traceback, metrics, TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from noded.link.stream import Dialer, DialFailed
from tests.integration.noded_support import HANG_SECONDS, ROOT, FakeController, controller, noded, noded_env
from virial import Client, UnavailableError
from virialpb.version import own_version


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "noded", *flags],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=noded_env(),
        cwd=ROOT,
    )


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_SECONDS) as response:
        return response.read().decode()


def make_certificate(key: str, certificate: str) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip


def test_settings_are_printed_with_where_they_came_from(tmp_path: Path) -> None:
    file = tmp_path / "noded.toml"
    file.write_text('memory = "1GiB"\n[collect]\nreadings_period = "2s"\n')
    done = run("--print-config", "--config", str(file), "--cpu", "1.5")
    assert done.returncode == 0
    assert f"memory = 1GiB  # {file}" in done.stdout
    assert f"collect.readings_period = 2s  # {file}" in done.stdout
    assert "cpu = 1500m  # --cpu" in done.stdout
    assert "fencing = auto  # default" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--check-config", "--fencing", "wek"), "noded: --fencing: unknown value 'wek': did you mean 'weak'?"),
        (("--config", "/no/such/file"), "noded: --config: cannot read /no/such/file: No such file or directory"),
        (("--cpu", "100000"), "noded: cpu: 100000 is more than this machine has"),
        (("--rdl", "/no/such/file"), "noded: rdl: cannot read /no/such/file: No such file or directory"),
        (("--data-dir", "/proc/noded"), "noded: data_dir: cannot use /proc/noded: "),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    defaults = () if "--data-dir" in flags else ("--data-dir", str(tmp_path / "d"))
    done = run(*defaults, *flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)


def test_the_version_is_told() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"noded {own_version()}\n")


def test_a_settings_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "noded.toml"
    file.write_text('name = "from-file"\nlog_format = "console"\n')
    monkeypatch.setenv("VIRIAL_NODED_CONFIG", str(file))
    done = run("--print-config")
    assert f"name = from-file  # {file}" in done.stdout


def test_every_mistake_in_a_file_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "noded.toml"
    file.write_text('nmae = "x"\nfencing = "wek"\n')
    done = run("--check-config", "--config", str(file))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"noded: {file}: nmae: unknown setting: did you mean 'name'?",
        f"noded: {file}: fencing: unknown value 'wek': did you mean 'weak'?",
    ]


async def test_declared_devices_are_reported(tmp_path: Path) -> None:
    rdl = tmp_path / "devices.yaml"
    rdl.write_text(
        "nodes: [{name: n1, labels: {zone: a}, devices: [{name: gpu, resource_type: accelerator, count: 2}]}]"
    )
    async with controller() as fake, noded(tmp_path / "n1", [fake.address], "--rdl", str(rdl)):
        await fake.until(lambda: fake.inventories, "inventory")
        assert dict(fake.session.hello.labels) == {"zone": "a"}
        keys = {device.key for device in fake.inventories[-1].inventory.devices}
        assert keys > {"gpu-0", "gpu-1"}


async def test_metrics_are_served_where_ports_json_says(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await fake.until(lambda: fake.sessions and fake.session.beats, "a beat")
        ports = json.loads((tmp_path / "n1/ports.json").read_text())
        assert int(ports["pid"]) == agent.pid
        text = await asyncio.to_thread(fetch, f"http://{ports['metrics']}/metrics")
        assert "virial_noded_session_up 1.0" in text
        assert "virial_noded_guardian_up 1.0" in text
        assert 'virial_noded_slots{state="RUNNING"} 0.0' in text
        assert 'virial_noded_events_total{event="Connected"} 1.0' in text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
async def test_controllers_are_reached_over_tls_with_a_certificate_of_the_node(tmp_path: Path) -> None:
    pair = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    await asyncio.to_thread(make_certificate, *pair)
    fake = FakeController()
    await fake.start(tls=(Path(pair[0]), Path(pair[1])))
    flags = ("--tls-ca", pair[1], "--tls-certificate", pair[1], "--tls-key", pair[0])
    try:
        async with Client(fake.address, timeout_s=0.5) as client:
            with pytest.raises(UnavailableError, match="asks for TLS, and was called without it"):
                await client.list_jobs()
        with pytest.raises(DialFailed, match="asks for TLS, and is called without it: set"):
            await Dialer().open(fake.address, lambda stub: stub.Control)
        async with noded(tmp_path / "n1", [fake.address], *flags):
            await fake.until(lambda: fake.sessions, "hello over TLS")
            await fake.until(lambda: fake.inventories, "inventory over TLS")
    finally:
        await fake.stop()
