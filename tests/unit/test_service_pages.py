"""Pages: every item once, in order, whatever the sizes; tokens of one list only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.service.convert.pages import (
    PAGE_BYTES_MAX,
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    key_from,
    page,
    page_size_from,
    token_for,
)
from controld.service.failures import CallError


class Text(str):
    """A message that is as large as its text says: "name:bytes"."""

    __slots__ = ()

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        return int(self.partition(":")[2] or 1)


def pages_of(items: list[str], size: int, scope: str = "s") -> list[list[str]]:
    found: list[list[str]] = []
    token = ""
    while True:
        one, last = page(items, key=lambda item: item, after=key_from(token, scope), size=size, convert=Text)
        found.append([str(item) for item in one])
        if not last:
            return found
        token = token_for(scope, last)


@given(st.lists(st.text(min_size=1), unique=True), st.integers(1, 7))
def test_every_item_comes_once_and_in_order(items: list[str], size: int) -> None:
    names = [f"{item.replace(':', '')}" for item in items]
    unique = sorted(set(names) - {""})
    pages = pages_of(unique, size)
    assert [item for one in pages for item in one] == unique
    assert all(0 < len(one) <= size for one in pages if unique)


def test_a_page_is_cut_where_it_would_not_fit_a_message() -> None:
    half = PAGE_BYTES_MAX // 2
    items = [f"a:{half}", f"b:{half}", f"c:{half}", f"d:{3 * PAGE_BYTES_MAX}", "e:1"]
    assert [[item[0] for item in one] for one in pages_of(items, 100)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_sizes() -> None:
    assert [page_size_from(asked) for asked in (0, 1, PAGE_SIZE_MAX, 2**32 - 1)] == [
        PAGE_SIZE_DEFAULT,
        1,
        PAGE_SIZE_MAX,
        PAGE_SIZE_MAX,
    ]


@given(st.text())
def test_no_text_is_a_token_by_chance(text: str) -> None:
    if text:
        with pytest.raises(CallError, match="page_token"):
            key_from(text, "s")


def test_a_token_is_of_one_list() -> None:
    token = token_for("ListJobs []", "a")
    assert key_from(token, "ListJobs []") == "a"
    with pytest.raises(CallError):
        key_from(token, "ListJobs ['PENDING']")
