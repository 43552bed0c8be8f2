"""lm-evaluation-harness on an exported folder; run by the Python of a clean environment.

Arguments: the folder, a folder with task files, and names of tasks. Prints what the harness found,
and its samples, as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, tasks, *names = sys.argv[1:]
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "trust_remote_code": True, "dtype": "float32"},
        tasks=names,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = {
        name: [(row["doc_id"], row["resps"]) for row in rows]
        for name, rows in found["samples"].items()
    }
    print("\n" + json.dumps({"results": found["results"], "samples": samples}, default=str))
