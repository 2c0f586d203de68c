"""The rows table says what the reports say, and the stages count them."""

from __future__ import annotations

from pathlib import Path

from tests import rows
from tools import stages

REPORT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1">
<testcase name="test_case_g3_x[old]"><properties>
<property name="row" value="G3"/><property name="defect" value="keeps_old_epoch"/></properties></testcase>
<testcase name="test_case_g4_x"><properties><property name="row" value="G4"/></properties></testcase>
<testcase name="test_case_g5_x"><properties><property name="row" value="G5"/></properties><failure/></testcase>
<testcase name="test_case_g6_x"><properties><property name="row" value="G6"/></properties><skipped/></testcase>
<testcase name="test_fixture"><error/></testcase>
</testsuite></testsuites>"""


def test_a_row_is_kept_by_a_passing_test_that_names_its_defect(tmp_path: Path) -> None:
    (tmp_path / "unit.xml").write_text(REPORT)
    found = rows.read_reports(tmp_path)
    verdicts = {name: found[name].verdict() for name in ("G3", "G4", "G5", "G6", "G7")}
    assert verdicts == {"G3": "ok", "G4": "NO DEFECT", "G5": "FAILED", "G6": "NO TEST", "G7": "NO TEST"}
    assert set(found) == set(rows.REQUIRED)
    assert "G3   ok         test_case_g3_x\n                catches keeps_old_epoch\n" in rows.render(found)


def test_stages_count_what_the_reports_say(tmp_path: Path) -> None:
    (tmp_path / "unit.xml").write_text(REPORT)
    counts = stages.Counts()
    counts.add_report(tmp_path / "unit.xml")
    counts.add_report(tmp_path / "missing.xml")
    assert counts == stages.Counts(passed=2, failed=2, skipped=1)


def test_the_table_reads_the_reports_of_the_stages_before_it(tmp_path: Path) -> None:
    (last,) = [stage for stage in stages.STAGES if stage.name == "rows"]
    ((*_, word),) = stages.commands_of(last, tmp_path / "rows.xml")
    assert word == "tests.rows"
    (tmp_path / "unit.xml").write_text(REPORT)
    ((*_, word),) = stages.commands_of(last, tmp_path / "rows.xml")
    assert word == f"--reports={tmp_path}"


def test_defects_of_a_loop_are_found() -> None:
    assert rows.looped_defects("    def test():\n        for defect in (Wraps, guesses):\n            pass\n") == [
        "Wraps",
        "guesses",
    ]
    by_name = (
        "def test():\n    all = {'own clock': 1, 'no shard': 2}\n    for name, defect in all.items():\n        pass\n"
    )
    assert rows.looped_defects(by_name) == ["own clock", "no shard"]
    assert rows.looped_defects("def test():\n    for row in (a, b):\n        pass\n") == []
