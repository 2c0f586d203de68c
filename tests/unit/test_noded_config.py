"""noded's settings: what is refused, in which words, and what is found out on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from noded.config import Machine, NodedConfig, join_addresses, load_config, resolved, split_address
from virialpb.layered import ConfigError

MACHINE = Machine("Host_1.Example", "10.0.0.7", 8_000, 64 << 30, "/tmp")


def config(**flags: object) -> NodedConfig:
    return load_config(None, "node.toml", {}, flags).value


def errors(**flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**flags)
    return caught.value.errors


def unresolved(machine: Machine = MACHINE, **flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolved(config(**flags), machine)
    return caught.value.errors


def test_what_is_not_set_is_found_out_on_the_machine() -> None:
    found = resolved(config(data_dir="/d"), MACHINE)
    assert (found.name, found.advertise_address) == ("host-1.example", "10.0.0.7")
    assert (found.cpu_millis, found.memory_bytes, found.runtime_dir) == (8_000, 64 << 30, "/d/run")


def test_what_is_set_wins() -> None:
    found = resolved(config(name="n1", cpu="2", memory="1GiB", advertise_address="h", runtime_dir="/r"), MACHINE)
    assert (found.name, found.cpu_millis, found.memory_bytes) == ("n1", 2_000, 1 << 30)
    assert (found.advertise_address, found.runtime_dir) == ("h", "/r")


def test_more_than_the_machine_has_is_refused() -> None:
    assert unresolved(cpu="9", memory="65GiB") == [
        "cpu: 9 is more than this machine has (8)",
        "memory: 65GiB is more than this machine has (64GiB)",
    ]


def test_a_machine_that_cannot_be_read_must_be_described() -> None:
    unknown = Machine("h", "10.0.0.7", None, None, "/tmp")
    assert unresolved(unknown) == [
        "cpu: cannot be read from this machine; set it",
        "memory: cannot be read from this machine; set it",
    ]
    assert resolved(config(cpu="3", memory="1GiB"), unknown).cpu_millis == 3_000


def test_a_long_data_directory_gets_a_short_runtime_directory_of_its_own() -> None:
    first, second = (resolved(config(data_dir=f"/{'d' * 90}/{name}"), MACHINE).runtime_dir for name in "ab")
    assert first != second
    assert first.startswith("/tmp/virial-")
    assert resolved(config(data_dir=f"/{'d' * 90}/a"), MACHINE).runtime_dir == first


def test_a_runtime_directory_too_long_for_sockets_is_refused_with_the_numbers() -> None:
    (message,) = unresolved(runtime_dir="/" + "r" * 100)
    assert "its sockets would have 125 bytes, unix sockets allow 107" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"name": "Node 1"}, "name: 'Node 1' is not a node's name"),
        ({"controllers": "host"}, "controllers: 'host' is not HOST:PORT"),
        ({"controllers": "127.0.0.1:70000"}, "controllers: '127.0.0.1:70000' is not HOST:PORT"),
        ({"metrics_listen": "9100"}, "metrics_listen: '9100' is not HOST:PORT"),
        ({"data_dir": "here"}, "data_dir: 'here' is not an absolute path"),
        ({"fencing": "strong"}, "--fencing: unknown value 'strong'"),
        ({"controllers": "10.0.0.1:7700"}, "without TLS whoever answers there could run commands on this node"),
        ({"metrics_listen": "0.0.0.0:9100"}, "can be reached from other machines"),
        ({"tls.certificate": "/c"}, "tls.key: is missing"),
        ({"tls.ca": "/no/such/file"}, "tls.ca: /no/such/file is not a file"),
        ({"collect.readings_period": "10ms"}, "--collect-readings-period: 10ms is less than 1s"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(flags: dict[str, object], message: str) -> None:
    assert any(message in error for error in errors(**flags))


def test_other_machines_are_reached_over_tls_or_by_saying_insecure(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    assert config(controllers="10.0.0.1:7700,[::1]:7700", **{"tls.ca": str(ca)}).tls.ca == str(ca)
    assert config(controllers="c1:7700,c2:7700", insecure="true").controllers == ("c1:7700", "c2:7700")


def test_addresses() -> None:
    assert split_address("[::1]:7700") == ("::1", 7700)
    assert split_address("h:0") == ("h", 0)
    assert split_address(":7700") is None
    assert split_address("h:x") is None


def test_a_node_that_joins_by_a_token_needs_no_files_and_takes_no_others() -> None:
    joins = config(controllers="10.0.0.1:7700,10.0.0.2:7710,10.0.0.1:7720", join_token_file="/t")
    assert join_addresses(joins) == ("10.0.0.1:7702", "10.0.0.2:7702")
    assert join_addresses(config(join_token_file="/t", join_controllers="h:1")) == ("h:1",)
    assert any("has no tls.ca" in text for text in errors(join_token_file="/t", **{"tls.ca": __file__}))
    assert errors(join_controllers="h:1") == [
        "join_controllers: is for a node that joins by a token; set join_token_file too"
    ]
    assert errors(join_token_file="/t", join_controllers="h") == ["join_controllers: 'h' is not HOST:PORT"]
