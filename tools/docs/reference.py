"""The pages that are generated from the code, and where each name is explained on them."""

from __future__ import annotations

from functools import cache

from speedrun.cli import app
from speedrun.config.files import built_in, names
from tools.docs import keys, recipes, verbs

VERBS, KEYS, RECIPES, TRACKS = (
    f"reference/{name}.md" for name in ("verbs", "keys", "recipes", "tracks")
)


@cache
def pages() -> dict[str, str]:
    """The text of each page by its place on the site."""
    return {
        VERBS: verbs.page(app),
        KEYS: keys.page(),
        RECIPES: recipes.page("recipe"),
        TRACKS: recipes.page("track"),
    }


@cache
def explained() -> dict[str, str]:
    """The place of every verb, key, recipe and track, as a page and an anchor on it."""
    return {
        **{verb.name: f"{VERBS}#{verb.anchor}" for verb in verbs.verbs(app)},
        **{key: f"{KEYS}#{key}" for part in keys.parts() for key in part.keys},
        **{part.path: f"{KEYS}#{part.path}" for part in keys.parts() if "." in part.path},
        **{name: f"{RECIPES}#{name}" for name in built_in("recipe")},
        **{name: f"{TRACKS}#{name}" for name in names("track")},
    }
