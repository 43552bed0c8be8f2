"""One self-contained HTML page about runs, a race or an ablation.

Everything the page shows is one JSON object built here and embedded next to the page's own styles
and scripts (`static/`): no network, no framework, opens from disk, prints. Besides run folders it
takes the results of two other verbs, as plain dictionaries; every key marked ? may be missing.

race.json
    kind "race", track?, target?, command?
    recipes?     names in order; ratios are to the first
    entries      list of {recipe, seed, run?, tokens_to_target, steps_to_target?,
                 seconds_to_target, wall_seconds_to_target?, val_loss?}; null: target not reached.
                 `run` is the run's folder, relative to race.json
    statistics?  {recipe: {metric: {n, of?, mean, std, low, high, ratio, ratio_low, ratio_high}}}
                 for metrics named as in entries, n of `of` seeds having the number; computed from
                 the entries where missing. Means over the lucky seeds alone are not shown
ablation.json
    kind "ablation", recipe?, track?, seeds?, command?, alpha?, settings? {switch: [key=value]}
    effects      list of {switch, metric?, effect, low, high, p, p_holm?, n?, more_seeds?, run?};
                 effect is the mean of (switched - recipe) over seeds: above 0, the technique
                 helped. metric is val_loss unless said
    runs?        run folders relative to ablation.json, drawn with the rest
"""

from speedrun.report.page.build import build_page, page_data
from speedrun.report.page.inputs import Inputs, read_inputs

__all__ = ["Inputs", "build_page", "page_data", "read_inputs"]
