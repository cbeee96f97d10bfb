"""The command `router`. Each command is one file; this one only puts them together."""

import typer

from router import __version__
from router.cli.bench import bench
from router.cli.check import check
from router.cli.demo import demo
from router.cli.serve import serve
from router.cli.sim import sim_app

app = typer.Typer(
    help="Give chat and batch on one vLLM model a pool each.",
    no_args_is_help=True,
    add_completion=False,
    # A crash report must not print the values of local variables, among which are keys.
    pretty_exceptions_show_locals=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _router(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command("serve")(serve)
app.command("check")(check)
app.command("demo")(demo)
app.command("bench")(bench)
app.add_typer(sim_app, name="sim")


def main() -> None:
    """The entry point of the installed command."""
    app()
