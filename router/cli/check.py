"""`router check`: say whether a configuration can be served, and everything that is wrong with it, or print its schema.

Opens no connection and starts nothing. Exit code 0: it can be served. 2: it cannot; one problem a line.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from router.config.environment import ignored_proxies
from router.config.load import load
from router.config.problems import ConfigErrors
from router.config.schema import json_schema

EXIT_UNUSABLE = 2


def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="The configuration to check.")] = Path("pools.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of the file and exit.")] = False,
) -> None:
    """Check a configuration without starting anything."""
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    try:
        loaded = load(config)
    except ConfigErrors as errors:
        report_problems(errors, as_json=as_json, err=False)
        raise typer.Exit(EXIT_UNUSABLE) from None
    counts = {
        "models": len(loaded.models),
        "engines": len(loaded.engines),
        "relays": len(loaded.relays),
        "keys": len(loaded.keys),
    }
    if as_json:
        told = {"ok": True, "file": str(config), **counts, "problems": [], "ignored_proxies": ignored_proxies()}
        typer.echo(json.dumps(told))
    else:
        if note := note_on_proxies():
            typer.echo(note, err=True)
        typer.echo(f"{config}: ok ({', '.join(f'{name} {count}' for name, count in counts.items())})")


def note_on_proxies() -> str | None:
    """What to say of proxy variables in the environment; None where there are none."""
    names = ignored_proxies()
    if not names:
        return None
    return f"{', '.join(names)} ignored: engines and relays are called directly, a relay through its own `proxy` if set"


def report_problems(errors: ConfigErrors, *, as_json: bool = False, err: bool = True) -> None:
    """Print what is wrong, one JSON object or a line each; to standard error unless it is what was asked for."""
    if as_json:
        problems = [problem.as_json() for problem in errors.problems]
        typer.echo(json.dumps({"ok": False, "problems": problems}), err=err)
        return
    for problem in errors.problems:
        typer.echo(str(problem), err=err)
