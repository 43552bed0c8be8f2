"""A token's way: the same ten tokens in a text, a shard and a batch, then model, loss and update.

The tokens are those of the made-up text (sample.py), read back from each place; sizes and rates are
those of record 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from speedrun.config.resolve import resolve
from speedrun.config.schema import Config
from speedrun.data.loader import make_batch, rows_of
from speedrun.data.shards import HEADER_BYTES, PUBLIC_VOCAB, TOKEN_DTYPE, read_tokens
from speedrun.model.gpt import GPT
from tools.pictures.code import file_of, find
from tools.pictures.sample import dataset
from tools.pictures.svg import WIDTH, Drawing

CELLS = 10
LEFT, CELL, HIGH = 112.0, 42.0, 26.0


@dataclass(frozen=True)
class Tokens:
    """Ten tokens around the border of two documents, as each stage has them."""

    characters: list[str]
    ids: list[int]
    file: str
    stored: list[str]  # two bytes each, in hexadecimal
    inputs: list[int]
    targets: list[int]
    documents: list[int]
    before: str  # how the first document ends
    after: str  # how the second one begins


def tokens() -> Tokens:
    with dataset() as data:
        path = data.split("train").paths[0]
        ids = read_tokens(path, vocab_size=data.vocab_size)
        border = int(np.flatnonzero(ids == data.eot)[1])
        first = border - CELLS // 2
        part = slice(first, first + CELLS)
        raw = path.read_bytes()[HEADER_BYTES:]
        size = TOKEN_DTYPE.itemsize
        batch = make_batch(rows_of(ids, 1024)[:1], data.eot)
        tokenizer = data.tokenizer()
        return Tokens(
            characters=[
                "" if token == data.eot else tokenizer.decode([token]) for token in ids[part]
            ],
            ids=ids[part].tolist(),
            file=path.name,
            stored=[raw[size * i : size * (i + 1)].hex() for i in range(first, first + CELLS)],
            inputs=batch.inputs[0, part].tolist(),
            targets=batch.targets[0, part].tolist(),
            documents=batch.documents[0, part].tolist(),
            before=tokenizer.decode(ids[border - 18 : border]),
            after=tokenizer.decode(ids[border + 1 : border + 19]),
        )


def updates(config: Config) -> list[tuple[str, str, float]]:
    """Role, optimizer and rate of the parameters that the model has."""
    small = resolve(config.recipe, "pico").config  # of the same parts, and made in no time
    model = GPT(small.model, 257, small.batch.length)
    roles = {config.optimizer.group(role) for role in model.roles().values()}
    chosen = ((role, config.optimizer.of(role)) for role in sorted(roles))
    found = [(role, options.kind, float(options.values()["lr"])) for role, options in chosen]
    return sorted(found, key=lambda row: (row[1] != "muon", row[0]))


def draw() -> str:
    shown, config = tokens(), resolve("record-18", "small").config
    model = config.model
    picture = Drawing(
        0,
        "A token's way from a file to an update",
        "Seven stages from top to bottom: corpus, tokenizer, shard, loader, model, loss, update. "
        "Ten tokens around the border of two documents are shown as text, as ids, as bytes of a "
        "shard, and as inputs, targets and document numbers of a batch.",
    )
    picture.heading(
        "A token's way", "ten tokens at the border of two documents, then the whole row"
    )
    y = 92.0

    def stage(number: int, words: str, function: str) -> None:
        find(function)
        name = f"{function.partition(':')[2]}, {file_of(function)}"
        picture.circle(32, y - 5, 12, "c1")
        picture.text(32, y, str(number), size=14, bold=True, anchor="middle", fill="card")
        picture.text(54, y, words, size=16, bold=True)
        picture.text(WIDTH - 28, y, name, size=13, anchor="end", fill="soft", mono=True)

    def cells(label: str, values: list[str], colours: list[str], *, size: float = 13) -> None:
        picture.text(LEFT - 12, y + 18, label, size=13, anchor="end", fill="soft")
        for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
            picture.rect(LEFT + i * CELL, y, CELL, HIGH, colour, stroke="line")
            picture.text(
                LEFT + (i + 0.5) * CELL, y + 18, value, size=size, anchor="middle", mono=True
            )

    # Which document a token is of is the shade of its cell, in every row.
    shades = ["pale" if number == shown.documents[0] else "part" for number in shown.documents]
    stage(1, "Corpus", "speedrun.data.corpus:Corpus.documents")
    y += 16
    for text, shade, x in (
        (f"… {shown.before}", "pale", LEFT),
        (f"{shown.after} …", "part", LEFT + 216),
    ):
        picture.rect(x, y, 204, HIGH, shade, stroke="line", radius=4)
        picture.text(x + 10, y + 18, text, size=13, mono=True)
    y += HIGH + 40
    stage(2, "Tokenizer", "speedrun.data.tokenizer:Tokenizer.encode_batch")
    y += 16
    cells("text", [{" ": "␣", "": "eot"}.get(c, c) for c in shown.characters], shades)
    y += HIGH
    cells("ids", [str(token) for token in shown.ids], shades)
    y += HIGH + 20
    opens = "each document is opened by end-of-text, which no text can give"
    picture.text(LEFT, y, opens, size=13, fill="soft")
    y += 38
    stage(3, "Shard", "speedrun.data.shards:ShardWriter.add")
    y += 16
    cells("bytes", shown.stored, shades, size=13)
    y += HIGH + 20
    header = f"{shown.file}: after {HEADER_BYTES:,} bytes of header"
    picture.text(LEFT, y, header, size=13, fill="soft")
    y += 38
    stage(4, "Loader", "speedrun.data.loader:make_batch")
    y += 16
    cells("inputs", [str(token) for token in shown.inputs], shades)
    y += HIGH
    cells("targets", [str(token) for token in shown.targets], [*shades[1:], shades[-1]])
    y += HIGH
    cells("documents", [str(number) for number in shown.documents], shades)
    y += HIGH + 20
    later = "a target is the input one place on; a token sees its own document"
    picture.text(LEFT, y, later, size=13, fill="soft")
    y += 38
    stage(5, "Model", "speedrun.model.gpt:GPT.forward")
    y += 16
    x = LEFT
    for words, width in (
        ("embedding", 104),
        (f"{model.layers} blocks: attention, MLP", 214),
        ("norm", 62),
    ):
        picture.rect(x, y, width, HIGH + 4, "card", stroke="c1", radius=5)
        picture.text(x + width / 2, y + 20, words, size=13, anchor="middle")
        if words != "norm":
            picture.line([(x + width, y + 15), (x + width + 20, y + 15)], "soft", width=1.5)
        x += width + 20
    y += HIGH + 24
    picture.text(
        LEFT, y, f"(rows, tokens) becomes (rows, tokens, {model.width})", size=13, fill="soft"
    )
    y += 38
    stage(6, "Loss", "speedrun.model.loss:Loss.training_loss")
    vocabulary = -(-PUBLIC_VOCAB // model.vocab_multiple) * model.vocab_multiple
    assert model.zero_init_head, "so the first loss is that of an even guess"
    y += 26
    start = f"one number: nats per token, ln {vocabulary:,} = {math.log(vocabulary):.2f} at first"
    picture.text(LEFT, y, start, size=14)
    y += 44
    stage(7, "Update", "speedrun.optim.combined:CombinedOptimizer.update")
    y += 10
    for role, kind, rate in updates(config):
        y += 20
        picture.text(LEFT, y, role.replace("_", " "), size=14)
        picture.text(LEFT + 150, y, {"muon": "Muon", "adam": "Adam"}[kind], size=14, bold=True,
                     fill="c2" if kind == "muon" else "c1")  # fmt: skip
        picture.text(LEFT + 220, y, f"rate {rate:g}", size=14, fill="soft")
    picture.height = y + 28
    return picture.render()
