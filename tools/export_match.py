"""Finds out which commit of `build/vllm` is which patch of the series."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.errors import WorkshopError
from tools.series import SLUG

_AUTOSQUASH = ("fixup! ", "squash! ", "amend! ")
_SLUG_LENGTH = 40


@dataclass(frozen=True)
class Facts:
    """What a commit and a mail have in common.

    Attributes:
        key: Hash of the commit, or slug of the mail.
        author: Name, address and time, which a rebase or an amend keeps.
        paths: Files that it touches.
    """

    key: str
    subject: str
    author: tuple[str, str, int]
    paths: frozenset[str]

    def __str__(self) -> str:
        is_hash = re.fullmatch("[0-9a-f]{40}", self.key)
        return f"{self.key[:12] if is_hash else self.key} {self.subject}"


@dataclass
class Matching:
    """Slug of each commit.

    Attributes:
        slugs: Hash of a commit -> slug.
        notes: What was concluded rather than known.
    """

    slugs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def match(
    commits: Sequence[Facts],
    mails: Sequence[Facts],
    refs: Mapping[str, str],
    chosen: Mapping[str, str],
    drop: Iterable[str],
) -> Matching:
    """Give each commit a slug, of the series or new.

    Args:
        commits: In the order of the history.
        mails: In the order of the series.
        refs: Slug -> commit that the last `apply` made of it.
        chosen: Hash of a commit -> slug, as the user said.
        drop: Slugs that the user says have no commit any more.

    Raises:
        WorkshopError: It is not clear which is which; names commits and slugs.
    """
    _refuse_autosquash(commits)
    known = {mail.key: mail for mail in mails}
    dropped = set(drop)
    if unknown := sorted(dropped - known.keys()):
        raise WorkshopError(
            f"--drop {unknown[0]}: the series has no such patch.",
            f"It has: {', '.join(known) or 'none'}.",
        )
    found = Matching(_check_chosen(commits, chosen, dropped))

    def left() -> tuple[list[Facts], list[Facts]]:
        taken = set(found.slugs.values())
        return (
            [commit for commit in commits if commit.key not in found.slugs],
            [mail for mail in mails if mail.key not in taken],
        )

    of_ref = {name: slug for slug, name in refs.items() if slug in known}
    free = {mail.key for mail in left()[1]}
    for commit in left()[0]:
        if of_ref.get(commit.key) in free:
            found.slugs[commit.key] = of_ref[commit.key]
    found.slugs |= _same(*left(), lambda facts: facts.subject)
    if clash := sorted(dropped & set(found.slugs.values())):
        commit = next(c for c in commits if found.slugs.get(c.key) == clash[0])
        raise WorkshopError(
            f"--drop {clash[0]}: build/vllm still has its commit.",
            str(commit),
            "Remove the commit (git rebase --interactive) or leave out --drop.",
        )
    mails = [mail for mail in mails if mail.key not in dropped]
    for pairs in (
        _same(*left(), lambda facts: facts.author),
        _in_the_same_gap(commits, mails, found.slugs),
    ):
        for name, slug in pairs.items():
            if name in found.slugs or slug in found.slugs.values():
                continue
            found.slugs[name] = slug
            subject = next(c.subject for c in commits if c.key == name)
            found.notes.append(
                f"{slug} has a new subject: {subject} (was: {known[slug].subject})."
            )
    _name_new(*left(), refs, known, found)
    return found


def _refuse_autosquash(commits: Iterable[Facts]) -> None:
    if left := [c for c in commits if c.subject.startswith(_AUTOSQUASH)]:
        raise WorkshopError(
            "build/vllm has commits that are meant to be squashed.",
            _list(left),
            "git -C build/vllm rebase --interactive --autosquash refs/workshop/base",
        )


def _check_chosen(
    commits: Sequence[Facts], chosen: Mapping[str, str], dropped: set[str]
) -> dict[str, str]:
    names = {commit.key for commit in commits}
    for name, slug in chosen.items():
        flag = f"--slug {name[:12]}={slug}"
        if not SLUG.fullmatch(slug):
            raise WorkshopError(
                f"{flag}: {slug!r} is not a slug.",
                "A slug is small letters and digits, with single hyphens between.",
            )
        if name not in names:
            raise WorkshopError(
                f"{flag}: not one of the commits to export.", _list(commits)
            )
        if slug in dropped:
            raise WorkshopError(f"{flag} and --drop {slug} exclude each other.")
    twice = [slug for slug, count in Counter(chosen.values()).items() if count > 1]
    if twice:
        raise WorkshopError(f"--slug names {twice[0]} for more than one commit.")
    return dict(chosen)


def _same(
    commits: Sequence[Facts],
    mails: Sequence[Facts],
    fact: Callable[[Facts], Hashable],
) -> dict[str, str]:
    """Pairs that agree in a fact which no other commit and no other mail has."""
    of_commit = Counter(fact(commit) for commit in commits)
    of_mail = Counter(fact(mail) for mail in mails)
    by_fact = {fact(mail): mail.key for mail in mails}
    return {
        commit.key: by_fact[fact(commit)]
        for commit in commits
        if of_commit[fact(commit)] == 1 and of_mail[fact(commit)] == 1
    }


def _in_the_same_gap(
    commits: Sequence[Facts], mails: Sequence[Facts], slugs: Mapping[str, str]
) -> dict[str, str]:
    """Pairs with the same neighbours on both sides and a file in common."""

    def neighbours(row: list[str | None], at: int) -> tuple[str | None, str | None]:
        return ("" if at == 0 else row[at - 1]), (
            "" if at + 1 == len(row) else row[at + 1]
        )

    taken = set(slugs.values())
    rows = [slugs.get(commit.key) for commit in commits]
    order = [mail.key if mail.key in taken else None for mail in mails]
    gaps = {
        neighbours(order, at): mail
        for at, mail in enumerate(mails)
        if order[at] is None
    }
    pairs = {}
    for at, commit in enumerate(commits):
        mail = gaps.get(neighbours(rows, at)) if rows[at] is None else None
        if mail and None not in neighbours(rows, at) and commit.paths & mail.paths:
            pairs[commit.key] = mail.key
    return pairs


def _name_new(
    commits: Sequence[Facts],
    mails: Sequence[Facts],
    refs: Mapping[str, str],
    known: Mapping[str, Facts],
    found: Matching,
) -> None:
    """Give slugs to commits that are no patch of the series."""
    if mails and commits:
        raise WorkshopError(
            "It is not clear which commit is which patch.",
            f"Commits without a patch:\n{_list(commits)}\n"
            f"Patches without a commit:\n{_list(mails)}",
            "Say which: --slug COMMIT=SLUG for a commit that is one of these patches "
            "or a new one,\n--drop SLUG for a patch that is to go.",
        )
    if mails:
        raise WorkshopError(
            "build/vllm has no commit for patches of the series.",
            _list(mails),
            "If they are to go: "
            + " ".join(f"--drop {mail.key}" for mail in mails)
            + "\nIf they came into patches/ since the last apply: `make apply` first.",
        )
    of_ref = {name: slug for slug, name in refs.items()}
    for commit in commits:
        taken = {*known, *found.slugs.values()}
        slug = of_ref.get(commit.key, "")
        if not slug or slug in taken:
            slug = slug_from(commit.subject, taken)
        if not slug:
            raise WorkshopError(
                f"No slug can be made of the subject of {commit}.",
                todo=f"Name it: --slug {commit.key[:12]}=SLUG",
            )
        found.slugs[commit.key] = slug
        found.notes.append(
            f"{slug} is a new patch: {commit.subject} (another name: "
            f"--slug {commit.key[:12]}=SLUG)."
        )


def slug_from(subject: str, taken: Iterable[str]) -> str:
    """A slug of a subject's words, tags left out; empty if it has no word."""
    text = re.sub(r"^(\[[^][]*\]\s*)+", "", subject)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    slug = ""
    for word in words:
        if slug and len(slug) + 1 + len(word) > _SLUG_LENGTH:
            break
        slug = f"{slug}-{word}" if slug else word[:_SLUG_LENGTH]
    number = 2
    free = slug
    while free and free in taken:
        free = f"{slug}-{number}"
        number += 1
    return free


def _list(facts: Iterable[Facts]) -> str:
    return "\n".join(f"  {one}" for one in facts)
