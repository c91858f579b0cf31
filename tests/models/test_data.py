"""Data that a person has: what a sample is depends on the seed, the epoch and its number alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_bamboo.models.batches import BatchShape, StepBatches
from deepspeed_bamboo.models.catalog import DataPaths, model_named
from deepspeed_bamboo.models.images import ImageFolder, random_box
from deepspeed_bamboo.models.masked import BYTE_MARKS, MaskedPairs
from deepspeed_bamboo.models.parallel import BEGIN, END, PADDING, UNKNOWN, ByteVocabulary, ParallelText, WordVocabulary
from deepspeed_bamboo.models.tokens import TokenWindows, read_tokens

TEXT = np.frombuffer(bytes(range(100)) * 4, dtype=np.uint8)


def image_library() -> Any:
    return pytest.importorskip("PIL.Image", reason="Pillow, which reads images, is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with three images each, all different."""
    library = image_library()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)
    for index, (kind, name) in enumerate((kind, name) for kind in ("cat", "dog") for name in ("a", "b", "c")):
        path = tmp_path / "images" / kind / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        library.fromarray(pixels[index]).save(path)
    (tmp_path / "images" / "dog" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def test_images_are_cut_anew_in_each_epoch_and_alike_whoever_asks(folder: Path) -> None:
    data = ImageFolder(folder, image_size=16, classes=2, seed=1)
    first = [data[k] for k in range(12)]
    state = torch.get_rng_state()
    again = ImageFolder(folder, image_size=16, classes=2, seed=1)
    assert all(same(again[k], first[k]) for k in reversed(range(12)))
    assert torch.equal(torch.get_rng_state(), state)
    assert {tuple(image.shape) for image, _ in first} == {(3, 16, 16)}
    for epoch in (first[:6], first[6:]):
        assert sorted(int(label) for _, label in epoch) == [0, 0, 0, 1, 1, 1]
    shown = {data.place(k).index: first[k][0] for k in range(6)}
    assert all(not torch.equal(first[k][0], shown[data.place(k).index]) for k in range(6, 12))


@given(st.integers(1, 500), st.integers(1, 500), st.integers())
def test_a_part_of_an_image_lies_in_it(width: int, height: int, seed: int) -> None:
    left, upper, right, lower = random_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width and 0 <= upper < lower <= height


def test_unusable_images_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 folders, one for each class, and the model has 1 classes"):
        ImageFolder(folder, image_size=16, classes=1)
    with pytest.raises(ValueError, match="no folder"):
        ImageFolder(tmp_path / "missing", image_size=16, classes=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no image in the folders"):
        ImageFolder(tmp_path / "empty", image_size=16, classes=2)
    for name in "abc":
        (folder / "cat" / f"{name}.png").write_bytes(b"broken")
    data = ImageFolder(folder, image_size=16, classes=2)
    with pytest.raises(ValueError, match=r"cat/.\.png can't be read as an image"):
        [data[k] for k in range(6)]


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_files_of_tokens(tmp_path: Path, suffix: str) -> None:
    tokens, path = (np.arange(50) * 7 % 40).astype(np.uint16), tmp_path / f"tokens{suffix}"
    tokens.tofile(path) if suffix == ".bin" else np.save(path, tokens)
    data = TokenWindows(read_tokens(path), sequence_length=7, vocabulary=40)
    assert len(data) == 7
    for k in range(14):
        start = 7 * data.place(k).index
        inputs, labels = data[k]
        assert inputs.tolist() == tokens[start : start + 7].tolist()
        assert labels.tolist() == tokens[start + 1 : start + 8].tolist()
    with pytest.raises(ValueError, match="token 3[0-9], and the model has tokens 0 to 29"):
        [TokenWindows(read_tokens(path), sequence_length=7, vocabulary=30)[k] for k in range(7)]


def test_unusable_files_of_tokens_are_named(tmp_path: Path) -> None:
    odd, broken, square = tmp_path / "odd.bin", tmp_path / "broken.npy", tmp_path / "square.npy"
    odd.write_bytes(b"123")
    broken.write_bytes(b"nothing of the kind")
    np.save(square, np.zeros((2, 2)))
    for path, message in (
        (odd, "tokens of 2 bytes"),
        (broken, "can't be read as a .npy"),
        (square, "float64 of shape"),
        (tmp_path / "missing.npy", "no file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tokens(path)


@given(st.integers(0, 10**6))
def test_masked_pairs_ask_for_some_tokens_and_hide_most_of_them(k: int) -> None:
    data = MaskedPairs(TEXT, sequence_length=23, marks=BYTE_MARKS, seed=3)
    (shown, segments), labels = data[k]
    assert same(data[k], ((shown, segments), labels))
    assert shown[0] == BYTE_MARKS.begin and shown[11] == shown[22] == BYTE_MARKS.end
    assert segments.tolist() == [0] * 12 + [1] * 11
    asked = labels[1:] != -100
    assert asked.any() and not asked[[10, 21]].any() and (shown[1:] == BYTE_MARKS.mask).le(asked).all()
    text = torch.where(asked, labels[1:], shown[1:])
    first, second = text[:10].tolist(), text[11:21].tolist()
    assert [b - a for a, b in zip(first, first[1:] + second, strict=False)][:9].count(1) >= 8
    follows = (second[0] - first[-1]) % 100 == 1
    assert labels[0] in (0, 1)
    assert follows or labels[0] == 1


def test_half_of_the_masked_pairs_do_not_follow_and_few_tokens_are_asked_for() -> None:
    data = MaskedPairs(TEXT, sequence_length=23, marks=BYTE_MARKS)
    labels = torch.stack([data[k][1] for k in range(400)])
    assert 150 < labels[:, 0].sum() < 250
    assert 0.12 < (labels[:, 1:] != -100).float().sum() / (400 * 20) < 0.21


def test_parallel_text(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("the 12\ncat\nsat\n")
    vocabulary = WordVocabulary(words)
    assert vocabulary.size == 7 and vocabulary.encode(b"the dog sat") == [4, UNKNOWN, 6]
    data = ParallelText([b"the cat", b"sat"], [b"sat", b"cat cat cat cat"], vocabulary=vocabulary,
                        source_length=4, target_length=3)  # fmt: skip
    samples = sorted((data[k] for k in range(2)), key=lambda sample: -int(sample[0][1]))
    (source, length, target), answer = samples[0]
    assert (source.tolist(), int(length)) == ([4, 5, END, PADDING], 3)
    assert (target.tolist(), answer.tolist()) == ([BEGIN, 6, PADDING], [6, END, PADDING])
    (_, _, target), answer = samples[1]
    assert (target.tolist(), answer.tolist()) == ([BEGIN, 5, 5], [5, 5, END])
    with pytest.raises(ValueError, match="1 lines and the target 2"):
        ParallelText([b"a"], [b"a", b"b"], vocabulary=ByteVocabulary(), source_length=4, target_length=4)


def test_models_open_the_data_that_they_are_given(folder: Path, tmp_path: Path) -> None:
    text, tokens = tmp_path / "text.txt", tmp_path / "tokens.npy"
    text.write_bytes(bytes(TEXT))
    np.save(tokens, np.arange(400) % 200)
    for name, paths in (
        ("gpt2-tiny", DataPaths(text)),
        ("gpt2-tiny", DataPaths(tokens)),
        ("bert-tiny", DataPaths(text)),
        ("bert-large", DataPaths(tokens)),
        ("gnmt-tiny", DataPaths(text, target=text)),
        ("vgg-tiny", DataPaths(folder)),
    ):
        if name == "bert-large":
            np.save(tokens, np.arange(2000) % 200)
        data = model_named(name).open_data(paths, 3)
        assert same(data[5], model_named(name).open_data(paths, 3)[5])
    with pytest.raises(ValueError, match="name both"):
        model_named("gnmt-tiny").open_data(DataPaths(text), 0)
    with pytest.raises(ValueError, match="260 tokens|tokens, and gnmt-tiny has 260"):
        words = tmp_path / "words"
        words.write_text("\n".join(f"w{n}" for n in range(300)))
        model_named("gnmt-tiny").open_data(DataPaths(vocabulary=words), 0)


@pytest.mark.parametrize("name", ["resnet-tiny", "gnmt-tiny", "bert-tiny"])
def test_threads_make_the_same_batches_beforehand(name: str) -> None:
    data = model_named(name).open_data(DataPaths(), 2)
    shape = BatchShape(micro_batch_size=2, micro_batches=3)
    step = 0
    with_threads, without = (
        StepBatches(data, shape=shape, current_step=lambda: step, threads=threads) for threads in (2, 0)
    )
    for step in (0, 1, 5, 6):  # noqa: B007 (it is what the engine's step is)
        for _ in range(3):
            assert same(next(with_threads), next(without))
        with pytest.raises(StopIteration):
            next(with_threads)
