"""The real `openai` client, in an environment without our package, against `speedrun serve`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.clean import clean_python, run_clean
from tests.serve.served import serving
from tests.train.heard import Make, train

CHILD = Path(__file__).with_name("openai_child.py")


def test_the_client_package_speaks_to_the_server(tiny: Make, tmp_path: Path) -> None:
    python = clean_python("openai")
    train(tiny(), tmp_path / "one")
    with serving([tmp_path / "one"]) as server:
        found = json.loads(run_clean(python, str(CHILD), server.address, home=tmp_path))
        ask = {"model": "one", "prompt": "1 + ", "max_tokens": 20}
        texts = [
            server.ask(**ask, seed=seed)[1]["choices"][0]["text"] for seed in range(200)
        ]  # fmt: skip
        more = server.ask(**ask, seed=3, temperature=0.7, top_k=5, repetition_penalty=1.2)[1]
        cut = server.ask(**ask, seed=3, n=2, logprobs=2, stop="7")[1]
    assert found["models"] == ["one"]
    assert found["streamed"] == texts[3]
    assert found["usage"]["prompt_tokens"] == 5
    assert found["more"] == more["choices"][0]["text"]
    assert found["many"] == texts, "200 at once, none lost, each by its seed"
    for made, expected in zip(found["whole"]["choices"], cut["choices"], strict=True):
        assert made["text"] == expected["text"]
        assert made["finish_reason"] == expected["finish_reason"]
        assert made["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert made["logprobs"]["top_logprobs"] == expected["logprobs"]["top_logprobs"]
    assert (found["no model"]["kind"], found["no model"]["status"]) == ("NotFoundError", 404)
    assert found["too many"]["kind"] == "BadRequestError"
    assert "max_tokens" in found["too many"]["said"]
    assert "/v1/completions" in found["chat"]["said"]
