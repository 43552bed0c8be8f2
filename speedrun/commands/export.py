"""`speedrun export`: the model of a run as a folder for transformers, or as plain weights."""

from __future__ import annotations

import sys
from pathlib import Path


def export_command(run: Path, out: Path, *, to: str, force: bool) -> None:
    """Write the folder, then say what it is and how it is loaded."""
    import torch

    from speedrun.limits import threads
    from speedrun.serve.export.export import HF, export
    from speedrun.terminal.console import size_text

    torch.set_num_threads(threads())
    done = export(run, out, to, force=force, say=lambda text: print(text, file=sys.stderr))
    print(f"{out}  {done.kind}, {done.parameters:,} parameters, {size_text(done.bytes)}")
    if to == HF:
        trust = ", trust_remote_code=True" if done.own_code else ""
        print("load it where transformers is installed:")
        print("  from transformers import AutoModelForCausalLM, AutoTokenizer")
        for name, auto in (("model", "AutoModelForCausalLM"), ("tokenizer", "AutoTokenizer")):
            print(f"  {name} = {auto}.from_pretrained({str(out)!r}{trust})")
    else:
        print("read NAMES.md there for what each tensor is, and load them:")
        print("  from safetensors.torch import load_file")
        print(f"  tensors = load_file({str(out / 'model.safetensors')!r})")
