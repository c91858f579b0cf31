"""What a script does to its stages between steps: what looking for it may cost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from deepspeed_bamboo.runtime.owner_changes import OwnerChanges


class _Host:
    """Counts who asks for stages."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def owned(self) -> dict[Any, Any]:
        self.asked += 1
        return {}


class _Worker:
    def __init__(self, *, protects: bool) -> None:
        self.protects, self.host = protects, _Host()


@pytest.mark.parametrize("protects", [True, False])
def test_only_where_there_are_shadows_are_stages_looked_at_after_a_step(protects: bool) -> None:
    worker = _Worker(protects=protects)
    OwnerChanges(cast("Any", worker), transfer=cast("Any", None), past=cast("Any", None)).note()
    assert (worker.host.asked > 0) == protects
