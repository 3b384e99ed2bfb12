"""Reading conversations in ShareGPT's format, such as ShareGPT_V3_unfiltered_cleaned_split.json.

The file is a list of ``{"id": ..., "conversations": [{"from": "human", "value": text}, ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.traces.conversations import ConversationSet, Turn

Tokenize = Callable[[str], list[int]]

#: Who asks and who answers, as the versions of ShareGPT name them. A system prompt is asked, too.
ASKING = ("human", "user", "system")
ANSWERING = ("gpt", "chatgpt", "bing", "bard", "assistant")


def load_tokenizer(path: Path | str) -> Tokenize:
    """Tokenises by a Hugging Face ``tokenizer.json``; adds no special tokens.

    Raises:
        PrefixShieldError: the package ``tokenizers`` is not installed.
        TraceError: the file is missing or is no tokenizer.

    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PrefixShieldError(
            f"{path}: found no package 'tokenizers' to read it with, expected it installed: "
            "pip install tokenizers"
        ) from None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exceptions
        raise TraceError(
            f"{path}: found no tokenizer, expected a tokenizer.json: {error}"
        ) from None

    def tokenize(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return tokenize


def read_sharegpt(
    path: Path | str,
    tokenize: Tokenize,
    *,
    block_size: int = 16,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> ConversationSet:
    r"""The conversations of a file, in its order; each question with an answer is one turn.

    A prompt is ``User: question\n\nAssistant:``, behind ``\n\n`` and all that was said before;
    an answer is `` answer``. Each of these pieces is tokenised on its own, so that a prompt begins
    with exactly the tokens of the one before it and its answer.

    Turns without text do not count, and neighbours from the same side are one turn, joined by
    ``\n``. Answers before the first question (ShareGPT's splits of long conversations begin so)
    and a last question that nobody answered are dropped. A conversation of which nothing is left
    is skipped and counted.

    Args:
        path: JSON.
        tokenize: Text to token ids, such as `load_tokenizer` gives.
        block_size: Tokens per block.
        max_tokens: A conversation ends before its first prompt longer than this.
        limit: Look at this many entries of the file only.

    Raises:
        TraceError: the file cannot be read, or an entry breaks the format.

    """
    ids = _PrefixIds()
    found = []
    skipped = 0
    for turns in islice(_entries(path), limit):
        conversation = tuple(_requests(turns, tokenize, ids, block_size, max_tokens))
        if conversation:
            found.append(conversation)
        else:
            skipped += 1
    return ConversationSet(block_size, tuple(found), skipped)


class _PrefixIds:
    """Small whole numbers for prefixes, given out by first appearance."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, parent: int, block: Sequence[int]) -> int:
        """The id of a prefix: the prefix ``parent`` and one block more."""
        return self._ids.setdefault((parent, tuple(block)), len(self._ids))


def _requests(
    turns: list[tuple[bool, str]],
    tokenize: Tokenize,
    ids: _PrefixIds,
    block_size: int,
    max_tokens: int | None,
) -> Iterator[Turn]:
    """The requests of one conversation; ``turns``: (is it a question, its text)."""
    sides = [
        (asking, "\n".join(text for _, text in neighbours))
        for asking, neighbours in groupby(turns, key=lambda turn: turn[0])
    ]
    if sides and not sides[0][0]:
        del sides[0]
    tokens: list[int] = []
    hash_ids: list[int] = []
    for (_, question), (_, answer) in zip(sides[::2], sides[1::2], strict=False):
        tokens += tokenize("\n\n" * bool(tokens) + f"User: {question}\n\nAssistant:")
        if max_tokens is not None and len(tokens) > max_tokens:
            return
        for start in range(len(hash_ids) * block_size, len(tokens) - block_size + 1, block_size):
            parent = hash_ids[-1] if hash_ids else -1
            hash_ids.append(ids.of(parent, tokens[start : start + block_size]))
        generated = tokenize(f" {answer}")
        yield Turn(len(tokens), len(generated), tuple(hash_ids))
        tokens += generated


def _entries(path: Path | str) -> Iterator[list[tuple[bool, str]]]:
    """The turns with text of every entry: (is it a question, its text)."""
    try:
        entries = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(entries, list):
        raise _fail(str(path), entries, "a JSON list of conversations")
    for number, entry in enumerate(entries, start=1):
        place = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise _fail(place, entry, "a JSON object")
        turns = _get(place, entry, "conversations", "a list of turns")
        if not isinstance(turns, list):
            raise _fail(f"{place}: conversations", turns, "a list of turns")
        yield [
            (asking, text)
            for index, turn in enumerate(turns)
            for asking, text in [_turn(f"{place}: conversations[{index}]", turn)]
            if text.strip()
        ]


def _turn(place: str, turn: Any) -> tuple[bool, str]:
    if not isinstance(turn, dict):
        raise _fail(place, turn, "a JSON object")
    speakers = f"one of: {', '.join(ASKING + ANSWERING)}"
    speaker = _get(place, turn, "from", speakers)
    if speaker not in ASKING + ANSWERING:
        raise _fail(f"{place}.from", speaker, speakers)
    text = _get(place, turn, "value", "a text")
    if not isinstance(text, str):
        raise _fail(f"{place}.value", text, "a text")
    return speaker in ASKING, text


def _get(place: str, data: dict[str, Any], key: str, expected: str) -> Any:
    if key not in data:
        raise TraceError(f"{place}: {key}: missing, expected {expected}")
    return data[key]


def _fail(place: str, found: Any, expected: str) -> TraceError:
    text = repr(found)
    text = text if len(text) <= 60 else text[:57] + "..."
    return TraceError(f"{place}: found {text}, expected {expected}")


def _unreadable(path: Path | str, error: OSError | UnicodeDecodeError) -> TraceError:
    reason = error.strerror if isinstance(error, OSError) else None
    return TraceError(f"{path}: cannot be read: {reason or error}")
