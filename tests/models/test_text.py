"""Text as samples: each window once a pass, and sample k the same whoever asks and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.models.text import TextWindows, read_text

TEXT = bytes(range(256)) * 4


@given(st.integers(1, 300), st.integers(0, 3), st.integers(0, 2**40))
def test_every_pass_has_every_window_once(windows: int, index_of_pass: int, seed: int) -> None:
    dataset = TextWindows(b"x" * (2 * windows + 1), sequence_length=2, seed=seed)
    first = index_of_pass * windows
    assert len(dataset) == windows
    assert sorted(dataset.place(k).index for k in range(first, first + windows)) == list(range(windows))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, first: int) -> list[int]:
        dataset = TextWindows(b"x" * 1001, sequence_length=10, seed=seed)
        return [dataset.place(k).index for k in range(first, first + 100)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 100)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != sorted(order(1, 0))


def test_the_label_is_the_next_byte() -> None:
    dataset = TextWindows(TEXT, sequence_length=16)
    for k in range(40):
        inputs, labels = dataset[k]
        start = dataset.place(k).index * 16
        assert inputs.tolist() == list(TEXT[start : start + 16])
        assert labels.tolist() == list(TEXT[start + 1 : start + 17])
        assert inputs.dtype == labels.dtype == torch.int64


def test_negative_samples_do_not_exist() -> None:
    with pytest.raises(IndexError, match="-1"):
        TextWindows(TEXT, sequence_length=16)[-1]


def test_by_default_it_reads_the_standard_library() -> None:
    text = read_text()
    assert len(text) > 1_000_000
    assert b"import os" in text
    assert text == read_text()


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, content in (("b.txt", b"2"), ("a/z.txt", b"1"), ("c", b"3")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_text(tmp_path) == b"123"
    assert read_text(str(tmp_path / "c")) == b"3"


def test_unusable_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        read_text(tmp_path / "missing")
    with pytest.raises(ValueError, match="nothing to train on"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="16 tokens are less than one sample of 17"):
        TextWindows(b"x" * 16, sequence_length=16)
