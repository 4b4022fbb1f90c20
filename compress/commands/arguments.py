"""Arguments and options of the command line that several commands take, and how each is written."""

from pathlib import Path
from typing import Annotated

import typer


def print_version(wanted: bool) -> None:
    """Prints the version and ends the command."""
    if wanted:
        from foundation.core.version import version

        typer.echo(f"compress {version()}")
        raise typer.Exit


RecipeFile = Annotated[Path, typer.Argument(help="The recipe: a YAML file, or the name of a shipped one (compress list recipes).")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The run folder; default: runs/<name>.")]
Budget = Annotated[
    bool, typer.Option("--budget", help="Run short trainings, and predict what more rows, epochs and layers are worth; takes minutes.")
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, for example runs/sst2-minilm.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one value; a stage is named by its id. Repeatable.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show tracebacks and library messages.")]
Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")]
Uri = Annotated[str | None, typer.Option("--mlflow", metavar="URI", help="Another server; default: where the run was sent to.")]
Tracked = Annotated[str, typer.Option("--experiment", metavar="NAME", help="With --mlflow: the experiment.")]
Project = Annotated[
    str | None,
    typer.Option("--wandb", metavar="PROJECT", help="Another project of W&B: PROJECT or ENTITY/PROJECT."),
]
CheckedServer = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="With --live: a running server to check instead, as of bench --server.")
]
TrustedCertificates = Annotated[
    str, typer.Option("--ca", metavar="FILE", help="Certificates to trust instead of the public ones, as PEM; with grpcs:// or https://.")
]
StoredReport = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="A copy of this run's report.json: later changes are found.")
]
Pushed = Annotated[
    str | None, typer.Option("--push", metavar="ORG/NAME", help="Also upload it to the Hub, with the token in HF_TOKEN; private where new.")
]
Licence = Annotated[
    str | None, typer.Option("--license", metavar="ID", help="Licence for the model card; default: the base model's, if its card is here.")
]
