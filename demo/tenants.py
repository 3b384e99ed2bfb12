"""The tenants of the demo as the client sees them: one API key each, out of ``tenants.yaml``."""

from __future__ import annotations

from demo.server import TENANTS_FILE
from demo.traffic import TENANTS, Tenant
from prefixshield.config import load_config, resolve_keys


def load_keys() -> dict[Tenant, str]:
    """The first key of each tenant's group."""
    owners = resolve_keys(load_config(TENANTS_FILE), TENANTS_FILE)
    return {
        tenant: next(key for key, (group, _) in owners.items() if group == tenant)
        for tenant in TENANTS
    }
