"""Inventories that were encoded before are known again by what they are, not by where they lay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core import keys
from controld.core.ids import Incarnation, NodeUid
from controld.core.model import Device, Inventory, Liveness, Node
from controld.store import codec, codec_node

NODE = Node(NodeUid("n"), "n", Incarnation(NodeUid("n"), "b", "g"), Liveness.LIVE, "a", "pidns", 1, 1)


def inventory(number: int) -> Inventory:
    return Inventory((Device(f"gpu{number}", "accelerator"),))


def test_each_node_is_stored_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_node, "INVENTORIES_MAX", 3)
    monkeypatch.setattr(codec_node, "_known", {})
    for number in range(200):  # objects come and go, and later ones lie where earlier ones did
        for node in (replace(NODE, inventory=inventory(number % 7)), replace(NODE, draining=True)):
            for _ in range(2):
                assert codec.decode(keys.of(node), codec.encode(node)) == node
        assert len(codec_node._known) <= 3  # pyright: ignore[reportPrivateUsage]


def test_one_that_changed_is_encoded_anew() -> None:
    before = replace(NODE, inventory=inventory(1))
    after = replace(before, inventory=inventory(2))
    assert codec.encode(before) != codec.encode(after)
    assert codec.encode(replace(before, version="2")) != codec.encode(before)
