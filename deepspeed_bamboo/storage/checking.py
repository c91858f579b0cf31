"""Which checkpoint of a folder is whole: reads files and manifests, changes nothing, and runs no code from them.

:func:`survey` looks at manifests only. :func:`choose` takes the checkpoint that ``latest`` names, or the newest other
one that is whole. How files are checked is up to its caller: one process checks all (:func:`problems_of`), a job shares
them out among its workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_bamboo.core.checkpointing import FileFact
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Folder, OnBytes, ignore_bytes
from deepspeed_bamboo.storage.manifest import NAMES, Manifest

LATEST = "latest"
_READ_BY_DEEPSPEED = ("model_states.pt", "optim_states.pt")
_SHOWN = 3


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as its manifest shows it. ``problems``: what is wrong with the manifest itself, as sentences.

    Without ``manifest`` and ``problems`` it has none: never completed, or written before there were manifests.
    """

    tag: str
    manifest: Manifest | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        text = None if self.manifest is None else self.manifest.to_text()
        return {"tag": self.tag, "manifest": text, "problems": self.problems, "warnings": self.warnings}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Candidate:
        """Inverse of :meth:`to_json`."""
        text = value["manifest"]
        manifest = None if text is None else Manifest.parse(text)
        return cls(value["tag"], manifest, tuple(value["problems"]), tuple(value["warnings"]))


@dataclass(frozen=True)
class Survey:
    """What there is: ``latest``, what that file says (None: there is none), and all checkpoints, the newest first."""

    latest: str | None
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {"latest": self.latest, "candidates": [candidate.to_json() for candidate in self.candidates]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Survey:
        """Inverse of :meth:`to_json`."""
        return cls(value["latest"], tuple(map(Candidate.from_json, value["candidates"])))


@dataclass(frozen=True)
class Choice:
    """``tag``: the checkpoint to load; None: there is none. ``warnings``: sentences for the user.

    ``damaged``: what is wrong with others, by tag; ``error``: why nothing can be loaded and the job must not start.
    ``verified``: False for one without a manifest. ``grid`` and ``digest``: as in its manifest.
    """

    tag: str | None = None
    verified: bool = True
    warnings: tuple[str, ...] = ()
    damaged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    error: str = ""
    grid: tuple[int, int] | None = None
    digest: str | None = None


def survey(folder: Folder, *, step_of: Callable[[str], int | None] | None = None) -> Survey:
    """Look at ``folder``: at all checkpoints whose tag has a step; without ``step_of`` at those with a manifest, and at
    the one that ``latest`` names. Raises CheckpointError if the folder can't be read.
    """
    latest = folder.read_text(LATEST)
    latest = None if latest is None else latest.strip()
    found: list[tuple[int, str, Candidate]] = []
    for tag in folder.folders():
        step = None if step_of is None else step_of(tag)
        if step_of is not None and step is None:
            continue
        candidate = candidate_of(folder, tag, bound=step_of is not None)
        if step is None and candidate == Candidate(tag) and tag != latest:
            continue  # anything may be there
        if step is None:
            step = -1 if candidate.manifest is None else candidate.manifest.step
        found.append((step, tag, candidate))
    ordered = sorted(found, key=lambda entry: entry[:2], reverse=True)
    return Survey(latest, tuple(candidate for _, _, candidate in ordered))


def candidate_of(folder: Folder, tag: str, *, bound: bool = False) -> Candidate:
    """The checkpoint ``tag`` as its manifest shows it. ``bound``: it may not be that of another folder."""
    problems: list[str] = []
    manifests: list[Manifest] = []
    there = 0
    for name in NAMES:
        try:
            text = folder.read_text(f"{tag}/{name}")
            if text is None:
                raise CheckpointError("is missing")
            there += 1
            manifest = Manifest.parse(text)
            if bound and manifest.tag != tag:
                raise CheckpointError(f"is that of {manifest.tag}")
            if manifests and manifest != manifests[0]:
                raise CheckpointError(f"is not the same as {NAMES[0]}")
            manifests.append(manifest)
        except CheckpointError as error:
            problems.append(f"{name} {error}")
    if manifests:
        return Candidate(tag, manifests[0], warnings=tuple(f"{tag}: {problem}" for problem in problems))
    return Candidate(tag, problems=tuple(problems) if there else ())


def problems_of(
    folder: Folder, candidate: Candidate, *, share: tuple[int, int] = (0, 1), on_bytes: OnBytes = ignore_bytes
) -> list[str] | None:
    """What is wrong with the files of ``candidate``, as sentences; each file is read once, and nothing is unpickled.

    ``share``: (i, n) checks the i-th of n shares of the files, all n together check everything. None: there is no file
    of it at all. ``on_bytes`` counts what is read.
    """
    if candidate.manifest is None:
        return list(candidate.problems)
    number, of = share
    expected = sorted(candidate.manifest.files.items())
    try:
        sizes = folder.sizes(candidate.tag)
    except CheckpointError as error:
        return [str(error)]
    if not sizes:
        return None
    found = [
        problem
        for name, fact in expected[number::of]
        if (problem := _problem_of(folder, candidate, name, fact, sizes, on_bytes=on_bytes))
    ]
    if number == 0:
        found += [f"{name} does not belong to it" for name in strangers(sizes, candidate.manifest)]
    return found


def share_bytes(candidate: Candidate, *, share: tuple[int, int]) -> int:
    """How many bytes :func:`problems_of` reads of such a share, if all files are there."""
    number, of = share
    files = {} if candidate.manifest is None else candidate.manifest.files
    return sum(fact.size for _, fact in sorted(files.items())[number::of])


def strangers(there: Iterable[str], manifest: Manifest) -> list[str]:
    """The files of ``there`` that are not of ``manifest``'s checkpoint, and that DeepSpeed might read all the same."""
    return sorted(name for name in set(there) - set(manifest.files) if name.endswith(_READ_BY_DEEPSPEED))


def is_intact(folder: Folder, tag: str) -> bool:
    """Whether the manifest of ``tag`` can be read and all its files are there with their sizes; reads no file."""
    candidate = candidate_of(folder, tag, bound=True)
    if candidate.manifest is None:
        return False
    sizes = folder.sizes(tag)
    return all(sizes.get(name) == fact.size for name, fact in candidate.manifest.files.items())


def choose(
    seen: Survey,
    *,
    check: Callable[[Candidate], Sequence[str] | None],
    where: str,
) -> Choice:
    """Which checkpoint to load: the one that ``latest`` names if that is whole, else the newest other whole one.

    ``check`` says what is wrong with the files of a candidate, see :func:`problems_of`. ``where`` names the folder in
    messages.
    Only where ``latest`` is missing and no checkpoint was ever completed, there is nothing to load. If there are
    checkpoints and none is whole, ``error`` says so: a job must not start at step 0 then as if nothing had been done.
    """
    named = next((candidate for candidate in seen.candidates if candidate.tag == seen.latest), None)
    others = [c for c in seen.candidates if c is not named and (c.manifest is None or c.manifest.named)]
    damaged: dict[str, tuple[str, ...]] = {}
    incomplete: list[str] = []
    for candidate in ([named] if named is not None else []) + others:
        if candidate.manifest is None and not candidate.problems:
            if candidate is named:
                return _taken(candidate, seen, damaged, where)
            incomplete.append(candidate.tag)
            continue
        found = candidate.problems or check(candidate)
        problems = ("all its files are missing",) if found is None else tuple(found)
        if not problems:
            return _taken(candidate, seen, damaged, where)
        damaged[candidate.tag] = problems
    return _nothing(seen, damaged, incomplete, where)


def described(damaged: Mapping[str, Sequence[str]]) -> str:
    """What is wrong with which checkpoint."""
    return "; ".join(f"{tag} is damaged: {_listed(problems)}" for tag, problems in damaged.items())


def _taken(candidate: Candidate, seen: Survey, damaged: Mapping[str, tuple[str, ...]], where: str) -> Choice:
    warnings = [*candidate.warnings]
    verified = candidate.manifest is not None
    if seen.latest != candidate.tag:
        said = _what_latest_says(seen)
        reasons = [said] if said else []
        reasons += [described(damaged)] if damaged else []
        warnings.append(f"{'; '.join(reasons)}; in {where} the newest whole checkpoint is {candidate.tag}, it is taken")
    elif damaged:
        warnings.append(described(damaged))
    if not verified:
        warnings.append(
            f"{candidate.tag} in {where} has no manifest ({NAMES[0]}): it was written by an older version or by "
            "DeepSpeed itself, so its files can't be verified"
        )
    manifest = candidate.manifest
    grid, digest = (None, None) if manifest is None else (manifest.grid, manifest.digest)
    return Choice(candidate.tag, verified, tuple(warnings), damaged, grid=grid, digest=digest)


def _nothing(seen: Survey, damaged: Mapping[str, tuple[str, ...]], incomplete: Sequence[str], where: str) -> Choice:
    if seen.latest is None and not damaged:
        unfinished = ", ".join(incomplete)
        warnings = (f"{unfinished} in {where} was never completed, and is not loaded",) if incomplete else ()
        return Choice(warnings=warnings)
    reasons = [text for text in (_what_latest_says(seen), described(damaged)) if text]
    if incomplete:
        reasons.append(
            f"{', '.join(incomplete)} has no manifest, so it may be incomplete (write its tag into latest to load it "
            "all the same)"
        )
    return Choice(
        damaged=damaged,
        error=f"no checkpoint in {where} can be loaded: {'; '.join(reasons)}. Restore the files, or name another "
        "directory to start anew; nothing there was changed",
    )


def _what_latest_says(seen: Survey) -> str:
    """What is wrong with the file latest; "": it names a checkpoint that there is."""
    if seen.latest is None:
        return "the file latest is missing"
    if not seen.latest:
        return "the file latest is empty"
    if all(candidate.tag != seen.latest for candidate in seen.candidates):
        return f"the file latest says {seen.latest[:80]!r}, and there is no such checkpoint"
    return ""


def _problem_of(
    folder: Folder, candidate: Candidate, name: str, fact: FileFact, sizes: Mapping[str, int], *, on_bytes: OnBytes
) -> str | None:
    if name not in sizes:
        return f"{name} is missing"
    if sizes[name] != fact.size:
        return f"{name} has {sizes[name]:,} bytes, {fact.size:,} were written"
    try:
        digest = hashlib.sha256()
        for chunk in folder.chunks(f"{candidate.tag}/{name}"):
            digest.update(chunk)
            on_bytes(len(chunk))
    except CheckpointError as error:
        return f"{name} can't be read ({error})"
    if digest.hexdigest() != fact.sha256:
        return f"{name} is not what was written (another checksum: its bits have changed, or it is of another step)"
    return None


def _listed(problems: Sequence[str]) -> str:
    more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return ", ".join(problems[:_SHOWN]) + more
