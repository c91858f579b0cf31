"""Seeded damages of a folder of checkpoints: none is loaded without a word, and none makes a good one go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deepspeed_bamboo.core.checkpointing import FileFact
from deepspeed_bamboo.storage.checking import Choice, choose, problems_of, survey
from deepspeed_bamboo.storage.manifest import NAMES, Manifest
from deepspeed_bamboo.storage.place import CheckpointPlace, step_of, tag_of
from tests.storage.memory_folder import MemoryFolder

KEEP = 2
STEPS = (4, 6, 8)
PARTS = ("layer_00-model_states.pt", "layer_01-model_states.pt", "mp_rank_00_model_states.pt")
Files = dict[str, bytes]


def place_of(folder: MemoryFolder, owner: str) -> CheckpointPlace:
    return CheckpointPlace(folder, name="place", owner=owner)


def write(place: CheckpointPlace, step: int, *, kept: tuple[int, ...], content: str = "") -> None:
    """One checkpoint, as a job writes it."""
    facts: dict[str, FileFact] = {}
    for name in PARTS:
        text = f"{content}{name} of step {step}: {'x' * (step + len(name))}".encode()
        facts[name] = place.write(f"{tag_of(step)}/{name}", lambda file, text=text: file.write(text))
    place.name_last(Manifest(tag_of(step), step, (1, 2), facts), kept=kept, keep=KEEP)


@pytest.fixture(scope="module")
def whole() -> Files:
    """A folder with the checkpoints of three steps: the two that a job keeps, and one more."""
    folder = MemoryFolder()
    place = place_of(folder, "before")
    place.take()
    write(place, 4, kept=())
    earliest = dict(folder.files)
    write(place, 6, kept=(4,))
    write(place, 8, kept=(4, 6))
    assert folder.folders() == ["bamboo_step6", "bamboo_step8"]
    return {**earliest, **folder.files}


def any_file(files: Files, random_: random.Random) -> str:
    return random_.choice(sorted(name for name in files if name != "bamboo.json"))


def flip(files: Files, random_: random.Random) -> None:
    name = any_file(files, random_)
    data = bytearray(files[name])
    if data:
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    files[name] = bytes(data)


def truncate(files: Files, random_: random.Random) -> None:
    name = any_file(files, random_)
    files[name] = files[name][: random_.randrange(len(files[name]) or 1)]


def lengthen(files: Files, random_: random.Random) -> None:
    files[any_file(files, random_)] += random_.randbytes(random_.randrange(1, 9))


def remove(files: Files, random_: random.Random) -> None:
    del files[any_file(files, random_)]


def remove_folder(files: Files, random_: random.Random) -> None:
    tag = tag_of(random_.choice(STEPS))
    for name in [name for name in files if name.startswith(f"{tag}/")]:
        del files[name]


def remove_manifests(files: Files, random_: random.Random) -> None:
    tag = tag_of(random_.choice(STEPS))
    for name in NAMES:
        files.pop(f"{tag}/{name}", None)


def mix(files: Files, random_: random.Random) -> None:
    """A file, a manifest or all of another step."""
    source, target = (tag_of(step) for step in random_.sample(STEPS, 2))
    names = random_.choice([*((name,) for name in (*PARTS, *NAMES)), NAMES, (*PARTS, *NAMES)])
    for name in names:
        if f"{source}/{name}" in files:
            files[f"{target}/{name}"] = files[f"{source}/{name}"]


def foreign(files: Files, random_: random.Random) -> None:
    files[f"{tag_of(random_.choice(STEPS))}/layer_01-model_01-model_states.pt"] = random_.randbytes(9)


def latest(files: Files, random_: random.Random) -> None:
    said = random_.choice(
        [b"", b"\n", b"bamboo_step7", b"../x", random_.randbytes(6), b"\xff\xfe", b"bamboo_step", None]
    )
    if said is None:
        files.pop("latest", None)
    else:
        files["latest"] = said


DAMAGES: list[Callable[[Files, random.Random], None]] = [
    *[flip, truncate, remove, mix, latest],
    *[flip, truncate, lengthen, remove, remove_folder, remove_manifests, mix, foreign, latest],
]


def is_good(files: Files, whole: Files, tag: str) -> bool:
    """Whether everything that DeepSpeed would read is as it was written. No code of the product is used."""
    inside = {name for name in files if name.startswith(f"{tag}/") and name.endswith("model_states.pt")}
    return inside == {f"{tag}/{part}" for part in PARTS} and all(files[name] == whole[name] for name in inside)


def has_manifest(files: Files, whole: Files, tag: str) -> bool:
    return any(files.get(f"{tag}/{name}") == whole[f"{tag}/{name}"] for name in NAMES)


def start(folder: MemoryFolder, owner: str) -> tuple[CheckpointPlace, Choice]:
    """What a job does at its start."""
    place = place_of(folder, owner)
    place.take()
    seen = survey(folder, step_of=step_of)
    return place, choose(seen, check=lambda found: problems_of(folder, found), where="place")


@pytest.mark.parametrize("hundred", range(10))
def test_a_hundred_damages(whole: Files, hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        random_ = random.Random(seed)
        folder = MemoryFolder()
        folder.files = dict(whole)
        for _ in range(random_.randrange(1, 4)):
            random_.choice(DAMAGES)(folder.files, random_)
        check_start(folder, whole, f"seed {seed}")


def check_start(folder: MemoryFolder, whole: Files, seed: str) -> None:
    before = dict(folder.files)
    damaged = {name for name in whole.keys() | before.keys() if whole.get(name) != before.get(name)}
    place, choice = start(folder, "after")
    # Nothing changes at a start but whose the place is.
    assert {**folder.files, "bamboo.json": b""} == {**before, "bamboo.json": b""}, seed
    good = [tag for tag in map(tag_of, sorted(STEPS, reverse=True)) if is_good(before, whole, tag)]
    verifiable = [tag for tag in good if has_manifest(before, whole, tag)]
    said = before.get("latest", b"").decode(errors="replace").strip()
    if choice.tag is None:
        assert choice.error and not verifiable, f"{seed}: {choice}"  # never begins at step 0 as if nothing was there
        assert all(tag in choice.error for tag in choice.damaged), seed
        return
    if choice.verified:
        assert choice.tag == (said if said in verifiable else verifiable[0]), f"{seed}: {choice}, {sorted(damaged)}"
    else:
        assert choice.tag == said and not any(f"{said}/{name}" in before for name in NAMES), seed
    # Whatever was wrong with what is loaded, with what would have been, or with latest, is said; files are named.
    if choice.tag != "bamboo_step8" or "latest" in damaged or any(name.startswith("bamboo_step8/") for name in damaged):
        assert choice.warnings, f"{seed}: {choice}, {sorted(damaged)}"
    for tag in choice.damaged:
        assert any(tag in warning for warning in choice.warnings), seed
    go_on(folder, place, choice, whole, seed)


def go_on(folder: MemoryFolder, place: CheckpointPlace, choice: Choice, whole: Files, seed: str) -> None:
    """Train on: a good checkpoint goes only when KEEP newer good ones are there."""
    first = step_of(choice.tag or "") or 0
    place.point_to(choice)
    kept = place.known_whole(choice)[-KEEP:]
    written = dict(whole)
    for step in (first + 1, first + 2, first + 3):
        before = dict(folder.files)
        for name in PARTS:
            written.pop(f"{tag_of(step)}/{name}", None)
        write(place, step, kept=kept, content="again ")
        kept = (*kept, step)[-KEEP:]
        written.update({n: d for n, d in folder.files.items() if n.startswith(f"{tag_of(step)}/")})
        assert folder.read_text("latest") == tag_of(step), seed
        tags = {name.split("/")[0] for name in before if "/" in name}
        gone = [
            t for t in tags - set(folder.folders()) if is_good(before, written, t) and has_manifest(before, written, t)
        ]
        newer = [
            t for t in folder.folders() if is_good(folder.files, written, t) and has_manifest(folder.files, written, t)
        ]
        for tag in gone:
            assert len([t for t in newer if (step_of(t) or 0) > (step_of(tag) or 0)]) >= KEEP, f"{seed}: {tag} {newer}"
    _, again = start(folder, "once more")
    assert again.tag == tag_of(first + 3) and again.verified and not again.error, f"{seed}: {again}"


def test_undamaged_it_is_the_newest_and_there_is_nothing_to_say(whole: Files) -> None:
    folder = MemoryFolder()
    folder.files = dict(whole)
    assert start(folder, "after")[1] == Choice("bamboo_step8", grid=(1, 2))
    folder.files["latest"] = b"bamboo_step4"  # who wants to go back says so there
    assert start(folder, "after")[1].tag == "bamboo_step4"


def test_each_damage_is_named_with_its_file_and_reason(whole: Files) -> None:
    folder = MemoryFolder()
    folder.files = dict(whole)
    folder.files["latest"] = b""
    folder.files[f"bamboo_step8/{PARTS[0]}"] = whole[f"bamboo_step6/{PARTS[0]}"] + b"xx"
    folder.files[f"bamboo_step6/{PARTS[1]}"] = whole[f"bamboo_step6/{PARTS[1]}"][:-1]
    choice = start(folder, "after")[1]
    assert choice.tag == "bamboo_step4" and choice.verified
    (warning,) = choice.warnings
    assert warning.startswith("the file latest is empty; bamboo_step8 is damaged: layer_00-model_states.pt is not what")
    assert "bamboo_step6 is damaged: layer_01-model_states.pt has" in warning
    assert warning.endswith("in place the newest whole checkpoint is bamboo_step4, it is taken")
    for tag in ("bamboo_step4", "bamboo_step6"):
        folder.remove(tag)
    folder.files["latest"] = b"bamboo_step8"
    error = start(folder, "after")[1].error
    assert error.startswith("no checkpoint in place can be loaded: bamboo_step8 is damaged: layer_00-model_states.pt")


def test_nothing_to_load_is_not_an_error_and_what_was_never_completed_is_told() -> None:
    folder = MemoryFolder()
    assert start(folder, "first")[1] == Choice()
    folder.files["bamboo_step2/layer_00-model_states.pt"] = b"half"
    folder.files["logs/x"] = b"not ours"
    choice = start(folder, "second")[1]
    assert choice.tag is None and not choice.error and choice.damaged == {}
    assert choice.warnings == ("bamboo_step2 in place was never completed, and is not loaded",)


def test_one_from_before_there_were_manifests_is_loaded_and_told(whole: Files) -> None:
    folder = MemoryFolder()
    folder.files = {name: data for name, data in whole.items() if name.rpartition("/")[2] not in NAMES}
    choice = start(folder, "after")[1]
    assert choice.tag == "bamboo_step8" and not choice.verified
    assert "can't be verified" in choice.warnings[0]
    folder.files["latest"] = b""
    error = start(folder, "after")[1].error
    assert "the file latest is empty" in error and "write its tag into latest to load it all the same" in error


def test_a_manifest_comes_back_and_says_what_is_wrong_with_it() -> None:
    manifest = Manifest("t", 3, (2, 4), {"a.pt": FileFact(7, "00")}, named=False, digest="ab")
    text = manifest.to_text()
    assert Manifest.parse(text) == manifest
    for wrong in ("", "[]", "{}", text[:-9], text.replace("7", "8"), "[" * 10000, text.replace('"named"', '"namex"')):
        with pytest.raises(Exception, match="parsed|checksum|object|nested"):
            Manifest.parse(wrong)
