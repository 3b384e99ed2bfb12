"""Prompts for traces, which name blocks but do not hold their text: equal ids, equal tokens."""

from __future__ import annotations

import random
from functools import lru_cache

from prefixshield.traces.reader import TraceRequest

#: Blocks whose tokens are remembered; more than that are computed again.
_REMEMBERED_BLOCKS = 2**16


def prompt_tokens(request: TraceRequest, block_size: int, vocabulary: range) -> list[int]:
    """The prompt of a request as token ids from ``vocabulary``, the same in every process.

    A block follows from its id alone. Tokens beyond the last id follow from the request's line,
    which is to be unique, so that they hit nothing.
    """
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens += _block(hash_id, block_size, vocabulary)
    del tokens[request.input_length :]  # of a last, partly filled block with an id
    tail = request.input_length - len(tokens)
    if tail:
        tokens += _draw(f"tail of {request.line}", tail, vocabulary)
    return tokens


@lru_cache(maxsize=_REMEMBERED_BLOCKS)
def _block(hash_id: int, block_size: int, vocabulary: range) -> list[int]:
    return _draw(f"block {hash_id}", block_size, vocabulary)


def _draw(seed: str, count: int, vocabulary: range) -> list[int]:
    # A text as seed is hashed with SHA-512; of a number, random would drop the sign.
    return random.Random(seed).choices(vocabulary, k=count)
