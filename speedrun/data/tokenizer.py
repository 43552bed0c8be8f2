"""Text to token ids and back: raw bytes, a BPE trained on the corpus, or GPT-2's.

Training uses the `tokenizers` library, encoding tiktoken's Rust core on every core: on 31 MB of
Python source the two give the same ids, and tiktoken takes 2.2 s against 8.0 s on two cores. Every
tokenizer keeps one id, end-of-text, that no text can produce; each document opens with it. What is
stored with a dataset is plain text that other tools read too: `tokenizer.json` in the `tokenizers`
format for a trained BPE, the two public files unchanged for GPT-2.
"""

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speedrun.data.gpt2 import (
    GPT2_FINGERPRINT,
    GPT2_MERGES,
    GPT2_VOCABULARY,
    PublicFile,
    public_file,
    read_stored,
)
from speedrun.data.shards import MAX_VOCAB
from speedrun.errors import ConfigError, DataError, quoted
from speedrun.files import parse_json, write_atomically
from speedrun.limits import cores

TokenIds = npt.NDArray[np.uint16]

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
MIN_BPE = BYTES + 1  # every byte and the end-of-text token
SPEC_FILE = "spec.json"
BPE_FILE = "tokenizer.json"
SPEC_EXAMPLES = "byte, bpe:4096, bpe:..4096 (at most so many), gpt2, or gpt2:FOLDER"
BYTES_PER_MERGE = 16  # of text, at least, for each id beside those of the bytes in `bpe:..N`

# GPT-2's word splitter. Possessive quantifiers match the same words as the plain ones and keep a
# megabyte of spaces from backtracking.
WORDS = r"'(?:[sdmt]|re|ve|ll)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@dataclass(frozen=True)
class TokenizerSpec:
    """What a string such as `bpe:4096` asks for; `str()` gives it back without machine paths."""

    kind: str
    size: int = 0
    folder: Path | None = None
    at_most: bool = False  # so many ids, or fewer if the text is too short for them

    def __str__(self) -> str:
        return f"bpe:{'..' if self.at_most else ''}{self.size}" if self.kind == "bpe" else self.kind

    def for_text(self, size: int) -> "TokenizerSpec":
        """What it asks for of a text of so many bytes."""
        if not self.at_most:
            return self
        return replace(self, size=min(self.size, MIN_BPE + size // BYTES_PER_MERGE))


def parse_spec(spec: str) -> TokenizerSpec:
    """`byte`, `bpe:N`, `bpe:..N`, `gpt2` or `gpt2:FOLDER`, checked; all else is a ConfigError."""
    kind, colon, rest = spec.partition(":")
    if kind == "gpt2" and (rest or not colon):
        return TokenizerSpec("gpt2", folder=Path(rest).expanduser() if rest else None)
    if spec == "byte":
        return TokenizerSpec("byte")
    if kind != "bpe":
        raise ConfigError(f"tokenizer {quoted(spec)} is not known: use {SPEC_EXAMPLES}")
    if not (found := re.fullmatch(r"(\.\.)?([0-9]{1,9})", rest)):
        raise ConfigError(
            f"tokenizer {quoted(spec)} needs a vocabulary size, as in bpe:4096, or bpe:..4096 for "
            "one that a short text makes smaller"
        )
    size = int(found[2])
    if not MIN_BPE <= size <= MAX_VOCAB:
        raise ConfigError(
            f"tokenizer {spec!r} asks for {size:,} ids, but a BPE has {MIN_BPE} (every byte and "
            f"end-of-text) to {MAX_VOCAB:,} (16-bit shards): choose a size between"
        )
    return TokenizerSpec("bpe", size, at_most=found[1] is not None)


class Tokenizer(ABC):
    """Ids 0 .. vocab_size-1, of which `eot` stands for no text at all."""

    def __init__(
        self, spec: str, tokens: Sequence[bytes], fingerprint: str, files: dict[str, bytes]
    ) -> None:
        self.spec, self.fingerprint = spec, fingerprint
        self.files = files  # what `save` writes besides the spec
        self.tokens = (*tokens, b"")  # the bytes of each id, none for eot
        self.vocab_size, self.eot = len(self.tokens), len(tokens)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of each text, without eot, computed on all cores."""

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        pieces = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token} is outside the {self.vocab_size:,} ids of the tokenizer "
                    f"{self.spec}: use the tokenizer the tokens were made with"
                )
            pieces.append(self.tokens[token])
        return b"".join(pieces)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text behind each id: what turns nats per token into exact bits per byte."""
        return np.array([len(token) for token in self.tokens], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write the tokenizer; the spec goes last, so half a folder never passes for whole."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPEC_FILE).unlink(missing_ok=True)
        spec = {
            "spec": self.spec,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
            # Other tools read more of the files than the ids, of which the fingerprint is.
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()},
        }
        for name, data in self.files.items():
            write_atomically(folder / name, data)
        write_atomically(folder / SPEC_FILE, json.dumps(spec, indent=1).encode())


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, then eot."""

    def __init__(self) -> None:
        tokens = [bytes([value]) for value in range(BYTES)]
        super().__init__("byte", tokens, _fingerprint(tokens, words=""), files={})

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.uint16) for text in texts]


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding where an id is also the rank of its merge, run by tiktoken."""

    def __init__(
        self, spec: str, ranks: Mapping[bytes, int], files: dict[str, bytes], fingerprint: str = ""
    ) -> None:
        import tiktoken

        tokens = sorted(ranks, key=ranks.__getitem__)
        whole = [ranks[token] for token in tokens] == list(range(len(tokens)))
        if not whole or not all(bytes([value]) in ranks for value in range(BYTES)):
            raise DataError(f"the vocabulary of tokenizer {spec} has gaps: build the dataset again")
        super().__init__(spec, tokens, fingerprint or _fingerprint(tokens, words=WORDS), files)
        self._core = tiktoken.Encoding(
            spec, pat_str=WORDS, mergeable_ranks=dict(ranks), special_tokens={END_OF_TEXT: self.eot}
        )

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        parallel = cores()
        if len(texts) < 2 or parallel == 1:
            return self._encode(texts)
        # Strided parts are of about the same length even when the long documents come together.
        parts = [texts[start::parallel] for start in range(parallel)]
        encoded: list[TokenIds] = [np.empty(0, np.uint16)] * len(texts)
        # New threads each time: kept from batch to batch they were 15% slower, whatever tiktoken
        # does with the ids of threads.
        with ThreadPoolExecutor(parallel) as pool:
            for start, part in enumerate(pool.map(self._encode, parts)):
                encoded[start::parallel] = part
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[TokenIds]:
        # No special token is allowed or forbidden, so "<|endoftext|>" in a text is ordinary text.
        for text in texts:
            if not text.isascii():
                _utf8(text)
        encode = self._core.encode_to_numpy
        return [encode(text, disallowed_special=()).astype(np.uint16) for text in texts]


def train_bpe(texts: Iterable[str], vocab_size: int, *, at_most: bool = False) -> Tokenizer:
    """Learn a byte-level BPE of exactly `vocab_size` ids, eot included; deterministic.

    With `at_most` it has fewer where the texts repeat too little for so many.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    spec = str(parse_spec(f"bpe:{vocab_size}"))
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(iter(texts), trainer)
    reached = library.get_vocab_size() + 1
    if reached < vocab_size and not at_most:
        raise DataError(
            f"{spec} needs more text: the training documents repeat enough to learn {reached:,} "
            f"ids, so use bpe:{reached} or less, bpe:..{vocab_size} for as many as there are, or "
            "add documents"
        )
    spec = f"bpe:{reached}"
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return _bpe_from_json(spec, (library.to_str(pretty=True) + "\n").encode())


def create_tokenizer(spec: TokenizerSpec, training_texts: Iterable[str]) -> Tokenizer:
    """The tokenizer a spec asks for; only `bpe:N` looks at the texts."""
    if spec.kind == "bpe":
        return train_bpe(training_texts, spec.size, at_most=spec.at_most)
    return ByteTokenizer() if spec.kind == "byte" else load_gpt2(spec.folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer as `save` left it, refused when a file is gone or changed."""
    path = folder / SPEC_FILE
    try:
        stored = parse_json(path.read_bytes())
        text, fingerprint, size = stored["spec"], stored["fingerprint"], stored["vocab_size"]
        spec = parse_spec(text)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise DataError(
            f"{path} is not a stored tokenizer ({error!r}): build the dataset again"
        ) from None
    if spec.kind == "bpe":
        tokenizer = _bpe_from_json(text, read_stored(folder / BPE_FILE))
    else:
        tokenizer = ByteTokenizer() if spec.kind == "byte" else load_gpt2(folder)
    for name, data in tokenizer.files.items():
        # Those that an older version stored have no hashes.
        if "files" in stored and not _is_stored(stored["files"], name, data):
            raise DataError(
                f"{folder / name} is not the file that was saved (SHA-256 "
                f"{hashlib.sha256(data).hexdigest()[:12]}): restore it, or build the dataset again"
            )
    if size != tokenizer.vocab_size:
        raise DataError(
            f"{path} says {size!r} ids and {text} has {tokenizer.vocab_size:,}: "
            "build the dataset again"
        )
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"the tokenizer in {folder} encodes differently from the one it was saved as "
            f"(fingerprint {tokenizer.fingerprint[:12]} against {str(fingerprint)[:12]}): "
            "build the dataset again"
        )
    return tokenizer


def _is_stored(files: object, name: str, data: bytes) -> bool:
    return isinstance(files, dict) and files.get(name) == hashlib.sha256(data).hexdigest()


def load_gpt2(
    folder: Path | None = None,
    merges: PublicFile = GPT2_MERGES,
    vocabulary: PublicFile = GPT2_VOCABULARY,
) -> Tokenizer:
    """GPT-2's tokenizer from two files in `folder`, else from tiktoken's cache or the network."""
    files = {file.names[0]: public_file(file, folder) for file in (merges, vocabulary)}
    merge_lines, vocabulary_json = files.values()
    pairs = (line.split() for line in merge_lines.decode().split("\n")[1:] if line)
    ids: dict[str, int] = parse_json(vocabulary_json)
    ids.pop(END_OF_TEXT)
    ranks = {_from_printable(token): rank for token, rank in ids.items()}
    # A merge line makes the token of its own rank: otherwise ids would not be merge priorities.
    for rank, pair in enumerate(pairs, start=BYTES):
        assert ids["".join(pair)] == rank, f"merge {rank - BYTES} of GPT-2 is out of order"
    return BpeTokenizer("gpt2", ranks, files, GPT2_FINGERPRINT)


class StreamDecoder:
    """Text from ids one at a time: a character split over tokens appears once it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What is left of an unfinished character, as a replacement mark."""
        return self._decoder.decode(b"", final=True)


def _bpe_from_json(spec: str, data: bytes) -> Tokenizer:
    try:
        model: dict[str, Any] = parse_json(data)["model"]
        ranks = {_from_printable(token): int(rank) for token, rank in model["vocab"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{BPE_FILE} of tokenizer {spec} is damaged ({error!r}): build the dataset again"
        ) from None
    return BpeTokenizer(spec, ranks, {BPE_FILE: data})


# GPT-2's alphabet: a visible Latin-1 character for itself, U+0100 onwards for the others.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(BYTES)) - set(_VISIBLE))
BYTE_OF = {chr(value): value for value in _VISIBLE}
BYTE_OF |= {chr(0x100 + index): value for index, value in enumerate(_OTHERS)}


def _from_printable(token: str) -> bytes:
    return bytes(BYTE_OF[character] for character in token)


def _fingerprint(tokens: Iterable[bytes], words: str) -> str:
    digest = hashlib.sha256(f"speedrun tokenizer 1\n{words}\n".encode())
    for token in tokens:
        digest.update(token.hex().encode() + b"\n")
    return digest.hexdigest()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has half of a surrogate pair at character {error.start}, which UTF-8 cannot "
            "hold: remove it"
        ) from None
