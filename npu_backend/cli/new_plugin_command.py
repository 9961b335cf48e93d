"""``npu-backend new-plugin``: start a distribution of one's own, with tests that pass at once."""

from __future__ import annotations

from pathlib import Path

import click

from npu_backend.cli.output import print_json
from npu_backend.cli.scaffold import KINDS, write_plugin

__all__ = ["command"]


@click.command(name="new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="bmm",
    show_default=True,
    help="A batched matmul, a preprocess path, or a release policy.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where its folder is made [default: here].",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str, kind: str, directory: Path | None, as_json: bool) -> int:
    """Make a folder with a plugin's distribution: source, entry point, tests, tox.ini.

    NAME is the distribution's name, such as acme-npu.
    """
    made = write_plugin(name, kind=kind, directory=directory)
    if as_json:
        print_json(made.to_dict())
        return 0
    click.echo(f"made {made.folder}")
    for path in made.written:
        click.echo(f"  {path}")
    click.echo(
        f"\nnext:\n  pip install -e {made.folder}\n  npu-backend plugins --check\n"
        f"  pytest {made.folder}"
    )
    return 0
