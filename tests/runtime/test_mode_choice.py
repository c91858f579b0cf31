"""redundancy.mode "auto" in real jobs: losses make it eager, quiet leaves it lazy, and no number depends on it."""

from __future__ import annotations

import dataclasses

from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_all

STEPS = 24
AUTO = Training(
    "auto-1x4",
    4,
    steps=STEPS,
    micro_batches=2,  # so few that all redundant forwards fit into bubbles: any loss makes eager the cheaper one
    bamboo={"redundancy": {"mode": "auto"}},
    faults=[],
)
FIRST_LOSS, SECOND_LOSS = 8, 16


def test_losses_make_it_eager_and_quiet_leaves_it_lazy(jobs: Jobs) -> None:
    quiet = dataclasses.replace(AUTO, name="auto-quiet")
    at = {"pipeline": 0, "at": "backward", "micro_batch": 1}
    faults = [{"step": FIRST_LOSS, "stage": 1, **at}, {"step": SECOND_LOSS, "stage": 3, **at}]
    busy = dataclasses.replace(AUTO, name="auto-busy", faults=faults)
    result = jobs.run(train_all, world=4, trainings=[quiet, busy])
    # Who has the last stage when it is lost depends on what balancing measured after the first loss.
    assert result.codes.count(-9) == 2 and len(result.survivors) == 2, result.transcript()

    first = result.values[result.survivors[0]]
    undisturbed = first[quiet.name]
    assert [(before, mode) for _, before, mode, _ in undisturbed["modes"]] == [("lazy", "lazy")]
    assert "0 losses an hour" in undisturbed["modes"][0][3]

    changes = first[busy.name]["modes"]
    step, before, mode, reason = changes[1]
    assert (before, mode) == ("lazy", "eager"), changes
    assert FIRST_LOSS <= step < SECOND_LOSS
    assert reason.startswith("eager: redundant forwards would cost 0 s of each hour")
    assert reason.endswith("overhead predicted, saving predicted")

    for rank in result.survivors:
        calm, disturbed = (result.values[rank][name] for name in (quiet.name, busy.name))
        assert calm["mode"] == "lazy"
        assert disturbed["mode"] == first[busy.name]["mode"]
        assert (disturbed["losses"], disturbed["digest"]) == (calm["losses"], calm["digest"])
