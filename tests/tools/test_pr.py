"""`pr` on real clones: what it makes, what it refuses, what it leaves alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.errors import WorkshopError
from tools.export import export
from tools.git import Git
from tools.layout import Layout
from tools.pr import make_pr
from tools.pr_checklist import FAIL, HUMAN, HUMANS
from tools.pr_text import sentence_with, unwrap
from tools.upstream_rules import DUPLICATE, sections

UserGit = Callable[..., str]

HOSTILE = """\
[commit]
\tgpgsign = true
[core]
\tautocrlf = true
\thooksPath = /nonexistent/hooks
[diff]
\tnoprefix = true
\tcontext = 0
\tmnemonicPrefix = true
\trenames = copies
[format]
\tsubjectPrefix = HOSTILE
\tsignOff = true
\tattach = true
\tcoverLetter = true
\toutputDirectory = elsewhere
[i18n]
\tcommitEncoding = ISO-8859-1
[user]
\tname = Mallory
\temail = mallory@example.invalid
"""


@pytest.fixture
def clone(applied: Layout, tmp_path: Path, user_git: UserGit) -> Path:
    """A clone of upstream as a user has it: tag, branch, remote, some history."""
    repo = tmp_path / "upstream"
    base = Git(applied.tree)("rev-parse", "refs/workshop/base")
    repo.mkdir()
    user_git(repo, "init", "-q", "-b", "main", "--template=", ".")
    user_git(repo, "fetch", "-q", str(applied.tree), f"{base}:refs/tags/v0.30.0")
    user_git(repo, "reset", "-q", "--hard", "v0.30.0")
    (repo / "docs/index.md").write_text("# Docs, later\n")
    user_git(repo, "commit", "-qam", "later")
    user_git(repo, "update-ref", "refs/remotes/origin/main", "main")
    return repo


def snapshot(repo: Path) -> tuple[bytes, bytes, list[tuple[str, bytes, int]], str]:
    """HEAD, index, files and refs of a clone."""
    files = [
        (str(path), path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(repo.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(repo).parts
    ]
    git = repo / ".git"
    refs = Git(repo)("for-each-ref", "--format=%(refname) %(objectname)")
    return (git / "HEAD").read_bytes(), (git / "index").read_bytes(), files, refs


def subjects(repo: Path, span: str) -> list[str]:
    return Git(repo)("log", "--reverse", "--format=%s", span).split("\n")


def verdicts(made: object) -> dict[str, str]:
    return {item.name: item.verdict for item in made.items}  # type: ignore[attr-defined]


def amend(
    layout: Layout, user_git: UserGit, files: dict[str, bytes], message: str = ""
) -> str:
    """Add a commit to the series with these files; returns its slug."""
    for name, data in files.items():
        path = layout.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    user_git(layout.tree, "add", "--force", "--", *files)
    title = message or "[Core] Add one more\n\nBody.\n"
    user_git(layout.tree, "commit", "-q", "-m", title)
    export(layout, {"HEAD": "one-more"})
    path = layout.patches / "one-more.toml"
    text = path.read_text().replace('why = ""', 'why = "x"')
    text = text.replace('removal = ""', 'removal = "x"')
    path.write_text(text.replace("tests = []", 'tests = ["tests/test_x.py"]'))
    return "one-more"


def test_branch_holds_the_dependencies_and_the_patch_with_its_new_files(
    applied: Layout, clone: Path
) -> None:
    made = make_pr(applied, "gadget-docs", clone)
    branch = "refs/heads/afd-dbo/gadget-docs"
    assert made.branch == "afd-dbo/gadget-docs"
    assert made.fresh
    assert subjects(clone, f"v0.30.0..{branch}") == [
        "[Core] Add the gadget",
        "[Doc] Describe the gadget",
    ]
    assert Git(clone)("show", f"{branch}:docs/gadget.md") == "# Gadget\n\nIt is 1."
    assert Git(clone)("show", f"{branch}:vllm/gadget/__init__.py") == "GADGET = 1"
    assert Git(clone)("rev-parse", branch) == made.commit
    assert Git(clone).ok("fsck", "--strict", "--no-dangling")


def test_head_index_files_and_other_refs_stay_as_they_are(
    applied: Layout, clone: Path
) -> None:
    before = snapshot(clone)
    make_pr(applied, "gadget", clone)
    head, index, files, refs = snapshot(clone)
    assert (head, index, files) == before[:3]
    added = set(refs.split("\n")) - set(before[3].split("\n"))
    assert [line.split()[0] for line in added] == ["refs/heads/afd-dbo/gadget"]
    assert not list((applied.build / "pr").glob(".pr-*"))


def test_twice_is_once(applied: Layout, clone: Path) -> None:
    one = make_pr(applied, "gadget", clone)
    mail = one.mail.read_bytes()
    two = make_pr(applied, "gadget", clone)
    assert (one.commit, two.fresh) == (two.commit, False)
    assert two.mail.read_bytes() == mail


def test_mail_is_applied_by_git_am_as_a_user_runs_it(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    made = make_pr(applied, "gadget", clone)
    user_git(clone, "switch", "-q", "--detach", "v0.30.0")
    user_git(clone, "am", "-q", "--keep-non-patch", str(made.mail))
    assert Git(clone)("rev-parse", "HEAD^{tree}") == Git(clone)(
        "rev-parse", f"{made.commit}^{{tree}}"
    )
    form = "--format=%an <%ae>%n%B"
    assert Git(clone)("show", "-s", form, "HEAD") == Git(clone)(
        "show", "-s", form, made.commit
    )


def test_hostile_settings_change_no_byte(
    applied: Layout, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the user's, nor the clone's own, nor the environment's."""
    plain = make_pr(applied, "gadget-docs", out=tmp_path / "plain")
    settings = tmp_path / "gitconfig"
    settings.write_text(HOSTILE)
    with (clone / ".git/config").open("a") as config:
        config.write(HOSTILE.replace("\tautocrlf = true\n", ""))
    (clone / ".git/info").mkdir(exist_ok=True)
    (clone / ".git/info/attributes").write_text("*.md text eol=crlf -diff\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Mallory")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    made = make_pr(applied, "gadget-docs", clone, out=tmp_path / "hostile")

    def content(folder: Path) -> list[bytes]:
        lines = (folder / "gadget-docs.patch").read_bytes().split(b"\n")
        return [line for line in lines if not line.startswith(b"base-commit")]

    assert made.commit == plain.commit
    assert content(tmp_path / "hostile") == content(tmp_path / "plain")
    assert b"Signed-off-by" not in made.mail.read_bytes()


def test_hook_of_the_clone_is_not_run(applied: Layout, clone: Path) -> None:
    hook = clone / ".git/hooks/reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    assert make_pr(applied, "gadget", clone).fresh


def test_clone_that_converts_line_ends_is_not_dirty(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    user_git(clone, "config", "core.autocrlf", "true")
    for path in clone.rglob("*.py"):
        path.unlink()
    user_git(clone, "checkout", "-q", "--", ".")
    assert b"\r\n" in (clone / "vllm/config.py").read_bytes()
    os.utime(clone / "vllm/config.py", (1, 1))
    assert make_pr(applied, "gadget", clone).fresh


def test_crlf_lines_survive(applied: Layout, clone: Path, user_git: UserGit) -> None:
    data = b"# a line\r\n# in between\r\n# another\r\n"
    slug = amend(applied, user_git, {"vllm/crlf.py": data, "vllm/new.py": data})
    made = make_pr(applied, slug, clone)
    raw = Git(clone).raw
    assert raw("cat-file", "blob", f"{made.commit}:vllm/crlf.py") == data
    assert raw("cat-file", "blob", f"{made.commit}:vllm/new.py") == data
    user_git(clone, "switch", "-q", "--detach", f"{made.commit}^")
    user_git(clone, "am", "-q", "--keep-non-patch", "--keep-cr", str(made.mail))
    assert raw("cat-file", "blob", "HEAD:vllm/new.py") == data


def test_mode_change_is_kept_and_pointed_out(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    (applied.tree / "tools/run.sh").chmod(0o644)
    slug = amend(applied, user_git, {"tools/run.sh": b"#!/bin/sh\necho run\n"})
    (applied.tree / "tools/run.sh").chmod(0o644)
    made = make_pr(applied, slug, clone)
    assert Git(clone)("ls-tree", made.commit, "tools/run.sh").startswith("100644")
    item = next(item for item in made.items if item.name == "modes")
    assert item.verdict == HUMAN
    assert item.detail == "tools/run.sh: 100755 -> 100644"


def test_binary_file_is_refused(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    slug = amend(applied, user_git, {"docs/picture.png": b"\x89PNG\0\1\2"})
    with pytest.raises(WorkshopError, match="binary") as error:
        make_pr(applied, slug, clone)
    assert "docs/picture.png" in error.value.why
    assert Git(clone).resolve(f"refs/heads/afd-dbo/{slug}") is None


def test_author_and_text_that_are_not_ascii(applied: Layout, clone: Path) -> None:
    made = make_pr(applied, "config-answer", clone)
    show = Git(clone)("show", "-s", "--format=%an%n%B", made.commit)
    assert show.startswith("Zoë Example\n")
    assert "off by one — naïve" in show
    assert "off by one — naïve" in (made.folder / "PR.md").read_text("utf-8")


def test_branch_with_other_content_is_named_and_left(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    user_git(clone, "branch", "afd-dbo/gadget", "main")
    before = snapshot(clone)
    with pytest.raises(WorkshopError, match="afd-dbo/gadget is there") as error:
        make_pr(applied, "gadget", clone)
    assert "later" in error.value.why
    assert snapshot(clone) == before


def test_branch_in_the_way_is_named(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    user_git(clone, "branch", "afd-dbo", "main")
    with pytest.raises(WorkshopError, match="a branch afd-dbo is in the way"):
        make_pr(applied, "gadget", clone)


@pytest.mark.parametrize("staged", [False, True])
def test_uncommitted_changes_are_refused(
    applied: Layout, clone: Path, user_git: UserGit, staged: bool
) -> None:
    (clone / "README.md").write_text("edited\n")
    if staged:
        user_git(clone, "add", "README.md")
    with pytest.raises(WorkshopError, match="not committed") as error:
        make_pr(applied, "gadget", clone)
    assert "README.md" in error.value.why
    assert Git(clone).resolve("refs/heads/afd-dbo/gadget") is None


def test_rebase_in_progress_is_refused(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    done = subprocess.run(
        ["git", "rebase", "-q", "--exec", "false", "v0.30.0", "--force-rebase"],
        cwd=clone,
        env={
            **os.environ,
            "GIT_COMMITTER_NAME": "A",
            "GIT_COMMITTER_EMAIL": "a@example.invalid",
        },
        capture_output=True,
        check=False,
    )
    assert done.returncode
    with pytest.raises(WorkshopError, match="a rebase is in progress"):
        make_pr(applied, "gadget", clone)


def test_linked_worktree_and_bare_clone_will_do(
    applied: Layout, clone: Path, tmp_path: Path, user_git: UserGit
) -> None:
    linked = tmp_path / "linked"
    user_git(clone, "worktree", "add", "-q", "--detach", str(linked), "v0.30.0")
    assert make_pr(applied, "gadget", linked).fresh
    assert Git(clone).resolve("refs/heads/afd-dbo/gadget")
    bare = tmp_path / "bare.git"
    user_git(tmp_path, "clone", "-q", "--bare", str(clone), str(bare))
    assert make_pr(applied, "config-answer", bare).fresh
    assert Git(bare).resolve("refs/heads/afd-dbo/config-answer")


def test_shallow_clone_will_do(
    applied: Layout, clone: Path, tmp_path: Path, user_git: UserGit
) -> None:
    user_git(clone, "tag", "v0.31.0", "main")
    shallow = tmp_path / "shallow"
    url = f"file://{clone}"
    user_git(tmp_path, "clone", "-q", "--depth=1", url, str(shallow))
    made = make_pr(applied, "gadget", shallow, "origin/main")
    assert subjects(shallow, "origin/main..afd-dbo/gadget") == ["[Core] Add the gadget"]
    assert verdicts(made)["newest"] == "pass"


def test_other_base(applied: Layout, clone: Path, user_git: UserGit) -> None:
    user_git(clone, "tag", "v0.31.0", "main")
    made = make_pr(applied, "gadget", clone, "0.31.0")
    assert Git(clone)("rev-parse", f"{made.commit}^") == Git(clone)("rev-parse", "main")
    with pytest.raises(WorkshopError, match=r"it has not 0\.32\.0") as error:
        make_pr(applied, "gadget", clone, "0.32.0")
    assert "fetch --tags" in error.value.todo
    applied.ports_pin.write_text("")
    with pytest.raises(WorkshopError, match="only releases can be had"):
        make_pr(applied, "gadget", base="0.31.0")


def test_patch_that_does_not_apply_there_changes_nothing(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    (clone / "vllm/engine/core.py").write_text("class Other:\n    pass\n")
    user_git(clone, "commit", "-qam", "other")
    user_git(clone, "tag", "v0.31.0")
    before = snapshot(clone)
    with pytest.raises(WorkshopError, match="gadget does not apply"):
        make_pr(applied, "gadget", clone, "0.31.0")
    assert snapshot(clone) == before


def test_hunk_is_merged_where_upstream_changed_lines_beside_it(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    path = clone / "vllm/config.py"
    path.write_text(path.read_text().replace("\n\n\ndef", "\n# new\n\ndef"))
    user_git(clone, "commit", "-qam", "beside")
    user_git(clone, "tag", "v0.31.0")
    made = make_pr(applied, "config-answer", clone, "0.31.0")
    text = Git(clone)("show", f"{made.commit}:vllm/config.py")
    assert "OPTION_19 = 19\n# new\n\ndef answer():\n    return 42" in text
    assert Git(clone).ok("fsck", "--strict", "--no-dangling")


def test_patch_that_upstream_has_in_part_is_refused(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    """A merge would leave out a hunk without a word."""
    path = clone / "vllm/config.py"
    path.write_text(path.read_text().replace("return 41", "return 42"))
    user_git(clone, "commit", "-qam", "half of it")
    user_git(clone, "tag", "v0.31.0")
    before = snapshot(clone)
    with pytest.raises(WorkshopError, match="does not apply") as error:
        make_pr(applied, "config-answer", clone, "0.31.0")
    assert "make port" in error.value.todo
    assert snapshot(clone) == before


def test_mail_for_another_release_is_taken(
    applied: Layout, clone: Path, user_git: UserGit
) -> None:
    (clone / "vllm/engine/core.py").write_text("class Other:\n    pass\n")
    user_git(clone, "commit", "-qam", "other")
    user_git(clone, "tag", "v0.31.0")
    ports = applied.patches / "ports/0.31.0"
    ports.mkdir(parents=True)
    mail = (applied.patches / "gadget.patch").read_text()
    mail = mail.replace(" class EngineCore:", " class Other:")
    # What is kept may also change the patch's own new files.
    mail += (
        "diff --git a/vllm/gadget/__init__.py b/vllm/gadget/__init__.py\n"
        "--- a/vllm/gadget/__init__.py\n+++ b/vllm/gadget/__init__.py\n"
        "@@ -1 +1 @@\n-GADGET = 1\n+GADGET = 31\n"
    )
    (ports / "gadget.patch").write_text(mail)
    made = make_pr(applied, "gadget", clone, "0.31.0")
    text = Git(clone)("show", f"{made.commit}:vllm/engine/core.py")
    assert text == "class Other:\n    gadget = True"
    new = Git(clone)("show", f"{made.commit}:vllm/gadget/__init__.py")
    assert new == "GADGET = 31"
    # Upstream's main is nearer to that release than to the pinned one.
    assert make_pr(applied, "gadget", clone, "main").commit == made.commit


def test_unknown_patch_names_near_ones(applied: Layout) -> None:
    with pytest.raises(WorkshopError, match="No patch is named 'gadgets'") as error:
        make_pr(applied, "gadgets")
    assert "gadget, gadget-docs" in error.value.why


def test_places_that_are_no_clone_of_upstream(applied: Layout, tmp_path: Path) -> None:
    with pytest.raises(WorkshopError, match="no git repository"):
        make_pr(applied, "gadget", tmp_path / "nowhere")
    with pytest.raises(WorkshopError, match="the workshop's own"):
        make_pr(applied, "gadget", applied.tree)
    with pytest.raises(WorkshopError, match="no git repository") as error:
        make_pr(applied, "gadget", applied.tree / "vllm")
    assert str(applied.tree) in error.value.why


def test_without_a_clone_the_branch_is_in_a_repository_of_its_own(
    applied: Layout, mtimes: Callable[[Path], dict[str, int]]
) -> None:
    def seen() -> dict[str, int]:
        found = mtimes(applied.tree)
        # git keeps objects that it finds to be of use from being pruned.
        return {name: at for name, at in found.items() if "/objects/" not in name}

    before = seen()
    made = make_pr(applied, "gadget-docs")
    assert seen() == before
    own = applied.build / "pr/vllm.git"
    assert subjects(own, "v0.30.0..afd-dbo/gadget-docs") == [
        "[Core] Add the gadget",
        "[Doc] Describe the gadget",
    ]
    assert made.folder == applied.build / "pr/gadget-docs"


def test_text_has_title_sections_prerequisites_and_links(applied: Layout) -> None:
    made = make_pr(applied, "gadget-docs")
    lines = (made.folder / "PR.md").read_text().split("\n")
    assert lines[:3] == ["[Doc] Describe the gadget", "", "## Purpose"]
    body = "\n".join(lines[2:])
    assert [*sections(body)] == [
        "Purpose",
        "Test Plan",
        "Test Result",
        "Prerequisites",
    ]
    assert "- `[Core] Add the gadget` (branch `afd-dbo/gadget`)" in lines
    assert "Co-authored-by" not in body
    made = make_pr(applied, "config-answer")
    assert "- #12345" in (made.folder / "PR.md").read_text()


def test_checklist_leaves_a_humans_boxes_open(applied: Layout) -> None:
    made = make_pr(applied, "gadget")
    found = verdicts(made)
    assert {name: found[name] for name, _ in HUMANS} == dict.fromkeys(
        (name for name, _ in HUMANS), HUMAN
    )
    # The fake patch says nothing of AI, and its new files have no SPDX lines.
    assert {name for name, verdict in found.items() if verdict == FAIL} == {
        "ai",
        "spdx",
    }
    text = (made.folder / "CHECKLIST.md").read_text()
    assert "- [ ] **signed-off**" in text
    assert "[x]" not in text.lower()


def test_command_fails_with_an_item_and_says_which(
    applied: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_tools(applied, "pr", "gadget")
    assert done.returncode == 1
    assert "Not ready for upstream: ai, spdx." in done.stderr
    assert (applied.build / "pr/gadget/PR.md").is_file()
    text = (applied.build / "pr/gadget/CHECKLIST.md").read_text()
    assert "**hooks**" not in text
    done = run_tools(applied, "pr", "gadget", "--no-hooks")
    text = (applied.build / "pr/gadget/CHECKLIST.md").read_text()
    assert "- [ ] **hooks**: run upstream's hooks" in text
    done = run_tools(applied, "pr", "gadgte")
    assert done.returncode == 1
    assert "Near it: gadget" in done.stderr


def test_unwrap_joins_prose_and_leaves_the_rest() -> None:
    text = """\
Some prose that
is wrapped.

- an item
  of two lines
- another
1. a numbered
   one

| a | b |
| --- | --- |
| 1 | 2 |

```bash
one
two
```

    indented
    code
"""
    assert (
        unwrap(text)
        == """\
Some prose that is wrapped.

- an item of two lines
- another
1. a numbered one

| a | b |
| --- | --- |
| 1 | 2 |

```bash
one
two
```

    indented
    code
"""
    )


def test_sections_keep_empty_lines() -> None:
    found = sections("## Purpose\n\nOne.\n\nTwo.\n\n## Test Plan\n\nx\n")
    assert found == {"Purpose": "One.\n\nTwo.", "Test Plan": "x"}


def test_sentence_is_found_across_lines() -> None:
    text = "It was slow. This is no duplicate of #12, which\nis for ROCm. End."
    sentence = sentence_with(text, DUPLICATE)
    assert sentence == "This is no duplicate of #12, which is for ROCm."
