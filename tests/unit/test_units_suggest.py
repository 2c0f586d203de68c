"""Suggestions: close enough to be what was meant, or none."""

from __future__ import annotations

import pytest

from virialpb.suggest import MAX_WORD_LENGTH, nearest

FIELDS = ["resource_type", "vendor_id", "compute_units", "memory_bandwidth", "max_latency", "memory"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("memory_bandwith", "memory_bandwidth"),
        ("memoryBandwidth", "memory_bandwidth"),
        ("MEMORY", "memory"),
        ("max-latency", "max_latency"),
        ("latency", "max_latency"),
        ("vendro_id", "vendor_id"),
        ("colour", None),
        ("", None),
        ("m" * (MAX_WORD_LENGTH + 1), None),
    ],
)
def test_nearest_field(word: str, expected: str | None) -> None:
    assert nearest(word, FIELDS) == expected


@pytest.mark.parametrize(
    ("word", "expected"), [("w", "W"), ("F", None), ("Gi", "GiB"), ("gb", "GB"), ("G", "GB"), ("y", None)]
)
def test_short_words_are_not_guessed(word: str, expected: str | None) -> None:
    assert nearest(word, ["GB", "GiB", "W", "C", "d"]) == expected


def test_ties_go_to_the_earlier_choice() -> None:
    assert nearest("nodex", ["node1", "node2"]) == "node1"
    assert nearest("nodex", ["node2", "node1"]) == "node2"


def test_an_ambiguous_part_is_not_offered() -> None:
    assert nearest("bandwidth", ["memory_bandwidth", "link_bandwidth"]) is None
