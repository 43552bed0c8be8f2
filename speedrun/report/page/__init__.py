"""One self-contained HTML page about runs, a race, an ablation or a tuning.

Everything the page shows is one JSON object built here and embedded next to the page's own styles
and scripts (`static/`): no network, no framework, opens from disk, prints. Besides run folders it
takes the results of a race, an ablation and a tuning, read by `science/results.py`.
"""

from speedrun.report.page.build import build_page, page_data
from speedrun.report.page.inputs import Inputs, read_inputs

__all__ = ["Inputs", "build_page", "page_data", "read_inputs"]
