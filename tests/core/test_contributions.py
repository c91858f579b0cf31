"""Parts of an agreement have names of their own."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.core.contributions import merged


def test_parts_are_put_together() -> None:
    assert merged({"a": 1}, {}, {"b": 2, "c": 3}) == {"a": 1, "b": 2, "c": 3}


def test_a_name_that_two_parts_use_is_an_error() -> None:
    with pytest.raises(ValueError, match="are called a, c"):
        merged({"a": 1, "c": 2}, {"b": 3}, {"c": 4, "a": 5})
