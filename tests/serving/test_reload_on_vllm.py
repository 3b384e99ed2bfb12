"""Another version of the configuration in vLLM's real scheduler, with requests under way."""

import pytest

pytest.importorskip("vllm")

from control_plane import (
    BLOCK_SIZE,
    ControlPlane,
    assert_pool_is_sound,
    engine_config,
    make_request,
)
from test_reload import BROKEN, MORE, NO_BULK, OTHER_CONTRACT, START, put

from prefixshield.config import load_config
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.reload import LiveConfig
from prefixshield.serving.scheduler import build_scheduler

pytestmark = pytest.mark.engine

SHOP = Identity("shop", "big")
BULK = Identity("bulk", "small")


@pytest.fixture(params=["default", "paper"])
def preset(request):
    return f"preset: {request.param}\nnamespace_secret: for tests\n"


@pytest.fixture
def path(tmp_path, preset):
    return put(tmp_path / "tenants.yaml", START + preset)


@pytest.fixture
def plane(tiny_model, path, monkeypatch):
    monkeypatch.setattr(LiveConfig, "watch", lambda self: None)  # the tests say when to look
    p = ControlPlane(build_scheduler, engine_config(tiny_model, 65, str(path)), 65)
    p.now = 0.0
    p.scheduler.driver.clock = lambda: p.now
    return p


def submit(plane, path, name, identity, tokens, **options):
    salt = Namespaces.of(load_config(path), path).token(identity)
    plane.add(make_request(name, tokens, block_size=BLOCK_SIZE, salt=salt, **options))


def change(plane, path, text):
    """Another version, and whether it was taken."""
    put(path, text)
    accepted = plane.scheduler._live.accepted
    plane.scheduler._live.look(at_once=True)
    return plane.scheduler._live.accepted > accepted


def run(plane):
    while plane.step():
        assert_pool_is_sound(plane.scheduler.kv_cache_manager)
    assert not plane.scheduler.driver.failed


def test_contracts_change_and_balances_stay(plane, path, preset):
    account = plane.scheduler.driver.policy.ledger.account("bulk", "small")
    submit(plane, path, "1", BULK, range(32 * 15), max_tokens=1)
    run(plane)
    assert account.balance(0.0) == 10 - 15
    assert change(plane, path, START.replace("rate: 1, burst: 10", "rate: 2, burst: 4") + preset)
    submit(plane, path, "2", SHOP, range(64), max_tokens=1)
    run(plane)
    assert [account.balance(t) for t in (0.0, 1.0, 9.0)] == [-5, -3, 4]
    assert not change(plane, path, BROKEN + preset)
    counts = plane.scheduler.driver.counts
    assert (counts["reloads", "accepted"], counts["reloads", "refused"]) == (1, 0)
    submit(plane, path_of(START, path, preset), "3", SHOP, range(64), max_tokens=1)
    run(plane)
    assert (counts["reloads", "accepted"], counts["reloads", "refused"]) == (1, 1)


def path_of(text, path, preset):
    return put(path.with_name("other.yaml"), text + preset)


def test_a_new_group_is_known_to_whoever_sees_the_file_last(plane, path, preset):
    """The middleware was faster: its token is unknown until the scheduler looks as well."""
    put(path, MORE + preset)
    submit(plane, path, "1", Identity("new", "mid"), range(64), max_tokens=1)
    run(plane)
    counts = plane.scheduler.driver.counts
    assert counts["materialised", "new"] == 2
    assert plane.scheduler.driver.policy.ledger.account("new", "mid").balance(0.0) == 9 - 2


def test_a_group_that_is_gone_keeps_its_blocks_and_its_requests(plane, path, preset):
    submit(plane, path, "running", BULK, range(32 * 14), max_tokens=70)
    plane.step()
    submit(plane, path, "waiting", BULK, range(5000, 5000 + 64), max_tokens=1)
    gone = NO_BULK.replace("  small: {refill_rate: 1, burst: 10}\n", "") + preset
    assert change(plane, path, gone)
    submit(plane, path_of(START, path, preset), "late", BULK, range(7000, 7064), max_tokens=1)
    run(plane)
    assert sorted(plane.finished) == ["late", "running", "waiting"]
    counts = plane.scheduler.driver.counts
    # 14 of the prompt and 2 of the answer; a request that comes later is the default group's.
    assert counts["materialised", "bulk"] == 14 + 2 + 2
    assert counts["materialised", "shop"] == 2
    assert plane.scheduler.driver.owner.count("bulk") == 18
    assert plane.scheduler.driver.policy.ledger.raw_debt("bulk", 0.0) == 18 - 10
    for number in range(8):
        tokens = range(10_000 * number, 10_000 * number + 1600)
        submit(plane, path, f"shop {number}", SHOP, tokens, max_tokens=1)
        run(plane)
    assert plane.scheduler.driver.owner.count("bulk") < 18
    assert change(plane, path, START + preset)
    submit(plane, path, "back", BULK, range(64), max_tokens=1)
    run(plane)
    assert plane.scheduler.driver.counts["materialised", "bulk"] == 18 + 2


def test_a_group_under_another_contract_keeps_its_cache(plane, path, preset):
    submit(plane, path, "1", SHOP, range(96), max_tokens=1)
    run(plane)
    assert change(plane, path, OTHER_CONTRACT + preset)
    submit(plane, path, "2", Identity("shop", "small"), range(96), max_tokens=1)
    run(plane)
    assert plane.cached_tokens == {"1": 0, "2": 64}
    assert plane.scheduler.driver.policy.ledger.account("shop", "small").balance(0.0) == 9


def test_a_policy_that_had_failed_comes_back_under_the_new_contracts(plane, path, preset):
    plane.scheduler.driver.disbelieve([7], 2)
    assert change(plane, path, MORE + preset)
    submit(plane, path, "1", Identity("new", "mid"), range(64), max_tokens=1)
    plane.run()
    assert plane.scheduler.driver.failed
    assert plane.scheduler.reset_prefix_cache()
    submit(plane, path, "2", Identity("new", "mid"), range(64), max_tokens=1)
    run(plane)


def test_from_shadow_to_on_without_a_restart(plane, path, preset):
    """In the shadow the flood takes the victim's blocks, and is in debt for it; then no more."""
    flood = iter(range(1000))

    def victim_survives():
        hot = range(500_000, 500_000 + 32 * 5 + 1)
        for name in ("prove", "reuse"):
            submit(plane, path, f"{name} {next(flood)}", SHOP, hot, max_tokens=1)
            run(plane)
        for _ in range(8):
            plane.now += 0.1
            number = next(flood)
            tokens = range(1000 * number, 1000 * number + 640)
            submit(plane, path, f"flood {number}", BULK, tokens, max_tokens=1)
            run(plane)
        submit(plane, path, "victim", SHOP, hot, max_tokens=1)
        run(plane)
        return plane.cached_tokens["victim"]

    assert change(plane, path, START + preset + "mode: shadow\n")
    assert victim_survives() == 0
    driver = plane.scheduler.driver
    assert driver.policy.ledger.raw_debt("bulk", plane.now) > 100
    assert driver.counts["evicted", "shop", "bulk"] >= 5
    assert driver.counts["fallbacks",] == 0
    assert change(plane, path, START + preset + "mode: on\n")
    assert victim_survives() == 160
