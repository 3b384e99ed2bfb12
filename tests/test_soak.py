"""The soak in small, and that it would see a leak."""

import pytest

pytest.importorskip("vllm")

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from prefixshield.evaluation import soak
from prefixshield.evaluation.soak import SUBJECTS, Sample, Soak, assert_flat

pytestmark = pytest.mark.engine

init_none_hash(sha256)


@pytest.mark.parametrize(("policy", "preset"), SUBJECTS[:2])
def test_a_short_soak_sees_everything_and_no_fault(tmp_path, monkeypatch, policy, preset):
    monkeypatch.setattr(soak, "STORM_EVERY", 50)
    monkeypatch.setattr(soak, "SAMPLES", 3)
    run = Soak(tmp_path, policy, preset, groups=8, seed=1)
    samples = run.run(600, check_every=50, progress=lambda step: None)
    assert len(samples) == 3
    assert run.seen["preempted"] > 0
    assert run.seen["checks"] == 13
    run._pool.blocks[7].ref_cnt += 1
    with pytest.raises(AssertionError, match=r"free twice or lost"):
        run.check()


@pytest.mark.parametrize("field", ["rss_bytes", "accounting_bytes", "objects"])
def test_slow_growth_is_seen(field):
    flat = [Sample(step, 10**9, 10**8, 10**6) for step in range(100)]
    assert_flat(flat)
    leaking = [s._replace(**{field: int(getattr(s, field) * (1 + s.step / 1000))}) for s in flat]
    with pytest.raises(AssertionError, match=f"{field} grew by"):
        assert_flat(leaking)
    warming_up = [s._replace(**{field: getattr(s, field) // 2}) for s in flat[:20]] + flat[20:]
    assert_flat(warming_up)
