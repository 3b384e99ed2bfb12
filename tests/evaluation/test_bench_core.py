"""The benchmark measures what it says: full pools, the same work for all; its files. No times."""

import json

import pytest

pytest.importorskip("vllm")
pytest.importorskip("libcachesim")

from prefixshield.errors import TraceError
from prefixshield.evaluation import bench_core
from prefixshield.evaluation.bench_core import CONTESTANTS, NATIVE, _Pool, run_bench_core

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("debtors", [0, 2, 4])
def test_every_turn_evicts_what_it_allocates_from_a_full_pool(contestant, debtors):
    pool = _Pool(contestant, 65, 4, debtors, 16)
    cached = pool.manager.block_pool.cached_block_hash_to_block
    assert len(cached) == 64
    driver = pool.driver
    for _ in range(3):
        pool.serve(pool.load())
        assert len(cached) == 64
    if contestant == NATIVE:
        assert driver is None
        return
    evicted = sum(n for key, n in driver.counts.items() if key[0] == "evicted")
    materialised = sum(n for key, n in driver.counts.items() if key[0] == "materialised")
    assert evicted == materialised - 64 > 0
    assert not driver.failed
    if contestant.startswith("shield"):
        owing = {group for group, debt in driver.debts().items() if debt.raw > 0}
        assert owing == {f"g{number}" for number in range(debtors)}
        assert sum(driver.counts["promoted", f"g{n}"] for n in range(4)) > 0 or debtors == 4


def test_sections_are_written_one_by_one_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_core, "CYCLES", ((64, 2, 1, 16),))
    monkeypatch.setattr(bench_core, "ROUNDS", 2)
    monkeypatch.setattr(
        bench_core,
        "SECTIONS",
        {
            "cycles": bench_core.cycles,
            "memory": lambda told: bench_core.Section("memory", "M", ("a",), [(1,)]),
        },
    )
    for name in ("memory", "cycles"):
        (section,) = run_bench_core(tmp_path, tmp_path / "none", 16, [name], lambda what: None)
        assert section.name == name
    found = json.loads((tmp_path / "bench-core/summary.json").read_text())
    assert list(found) == ["cycles", "memory"]
    rows = {row[4]: row for row in found["cycles"]["rows"]}
    assert list(rows) == list(CONTESTANTS)
    assert rows[NATIVE][-3:] == [1.0, 1.0, 1.0]
    assert all(number > 0 for row in rows.values() for number in row[5:])
    document = (tmp_path / "bench-core/summary.md").read_text()
    assert all(f"| {name} |" in document for name in CONTESTANTS)


def test_the_commit_is_the_one_from_before_a_section_ran(tmp_path, monkeypatch):
    """Sections take minutes; what is committed or edited meanwhile did not make their numbers."""
    now = ["before"]

    def section(told):
        now[0] = "after"
        return bench_core.Section("memory", "M", ("a",), [(1,)])

    monkeypatch.setattr(bench_core, "SECTIONS", {"memory": section})
    monkeypatch.setattr(bench_core, "provenance", lambda: {"commit": now[0], "machine": "m"})
    list(run_bench_core(tmp_path, tmp_path / "none", 16, ["memory"], lambda what: None))
    found = json.loads((tmp_path / "bench-core/summary.json").read_text())
    assert found["memory"]["commit"] == "before"


def test_an_unknown_section_is_refused(tmp_path):
    with pytest.raises(Exception, match="--section: found 'cycle', expected one of: cycles"):
        next(run_bench_core(tmp_path, tmp_path, 16, ["cycle"], print))


def test_a_trace_too_small_to_replay_is_one_message(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(TraceError, match=r"empty\.jsonl: found 0 unique blocks, expected at least"):
        next(run_bench_core(tmp_path, path, 16, ["replays"], print))
