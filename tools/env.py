"""The built environment: what a run of it needs, and what it consists of.

vLLM's own advice for CPUs, to preload libtcmalloc and libiomp5, is not followed: it
preloads PyTorch's libgomp by itself, and the warnings about the two are harmless.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.state import read_stamp

DEVICES = ("cpu", "cuda")

# What setup.py of vLLM calls the platform in the version's local part. "cpu" there
# is what makes vLLM run on the CPU of a machine that also has a GPU.
_LOCAL_PART = {"cpu": "cpu", "cuda": "precompiled"}
# Of VLLM_CPU_OMP_THREADS_BIND: threads run on any core.
_UNBOUND = "nobind"


def serve_env(
    layout: Layout,
    *,
    cores: str | None = None,
    omp_threads: int = 1,
    kv_cache_gib: int = 1,
    offline: bool = False,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables that `vllm serve` needs here; the user's own values take precedence.

    Args:
        cores: Cores for the OpenMP threads, as in `VLLM_CPU_OMP_THREADS_BIND`. None
            binds to none: two servers that bind by themselves share one core.
        omp_threads: OpenMP threads when no cores are given.
        kv_cache_gib: Size of the KV cache.
        offline: Ask no model hub, for a model that is on disk.
        environ: The user's environment; that of this process unless given.
    """
    environ = os.environ if environ is None else environ
    wanted = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    built = load_manifest(manifest_file(layout))
    if built is None or built.device == "cpu":
        wanted |= {
            # Model Runner V2 has its kernels in Triton only.
            "TRITON_INTERPRET": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cores or _UNBOUND,
            # Idle OpenMP threads that spin take the core from those that work.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if environ.get("VLLM_CPU_OMP_THREADS_BIND", cores or _UNBOUND) == _UNBOUND:
            # Else each process would compute on as many threads as there are cores.
            wanted["OMP_NUM_THREADS"] = str(omp_threads)
    return {name: environ.get(name, value) for name, value in wanted.items()}


def disjoint_cores(parts: int) -> list[str]:
    """The cores this process may use, as `parts` lists without a core in common.

    Raises:
        WorkshopError: There are fewer cores than parts.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < parts:
        raise WorkshopError(
            f"{parts} servers cannot have a core each: this process may use "
            f"{len(usable)}.",
            todo="Set VLLM_CPU_OMP_THREADS_BIND=nobind to share cores, or allow more.",
        )
    size = len(usable) // parts
    return [
        ",".join(map(str, usable[at * size : (at + 1) * size])) for at in range(parts)
    ]


def shell_line(env: Mapping[str, str], command: list[str]) -> str:
    """The same run as a line for a shell."""
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in env.items())]
        + [shlex.quote(word) for word in command]
    )


def clean_environ() -> dict[str, str]:
    """This process's environment without what makes Python take other packages."""
    drop = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return kept | {"PYTHONNOUSERSITE": "1"}


@dataclass(frozen=True)
class Compiled:
    """A compiled file as the build left it."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    """What `build` made, in `build/env.json`.

    Attributes:
        device: `cpu` or `cuda`.
        wheel: File name of the wheel with the compiled files.
        wheel_sha256: Its hash.
        version: Version of the installed vLLM; its local part names the series.
        tree: Folder that the environment serves from.
        base_commit: Upstream commit of the base.
        requirements: Hash of the requirements installed.
        torch: Version of PyTorch, with its local part.
        triton: Version of Triton.
        files: Compiled files, by path in the tree.
    """

    device: str
    wheel: str
    wheel_sha256: str
    version: str
    tree: str
    base_commit: str
    requirements: str
    torch: str
    triton: str
    files: dict[str, Compiled] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)


_FORMAT = 1


def manifest_file(layout: Layout, venv: Path | None = None) -> Path:
    """Where `build` says what it made.

    Args:
        venv: Environment it is about; the patched one unless given.
    """
    if venv is None or venv == layout.venv:
        return layout.build / "env.json"
    if venv == layout.base_venv:
        return layout.build / "env-base.json"
    return venv / "workshop-env.json"


def load_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if there is none that can be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            return None
        files = {name: Compiled(**facts) for name, facts in data.pop("files").items()}
        return Manifest(**data, files=files)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def stamped_version(release: str, device: str, tree: Path) -> str:
    """Version that a build of `tree` gets, e.g. `0.30.0+cpu.s1a2b3c4d`.

    The last part is the begin of the digest of the series that `apply` put there.
    """
    stamp = read_stamp(tree)
    series = f".s{stamp['series_digest'][:8]}" if stamp else ""
    return f"{release}+{_LOCAL_PART[device]}{series}"


def site_packages(venv: Path) -> Path | None:
    """The one folder with packages of a virtual environment."""
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    return found[-1] if found else None


def installed(venv: Path, name: str) -> list[Distribution]:
    """Installed distributions of that name, found without running anything."""
    folder = site_packages(venv)
    if folder is None:
        return []
    return list(distributions(name=name, path=[str(folder)]))


def version_of(venv: Path, name: str) -> str | None:
    found = installed(venv, name)
    return found[0].version if found else None


def release(version: str) -> str:
    """`version` without its local part."""
    return version.split("+")[0]


def editable_tree(distribution: Distribution) -> Path | None:
    """Folder that an editable installation points to."""
    try:
        data = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not data.get("dir_info", {}).get("editable"):
            return None
        return Path(unquote(urlsplit(data["url"]).path))
    except (ValueError, KeyError, AttributeError):
        return None


def mapped_package(venv: Path) -> Path | None:
    """Folder that the environment's import hook for `vllm` points to."""
    folder = site_packages(venv)
    for finder in folder.glob("__editable___vllm_*_finder.py") if folder else ():
        text = finder.read_text(encoding="utf-8")
        if match := re.search(r"^MAPPING\b.*'vllm': '([^']*)'", text, re.MULTILINE):
            return Path(match[1])
    return None


def script_interpreter(script: Path) -> Path | None:
    """Interpreter in the first line of a script, None if it has none."""
    try:
        with script.open("rb") as file:
            lines = [file.readline(4096) for _ in range(2)]
    except FileNotFoundError:
        return None
    if not lines[0].startswith(b"#!"):
        return None
    words = lines[0][2:].split()
    # Installers write this where the path is too long or has a space.
    if words and words[0] == b"/bin/sh" and lines[1].startswith(b"'''exec'"):
        words = shlex.split(os.fsdecode(lines[1].removeprefix(b"'''exec'")))
        return Path(words[0]) if words else None
    return Path(os.fsdecode(words[0])) if words else None


def vllm_script(venv: Path) -> Path:
    return venv / "bin" / "vllm"


def is_ours(venv: Path, interpreter: Path | None) -> bool:
    """Whether a script's interpreter is that of `venv`, without following links.

    The interpreter itself is a link to one that all environments share.
    """
    return interpreter is not None and interpreter.parent == venv_python(venv).parent
