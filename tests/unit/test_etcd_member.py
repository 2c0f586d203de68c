"""The member's settings, what is rendered of them, and when it is started again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from controld.store.etcd_endpoint import EndpointError, parse_endpoint
from controld.store.etcd_keys import (
    Claim,
    head_text,
    history_text,
    opening,
    read_claim,
    read_head,
    read_history,
)
from controld.store.etcd_probe import problems, version_warning
from controld.store.member_config import MemberConfig, MemberConfigError, PeerTls, check, render
from controld.store.member_policy import (
    DELAY_MAX_SECONDS,
    FAST_ENDS_MAX,
    SETTLED_SECONDS,
    GiveUp,
    Quarantine,
    Restart,
    assess,
)
from controld.store.port import StoreCorruptError
from virialpb.etcd.v1 import etcd_pb2 as pb
from virialpb.ids import Epoch

PEERS = {f"c{i}": f"http://127.0.0.1:{2380 + i}" for i in (1, 2, 3)}
CONFIG = MemberConfig("c1", Path("/var/lib/virial/member"), PEERS)
SECURE = {name: url.replace("http:", "https:") for name, url in PEERS.items()}
NAMED = SECURE | {"c1": "https://member-1:2380"}
TLS = PeerTls(Path("/ca"), Path("/certificate"), Path("/key"))


def test_what_etcd_is_told() -> None:
    told = json.loads(render(CONFIG))
    assert told["initial-cluster"] == "c1=http://127.0.0.1:2381,c2=http://127.0.0.1:2382,c3=http://127.0.0.1:2383"
    assert told["initial-cluster-state"] == "new"
    assert told["listen-client-urls"] == "unix://c:0"
    assert told["quota-backend-bytes"] > CONFIG.size_bytes_max
    assert told["max-txn-ops"] > 512
    assert (told["heartbeat-interval"], told["election-timeout"]) == (50, 500)
    assert told["experimental-initial-corrupt-check"] is True
    assert "peer-transport-security" not in told
    assert CONFIG.endpoint == "unix:/var/lib/virial/member/c:0"
    secured = json.loads(render(replace(CONFIG, peers=SECURE, tls=TLS, joins=True)))
    assert secured["peer-transport-security"]["client-cert-auth"] is True
    assert secured["initial-cluster-state"] == "existing"
    assert secured["listen-peer-urls"] == secured["initial-advertise-peer-urls"] == SECURE["c1"]
    named = replace(CONFIG, peers=NAMED, tls=TLS, listen="https://0.0.0.0:2380")
    check(named)
    told = json.loads(render(named))
    assert told["listen-peer-urls"] == "https://0.0.0.0:2380"
    assert told["initial-advertise-peer-urls"] == "https://member-1:2380"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(CONFIG, directory=Path("relative")), "by its whole path"),
        (replace(CONFIG, directory=Path("/" + "x" * 110)), "longer than 107 bytes"),
        (replace(CONFIG, name="c9"), "is not among c1, c2, c3"),
        (replace(CONFIG, peers={"c1": PEERS["c1"], "c2": PEERS["c2"]}), "1, 3 or 5 members, not 2"),
        (replace(CONFIG, peers=PEERS | {"c2": PEERS["c1"]}), "the same peer URL"),
        (replace(CONFIG, peers=PEERS | {"c2": "127.0.0.1:1"}), "is no peer URL"),
        (replace(CONFIG, peers=PEERS | {"c2": "http://127.0.0.1:x"}), "is no peer URL"),
        (replace(CONFIG, peers=PEERS | {"c2": "http://10.0.0.1:2380"}), "need TLS files"),
        (replace(CONFIG, peers=PEERS | {"c2": "http://host:2380"}), "need TLS files"),
        (replace(CONFIG, peers=SECURE), "set the peers' TLS files"),
        (replace(CONFIG, tls=TLS), "write https://"),
        (replace(CONFIG, peers=NAMED, tls=TLS), "on an address and not on a name"),
        (replace(CONFIG, listen="http://0.0.0.0:2380"), "need TLS files"),
        (replace(CONFIG, election_ms=200), "five heartbeat_ms"),
    ],
)
def test_what_is_no_member(config: MemberConfig, words: str) -> None:
    with pytest.raises(MemberConfigError, match=words):
        check(config)


def test_one_that_joins_may_be_the_second() -> None:
    check(replace(CONFIG, joins=True, peers={"c1": PEERS["c1"], "c2": PEERS["c2"]}))
    check(replace(CONFIG, peers=SECURE, tls=TLS))


class TestRestarts:
    def test_it_backs_off_while_it_ends_at_once_and_forgets_that_when_it_has_run(self) -> None:
        fast_ends, delays = 0, list[float]()
        for _ in range(FAST_ENDS_MAX - 1):
            decision, fast_ends = assess(fast_ends=fast_ends, up_seconds=1.0, tail="bind: address already in use")
            assert isinstance(decision, Restart)
            delays.append(decision.delay_seconds)
        assert delays == sorted(delays)
        assert delays[-1] == DELAY_MAX_SECONDS
        assert assess(fast_ends=fast_ends, up_seconds=SETTLED_SECONDS, tail="")[0] == Restart(delays[0])
        assert assess(fast_ends=fast_ends, up_seconds=1.0, tail="x\naddress in use\n")[0] == GiveUp("address in use")

    @pytest.mark.parametrize(
        "line",
        [
            "panic: walpb: crc mismatch",
            "panic: freepages: failed to get all reachable pages (page 12: multiple references)",
            "panic: page 7 already freed",
            "panic: assertion failed: invalid page type: 5: 10",
            "failed to recover v3 backend from snapshot",
            "etcdserver: corrupt cluster",
        ],
    )
    def test_damage_is_never_started_again(self, line: str) -> None:
        decision, _ = assess(fast_ends=0, up_seconds=3_600.0, tail=f"before\n{line}\ngoroutine 1 [running]:\n")
        assert isinstance(decision, Quarantine)
        assert decision.why == line

    def test_a_full_disk_is_no_damage(self) -> None:
        tail = "wal: failed to write: no space left on device\npanic: crc mismatch\n"
        assert isinstance(assess(fast_ends=FAST_ENDS_MAX, up_seconds=1.0, tail=tail)[0], Restart)


class TestTexts:
    def test_heads_and_claims_come_back(self) -> None:
        assert read_head(head_text(Epoch(2, 40), 7), token=40) == (Epoch(2, 40), 7)
        assert read_head(opening(2), token=40) == (Epoch(2, 40), 0)
        claim = Claim("c1", "h:1", "n", evidence=True)
        assert read_claim(claim.encode()) == claim
        assert read_history(history_text(3)) == (3, False)
        assert read_history(history_text(3, restoring=True)) == (3, True)

    def test_what_no_controller_wrote_is_named(self) -> None:
        for read in (lambda: read_head(b"x:1", 1), lambda: read_claim(b"[]"), lambda: read_history(b"")):
            with pytest.raises(StoreCorruptError, match="which no controller wrote"):
                read()

    def test_endpoints(self) -> None:
        assert parse_endpoint("unix:/a/c:0").target == "unix:/a/c:0"
        assert parse_endpoint("unix:///a/c:0").target == "unix:/a/c:0"
        assert parse_endpoint("https://h:1").secure
        for text in ("unix:a", "h:1", "https://h", "ftp://h:1", "http://:1", "unix:/" + "x" * 110):
            with pytest.raises(EndpointError):
                parse_endpoint(text)


@pytest.mark.parametrize(
    ("version", "known_faults"),
    [("3.4.23", True), ("3.4.38", False), ("3.5.16", True), ("3.5.23", False), ("3.6.0", False), ("3.3.1", True)],
)
def test_versions_with_known_faults_are_told(version: str, known_faults: bool) -> None:
    assert (version_warning(version) is not None) == known_faults


def test_what_is_wrong_is_said_in_words() -> None:
    assert problems(pb.StatusResponse(version="3.5.23", leader=1)) == ()
    status = pb.StatusResponse(
        version="?",
        is_learner=True,
        errors=["etcdserver: no leader", "memberID:1 alarm:NOSPACE ", "memberID:2 alarm:CORRUPT ", "else"],
    )
    for word in ("majority", "learner", "space alarm", "virial admin members replace", "else", "not known"):
        assert any(word in problem for problem in problems(status)), word
