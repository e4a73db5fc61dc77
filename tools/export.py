"""Writes the commits of `build/vllm` back into `patches/` and `overlay/`.

All is exported into a temporary folder first and proven there: applied again, it
must give the same trees and the same mails. Only then are files replaced, and only
those whose bytes differ. `build/vllm` itself is never changed, so that after a kill
the same command mends what was left half done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import click

from tools.errors import WorkshopError
from tools.export_files import (
    File,
    Plan,
    meta_text,
    overlay_files,
    owners,
    place,
    present,
    series_text,
)
from tools.export_match import Facts, match
from tools.git import Git, on_worktree, scratch
from tools.layout import Layout
from tools.lock import hold
from tools.pin import Pin, load_pin, pin_with_tip_tree
from tools.series import (
    Added,
    Meta,
    Patch,
    Series,
    assemble,
    mail_of,
    raw_diff,
    read_mail,
    read_order,
    scan_series,
)
from tools.state import (
    Refs,
    find_edits,
    journal_file,
    operation_in_progress,
    read_refs,
    read_stamp,
)
from tools.ui import say, step
from tools.upstream_rules import TITLE

_TEMPORARY = ".export-"
_SUBMODULE = "160000"
_TEXT = "100644"

# Lines of a message that end it, or change its author, when it is read as a mail.
_BREAKS = (
    re.compile(r"^---(\s|$)"),
    re.compile(r"^(diff -|Index: )"),
    re.compile(r"^>?(From|Date|Subject): ", re.IGNORECASE),
)


@dataclass(frozen=True)
class Exported:
    """Result of `export`: slugs, by what became of them.

    Attributes:
        notes: What the user should know, in sentences.
    """

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class Item:
    """One commit, as a patch.

    Attributes:
        facts: Of the commit; `facts.key` is its hash.
        parents: Hashes.
        tree: Hash.
        submodules: Paths.
        slug: Name of the patch.
        mail: Bytes of `patches/<slug>.patch`.
        added: Files for `overlay/`.
    """

    facts: Facts
    parents: tuple[str, ...]
    tree: str
    submodules: list[str]
    slug: str = ""
    mail: bytes = b""
    added: list[Added] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.added]


def export(
    layout: Layout,
    slugs: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    allow_dirty: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Make `patches/`, `overlay/` and the pin's tip tree say what the commits say.

    Args:
        slugs: Revision in `build/vllm` -> slug, where it cannot be told.
        drop: Slugs of the series that have no commit any more and shall go.
        allow_dirty: Leave uncommitted changes out instead of refusing.
        overwrite: Replace patches that changed on disk since the last apply.

    Raises:
        WorkshopError: The commits cannot be exported, or it is not clear how.
            Nothing is written then.
    """
    with hold(layout, "make export"):
        pin = load_pin(layout.pin)
        refs = _ready(layout)
        with scratch(layout.tree) as git:
            base, head = _ends(layout, git, refs, pin)
            notes = _uncommitted(layout, git, refs, allow_dirty)
            items = _commits(git, base, head)
            old = _old_series(layout)
            chosen = _resolve(layout, slugs or {})
            matching = match(
                [item.facts for item in items],
                [_mail_facts(git, layout, slug) for slug in old.order],
                refs.slugs,
                chosen,
                drop,
            )
            notes += matching.notes
            for item in items:
                item.slug = matching.slugs[item.facts.key]
            with step(f"Exporting {len(items)} commits"):
                for item in items:
                    _render(git, item)
                _refuse_shared(items)
                with _temporary_folder(layout.build) as folder:
                    digest = _prove(git, base, items, Layout(folder), pin)
            plan = _plan(layout, items, old, drop, items[-1].tree)
            if not overwrite:
                _guard(git, pin, layout, refs, old, plan)
        notes += [
            f"{item.slug}: upstream wants a subject such as "
            f"`[Area] Imperative sentence`, not `{item.facts.subject}`."
            for item in items
            if not TITLE.fullmatch(item.facts.subject)
        ]
        changed = set(plan.changes())
        if changed:
            # From here on patches/ may differ from what apply knows; a run that is
            # killed must not take its own half of the work for someone else's.
            _record(layout, digest, writing=True)
            plan.run()
        _record(layout, digest, writing=False)
    return _summary(layout, items, old, drop, changed, notes)


def _ready(layout: Layout) -> Refs:
    """Refs of `build/vllm`, when no operation is half done there."""
    where = layout.relative(layout.tree)
    if not (layout.tree / ".git" / "HEAD").is_file():
        raise WorkshopError(
            f"Nothing to export: {where} is no git repository.",
            todo="`make apply` makes it; then edit and commit there.",
        )
    if journal_file(layout.tree).exists():
        raise WorkshopError(
            f"An apply in {where} was interrupted.", todo="Run `make apply` first."
        )
    if operation := operation_in_progress(layout.tree):
        raise WorkshopError(
            f"{operation[0].upper()}{operation[1:]} is in progress in {where}.",
            "Its commits are not complete yet.",
            f"Finish or abort it (`git -C {where} status` says how), then run again.",
        )
    return read_refs(layout.tree)


def _ends(layout: Layout, git: Git, refs: Refs, pin: Pin) -> tuple[str, str]:
    """Base and HEAD, when HEAD descends from the pinned base."""
    where = layout.relative(layout.tree)
    if refs.base is None or git.resolve(f"{refs.base}^{{tree}}") != pin.tree:
        raise WorkshopError(
            f"{where} is not on the base that vllm.pin describes.",
            f"refs/workshop/base is {refs.base or 'missing'}; its tree must be "
            f"{pin.tree} (base.tree).",
            "`make apply` moves a tree without edits to the pinned base; "
            "`make status` says more.",
        )
    if refs.head is None:
        raise WorkshopError(f"{where} has no commit checked out.", todo="make apply")
    if not git.ok("merge-base", "--is-ancestor", refs.base, refs.head):
        raise WorkshopError(
            f"HEAD of {where} does not descend from the base.",
            f"HEAD is {refs.head}, refs/workshop/base is {refs.base}.",
            f"Rebase your commits: git -C {where} rebase --onto refs/workshop/base "
            "UPSTREAM",
        )
    return refs.base, refs.head


def _uncommitted(layout: Layout, git: Git, refs: Refs, allow: bool) -> list[str]:
    """Refuse uncommitted changes, or note that they are left out."""
    edits = find_edits(on_worktree(git, layout.tree), refs)
    changed = sorted({*edits.modified, *edits.staged})
    names = [*changed, *(f"{name} (new)" for name in edits.new)]
    if not names:
        return []
    listed = "\n".join(f"  {name}" for name in names[:20])
    if len(names) > 20:
        listed += f"\n  and {len(names) - 20} more"
    where = layout.relative(layout.tree)
    if not allow:
        raise WorkshopError(
            f"{where} has changes that are not committed: they would not be exported.",
            listed,
            f"Commit them (`git -C {where} add`, `git -C {where} commit`; --amend or "
            "--fixup for a patch\nthat exists), or leave them out with --allow-dirty.",
        )
    return [f"Not exported, as not committed:\n{listed}"]


def _commits(git: Git, base: str, head: str) -> list[Item]:
    """The commits after the base, first to last."""
    form = "%H%x00%P%x00%T%x00%an%x00%ae%x00%at%x00%s"
    log = ("log", "-z", "--reverse", "--topo-order", f"--format={form}")
    fields = git(*log, f"{base}..{head}").split("\0")
    items = []
    for at in range(0, len(fields) - 1, 7):
        name, parents, tree, author, email, time, subject = fields[at : at + 7]
        rows = raw_diff(git, name)
        paths = frozenset(path for _, _, _, path in rows)
        facts = Facts(name, subject, (author, email, int(time)), paths)
        modules = [path for mode, _, _, path in rows if mode == _SUBMODULE]
        items.append(Item(facts, tuple(parents.split()), tree, modules))
    if not items:
        raise WorkshopError(
            "Nothing to export: HEAD of build/vllm is the base.",
            "The series would become empty.",
            "`make apply` brings the patches in; then edit and commit there.",
        )
    if merges := [item for item in items if len(item.parents) > 1]:
        raise WorkshopError(
            "build/vllm has merge commits, which no mail can hold.",
            "\n".join(f"  {item.facts}" for item in merges),
            "Make the history linear: git -C build/vllm rebase refs/workshop/base",
        )
    if empty := [item for item in items if not item.facts.paths]:
        raise WorkshopError(
            "build/vllm has commits that change no file.",
            "\n".join(f"  {item.facts}" for item in empty),
            "Remove them: git -C build/vllm rebase --interactive refs/workshop/base",
        )
    return items


@dataclass(frozen=True)
class Old:
    """The series on disk, as far as it can be read.

    Attributes:
        order: Slugs of `patches/series`.
        patches: Those with a mail and metadata.
    """

    order: tuple[str, ...]
    patches: dict[str, Patch]
    series: Series


def _old_series(layout: Layout) -> Old:
    problems: list[str] = []
    order = read_order(layout, problems) if layout.series.exists() else []
    series, found = scan_series(layout)
    patches = {patch.slug: patch for patch in series.patches}
    for slug in order:
        meta_file = layout.patches / f"{slug}.toml"
        if slug not in patches and meta_file.is_file():
            where = f"{layout.relative(meta_file)}: "
            problems += [line for line in found if line.startswith(where)]
    if problems:
        raise WorkshopError(
            "The series on disk cannot be read.",
            "\n".join(problems),
            "Mend these files first.",
        )
    return Old(tuple(order), patches, series)


def _mail_facts(git: Git, layout: Layout, slug: str) -> Facts:
    """Facts of a mail on disk; empty ones if there is none that can be read."""
    path = layout.patches / f"{slug}.patch"
    try:
        mail = read_mail(git, path)
        time = int(parsedate_to_datetime(mail.date).timestamp())
    except (WorkshopError, FileNotFoundError, ValueError):
        return Facts(
            slug, f"(no mail at {layout.relative(path)})", ("", slug, 0), frozenset()
        )
    touched = re.findall(rb"^(?:---|\+\+\+) [ab]/([^\t\n]+)", path.read_bytes(), re.M)
    subject = mail.message.split("\n", 1)[0]
    paths = frozenset(name.decode("utf-8", "surrogateescape") for name in touched)
    return Facts(slug, subject, (mail.author, mail.email, time), paths)


def _resolve(layout: Layout, slugs: Mapping[str, str]) -> dict[str, str]:
    """Hash -> slug of what the user said with `--slug`."""
    chosen = {}
    for revision, slug in slugs.items():
        name = Git(layout.tree).resolve(f"{revision}^{{commit}}")
        if name is None:
            raise WorkshopError(
                f"--slug {revision}={slug}: build/vllm has no commit {revision!r}."
            )
        chosen[name] = slug
    return chosen


def _render(git: Git, item: Item) -> None:
    """Make mail and new files of a commit."""
    if item.submodules:
        raise WorkshopError(
            f"{item.facts} adds or moves a submodule, which no mail can hold.",
            "\n".join(item.submodules),
            "Leave it out of the commit.",
        )
    try:
        "".join(item.facts.paths).encode("utf-8")
    except UnicodeEncodeError:
        raise WorkshopError(
            f"{item.facts} has a file whose name is not UTF-8.",
            repr(sorted(item.facts.paths)),
            "Rename it.",
        ) from None
    item.mail, item.added = mail_of(git, item.facts.key)


def _refuse_shared(items: Sequence[Item]) -> None:
    if problems := owners({item.slug: item.added for item in items}):
        raise WorkshopError(
            "Two commits add the same new file, which overlay/ holds once.",
            "\n".join(problems),
            "Let one commit add it and the others edit it.",
        )


def _prove(git: Git, base: str, items: Sequence[Item], folder: Layout, pin: Pin) -> str:
    """Export into a folder and apply from there; returns the series' digest.

    Raises:
        WorkshopError: That does not give the same trees and mails; names the slug.
    """
    patches = []
    tip = base
    folder.overlay.mkdir()
    for item in items:
        plan = Plan(folder, overlay_files(folder, item.added))
        mail = folder.patches / f"{item.slug}.patch"
        plan.files[mail] = (_TEXT, item.mail)
        plan.run()
        patch = Patch(item.slug, mail, mail, Meta("", "", overlay=tuple(item.paths)))
        patches.append(patch)
        try:
            tip = assemble(git, tip, [patch], folder.overlay)[item.slug]
        except WorkshopError as error:
            raise _lossy(git, item, str(error)) from None
        if git("rev-parse", f"{tip}^{{tree}}") != item.tree:
            raise _lossy(git, item, "The tree is another one.")
        again, added = mail_of(git, tip)
        if again != item.mail:
            raise _lossy(git, item, first_difference(item.mail, again))
        if added != item.added:
            raise _lossy(git, item, "Its new files are others.")
    return Series(folder, tuple(patches)).digest(pin.tree)


def _lossy(git: Git, item: Item, found: str) -> WorkshopError:
    """The error for a commit that a mail cannot hold."""
    message = git("show", "-s", "--format=%B", item.facts.key)
    todo = "Nothing was written. Reword the commit, then run again."
    for number, line in enumerate(message.split("\n")[1:], 2):
        if any(form.match(line) for form in _BREAKS):
            found = f"Line {number} of the message would not survive: {line!r}"
            todo += " Indent such a line, or quote it otherwise."
            break
    return WorkshopError(
        f"{item.slug} does not come back from its own mail ({item.facts}).",
        found,
        todo,
    )


def first_difference(old: bytes, new: bytes) -> str:
    """The first line in which two mails differ."""
    rows = (old.split(b"\n"), new.split(b"\n"))
    for number, (one, other) in enumerate(zip(*rows, strict=False), 1):
        if one != other:
            return (
                f"line {number}: {one.decode(errors='replace')!r}\n"
                f"became {other.decode(errors='replace')!r}"
            )
    return f"{len(rows[0])} lines became {len(rows[1])}."


def _plan(
    layout: Layout, items: Sequence[Item], old: Old, drop: Sequence[str], tip_tree: str
) -> Plan:
    plan = Plan(layout)
    wanted = {path for item in items for path in item.paths}
    owned = {name for patch in old.patches.values() for name in patch.meta.overlay}
    plan.stale = [layout.overlay / name for name in sorted(owned - wanted)]
    for item in items:
        plan.files |= overlay_files(layout, item.added)
    for item in items:
        plan.files[layout.patches / f"{item.slug}.patch"] = (_TEXT, item.mail)
        meta_file = layout.patches / f"{item.slug}.toml"
        plan.files[meta_file] = _edited(
            meta_file, lambda text, item=item: meta_text(text, item.paths)
        )
    for slug in drop:
        plan.stale += [layout.patches / f"{slug}{end}" for end in (".patch", ".toml")]
    slugs = [item.slug for item in items]
    plan.files[layout.series] = _edited(
        layout.series, lambda text: series_text(text or "", slugs)
    )
    plan.files[layout.pin] = _edited(
        layout.pin, lambda text: pin_with_tip_tree(text or "", tip_tree)
    )
    return plan


def _edited(path: Path, edit: Callable[[str | None], str]) -> File:
    """A text file with an edit made, or a new one."""
    file = present(path)
    if file is None:
        return _TEXT, edit(None).encode()
    return file[0], edit(file[1].decode("utf-8")).encode()


def _guard(
    git: Git, pin: Pin, layout: Layout, refs: Refs, old: Old, plan: Plan
) -> None:
    """Refuse to undo what came into `patches/` and `overlay/` since the last apply."""
    stamp = read_stamp(layout.tree)
    if stamp is None:
        return
    known = {stamp["series_digest"]}
    record = _read_record(layout)
    if record.get("stamp") == stamp["series_digest"]:
        if record["writing"]:
            say("An export was interrupted; this one writes the rest.")
            return
        known.add(record["digest"])
    try:
        if old.series.digest(pin.tree) in known:
            return
    except FileNotFoundError:
        pass
    applied: dict[Path, File] = {}
    for slug, commit in refs.slugs.items():
        mail, added = mail_of(git, commit)
        applied[layout.patches / f"{slug}.patch"] = (_TEXT, mail)
        applied |= overlay_files(layout, added)
    lost = [
        path
        for path in plan.changes()
        if (path.suffix == ".patch" or layout.overlay in path.parents)
        and present(path) != applied.get(path)
    ]
    if lost:
        raise WorkshopError(
            "An export would undo changes made on disk since the last apply.",
            "\n".join(f"  {layout.relative(path)}" for path in lost),
            "To have both: `make apply FORCE=1` (your commits stay under "
            "refs/backup/), cherry-pick them\nonto the new tip, export. To have what "
            "build/vllm holds: --overwrite.",
        )


def _record_file(layout: Layout) -> Path:
    return layout.tree / ".git" / "workshop-export.json"


def _record(layout: Layout, digest: str, writing: bool) -> None:
    """Remember what an export makes of the series that the tree came from."""
    stamp = read_stamp(layout.tree)
    if stamp is not None:
        data = {
            "stamp": stamp["series_digest"],
            "digest": digest,
            "writing": writing,
        }
        place(_record_file(layout), (_TEXT, json.dumps(data).encode()))


def _read_record(layout: Layout) -> dict[str, Any]:
    try:
        data = json.loads(_record_file(layout).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    fields = {"stamp", "digest", "writing"}
    return data if isinstance(data, dict) and data.keys() == fields else {}


def _summary(
    layout: Layout,
    items: Sequence[Item],
    old: Old,
    drop: Sequence[str],
    changed: set[Path],
    notes: Sequence[str],
) -> Exported:
    kinds: dict[str, list[str]] = {"written": [], "unchanged": [], "added": []}
    for item in items:
        own = {layout.patches / f"{item.slug}{end}" for end in (".patch", ".toml")}
        own |= {layout.overlay / path for path in item.paths}
        if item.slug not in old.order:
            kinds["added"].append(item.slug)
        else:
            kinds["written" if own & changed else "unchanged"].append(item.slug)
    return Exported(
        tuple(kinds["written"]),
        tuple(kinds["unchanged"]),
        tuple(kinds["added"]),
        tuple(drop),
        tuple(notes),
    )


@contextmanager
def _temporary_folder(build: Path) -> Iterator[Path]:
    """A folder under `build/`; those of killed runs are removed first."""
    for left in build.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=build))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pairs(
    ctx: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for value in values:
        commit, equals, slug = value.partition("=")
        if not (commit and equals and slug):
            raise click.BadParameter(f"{value!r} is not COMMIT=SLUG.")
        pairs[commit] = slug
    return pairs


@click.command()
@click.option(
    "--slug",
    "slugs",
    multiple=True,
    metavar="COMMIT=SLUG",
    callback=_pairs,
    help="Which patch a commit is, where it cannot be told, or a new patch's name.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="SLUG",
    help="Remove a patch that has no commit any more.",
)
@click.option(
    "--allow-dirty",
    is_flag=True,
    help="Leave uncommitted changes out instead of refusing.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace patches that changed on disk since the last apply.",
)
@click.pass_obj
def command(
    layout: Layout,
    slugs: dict[str, str],
    drop: tuple[str, ...],
    allow_dirty: bool,
    overwrite: bool,
) -> None:
    """Write the commits of build/vllm back into patches/ and overlay/.

    One commit is one patch. New files go to overlay/, all else into the mail.
    """
    done = export(layout, slugs, drop, allow_dirty, overwrite)
    for note in done.notes:
        say(f"note: {note}")
    for kind in ("written", "added", "dropped", "unchanged"):
        if names := getattr(done, kind):
            print(f"{kind + ':':<11}{', '.join(names)}")
    if done.added:
        say(
            "Fill in "
            + ", ".join(f"patches/{slug}.toml" for slug in done.added)
            + "; until then `make check` and `make apply` refuse the series."
        )
    if done.written or done.added or done.dropped:
        say("Next: `make check`.")
