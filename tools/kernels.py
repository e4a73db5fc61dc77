"""The compiled files of vLLM: those of the wheel, and those in a tree."""

from __future__ import annotations

import base64
import csv
import os
import platform
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.download import sha256_of
from tools.env import Compiled
from tools.errors import WorkshopError


@dataclass(frozen=True)
class Member:
    """A compiled file as the wheel's own record describes it."""

    size: int
    sha256: str


@dataclass(frozen=True)
class WheelRecord:
    """What a wheel says of itself.

    Attributes:
        version: Version of the distribution.
        compiled: Its `.so` files, by path.
    """

    version: str
    compiled: dict[str, Member]


def read_wheel(wheel: Path) -> WheelRecord:
    """Read version and compiled files of a wheel, without unpacking it.

    Raises:
        WorkshopError: It is not a wheel, or it has no compiled file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.endswith(".dist-info/RECORD")
            ]
            if len(names) != 1:
                raise WorkshopError(f"{wheel} has no RECORD: it is not a wheel.")
            rows = list(csv.reader(archive.read(names[0]).decode().splitlines()))
    except (zipfile.BadZipFile, OSError) as error:
        raise WorkshopError(
            f"{wheel} cannot be read.", str(error), "Remove it and run again."
        ) from None
    compiled = {}
    for row in rows:
        if len(row) == 3 and row[0].endswith(".so") and row[1].startswith("sha256="):
            text = row[1].removeprefix("sha256=")
            digest = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            compiled[row[0]] = Member(int(row[2]), digest.hex())
    if not compiled:
        raise WorkshopError(f"{wheel} holds no compiled file (.so).")
    folder = names[0].split("/")[0].removesuffix(".dist-info")
    return WheelRecord(folder.split("-")[1], compiled)


def extract(wheel: Path, tree: Path, names: Iterable[str]) -> None:
    """Put files of a wheel into a tree, each at once."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with archive.open(name) as source, temporary.open("wb") as output:
                    shutil.copyfileobj(source, output, 1 << 20)
                temporary.chmod(0o755)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)


def remove(tree: Path, names: Iterable[str]) -> None:
    """Remove compiled files before new ones are written.

    Writing into them in place, as vLLM's setup.py does, would crash a server that
    has them mapped, and change every hard link to them.
    """
    for name in names:
        (tree / name).unlink(missing_ok=True)


def differences(tree: Path, compiled: dict[str, Member]) -> dict[str, str]:
    """What is wrong with files of a tree, by path; empty when all are as recorded."""
    found = {}
    for name, member in compiled.items():
        path = tree / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            found[name] = "is missing"
            continue
        if size != member.size:
            found[name] = f"has {size} bytes, not {member.size}"
        elif (digest := sha256_of(path)) != member.sha256:
            found[name] = f"has sha256 {digest[:12]}…, not {member.sha256[:12]}…"
    return found


def describe(tree: Path, compiled: dict[str, Member]) -> dict[str, Compiled]:
    """Entries for the manifest of files that were found to be as recorded."""
    return {
        name: Compiled(member.size, member.sha256, (tree / name).stat().st_mtime_ns)
        for name, member in compiled.items()
    }


def changed(tree: Path, files: dict[str, Compiled]) -> dict[str, str]:
    """As `differences`, but reads only files whose time is not the recorded one."""
    suspect = {}
    for name, known in files.items():
        path = tree / name
        if not path.is_file() or path.stat().st_mtime_ns != known.mtime_ns:
            suspect[name] = Member(known.size, known.sha256)
    return differences(tree, suspect)


def strangers(tree: Path, files: Iterable[str]) -> list[str]:
    """Compiled files at the top of the package that are not among `files`."""
    known = set(files)
    names = (f"vllm/{path.name}" for path in sorted((tree / "vllm").glob("*.so")))
    return [name for name in names if name not in known]


def cpu_library(machine: str | None = None, cpuinfo: str | None = None) -> str:
    """The library of CPU kernels that vLLM loads on this kind of processor.

    Args:
        machine: As of `platform.machine()`.
        cpuinfo: Contents of `/proc/cpuinfo`.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return "vllm/_C.abi3.so"
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            break
    if "avx512f" not in flags:
        return "vllm/_C_AVX2.abi3.so"
    if "avx512_bf16" in flags:
        return "vllm/_C.abi3.so"
    return "vllm/_C_AVX512.abi3.so"
