"""Runs the tests in stages, each in processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import click

from tools.env import clean_environ
from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.series import Patch, load_series
from tools.supervise import Outcome, supervise
from tools.ui import say

# The first run takes hours; what has been tried is remembered.
_EACH_S = 6 * 3600

# Exit status of pytest when it found no test, which `-k` may cause.
_NO_TESTS = 5

# What vLLM's own tests get. What a test needs beyond that it sets itself, or has it in
# its patch's `test_env`.
_VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# On a CPU.
_UPSTREAM_ENV = _VLLM_ENV | {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# Those of vLLM's tests that are skipped for want of a GPU, in files that the series
# has or changes. docs/gpu.md says of each how many it needs.
GPU_TESTS = (
    "tests/v1/worker/test_gpu_ubatch_slicing.py",
    "tests/v1/worker/test_ubatch_cudagraphs.py",
    "tests/distributed/afd_transfer/test_p2p_nccl_gpu.py",
    "tests/v1/worker/test_afd_nccl_pair.py",
    "tests/v1/worker/test_afd_nccl_servers.py",
)


@dataclass(frozen=True)
class Task:
    """One command of a stage.

    Attributes:
        name: Of its log and report under `build/reports`.
        timeout: Seconds it may take.
        pytest: Whether it is pytest, so that `-k` and a report go with it.
        prepare: Done before it is run.
    """

    name: str
    command: tuple[str, ...]
    timeout: float
    cwd: Path
    env: dict[str, str] | None = None
    pytest: bool = False
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Stage:
    """A part of the tests that can be run alone.

    Attributes:
        built: Whether it needs the built environment.
        tasks: Gives its commands, when it is its turn.
        parallel: Whether they run side by side, one a core: each must be content
            with one. Their output is shown only where they fail.
    """

    name: str
    title: str
    tasks: Callable[[Layout], list[Task]]
    built: bool = False
    parallel: bool = False


@dataclass
class Result:
    """What became of a stage, or of one of its tasks."""

    stage: str
    seconds: float = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tests that passed, failed and were skipped."""
        return self.passed, self.failed, self.skipped


def _own(layout: Layout, name: str, timeout: float, *words: str) -> Task:
    """A module run by the workshop's own interpreter in the checkout."""
    return Task(
        name, (sys.executable, "-m", *words), timeout, layout.root, clean_environ()
    )


def _own_tests(layout: Layout, name: str, timeout: float, *words: str) -> Task:
    task = _own(layout, name, timeout, "pytest", *words)
    return Task(name, task.command, timeout, task.cwd, task.env, pytest=True)


def lint_tasks(layout: Layout) -> list[Task]:
    folders = [
        name for name in ("tools", "tests", "bench") if (layout.root / name).is_dir()
    ]
    return [
        _own(layout, "lint-check", 120, "ruff", "check", *folders),
        _own(layout, "lint-format", 120, "ruff", "format", "--check", *folders),
    ]


def tool_tasks(layout: Layout) -> list[Task]:
    return [
        _own_tests(layout, "tools", 600, "tests/tools", "-m", "not built", "-n", "auto")
    ]


def check_tasks(layout: Layout) -> list[Task]:
    return [_own(layout, "check", 900, "tools", "check")]


def build_tasks(layout: Layout) -> list[Task]:
    return [_own(layout, "build", 1800, "tools", "build", "--base")]


def upstream_tasks(layout: Layout) -> list[Task]:
    """vLLM's tests that the patches name, in the patched tree; none twice."""
    tasks = []
    seen: dict[str, set[str]] = {}
    for patch in load_series(layout).patches:
        tests = list(patch.meta.tests)
        # With an option, such as -k, the rest means something else.
        if not any(word.startswith("-") for word in tests):
            same_env = seen.setdefault(str(sorted(patch.meta.test_env.items())), set())
            tests = [word for word in tests if word not in same_env]
            same_env.update(tests)
        if tests:
            tasks.append(upstream_task(layout, patch, "upstream", layout.tree, tests))
    return tasks


def each_tasks(layout: Layout) -> list[Task]:
    """Each patch alone, and each prefix of the series: `tools.each`."""
    command = (sys.executable, "-m", "tools", "--root", str(layout.root), "each")
    here = Path(__file__).resolve().parent.parent
    return [Task("each", command, _EACH_S, here, clean_environ())]


def upstream_task(
    layout: Layout,
    patch: Patch,
    kind: str,
    tree: Path,
    tests: Sequence[str],
    venv: Path | None = None,
    plugin: Path | None = None,
) -> Task:
    """Tests of vLLM in a tree.

    Args:
        venv: Environment to run them in, the patched one unless given.
        plugin: Module of pytest's to load.
    """
    python = venv_python(venv or layout.venv)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider"]
    path = str(tree)
    if plugin:
        command += ["-p", plugin.stem]
        path += f"{os.pathsep}{plugin.parent}"
    return Task(
        f"{kind}-{patch.slug}",
        (*command, *tests),
        1500,
        tree,
        clean_environ() | _UPSTREAM_ENV | patch.meta.test_env | {"PYTHONPATH": path},
        pytest=True,
    )


def link_compiled(package: Path, target: Path) -> None:
    """Share the compiled files and the version of one `vllm` package with another."""
    for source in [*package.rglob("*.so"), package / "_version.py"]:
        link = target / source.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            os.link(source, link)
        except OSError:
            shutil.copy2(source, link)


def e2e_tasks(layout: Layout) -> list[Task]:
    return [_own_tests(layout, "e2e", 3600, "tests", "-m", "built")]


def gpu_tasks(layout: Layout) -> list[Task]:
    """What needs a GPU: the workshop's tests, and vLLM's in the patched tree.

    Raises:
        WorkshopError: There is none, so that all would be skipped.
    """
    python = venv_python(layout.venv)
    sees_one = "import torch; raise SystemExit(not torch.cuda.is_available())"
    done = subprocess.run([python, "-c", sees_one], env=clean_environ(), check=False)
    if done.returncode:
        raise WorkshopError(
            "Nothing here can run on a GPU.",
            f"PyTorch of {layout.relative(layout.venv)} finds none.",
            "On a machine that has one: make test-gpu",
        )
    env = clean_environ() | _VLLM_ENV | {"PYTHONPATH": str(layout.tree)}
    vllm = (str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rs", *GPU_TESTS)
    return [
        _own_tests(layout, "gpu", 7200, "tests/gpu"),
        Task("gpu-vllm", vllm, 7200, layout.tree, env, pytest=True),
    ]


STAGES = (
    Stage("lint", "ruff on the workshop", lint_tasks),
    Stage("tools", "Tests of the workshop", tool_tasks),
    Stage("check", "Lint of the series", check_tasks),
    Stage("build", "The patched and the unpatched environment", build_tasks, True),
    Stage("upstream", "vLLM's tests that the patches name", upstream_tasks, True, True),
    Stage("each", "Each patch alone on its dependencies", each_tasks, True),
    Stage("e2e", "The patched vLLM against the unpatched", e2e_tasks, True),
    Stage("gpu", "What needs a GPU", gpu_tasks, True),
)


def choose(names: Sequence[str], fast: bool, each: bool) -> list[Stage]:
    """Stages to run, in order.

    Args:
        names: Only these, if any.
        fast: None that needs the built environment.
        each: Also `each`, which is left out otherwise. `gpu` only runs by name.
    """
    if names:
        return [stage for stage in STAGES if stage.name in names]
    return [
        stage
        for stage in STAGES
        if not (fast and stage.built)
        and (each or stage.name != "each")
        and stage.name != "gpu"
    ]


def run_stages(
    layout: Layout, stages: Sequence[Stage], keyword: str | None = None
) -> list[Result]:
    """Run stages one after the other; a failure does not keep later ones from it.

    Only when `build` fails are those left out that need what it makes.
    """
    results: list[Result] = []
    unbuilt = False
    for number, stage in enumerate(stages, 1):
        say(f"\n==> [{number}/{len(stages)}] {stage.name}: {stage.title}")
        if unbuilt and stage.built:
            results.append(Result(stage.name, problems=["not run: build failed"]))
            continue
        result = run_stage(layout, stage, keyword)
        results.append(result)
        say(f"    {stage.name} {'ok' if result.ok else 'FAILED'}, {_time(result)}")
        unbuilt |= stage.name == "build" and not result.ok
    return results


def run_stage(layout: Layout, stage: Stage, keyword: str | None = None) -> Result:
    start = time.monotonic()
    run = _run_side_by_side if stage.parallel else _run_in_turn
    result = Result(stage.name)
    try:
        for part in run(layout, stage.tasks(layout), keyword):
            result.passed += part.passed
            result.failed += part.failed
            result.skipped += part.skipped
            result.problems += part.problems
    except WorkshopError as error:
        say(str(error))
        result.problems.append(error.what)
    result.seconds = time.monotonic() - start
    return result


def _run_in_turn(
    layout: Layout, tasks: Sequence[Task], keyword: str | None
) -> Iterator[Result]:
    for task in tasks:
        say(f"    {task.name}: {_shown(layout, task.command)}")
        yield _run_task(layout, task, keyword)


def _run_side_by_side(
    layout: Layout, tasks: Sequence[Task], keyword: str | None
) -> Iterator[Result]:
    stop = threading.Event()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [
            pool.submit(_run_task, layout, task, keyword, show=False, stop=stop)
            for task in tasks
        ]
        try:
            for number, future in enumerate(as_completed(running), 1):
                part = future.result()
                done = f"[{number}/{len(tasks)}] {part.stage}"
                if part.ok:
                    say(f"    {done}: {part.passed} passed, {_time(part)}")
                else:
                    log = layout.reports / f"{part.stage}.log"
                    say(log.read_text("utf-8", errors="replace"))
                    say(f"    {done}: FAILED, {part.problems[0]}")
                yield part
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _run_task(
    layout: Layout,
    task: Task,
    keyword: str | None,
    show: bool = True,
    stop: threading.Event | None = None,
) -> Result:
    result = Result(task.name)
    log = layout.reports / f"{task.name}.log"
    report = layout.reports / f"{task.name}.xml"
    for old in (log, report):
        old.unlink(missing_ok=True)
    command = task.command
    if task.pytest:
        command += (f"--junitxml={report}",)
        if keyword:
            command += ("-k", keyword)
    task.prepare()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{_shown(layout, command)}\n")
    outcome = supervise(
        command, log, task.timeout, task.cwd, task.env, show=show, stop=stop
    )
    result.seconds = outcome.seconds
    _count(report, result)
    if problem := problem_of(task, outcome, bool(keyword)):
        result.problems.append(f"{task.name}: {problem}; {layout.relative(log)}")
    return result


def problem_of(task: Task, outcome: Outcome, filtered: bool = False) -> str:
    """How a task failed, empty if it did not.

    Args:
        filtered: Whether `-k` may have left it without a test.
    """
    if outcome.timed_out:
        return f"took longer than {task.timeout:.0f} s"
    if outcome.code == _NO_TESTS and task.pytest:
        return "" if filtered else "found no test"
    return f"exit status {outcome.code}" if outcome.code else ""


def _count(report: Path, result: Result) -> None:
    """Add the counts of pytest's report, if there is one."""
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except (FileNotFoundError, ElementTree.ParseError):
        return
    for suite in suites:
        total, failures, errors, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
        result.failed += failures + errors
        result.skipped += skipped
        result.passed += total - failures - errors - skipped


def _shown(layout: Layout, command: Sequence[str]) -> str:
    return " ".join(
        layout.relative(Path(word)) if word.startswith("/") else word
        for word in command
    )


def _time(result: Result) -> str:
    minutes, seconds = divmod(round(result.seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def summary(results: Sequence[Result]) -> str:
    lines = ["", "stage     result   passed  failed  skipped  time"]
    for result in results:
        counts = result.counts
        shown = [str(count) if any(counts) else "-" for count in counts]
        lines.append(
            f"{result.stage:<9} {'ok' if result.ok else 'FAILED':<6} "
            f"{shown[0]:>8}{shown[1]:>8}{shown[2]:>9}  {_time(result)}"
        )
        lines += [f"          {problem}" for problem in result.problems]
    failed = [result.stage for result in results if not result.ok]
    total = Result("", sum(result.seconds for result in results))
    verdict = f"FAILED: {', '.join(failed)}" if failed else "All stages passed"
    return "\n".join([*lines, f"{verdict}, in {_time(total)}."])


@click.command()
@click.option(
    "--fast", is_flag=True, help="Leave out what needs the built environment."
)
@click.option(
    "--stage",
    "names",
    multiple=True,
    type=click.Choice([stage.name for stage in STAGES]),
    help="Run only this stage; may be given several times.",
)
@click.option(
    "--each", is_flag=True, help="Also run each patch alone on what it needs."
)
@click.option("-k", "keyword", help="Only tests that match, as pytest's -k.")
@click.pass_obj
def command(
    layout: Layout,
    fast: bool,
    names: tuple[str, ...],
    each: bool,
    keyword: str | None,
) -> None:
    """Run lint, tool tests, check, build, upstream tests and end-to-end tests.

    Logs and reports are kept in build/reports.
    """
    results = run_stages(layout, choose(names, fast, each), keyword)
    print(summary(results), flush=True)
    if keyword and not any(any(result.counts) for result in results):
        raise WorkshopError(
            f"-k {keyword!r} matches no test of what was run.",
            f"Stages: {', '.join(result.stage for result in results)}.",
            "Give another word, or another --stage.",
        )
    if not all(result.ok for result in results):
        raise click.exceptions.Exit(1)
