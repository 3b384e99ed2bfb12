"""The configuration file: contracts, groups, API keys, and which policy protects them.

One YAML file drives replay and serving alike. Every mistake is reported as
``FILE: key.path: found ..., expected ...``; the value of an API key is never shown.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from prefixshield.core.ledger import Contract
from prefixshield.errors import ConfigError
from prefixshield.policies import POLICIES, PRESETS
from prefixshield.policies.static_quota import StaticQuota

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ContractSection(_Section):
    """A creation entitlement (policy.md section 2)."""

    # Bounded, so that no debt ever gets as far as a number that is not finite.
    refill_rate: float = Field(ge=1e-9, le=1e9, description="blocks per second")
    burst: float = Field(ge=0, le=1e12, description="blocks")


class Secret(_Section):
    """A secret string: given as ``value``, or as ``env``, an environment variable's name."""

    value: Annotated[str, StringConstraints(min_length=1)] | None = Field(default=None, repr=False)
    env: Annotated[str, StringConstraints(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_string_is_a_value(cls, data: Any) -> Any:
        return {"value": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Secret:
        if (self.value is None) == (self.env is None):
            raise ValueError("not exactly one source")
        return self

    def resolve(self) -> str:
        """The secret itself. Raises KeyError when its environment variable is unset or empty."""
        if self.value is not None:
            return self.value
        assert self.env is not None
        secret = os.environ[self.env]
        if not secret:
            raise KeyError(self.env)
        return secret


class ApiKey(Secret):
    """An API key of a group; ``contract`` overrides the group's own for this key."""

    contract: Name | None = None


class GroupSection(_Section):
    """An accounting group: the principal that pays for the blocks its requests materialise."""

    contract: Name
    keys: tuple[ApiKey, ...] = ()

    @field_validator("keys", mode="before")
    @classmethod
    def _list_of_keys(cls, data: Any) -> Any:
        return tuple(data) if isinstance(data, list) else data


#: Headers that mean something else already.
_RESERVED_HEADERS = frozenset(
    {
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "origin",
        "transfer-encoding",
        "x-api-key",
        "x-request-id",
    }
)


class TrustedHeader(_Section):
    """A header in which a gateway names the group of each request that it sends."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")]
    secret: Secret
    """What the gateway sends as its API key."""
    unknown_group: Literal["refuse", "default"] = "refuse"

    @field_validator("name")
    @classmethod
    def _free(cls, name: str) -> str:
        if name.lower() in _RESERVED_HEADERS:
            raise ValueError("reserved")
        return name.lower()


class RecordSection(_Section):
    """A recording of the requests that are served, as a trace without content."""

    path: Annotated[str, StringConstraints(min_length=1)]
    """A file that is not there yet; relative to where the server was started."""
    max_megabytes: int = Field(default=256, gt=0)
    """It ends at this size; of each engine's file."""


class Config(_Section):
    """A validated configuration. Contracts and groups keep the order of the file."""

    policy: str = "shield"
    preset: str = "default"
    mode: Literal["on", "shadow"] = "on"
    contracts: dict[Name, ContractSection] = Field(min_length=1)
    groups: dict[Name, GroupSection] = Field(min_length=1)
    default_group: Name
    allow_anonymous: bool = False
    trusted_header: TrustedHeader | None = None
    namespace_secret: Secret | None = None
    operator_key: Secret | None = None
    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    record: RecordSection | None = None

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        return _known(name, POLICIES)

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str) -> str:
        return _known(name, PRESETS)

    @field_validator("mode", mode="before")
    @classmethod
    def _yaml_reads_on_as_true(cls, data: Any) -> Any:
        return "on" if data is True else data

    @property
    def admits_anybody(self) -> bool:
        """Whether any request over HTTP can be let in."""
        keys = any(group.keys for group in self.groups.values())
        return keys or self.allow_anonymous or self.trusted_header is not None

    def contract_table(self) -> dict[str, Contract]:
        """The contracts as the ledger takes them, by name."""
        return {
            name: Contract(section.refill_rate, section.burst)
            for name, section in self.contracts.items()
        }

    def default_contract(self, group: str) -> str:
        """The contract of a group's requests that name none; unknown groups get the default's."""
        return self.groups.get(group, self.groups[self.default_group]).contract


#: What is wrong with a configuration that admits nobody, in a server.
NOBODY = (
    "groups: found no API key, expected at least one, or trusted_header, or allow_anonymous: true"
)

#: The paper's contracts (section IV) with no groups declared: what replay uses without a file.
PAPER_CONTRACTS: Mapping[str, ContractSection] = {
    "critical": ContractSection(refill_rate=64.0, burst=256.0),
    "standard": ContractSection(refill_rate=40.0, burst=192.0),
    "best-effort": ContractSection(refill_rate=16.0, burst=128.0),
}


def paper_config() -> Config:
    """The configuration that replay uses when no file is given: the paper's three contracts."""
    return Config(
        contracts=dict(PAPER_CONTRACTS),
        groups={"default": GroupSection(contract="standard")},
        default_group="default",
    )


def load_config(path: Path | str) -> Config:
    """Read and validate a configuration file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or breaks a rule; every broken rule
            is named, one a line.

    """
    return parse_config(read_config(path), path)


def read_config(path: Path | str) -> bytes:
    """The content of a configuration file. Raises ConfigError when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_config(content: bytes, path: Path | str) -> Config:
    """Validate the content of the configuration file ``path``. Raises ConfigError."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_problem(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    if not isinstance(data, dict):
        found = "an empty file" if data is None else _kind(data)
        raise ConfigError(
            f"{path}: found {found}, expected a mapping with the keys: {_keys(Config)}"
        )
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        lines = [_describe(item) for item in error.errors()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None
    if problems := _dangling(config):
        raise ConfigError("\n".join(f"{path}: {line}" for line in problems))
    return config


def dump_config(config: Config) -> str:
    """A configuration as the text of a file that ``load_config`` reads, its secrets in clear."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False)


def encode_secret(secret: str) -> bytes:
    """A secret's bytes, those from an environment that is not UTF-8 included."""
    return secret.encode("utf-8", "surrogateescape")


def resolve_keys(config: Config, path: Path | str) -> dict[str, tuple[str, str]]:
    """Every API key with its (group, contract); reads the environment.

    Raises:
        ConfigError: an environment variable is unset or empty, or a key is given twice.

    """
    table: dict[str, tuple[str, str]] = {}
    places: dict[str, str] = {}
    for group, section in config.groups.items():
        for number, key in enumerate(section.keys):
            place = f"groups.{group}.keys.{number}"
            secret = _resolve(key, path, place)
            if secret in places:
                raise ConfigError(
                    f"{path}: {place}: found the same key as {places[secret]}, "
                    "expected every API key once"
                )
            places[secret] = place
            table[secret] = (group, key.contract or section.contract)
    return table


def gateway_secret(config: Config, path: Path | str) -> str | None:
    """What a gateway that names groups sends as its API key; reads the environment.

    Raises:
        ConfigError: the environment variable is unset or empty, or the secret is also a key.

    """
    if config.trusted_header is None:
        return None
    secret = _resolve(config.trusted_header.secret, path, "trusted_header.secret")
    if secret in resolve_keys(config, path):
        raise ConfigError(
            f"{path}: trusted_header.secret: found an API key of a group, expected another secret"
        )
    return secret


def namespace_secret(config: Config, path: Path | str) -> bytes:
    """The secret under which namespaces are derived.

    Without ``namespace_secret`` it follows from the set of all API keys, the gateway's included:
    nobody who lacks one of them can compute it, and it changes when a key is added or removed.
    """
    if config.namespace_secret is not None:
        return encode_secret(_resolve(config.namespace_secret, path, "namespace_secret"))
    digest = hashlib.sha256(b"prefixshield namespaces")
    gateway = gateway_secret(config, path)
    for key in sorted([*resolve_keys(config, path), *([gateway] if gateway else [])]):
        digest.update(hashlib.sha256(encode_secret(key)).digest())
    return digest.digest()


def operator_key(config: Config, path: Path | str) -> str | None:
    """The key for the metrics and the live page; None: there is none.

    Raises:
        ConfigError: its environment variable is unset or empty, or it lets requests in as well.

    """
    if config.operator_key is None:
        return None
    secret = _resolve(config.operator_key, path, "operator_key")
    if secret in resolve_keys(config, path) or secret == gateway_secret(config, path):
        raise ConfigError(
            f"{path}: operator_key: found an API key of a group or the gateway's secret, "
            "expected another secret"
        )
    return secret


def _resolve(secret: Secret, path: Path | str, place: str) -> str:
    try:
        return secret.resolve()
    except KeyError:
        raise ConfigError(
            f"{path}: {place}.env: found {secret.env!r}, which is not set, "
            "expected the name of an environment variable that holds the secret"
        ) from None


def _dangling(config: Config) -> list[str]:
    """References to contracts and groups that are not defined."""
    problems = []

    def check(place: str, name: str, known: Mapping[str, Any], section: str) -> None:
        if name not in known:
            problems.append(
                f"{place}: found {name!r}, expected one of {section}: {', '.join(known)}"
            )

    if config.mode == "shadow" and config.policy == StaticQuota.name:
        problems.append(
            f"mode: found 'shadow', expected 'on': the policy {config.policy} refuses requests, "
            "which it cannot do in the shadow"
        )
    check("default_group", config.default_group, config.groups, "groups")
    for group, section in config.groups.items():
        check(f"groups.{group}.contract", section.contract, config.contracts, "contracts")
        for number, key in enumerate(section.keys):
            if key.contract is not None:
                place = f"groups.{group}.keys.{number}.contract"
                check(place, key.contract, config.contracts, "contracts")
    return problems


def _known(name: str, known: Mapping[str, Any]) -> str:
    if name not in known:
        raise ValueError("unknown")
    return name


#: What is expected where; ``*`` stands for a name or a number in a list.
_EXPECTED: Mapping[str, str] = {
    "policy": f"one of: {', '.join(POLICIES)}",
    "preset": f"one of: {', '.join(PRESETS)}",
    "contracts": "a mapping of names to {refill_rate, burst}, at least one",
    "contracts.*": "a mapping with the keys: refill_rate, burst",
    "contracts.*.refill_rate": "a number from 0.000000001 to 1000000000 (blocks per second)",
    "contracts.*.burst": "a number from 0 to 1000000000000 (blocks)",
    "groups": "a mapping of names to {contract, keys}, at least one",
    "groups.*": "a mapping with the keys: contract, keys",
    "groups.*.contract": "the name of a contract",
    "groups.*.keys": "a list of API keys",
    "groups.*.keys.*": "an API key: a string, or a mapping with one of value, env",
    "groups.*.keys.*.value": "a non-empty string",
    "groups.*.keys.*.env": "the name of an environment variable",
    "groups.*.keys.*.contract": "the name of a contract",
    "mode": "one of: on, shadow",
    "default_group": "the name of a group",
    "allow_anonymous": "true or false",
    "trusted_header": "a mapping with the keys: name, secret, unknown_group",
    "trusted_header.name": "the name of a header that has no other meaning",
    "trusted_header.secret": "a string, or a mapping with one of value, env",
    "trusted_header.secret.value": "a non-empty string",
    "trusted_header.secret.env": "the name of an environment variable",
    "trusted_header.unknown_group": "one of: refuse, default",
    "namespace_secret": "a string, or a mapping with one of value, env",
    "namespace_secret.value": "a non-empty string",
    "namespace_secret.env": "the name of an environment variable",
    "operator_key": "a string, or a mapping with one of value, env",
    "operator_key.value": "a non-empty string",
    "operator_key.env": "the name of an environment variable",
    "max_body_bytes": "a whole number greater than 0 (bytes)",
    "record": "a mapping with the keys: path, max_megabytes",
    "record.path": "the path of a file that is not there yet",
    "record.max_megabytes": "a whole number greater than 0 (MB)",
}

_SECTIONS: Mapping[str, type[BaseModel]] = {
    "": Config,
    "contracts.*": ContractSection,
    "groups.*": GroupSection,
    "groups.*.keys.*": ApiKey,
    "trusted_header": TrustedHeader,
    "trusted_header.secret": Secret,
    "namespace_secret": Secret,
    "operator_key": Secret,
    "record": RecordSection,
}

_NAME_RULE = (
    "letters, digits, '_', '.', '-', at most 64, beginning with a letter or a digit "
    "(a name that is a number goes in quotes)"
)


def _describe(item: Any) -> str:
    """One pydantic error as ``key.path: found X, expected Y``."""
    location = [str(part) for part in item["loc"]]
    if location[-1] == "[key]":
        return f"{'.'.join(location[:-1])}: found the name {item['input']!r}, expected {_NAME_RULE}"
    where = ".".join(location)
    kind = _kind_of_place(location)
    if item["type"] == "missing":
        return f"{where}: missing, expected {_EXPECTED[kind]}"
    if item["type"] == "extra_forbidden":
        parent = _kind_of_place(location[:-1])
        section = _SECTIONS[parent]
        if _is_secret(parent):  # the name may be a key with a colon behind it
            where = f"{'.'.join(location[:-1])}.*"
        return f"{where}: unknown key, expected one of: {_keys(section)}"
    value = item["input"]
    found = _kind(value) if _is_secret(kind) or isinstance(value, dict | list) else repr(value)
    return f"{where}: found {found}, expected {_EXPECTED[kind]}"


def _is_secret(kind: str) -> bool:
    return "key" in kind or "secret" in kind


def _kind_of_place(location: list[str]) -> str:
    """A place with its names and numbers as ``*``."""
    names = {1} if location and location[0] in ("contracts", "groups") else set()
    if location[:1] == ["groups"]:
        names.add(3)
    return ".".join("*" if i in names else part for i, part in enumerate(location))


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a string", type(None): "nothing"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the text around it, which may hold a key."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "it holds a character that YAML does not allow"
    problem = error.problem or "it is malformed"
    if not isinstance(error, _GivenTwiceError):  # names aliases and tags by the file's own text
        problem = re.sub(r"'[^']{2,}'", "'...'", problem)
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _GivenTwiceError(yaml.constructor.ConstructorError):
    """A key that one mapping has twice."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice in one mapping is an error, not the last one wins."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[Hashable] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable) or key in seen:
            raise _GivenTwiceError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
