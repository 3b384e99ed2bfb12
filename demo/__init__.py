"""The demonstration: one attacker, one victim, the same traffic with and without PrefixShield.

``python -m demo`` (or ``make demo``) serves a tiny model with the real vLLM, first as it comes,
then with PrefixShield, sends both the same requests over HTTP, and compares what the victim got.
"""
