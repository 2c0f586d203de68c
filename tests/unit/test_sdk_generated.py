"""Files that are generated from others are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["unasync_client.py", "completion_table.py"])
def test_a_generated_file_is_what_its_tool_makes(tool: str) -> None:
    done = subprocess.run([sys.executable, f"tools/{tool}", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
