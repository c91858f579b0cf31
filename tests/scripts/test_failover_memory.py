"""scripts/failover_memory.py: what it calls growth. The job itself takes minutes and runs by the script."""

from __future__ import annotations

from tests.scripts.loading import load_script

SCRIPT = load_script("failover_memory")


def samples(resident: list[int], *, threads: int = 20, files: list[int] | None = None) -> list[object]:
    files = files or [50] * len(resident)
    return [
        SCRIPT.Sample(n, n * 10, 0, 1, kib, threads, count)
        for n, (kib, count) in enumerate(zip(resident, files, strict=True))
    ]


def test_the_first_failover_warms_up_and_a_few_percent_are_no_growth() -> None:
    growth = SCRIPT.grown(samples([1000, *[2000 + n for n in range(20)]]))
    assert growth["resident_kib"] == (2002, 2017)
    assert SCRIPT.judge(growth) == []


def test_a_leak_is_named() -> None:
    growth = SCRIPT.grown(samples([1000 + 20 * n for n in range(21)], files=[50 + 2 * n for n in range(21)]))
    problems = SCRIPT.judge(growth)
    assert len(problems) == 2
    assert "resident memory" in problems[0]
    assert "files grew from 56 to 86" in problems[1]
