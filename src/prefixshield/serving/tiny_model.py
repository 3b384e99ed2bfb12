"""A tiny Qwen2 model made on the spot, so that tests and the demo run the real engine offline.

The folder holds a configuration, but no weights: serve it with ``--load-format dummy``. The
tokenizer and the chat template are in a folder inside (`tokenizer_of`): serve it with
``--tokenizer``, since beside a Qwen2 configuration transformers would take Qwen2's own instead.

One word of `WORDS`, one line feed and one role marker are one token each, so the length of a
prompt is the number of its words; any other word is one unknown token. Token ids from 0 to
`VOCABULARY_SIZE` - 1 are valid prompts too.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Literal

#: Special tokens, in the order of their ids from 0.
SPECIAL_TOKENS = ("<unk>", "<pad>", "<|im_start|>", "<|im_end|>")

#: Words that are one token each, in the order of their ids; roles make the chat template exact,
#: capitals, digits, yes and no are the labels that /v1/systemone reads.
WORDS = (
    *("\n", "system", "user", "assistant", "tool"),
    *(f"w{number}" for number in range(2000)),
    *string.ascii_uppercase,
    *string.digits,
    *("yes", "no"),
)

VOCABULARY_SIZE = 2048

#: Tokens; the context length that the model declares.
CONTEXT_LENGTH = 4096

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}"
    "{%- for part in message['content'] or [] -%}{{ part.get('text', '') }}{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

#: Sizes that vLLM's CPU backend accepts: a head size of 32 is its smallest.
_MODEL = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "pad_token_id": 1,
    "eos_token_id": 3,
}


def write_tiny_model(
    folder: Path,
    *,
    pooling: bool = False,
    family: Literal["Qwen2", "Qwen3"] = "Qwen2",
    layers: int = 2,
) -> Path:
    """Write the model into a folder, made if need be, and return the folder.

    With ``pooling`` it is a two-label classifier instead of a text generator: serve it with
    ``--runner pooling`` for /classify, /score and /rerank. Embeddings need no such model: the
    generator serves them with ``--runner pooling --convert embed``. vLLM's /v1/systemone knows
    Qwen3 and not Qwen2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(_MODEL, model_type=family.lower(), architectures=[f"{family}ForCausalLM"])
    config["num_hidden_layers"] = layers
    if pooling:
        config.update(
            architectures=[f"{family}ForSequenceClassification"],
            id2label={"0": "no", "1": "yes"},
            label2id={"no": 0, "yes": 1},
        )
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_tokenizer(tokenizer_of(folder))
    return folder


def tokenizer_of(folder: Path) -> Path:
    """Where the tokenizer of the model in a folder is."""
    return folder / "tokenizer"


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    assert len(vocabulary) <= VOCABULARY_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # Spaces part words and vanish; a line feed is a token of its own, as the template counts it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[ \t\r]+"), "removed"),
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins with spaces
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
