"""The typer application and how a command is added to it: connection and output options, and what errors become.

Nothing here imports gRPC, protobuf, rich or yaml: `virial --help` must be instant. Commands import what they use.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, cast

import typer

from virial.cli.exits import EXIT_CODES_HELP, CliError, ExitCode, failure_of
from virial.cli.printer import Output, Printer

if TYPE_CHECKING:
    from virial import SyncClient, Tls

P = ParamSpec("P")

# An election takes about a second and a restart of controld a few: longer away means that it is down.
TIMEOUT_S: Final = 10.0

app = typer.Typer(
    name="virial",
    help="Run work on a Virial cluster, and see what it does.",
    epilog=EXIT_CODES_HELP,
    rich_markup_mode=None,  # rich takes longer to import than all the rest of --help
    add_completion=False,  # `virial completion` prints scripts that are quicker
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@dataclass(frozen=True, slots=True)
class Session:
    """How this invocation reaches its cluster and how it prints."""

    address: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    timeout_s: float | None = None
    output: Output | None = None
    printer: Printer = field(default_factory=lambda: Printer(Output.TABLE))

    def client(self, timeout_s: float = TIMEOUT_S) -> SyncClient:
        """A client of the cluster: of --address, VIRIAL_ADDRESS, or this machine's own (`virial up`). `timeout_s`: of a
        call, unless --timeout says otherwise."""
        from virial import SyncClient
        from virial._published import default_address

        address = self.address or os.environ.get("VIRIAL_ADDRESS") or default_address()
        if not address:
            raise CliError(
                "no cluster to talk to: start one on this machine with `virial up`, "
                "or give --address HOST:PORT or set VIRIAL_ADDRESS",
                ExitCode.UNREACHABLE,
            )
        return SyncClient(address, timeout_s=self.timeout_s or timeout_s, tls=self._tls())

    def _tls(self) -> Tls | None:
        from virial import Tls

        if not self.ca:
            if self.cert or self.key:
                raise CliError("--cert and --key need --ca: the authority that signed the controllers' certificates")
            return None
        if bool(self.cert) != bool(self.key):
            raise CliError("--cert and --key go together: give both or neither")
        if self.cert and self.key:
            _fit(self.cert, self.key)
        return Tls(self.ca, self.cert or "", self.key or "")


def _fit(certificate: str, key: str) -> None:
    """gRPC would fill the terminal and end with nothing more than that nobody answers."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise CliError(f"{certificate} and {key} do not fit together as certificate and key") from None
    except (OSError, ValueError):
        pass  # told with its name by whoever reads it


def _no_password() -> str:
    raise ValueError("a key with a password cannot be used")  # OpenSSL would ask for it on the terminal


Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="A controller, or several with commas. [env: VIRIAL_ADDRESS]"),
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", envvar="VIRIAL_CA", help="Use TLS; PEM of the controllers' authority."),
]
Cert = Annotated[
    str | None, typer.Option("--cert", metavar="FILE", envvar="VIRIAL_CERT", help="PEM of your own certificate.")
]
Key = Annotated[
    str | None, typer.Option("--key", metavar="FILE", envvar="VIRIAL_KEY", help="PEM of your certificate's key.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help=f"How long to retry a call. [default: {TIMEOUT_S:g}]"),
]
Format = Annotated[Output | None, typer.Option("--output", "-o", help="How to print. [default: table]")]

_SHARED: Final[dict[str, object]] = {
    "output": Format,
    "address": Address,
    "ca": Ca,
    "cert": Cert,
    "key": Key,
    "timeout_s": Timeout,
}


def _version(wanted: bool) -> None:
    if wanted:
        from virialpb.version import own_version

        print(f"virial {own_version()}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    address: Address = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout_s: Timeout = None,
    output: Format = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command; the same ones after it win."""
    context.obj = Session(address, ca, cert, key, timeout_s, output)


def group(name: str, help_: str, *, under: typer.Typer = app) -> typer.Typer:
    """Add a group of commands; `command(..., to=group)` adds to it."""
    made = typer.Typer(
        name=name, help=help_, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False
    )
    under.add_typer(made)
    return made


def command(
    name: str, *examples: str, to: typer.Typer = app, connects: bool = True
) -> Callable[[Callable[Concatenate[Session, P], None]], Callable[Concatenate[Session, P], None]]:
    """Add a command. Its first parameter is the Session; the options that make one are added to its own.

    One that does not connect gets those of them that say how to print.
    """

    def add(run: Callable[Concatenate[Session, P], None]) -> Callable[Concatenate[Session, P], None]:
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        options = _SHARED if connects else {"output": _SHARED["output"]}
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for key, annotation in options.items()
        ]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        @functools.wraps(run)
        def wrapper(**arguments: Any) -> None:
            before = cast("typer.Context", arguments.pop("context")).obj
            chosen = {key: arguments.pop(key) for key in options}
            session = replace(
                before if isinstance(before, Session) else Session(),
                **{key: value for key, value in chosen.items() if value is not None},
            )
            session = replace(session, printer=Printer(session.output or Output.TABLE))
            guard(lambda: cast("Callable[..., None]", run)(session, **arguments))

        # typer reads this; an annotation per option keeps --help and completion in step with what is parsed.
        wrapper.__signature__ = inspect.Signature([*keyword, *shared, context])  # type: ignore[attr-defined] - typer reads the signature
        wrapper.__annotations__ = {}
        text = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
        to.command(name, epilog=text)(wrapper)
        return run

    return add


def bare(prefix: str) -> Callable[[str], str]:
    """Messages name things as `jobs/train-1`; a command takes that as well as `train-1`."""
    return lambda text: text.removeprefix(prefix)


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", callback=bare("jobs/"))]


def guard(run: Callable[[], None]) -> None:
    """Run a command's body; what it raises becomes one message on standard error and an exit code."""
    try:
        run()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        silence()
        raise typer.Exit(ExitCode.PIPE_CLOSED) from None
    except Exception as error:
        found = failure_of(error)
        if found is None:
            if os.environ.get("VIRIAL_DEBUG"):
                raise
            what = f"internal error: {type(error).__name__}: {error}; this is a defect of virial"
            found = f"{what}: set VIRIAL_DEBUG=1 for the traceback and report it", ExitCode.FAILED
        message, code = found
        print(f"virial: {message}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename is None:
            silence()  # the output: what is left in its buffer would fail again at the end
        raise typer.Exit(code) from None


def silence() -> None:
    """The reader of our output went away: let what is still buffered go nowhere, without a complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
