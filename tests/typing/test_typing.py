"""What pyright in strict mode says of programs that use the SDK: right ones pass, wrong ones do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each line that is wrong names the rule that finds it.
MISUSE = """\
import virial
from virial.testing import FakeCluster

spec = virial.parse_spec({})
client = virial.SyncClient("a:1")
client.submit_job("train.yaml")  # reportArgumentType
client.submit_job(spec, "a")  # reportCallIssue
client.get_job(5)  # reportArgumentType
client.list_jobs(["RUNNING"])  # reportArgumentType
client.get_job("a").progress_step + 1  # reportOptionalOperand
client.get_job("a").current.members  # reportOptionalMemberAccess
client.get_job("a").spec.priority = 3  # reportAttributeAccessIssue
client.get_job("a").stat  # reportAttributeAccessIssue
client.get_node("n").readings[0].value * 2  # reportOptionalOperand
virial.JobState.DONE  # reportAttributeAccessIssue
virial.Nonsense  # reportAttributeAccessIssue
FakeCluster(nodes="4")  # reportArgumentType
FakeCluster().client().get_job(5)  # reportArgumentType
"""
# What follows from a mistake on the same line.
SIDE_EFFECTS = ("reportUnusedExpression", "reportUnknownMemberType")


def pyright(*files: Path) -> list[tuple[str, int, str]]:
    """(file, line from 1, rule) of each error."""
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT), str(ROOT / "client"), str(ROOT / "protos")]}
    project = files[0].parent / "pyrightconfig.json"
    made = files[0].parent != ROOT / "tests" / "typing"
    if made:
        project.write_text(json.dumps(settings | {"venvPath": str(ROOT), "venv": ".venv"}))
    where = ["--project", str(project)] if made else []
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *where]
    done = subprocess.run([*command, *([] if made else map(str, files))], cwd=ROOT, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(files)
    found = [d for d in report["generalDiagnostics"] if d["severity"] == "error"]
    return [(Path(d["file"]).name, d["range"]["start"]["line"] + 1, d.get("rule", d["message"])) for d in found]


def test_right_use_has_no_error() -> None:
    assert pyright(ROOT / "tests" / "typing" / "sdk_usage.py") == []


def test_wrong_use_is_found_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "misuse.py"
    file.write_text(MISUSE)
    expected = [(n, line.partition("# ")[2]) for n, line in enumerate(MISUSE.splitlines(), 1) if "# " in line]
    found = {(line, rule) for _, line, rule in pyright(file) if rule not in SIDE_EFFECTS}
    assert found == set(expected)
