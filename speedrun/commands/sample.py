"""`speedrun sample`: text from a trained run, as it is drawn."""

from __future__ import annotations

from pathlib import Path


def sample_command(
    run: Path, *, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """Print the prompt and what follows; gives both."""
    import torch

    from speedrun.hardware import cores
    from speedrun.serve.sample import generate, load_run

    torch.set_num_threads(cores())
    writer, tokenizer = load_run(run)
    text = prompt
    print(prompt, end="")
    for piece in generate(
        writer, tokenizer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    ):
        text += piece
        print(piece, end="", flush=True)
    print()
    return text
