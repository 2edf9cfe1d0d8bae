"""The site of this repository in a browser: whole, under its limits, usable by keyboard, on a phone and in the dark.

Skipped without Chromium. Playwright and axe, which look at accessibility, have an environment of their own.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import clients
import sites
from clinrl.config.params import load_params
from clinrl.site import build
from clinrl.site.answers import Counts, Shown

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = (
    "index.html", "versions/esi-v49.html", "versions/esi-v45c.html", "answers/esi-v49.html", "comparisons.html",
    "reports/comparisons/esi-series.html", "audit-log.html", "docs.html", "docs/configuration.html", "search.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        build.stage(load_params(), out=folder)
    return folder


def test_every_link_of_every_page_leads_somewhere(site: Path) -> None:
    assert not sites.dead(site)
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 20_000_000
    pages = sites.read(site)
    assert {f"versions/{name}.html" for name in load_params(ROOT / "params.yaml").versions} <= pages.keys()
    assert not [link for page in pages.values() for link in page.loads if "//" in link]


def opened(url: str) -> str:
    """The page as it is after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed, so no script can be run")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def test_the_search_finds_a_page(site: Path) -> None:
    text = opened(f"{(site / 'search.html').as_uri()}?q=esi-v49")
    assert re.search(r">[1-9]\d* found\.<", text)
    assert 'href="versions/esi-v49.html"' in text


def test_a_transcript_opens_and_runs_no_script(site: Path) -> None:
    """A made-up answer, since transcripts are not in git."""
    hostile = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    answer = {"steps": [["turn", "1"], ["says", hostile]], "end": "by itself", "parts": [["answer", "2", "4"]],
              "total": -1.0, "terms": [["level", -1.0]]}  # fmt: skip
    modes = {"think": {"verdicts": "sr", "shown": {"0": answer}}}
    data = {"name": "made", "exam": "made", "safety": "errors", "modes": modes}
    exam = {
        "slices": ["rule"],
        "values": [["a", "b"]],
        "cases": [["esi-00", ["a"]], ["esi-01", ["b"]]],
        "requests": {"0": hostile},
    }
    params = load_params(ROOT / "params.yaml")
    model = params.model("esi-v49")
    shown = Shown("made", "made", False, {"think": Counts(2, 1, 1, 0)}, data, exam)
    made = build.Site(params, site, 1)
    made.page("answers/made.html", "answers", "made", name="made", shown=shown, model=model, task=model.task)
    for key, held in {"made": data, "exam.made": exam}.items():
        made.text(f"answers/data/{key}.js", build._packed(key, held))
    text = opened(f"{(site / 'answers/made.html').as_uri()}#mode=think&verdict=s&case=esi-00")
    assert "1 of 2 cases, 1 of them with their transcript." in text
    assert text.count("&lt;img src=x onerror=") == 2
    assert "owned</title>" not in text


LOOKS = """
import json, sys
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
program, scheme, width, *urls = sys.argv[1:]
with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
    page = browser.new_context(viewport={"width": int(width), "height": 900}, color_scheme=scheme).new_page()
    found = {}
    for url in urls:
        page.goto(url, timeout=120_000)
        wider = page.evaluate("Math.max(0, document.documentElement.scrollWidth - innerWidth)")
        violations = Axe().run(page).response["violations"]
        found[url] = [[(one["id"], len(one["nodes"])) for one in violations], wider]
    browser.close()
print(json.dumps(found))
"""
"""What axe finds on each page, and by how many pixels the page is wider than its window."""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 390)])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(site: Path, scheme: str, width: int) -> None:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    tools = clients.client("playwright==1.65.2", "axe-playwright-python==0.1.8")
    urls = [(site / url).as_uri() for url in PAGES]
    looked = json.loads(clients.run(tools, "python", "-c", LOOKS, CHROMIUM, scheme, str(width), *urls))
    assert looked == {url: [[], 0] for url in urls}
