"""What the tests run as workers."""

from __future__ import annotations


def trivial(argv: list[str]) -> None:
    print("hello", *argv)
