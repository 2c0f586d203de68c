"""Help, usage errors and exit codes, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from virial import errors
from virial.cli._table import OPTIONS
from virial.cli.app import app
from virial.cli.exits import CliError, ExitCode, failure_of
from virial.cli.frame import Session
from virial.cli.printer import coloured
from virial.spec import SpecError
from virial.yamlfile import YamlError
from virialpb.errors import Violation, details_for
from virialpb.reasons import Reason
from virialpb.strict import FieldError

# By their whole names; a group is none.
COMMANDS = sorted(name for name in OPTIONS if not any(other.startswith(f"{name} ".lstrip()) for other in OPTIONS))
NOWHERE = {"VIRIAL_ADDRESS": "127.0.0.1:9"}


def invoke(*arguments: str, env: dict[str, str | None] | None = None) -> tuple[int, str, str]:
    result = CliRunner(env=env or {}).invoke(app, list(arguments), prog_name="virial")
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_that_parse(command: str) -> None:
    code, out, _ = invoke(*command.split(), "--help")
    assert code == 0
    examples = [line.strip() for line in out.partition("Examples:")[2].splitlines() if line.strip()]
    assert examples
    assert any(f"virial {command}" in example for example in examples)


def run_virial(script: str) -> subprocess.CompletedProcess[str]:
    """A shell line with `virial` as a user's shell would start it."""
    virial = f"{sys.executable} -m virial.cli"
    return subprocess.run(["sh", "-c", script.replace("virial", virial)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["virial --help", "virial version --address 127.0.0.1:9 --timeout 0.1"])
def test_an_output_that_cannot_be_written_is_told_in_one_line(command: str) -> None:
    full = run_virial(f"{command} >/dev/full")
    assert (full.returncode, full.stderr) == (1, "virial: cannot write the output: No space left on device\n")
    closed = run_virial(f"{command} >&-")
    assert (closed.returncode, closed.stderr) == (0, "")


def test_the_help_lists_every_command_and_the_exit_codes() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in COMMANDS:
        assert f"\n  {command.split()[0]} " in out
    documented = {int(line.split()[0]) for line in out.partition("Exit codes:")[2].splitlines() if line.strip()}
    assert documented == {code.value for code in ExitCode} - {ExitCode.PIPE_CLOSED}


@pytest.mark.parametrize("arguments", [["--help"], ["jobs", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from virial.cli.app import run; run({arguments!r}); print('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.partition("MODULES")[2].split())
    assert not {"grpc", "google.protobuf", "rich.console", "yaml", "asyncio", "virial.models"} & loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["job"], "Missing argument 'JOB'"),
        (["jobs", "-o", "xml"], "'xml' is not one of 'table', 'json', 'yaml'"),
        (["jobs", "--nope"], "No such option: --nope"),
        (["hold", "n1", "--owner", "me"], "Missing option '--reason'"),
        (["logs", "j", "--rank", "-1"], "--rank': Input should be greater than or equal to 0"),
        (["submit", "f", "--wait", "--dry-run"], "--wait and --dry-run exclude each other"),
        (["submit", "/no/such/file"], "/no/such/file: there is no such file"),
        (["submit", "/"], "/: Is a directory"),
        (["submit", "f", "--set", "ranks"], "--set ranks: expected FIELD=VALUE"),
        (["submit", "f", "--set", "a=[1"], "--set a:2: did not find expected"),
        (["jobs", "--state", "runing"], "--state: unknown value 'RUNING': did you mean 'RUNNING'?"),
        (["jobs", "--address", "host"], "controller address 'host' is not host:port"),
        (["jobs", "--address", "http://h:1"], "controller address 'http://h:1' is not host:port"),
        (["jobs", "--cert", "c"], "--cert and --key need --ca"),
        (["jobs", "--ca", "a", "--cert", "c"], "--cert and --key go together"),
        (["hold", "n", "--owner", "o", "--reason", "r", "--for", "2"], "--for: no unit in '2': did you mean '2s'?"),
        (["hold", "n", "--owner", "o", "--reason", "r", "--for", "1us"], "--for: 1us is too short: the least is 1ms"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    code, out, err = invoke(*arguments, env={**NOWHERE})
    assert code == ExitCode.USAGE, err
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_an_invalid_spec_is_told_with_file_and_line_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nresources: {cpu: 1, memory: 1GiB}\ntask: {command: [x]}\ngang: {rank: 2}\n")
    code, _, err = invoke("submit", str(file), env={**NOWHERE})
    assert (code, err) == (2, f"virial: {file}:4: gang.rank: unknown field: did you mean 'ranks'?\n")


def test_what_is_wrong_with_a_replaced_field_is_not_told_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nresources: {cpu: 1, memory: 1GiB}\ntask: {command: [x]}\ngang: {ranks: 2}\n")
    code, _, err = invoke("submit", str(file), "--set", "gang.ranks=many", "--set", "gang.spare=1", env={**NOWHERE})
    assert code == ExitCode.USAGE
    assert f"{file} with gang.ranks replaced: gang.ranks: " in err
    assert f"{file} with gang.spare replaced: gang.spare: unknown field: did you mean 'spares'?" in err
    assert f"{file}:4" not in err


def test_a_cluster_that_is_not_there_is_exit_code_4_and_says_where() -> None:
    code, out, err = invoke("jobs", "--timeout", "0.2", env={**NOWHERE})
    assert (code, out) == (ExitCode.UNREACHABLE, "")
    assert "no answer from 127.0.0.1:9 in 0.2 s" in err
    assert "is controld running there?" in err


def test_no_cluster_at_all_says_what_to_do(tmp_path: Path) -> None:
    code, _, err = invoke("jobs", env={"VIRIAL_ADDRESS": None, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert code == ExitCode.UNREACHABLE
    assert "`virial up`" in err
    assert "--address" in err


def test_options_before_the_command_count_and_those_after_it_win() -> None:
    code, _, err = invoke("--address", "127.0.0.1:8", "--timeout", "0.1", "jobs")
    assert (code, "127.0.0.1:8" in err) == (ExitCode.UNREACHABLE, True)
    code, _, err = invoke("--address", "127.0.0.1:8", "jobs", "--address", "127.0.0.1:7", "--timeout", "0.1")
    assert "127.0.0.1:7" in err


def test_a_certificate_file_that_is_missing_is_named() -> None:
    code, _, err = invoke("jobs", "--ca", "/no/ca.pem", env={**NOWHERE})
    assert (code, err) == (ExitCode.FAILED, "virial: /no/ca.pem: No such file or directory\n")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.INVALID_SPEC, ExitCode.USAGE),
        (Reason.NOT_FOUND, ExitCode.NOT_FOUND),
        (Reason.ALREADY_EXISTS, ExitCode.CONFLICT),
        (Reason.STALE, ExitCode.CONFLICT),
        (Reason.NO_LEADER, ExitCode.UNREACHABLE),
        (Reason.NODE_UNREACHABLE, ExitCode.UNREACHABLE),
        (Reason.QUOTA, ExitCode.FAILED),
        (Reason.PERMISSION_DENIED, ExitCode.FAILED),
    ],
)
def test_exit_codes_of_a_controller_s_answers(reason: Reason, code: ExitCode) -> None:
    found = failure_of(errors.error_for(details_for(reason, subject="jobs/a")))
    assert found is not None
    assert found[1] is code


def test_every_expected_error_has_a_message_and_a_defect_has_none() -> None:
    assert failure_of(CliError("x")) == ("x", ExitCode.USAGE)
    assert failure_of(YamlError("f:1: x")) == ("f:1: x", ExitCode.USAGE)
    assert failure_of(SpecError((FieldError("a", "b"), FieldError("c", "d")))) == ("a: b\nc: d", ExitCode.USAGE)
    violations = (Violation("spec.a", "is wrong"), Violation("spec.b", "is too"))
    found = failure_of(errors.error_for(details_for(Reason.INVALID_SPEC, violations=violations)))
    assert found is not None
    assert found[0].splitlines()[1:] == ["  spec.b: is too"]
    assert failure_of(ZeroDivisionError()) is None


def test_a_defect_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from virial.cli.frame import guard

    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.delenv("VIRIAL_DEBUG", raising=False)
    with pytest.raises(typer.Exit) as caught:
        guard(broken)
    assert caught.value.exit_code == ExitCode.FAILED
    monkeypatch.setenv("VIRIAL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        guard(broken)


def test_a_reader_that_goes_away_is_no_complaint() -> None:
    many = "import sys; from virial.cli.frame import app, command\n"
    many += "@command('many', 'virial many')\ndef many(session):\n    for i in range(100000): print(i)\n"
    many += "from virial.cli.app import run; sys.exit(run(['many']))"
    script = f'set -o pipefail; {sys.executable} -c "$CODE" | head -1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], env={"CODE": many}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(ExitCode.PIPE_CLOSED.value)]
    assert done.stderr == ""


class Stream:
    """A stream that says whether it is a terminal."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def isatty(self) -> bool:
        return self._answer


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(Stream(True))
    assert not coloured(Stream(False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Stream(True))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured(Stream(True))


def test_the_address_is_the_flag_s_then_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRIAL_ADDRESS", "env:1")
    assert Session(address="flag:1").client()._addresses == ("flag:1",)
    assert Session().client()._addresses == ("env:1",)


def test_an_even_number_of_controllers_is_refused_before_anything_is_started() -> None:
    code, _, err = invoke("up", "--controllers", "4")
    assert code == ExitCode.USAGE
    assert "4 is not 1, 3 or 5" in err
