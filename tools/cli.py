"""Command line: `python -m tools VERB`. One module per verb, imported on use."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import click

from tools.errors import WorkshopError
from tools.layout import Layout

# Verb -> one line of help, in the order in which a newcomer needs them. Each verb
# is a click command named `command` in the module `tools.<verb>` ("-" becomes "_").
VERBS = {
    "status": "Show base, series, tree, environment and what `vllm serve` would load.",
    "fetch": "Make the base tree from vLLM's sdist or from an upstream clone.",
    "apply": "Bring build/vllm to the tip of the series.",
    "build": "Make the environment whose `vllm` is the patched one.",
    "doctor": "Prove what an installed or running vLLM is.",
    "serve": "Serve a model with the patched vLLM (a tiny one unless told).",
    "serve-afd": "Serve one AFD role, attention or FFN, of a model.",
    "demo": "Run both AFD roles, compare with one vLLM, print what overlapped.",
    "timeline": "Show what both AFD roles did, from their trace files.",
    "soak": "Send many random requests to both AFD roles and watch their memory.",
    "export": "Write the commits of build/vllm back into patches/ and overlay/.",
    "check": "Lint the series: round trip, ownership, metadata, upstream's rules.",
    "port": "Put the series on another release of vLLM.",
    "port-test": "Test the series on another release, as far as this machine can.",
    "each": "Try each patch alone on what it depends on, and each prefix.",
    "test": "Run lint, tool tests, check, upstream tests and end-to-end tests.",
    "pr": "Make of one patch a branch, a mail, a text and a checklist for upstream.",
    "report": "Write docs/report.md: each patch, upstream's checklist, four releases.",
    "bench": "Measure side by side in one run; results go to bench/results.",
}


class Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = importlib.import_module(f"tools.{name.replace('-', '_')}").command
        command.name = name
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkout to work on (default: the one this program is in).",
)
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """Keep, apply, build, test and export the vLLM AFD/DBO patch series."""
    ctx.obj = Layout(root.resolve()) if root else Layout.default()


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in the background job of a script. All that is started here would ignore
        # it as well, though its end begins with it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # click gives back the status of an Exit rather than raise it.
        status = cli(standalone_mode=False)
    except WorkshopError as error:
        from tools.ui import report_error

        report_error(error)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
