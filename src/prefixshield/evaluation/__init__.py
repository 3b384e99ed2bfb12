"""The evaluation: one workload through one policy on one of three engines, and what came of it.

``run`` says what a run yields; ``serial``, ``virtual_time`` and ``real_time`` are the engines.
"""
