"""The configuration file: what is accepted, and what every mistake is told."""

import pytest

from prefixshield.config import gateway_secret, load_config, namespace_secret, resolve_keys
from prefixshield.errors import ConfigError
from prefixshield.policies import POLICIES

RULE = (
    "letters, digits, '_', '.', '-', at most 64, beginning with a letter or a digit "
    "(a name that is a number goes in quotes)"
)

GOOD = """
policy: shield
preset: paper
contracts:
  gold: {refill_rate: 64, burst: 256}
  base: {refill_rate: 0.5, burst: 0}
groups:
  alice: {contract: gold, keys: [sk-alice, {env: ALICE_KEY}, {value: sk-batch, contract: base}]}
  bob: {contract: base}
default_group: bob
"""


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "tenants.yaml"
        path.write_text(text)
        return load_config(path)

    return load


def problems(load, text):
    """The messages of a refused file, without its name."""
    with pytest.raises(ConfigError) as raised:
        load(text)
    lines = str(raised.value).splitlines()
    assert all(": " in line and "tenants.yaml: " in line for line in lines)
    return [line.split("tenants.yaml: ", 1)[1] for line in lines]


def test_a_good_file(load, monkeypatch):
    config = load(GOOD)
    assert (config.policy, config.preset, config.default_group) == ("shield", "paper", "bob")
    assert config.contract_table()["gold"] == (64.0, 256.0)
    assert not config.allow_anonymous
    monkeypatch.setenv("ALICE_KEY", "sk-from-env")
    assert resolve_keys(config, "f") == {
        "sk-alice": ("alice", "gold"),
        "sk-from-env": ("alice", "gold"),
        "sk-batch": ("alice", "base"),
    }


def test_a_secret_never_shows(load):
    config = load(GOOD.replace("default_group: bob", "default_group: bob\nnamespace_secret: hush"))
    assert "sk-" not in repr(config)
    assert "hush" not in repr(config)
    (line,) = problems(load, GOOD.replace("[sk-alice, ", "[123456789, "))
    assert "123456789" not in line
    assert line.startswith("groups.alice.keys.0: found a value of type int, expected ")


@pytest.mark.parametrize(
    "mistake",
    [
        "[sk-hidden\n - [",
        "[*sk-hidden",
        "[!sk-hidden",
        "[&sk-hidden",
        "[@sk-hidden",
        "['sk-hidden",
        "[sk-hidden: ",
        "[{sk-hidden: 1}",
        "[{value: [sk-hidden]}",
        "[sk-hidden\x00",
    ],
)
def test_no_mistake_shows_a_key(load, mistake):
    found = problems(load, GOOD.replace("[sk-alice", mistake))
    assert all("hidden" not in line for line in found)


def test_modes(load):
    assert load(GOOD).mode == "on"
    assert load(GOOD + "mode: on\n").mode == "on", "which YAML reads as true"
    assert load(GOOD + "mode: shadow\n").mode == "shadow"


def test_the_secret_of_a_gateway_is_nobodys_key(load):
    def config(secret):
        return load(
            GOOD.replace("{env: ALICE_KEY}, ", "")
            + f"trusted_header: {{name: X-G, secret: {secret}}}"
        )

    assert gateway_secret(config("other"), "f") == "other"
    with pytest.raises(
        ConfigError, match=r"f: trusted_header\.secret: found an API key of a group"
    ):
        gateway_secret(config("sk-batch"), "f")
    assert namespace_secret(config("one"), "f") != namespace_secret(config("two"), "f")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "refill_rate: 64",
            "refill_rate: 0",
            "contracts.gold.refill_rate: found 0, expected a number from 0.000000001 to 1000000000 (blocks per second)",
        ),
        (
            "refill_rate: 64",
            "refill_rate: fast",
            "contracts.gold.refill_rate: found 'fast', expected a number from 0.000000001 to 1000000000 (blocks per second)",
        ),
        (
            "refill_rate: 64",
            "refill_rate: .inf",
            "contracts.gold.refill_rate: found inf, expected a number from 0.000000001 to 1000000000 (blocks per second)",
        ),
        (
            "refill_rate: 64",
            "refill_rate: true",
            "contracts.gold.refill_rate: found True, expected a number from 0.000000001 to 1000000000 (blocks per second)",
        ),
        (
            "burst: 0}",
            "burst: -1}",
            "contracts.base.burst: found -1, expected a number from 0 to 1000000000000 (blocks)",
        ),
        *(
            (
                "refill_rate: 64",
                f"refill_rate: {rate}",
                f"contracts.gold.refill_rate: found {float(rate)!r}, expected a number from "
                "0.000000001 to 1000000000 (blocks per second)",
            )
            for rate in ("5.0e-324", "1.0e-10", "1.0e+10")
        ),
        (
            "burst: 0}",
            "burst: 1.0e+300}",
            "contracts.base.burst: found 1e+300, expected a number from 0 to 1000000000000 (blocks)",
        ),
        (
            "refill_rate: 64, ",
            "",
            "contracts.gold.refill_rate: missing, expected a number from 0.000000001 to 1000000000 (blocks per second)",
        ),
        (
            "burst: 0}",
            "bursts: 0, burst: 1}",
            "contracts.base.bursts: unknown key, expected one of: refill_rate, burst",
        ),
        (
            "policy: shield",
            "policy: fifo",
            f"policy: found 'fifo', expected one of: {', '.join(POLICIES)}",
        ),
        (
            "preset: paper",
            "preset: strict",
            "preset: found 'strict', expected one of: default, paper",
        ),
        (
            "policy:",
            "polices:",
            "polices: unknown key, expected one of: policy, preset, mode, contracts, groups, default_group, allow_anonymous, trusted_header, namespace_secret, operator_key, max_body_bytes, record",
        ),
        (
            "preset: paper",
            "record: {max_megabytes: 5}",
            "record.path: missing, expected the path of a file that is not there yet",
        ),
        (
            "preset: paper",
            "record: {path: requests.jsonl, max_megabytes: 0}",
            "record.max_megabytes: found 0, expected a whole number greater than 0 (MB)",
        ),
        (
            "bob: {contract: base}",
            "bob: {contract: silver}",
            "groups.bob.contract: found 'silver', expected one of contracts: gold, base",
        ),
        (
            "bob: {contract: base}",
            "bob: base",
            "groups.bob: found 'base', expected a mapping with the keys: contract, keys",
        ),
        (
            "gold: {refill_rate: 64, burst: 256}",
            "gold: [64, 256]",
            "contracts.gold: found a list, expected a mapping with the keys: refill_rate, burst",
        ),
        (
            "contract: base}]",
            "contract: silver}]",
            "groups.alice.keys.2.contract: found 'silver', expected one of contracts: gold, base",
        ),
        (
            "keys: [sk-alice",
            "keys: [{contract: base}",
            "groups.alice.keys.0: found a mapping, expected an API key: a string, or a mapping with one of value, env",
        ),
        (
            "keys: [sk-alice",
            "keys: [''",
            "groups.alice.keys.0.value: found a string, expected a non-empty string",
        ),
        (
            "keys: [sk-alice",
            "keys: [{file: x}",
            "groups.alice.keys.0.*: unknown key, expected one of: value, env, contract",
        ),
        (
            "default_group: bob",
            "default_group: eve",
            "default_group: found 'eve', expected one of groups: alice, bob",
        ),
        ("default_group: bob", "", "default_group: missing, expected the name of a group"),
        ("bob: {", "'b b': {", "groups.b b: found the name 'b b', expected " + RULE),
        ("bob: {", "1: {", "groups.1: found the name 1, expected " + RULE),
        (
            "default_group: bob",
            "default_group: bob\nallow_anonymous: 1",
            "allow_anonymous: found 1, expected true or false",
        ),
        ("preset: paper", "mode: dry-run", "mode: found 'dry-run', expected one of: on, shadow"),
        ("preset: paper", "mode: off", "mode: found False, expected one of: on, shadow"),
        (
            "policy: shield",
            "mode: shadow\npolicy: static-quota",
            "mode: found 'shadow', expected 'on': the policy static-quota refuses requests, which it cannot do in the shadow",
        ),
        (
            "preset: paper",
            "trusted_header: {name: Authorization, secret: s}",
            "trusted_header.name: found 'Authorization', expected the name of a header that has no other meaning",
        ),
        (
            "preset: paper",
            "trusted_header: {name: 'X Y', secret: s}",
            "trusted_header.name: found 'X Y', expected the name of a header that has no other meaning",
        ),
        (
            "preset: paper",
            "trusted_header: {name: X-Y}",
            "trusted_header.secret: missing, expected a string, or a mapping with one of value, env",
        ),
        (
            "preset: paper",
            "trusted_header: {name: X-Y, secret: s, unknown_group: allow}",
            "trusted_header.unknown_group: found 'allow', expected one of: refuse, default",
        ),
    ],
)
def test_a_mistake_is_named_with_what_was_found_and_expected(load, old, new, message):
    assert old in GOOD
    assert message in problems(load, GOOD.replace(old, new))


def test_every_mistake_of_a_file_is_told_at_once(load):
    text = GOOD.replace("refill_rate: 64", "refill_rate: 0").replace("burst: 0}", "burst: -1}")
    assert len(problems(load, text)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found an empty file, expected a mapping with the keys: policy, "),
        ("- 1", "found a list, expected a mapping with the keys: policy, "),
        ("a: [", "not valid YAML: "),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("{[1]: 2}", "not valid YAML: "),
        (
            "contracts: {}\ngroups: {}\ndefault_group: x",
            "contracts: found a mapping, expected a mapping of names to {refill_rate, burst}, at least one",
        ),
    ],
)
def test_files_that_are_no_configuration(load, text, message):
    assert any(message in line for line in problems(load, text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: cannot be read: "):
        load_config(tmp_path / "latin.yaml")


def test_keys_that_are_missing_or_given_twice(load, monkeypatch):
    config = load(GOOD)
    monkeypatch.delenv("ALICE_KEY", raising=False)
    with pytest.raises(
        ConfigError, match=r"f: groups\.alice\.keys\.1\.env: found 'ALICE_KEY', which is not set"
    ):
        resolve_keys(config, "f")
    monkeypatch.setenv("ALICE_KEY", "sk-batch")
    with pytest.raises(
        ConfigError, match=r"groups\.alice\.keys\.2: found the same key as groups\.alice\.keys\.1"
    ):
        resolve_keys(config, "f")


def test_the_namespace_secret_follows_from_the_keys_unless_given(load, monkeypatch):
    monkeypatch.setenv("ALICE_KEY", "one")
    first = namespace_secret(load(GOOD), "f")
    assert first == namespace_secret(load(GOOD), "f")
    monkeypatch.setenv("ALICE_KEY", "two")
    assert namespace_secret(load(GOOD), "f") != first
    given = load(GOOD + "namespace_secret: {env: HUSH}\n")
    monkeypatch.setenv("HUSH", "hush")
    assert namespace_secret(given, "f") == b"hush"
