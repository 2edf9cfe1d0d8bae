"""The script of the answers' pages, in Node over a few stubs in place of a browser. Skipped without Node."""

import shutil
import subprocess
from pathlib import Path

import pytest

from clinrl.site import build

NODE = shutil.which("node")
BROWSER = """
class Element {
  constructor() { this.children = []; this.heard = {}; this.dataset = {}; this.childElementCount = 0; }
  setAttribute(name, value) { this[name] = value; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener(what, does) { this.heard[what] = does; }
  get options() { return this.children; }
  get text() { return this.children.map((child) => child.text ?? child).join(" "); }
}
const made = {}, asked = {}, begin = {};
globalThis.location = { hash: "#mode=think" };
globalThis.history = { replaceState() {} };
globalThis.addEventListener = (what, does) => { begin[what] = does; };
globalThis.document = {
  getElementById: (id) => made[id] ??= new Element(),
  createElement: () => new Element(),
};
document.getElementById("filter").dataset = { name: "v1", exam: "x1", others: "slow quick" };
const data = (name, verdicts) => ({ name, exam: "x1", safety: "errors", modes: { think: { verdicts, shown: {} } } });
const exam = { slices: [], values: [], cases: [["case-1", []]], requests: {} };
const ready = { v1: data("v1", "r"), "exam.x1": exam, quick: data("quick", "w") };
"""
RACE = """
clinrl.get = (name) => ready[name] ?? new Promise((resolve) => { asked[name] = resolve; });
const settled = () => new Promise((resolve) => setTimeout(resolve, 20));
(async () => {
  await begin.DOMContentLoaded();
  const beside = made.filter.children.at(-1).children.at(-1);
  for (const name of ["slow", "quick"]) {
    beside.value = name;
    beside.heard.change();
    await settled();
  }
  asked.slow(data("slow", "w"));
  await settled();
  console.log(made.list.text);
})();
"""
MISSING = """
clinrl.get = (name) => name === "v1" ? Promise.reject(new Error("answers/data/v1.js is missing")) : ready[name];
begin.DOMContentLoaded().then(() => console.log(made.count.textContent));
"""
VARIANT = """
const blind = { ...data("blind", "w"), exam: "x1.blind" };
ready["exam.x1"] = { ...exam, requests: { 0: "with evidence" } };
ready["exam.x1.blind"] = { ...exam, requests: { 0: "without evidence" } };
ready["blind"] = blind;
clinrl.get = (name) => ready[name];
document.getElementById("filter").dataset.others = "blind";
(async () => {
  await begin.DOMContentLoaded();
  const beside = made.filter.children.at(-1).children.at(-1);
  beside.value = "blind";
  beside.heard.change();
  await new Promise((resolve) => setTimeout(resolve, 20));
  const box = made.list.children.at(-1);
  Object.assign(box, { open: true, childElementCount: 1 });
  box.heard.toggle();
  console.log(box.text);
})();
"""
OTHER_EXAM = VARIANT.replace(
    '["exam.x1.blind"] = { ...exam,', '["exam.x1.blind"] = { ...exam, cases: [["case-9", []]],'
)
pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed")


def printed(page: str, tmp_path: Path) -> str:
    """What the script of the page prints after a few lines in a browser's place."""
    script = (build.HERE / "static/answers.js").read_text(encoding="utf-8")
    (tmp_path / "page.js").write_text(f"{BROWSER}{script}{page}", encoding="utf-8")
    return subprocess.run([str(NODE), str(tmp_path / "page.js")], capture_output=True, text=True, check=True).stdout


def test_a_version_that_loads_slowly_does_not_replace_one_that_was_chosen_later(tmp_path: Path) -> None:
    said = printed(RACE, tmp_path)
    assert "quick: wrong" in said
    assert "slow" not in said


def test_answers_that_are_not_there_are_said(tmp_path: Path) -> None:
    assert printed(MISSING, tmp_path) == "The answers cannot be shown: answers/data/v1.js is missing.\n"


def test_cases_that_the_other_was_not_asked_are_neither_right_nor_wrong_there(tmp_path: Path) -> None:
    said = printed(OTHER_EXAM.replace("console.log(box.text)", "console.log(made.list.text)"), tmp_path)
    assert "not asked of blind: 1" in said
    assert "wrong here" not in said


def test_two_models_that_see_other_variants_of_a_case_have_a_request_each(tmp_path: Path) -> None:
    said = printed(VARIANT, tmp_path)
    assert said.index("Request with evidence") < said.index("Request to blind without evidence")
