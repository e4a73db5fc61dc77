"""Makes of one patch what upstream can take: a branch, a mail, a text, a checklist.

Nothing is pushed, signed or ticked. In a clone of upstream's a branch is added; its
HEAD, index, files and other refs are not touched: commits are made in a repository
of our own, whose objects go into the clone's store once all is well.
"""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from tools.check import (
    Report,
    check_mail,
    missing_packages,
    parse,
    paths_in,
    product_lines_of,
)
from tools.errors import WorkshopError
from tools.git import Git, GitError, borrowing, changed_files
from tools.layout import Layout
from tools.lock import hold
from tools.pin import Pin, load_pin, load_ports
from tools.port import port_tree
from tools.port_merge import has_hunks
from tools.pr_checklist import (
    FAIL,
    HUMAN,
    PASS,
    Item,
    failed,
    hook_items,
    human_items,
    rule_items,
    text,
)
from tools.pr_text import Prerequisite, pull_request, sentence_with
from tools.series import (
    FORMAT_PATCH,
    Patch,
    Series,
    add_overlay,
    assemble,
    commit_tree,
    load_series,
    mail_of,
    raw_diff,
    read_mail,
)
from tools.state import base_commit, operation_in
from tools.ui import say, step
from tools.upstream_hooks import run_hooks
from tools.upstream_rules import AI, DUPLICATE, sections, unsaid_tests

BRANCHES = "afd-dbo/"
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:rc\d+|\.post\d+)?)")
_NEWEST = ("refs/remotes/origin/main", "refs/remotes/upstream/main")


@dataclass(frozen=True)
class Made:
    """Result of `make_pr`.

    Attributes:
        folder: Holds `PR.md`, `CHECKLIST.md` and the mail.
        repo: Repository with the branch.
        fresh: Whether the branch was not there before.
    """

    folder: Path
    repo: Path
    branch: str
    commit: str
    base: str
    mail: Path
    items: tuple[Item, ...]
    fresh: bool

    @property
    def ok(self) -> bool:
        return not failed(self.items)


@dataclass(frozen=True)
class Clone:
    """A user's clone of upstream, checked to be fit.

    Attributes:
        path: As the user gave it.
        objects: Its object store.
    """

    path: Path
    objects: Path
    git: Git


@dataclass(frozen=True)
class Base:
    """What the branch starts from.

    Attributes:
        name: For people.
        version: Release, None for another revision.
    """

    commit: str
    name: str
    version: str | None


def make_pr(
    layout: Layout,
    slug: str,
    repo: Path | None = None,
    base: str | None = None,
    out: Path | None = None,
    hooks: bool = True,
) -> Made:
    """Make branch, mail, text and checklist of a patch.

    Args:
        repo: Clone of upstream to make the branch in; without one it is made in
            `build/pr/vllm.git`.
        base: Release, or revision of the clone, to start from; the pinned release
            unless given. Without a clone, one that `port` has put the series on.
        out: Folder for the files, instead of `build/pr/<slug>`.
        hooks: Whether to run upstream's hooks.

    Raises:
        WorkshopError: There is no such patch, it does not apply, or the clone is not
            fit. Nothing was changed then.
    """
    pin = load_pin(layout.pin)
    series = load_series(layout)
    patch = _find(series, slug)
    folder = out or layout.build / "pr" / slug
    clone = open_clone(layout, repo) if repo else None
    _fetch_base(layout, pin)
    with hold(layout, "make pr"), _workplace(layout, clone) as git:
        start = _base(layout, pin, clone, base)
        # A clone may be shallow, and nothing before the base matters.
        (git.cwd / "shallow").write_text(f"{start.commit}\n", encoding="utf-8")
        patches = series.closure(slug)
        with step(f"Making {BRANCHES}{slug} on {start.name}"):
            commit, mail_file = _commit(layout, git, start, patches)
        before = git("rev-parse", f"{commit}^")
        _refuse_binary(git, slug, before, commit)
        branch = f"{BRANCHES}{slug}"
        fresh = _is_free(clone, branch, commit)
        here = replace(patches[-1], mail=mail_file)
        message = read_mail(git, mail_file).message
        prerequisites = [_prerequisite(git, one) for one in patches[:-1]]
        items = _items(layout, git, here, before, commit, message)
        items += _hook_items(layout, git, before, commit, hooks)
        items += _place_items(clone, start, prerequisites, pin)
        mail = _mail(git, start.commit, before, commit)
        if start.version == pin.version:
            # Of the sdist's files: the same as upstream's, under another hash.
            said, real = (f"base-commit: {one}" for one in (start.commit, pin.commit))
            mail = mail.replace(said.encode(), real.encode())
        elif clone is None:
            # Its sdist has a part of upstream's hash only.
            mail = mail.replace(f"base-commit: {start.commit}\n".encode(), b"")
        _publish(layout, git, clone, branch, commit, start, fresh)
    body = pull_request(message, patch, prerequisites)
    items += human_items()
    title = message.partition("\n")[0]
    _write(folder, slug, mail, body, text(f"{slug}: {title}", items))
    return Made(
        folder,
        clone.path if clone else _own(layout),
        branch,
        commit,
        start.name,
        folder / f"{slug}.patch",
        tuple(items),
        fresh,
    )


def _find(series: Series, slug: str) -> Patch:
    if slug in series.slugs:
        return series[slug]
    near = difflib.get_close_matches(slug, series.slugs, n=5, cutoff=0.4)
    near += [name for name in series.slugs if slug and slug in name]
    raise WorkshopError(
        f"No patch is named {slug!r}.",
        f"Near it: {', '.join(dict.fromkeys(near))}." if near else "",
        "patches/series lists all.",
    )


def open_clone(layout: Layout, repo: Path) -> Clone:
    """Look at a user's clone.

    Raises:
        WorkshopError: It is none, is ours, or holds work that has not ended.
    """
    git = Git(repo)
    if not repo.is_dir() or not git.ok("rev-parse", "--git-dir"):
        raise WorkshopError(f"--repo {repo}: no git repository.")
    git_dir = Path(git("rev-parse", "--absolute-git-dir")).resolve()
    bare = git("rev-parse", "--is-bare-repository") == "true"
    top = git_dir if bare else Path(git("rev-parse", "--show-toplevel")).resolve()
    if top != repo.resolve():
        raise WorkshopError(
            f"--repo {repo}: no git repository.", f"It is a folder of {top}."
        )
    if top == layout.root or layout.build in top.parents:
        raise WorkshopError(
            f"--repo {repo}: this is the workshop's own.",
            "Branches for upstream go into a clone of upstream.",
            "Leave out --repo to have the branch in build/pr/vllm.git.",
        )
    if what := operation_in(git_dir):
        raise WorkshopError(
            f"--repo {repo}: {what} is in progress.",
            todo="End it (`--continue`) or give it up (`--abort`), then run again.",
        )
    if not bare and (changed := changed_files(repo)):
        more = f"\nand {len(changed) - 10} more" if len(changed) > 10 else ""
        raise WorkshopError(
            f"--repo {repo}: there are changes that are not committed.",
            "\n".join(changed[:10]) + more,
            "Commit or stash them, then run again.",
        )
    objects = repo / git("rev-parse", "--git-path", "objects")
    return Clone(repo, objects.resolve(), git)


def _fetch_base(layout: Layout, pin: Pin) -> None:
    """Have the pinned base's files, which hunks are merged from."""
    has_objects = (layout.tree / ".git" / "objects").is_dir()
    if has_objects and Git(layout.tree).resolve(f"{base_commit(pin)}^{{tree}}"):
        return
    from tools.fetch import fetch

    fetch(layout)


def _own(layout: Layout) -> Path:
    return layout.build / "pr" / "vllm.git"


@contextmanager
def _workplace(layout: Layout, clone: Clone | None) -> Iterator[Git]:
    """A repository of ours that sees the objects of the base and of the clone."""
    top = layout.build / "pr"
    top.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".pr-", dir=top))
    stores = [layout.tree / ".git" / "objects"]
    # All, as branches on them may be in the repository already.
    stores += sorted(layout.port_trees.glob("*/vllm/.git/objects"))
    if clone:
        stores.insert(0, clone.objects)
    try:
        place = folder / "repo" if clone else _own(layout)
        yield borrowing(place, stores, folder / "index")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _base(layout: Layout, pin: Pin, clone: Clone | None, base: str | None) -> Base:
    match = _VERSION.fullmatch(base or pin.version)
    version = match[1] if match else None
    if clone is None:
        if version == pin.version:
            return Base(base_commit(pin), f"v{pin.version}", version)
        return _ported_base(layout, pin, base, version)
    names = [f"refs/tags/v{version}"] if version else [str(base)]
    if version == pin.version:
        names.insert(0, pin.commit)
    for name in names:
        if commit := clone.git.resolve(f"{name}^{{commit}}"):
            return Base(commit, f"v{version}" if version else str(base), version)
    raise WorkshopError(
        f"--repo {clone.path}: it has not {base or f'v{pin.version}'}.",
        f"Looked for {' and '.join(names)}.",
        f"git -C {clone.path} fetch --tags origin",
    )


def _ported_base(
    layout: Layout, pin: Pin, base: str | None, version: str | None
) -> Base:
    """A release that `port` has fetched."""
    ports = load_ports(layout.ports_pin)
    if version not in ports:
        raise WorkshopError(
            f"--base {base}: only releases can be had without a clone: "
            f"{', '.join((pin.version, *ports))}.",
            todo="Give a clone of upstream that has it: --repo PATH.",
        )
    commit = base_commit(ports[version])
    repo = port_tree(layout, version) / ".git"
    if not repo.is_dir() or not Git(repo).resolve(f"{commit}^{{tree}}"):
        raise WorkshopError(
            f"--base {version}: its files are not here.",
            todo=f"Run `make port BASE={version}` first.",
        )
    return Base(commit, f"v{version}", version)


def _mails(layout: Layout, patch: Patch, base: Base) -> list[Path]:
    """The mails that a patch may have on a base, best first.

    `make port` keeps one for a release that the patch's own does not fit. Upstream's
    main is nearest to the newest release.
    """
    if base.version:
        kept = layout.port_overrides(base.version) / f"{patch.slug}.patch"
        return [kept if kept.is_file() else patch.mail]
    ports = layout.patches / "ports"
    return [*sorted(ports.glob(f"*/{patch.slug}.patch"), reverse=True), patch.mail]


def _commit(
    layout: Layout, git: Git, base: Base, patches: Sequence[Patch]
) -> tuple[str, Path]:
    """The commit of the last patch, and its mail as it is there."""
    tip, mail = base.commit, patches[-1].mail
    for patch in patches:
        mails = _mails(layout, patch, base)
        for at, mail in enumerate(mails, 1):
            try:
                tip, mail = _put(layout, git, tip, replace(patch, mail=mail))
                break
            except WorkshopError:
                if at == len(mails):
                    raise
    return tip, mail


def _put(layout: Layout, git: Git, tip: str, patch: Patch) -> tuple[str, Path]:
    """Commit a patch as it is, or merged, or as `make port` keeps it."""
    if patch.mail.parent != layout.patches:
        return _put_kept(layout, git, tip, patch), patch.mail
    try:
        commit = assemble(git, tip, [patch], layout.overlay)[patch.slug]
    except WorkshopError as error:
        patch = replace(patch, mail=_merged(git, tip, patch, error))
        commit = assemble(git, tip, [patch], layout.overlay)[patch.slug]
    return commit, patch.mail


def _put_kept(layout: Layout, git: Git, tip: str, patch: Patch) -> str:
    """Commit what `make port` keeps: hunks on the tree that has the new files already.

    New files that upstream has by now are left to the hunks.
    """
    git("read-tree", tip)
    add_overlay(git, patch, layout.overlay)
    if has_hunks(patch.mail):
        git("apply", "--cached", "--whitespace=nowarn", str(patch.mail))
    return commit_tree(git, git("write-tree"), tip, read_mail(git, patch.mail))


def _merged(git: Git, tip: str, patch: Patch, error: WorkshopError) -> Path:
    """A mail whose hunks were merged into another tree; no line of them is lost.

    Raises:
        WorkshopError: They conflict, or some would be lost.
    """
    refused = WorkshopError(
        error.what,
        error.why,
        "`make port` merges it with your help and keeps the outcome under "
        "patches/ports/.",
    )
    git("read-tree", tip)
    if not git.ok(
        "apply", "--cached", "--3way", "--whitespace=nowarn", str(patch.mail)
    ):
        raise refused
    commit = commit_tree(git, git("write-tree"), tip, read_mail(git, patch.mail))
    data, _ = mail_of(git, commit)
    if _changed_text(data) != _changed_text(patch.mail.read_bytes()):
        raise refused
    mail = Path(git.env["GIT_INDEX_FILE"]).with_name(f"{patch.slug}.patch")
    mail.write_bytes(data)
    return mail


def _changed_text(mail: bytes) -> Counter[tuple[str, str, str]]:
    """Lines that a mail's hunks add and remove, by file."""
    return Counter(
        (file.path, line.line_type, line.value)
        for file in parse(mail)
        for hunk in file
        for line in hunk
        if not line.is_context
    )


def _refuse_binary(git: Git, slug: str, before: str, commit: str) -> None:
    rows = git("diff-tree", "-r", "--numstat", "-z", before, commit).split("\0")
    names = [row.split("\t")[2] for row in rows if row.startswith("-\t-\t")]
    if names:
        raise WorkshopError(
            f"{slug} has binary files, which a reviewer cannot read.",
            "\n".join(names),
            "Take them out, or have them made by a script that can be read.",
        )


def _is_free(clone: Clone | None, branch: str, commit: str) -> bool:
    """Whether a branch has yet to be made.

    Raises:
        WorkshopError: It is there with another content.
    """
    if clone is None:
        return True
    folder = f"refs/heads/{BRANCHES.rstrip('/')}"
    if clone.git.resolve(folder):
        raise WorkshopError(
            f"--repo {clone.path}: a branch {BRANCHES.rstrip('/')} is in the way of "
            f"{branch}.",
            todo=f"Rename it: git -C {clone.path} branch -m {BRANCHES.rstrip('/')} …",
        )
    found = clone.git.resolve(f"refs/heads/{branch}")
    if found is None or found == commit:
        return found is None
    subject = clone.git("show", "-s", "--no-notes", "--format=%h %s", found)
    raise WorkshopError(
        f"--repo {clone.path}: the branch {branch} is there with other content.",
        f"It is at {subject}",
        "Nothing was changed. If it may go: "
        f"git -C {clone.path} branch -m {branch} old-{branch.replace('/', '-')}",
    )


def _prerequisite(git: Git, patch: Patch) -> Prerequisite:
    title = read_mail(git, patch.mail).message.partition("\n")[0]
    return Prerequisite(patch.slug, title, f"{BRANCHES}{patch.slug}")


def _items(
    layout: Layout, git: Git, patch: Patch, before: str, commit: str, message: str
) -> list[Item]:
    """What a program can tell of the patch and of its files."""
    report = Report()
    check_mail(git, layout, patch, report)
    problems = [(one.rule, one.message) for one in report.problems]
    problems += [
        ("init", f"{folder}/ is new and has no __init__.py.")
        for folder in missing_packages(git, before, commit, patch.meta.overlay)
    ]
    items = rule_items(problems)
    body = message.partition("\n")[2]
    said = [sentence_with(body, form) for form in (AI, DUPLICATE)]
    items = [
        replace(item, detail="\n".join(dict.fromkeys(said)))
        if item.name == "ai" and item.verdict == PASS
        else item
        for item in items
    ]
    lines = product_lines_of(layout, patch)
    items = [
        replace(item, what=f"{item.what} ({lines})") if item.name == "size" else item
        for item in items
    ]
    items += _test_items(git, patch, commit, sections(body).get("Test Plan", ""))
    if modes := _modes(git, before, commit):
        items.append(Item("modes", HUMAN, "file modes change on purpose", modes))
    return items


def _hook_items(
    layout: Layout, git: Git, before: str, commit: str, run: bool
) -> list[Item]:
    paths = [path for _, _, _, path in raw_diff(git, commit)]
    if not run:
        return [Item("hooks", HUMAN, "run upstream's hooks (left out with --no-hooks)")]
    with step(f"Running upstream's hooks on {len(paths)} files"):
        return hook_items(run_hooks(layout, git, before, commit, paths))


def _test_items(git: Git, patch: Patch, commit: str, plan: str) -> Iterator[Item]:
    named = [*paths_in(patch.meta.tests)]
    missing = [name for name in named if git.resolve(f"{commit}:{name}") is None]
    yield Item(
        "tests",
        FAIL if missing else PASS,
        "the tests of the patch are in its tree",
        "\n".join(missing),
    )
    unsaid = unsaid_tests(named, plan)
    yield Item(
        "test-plan",
        FAIL if unsaid or "pytest" not in plan else PASS,
        "the Test Plan has the commands that run these tests",
        "\n".join(unsaid),
    )
    if not any(path.startswith("docs/") for _, _, _, path in raw_diff(git, commit)):
        what = "no documentation changes: nothing that a user sees does either"
        yield Item("docs", HUMAN, what)
    if patch.meta.test_depends_on:
        names = ", ".join(patch.meta.test_depends_on)
        yield Item("cpu-tests", HUMAN, f"on a CPU the tests also need: {names}")


def _modes(git: Git, before: str, commit: str) -> str:
    rows = git("diff-tree", "-r", "-z", before, commit).split("\0")[:-1]
    found = []
    for facts, path in zip(rows[::2], rows[1::2], strict=True):
        old, new = facts[1:].split()[:2]
        if old != new and "000000" not in (old, new):
            found.append(f"{path}: {old} -> {new}")
    return "\n".join(found)


def _place_items(
    clone: Clone | None,
    base: Base,
    prerequisites: Sequence[Prerequisite],
    pin: Pin,
) -> Iterator[Item]:
    yield Item("linear", PASS, f"one commit a patch, no merge, on {base.name}")
    if base.version != pin.version:
        what = f"run the Test Plan on {base.name}: the Test Result is of v{pin.version}"
        yield Item("test-result", HUMAN, what)
    newest = None
    for name in _NEWEST if clone else ():
        newest = newest or (clone.git.resolve(name) if clone else None)
    what = "the branch starts at upstream's newest commit"
    if newest is None or newest == base.commit:
        detail = "" if newest else "Run with --repo PATH --base origin/main."
        verdict = HUMAN if newest is None else PASS
        yield Item("newest", verdict, what, detail)
    else:
        detail = f"It starts at {base.name}; run with --base origin/main."
        yield Item("newest", FAIL if base.version is None else HUMAN, what, detail)
    if prerequisites:
        names = "\n".join(f"{one.branch}: {one.title}" for one in prerequisites)
        what = "prerequisites are open or merged; put their numbers into the text"
        yield Item("prerequisites", HUMAN, what, names)


def _mail(git: Git, base: str, before: str, commit: str) -> bytes:
    """The mail of a commit, new files and all; it is applied once to be sure."""
    form = [flag for flag in FORMAT_PATCH if flag != "--no-base"]
    flags = ("--stat=80", "--encode-email-headers", f"--base={base}")
    data = git.raw("format-patch", *form, *flags, commit)
    git("read-tree", before)
    git("apply", "--cached", "--whitespace=nowarn", "-", stdin=data)
    if git("write-tree") != git("rev-parse", f"{commit}^{{tree}}"):
        raise WorkshopError(f"The mail of {commit} does not give its tree.")
    return data


def _publish(
    layout: Layout,
    git: Git,
    clone: Clone | None,
    branch: str,
    commit: str,
    base: Base,
    fresh: bool,
) -> None:
    """Have the branch where the user looks for it."""
    if clone is None:
        git("update-ref", f"refs/tags/{base.name}", base.commit)
        git("update-ref", f"refs/heads/{branch}", commit)
        return
    if not fresh:
        return
    rows = f"{commit}\n^{base.commit}\n"
    pack = git.raw("pack-objects", "--revs", "--stdout", "-q", stdin=rows)
    clone.git("unpack-objects", "-q", stdin=pack)
    reason = ("-m", "made of the AFD/DBO series")
    try:
        clone.git("update-ref", *reason, f"refs/heads/{branch}", commit, "0" * 40)
    except GitError as error:
        raise WorkshopError(
            f"--repo {clone.path}: the branch {branch} was not made.", error.stderr
        ) from None


def _write(folder: Path, slug: str, mail: bytes, body: str, checklist: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{slug}.patch").write_bytes(mail)
    (folder / "PR.md").write_text(body, encoding="utf-8")
    (folder / "CHECKLIST.md").write_text(checklist, encoding="utf-8")


@click.command()
@click.argument("slug")
@click.option(
    "--repo",
    type=click.Path(path_type=Path),
    help="Clone of upstream to make the branch in (default: build/pr/vllm.git).",
)
@click.option(
    "--base",
    metavar="VERSION",
    help="Release that `port` knows, or revision of the clone, to start from "
    "(default: the pinned release).",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the files (default: build/pr/SLUG).",
)
@click.option(
    "--no-hooks",
    is_flag=True,
    help="Do not run upstream's hooks, which take a minute or more.",
)
@click.pass_obj
def command(
    layout: Layout,
    slug: str,
    repo: Path | None,
    base: str | None,
    out: Path | None,
    no_hooks: bool,
) -> None:
    """Make of patch SLUG a branch, a mail, a pull request's text and a checklist.

    The branch holds what the patch depends on, one commit a patch, and the patch.
    Upstream's hooks run on the touched files in a copy. Nothing is pushed, signed or
    ticked; --repo's HEAD, index and files are not touched. Ends with 1 if an item of
    the checklist fails.
    """
    made = make_pr(layout, slug, repo, base, out, not no_hooks)
    for item in made.items:
        print(f"{item.verdict:<10}{item.name:<30}{item.what}")
        if item.verdict != PASS:
            for line in item.detail.splitlines():
                print(f"{'':<12}{line}")
    where = layout.relative(made.folder)
    new = "" if made.fresh else " (as it was)"
    say(f"branch     {made.branch} in {layout.relative(made.repo)}{new}")
    say(f"mail       {layout.relative(made.mail)} (git am --keep-non-patch --keep-cr)")
    say(f"text       {where}/PR.md: title, empty line, body")
    say(f"checklist  {where}/CHECKLIST.md")
    if not made.ok:
        names = ", ".join(item.name for item in failed(made.items))
        say(f"Not ready for upstream: {names}.")
        raise click.exceptions.Exit(1)
