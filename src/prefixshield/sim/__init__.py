"""The simulator: a block pool with reference counts and all counting, and serial replay."""
