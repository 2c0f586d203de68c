"""Page tokens (aip.dev/158): opaque, bound to their method and filter, and saying only where the last page ended."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Protocol, TypeVar

from controld.service.failures import invalid_field

T = TypeVar("T")
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
# A page is cut here, well below the 4 MiB that gRPC clients take by default; one item alone may be larger.
PAGE_BYTES_MAX = 2 << 20


class Sized(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's name


M = TypeVar("M", bound=Sized)


def page_size_from(asked: int) -> int:
    """0 is the default; more than the largest page is cut to it, as aip.dev/158 says."""
    return min(asked, PAGE_SIZE_MAX) if asked else PAGE_SIZE_DEFAULT


def token_for(scope: str, last_key: str) -> str:
    """`scope` is the method with its filter: a token taken elsewhere is refused, never misread."""
    return base64.urlsafe_b64encode(f"{_digest(scope)}{last_key}".encode()).decode()


def key_from(token: str, scope: str) -> str:
    """The key after which the page starts; "" for the first. Raises CallError on a token of another list."""
    if not token:
        return ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        text = ""
    digest = _digest(scope)
    if not text.startswith(digest):
        raise invalid_field(
            "page_token", "is not a token of this list; pass next_page_token as it came, with the same filter"
        )
    return text.removeprefix(digest)


def page(
    items: Iterable[T], *, key: Callable[[T], str], after: str, size: int, convert: Callable[[T], M]
) -> tuple[list[M], str]:
    """The next page in key order, and the key it ended at ("" when nothing follows)."""
    rest = nsmallest(size + 1, (item for item in items if key(item) > after), key=key)
    found: list[M] = []
    total_bytes = 0
    for index, item in enumerate(rest):
        message = convert(item)
        total_bytes += message.ByteSize()
        if index == size or (found and total_bytes > PAGE_BYTES_MAX):
            return found, key(rest[index - 1])
        found.append(message)
    return found, ""


def _digest(scope: str) -> str:
    return hashlib.sha256(scope.encode()).hexdigest()[:16]
