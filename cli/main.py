"""`swarmnode …`: the commands, and how their errors reach a person.

A command's module is imported when the command runs (or its help is shown), and none of them imports torch, trio,
libp2p or numpy: the shell's prompt is back before one notices. Errors that can happen to careful people (ExpectedError,
SettingError) become one message and an exit code that means something; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from swarmnode import __version__
from swarmnode.cli.terminal import UsageMistake, as_json, group, heed, say
from swarmnode.node import exitcodes
from swarmnode.node.config import misspelt
from swarmnode.training.options import SettingError

# name -> (module, attribute): a function with typer's annotations, or a Typer with commands of its own.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("swarmnode.cli.run", "run"),
    "join": ("swarmnode.cli.find", "join"),
    "discover": ("swarmnode.cli.find", "discover"),
    "seed": ("swarmnode.cli.find", "seed"),
    "init": ("swarmnode.cli.init", "init"),
    "local": ("swarmnode.cli.local.command", "local"),
    "plan": ("swarmnode.cli.plan", "plan"),
    "status": ("swarmnode.cli.inspect", "status"),
    "top": ("swarmnode.cli.top", "top"),
    "history": ("swarmnode.cli.history", "history"),
    "health": ("swarmnode.cli.inspect", "health"),
    "open": ("swarmnode.cli.inspect", "open_page"),
    "doctor": ("swarmnode.cli.inspect", "doctor"),
    "peers": ("swarmnode.cli.peers", "peers"),
    "netcheck": ("swarmnode.cli.inspect", "netcheck"),
    "metrics": ("swarmnode.cli.inspect", "metrics"),
    "id": ("swarmnode.cli.identify", "identify"),
    "ping": ("swarmnode.cli.peers", "ping"),
    "bw": ("swarmnode.cli.peers", "bw"),
    "sample": ("swarmnode.cli.inspect", "sample"),
    "pause": ("swarmnode.cli.steer", "pause"),
    "resume": ("swarmnode.cli.steer", "resume"),
    "caps": ("swarmnode.cli.steer", "caps"),
    "stop": ("swarmnode.cli.steer", "stop"),
    "leave": ("swarmnode.cli.runs", "leave"),
    "runs": ("swarmnode.cli.runs", "runs"),
    "logs": ("swarmnode.cli.inspect", "logs"),
    "dht": ("swarmnode.cli.peers", "dht"),
    "log": ("swarmnode.cli.diag", "log"),
    "diag": ("swarmnode.cli.diag", "diag"),
    "shards": ("swarmnode.cli.shards", "shards"),
    "state": ("swarmnode.cli.state", "state"),
    "scores": ("swarmnode.cli.scores", "scores"),
    "rollouts": ("swarmnode.cli.rollouts", "rollouts"),
    "task": ("swarmnode.cli.configure", "task"),
    "steer": ("swarmnode.cli.steer", "steer"),
    "successor": ("swarmnode.cli.steer", "successor"),
    "provenance": ("swarmnode.cli.provenance", "provenance"),
    "config": ("swarmnode.cli.configure", "config"),
    "version": ("swarmnode.cli.identify", "version"),
}


class LazyCommands(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):  # a shell completes it, or it is no command
                return None
            near = get_close_matches(cmd_name, COMMANDS, n=1)
            meant = f"; did you mean {near[0]}?" if near else "; swarmnode --help lists all"
            raise UsageMistake(f"there is no command {cmd_name!r}{meant}")
        module, attribute = COMMANDS[cmd_name]
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            command: Any = typer.main.get_group(found)
        else:
            alone = group("")
            alone.command(cmd_name)(found)
            command = typer.main.get_command(alone)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `swarmnode logs | head`: the reader had enough; typer would make a failure of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(exitcodes.OK) from None


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"swarmnode {__version__}")
        raise typer.Exit


@app.callback()
def swarmnode(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Train a model together with other people's machines.

    Start with: swarmnode local (a swarm on this machine), or swarmnode run RUN.toml, or swarmnode join LINK.
    Exit codes are listed in docs/cli.md.
    """
    for warning in misspelt(os.environ):
        say(f"warning: {warning}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    heed(None, "--json" in arguments)
    with suppress(AttributeError):  # a test's
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="swarmnode", standalone_mode=False)
        return result if isinstance(result, int) else exitcodes.OK
    except KeyboardInterrupt:
        return exitcodes.FORCED
    except Exception as error:  # what `_told` does not know is a defect, raised again with its traceback
        if (told := _told(error)) is None:
            raise
        _say(*told)
        return told[0]


def _told(error: Exception) -> tuple[int, str] | None:
    """The exit code of what may happen to careful people, and what to tell them."""
    if isinstance(error, exitcodes.ExpectedError):
        return error.exit_code, str(error)
    if isinstance(error, SettingError):
        return exitcodes.CONFIG, str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return exitcodes.NO_SPACE, f"{error.filename or 'the disk'}: no space left; free some and try again"
    if isinstance(error, typer.Abort):
        return exitcodes.FORCED, "nothing was changed"
    # Usage errors are click's, and typer ships its own copy of click in newer versions: told by what they can do.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        hint = f"\nTry: {context.command_path} --help" if context is not None else ""
        return int(error.exit_code), error.format_message() + hint
    return None


def _say(code: int, text: str) -> None:
    """The error on standard error; with --json as an object, so that a program can read it."""
    from swarmnode.node.logs import for_terminal

    if not text:
        return
    if as_json():
        print(json.dumps({"error": {"exit_code": code, "message": text}}, ensure_ascii=False), file=sys.stderr)
    else:
        text = for_terminal(text)
        print(text if text.startswith("Usage: ") else f"swarmnode: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
