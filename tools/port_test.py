"""Tests the series on another release, as far as this machine can."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import click

from tools.build import (
    LEFT_OUT,
    Target,
    build,
    build_port,
    requirements,
    share_packages,
)
from tools.env import clean_environ, release, site_packages, version_of
from tools.errors import WorkshopError
from tools.git import Git, GitError, scratch
from tools.layout import Layout, venv_python
from tools.pin import Pin
from tools.port import find_port, load_state, port_tree
from tools.series import Patch, load_series
from tools.state import base_commit
from tools.test import (
    Result,
    Stage,
    Task,
    link_compiled,
    run_stages,
    summary,
    upstream_task,
)
from tools.ui import say, step
from tools.upstream_hooks import run_hooks

_NO_KERNELS = Path(__file__).parent / "plugins" / "no_kernels.py"
_E2E_S = 2700


@dataclass(frozen=True)
class PortEnv:
    """Where the ported series is run.

    Attributes:
        kernels: Whether it has compiled files of its own release.
    """

    tree: Path
    venv: Path
    kernels: bool


def port_test(
    layout: Layout,
    version: str,
    slugs: Sequence[str] = (),
    e2e: bool = True,
    keyword: str | None = None,
) -> list[Result]:
    """Build the ported series and run its tests.

    Args:
        slugs: Only the tests of these patches, if any.
        e2e: Also compare it with the release, unpatched.

    Raises:
        WorkshopError: The port is not finished or not of the present series, or
            its environment cannot be made.
    """
    pin = find_port(layout, version)
    _check_state(layout, pin)
    series = load_series(layout)
    chosen = [series[slug] for slug in slugs] or list(series.patches)
    results = []
    if not slugs and keyword is None:
        say(f"\n==> hooks: upstream's, of {version}, on what the series touches")
        results.append(
            hooks_result(layout, port_tree(layout, version), base_commit(pin))
        )
    env = make_env(layout, pin)
    stages = [
        Stage(
            "upstream",
            f"vLLM's tests that the patches name, on {version}",
            lambda layout: upstream_tasks(layout, env, version, chosen),
            parallel=True,
        )
    ]
    if e2e and env.kernels:
        stages.append(
            Stage(
                "e2e",
                f"The patched vLLM {version} against the unpatched",
                lambda layout: [_e2e(layout, pin, env)],
            )
        )
    return results + run_stages(layout, stages, keyword)


def hooks_result(layout: Layout, tree: Path, base: str) -> Result:
    """Run the hooks that a release has, on what its port of the series touches.

    Args:
        base: Commit of the release.

    Raises:
        WorkshopError: A hook broke.
    """
    start = time.monotonic()
    result = Result("hooks")
    tip = Git(tree)("rev-parse", "--verify", "HEAD^{commit}")
    with scratch(tree) as git:
        paths = git("diff-tree", "-r", "-z", "--name-only", base, tip).split("\0")
        for one in run_hooks(layout, git, base, tip, [*filter(None, paths)]):
            if one.by_hand:
                say(f"    {one.hook}: not run: {one.by_hand}")
                result.skipped += 1
                continue
            say(f"    {one.hook}: {one.files} files, {len(one.findings)} problems")
            result.passed += not one.findings
            result.failed += bool(one.findings)
            result.problems += [
                f"{one.hook}: {finding.message}" for finding in one.findings
            ]
    result.seconds = time.monotonic() - start
    return result


def _check_state(layout: Layout, pin: Pin) -> None:
    state = load_state(layout, pin.version)
    series = load_series(layout)
    todo = f"make port BASE={pin.version}"
    if state is None or state.state != "done":
        raise WorkshopError(
            f"The series is not on vLLM {pin.version}.",
            f"{layout.relative(layout.port(pin.version))}: "
            f"{state.state if state else 'nothing was begun'}.",
            todo,
        )
    if state.digest != series.digest(pin.tree):
        raise WorkshopError(
            f"The port to {pin.version} is of another state of the series.", todo=todo
        )


def make_env(layout: Layout, pin: Pin) -> PortEnv:
    """Make `build/port/<version>/.venv`, which serves from the ported tree."""
    tree = port_tree(layout, pin.version)
    venv = layout.port(pin.version) / ".venv"
    kernels = ("cpu", platform.machine()) in pin.wheels
    if kernels:
        build_port(layout, pin, tree, venv)
    else:
        build(layout)
        share_packages(Target(tree, venv, share=layout.venv))
        (tree / "vllm" / "_version.py").write_text(
            f"__version__ = version = '{pin.version}+cpu'\n"
            f"__version_tuple__ = version_tuple = {_tuple(pin.version)}\n"
            f"__commit_id__ = commit_id = 'g{pin.commit}'\n",
            encoding="utf-8",
        )
        say(f"{pin.file} has no CPU wheel of {pin.version}: tests that call compiled")
        say("kernels are skipped.")
    torch = version_of(layout.venv, "torch") or "none"
    if release(torch) != pin.torch:
        say(
            f"vLLM {pin.version} is for PyTorch {pin.torch}; here it runs with {torch}."
        )
    _install_unmet(layout, tree, venv)
    return PortEnv(tree, venv, kernels)


def _tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def unmet(lines: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Requirements that no distribution of these folders meets.

    The first folder that has a distribution counts. Requirements by URL are left
    out, as are those that the workshop does not install.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    for folder in folders:
        for dist in distributions(path=[str(folder)]):
            found.setdefault(canonicalize_name(dist.name), dist.version)
    left_out = {canonicalize_name(name) for name in LEFT_OUT}
    wanted = []
    for line in lines:
        each = Requirement(line)
        name = canonicalize_name(each.name)
        if each.url or name in left_out or (each.marker and not each.marker.evaluate()):
            continue
        if name not in found or not each.specifier.contains(
            found[name], prereleases=True
        ):
            wanted.append(line)
    return wanted


def _install_unmet(layout: Layout, tree: Path, venv: Path) -> None:
    """Install what this release needs in other versions, into its own environment."""
    folders = [folder for v in (venv, layout.venv) if (folder := site_packages(v))]
    lines = unmet(requirements(tree, "cpu"), folders)
    if not lines:
        return
    log = layout.reports / "port-pip.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # What .venv has stays visible and is not installed again.
    keep = venv.parent / "constraints.txt"
    keep.write_text(f"torch=={version_of(layout.venv, 'torch')}\n", encoding="utf-8")
    command = [str(venv_python(layout.venv)), "-m", "pip", "--python"]
    command += [str(venv_python(venv)), "--disable-pip-version-check", "--no-input"]
    command += ["install", "--no-compile", "--prefer-binary"]
    command += [f"--constraint={keep}", *lines]
    with step(f"Installing {', '.join(lines)}"), log.open("wb") as output:
        done = subprocess.run(
            command,
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    if done.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        say("Not all could be had; the tests run with what .venv has:")
        say("\n".join(f"    {line}" for line in tail))


def upstream_tasks(
    layout: Layout, env: PortEnv, version: str, patches: Sequence[Patch]
) -> list[Task]:
    tasks = []
    for patch in patches:
        task = upstream_task(
            layout,
            patch,
            f"port-{version}",
            env.tree,
            patch.meta.tests,
            venv=env.venv,
            plugin=None if env.kernels else _NO_KERNELS,
        )
        tasks.append(task)
    return tasks


def _e2e(layout: Layout, pin: Pin, env: PortEnv) -> Task:
    """The comparison of engines, with this release on both sides.

    If the release itself does not run on a CPU and we have a mend for it, both sides
    are copies with that.
    """
    port = layout.port(pin.version)
    copies = {port / "base": base_commit(pin)}
    patched, mend = env.tree, layout.port_mend(pin.version)
    if mend.is_file():
        patched = port / "patched"
        copies[patched] = "HEAD"
    python = str(venv_python(env.venv))
    sides = {
        "E2E_PATCHED_PYTHON": python,
        "E2E_PATCHED_TREE": str(patched),
        "E2E_REFERENCE_PYTHON": python,
        "E2E_REFERENCE_TREE": str(port / "base"),
    }

    def prepare() -> None:
        for folder, commit in copies.items():
            write_copy(env.tree, commit, folder, mend)

    words = ("-m", "pytest", "tests/e2e/test_engine.py")
    return Task(
        f"port-{pin.version}-e2e",
        (str(venv_python(layout.venv)), *words),
        _E2E_S,
        layout.root,
        clean_environ() | sides,
        pytest=True,
        prepare=prepare,
    )


def write_copy(tree: Path, commit: str, folder: Path, mend: Path) -> None:
    """Write a commit of a tree, with the compiled files of that tree.

    Args:
        folder: Where to; replaced if it is there.
        mend: A diff to put on it, if there is such a file.

    Raises:
        WorkshopError: The diff does not apply.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = Git(tree)("rev-parse", "--verify", f"{commit}^{{commit}}")
    with scratch(tree) as git:
        git("read-tree", found)
        if mend.is_file():
            try:
                git("apply", "--cached", str(mend))
            except GitError as error:
                raise WorkshopError(
                    f"{mend.name} does not apply to {commit} of {tree.name}.",
                    error.stderr.strip(),
                    f"Mend {mend}.",
                ) from None
        git("checkout-index", "--all", env={"GIT_WORK_TREE": str(folder)})
    link_compiled(tree / "vllm", folder / "vllm")


@click.command()
@click.argument("version")
@click.option("--slug", "slugs", multiple=True, help="Only tests of this patch.")
@click.option("--no-e2e", is_flag=True, help="Leave out the end-to-end comparison.")
@click.option("-k", "keyword", help="Only tests that match, as pytest's -k.")
@click.pass_obj
def command(
    layout: Layout,
    version: str,
    slugs: tuple[str, ...],
    no_e2e: bool,
    keyword: str | None,
) -> None:
    """Run the series' tests on a release that `port` has put it on.

    The hooks of that release run on what the series touches, unless some patches
    or tests are chosen. Then, where that release has a CPU wheel: upstream's tests
    that the patches name, and the end-to-end comparison of engines. Else upstream's
    tests as far as they need no compiled kernel.
    """
    results = port_test(layout, version, slugs, not no_e2e, keyword)
    print(summary(results), flush=True)
    if not all(result.ok for result in results):
        raise click.exceptions.Exit(1)
