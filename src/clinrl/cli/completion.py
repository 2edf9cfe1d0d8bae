"""`clinrl completion`: the script by which a shell completes subcommands, options and their choices."""

from clinrl.cli.parser import parser


def stage(shell: str) -> None:
    """Print the script of a shell."""
    import shtab

    print(shtab.complete(parser(shown="a command"), shell))
