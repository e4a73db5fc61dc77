"""Lints the series and says all that is wrong with it in one report."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tools.errors import WorkshopError
from tools.export import first_difference
from tools.git import Git, scratch
from tools.layout import Layout
from tools.pin import Pin, load_pin
from tools.port_merge import check_patch
from tools.series import (
    Patch,
    Series,
    assemble,
    mail_of,
    raw_diff,
    read_mail,
    read_order,
    read_overlay,
    scan_series,
)
from tools.state import base_commit
from tools.ui import say
from tools.upstream_hooks import run_hooks
from tools.upstream_lint import lint
from tools.upstream_rules import (
    PRIVATE,
    file_problems,
    message_problems,
    private_words,
    product_lines,
    sections,
    size_problems,
    unsaid_tests,
)

if TYPE_CHECKING:
    from unidiff import PatchSet

RULES = {
    "series": "series and metadata are well formed; dependencies exist, come earlier",
    "orphan": "each file in patches/ and overlay/ belongs to a patch",
    "taken": "no overlay path exists in the base: upstream has not taken it",
    "mail": "the mail is git-format-patch's and adds no file; no file is binary",
    "applies": "the patch applies to the tree before it",
    "offset": "each hunk is exactly where the mail says",
    "closure": "the patch applies on nothing but its depends_on",
    "tip": "the whole series gives the tip tree of vllm.pin",
    "roundtrip": "export would write the same bytes",
    "tests": "the tests of the metadata exist where they run; the Test Plan names them",
    "title": "upstream's form of a title",
    "body": "non-empty Purpose, Test Plan and Test Result",
    "ai": "says that AI assisted, why it is no duplicate; Co-authored-by trailer",
    "signoff": "no Signed-off-by, which is a human's to give",
    "size": "more than 500 changed lines link an RFC",
    "private": "no word or path of this repository reaches upstream",
    "init": "new folders of Python files under vllm/ are packages",
    "spdx": "new source files have upstream's two SPDX lines",
    "filename": "no space in a new file's name",
    "ruff": "ruff check with vLLM's settings",
    "format": "ruff format with vLLM's settings",
    "hooks": "vLLM's own Python hooks, clang-format, shellcheck, markdownlint",
    "typos": "no misspelling, with vLLM's settings",
    "mypy": "vLLM's mypy hook finds nothing that the base has not",
    "hygiene": "no package registry's host and no machine's path in a file here",
    "report": "docs/report.md is what `make report` would write; ports are not stale",
    "base": "the base can be had, for the rules that need its files",
}

# Hooks of vLLM's that run on a copy of the tip; markdownlint only where it is on PATH,
# as it takes npm.
_HOOKS = (
    "markdownlint-cli2",
    "typos",
    "mypy",
    "clang-format",
    "shellcheck",
    "check-root-lazy-imports",
    "check-label-rules",
    "check-buildkite-step-keys",
)
_ZERO_COMMIT = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n"
# Options of pytest that take the next argument.
_TAKES_VALUE = ("-k", "-m", "-n", "-o", "-p", "-c", "--deselect", "--ignore")
_MAX_FILE = 5_000_000

# Hashes (the first 16 digits) of the hosts of package registries, so that this file
# does not name them either.
_REGISTRIES = frozenset(
    (
        "a4aa2ac280bb8d1a",
        "8b5bb5eb9d758455",
        "03e390c8d8a6f2cf",
        "81cb2c6b00812985",
        "8743857e3ea00fd1",
        "789e46d79514e280",
        "00a7dc5a0cc38858",
        "4db460c55b85212e",
    )
)
_HOST = re.compile(r"\b(?:[a-z0-9-]+\.)+(?:ai|com|dev|io|net|org)\b", re.IGNORECASE)
_INDEX_URL = re.compile(
    r"https?://(?>(?:[^/@\s]*@)?)"
    r"(?!127\.0\.0\.1|localhost|[\w.-]*(?:example|invalid))[^\s\"'<>]+/simple\b"
)


@dataclass(frozen=True)
class Problem:
    """One failure: which rule, of which patch (None: of none in particular)."""

    rule: str
    slug: str | None
    message: str


@dataclass
class Report:
    """All that a check found.

    Attributes:
        slugs: Patches that were looked at.
        notes: What was not looked at, and why.
        seconds: How long it took.
    """

    slugs: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, rule: str, slug: str | None, message: str) -> None:
        if rule not in RULES:
            raise KeyError(rule)
        problem = Problem(rule, slug, message)
        if problem not in self.problems:
            self.problems.append(problem)

    def text(self) -> str:
        """The report as text, grouped by patch."""
        lines = []
        for slug in (None, *self.slugs):
            found = [one for one in self.problems if one.slug == slug]
            if found:
                lines.append(slug or "series and repository")
            for one in found:
                head, *rest = one.message.splitlines() or [""]
                lines.append(f"  {one.rule:<10}{head}")
                lines += [f"  {'':<10}{line}" for line in rest]
        lines += [f"note: {note}" for note in self.notes]
        count = len(self.problems)
        lines.append(
            f"{len(self.slugs)} patches, {len(RULES)} rules, "
            f"{count or 'no'} problem{'' if count == 1 else 's'} "
            f"({self.seconds:.1f} s)"
        )
        return "\n".join(lines)

    def json(self) -> str:
        return json.dumps(
            {
                "ok": self.ok,
                "slugs": self.slugs,
                "problems": [vars(problem) for problem in self.problems],
                "notes": self.notes,
                "seconds": round(self.seconds, 2),
            },
            indent=1,
        )


def check(layout: Layout, compare_report: bool = True) -> Report:
    """Check the series, and this repository, against all rules.

    Needs no built environment. The base's files come from `build/vllm`, which is
    fetched where there is none.

    Args:
        compare_report: Whether rule `report` counts.

    Raises:
        WorkshopError: git or a linter cannot be run at all.
    """
    start = time.monotonic()
    report = Report()
    series, problems = scan_series(layout)
    order = read_order(layout, [])
    report.slugs = tuple(order)
    say(f"==> Checking {len(order)} patches")
    for line in problems:
        match = re.match(r"patches/([^/:]+)\.(?:toml|patch)\b", line)
        slug = match[1] if match and match[1] in order else None
        report.add("series", slug, line)
    _check_owners(layout, series, order, report)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        for patch in series.patches:
            check_mail(Git(Path(folder)), layout, patch, report)
    _check_hygiene(layout, report)
    try:
        pin = load_pin(layout.pin)
    except WorkshopError as error:
        report.add("base", None, str(error))
    else:
        base = _base(layout, pin, report)
        if base:
            with scratch(layout.tree) as git:
                complete = len(series.patches) == len(order)
                Tree(git, layout, base, series, report).check(pin, complete)
    if compare_report:
        _check_report(layout, series, report)
    report.seconds = time.monotonic() - start
    return report


def _check_owners(
    layout: Layout, series: Series, order: Sequence[str], report: Report
) -> None:
    """Rules orphan and taken."""
    known = {
        layout.series,
        layout.trials,
        *(layout.patches / f"{slug}.patch" for slug in order),
    }
    known |= {layout.patches / f"{slug}.toml" for slug in order}
    ports = layout.patches / "ports"
    for path in _files(layout.patches):
        is_port = path.parent.parent == ports
        is_mend = is_port and path == layout.port_mend(path.parent.name)
        if path in known or is_mend or (is_port and path.stem in (*order, "status")):
            continue
        report.add(
            "orphan",
            None,
            f"{layout.relative(path)}: no patch of patches/series has that name.",
        )
    owned = {name for patch in series.patches for name in patch.meta.overlay}
    for path in _files(layout.overlay):
        name = str(path.relative_to(layout.overlay))
        if name not in owned:
            report.add(
                "orphan",
                None,
                f"overlay/{name}: no patch names it in its `overlay`; it reaches "
                "no tree.",
            )
    if not layout.sdist_files.exists():
        report.add("base", None, f"{layout.sdist_files.name} is missing.")
        return
    base = set(layout.sdist_files.read_text(encoding="utf-8").splitlines())
    for patch in series.patches:
        for name in patch.meta.overlay:
            if name in base:
                report.add(
                    "taken",
                    patch.slug,
                    f"overlay/{name}: the base has this file; make the change a hunk "
                    "or move the file.",
                )


def _files(top: Path) -> Iterator[Path]:
    for path in sorted(top.rglob("*")):
        if "__pycache__" not in path.parts and (path.is_symlink() or path.is_file()):
            yield path


def check_mail(git: Git, layout: Layout, patch: Patch, report: Report) -> None:
    """Rules that need the mail and the overlay only."""
    from unidiff import UnidiffParseError

    slug = patch.slug
    data = patch.mail.read_bytes()
    where = layout.relative(patch.mail)
    if not data.startswith(_ZERO_COMMIT):
        report.add("mail", slug, f"{where} does not begin as `make export` writes it.")
    try:
        check_patch(patch, layout.overlay)
    except WorkshopError as error:
        report.add("mail", slug, str(error))
    try:
        mail = read_mail(git, patch.mail)
    except WorkshopError as error:
        report.add("mail", slug, str(error))
        return
    for rule, message in message_problems(mail.message):
        report.add(rule, slug, message)
    # One that is missing is told already.
    if plan := sections(mail.message).get("Test Plan"):
        for name in unsaid_tests(paths_in(patch.meta.tests), plan):
            report.add("tests", slug, f"the Test Plan does not name {name}.")
    for rule, message in private_words("line of the message", mail.message.split("\n")):
        report.add(rule, slug, message)
    try:
        diff = parse(data)
    except UnidiffParseError as error:
        report.add("mail", slug, f"{where}: the hunks cannot be read: {error}")
        return
    removed = {file.path for file in diff if file.is_removed_file}
    for file in diff:
        if file.is_added_file and file.path not in removed:
            report.add(
                "mail",
                slug,
                f"{where} adds {file.path}; new files belong into the overlay "
                "(`make export` puts them there).",
            )
        lines = [line.value for hunk in file for line in hunk if line.is_added]
        for rule, message in private_words(f"added line of {file.path}", lines):
            report.add(rule, slug, message)
    for name, content in overlay_contents(layout, patch):
        for rule, message in file_problems(name, content):
            report.add(rule, slug, message)
        if b"\0" not in content:
            lines = content.decode(errors="replace").split("\n")
            for rule, message in private_words(name, lines):
                report.add(rule, slug, message)
    for rule, message in size_problems(changed_lines(layout, patch), mail.message):
        report.add(rule, slug, message)


def overlay_contents(layout: Layout, patch: Patch) -> Iterator[tuple[str, bytes]]:
    """Path and content of each new file of a patch that is there."""
    for name in patch.meta.overlay:
        path = layout.overlay / name
        if path.is_symlink() or path.is_file():
            yield name, read_overlay(path)[1]


def changed_lines(layout: Layout, patch: Patch) -> list[tuple[str, int]]:
    """Path and number of changed lines of each file; binary ones have none.

    Raises:
        UnidiffParseError: The hunks are malformed.
    """
    diff = parse(patch.mail.read_bytes())
    changed = [(file.path, file.added + file.removed) for file in diff]
    return changed + [
        (name, len(content.splitlines()))
        for name, content in overlay_contents(layout, patch)
        if b"\0" not in content
    ]


def product_lines_of(layout: Layout, patch: Patch) -> int:
    """How many of a patch's changed lines count for upstream's limit."""
    return product_lines(changed_lines(layout, patch))


def parse(mail: bytes) -> PatchSet:
    """The hunks of a mail.

    Raises:
        UnidiffParseError: They are malformed.
    """
    from unidiff import PatchSet

    return PatchSet.from_string(mail.decode("utf-8", "surrogateescape"))


def _check_hygiene(layout: Layout, report: Report) -> None:
    """Rule hygiene, on the files that are, or would be, tracked."""
    forms = {
        "a package index": _INDEX_URL,
        "a path of one machine": PRIVATE["a path of one machine"],
    }
    # A path such as / or /src says nothing; a longer one is this checkout's own.
    if len(layout.root.parts) > 2:
        root = re.escape(str(layout.root))
        forms["the path of this checkout"] = re.compile(rf"{root}(?![\w.-])")
    for path in _tracked(layout):
        # Mails are looked at above: what upstream's own lines say is upstream's.
        if path.suffix == ".patch" or not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if b"\0" in data[:8000] or len(data) > _MAX_FILE:
            continue
        for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
            named = [
                (what, match[0])
                for what, form in forms.items()
                if (match := form.search(line))
            ]
            named += [
                ("a package registry", match[0])
                for match in _HOST.finditer(line)
                if _is_registry(match[0])
            ]
            for what, text in named:
                where = f"{layout.relative(path)}:{number}"
                report.add("hygiene", None, f"{where} names {what}: {text}")


def _check_report(layout: Layout, series: Series, report: Report) -> None:
    """Rule report; what is wrong elsewhere would only be said twice."""
    from tools.report import report_file, report_text, stale_ports

    path = report_file(layout)
    if not path.parent.is_dir():
        return
    if not report.ok:
        report.notes.append(f"{layout.relative(path)}: not compared.")
        return
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != report_text(layout, series, report.problems):
        report.add(
            "report",
            None,
            f"{layout.relative(path)} is out of date; `make report` writes it.",
        )
    for version, slugs in stale_ports(layout, series).items():
        report.add(
            "report",
            None,
            f"The port to {version} is of another state of {', '.join(slugs)}: "
            f"`make port BASE={version}`, then `make report`.",
        )


def _is_registry(host: str) -> bool:
    """Whether a host, or a domain that it is in, is a package registry's."""
    parts = host.lower().split(".")
    domains = (".".join(parts[at:]) for at in range(len(parts) - 1))
    return any(
        hashlib.sha256(domain.encode()).hexdigest()[:16] in _REGISTRIES
        for domain in domains
    )


def _tracked(layout: Layout) -> list[Path]:
    git = Git(layout.root)
    if (layout.root / ".git").exists() and git.ok("rev-parse", "HEAD"):
        out = git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return [layout.root / name for name in sorted(set(out.split("\0"))) if name]
    skipped = {layout.build, layout.venv}
    return [path for path in _files(layout.root) if not skipped & set(path.parents)]


def _base(layout: Layout, pin: Pin, report: Report) -> str | None:
    """The base commit, fetched if it is not there."""
    base = base_commit(pin)
    has_objects = (layout.tree / ".git" / "objects").is_dir()
    if has_objects and Git(layout.tree).resolve(f"{base}^{{tree}}") == pin.tree:
        return base
    from tools.fetch import fetch

    say(f"{layout.relative(layout.tree)} has not the pinned base: fetching it first.")
    try:
        return fetch(layout)
    except WorkshopError as error:
        report.add("base", None, f"{error}\nRules that need its files were left out.")
        return None


class Tree:
    """The rules that need the base's files.

    Args:
        git: From `tools.git.scratch`.
        base: Base commit.
    """

    def __init__(
        self, git: Git, layout: Layout, base: str, series: Series, report: Report
    ) -> None:
        self.git = git
        self.layout = layout
        self.base = base
        self.series = series
        self.report = report
        self.made: dict[tuple[str, ...], str | WorkshopError] = {(): base}

    def check(self, pin: Pin, complete: bool) -> None:
        """Run them.

        Args:
            complete: Whether each slug of the order could be read.
        """
        good: list[Patch] = []
        for patch in self.series.patches:
            before = self._commit(good)
            try:
                commit = self._commit([*good, patch])
            except WorkshopError as error:
                self.report.add("applies", patch.slug, str(error))
                continue
            good.append(patch)
            self._check_hunks(patch, before, commit)
            self._check_packages(patch, before, commit)
        for patch in good:
            self._check_closure(patch, {one.slug for one in good})
        tip = self._commit(good)
        tree = self.git("rev-parse", f"{tip}^{{tree}}")
        if complete and len(good) == len(self.series.patches):
            if tree != pin.tip_tree:
                self.report.add(
                    "tip",
                    None,
                    f"The series gives {tree}; vllm.pin expects {pin.tip_tree} "
                    "(series.tip_tree).\n`make export` writes it.",
                )
        else:
            self.report.notes.append("tip: not compared, as not every patch applies.")
        self._lint(good, tip)

    def _commit(self, patches: Sequence[Patch]) -> str:
        """Commit of some patches on the base; each list is made once.

        Raises:
            WorkshopError: The last of them does not apply.
        """
        key = tuple(patch.slug for patch in patches)
        if key not in self.made:
            parent = self._commit(patches[:-1])
            try:
                made = assemble(self.git, parent, patches[-1:], self.layout.overlay)
                self.made[key] = made[key[-1]]
            except WorkshopError as error:
                self.made[key] = error
        found = self.made[key]
        if isinstance(found, WorkshopError):
            raise found
        return found

    def _check_hunks(self, patch: Patch, before: str, commit: str) -> None:
        """Rules offset and roundtrip."""
        from unidiff import UnidiffParseError

        data = patch.mail.read_bytes()
        try:
            moved = [*self._moved_hunks(data, before)]
        except UnidiffParseError:
            return
        for message in moved:
            self.report.add("offset", patch.slug, message)
        again, added = mail_of(self.git, commit)
        if again != data and not moved:
            self.report.add(
                "roundtrip",
                patch.slug,
                f"`make export` would write other bytes: "
                f"{first_difference(data, again)}",
            )
        if {file.path for file in added} != set(patch.meta.overlay):
            self.report.add(
                "roundtrip",
                patch.slug,
                "`overlay` is not what the patch adds: "
                + ", ".join(file.path for file in added),
            )

    def _moved_hunks(self, data: bytes, before: str) -> Iterator[str]:
        for file in parse(data):
            if file.is_added_file or not len(file):
                continue
            name = _unquoted(file.source_file).removeprefix("a/")
            content = self.git.raw("cat-file", "blob", f"{before}:{name}")
            lines = content.decode("utf-8", "surrogateescape").split("\n")
            for hunk in file:
                wanted = [line.value.removesuffix("\n") for line in hunk.source_lines()]
                start = max(hunk.source_start - 1, 0)
                if lines[start : start + len(wanted)] != wanted:
                    yield (
                        f"{name}: the hunk for line {hunk.source_start} belongs "
                        "elsewhere in the tree before it; apply, look at it, export."
                    )

    def _check_packages(self, patch: Patch, before: str, commit: str) -> None:
        """Rule init."""
        for folder in missing_packages(self.git, before, commit, patch.meta.overlay):
            self.report.add(
                "init", patch.slug, f"{folder}/ is new and has no __init__.py."
            )

    def _check_closure(self, patch: Patch, good: set[str]) -> None:
        """Rules closure and tests."""
        slug = patch.slug
        try:
            needed = self.series.closure(slug)
            tested = self.series.closure(slug, tests=True)
        except WorkshopError:
            return  # A name that does not exist is reported by rule series.
        commit = ""
        for field_name, patches in (
            ("depends_on", needed),
            ("depends_on and test_depends_on", tested),
        ):
            if broken := [one.slug for one in patches if one.slug not in good]:
                self.report.notes.append(
                    f"{slug}: not tried on its {field_name}, as {broken[0]} does not "
                    "apply."
                )
                return
            try:
                commit = self._commit(patches)
            except WorkshopError as error:
                names = ", ".join(one.slug for one in patches if one.slug != slug)
                self.report.add(
                    "closure",
                    slug,
                    f"It does not apply on its {field_name} alone ({names or 'none'}); "
                    f"a name is missing there.\n{error.what} {error.why}",
                )
                return
        for name in paths_in(patch.meta.tests):
            if self.git.resolve(f"{commit}:{name.rstrip('/')}") is None:
                self.report.add(
                    "tests",
                    slug,
                    f"tests names {name}, which the tree of this patch and its "
                    "dependencies has not.",
                )

    def _lint(self, patches: Sequence[Patch], tip: str) -> None:
        """Rules ruff, format and hooks, on the tip's version of what is touched."""
        touched: dict[str, str] = {}
        for at, patch in enumerate(patches):
            commit = self._commit(patches[: at + 1])
            rows = raw_diff(self.git, commit)
            touched |= {path: patch.slug for _, _, _, path in rows}
        try:
            for found in lint(self.git, tip, list(touched)):
                slug = touched.get(found.path) if found.path else None
                self.report.add(found.rule, slug, found.message)
            for one in run_hooks(
                self.layout, self.git, self.base, tip, [*touched], only=_HOOKS
            ):
                if one.by_hand:
                    self.report.notes.append(f"{one.hook}: not run: {one.by_hand}.")
                for found in one.findings:
                    slug = touched.get(found.path) if found.path else None
                    rule = found.rule if found.rule in RULES else "hooks"
                    self.report.add(rule, slug, f"{one.hook}: {found.message}")
        except WorkshopError as error:
            self.report.add("ruff", None, f"The files could not be linted: {error}")


def missing_packages(
    git: Git, before: str, after: str, added: Sequence[str]
) -> Iterator[str]:
    """New folders of Python files under `vllm/` that are no packages."""
    folders = {
        str(parent)
        for name in added
        if name.startswith("vllm/") and name.endswith(".py")
        for parent in Path(name).parents
        if "vllm" in parent.parts
    }
    for folder in sorted(folders):
        package = f"{after}:{folder}/__init__.py"
        if git.resolve(f"{before}:{folder}") is None and git.resolve(package) is None:
            yield folder


def _unquoted(name: str) -> str:
    """A file name as it is, where git puts it in quotes."""
    if not name.startswith('"'):
        return name
    return name[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")


def paths_in(arguments: Sequence[str]) -> Iterator[str]:
    """The files and folders among arguments for pytest."""
    value = False
    for argument in arguments:
        if value or argument.startswith("-"):
            value = not value and argument in _TAKES_VALUE
        else:
            yield argument.split("::", 1)[0]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--rules", is_flag=True, help="List the rules and end.")
@click.pass_obj
def command(layout: Layout, as_json: bool, rules: bool) -> None:
    """Lint the series: form, order, round trip, ownership, upstream's rules.

    All problems are in one report. Needs no built environment.
    """
    if rules:
        for name, what in RULES.items():
            print(f"{name:<10}{what}")
        return
    report = check(layout)
    print(report.json() if as_json else report.text())
    if not report.ok:
        raise click.exceptions.Exit(1)
