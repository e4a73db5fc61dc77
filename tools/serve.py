"""Serves a model with the patched vLLM, with DBO at data-parallel size 1."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tools import checkpoint
from tools.build import build
from tools.env import (
    clean_environ,
    load_manifest,
    manifest_file,
    serve_env,
    shell_line,
    vllm_script,
)
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.process import listener
from tools.ui import say

HOST = "127.0.0.1"
PORT = 8000

# Flag and value. Any of them may be given otherwise in ARGS.
DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--host", HOST),
    ("--enable-dbo",),
    # Low enough that two concurrent requests are seen to split; not for speed.
    ("--dbo-decode-token-threshold", "2"),
    ("--dbo-prefill-token-threshold", "16"),
    # A step in which one request reads prefix blocks that another writes is not
    # split: without, the same prompt asked twice at once shows a split step too.
    ("--no-enable-prefix-caching",),
    ("--enforce-eager",),
)
_TINY_DEFAULTS: tuple[tuple[str, ...], ...] = (("--max-model-len", "2048"),)

# What the server logs when DBO is on.
LOG_LINE = "Dual batch overlap is enabled at data parallel size 1"


@dataclass(frozen=True)
class Plan:
    """A server to start.

    Attributes:
        command: The `vllm serve` line.
        env: Variables that it needs besides the user's.
        host: Where it will listen.
        port: Likewise.
        model: Name under which it answers.
    """

    command: list[str]
    env: dict[str, str]
    host: str
    port: int
    model: str

    @property
    def url(self) -> str:
        host = self.host
        if host in ("", "0.0.0.0"):
            host = HOST
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def plan(
    layout: Layout,
    model: str | None = None,
    port: int | None = None,
    arguments: Sequence[str] = (),
    *,
    defaults: Sequence[tuple[str, ...]] = DEFAULTS,
    cores: str | None = None,
) -> Plan:
    """Put the server's command together; nothing is run.

    Args:
        model: Path or name of a model; the tiny checkpoint if None.
        port: Port unless `arguments` have one.
        arguments: Any flags of `vllm serve`. They come last, and a default of ours
            for the same flag is left out.
        defaults: Flags, each with its value, unless `arguments` have them.
        cores: Cores for its threads; it is bound to none unless given.
    """
    defaults = [*defaults, ("--port", str(PORT if port is None else port))]
    if model is None:
        served = str(layout.build / "models" / checkpoint.DEFAULT)
        defaults += [*_TINY_DEFAULTS, ("--served-model-name", checkpoint.DEFAULT)]
    else:
        served = _existing(model)
    config = config_flags(arguments)
    given = given_flags(arguments) | config.keys()
    chosen = [word for flag in defaults if _name(flag[0]) not in given for word in flag]
    command = [
        str(vllm_script(layout.venv)),
        "serve",
        served,
        *chosen,
        *arguments,
    ]

    def value(flag: str) -> str:
        return flag_value(command, flag) or config.get(_name(flag), "")

    text = value("--port")
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise WorkshopError(
            f"--port {text} is not a port.", todo="Give a number from 1 to 65535."
        )
    return Plan(
        command,
        serve_env(layout, cores=cores, offline=model is None),
        value("--host"),
        int(text),
        value("--served-model-name") or served,
    )


def given_flags(arguments: Sequence[str]) -> set[str]:
    """Names of the flags in `arguments`.

    As vLLM's parser takes them: `--a_b`, `--a-b=1` and `--no-a-b` all give `a-b`.
    """
    return {_name(word) for word in arguments if word.startswith("--")}


def config_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Flags, with their values, in the file that `--config` names.

    vLLM puts them before the command line, where our defaults would win over them.
    """
    config = flag_value(arguments, "--config")
    if not config:
        return {}
    import yaml  # from the built environment

    try:
        data = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
        return {_name(f"--{key}"): str(value) for key, value in data.items()}
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise WorkshopError(f"--config {config} cannot be read.", str(error)) from None


def flag_value(arguments: Sequence[str], flag: str) -> str:
    """Last value of a flag, or an empty string."""
    value = ""
    for at, word in enumerate(arguments):
        name, equals, rest = word.partition("=")
        if not name.startswith("--") or name.replace("_", "-") != flag:
            continue
        if equals:
            value = rest
        elif at + 1 < len(arguments):
            value = arguments[at + 1]
    return value


def _name(word: str) -> str:
    name = word.partition("=")[0].replace("_", "-").removeprefix("--")
    return name.removeprefix("no-")


def _existing(model: str) -> str:
    """`model`, if it is a path that exists or may be a name on a model hub."""
    path = Path(model).expanduser()
    if path.exists():
        return str(path)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise WorkshopError(
            f"The model {model} does not exist.",
            "It looks like a path.",
            "Give the folder of a checkpoint, or a name such as `org/model`.",
        )
    return model


def check_port(host: str, port: int) -> None:
    """Make sure that the server will be able to listen.

    Raises:
        WorkshopError: Something listens there, or the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise WorkshopError(f"--host {host} is not an address: {error}.") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            # Two sockets that may both reuse an address clash on listening only.
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                pid = listener(port)
                raise WorkshopError(
                    f"Port {port} on {host or 'all addresses'} is in use.",
                    f"Process {pid} listens there."
                    if pid
                    else "Another user's process may listen there.",
                    f"Stop it, or take another port: make serve PORT={port + 1}",
                ) from None
            raise WorkshopError(
                f"Cannot listen on port {port} of {host or 'all addresses'}.",
                str(error.strerror),
            ) from None


def describe(server: Plan) -> str:
    """What a user needs to run the same by hand, to try it, and to read the log."""
    completion = json.dumps(
        {"model": server.model, "prompt": "Two batches overlap", "max_tokens": 16}
    )
    return "\n".join(
        [
            "==> The same by hand:",
            shell_line(server.env, server.command),
            "",
            "==> When the log says that startup is complete, in another shell:",
            f"curl -s {server.url}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{completion}'",
            "",
            f"==> In the log, `{LOG_LINE}` says that DBO is on.",
            "    Ctrl-C stops the server.",
        ]
    )


def serve(
    layout: Layout,
    model: str | None,
    port: int | None,
    arguments: Sequence[str],
    dry_run: bool = False,
) -> None:
    """Become the server. Applies, builds and makes the tiny model first if needed."""
    if not dry_run:
        # Applies first; keeps the device that the environment was built for.
        built = load_manifest(manifest_file(layout))
        build(layout, built.device if built else "cpu")
    server = plan(layout, model, port, arguments)
    if dry_run:
        click.echo(shell_line(server.env, server.command))
        return
    if not flag_value(arguments, "--uds"):
        check_port(server.host, server.port)
    if model is None:
        checkpoint.ensure(layout)
    say(describe(server))
    # The server takes this process's place, so signals reach it and nothing else.
    os.execve(server.command[0], server.command, clean_environ() | server.env)


@click.command()
@click.option("--model", help="Path or name of a model (default: a tiny random MoE).")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port to listen on (default: {PORT}).",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the command line; make and run nothing."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    layout: Layout,
    model: str | None,
    port: int | None,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Serve a model with the patched vLLM.

    ARGUMENTS after `--` are passed to `vllm serve` and win over our defaults.
    """
    serve(layout, model, port, arguments, dry_run)
