"""What every level of tests shares: Hypothesis profiles, and the rows of public failures written into the reports."""

from __future__ import annotations

import inspect
import os
import re
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests import rows

# No deadline: a test never judges by wall time. `derandomize` in CI, so that a red run is red again.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell starts what it puts into the background deaf to SIGINT, and so would be every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ROW_IN_NAME = re.compile(r"test_(?:case|row)_([a-z]\d+)_")


@pytest.hookimpl(tryfirst=True)  # before `-m row` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A row comes from the marker or from the test's name; see tests/rows.py, which makes the table of them."""
    for item in items:
        match = _ROW_IN_NAME.match(item.name)
        if match and item.get_closest_marker("row") is None:
            item.add_marker(pytest.mark.row(match.group(1).upper()))
        for mark in item.iter_markers("row"):
            item.user_properties += [("row", name) for name in mark.args]
            defects: str | list[str] = mark.kwargs.get("defect", [])
            item.user_properties += [("defect", name) for name in ([defects] if isinstance(defects, str) else defects)]
            parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
            if (defect := parameters.get("defect")) is not None:
                item.user_properties.append(("defect", str(getattr(defect, "__name__", defect))))
            elif "_catches_" in item.name and inspect.isfunction(function := getattr(item, "function", None)):
                names = rows.looped_defects(inspect.getsource(function)) or ["(named in the test)"]
                item.user_properties += [("defect", name) for name in names]
