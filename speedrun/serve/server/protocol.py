"""The completions call of the OpenAI protocol: what a request may say, and what is answered.

What a request says is honoured or refused in a sentence, never passed over. Beyond the protocol a
request may say `top_k`, `repetition_penalty` and `show_context`; answers then hold what the page
shows: the bytes of each token, and which tokens the last one saw.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speedrun.data.tokenizer import END_OF_TEXT, Tokenizer
from speedrun.errors import ConfigError, SpeedrunError
from speedrun.serve.sampling import Sampling
from speedrun.serve.slots import Sight
from speedrun.serve.writing import Piece, Wanted, prompt_ids

TOO_LONG = "context_length_exceeded"
MOST_TOKENS = 8192  # of one text
MOST_TEXTS = 64  # of one request
MOST_ALTERNATIVES = 20
MOST_STOPS, LONGEST_STOP = 16, 256

Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = list[int]


class RequestError(Exception):
    """A request that cannot be answered: status, sentence, and what of it is wrong."""

    def __init__(self, status: int, message: str, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param}
        return {"error": {**error, "code": self.code or None}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Completion(BaseModel):
    """A request; numbers are checked here, what depends on the run in `texts`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str | list[str] | Ids | list[Ids] = ""
    max_tokens: int | None = Field(16, ge=1, le=MOST_TOKENS)
    temperature: Number | None = Field(1.0, ge=0)
    top_p: Number | None = Field(1.0, ge=0, le=1)
    n: int | None = Field(1, ge=1, le=MOST_TEXTS)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool | None = False
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    user: str | None = None  # a note of the client's to itself
    top_k: int = Field(0, ge=0)
    repetition_penalty: Number = Field(1.0, gt=0)
    show_context: bool = False
    # Of the protocol, and only as far as they ask for nothing.
    best_of: int | None = None
    frequency_penalty: Number | None = 0.0
    presence_penalty: Number | None = 0.0
    logit_bias: dict[str, Number] | None = None
    suffix: str | None = None

    def refuse_what_is_not_done(self) -> None:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias", "suffix"):
            if getattr(self, name):
                instead = ": use repetition_penalty" if name.endswith("penalty") else ""
                raise RequestError(400, f"{name} is not supported here{instead}", param=name)
        if self.best_of not in (None, self.n):
            raise RequestError(
                400, "best_of is not supported here: ask for n texts", param="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise RequestError(400, "echo with logprobs is not supported here: leave one out",
                          param="echo")  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
            raise RequestError(400, f"stop takes at most {MOST_STOPS} texts of {LONGEST_STOP} "
                          "characters each", param="stop")  # fmt: skip
        return tuple(stop for stop in stops if stop)

    def prompts(self) -> list[str] | list[Ids]:
        """One a text; no prompt at all is an empty one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            return [""]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def texts(self, tokenizer: Tokenizer, context: int) -> list[Wanted]:
        """What is to be written: n texts for each prompt, in that order."""
        count = self.n or 1
        prompts = self.prompts()
        if len(prompts) * count > MOST_TEXTS:
            raise RequestError(400, f"a request may ask for {MOST_TEXTS} texts, not for "
                          f"{len(prompts)} prompts times n = {count}", param="n")  # fmt: skip
        seed = secrets.randbits(32) if self.seed is None else self.seed
        try:
            sampling = Sampling(
                temperature=_or(self.temperature, 1.0),
                top_k=self.top_k,
                top_p=_or(self.top_p, 1.0),
                repetition_penalty=self.repetition_penalty,
                seed=seed,
            )
        except ConfigError as error:
            raise RequestError(400, str(error)) from None
        tokens = MOST_TOKENS if self.max_tokens is None else self.max_tokens
        wanted = []
        for prompt in prompts:
            ids = read_prompt(prompt, tokenizer, context)
            for number in range(count):
                wanted.append(
                    Wanted(ids, tokens, sampling.of_sample(number), self.stops, self.logprobs)
                )
        return wanted


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def parse(found: Any) -> Completion:
    """The request in a JSON object, or a sentence on the first thing that is wrong with it."""
    try:
        asked = Completion.model_validate(found)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
    else:
        asked.refuse_what_is_not_done()
        return asked
    if not first["loc"]:
        raise RequestError(400, "the body must be a JSON object with model and prompt")
    name = str(first["loc"][0])[:60]
    name = name if name.isidentifier() else ascii(name)
    said = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "extra_forbidden":
        said = "it is not known here"
    elif first["type"] == "missing":
        said = "it is missing"
    elif name == "prompt":
        said = "it is a text, a list of texts, or the same in token ids"
    raise RequestError(400, f"{name}: {said}", param=name)


def read_prompt(prompt: str | Ids, tokenizer: Tokenizer, context: int) -> list[int]:
    """Its ids, if they fit the context with room for an answer."""
    too_long = f"and the context holds {context:,} tokens: shorten it"
    if isinstance(prompt, str):
        # Before encoding, which takes time: no token is longer than the longest.
        longest = max(map(len, tokenizer.tokens))
        if len(prompt.replace(END_OF_TEXT, "")) > longest * context:
            size = f"{len(prompt):,} characters"
            raise RequestError(400, f"the prompt has {size} {too_long}", TOO_LONG, "prompt")
        try:
            ids = prompt_ids(tokenizer, prompt)
        except SpeedrunError as error:
            raise RequestError(400, str(error), param="prompt") from None
    else:
        ids = prompt or [tokenizer.eot]
        if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise RequestError(
                400, f"token ids are 0 to {tokenizer.vocab_size - 1}", param="prompt"
            )
    if len(ids) >= context:
        size = f"{len(ids):,} tokens"
        raise RequestError(400, f"the prompt has {size} {too_long}", TOO_LONG, "prompt")
    return ids


class Answer:
    """Makes the objects of an answer."""

    def __init__(self, asked: Completion, tokenizer: Tokenizer) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(
        self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None
    ) -> dict[str, Any]:
        made = {**self._head, "choices": choices}
        return made if usage is None else {**made, "usage": usage}

    def choice(
        self, index: int, pieces: Sequence[Piece], before: str = "", context: Any = None
    ) -> dict[str, Any]:
        """Pieces of one text as they came, with what they end in; `before`: an echoed prompt."""
        made: dict[str, Any] = {
            "index": index,
            "text": before + "".join(piece.text for piece in pieces),
            "logprobs": self._odds(pieces),
            "finish_reason": pieces[-1].finish if pieces else None,
        }
        return made if context is None else {**made, "context": context}

    def usage(self, wanted: Sequence[Wanted], written: int) -> dict[str, int]:
        read = sum(len(one.ids) for one in wanted[:: self._asked.n or 1])
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def context(self, ids: Sequence[int], sight: Sight) -> dict[str, Any]:
        """Every token of a text, and which of them the last one saw when it was drawn."""
        return {
            "ids": [*ids],
            "bytes": [[*self._tokenizer.tokens[token]] for token in ids],
            "first_seen": sight.first,
            "first_remembered": sight.read_from,
            "documents": sight.documents,
        }

    def _odds(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._asked.logprobs is None or not pieces:
            return None
        return {
            "tokens": [self.name(piece.token) for piece in pieces],
            "token_logprobs": [piece.log_probability for piece in pieces],
            "top_logprobs": [
                {self.name(token): odds for token, odds in piece.alternatives} for piece in pieces
            ],
            "text_offset": [piece.offset for piece in pieces],
            "ids": [piece.token for piece in pieces],
            "bytes": [[*self._tokenizer.tokens[piece.token]] for piece in pieces],
        }

    def name(self, token: int) -> str:
        """A token as text; one that is part of a character as its bytes."""
        if token == self._tokenizer.eot:
            return END_OF_TEXT
        data = self._tokenizer.tokens[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)
