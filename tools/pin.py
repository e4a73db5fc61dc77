"""Reads and rewrites `vllm.pin`, the one description of the base, and `ports.pin`."""

from __future__ import annotations

import platform
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.errors import WorkshopError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class Artifact:
    """A file on the package index, known by its hash."""

    project: str
    filename: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """Contents of `vllm.pin`.

    Attributes:
        version: Release the base is, e.g. `0.30.0`.
        commit: Upstream commit of the release, 40 hex digits.
        tree: Git tree of the base as `fetch` makes it.
        tip_tree: Git tree that the whole series must give.
        sdist: Source distribution the base is made from.
        generated: Files and folders of the sdist that are not part of the base.
        wheels: (device, machine) -> wheel with the compiled files.
        torch: Version of PyTorch that the wheels were built for.
        triton: Version of Triton that the series was tested with.
        file: Name of the file that says all this.
    """

    version: str
    commit: str
    tree: str
    tip_tree: str
    sdist: Artifact
    generated: tuple[str, ...]
    wheels: dict[tuple[str, str], Artifact]
    torch: str
    triton: str
    file: str = "vllm.pin"

    def wheel(self, device: str, machine: str | None = None) -> Artifact:
        machine = machine or platform.machine()
        found = self.wheels.get((device, machine))
        if found is None:
            known = ", ".join(sorted(f"{d}/{m}" for d, m in self.wheels))
            raise WorkshopError(
                f"{self.file} has no wheel of vLLM {self.version} for DEVICE={device} "
                f"on {machine}.",
                f"It knows: {known or 'none'}.",
                "Use one of these, or add the wheel of that version, with its "
                f"sha256, to {self.file}.",
            )
        return found


def load_pin(path: Path) -> Pin:
    """Read and validate the pin.

    Raises:
        WorkshopError: The file is missing, is not TOML, or a field is missing or
            has the wrong form; names the field.
    """
    fields = _Fields(path, _read(path))
    return _pin(
        fields,
        version=fields.get("base", "version"),
        commit=fields.get("base", "commit", form=_SHA1),
        tip_tree=fields.get("series", "tip_tree", form=_SHA1),
    )


def load_ports(path: Path) -> dict[str, Pin]:
    """Read and validate the releases that the series is ported to, by version.

    Their `tip_tree` is empty, and their commit as short as the sdist records it.

    Raises:
        WorkshopError: As `load_pin`.
    """
    tables = _read(path).get("port", {})
    ports = {}
    for version in tables:
        fields = _Fields(path, tables[version], f"port.{version}.")
        commit = fields.get("base", "commit", form=_COMMIT)
        ports[version] = _pin(fields, version=version, commit=commit, tip_tree="")
    return ports


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkshopError(
            f"{path} is missing.", todo="Run this in a checkout."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise WorkshopError(f"{path} is not valid TOML.", str(error)) from None


@dataclass(frozen=True)
class _Fields:
    """Fields of a TOML table, by their path in it."""

    path: Path
    data: Any
    prefix: str = ""

    def find(self, *keys: str) -> Any:
        value = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def get(self, *keys: str, form: re.Pattern[str] | None = None) -> str:
        name = f"{self.path.name}: {self.prefix}{'.'.join(keys)}"
        value = self.find(*keys)
        if not isinstance(value, str) or not value:
            raise WorkshopError(f"{name} is missing or is not a string.")
        if form and not form.fullmatch(value):
            raise WorkshopError(f"{name} = {value!r} does not match {form.pattern}.")
        return value

    def artifact(self, *keys: str) -> Artifact:
        return Artifact(
            self.get(*keys, "project"),
            self.get(*keys, "filename"),
            self.get(*keys, "sha256", form=_SHA256),
        )


def _pin(fields: _Fields, *, version: str, commit: str, tip_tree: str) -> Pin:
    generated = fields.find("sdist", "generated") or []
    if not isinstance(generated, list) or not all(
        isinstance(entry, str) for entry in generated
    ):
        raise WorkshopError(
            f"{fields.path.name}: {fields.prefix}sdist.generated is not a list of "
            "strings."
        )
    return Pin(
        version=version,
        commit=commit,
        tree=fields.get("base", "tree", form=_SHA1),
        tip_tree=tip_tree,
        sdist=fields.artifact("sdist"),
        generated=tuple(generated),
        wheels={
            (device, machine): fields.artifact("wheel", device, machine)
            for device, machines in (fields.find("wheel") or {}).items()
            for machine in machines
        },
        torch=fields.get("requirements", "torch"),
        triton=fields.get("requirements", "triton"),
        file=fields.path.name,
    )


def pin_with_tip_tree(text: str, tip_tree: str) -> str:
    """`text` of a pin with another `series.tip_tree`; comments are kept."""
    import tomlkit

    document = tomlkit.parse(text)
    document["series"]["tip_tree"] = tip_tree  # type: ignore[index]
    return tomlkit.dumps(document)
