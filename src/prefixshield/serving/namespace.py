"""Namespace tokens: how a request's identity travels to the scheduler inside ``cache_salt``.

``cache_salt`` is the one field that reaches the engine from every endpoint, and vLLM hashes it
into a request's first block, so it must be the same for all requests of a namespace. A token is
``HEAD.TAIL``: HEAD stands for (group, contract), TAIL for the client's own salt. Both are keyed
digests, so a token tells an onlooker of vLLM's KV events nothing.

The middleware makes tokens, the scheduler reads them; both derive the same table from the same
configuration and secret, so nothing is shared between the processes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path
from typing import NamedTuple

from prefixshield.config import Config, namespace_secret


class Identity(NamedTuple):
    """Who pays for a request, by name."""

    group: str
    contract: str


class Namespaces:
    """Translates identities to tokens and back.

    All contracts of a group share its namespace: the token of a key with another contract than
    the group's own is turned into the group's own by the scheduler, before it is hashed. The
    group's own does not name the contract, so a group whose contract changes keeps its cache.
    """

    def __init__(self, config: Config, secret: bytes) -> None:
        self._secret = secret
        self.default = Identity(config.default_group, config.groups[config.default_group].contract)
        self._own_contract = {name: group.contract for name, group in config.groups.items()}
        self._heads = {
            Identity(group, contract): self._digest("group", group)
            if contract == own
            else self._digest("identity", group, contract)
            for group, own in self._own_contract.items()
            for contract in config.contracts
        }
        self._identities = {head: identity for identity, head in self._heads.items()}

    @classmethod
    def of(cls, config: Config, path: Path | str) -> Namespaces:
        """The namespaces of a configuration that was read from ``path``; reads the environment.

        Raises ConfigError when a secret is not set.
        """
        return cls(config, namespace_secret(config, path))

    def token(self, identity: Identity, client_salt: str = "") -> str:
        """The ``cache_salt`` of a request: 45 letters, digits, ``-``, ``_`` and one dot.

        Raises KeyError for a group or contract that is not configured.
        """
        return f"{self._heads[identity]}.{self._digest('salt', identity.group, client_salt)}"

    def head(self, identity: Identity) -> str:
        """What stands for an identity in its tokens, and alone for it in vLLM's KV events."""
        return self._heads[identity]

    def knows(self, cache_salt: str | None) -> bool:
        """Whether a salt names a configured identity, or is none."""
        return cache_salt is None or cache_salt.partition(".")[0] in self._identities

    def read(self, cache_salt: str | None) -> tuple[Identity, str | None]:
        """The identity behind a salt, and the salt to hash instead (the group's namespace).

        A salt that is none of our tokens belongs to the default group and is hashed as it is.
        """
        if cache_salt is None:
            return self.default, None
        head, _, tail = cache_salt.partition(".")
        identity = self._identities.get(head)
        if identity is None:
            return self.default, cache_salt
        own = Identity(identity.group, self._own_contract[identity.group])
        return identity, cache_salt if identity == own else f"{self._heads[own]}.{tail}"

    def _digest(self, *parts: str) -> str:
        message = b"".join(
            len(data).to_bytes(4, "big") + data
            for data in (part.encode("utf-8", "surrogatepass") for part in parts)
        )
        digest = hmac.new(self._secret, message, hashlib.sha256).digest()[:16]
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
