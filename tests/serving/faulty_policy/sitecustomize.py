"""On PYTHONPATH, this gives every Python process a shield with a bug in the choice of victims."""

from prefixshield.policies.shield import Shield


def evict(self, count, access):
    raise ZeroDivisionError("injected by a test")


Shield.evict = evict
