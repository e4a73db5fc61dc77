"""Puts the series on another release of vLLM.

Each run starts from the new base; what a human resolved is kept as an override, a
mail in `patches/ports/<version>/`, and taken the next time. So a run that was killed
needs no mending, and `--continue` is: keep what is in the tree, then run again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import click

from tools.errors import WorkshopError
from tools.fetch import fetch, read_sdist, write_base
from tools.git import Git, on_worktree, scratch
from tools.hunks import hunks_between
from tools.layout import Layout
from tools.lock import hold
from tools.pin import Pin, load_pin, load_ports
from tools.port_merge import (
    Attempt,
    Ground,
    check_patch,
    lost_between,
    override_mail,
    port_from,
    port_patch,
)
from tools.port_status import Status, load_statuses, save_statuses, status_file
from tools.series import (
    Mail,
    Patch,
    Series,
    assemble,
    commit_tree,
    load_series,
    read_mail,
)
from tools.state import BACKUP_REFS, BASE_REF, SLUG_REFS, TIP_REF, base_commit
from tools.ui import patches, say, step
from tools.versions import file_version

OnStep = Callable[[str], None]
_OLD_REF = "refs/workshop/old"
_SHOWN = 12


@dataclass
class PortState:
    """What `build/port/<version>` holds, in its `state.json`.

    Attributes:
        state: `running`, `stopped` (a human is to resolve `slug`) or `done`.
        pid: Process of the run.
        head: Commit that the tree was put at.
        tree: Tree that its files were given.
        slug: Patch that needs a human.
        conflicts: Paths in conflict -> blob with the markers.
        digest: Digest of the series.
        commits: Commit of each ported patch.
    """

    state: str
    pid: int
    head: str = ""
    tree: str = ""
    slug: str = ""
    conflicts: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    commits: dict[str, str] = field(default_factory=dict)


def port_tree(layout: Layout, version: str) -> Path:
    """The tree of the ported series, a git repository of its own."""
    return layout.port(version) / "vllm"


def load_state(layout: Layout, version: str) -> PortState | None:
    """What was done in `build/port/<version>`; None if nothing was begun."""
    try:
        text = (layout.port(version) / "state.json").read_text(encoding="utf-8")
        return PortState(**json.loads(text))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def find_port(layout: Layout, version: str) -> Pin:
    """The pin of another release.

    Raises:
        WorkshopError: `ports.pin` has no such release.
    """
    ports = load_ports(layout.ports_pin)
    if version not in ports:
        raise WorkshopError(
            f"ports.pin has no release {version!r}.",
            f"It has: {', '.join(ports)}.",
            "make port BASE=<one of these>",
        )
    return ports[version]


def port(
    layout: Layout,
    version: str,
    edit: str | None = None,
    on_step: OnStep = lambda name: None,
    like: str | None = None,
) -> dict[str, Status]:
    """Put the series on a release, from its base to its tip.

    Args:
        edit: Stop after this patch, so that it can be changed for this release.
        like: Release whose finished port is offered where a patch has conflicts.
        on_step: Called after each step that changes something, for tests.

    Returns:
        Result of each patch, also in `status.toml`.

    Raises:
        WorkshopError: A patch needs a human, or one is at work in the tree already.
    """
    with hold(layout, "make port"):
        run = _Run.begin(layout, version, on_step)
        state = load_state(layout, version)
        if state and state.state == "stopped":
            raise _stopped(run, state)
        if state and state.state == "running":
            say(f"A port to {version} was interrupted (process {state.pid}): again.")
        elif state:
            run.refuse_edits(state)
        run.use(like)
        return run.all(edit)


def survey(layout: Layout, version: str) -> dict[str, Status]:
    """What each patch would do on a release; nothing is written or asked.

    A patch in conflict is left in with its markers, so what comes after it and
    touches the same lines may be in conflict for that reason only.
    """
    with hold(layout, "make port"):
        run = _Run.begin(layout, version, lambda name: None)
        found = {}
        with scratch(run.tree) as git:
            old = run.old_commits(git)
            ground = run.ground(git)
            tip = run.base
            for patch in run.series.patches:
                attempt = run.one(ground, patch, old[patch.slug], tip)
                found[patch.slug] = run.status(git, patch, old[patch.slug], attempt)
                tip = commit_tree(git, attempt.tree, tip, run.mail(git, patch))
        return found


def resume(
    layout: Layout,
    version: str,
    accept_lost: bool = False,
    on_step: OnStep = lambda name: None,
    like: str | None = None,
) -> dict[str, Status]:
    """Keep what a human made of the patch where `port` stopped, then go on.

    Args:
        accept_lost: Lines and modes that the original changes may stay as they are.

    Raises:
        WorkshopError: Nothing was stopped, or something is not resolved yet.
    """
    with hold(layout, "make port"):
        run = _Run.begin(layout, version, on_step)
        state = load_state(layout, version)
        if state is None or state.state != "stopped":
            raise WorkshopError(
                f"No port to {version} waits for you.", todo=f"make port BASE={version}"
            )
        run.use(like)
        run.keep(state, accept_lost)
        return run.all(None)


def abort(layout: Layout, version: str) -> None:
    """Give up a port that stopped; overrides that were written stay.

    What a human changed in the tree is kept under `refs/backup/` there.
    """
    with hold(layout, "make port"):
        run = _Run.begin(layout, version, lambda name: None)
        state = load_state(layout, version)
        if state is None:
            raise WorkshopError(f"No port to {version} was begun.")
        if state.state != "running" and (ref := run.back_up(state)):
            say(f"What you had changed is kept as {ref} in {run.where}.")
        run.write_tree(run.base, f"{run.base}^{{tree}}", ())
        run.state_file.unlink()
        say(f"{run.where} is at vLLM {version}, without any patch.")


def _stopped(run: _Run, state: PortState) -> WorkshopError:
    return WorkshopError(
        f"A port to {run.pin.version} waits for you, at {state.slug}.",
        f"{run.where} holds it, half done.",
        run.next_steps(),
    )


@dataclass
class _Run:
    """One run of `port` for one release."""

    layout: Layout
    pin: Pin
    series: Series
    tree: Path
    old_base: str
    base: str
    on_step: OnStep
    statuses: dict[str, Status]
    others: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, layout: Layout, version: str, on_step: OnStep) -> _Run:
        """Make the repository with both bases, where there is none."""
        pin = find_port(layout, version)
        series = load_series(layout)
        for patch in series.patches:
            check_patch(patch, layout.overlay)
        _check_overrides(layout, version, series)
        tree = port_tree(layout, version)
        return cls(
            layout,
            pin,
            series,
            tree,
            base_commit(load_pin(layout.pin)),
            _prepare(layout, pin, tree),
            on_step,
            load_statuses(layout, version),
        )

    @property
    def where(self) -> str:
        return self.layout.relative(self.tree)

    @property
    def state_file(self) -> Path:
        return self.layout.port(self.pin.version) / "state.json"

    def next_steps(self) -> str:
        verb = f"make port BASE={self.pin.version} ARGS="
        return f"Resolve it there, then: {verb}--continue\nOr give it up: {verb}--abort"

    def override(self, slug: str) -> Path:
        return self.layout.port_overrides(self.pin.version) / f"{slug}.patch"

    def save(self, state: PortState) -> None:
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.state_file.with_name(f"{self.state_file.name}.part")
        temporary.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        temporary.replace(self.state_file)
        self.on_step(state.state)

    def old_commits(self, git: Git) -> dict[str, str]:
        return assemble(git, self.old_base, self.series.patches, self.layout.overlay)

    def all(self, edit: str | None) -> dict[str, Status]:
        """Port patch by patch; stop where a human is needed."""
        if edit is not None:
            self.series[edit]
        digest = self.series.digest(self.pin.tree)
        self.save(PortState("running", os.getpid(), digest=digest))
        done: dict[str, Status] = {}
        commits: dict[str, str] = {}
        with scratch(self.tree) as git:
            with step(f"Putting {patches(len(self.series.patches))} on {self.title}"):
                old = self.old_commits(git)
                ground = self.ground(git)
                tip = self.base
                for patch in self.series.patches:
                    attempt = self.one(ground, patch, old[patch.slug], tip)
                    if patch.slug == edit and not attempt.problem:
                        attempt = _for_edit(attempt)
                    done[patch.slug] = self.status(git, patch, old[patch.slug], attempt)
                    if attempt.problem:
                        self.stop(patch, attempt, tip, done, commits, digest)
                    if attempt.result != "upstream":
                        mail = self.mail(git, patch)
                        tip = commit_tree(git, attempt.tree, tip, mail)
                        commits[patch.slug] = tip
                    self.on_step(patch.slug)
            self.write_tree(tip, f"{tip}^{{tree}}", ())
            self.set_refs(tip, commits)
            last = old[self.series.slugs[-1]] if old else self.old_base
            report = self.layout.port(self.pin.version) / "range-diff.txt"
            report.write_bytes(_range_diff(git, self.old_base, last, self.base, tip))
        save_statuses(self.layout, self.pin.version, done)
        self.save(
            PortState("done", os.getpid(), tip, "", "", {}, digest, commits),
        )
        return done

    @property
    def title(self) -> str:
        return f"vLLM {self.pin.version}"

    def ground(self, git: Git) -> Ground:
        return Ground(
            git, self.old_base, self.base, self.pin.version, self.layout.overlay
        )

    def mail(self, git: Git, patch: Patch) -> Mail:
        """Author and message: the patch's own, as an override's may be older."""
        return read_mail(git, patch.mail)

    def use(self, like: str | None) -> None:
        """Get the commits of another port."""
        if like is None:
            return
        pin = find_port(self.layout, like)
        state = load_state(self.layout, like)
        digest = self.series.digest(pin.tree)
        if state is None or state.state != "done" or state.digest != digest:
            raise WorkshopError(
                f"The port to {like} is not finished, or not of the present series.",
                todo=f"make port BASE={like}",
            )
        Git(self.tree)(
            "fetch",
            "--quiet",
            "--no-tags",
            "--no-auto-maintenance",
            "--no-write-fetch-head",
            str(port_tree(self.layout, like)),
            f"+{TIP_REF}:refs/workshop/other/{like}",
        )
        self.others = state.commits

    def one(self, ground: Ground, patch: Patch, old: str, tip: str) -> Attempt:
        override = self.override(patch.slug)
        if not override.is_file():
            attempt = port_patch(ground, patch, old, tip)
            if attempt.stages and (other := self.others.get(patch.slug)):
                return port_from(ground, patch, other, tip, attempt)
            return attempt
        attempt = port_patch(ground, patch, old, tip, override)
        if attempt.problem:
            return attempt
        before = self.statuses.get(patch.slug)
        plain = port_patch(ground, patch, old, tip)
        is_same = not plain.problem and plain.tree == attempt.tree
        if is_same and attempt.result != "upstream":
            say(f"    {patch.slug}: the override is not needed any more; remove it.")
            return Attempt(
                "override", attempt.tree, detail="Not needed: the patch ports as it is."
            )
        accepted = Counter(before.lost if before else ())
        lost = sorted((Counter(attempt.lost) - accepted).elements())
        made_for = before.made_for if before else ""
        if lost or made_for not in ("", _content(ground.git, old)):
            return Attempt(
                "conflict",
                attempt.tree,
                "The override was made for another version of the patch."
                if not lost
                else f"The override lacks {len(lost)} line(s) or mode(s) of the patch.",
                f"Compare {self.layout.relative(override)} with the patch, mend what "
                "the tree lacks.",
                lost=tuple(lost),
            )
        return attempt

    def status(self, git: Git, patch: Patch, old: str, attempt: Attempt) -> Status:
        digest = self.series.patch_digest(patch.slug)
        if attempt.problem:
            kept = self.statuses.get(patch.slug)
            return Status(
                attempt.result,
                digest,
                kept.made_for if kept else "",
                attempt.problem,
                kept.lost if kept else (),
            )
        made_for = _content(git, old) if attempt.result == "override" else ""
        return Status(attempt.result, digest, made_for, attempt.detail, attempt.lost)

    def stop(
        self,
        patch: Patch,
        attempt: Attempt,
        tip: str,
        done: dict[str, Status],
        commits: dict[str, str],
        digest: str,
    ) -> None:
        """Leave the patch to a human, in the tree."""
        blobs = self.write_tree(tip, attempt.tree, attempt.stages)
        # What comes after is not known now; overrides must be remembered, though.
        later = self.series.slugs[len(done) :]
        kept = {
            slug: self.statuses[slug]
            for slug in later
            if slug in self.statuses and self.override(slug).is_file()
        }
        save_statuses(self.layout, self.pin.version, {**done, **kept})
        slug = patch.slug
        self.save(
            PortState(
                "stopped", os.getpid(), tip, attempt.tree, slug, blobs, digest, commits
            )
        )
        why = attempt.problem
        if attempt.lost:
            why += "\n" + "\n".join(f"lost: {line}" for line in attempt.lost[:_SHOWN])
        raise WorkshopError(
            f"{slug} needs you on {self.title} ({attempt.result}); {len(done) - 1} of "
            f"{len(self.series.slugs)} patches are done.",
            f"{why}\n{self.where} holds it, half done.",
            f"{attempt.todo}\n{self.next_steps()}",
        )

    def keep(self, state: PortState, accept_lost: bool) -> None:
        """Write the override of what a human made of the patch."""
        patch = self.series[state.slug]
        self.check_resolved(state)
        with scratch(self.tree) as git:
            work = on_worktree(git, self.tree)
            work("add", "--all", "--", ".")
            tree = work("write-tree")
            old = self.old_commits(git)[state.slug]
            ground = self.ground(git)
            lost = lost_between(ground, old, state.head, tree)
            nothing = tree == git("rev-parse", f"{state.head}^{{tree}}")
            if lost and not accept_lost:
                raise WorkshopError(
                    f"{state.slug} would lose {len(lost)} line(s) or mode(s) that it "
                    "changes.",
                    "\n".join(lost[:_SHOWN]),
                    f"Change them in {self.where}, or say that it is meant: make "
                    f"port BASE={self.pin.version} ARGS='--continue --accept-lost'",
                )
            mail = self.mail(git, patch)
            data = override_mail(
                ground,
                patch,
                state.head,
                tree,
                lambda made, parent: commit_tree(git, made, parent, mail),
            )
            plain = port_patch(ground, patch, old, state.head)
            content = _content(git, old)
        override = self.override(state.slug)
        if not plain.problem and plain.tree == tree:
            override.unlink(missing_ok=True)
            say(f"{state.slug} needs no override.")
        else:
            override.parent.mkdir(parents=True, exist_ok=True)
            temporary = override.with_name(f".{override.name}.part")
            temporary.write_bytes(data)
            temporary.replace(override)
            say(f"Kept as {self.layout.relative(override)}.")
            status = Status(
                "upstream" if nothing else "override",
                self.series.patch_digest(state.slug),
                content,
                lost=tuple(lost),
            )
            self.statuses[state.slug] = status
            save_statuses(self.layout, self.pin.version, self.statuses)
        self.on_step("kept")

    def check_resolved(self, state: PortState) -> None:
        left = []
        head = Git(self.tree).resolve("HEAD")
        if head != state.head:
            raise WorkshopError(
                f"HEAD of {self.where} was moved.",
                f"It is {head}; the port stopped at {state.head}.",
                "Leave the changes uncommitted there: git reset --soft "
                f"{state.head[:12]}",
            )
        unmerged = Git(self.tree)("ls-files", "-z", "--unmerged")
        open_paths = {row.split("\t", 1)[1] for row in unmerged.split("\0") if row}
        for path, blob in state.conflicts.items():
            file = self.tree / path
            now = file_version(file)
            if path in open_paths and (now[1] if now else "") == blob:
                left.append(f"{path}: as the merge left it")
            elif now and now[0] != "folder" and _has_markers(file):
                left.append(f"{path}: has conflict markers")
        if left:
            raise WorkshopError(
                f"{state.slug} is not resolved yet.",
                "\n".join(left),
                f"Edit the files in {self.where}; `git add` or `git rm` one that shall "
                "stay as it is, or go.",
            )

    def edits(self, state: PortState) -> list[str]:
        """Files that differ from what the port left, if it is known."""
        if not state.head or not (self.tree / ".git" / "index").exists():
            return []
        with scratch(self.tree) as git:
            work = on_worktree(git, self.tree)
            work.attempt("update-index", "-q", "--refresh")
            wanted = state.tree or f"{state.head}^{{tree}}"
            out = work("diff-index", "--name-only", "-z", wanted)
        names = [
            name
            for name in out.split("\0")
            if name
            and (file_version(self.tree / name) or ("", ""))[1]
            != state.conflicts.get(name)
        ]
        if state.state == "stopped":
            return names
        head = Git(self.tree).resolve("HEAD")
        return names + ([f"commit {head}"] if head != state.head else [])

    def refuse_edits(self, state: PortState) -> None:
        if edits := self.edits(state):
            raise WorkshopError(
                f"{self.where} has edits of yours; the port would drop them.",
                "\n".join(edits[:_SHOWN]),
                f"To change a patch for {self.title}: make port "
                f"BASE={self.pin.version} ARGS='--edit SLUG', edit, --continue.\n"
                "To drop them (a ref there keeps them): ARGS=--abort",
            )

    def back_up(self, state: PortState) -> str | None:
        """Keep a human's changes under a ref; None if there are none."""
        if not self.edits(state):
            return None
        with scratch(self.tree) as git:
            work = on_worktree(git, self.tree)
            work("add", "--all", "--", ".")
            head = Git(self.tree).resolve("HEAD") or state.head
            now = datetime.now(UTC).isoformat(timespec="seconds")
            who = Mail("vLLM workshop", "workshop@localhost", now, "Put aside\n")
            commit = commit_tree(git, work("write-tree"), head, who)
        ref = BACKUP_REFS + datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        Git(self.tree)("update-ref", ref, commit)
        return ref

    def write_tree(
        self, head: str, tree: str, stages: tuple[str, ...]
    ) -> dict[str, str]:
        """Put files, index and HEAD there; returns the blobs of paths in conflict."""
        blobs: dict[str, str] = {}
        (self.tree / ".git" / "index.lock").unlink(missing_ok=True)
        with scratch(self.tree) as git:
            work = on_worktree(git, self.tree)
            work("read-tree", "--reset", "-u", tree)
            if stages:
                paths = sorted({row.split("\t", 1)[1] for row in stages})
                for path in paths:
                    blobs[path] = (file_version(self.tree / path) or ("", ""))[1]
                rows = [f"0 {'0' * 40}\t{path}" for path in paths] + list(stages)
                work(
                    "update-index",
                    "-z",
                    "--index-info",
                    stdin="".join(f"{row}\0" for row in rows),
                )
            work.attempt("update-index", "-q", "--refresh")
        Git(self.tree)("update-ref", "--no-deref", "HEAD", head)
        self.on_step("tree")
        return blobs

    def set_refs(self, tip: str, commits: dict[str, str]) -> None:
        git = Git(self.tree)
        old = git("for-each-ref", "--format=%(refname)", SLUG_REFS).split()
        rows = [f"delete {ref}" for ref in old]
        rows += [f"update {SLUG_REFS}{slug} {name}" for slug, name in commits.items()]
        known = {f"{SLUG_REFS}{slug}" for slug in commits}
        rows = [row for row in rows if row.removeprefix("delete ") not in known]
        rows.append(f"update {TIP_REF} {tip}")
        git("update-ref", "--stdin", stdin="\n".join(rows) + "\n")


def _for_edit(attempt: Attempt) -> Attempt:
    return Attempt(
        attempt.result,
        attempt.tree,
        "You asked to change it here.",
        "Edit the files.",
        lost=attempt.lost,
    )


def _has_markers(file: Path) -> bool:
    return any(
        line.startswith((b"<<<<<<< ", b">>>>>>> "))
        for line in file.read_bytes().splitlines()
    )


def _content(git: Git, commit: str) -> str:
    """Hash of the lines that a commit adds and removes; context does not count."""
    digest = hashlib.sha256()
    for path, hunks in sorted(hunks_between(git, f"{commit}^", commit).items()):
        digest.update(f"\0{path}\0".encode("utf-8", "surrogateescape"))
        for hunk in hunks:
            digest.update(b"".join(b"-" + line for line in hunk.removed))
            digest.update(b"".join(b"+" + line for line in hunk.added))
    return digest.hexdigest()


def _range_diff(git: Git, old: str, old_tip: str, new: str, new_tip: str) -> bytes:
    return git.raw(
        "range-diff",
        "--no-color",
        "--creation-factor=90",
        f"{old}..{old_tip}",
        f"{new}..{new_tip}",
    )


def _check_overrides(layout: Layout, version: str, series: Series) -> None:
    folder = layout.port_overrides(version)
    known = {f"{slug}.patch" for slug in series.slugs}
    known |= {"status.toml", layout.port_mend(version).name}
    found = folder.iterdir() if folder.is_dir() else ()
    unknown = [path.name for path in found if path.name not in known]
    unknown = [name for name in unknown if not name.endswith(".part")]
    if unknown:
        raise WorkshopError(
            f"{layout.relative(folder)} has overrides of patches that do not exist.",
            "\n".join(sorted(unknown)),
            "Remove them, or name them as the slug is named now.",
        )


def _prepare(layout: Layout, pin: Pin, tree: Path) -> str:
    """See that the repository has both bases; returns the new one's commit."""
    from tools.download import download

    old = base_commit(load_pin(layout.pin))
    if not layout.tree.exists() or Git(layout.tree).resolve(old) is None:
        fetch(layout)
    git = Git(tree)
    if not (tree / ".git" / "HEAD").is_file():
        tree.mkdir(parents=True, exist_ok=True)
        git("init", "--quiet", "--template=", "--initial-branch=series", ".")
    if git.resolve(f"{old}^{{tree}}") is None:
        git(
            "fetch",
            "--quiet",
            "--no-tags",
            "--no-auto-maintenance",
            "--no-write-fetch-head",
            str(layout.tree),
            f"+{BASE_REF}:{_OLD_REF}",
        )
    wanted = base_commit(pin)
    if git.resolve(f"{wanted}^{{tree}}") != pin.tree:
        with step(f"Reading {pin.sdist.filename}"):
            archive = download(layout, pin.sdist)
            write_base(git, pin, read_sdist(archive, pin))
        found = git("rev-parse", f"{BASE_REF}^{{tree}}")
        if found != pin.tree:
            raise WorkshopError(
                f"{pin.sdist.filename} does not give the pinned tree.",
                f"It gives      {found}\n{pin.file} has {pin.tree}",
                f"Mend port.{pin.version} in {pin.file}.",
            )
    git("update-ref", BASE_REF, wanted)
    return wanted


def table(statuses: dict[str, Status]) -> str:
    width = max(map(len, statuses), default=0)
    lines = []
    for slug, status in statuses.items():
        note = f"  {status.detail.splitlines()[0]}" if status.detail else ""
        lines.append(f"{slug:<{width}}  {status.result}{note}")
        if status.lost:
            lines.append(f"{'':<{width}}  {len(status.lost)} lost, accepted")
    return "\n".join(lines)


@click.command()
@click.argument("version")
@click.option("--continue", "go_on", is_flag=True, help="Keep what you resolved.")
@click.option("--abort", "give_up", is_flag=True, help="Give up what stopped.")
@click.option("--survey", "look", is_flag=True, help="Only tell; write nothing.")
@click.option(
    "--like",
    metavar="VERSION",
    help="Where a patch has conflicts, offer what its finished port to VERSION is.",
)
@click.option("--edit", metavar="SLUG", help="Stop after this patch, to change it.")
@click.option(
    "--accept-lost",
    is_flag=True,
    help="With --continue: some of the patch's changes may be missing.",
)
@click.pass_obj
def command(
    layout: Layout,
    version: str,
    go_on: bool,
    give_up: bool,
    look: bool,
    like: str | None,
    edit: str | None,
    accept_lost: bool,
) -> None:
    """Put the series on another release that ports.pin names.

    Patch by patch: as it is, by a merge, or from an override in
    patches/ports/VERSION. Where a human is needed it stops, with the conflict in
    build/port/VERSION/vllm. Results go to patches/ports/VERSION/status.toml.
    """
    if sum((go_on, give_up, look, edit is not None)) > 1:
        raise click.UsageError(
            "--continue, --abort, --survey and --edit exclude each other."
        )
    if accept_lost and not go_on:
        raise click.UsageError("--accept-lost goes with --continue.")
    if give_up:
        abort(layout, version)
        return
    if look:
        print(table(survey(layout, version)))
        return
    if go_on:
        statuses = resume(layout, version, accept_lost, like=like)
    else:
        statuses = port(layout, version, edit, like=like)
    print(table(statuses))
    say(
        f"All {patches(len(statuses))} on vLLM {version}, in "
        f"{layout.relative(port_tree(layout, version))}. Compare: "
        f"{layout.relative(layout.port(version) / 'range-diff.txt')}; results: "
        f"{layout.relative(status_file(layout, version))}."
    )
