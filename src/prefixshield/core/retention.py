"""Retention classes: how well proven a cached block is (paper section III, policy.md section 4)."""

from enum import IntEnum


class RetentionClass(IntEnum):
    """Order of exposure inside one group: a lower class is reclaimed before a higher one."""

    PROBATIONARY = 0
    NORMAL = 1
    REUSE = 2

    @property
    def label(self) -> str:
        """The class as event logs and metrics spell it."""
        return self.name.lower()
