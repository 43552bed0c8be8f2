"""Run by test_openai.py where the real `openai` package is: an address in, JSON out."""

import asyncio
import json
import sys
from typing import Any

import openai


def told(call: Any) -> dict[str, Any]:
    """What a client is told of a request that is refused."""
    try:
        call()
    except openai.APIStatusError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "said": str(error)}
    return {}


def main(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "one", "prompt": "1 + ", "max_tokens": 20, "seed": 3}
    whole = client.completions.create(**ask, n=2, logprobs=2, stop=["7"])
    parts = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for part in parts:
        text += "".join(choice.text for choice in part.choices)
        usage = part.usage or usage
    more = client.completions.create(
        **ask, temperature=0.7, extra_body={"top_k": 5, "repetition_penalty": 1.2}
    )

    async def many() -> list[str]:
        """As many at once as the package's own pool of connections allows."""
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as several:
            made = [several.completions.create(**{**ask, "seed": seed}) for seed in range(200)]
            return [one.choices[0].text for one in await asyncio.gather(*made)]

    found = {
        "version": openai.__version__,
        "models": [model.id for model in client.models.list()],
        "whole": whole.model_dump(),
        "streamed": text,
        "usage": usage.model_dump() if usage else None,
        "more": more.choices[0].text,
        "many": asyncio.run(many()),
        "no model": told(lambda: client.completions.create(**{**ask, "model": "none"})),
        "too many": told(lambda: client.completions.create(**{**ask, "max_tokens": 10**6})),
        "chat": told(lambda: client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "hello"}])),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
