"""Reads and rewrites `vllm.pin`, the one description of the base."""

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

    def wheel(self, device: str, machine: str | None = None) -> Artifact:
        machine = machine or platform.machine()
        found = self.wheels.get((device, machine))
        if found is None:
            known = ", ".join(sorted(f"{d}/{m}" for d, m in self.wheels))
            raise WorkshopError(
                f"vllm.pin has no wheel for DEVICE={device} on {machine}.",
                f"It knows: {known}.",
                "Use one of these, or add the wheel of the pinned version, with "
                "its sha256, to vllm.pin.",
            )
        return found


def load_pin(path: Path) -> Pin:
    """Read and validate the pin.

    Raises:
        WorkshopError: The file is missing, is not TOML, or a field is missing or
            has the wrong form; names the field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkshopError(
            f"{path} is missing.", todo="Run this in a checkout."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise WorkshopError(f"{path} is not valid TOML.", str(error)) from None

    def get(*keys: str, form: re.Pattern[str] | None = None) -> str:
        value: Any = data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, str) or not value:
            raise WorkshopError(
                f"{path.name}: {'.'.join(keys)} is missing or is not a string."
            )
        if form and not form.fullmatch(value):
            raise WorkshopError(
                f"{path.name}: {'.'.join(keys)} = {value!r} does not match "
                f"{form.pattern}."
            )
        return value

    def artifact(*keys: str) -> Artifact:
        return Artifact(
            get(*keys, "project"),
            get(*keys, "filename"),
            get(*keys, "sha256", form=_SHA256),
        )

    generated = data.get("sdist", {}).get("generated", [])
    if not isinstance(generated, list) or not all(
        isinstance(entry, str) for entry in generated
    ):
        raise WorkshopError(f"{path.name}: sdist.generated is not a list of strings.")
    return Pin(
        version=get("base", "version"),
        commit=get("base", "commit", form=_SHA1),
        tree=get("base", "tree", form=_SHA1),
        tip_tree=get("series", "tip_tree", form=_SHA1),
        sdist=artifact("sdist"),
        generated=tuple(generated),
        wheels={
            (device, machine): artifact("wheel", device, machine)
            for device, machines in data.get("wheel", {}).items()
            for machine in machines
        },
        torch=get("requirements", "torch"),
        triton=get("requirements", "triton"),
    )


def pin_with_tip_tree(text: str, tip_tree: str) -> str:
    """`text` of a pin with another `series.tip_tree`; comments are kept."""
    import tomlkit

    document = tomlkit.parse(text)
    document["series"]["tip_tree"] = tip_tree  # type: ignore[index]
    return tomlkit.dumps(document)
