"""Newcomers are told in which way they are not like the job, and those that are like it nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.job_facts import JobFacts

LEAVES = st.one_of(st.integers(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
NAMES = st.sampled_from(["lr", "betas", "fp16", "optimizer", "seed"])
SETTINGS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4), lambda part: st.dictionaries(NAMES, st.one_of(LEAVES, part), max_size=4)
)
FACTS = st.builds(
    JobFacts,
    settings=SETTINGS,
    layers=st.lists(st.sampled_from(["Block", "Head"]), max_size=4).map(tuple),
    stages=st.dictionaries(st.integers(0, 3), st.sampled_from(["a", "b"]), max_size=4),
)
JOB = JobFacts({"optimizer": {"params": {"lr": 0.1}}, "fp16": {"enabled": True}}, ("Block", "Head"), {0: "a", 1: "b"})


@given(FACTS, FACTS)
def test_text_form_and_likeness(one: JobFacts, other: JobFacts) -> None:
    assert JobFacts.from_json(one.to_json()) == one
    assert one.differences(one) == ()
    flat_alike = not [text for text in one.differences(other) if " here and " in text]
    if (one.settings, one.layers) == (other.settings, other.layers):
        assert flat_alike
        shared = one.stages.keys() & other.stages.keys()
        assert bool(one.differences(other)) == any(one.stages[stage] != other.stages[stage] for stage in shared)


def test_each_difference_is_a_sentence() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        (
            {"settings": {"optimizer": {"params": {"lr": 0.5}}, "fp16": {"enabled": True}}},
            "optimizer.params.lr is 0.5 here and 0.1 in the job",
        ),
        ({"settings": {"optimizer": {"params": {"lr": 0.1}}}}, "fp16.enabled is absent here and True in the job"),
        ({"layers": ("Block", "Block")}, "layer 1 is a Block here and a Head in the job"),
        ({"layers": ("Block",)}, "the model has 1 layers here and 2 in the job"),
        ({"stages": {1: "c"}}, "the parameters of stage 1 have other names, shapes or types than in the job"),
    ]
    for change, sentence in changes:
        (found,) = JOB.differences(replace(JOB, **change))
        assert found.startswith(sentence)


def test_many_differences_are_cut_short() -> None:
    other = replace(JOB, settings={str(number): number for number in range(9)})
    found = JOB.differences(other)
    assert len(found) == 6 and found[-1] == "and 6 more differences"
