"""Serves one role of attention-FFN disaggregation (AFD) with the patched vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from tools import checkpoint, serve
from tools.build import build
from tools.env import (
    clean_environ,
    disjoint_cores,
    load_manifest,
    manifest_file,
    shell_line,
)
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.ui import say

ROLES = ("attention", "ffn")
PORTS = {"attention": serve.PORT, "ffn": serve.PORT + 1}

# The FFN role follows the attention role's DBO, runs eagerly and has no KV cache.
_DEFAULTS = {"attention": serve.DEFAULTS, "ffn": (("--host", serve.HOST),)}


def role_plan(
    layout: Layout,
    role: str,
    model: str | None = None,
    port: int | None = None,
    arguments: Sequence[str] = (),
    afd_port: int | None = None,
    tree: Path | None = None,
    trace_dir: Path | None = None,
) -> serve.Plan:
    """Put the command of one role together; nothing is run.

    Args:
        model: As for `serve.plan`.
        port: HTTP port unless `arguments` have one.
        arguments: Any flags of `vllm serve`, those of `--afd-config` among them.
        afd_port: Port on which the roles meet; vLLM's default unless given.
        tree: Another source tree of vLLM than the one that was built.
        trace_dir: Folder for the role's trace; none is written unless given.
    """
    own: list[tuple[str, ...]] = [("--afd-config.afd_role", role)]
    if afd_port is not None:
        own.append(("--afd-config.afd_port", str(afd_port)))
    if trace_dir is not None:
        own.append(("--afd-config.trace_dir", str(trace_dir)))
    if given := serve.flag_value(arguments, "--afd-config"):
        _check_role(given, role)
        own = []
    found = serve.plan(
        layout,
        model,
        PORTS[role] if port is None else port,
        arguments,
        defaults=[*own, *_DEFAULTS[role]],
        cores=_cores(role),
    )
    return with_tree(found, tree)


def with_tree(server: serve.Plan, tree: Path | None) -> serve.Plan:
    """The same server, from another source tree of vLLM."""
    if tree is None:
        return server
    return replace(server, env={"PYTHONPATH": str(tree.resolve()), **server.env})


def prepare(layout: Layout, model: str | None, tree: Path | None) -> None:
    """Apply, build and make the tiny model where needed."""
    if tree is None:
        built = load_manifest(manifest_file(layout))
        build(layout, built.device if built else "cpu")
    if model is None:
        checkpoint.ensure(layout)


def _cores(role: str) -> str | None:
    """Cores of its own for a role; None, to share, where there is only one."""
    try:
        return disjoint_cores(len(ROLES))[ROLES.index(role)]
    except WorkshopError:
        return None


def _check_role(given: str, role: str) -> None:
    try:
        other = json.loads(given).get("afd_role")
    except (ValueError, AttributeError):
        raise WorkshopError(f"--afd-config {given} is not a JSON object.") from None
    if other != role:
        raise WorkshopError(
            f"--afd-config {given} is not that of ROLE={role}.",
            todo=f'Give it "afd_role": "{role}", or another ROLE.',
        )


def describe(layout: Layout, role: str, server: serve.Plan, model: str | None) -> str:
    """What a user needs to run the same by hand, and the other role."""
    other = ROLES[1 - ROLES.index(role)]
    command = f"make serve-afd ROLE={other}"
    if model is not None:
        command += f" MODEL={model}"
    lines = [
        "==> The same by hand:",
        shell_line(server.env, server.command),
        "",
        f"==> The {other} role, in another shell, before or after:",
        command,
        "    With ARGS for both the same, but for the flags of one role.",
        "",
    ]
    if role == "attention":
        completion = json.dumps(
            {"model": server.model, "prompt": "Two batches overlap", "max_tokens": 16}
        )
        lines += [
            "==> When both logs say that startup is complete:",
            f"curl -s {server.url}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{completion}'",
        ]
    else:
        lines += [f"==> It answers {server.url}/health; requests go to attention."]
    return "\n".join([*lines, "    Ctrl-C stops the server."])


@click.command()
@click.option("--role", type=click.Choice(ROLES), required=True, help="Which one.")
@click.option("--model", help="Path or name of a model (default: a tiny random MoE).")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="HTTP port (default: 8000 for attention, 8001 for ffn).",
)
@click.option(
    "--tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Source tree of vLLM to serve from; nothing is applied or built then.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the command line; make and run nothing."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    layout: Layout,
    role: str,
    model: str | None,
    port: int | None,
    tree: Path | None,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Serve one role of attention-FFN disaggregation with the patched vLLM.

    ARGUMENTS after `--` are passed to `vllm serve` and win over our defaults.
    """
    if dry_run:
        server = role_plan(layout, role, model, port, arguments, tree=tree)
        click.echo(shell_line(server.env, server.command))
        return
    prepare(layout, model, tree)
    server = role_plan(layout, role, model, port, arguments, tree=tree)
    serve.check_port(server.host, server.port)
    say(describe(layout, role, server, model))
    # The server takes this process's place, so signals reach it and nothing else.
    os.execve(server.command[0], server.command, clean_environ() | server.env)
