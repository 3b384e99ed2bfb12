"""On PYTHONPATH, this gives every Python process a default preset with a bug in the choice of victims."""

from prefixshield.policies.adaptive import AdaptiveShield


def evict(self, count, access):
    raise ZeroDivisionError("injected by a test")


AdaptiveShield.evict = evict
