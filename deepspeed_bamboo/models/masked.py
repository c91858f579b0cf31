"""BERT's pre-training samples: two segments of a text, some of their tokens hidden.

Sample k is a function of the text, the seed and k alone. Half of the samples have a second segment from elsewhere. Of
15 % of the tokens (at least one) the label asks; of these, 80 % are replaced by the mask, 10 % by any token, and the
rest stay, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.order import Order, numbers_of
from deepspeed_bamboo.models.tokens import Tokens, as_tensor, count_windows

_IGNORED = -100
_ASKED_SHARE, _MASKED_SHARE, _REPLACED_SHARE = 0.15, 0.8, 0.1
_SPECIAL = 3  # tokens in a sample that are no text


@dataclass(frozen=True)
class Marks:
    """The special tokens: mask, beginning and end of a segment; text has tokens below ``ordinary``."""

    mask: int
    begin: int
    end: int
    ordinary: int


BYTE_MARKS = Marks(mask=256, begin=257, end=258, ordinary=256)
WORDPIECE_MARKS = Marks(mask=103, begin=101, end=102, ordinary=30522)


class MaskedPairs(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Samples for bert.bert_loss."""

    def __init__(self, tokens: Tokens, *, sequence_length: int, marks: Marks, seed: int = 0) -> None:
        """Raises ValueError for less text than one sample has."""
        self._text = sequence_length - _SPECIAL
        self._first = self._text // 2
        self._windows = count_windows(tokens, self._text)
        self._tokens, self._marks, self._seed = tokens, marks, seed
        self._order = Order(self._windows, seed=seed)

    def __len__(self) -> int:
        """Samples in one pass over the text; samples go on behind it."""
        return self._windows

    def __getitem__(self, k: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Sample ``k``: tokens and segments, and labels as bert_loss has them, [S] int64 each."""
        numbers = numbers_of(self._seed, "masked", k)
        own = self._order.place(k).index
        other = own
        from_elsewhere = self._windows > 1 and bool(torch.rand((), generator=numbers) < 0.5)
        if from_elsewhere:
            other = (own + int(torch.randint(1, self._windows, (), generator=numbers))) % self._windows
        begin, end = torch.tensor([self._marks.begin]), torch.tensor([self._marks.end])
        first, second = self._window(own)[: self._first], self._window(other)[self._first :]
        tokens = torch.cat((begin, first, end, second, end))
        segments = (torch.arange(len(tokens)) > len(first) + 1).long()
        is_text = torch.ones(len(tokens), dtype=torch.bool)
        is_text[[0, len(first) + 1, -1]] = False
        shown, labels = self._hide(tokens, is_text, numbers)
        labels[0] = int(from_elsewhere)
        return (shown, segments), labels

    def _window(self, index: int) -> Tensor:
        window = self._tokens[index * self._text : (index + 1) * self._text]
        return as_tensor(window, vocabulary=self._marks.ordinary)

    def _hide(self, tokens: Tensor, is_text: Tensor, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        draws = torch.rand(len(tokens), generator=numbers).masked_fill(~is_text, 1.0)
        asked = draws < _ASKED_SHARE
        asked[draws.argmin()] = True
        fate = torch.rand(len(tokens), generator=numbers)
        others = torch.randint(self._marks.ordinary, (len(tokens),), generator=numbers)
        shown = torch.where(asked & (fate < _MASKED_SHARE), self._marks.mask, tokens)
        replaced = asked & (fate >= _MASKED_SHARE) & (fate < _MASKED_SHARE + _REPLACED_SHARE)
        return torch.where(replaced, others, shown), tokens.masked_fill(~asked, _IGNORED)
