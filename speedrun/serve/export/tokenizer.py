"""The run's tokenizer in the format of the `tokenizers` library, whichever of ours it is.

A text is opened by end-of-text, as every document of training is. That token in a text is the token
itself, as is usual there; ours reads it as plain text, and so does theirs with
`split_special_tokens=True`.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from speedrun.data.gpt2 import GPT2_MERGES, GPT2_VOCABULARY
from speedrun.data.tokenizer import BPE_FILE, BYTE_OF, END_OF_TEXT, Tokenizer
from speedrun.errors import DataError

# Texts that both must read alike: runs of blanks, contractions, digits, scripts without blanks,
# marks that combine, characters of two to four bytes, controls, and what looks like a token.
PROBES = (
    "", " ", "  \n\n   \t x  ", "a\r\nb\r c", "it's we'll I'M they'Ve 'sd '",
    "def f(x):\n\treturn  x", "1234567890 3.14e-10 ²³½", "naïve café e\u0301\u0323 ﬁ",
    "日本語のテキスト，中文 한국어", "ไทย עברית العربية",
    "\U0001f469\u200d\U0001f467 \U0001d518\U0001d52b",
    "\x00\x01\x1c\x85\xa0\u2003\u3000\ufeff\u200b", "<|endof text|>", "a" * 300 + " " * 300,
    "\\u0000 \\n %s {} \"quoted\" `x` #!/usr/bin/env", "Ġ ĊĀ ÿ", "\U0010ffff\ud7ff\ue000",
)  # fmt: skip


def library_of(tokenizer: Tokenizer) -> Library:
    """The same tokenizer for the library, which opens every text with end-of-text."""
    if BPE_FILE in tokenizer.files:
        library = Library.from_str(tokenizer.files[BPE_FILE].decode())
    else:
        if tokenizer.files:
            model = _gpt2_model(tokenizer)
        else:
            model = models.BPE(vocab=dict(BYTE_OF), merges=[])
        library = Library(model)
        words = bool(tokenizer.files)  # bytes are not cut into words
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT}:1 $B:1",
        special_tokens=[(END_OF_TEXT, tokenizer.eot)],
    )
    check(library, tokenizer)
    return library


def check(library: Library, tokenizer: Tokenizer) -> None:
    """Refuse to export a tokenizer that would read or write texts otherwise than ours."""
    if library.token_to_id(END_OF_TEXT) != tokenizer.eot:
        raise DataError(
            f"{END_OF_TEXT} is not the last id of tokenizer {tokenizer.spec}: it was changed, so "
            "copy it from the run's dataset"
        )
    for text in PROBES:
        ids = tokenizer.encode(text).tolist()
        theirs = library.encode(text, add_special_tokens=False).ids
        if theirs != ids or library.decode(ids) != text:
            raise DataError(
                f"the `tokenizers` library reads {text[:40]!r} otherwise than the tokenizer "
                f"{tokenizer.spec}: install the version that constraints.txt names"
            )


def settings(length: int) -> dict[str, Any]:
    """tokenizer_config.json. Padding is on the left, so that what is written follows the text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "model_max_length": length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


def _gpt2_model(tokenizer: Tokenizer) -> models.BPE:
    merges = tokenizer.files[GPT2_MERGES.names[0]].decode().split("\n")[1:]
    vocabulary: dict[str, int] = json.loads(tokenizer.files[GPT2_VOCABULARY.names[0]])
    vocabulary.pop(END_OF_TEXT)
    pairs = [(left, right) for left, right in (line.split() for line in merges if line)]
    return models.BPE(vocab=vocabulary, merges=pairs)
