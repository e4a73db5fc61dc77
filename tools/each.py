"""Whether each patch stands alone on what it needs, and each prefix of the series.

A trial is a set of patches on the base: it applies, the modules that the patch
touches can be imported, and the tests that it names pass. Trials are remembered by
the content that decides them, so that a second run takes seconds; those of
patches/trials.json also on another machine with the same Python and packages.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from tools.env import clean_environ, load_manifest, manifest_file, version_of
from tools.errors import WorkshopError
from tools.git import Git, scratch
from tools.hunks import hunks_between
from tools.layout import Layout, venv_python
from tools.lock import hold
from tools.pin import load_pin
from tools.series import Patch, Series, assemble, load_series
from tools.state import base_commit
from tools.supervise import supervise
from tools.test import link_compiled, problem_of, upstream_task
from tools.ui import say

_IMPORT_S = 600
# Python takes bytecode by the second of its source.
_SETTLE_S = 1
# A module may need a package of another device. One of vLLM's own is never missing.
_IMPORT = """
import importlib, sys
bad = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "vllm").split(".")[0] == "vllm":
            print(f"{name}: {error!r}")
            bad = 1
    except Exception as error:
        print(f"{name}: {error!r}")
        bad = 1
sys.exit(bad)
"""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a trial.

    Attributes:
        ok: Whether all went well.
        stage: `apply`, `import` or `tests`: where it failed.
        why: What was seen there.
    """

    ok: bool
    stage: str = ""
    why: str = ""


@dataclass
class Finding:
    """A problem of one patch."""

    slug: str
    message: str


@dataclass
class Report:
    """What `each` found.

    Attributes:
        ran: Trials that were run; the others were remembered.
    """

    findings: list[Finding] = field(default_factory=list)
    trials: int = 0
    ran: int = 0

    def add(self, slug: str, message: str) -> None:
        self.findings.append(Finding(slug, message))
        say(f"    {slug}: {message}")


class Trials:
    """Runs trials, and remembers them in `build/each/cache.json`.

    Args:
        git: From `tools.git.scratch`.
        anew: Whether to forget what was tried before.

    Attributes:
        known: Outcomes by key, those of other runs too.
        used: What this run asked for, by key, with words for a reader.
    """

    def __init__(
        self,
        layout: Layout,
        series: Series,
        git: Git,
        report: Report,
        anew: bool = False,
    ):
        self.layout, self.series, self.git, self.report = layout, series, git, report
        self.folder = layout.build / "each"
        self.file = self.folder / "cache.json"
        self.base = base_commit(load_pin(layout.pin))
        kept = {} if anew else _load(layout.trials) | _load(self.file)
        self.known: dict[str, dict[str, Any]] = kept
        self.used: dict[str, dict[str, Any]] = {}

    @cached_property
    def environment(self) -> str:
        """Hash of what runs the tests."""
        built = load_manifest(manifest_file(self.layout))
        facts = [
            sys.version,
            version_of(self.layout.venv, "torch"),
            version_of(self.layout.venv, "triton"),
            version_of(self.layout.venv, "pytest"),
            built and built.requirements,
            built and built.wheel_sha256,
            _IMPORT,
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def key(self, names: Iterable[str], patch: Patch) -> str:
        """Hash of all that decides a trial."""
        digest = hashlib.sha256(f"{self.base}\0{self.environment}".encode())
        for slug in names:
            digest.update(f"\0{slug}\0{self.series.content_digest(slug)}".encode())
        facts = (patch.slug, patch.meta.tests, sorted(patch.meta.test_env.items()))
        digest.update(repr(facts).encode())
        return digest.hexdigest()

    def run(self, names: Sequence[str], patch: Patch, what: str) -> Verdict:
        """Try these patches, in series order, with the tests of one of them.

        Args:
            what: For the user: why this is tried.
        """
        self.report.trials += 1
        key = self.key(names, patch)
        verdict = self._recall(key) or self._try(key, names, patch, what)
        self.used[key] = {
            "patch": patch.slug,
            "tried": what,
            "ok": verdict.ok,
            "stage": verdict.stage,
        }
        return verdict

    def _recall(self, key: str) -> Verdict | None:
        if not (saved := self.known.get(key)):
            return None
        return Verdict(saved["ok"], saved.get("stage", ""), saved.get("why", ""))

    def _try(self, key: str, names: Sequence[str], patch: Patch, what: str) -> Verdict:
        self.report.ran += 1
        say(f"==> {patch.slug}: {what} ({len(names)} patches)")
        verdict, sure = self._run(names, patch)
        if sure:
            self.known[key] = {
                "ok": verdict.ok,
                "stage": verdict.stage,
                "why": verdict.why,
            }
            _save(self.file, self.known)
        return verdict

    def applies(self, names: Sequence[str]) -> str | None:
        """Why a set of patches does not apply, None if it does."""
        try:
            self._commits(names)
        except WorkshopError as error:
            return _reason(error)
        return None

    def missing(self, names: Sequence[str], patch: Patch) -> str | None:
        """A module of vLLM that a patch names and that is not there with these.

        Also one that is imported for its types only, or by a function: imports and
        tests may pass without it, but the patch does not stand.
        """
        key = f"{self.key(names, patch)} absent"
        if key not in self.known:
            self.known[key] = {"modules": self._absent(names, patch)}
            _save(self.file, self.known)
        self.used[key] = self.known[key]
        # What no patch brings is compiled, or made by the build.
        absent = self.known[key]["modules"]
        return next((name for name in absent if self._has(self._tip, name)), None)

    def keep(self) -> None:
        """Write what this run asked for, and nothing else, to patches/trials.json."""
        _save(self.layout.trials, self.used)

    def _absent(self, names: Sequence[str], patch: Patch) -> list[str]:
        """Modules of vLLM that a patch imports and that these do not have."""
        commits = self._commits(names)
        tip = list(commits.values())[-1]
        wanted = {
            name
            for path in self._paths(commits[patch.slug])
            for name in _imported(self.git.raw("show", f"{tip}:{path}"), path)
        }
        return sorted(name for name in wanted if not self._has(tip, name))

    @cached_property
    def _tip(self) -> str:
        """Commit of the whole series."""
        return list(self._commits(self.series.slugs).values())[-1]

    def _has(self, commit: str, module: str) -> bool:
        file = module.replace(".", "/")
        places = (f"{file}.py", file)
        return any(self.git.resolve(f"{commit}:{place}") for place in places)

    def _commits(self, names: Sequence[str]) -> dict[str, str]:
        patches = [self.series[slug] for slug in names]
        return assemble(self.git, self.base, patches, self.layout.overlay)

    def _run(self, names: Sequence[str], patch: Patch) -> tuple[Verdict, bool]:
        """The verdict, and whether another run would give the same."""
        try:
            commits = self._commits(names)
        except WorkshopError as error:
            return Verdict(False, "apply", _reason(error)), True
        tree = self._write(list(commits.values())[-1])
        log = self.layout.reports / f"each-{patch.slug}.log"
        log.unlink(missing_ok=True)
        task = upstream_task(self.layout, patch, "each", tree, patch.meta.tests)
        if modules := self._modules(commits[patch.slug]):
            command = (str(venv_python(self.layout.venv)), "-c", _IMPORT, *modules)
            env = {**(task.env or clean_environ()), "PYTHONPATH": str(tree)}
            done = supervise(command, log, _IMPORT_S, tree, env)
            if done.code:
                return Verdict(False, "import", _tail(log)), not done.timed_out
        # The first failure decides.
        command = (*task.command, "-x")
        done = supervise(command, log, task.timeout, tree, task.env)
        if not (problem := problem_of(task, done)):
            return Verdict(True), True
        why = f"{problem}: {_tail(log)}; {self.layout.relative(log)}"
        return Verdict(False, "tests", why), not done.timed_out

    def _modules(self, commit: str) -> list[str]:
        """Modules of vLLM that a patch touches and that exist with it."""
        names = []
        for path in self._paths(commit):
            parts = Path(path).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        return sorted(names)

    def _paths(self, commit: str) -> list[str]:
        """Files of vLLM's package that a patch touches and that exist with it."""
        return [
            path
            for path in hunks_between(self.git, f"{commit}^", commit)
            if path.startswith("vllm/")
            and path.endswith(".py")
            and self.git.resolve(f"{commit}:{path}") is not None
        ]

    def _write(self, commit: str) -> Path:
        """Bring `build/each/tree` to a commit; only what differs is written."""
        tree = self.folder / "tree"
        tree.mkdir(parents=True, exist_ok=True)
        work = Git(
            tree,
            {
                **self.git.env,
                "GIT_WORK_TREE": str(tree),
                "GIT_INDEX_FILE": str(self.folder / "index"),
            },
        )
        time.sleep(_SETTLE_S)
        if not (self.folder / "index").exists():
            work("read-tree", "--empty")
        work("read-tree", "--reset", "-u", commit)
        link_compiled(self.layout.tree / "vllm", tree / "vllm")
        return tree


def _imported(source: bytes, path: str) -> Iterator[str]:
    """Modules of vLLM that a file imports, wherever in it."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) + 1 - node.level] if node.level else []
            names = [".".join([*up, *([node.module] if node.module else [])])]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "vllm")


def _reason(error: WorkshopError) -> str:
    return f"{error.what} {error.why}".strip()


def _load(file: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _save(file: Path, data: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    temporary.replace(file)


def _tail(log: Path) -> str:
    """The line of a log that says most."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    marked = [line for line in lines if line.startswith(("E   ", "FAILED", "ERROR"))]
    shown = marked or [line for line in lines if line.strip()]
    return shown[-1].strip()[:200] if shown else "no output"


def each(
    layout: Layout,
    slugs: Sequence[str] = (),
    on_trial: Callable[[str], None] = lambda what: None,
    anew: bool = False,
    keep: bool = False,
) -> Report:
    """Try each patch alone, each prefix, and each dependency.

    Args:
        slugs: Only these patches, if any.
        anew: Forget what was tried before.
        keep: Write patches/trials.json if there is no finding, also when interrupted.

    Raises:
        WorkshopError: Nothing has been built.
    """
    package = layout.tree / "vllm"
    if not (package / "_version.py").is_file():
        raise WorkshopError(
            f"{layout.relative(package / '_version.py')} is missing.",
            f"Nothing has been built in {layout.relative(layout.tree)}.",
            "Run `make build` first.",
        )
    series = load_series(layout)
    chosen = [series[slug] for slug in slugs] or list(series.patches)
    report = Report()
    with hold(layout, "make test-each"), scratch(layout.tree) as git:
        trials = Trials(layout, series, git, report, anew)
        try:
            for patch in chosen:
                on_trial(patch.slug)
                alone = _alone(trials, patch, report)
                if alone:
                    _unnecessary(trials, patch, report)
                _prefix(trials, patch, report if alone else Report())
        finally:
            # Also what was tried before an interrupt: another run goes on from there.
            if keep and not report.findings:
                trials.keep()
    return report


def _closure(trials: Trials, patch: Patch) -> list[str]:
    return [each.slug for each in trials.series.closure(patch.slug, tests=True)]


def _alone(trials: Trials, patch: Patch, report: Report) -> bool:
    """Whether a patch does with what it declares; else a finding names what lacks."""
    names = _closure(trials, patch)
    verdict = trials.run(names, patch, "alone on what it depends on")
    if verdict.ok:
        if name := trials.missing(names, patch):
            report.add(
                patch.slug, f"imports {name}, which nothing it depends on brings"
            )
        return True
    supplier = _supplier(trials, patch, names, verdict)
    declared = ", ".join(name for name in names if name != patch.slug) or "nothing"
    doing = {"apply": "apply", "import": "be imported", "tests": "pass its tests"}
    message = f"cannot {doing[verdict.stage]} on {declared}: {verdict.why}"
    if supplier:
        kind = "test_depends_on" if verdict.stage == "tests" else "depends_on"
        order = trials.series.slugs.index
        if order(supplier) < order(patch.slug) and verdict.stage == "tests":
            kind = "depends_on (or test_depends_on)"
        message += f"\n        undeclared dependency: {supplier}; add it to {kind}"
    report.add(patch.slug, message)
    return False


def _supplier(
    trials: Trials, patch: Patch, names: Sequence[str], verdict: Verdict
) -> str | None:
    """The patch that makes a failed trial succeed when it is added.

    Where none does alone, the last of those that do together, as far as the series
    before the patch goes.
    """
    order = list(trials.series.slugs)
    at = order.index(patch.slug)
    # Nearest first, then what comes later, which only tests may need.
    candidates = [slug for slug in reversed(order[:at]) if slug not in names]
    if verdict.stage == "tests":
        candidates += [slug for slug in order[at + 1 :] if slug not in names]
    for slug in _related_first(trials, patch, candidates):
        added = {*names, *(each.slug for each in trials.series.closure(slug))}
        trial = [name for name in order if name in added]
        if verdict.stage == "apply":
            found = trials.applies(trial) is None
        else:
            found = trials.run(trial, patch, f"with {slug} added").ok
        if found:
            return slug
    return None


def _related_first(
    trials: Trials, patch: Patch, candidates: Sequence[str]
) -> list[str]:
    """Patches that touch or mention a file of this one's come first."""
    own = _paths(trials, patch)

    def shared(slug: str) -> int:
        return len(own & _paths(trials, trials.series[slug]))

    return sorted(candidates, key=lambda slug: -shared(slug))


def _paths(trials: Trials, patch: Patch) -> set[str]:
    """Files that a patch touches or whose tests it names."""
    heads = [
        line.split(" b/", 1)[1]
        for line in patch.mail.read_text("utf-8", "replace").splitlines()
        if line.startswith("diff --git ") and " b/" in line
    ]
    tests = [word.split("::")[0] for word in patch.meta.tests]
    return {*heads, *patch.meta.overlay, *tests}


def _unnecessary(trials: Trials, patch: Patch, report: Report) -> None:
    """Name what a patch declares and does not need."""
    series = trials.series
    for kind in ("depends_on", "test_depends_on"):
        for name in getattr(patch.meta, kind):
            roots = [
                *(slug for slug in patch.meta.depends_on if slug != name),
                *(slug for slug in patch.meta.test_depends_on if slug != name),
            ]
            wanted = {patch.slug}
            for root in roots:
                wanted |= {each.slug for each in series.closure(root)}
            if name in wanted:
                # Another dependency brings it; that it is named does no harm.
                continue
            names = [slug for slug in series.slugs if slug in wanted]
            if trials.run(names, patch, f"without {name}").ok and not trials.missing(
                names, patch
            ):
                report.add(
                    patch.slug,
                    f"unnecessary dependency: it applies and passes without {name}; "
                    f"remove that from {kind}",
                )


def _prefix(trials: Trials, patch: Patch, report: Report) -> None:
    """Try the series up to and with a patch, and what its tests need after it.

    Args:
        report: Where a problem goes; one that the patch has alone is told already.
    """
    order = trials.series.slugs
    wanted = {*order[: order.index(patch.slug) + 1], *_closure(trials, patch)}
    names = [slug for slug in order if slug in wanted]
    verdict = trials.run(names, patch, "the series up to it")
    if not verdict.ok:
        report.add(
            patch.slug,
            f"fails with the series up to it ({verdict.stage}): {verdict.why}",
        )


@click.command()
@click.option("--slug", "slugs", multiple=True, help="Only this patch.")
@click.option("--anew", is_flag=True, help="Forget what was tried before.")
@click.option(
    "--keep", is_flag=True, help="As far as all is well, write patches/trials.json."
)
@click.pass_obj
def command(layout: Layout, slugs: tuple[str, ...], anew: bool, keep: bool) -> None:
    """Try each patch alone on what it depends on, and each prefix of the series.

    It must apply, the modules it touches must be importable, and the tests it
    names must pass. A dependency that is not declared, or declared in vain, is an
    error that names it. Results are kept in build/each/cache.json by content, and
    looked up there and in patches/trials.json: only what changed is run again.
    """
    if keep and slugs:
        raise WorkshopError(
            "--keep writes the trials of all patches, and --slug tries some.",
            todo="Leave one of them out.",
        )
    start = time.monotonic()
    report = each(layout, slugs, anew=anew, keep=keep)
    seconds = time.monotonic() - start
    for finding in report.findings:
        print(f"{finding.slug}: {finding.message}")
    print(
        f"{report.trials} trials, {report.ran} of them run now, in {seconds:.0f} s: "
        + (f"{len(report.findings)} problem(s)" if report.findings else "all well"),
        flush=True,
    )
    if report.findings:
        raise click.exceptions.Exit(1)
