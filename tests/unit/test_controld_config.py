"""Settings of the controller: layers, unknown names, cross-checks, addresses."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from controld.config import (
    Config,
    LeaseConfig,
    StoreKind,
    load_config,
)
from noded.config import load_config as load_noded
from virialpb.addresses import is_loopback, parse_address
from virialpb.layered import ConfigError, Loaded
from virialpb.lease import NS_PER_MS, fence_after_min_ns, lease_length_ns


def load(toml: str = "", environ: Mapping[str, str] | None = None, **flags: object) -> Loaded[Config]:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load_config(toml_text=toml, toml_name="controld.toml", environ=environ or {}, flags=named)


def errors(toml: str = "", environ: Mapping[str, str] | None = None, **flags: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(toml, environ, **flags)
    return caught.value.errors


def test_the_defaults_are_right() -> None:
    config = load().value
    assert config.grpc_address == ("127.0.0.1", 7700)
    assert config.metrics_address == ("127.0.0.1", 7701)
    assert config.store.kind is StoreKind.SQLITE


def test_each_layer_covers_the_one_before_and_says_so() -> None:
    toml = '[store]\nkind = "memory"\n[lease]\nfence_after = "30s"\ngrace = "2s"\n'
    environ = {"VIRIAL_CONTROLD__LEASE__FENCE_AFTER": "20s", "VIRIAL_CONTROLD__LISTEN": "127.0.0.1:1"}
    loaded = load(toml, environ, listen="127.0.0.1:2")
    assert loaded.value.store.kind is StoreKind.MEMORY
    assert loaded.value.lease.grace_ns == 2_000_000_000
    assert loaded.value.lease.fence_after_ns == 20_000_000_000
    assert loaded.value.listen == "127.0.0.1:2"
    origins = loaded.origins
    assert (origins["store.kind"], origins["lease.fence_after"], origins["listen"], origins["data_dir"]) == (
        "controld.toml",
        "VIRIAL_CONTROLD__LEASE__FENCE_AFTER",
        "--listen",
        "default",
    )


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert errors("[store]\nkid = 'memory'\n") == [
        "controld.toml: store.kid: unknown setting: did you mean 'store.kind'?"
    ]
    (line,) = errors(environ={"VIRIAL_CONTROLD__STORE__KND": "memory"})
    assert line.startswith("VIRIAL_CONTROLD__STORE__KND")
    assert "VIRIAL_CONTROLD__STORE__KIND" in line


@pytest.mark.parametrize("listen", ["0.0.0.0:7700", "[::]:7700", "192.0.2.1:7700", "controller.example:7700"])
def test_other_machines_need_tls_or_an_explicit_word(listen: str) -> None:
    (line,) = errors(listen=listen)
    assert line.startswith("listen: ")
    assert "--insecure" in line
    assert "(set by: --listen)" in line
    assert load(listen=listen, insecure=True).value.insecure


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:7700", "localhost:7700"])
def test_this_machine_needs_neither(listen: str) -> None:
    assert load(listen=listen).value.listen == listen


def test_metrics_stay_on_this_machine_or_off() -> None:
    assert [line.partition(":")[0] for line in errors(metrics_listen="0.0.0.0:1")] == ["metrics_listen"]
    assert load(metrics_listen="off").value.metrics_address is None


def test_two_servers_do_not_share_an_address() -> None:
    assert [line.partition(":")[0] for line in errors(metrics_listen="127.0.0.1:7700")] == ["metrics_listen"]
    assert load(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0").value.listen == "127.0.0.1:0"


def test_tls_files_come_together_and_exist() -> None:
    names = [line.partition(":")[0] for line in errors(tls__certificate="/nowhere/cert.pem")]
    assert names == ["tls.key", "tls.certificate"]
    assert [line.partition(":")[0] for line in errors(tls__client_ca="/nowhere/ca.pem")] == [
        "tls.client_ca",
        "tls.client_ca",
    ]


def test_the_least_fence_after_follows_from_the_other_times() -> None:
    """fence_after * (1 - 1 %) - 1 s - 2 * 1 s must exceed 1 s: 4 s / 0.99 = 4.0404... s."""
    assert LeaseConfig().fence_after_min_ns == 4_040_404_042
    assert LeaseConfig(renew_interval_ns=250_000_000).fence_after_min_ns == 2_525_252_527
    (line,) = errors(lease__fence_after="4s")
    assert line.startswith("lease.fence_after: 4s is too short")
    assert "4s41ms" in line
    assert load(lease__fence_after="4s41ms").value.lease.fence_after_ns == 4_041_000_000


def test_the_least_fence_after_makes_a_lease_that_outlasts_the_silence() -> None:
    """What the controller demands is worth what the agent makes of it."""
    for silence_ns in (0, 1_000_000_000, 3_000_000_000, 59_999_000_000):
        least_ms = -(-fence_after_min_ns(silence_ns) // NS_PER_MS)
        assert lease_length_ns(least_ms) > silence_ns
        assert lease_length_ns(least_ms - 2) <= silence_ns


def test_a_node_is_not_suspect_before_it_could_have_come_back() -> None:
    (line,) = errors(lease__renew_interval="6s")
    assert line.startswith("loop.reconnect: ")


@pytest.mark.parametrize("text", ["", "127.0.0.1", ":7700", "h:", "h:x", "h:65536", "h:-1", "::1:7700", "h:７"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert is_loopback("::1")
    assert not is_loopback("::")
    assert not is_loopback("example.org")


def test_every_mistake_is_told_at_once() -> None:
    found = errors("[lease]\nfence_after = '1s'\n", listen="nonsense", tls__key="/nowhere")
    assert [line.partition(":")[0] for line in found] == ["listen", "tls.certificate", "tls.key", "lease.fence_after"]


MEMBER = {"store__kind": "etcd", "store__member_dir": "/var/lib/virial/member"}


def test_an_etcd_is_the_member_beside_or_named_by_endpoints() -> None:
    assert load("", None, **MEMBER).value.store.etcd_endpoints == ("unix:/var/lib/virial/member/c:0",)
    named = load(store__kind="etcd", store__endpoints="unix:/run/e/c:0").value.store
    assert named.etcd_endpoints == ("unix:/run/e/c:0",)
    assert load(store__kind="etcd", store__endpoints="http://127.0.0.1:2379").value.store.prefix == "virial"


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        ({"store__kind": "etcd"}, "store.member_dir", "needs either the directory of its member or store.endpoints"),
        ({**MEMBER, "store__endpoints": "unix:/x"}, "store.member_dir", "needs either"),
        ({"store__member_dir": "/x"}, "store.member_dir", "is for store.kind etcd, and it is sqlite"),
        ({"store__endpoints": "unix:/x"}, "store.endpoints", "is for store.kind etcd"),
        ({**MEMBER, "store__member_dir": "relative"}, "store.member_dir", "by its whole path"),
        ({**MEMBER, "store__member_dir": "/" + "x" * 104}, "store.member_dir", "at most 107 bytes"),
        ({**MEMBER, "store__prefix": "a/b"}, "store.prefix", "must be 1 to 64 characters of"),
        ({"store__kind": "etcd", "store__endpoints": "http://10.0.0.1:1"}, "store.endpoints", "anyone could read"),
        ({"store__kind": "etcd", "store__endpoints": "https://10.0.0.1:1"}, "store.endpoints", "needs store.ca"),
        ({"store__kind": "etcd", "store__endpoints": "10.0.0.1:2379"}, "store.endpoints", "is no endpoint: write"),
        ({"store__kind": "etcd", "store__endpoints": "http://h/x:1"}, "store.endpoints", "is no endpoint: write"),
        ({**MEMBER, "store__ca": "/nowhere"}, "store.ca", "/nowhere is not a file"),
    ],
)
def test_what_is_no_etcd_to_use(flags: dict[str, str], name: str, words: str) -> None:
    (line,) = errors("", None, **flags)
    assert line.startswith(f"{name}: ")
    assert words in line


SEVERAL = """
listen = "127.0.0.1:7700"
peers = ["127.0.0.1:7700", "127.0.0.1:7710", "127.0.0.1:7720"]
store.kind = "etcd"
store.endpoints = ["unix:/run/m/c"]
"""


def test_peers_may_name_this_controller_too() -> None:
    config = load(SEVERAL).value
    assert (config.address, config.others) == ("127.0.0.1:7700", ("127.0.0.1:7710", "127.0.0.1:7720"))
    moved = load(SEVERAL, advertise="127.0.0.1:7710").value
    assert (moved.address, moved.others) == ("127.0.0.1:7710", ("127.0.0.1:7700", "127.0.0.1:7720"))
    assert load().value.others == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"listen": "127.0.0.1:0"}, "advertise: 127.0.0.1:0 is no address that others can reach"),
        ({"peers": "0.0.0.0:7710"}, "peers: 0.0.0.0:7710 is no address that others can reach"),
        ({"peers": "c1"}, "peers: 'c1' is not HOST:PORT"),
        ({"peers": "127.0.0.1:7700"}, "peers: names no controller but this one"),
        ({"store__kind": "sqlite"}, "peers: several controllers need store.kind etcd"),
        ({"election__takeover": "250ms"}, "election.takeover: must be at least three election.ping_interval"),
        ({"lease__fence_after": "4s"}, "lease.fence_after: 4s is too short"),
    ],
)
def test_what_several_controllers_cannot_work_with(changes: Mapping[str, object], told: str) -> None:
    found = errors(SEVERAL, environ=None, **changes)
    assert any(error.startswith(told) for error in found), found


def test_an_address_for_others_is_for_several() -> None:
    (error,) = errors(advertise="10.0.0.1:7700")
    assert error.startswith("advertise: is for one of several controllers")


def test_leases_outlive_an_election() -> None:
    alone, several = load(lease__recovery="500ms").value, load(SEVERAL, lease__recovery="500ms").value
    assert several.fence_after_min_ns > alone.fence_after_min_ns == alone.lease.fence_after_min_ns


@pytest.mark.parametrize("word", ["auto", "json", "text", "console"])
def test_both_daemons_take_the_same_words_for_the_form_of_logs(word: str) -> None:
    assert load(log__format=word).value.log.format == word
    assert load_noded(None, "", {}, {"log_format": word}).value.log_format == word
