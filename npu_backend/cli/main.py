"""The command group: commands are imported when they are called, errors told in one way."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata

import click

from npu_backend.cli.output import print_error, print_json, print_warning
from npu_backend.errors import NpuBackendError

__all__ = ["INTERNAL_ERROR", "cli", "main"]

INTERNAL_ERROR = 3
"""Exit code of a fault of this program; 0 to 2 are done, a proof failed, bad input."""

_COMMANDS = {
    "plan": "Decide, and say why; needs no torch.",
    "run": "Plan, build real layers, run, release, run again, and prove it.",
    "bmm": "Tell which kernels may multiply one shape, and time them.",
    "plugins": "List every plugin, what became of it, and the order of calls.",
    "compare": "Tell what differs between two plans, and whether their KV layouts agree.",
    "new-plugin": "Start a plugin of your own: a distribution whose tests pass at once.",
    "doctor": "Tell what this machine has and what that allows.",
}


class _LazyGroup(click.Group):
    """A group whose commands are modules of the same name, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"npu_backend.cli.{cmd_name.replace('-', '_')}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from npu_backend.catalog.versions import suggest

            raise click.UsageError(
                f"there is no command {args[0]!r}{suggest(args[0], _COMMANDS)}", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version=metadata.version("npu-backend"), prog_name="npu-backend")
def cli() -> None:
    """Decide how MLA attention runs on Ascend NPUs: which path, which weights, which kernel."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (also raised as SystemExit by the script)."""
    argv = list(sys.argv[1:] if args is None else args)
    as_json = "--json" in argv
    code = 0
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kw: print_warning(str(message))
        warnings.simplefilter("default")
        try:
            result = cli.main(argv, prog_name="npu-backend", standalone_mode=False)
            code = result if isinstance(result, int) else 0
        except NpuBackendError as err:
            print_error(err, as_json=as_json)
            code = 2
        except click.exceptions.NoArgsIsHelpError as err:
            click.echo(err.format_message(), err=True)
            if as_json:
                print_json({"error": _usage_error("no command is given").to_dict()})
            code = 2
        except click.ClickException as err:
            print_error(_usage_error(err.format_message(), err), as_json=as_json)
            code = 2
        except (click.Abort, KeyboardInterrupt):
            click.echo("aborted", err=True)
            code = 130
        except BrokenPipeError:
            # The reader left (as `| head` does); nothing is wrong, and nothing more can be told.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        except Exception as err:  # noqa: BLE001 - told whole below
            # A fault of this program, not of the input: told whole, also to machines.
            traceback.print_exc()
            fault = NpuBackendError(
                f"npu-backend failed with {type(err).__name__}: {err}",
                whom=f"command line {' '.join(argv)}",
                why="this is a fault of npu-backend and not of the input",
                remedy="report it with the traceback above",
            )
            print_error(fault, as_json=as_json)
            code = INTERNAL_ERROR
    if args is None:
        sys.exit(code)
    return code


def _usage_error(what: str, err: click.ClickException | None = None) -> NpuBackendError:
    if isinstance(err, click.NoSuchOption):
        from npu_backend.mlp.options import refuse_k3_name

        refused = refuse_k3_name(err.option_name)
        if refused is not None:
            return refused
    context = err.ctx if isinstance(err, click.UsageError) else None
    command = context.command_path if context else "npu-backend"
    return NpuBackendError(
        what,
        whom=f"command line of {command}",
        why="the call is not of the form that the command takes",
        remedy=f"see {command} --help",
    )
