"""The page's scripts: bundled from modules, out of each other's way, typed as their data is."""

from __future__ import annotations

import json
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from speedrun.config.resolve import resolve
from speedrun.report.page import page_data
from speedrun.report.page.build import render
from speedrun.report.page.bundle import EXPORT, IMPORT, ScriptError, bundle
from speedrun.science.results import Ablation, Race
from tests.report.browser import Browser
from tests.report.made import begun_run, made_config, made_run, made_tuning

ROOT = Path(__file__).parents[2]
STATIC = files("speedrun.report.page") / "static"
TSC = ROOT / "tools/page/node_modules/.bin/tsc"


def bundled(folder: Path, **modules: str) -> str:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return bundle(folder, "page")


def test_modules_run_once_and_after_what_they_import(browser: Browser, tmp_path: Path) -> None:
    script = bundled(
        tmp_path,
        page='import { right } from "./right.js";\nimport { left } from "./left.js";\n'
        'window.said.push("page", right, left);\n',
        left='import {\n  base,\n  Thing,\n} from "./base.js";\nwindow.said.push("left");\n'
        "export const left = base() + new Thing().size;\n",
        right='import { base, later } from "./base.js";\nwindow.said.push("right");\n'
        "export const right = base();\nlater().then((value) => window.said.push(value));\n",
        base='window.said.push("base");\nlet calls = 0;\n'
        "export function base() {\n  calls += 1;\n  return calls;\n}\n"
        "export async function later() {\n  return 7;\n}\n"
        "export class Thing {\n  size = 10;\n}\n",
        unused='window.said.push("unused");\n',
    )
    browser.open("about:blank")
    browser.js(f"window.said = []; {script}")
    assert browser.js("said") == ["base", "right", "left", "page", 1, 12, 7]


def test_equal_names_in_modules_do_not_meet(browser: Browser, tmp_path: Path) -> None:
    script = bundled(
        tmp_path,
        page='import { read } from "./other.js";\nconst secret = "page";\nconst $other = 1;\n'
        "function helper() {\n  return 2;\n}\nwindow.said = [secret, helper(), $other, read()];\n",
        other='import { helper } from "./third.js";\nconst secret = "other";\n'
        "export const read = () => secret + helper();\n",
        third="export const helper = () => 3;\n",
    )
    browser.open("about:blank")
    browser.js(script)
    assert browser.js("said") == ["page", 2, 1, "other3"]
    assert browser.js("typeof secret + typeof helper + typeof $other") == "undefined" * 3


def test_a_mistake_of_sloppy_mode_is_an_error(browser: Browser, tmp_path: Path) -> None:
    browser.open("about:blank")
    script = bundled(tmp_path, page="undeclared = 1;\n")
    said = browser.js(f"try {{ {script} }} catch (error) {{ window.said = error.name; }} said")
    assert said == "ReferenceError"


def test_a_circle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"in a circle: a -> b -> a$"):
        bundled(
            tmp_path,
            page='import { a } from "./a.js";\na();\n',
            a='import { b } from "./b.js";\nexport const a = () => b;\n',
            b='import { a } from "./a.js";\nexport const b = () => a;\n',
        )


def test_an_unknown_module_or_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"^there is no other\.js, which page needs$"):
        bundled(tmp_path, page='import { a } from "./other.js";\n')
    with pytest.raises(ScriptError, match=r"^other\.js exports no hidden, which page\.js imports$"):
        bundled(
            tmp_path,
            page='import { a, hidden } from "./other.js";\n',
            other="export const a = 1;\nconst hidden = 2;\n",
        )
    with pytest.raises(ScriptError, match=r"^there is no nowhere\.js, which the page needs$"):
        bundle(tmp_path, "nowhere")


@pytest.mark.parametrize(
    "line",
    [
        'import "./other.js";',
        'import other from "./other.js";',
        'import * as other from "./other.js";',
        'import { a as b } from "./other.js";',
        "import { a } from './other.js';",
        'import { a } from "./other.js"',
        'import { a } from "../other.js";',
        'import { a } from "https://example.org/other.js";',
        '  import { a } from "./other.js";',
        'const other = await import("./other.js");',
        "const here = import.meta.url;",
        "export default 1;",
        "export let changing = 1;",
        "export const { a, b } = other;",
        "export function* many() {}",
        "export { a };",
        'export * from "./other.js";',
        "a(); export const b = 1;",
        'const text = "what others import";',
    ],
)
def test_syntax_the_bundler_does_not_know_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ScriptError, match=r"^page\.js: the bundler does not know"):
        bundled(tmp_path, page=f"{line}\n", other="export const a = 1;\n")


def test_two_lists_from_one_module_are_refused(tmp_path: Path) -> None:
    line = 'import { a } from "./other.js";\n'
    with pytest.raises(ScriptError, match="twice"):
        bundled(tmp_path, page=2 * line, other="export const a = 1;\n")


@pytest.mark.parametrize("text", ["</script>", "</SCRIPT ", "<!--", "<script>"])
def test_a_script_cannot_leave_its_element(tmp_path: Path, text: str) -> None:
    with pytest.raises(ScriptError, match="HTML would read as markup"):
        bundled(tmp_path, page=f'const text = "{text}";\n')


def test_every_script_and_every_export_is_used() -> None:
    texts = {
        Path(file.name).stem: file.read_text(encoding="utf-8")
        for file in STATIC.iterdir()
        if file.name.endswith(".js")
    }
    script = bundle(STATIC, "page")
    assert {name for name in texts if f"const ${name} = " in script} == set(texts)
    exported = {(name, export) for name, text in texts.items() for export in EXPORT.findall(text)}
    imported = {
        (source, one.strip())
        for text in texts.values()
        for names, source in IMPORT.findall(text)
        for one in names.split(",")
    }
    assert exported == imported


def test_the_page_leaves_no_globals(browser: Browser, tmp_path: Path) -> None:
    page = render(page_data([made_run(tmp_path / "run", made_config())]))
    before, script = page.rsplit("<script>", 1)
    bare, whole = tmp_path / "bare.html", tmp_path / "whole.html"
    bare.write_text(before + script.partition("</script>")[2])
    whole.write_text(page)
    browser.open(bare.as_uri())
    names = browser.js("Object.keys(window)")
    assert browser.js("document.querySelectorAll('section').length") == 0
    browser.open(whole.as_uri())
    assert browser.js("document.querySelectorAll('section').length") > 0
    assert browser.js("Object.keys(window)") == names
    assert browser.call("Runtime.globalLexicalScopeNames") == {"names": []}


def test_a_run_that_has_not_begun_has_no_rate(browser: Browser, tmp_path: Path) -> None:
    begun = made_run(tmp_path / "begun", made_config())
    waiting = begun_run(tmp_path / "waiting", made_config(recipe="later"))
    (tmp_path / "page.html").write_text(render(page_data([begun, waiting])))
    browser.open((tmp_path / "page.html").as_uri())
    rows = "[...document.querySelectorAll('#throughput tbody tr')]"
    assert browser.js(f"{rows}.map(r => r.cells[0].textContent + r.cells[1].textContent)") == [
        "modern16,384",
        "later–",
    ]
    assert "NaN" not in browser.js("document.querySelector('main').textContent")


@pytest.mark.skipif(
    not TSC.exists(),
    reason="NOT TESTED: types of the page's data; `make lint` installs the checker",
)
def test_the_data_is_what_its_types_say(tmp_path: Path) -> None:
    window = ("attention.window=blocks", "attention.window_start=128", "attention.window_end=512")
    runs = [
        made_run(tmp_path / "plain", made_config()),
        made_run(tmp_path / "record", resolve("record-16", "small", ["train.steps=250"]).config),
        made_run(tmp_path / "window", made_config(*window, "attention.documents=true")),
    ]
    entries = [
        {"recipe": recipe, "seed": seed, "tokens_to_target": tokens, "val_loss": 3.0}
        for recipe, seed, tokens in (("a", 0, 100), ("a", 1, 120), ("b", 0, None), ("c", 0, 50))
    ]
    effects = [
        {"switch": "x", "effect": 0.1, "low": 0.0, "high": 0.2, "p": 0.01, "n": 3},
        {"switch": "y", "effect": None, "metric": "tokens_to_target", "n": 1, "of": 3},
    ]
    race = Race.model_validate({"target": 4.0, "entries": entries, "command": "speedrun race a b"})
    ablation = Ablation.model_validate(
        {"recipe": "modern", "effects": effects, "settings": {"x": ["model.x=1"]}}
    )
    pages = [
        page_data([]), page_data(runs), page_data(runs[:1], race), page_data([], race, ablation),
        page_data([], tuning=made_tuning()),
    ]  # fmt: skip
    assert pages[1]["published"]
    file = tmp_path / "data.ts"
    file.write_text(
        "".join(f"const page{i}: PageData = {json.dumps(page)};\n" for i, page in enumerate(pages))
    )
    options = ("--noEmit", "--strict", "--target", "ES2022")
    types = ROOT / "tools/page/types.d.ts"
    found = subprocess.run([TSC, *options, types, file], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[:2000]


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((ROOT / "tools/page/package-lock.json").read_text())
    packages = [package for name, package in lock["packages"].items() if name]
    assert all("integrity" in package and "resolved" not in package for package in packages)
    assert len(packages) > 4
