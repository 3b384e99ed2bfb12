"""The demo's plan: seeded, and such that native LRU order must lose the victim's prefixes."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")

from demo.server import POOL_BLOCKS
from demo.tenants import load_keys
from demo.traffic import (
    BLOCK_SIZE_TOKENS,
    HOT_PREFIXES,
    OUTPUT_TOKENS,
    PREFIX_TOKENS,
    TENANTS,
    VOCABULARY,
    make_plan,
    tenant_of_token,
)

PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_SIZE_TOKENS


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(7) == make_plan(7)
    assert make_plan(7) != make_plan(8)


def test_tenants_are_told_apart_by_their_tokens() -> None:
    assert not set(VOCABULARY["victim"]) & set(VOCABULARY["attacker"])
    for request in make_plan(7):
        assert {tenant_of_token(token) for token in request.prompt} == {request.tenant}


def test_requests_are_sent_in_order_and_as_many_by_each_tenant() -> None:
    plan = make_plan(7)
    assert [request.at_s for request in plan] == sorted(request.at_s for request in plan)
    measured = [request.tenant for request in plan if request.measured]
    assert measured.count("victim") == measured.count("attacker")


def test_every_request_stores_a_block_of_its_own_and_decoding_stores_none() -> None:
    lasts = set()
    for request in make_plan(7):
        full = len(request.prompt) // BLOCK_SIZE_TOKENS
        assert (len(request.prompt) + OUTPUT_TOKENS) // BLOCK_SIZE_TOKENS == full
        lasts.add(request.prompt[(full - 1) * BLOCK_SIZE_TOKENS : full * BLOCK_SIZE_TOKENS])
    assert len(lasts) == len(make_plan(7))


def test_the_working_set_fits_but_not_beside_the_attacker() -> None:
    working_set = HOT_PREFIXES * PREFIX_BLOCKS
    assert working_set == 192
    assert working_set / POOL_BLOCKS == 0.75
    # Between two visits to a prefix: the other prefixes, and an attacker's prompt a request.
    between = (HOT_PREFIXES - 1) * PREFIX_BLOCKS + HOT_PREFIXES * PREFIX_BLOCKS
    assert between + PREFIX_BLOCKS > POOL_BLOCKS
    # One request of each tenant in flight fits beside the working set.
    assert working_set + (PREFIX_BLOCKS + 1) + 2 <= POOL_BLOCKS


def test_every_tenant_has_a_key() -> None:
    assert set(load_keys()) == set(TENANTS)
