"""The site of small checkouts: whole, closed in itself, the same for the same files, and harmless."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import examined
import sites
from clinrl import artifacts, paths
from clinrl.artifacts import read_manifest, seal
from clinrl.cli import main as cli
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, ParamsError
from clinrl.release import audit_log, decisions
from clinrl.site import build, standing
from clinrl.site.answers import gather

pytestmark = pytest.mark.usefixtures("few_draws")

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(1)"> </script> ]]> `${alert(1)}` {{ 7 * 7 }}'
PAGE = f"""# A page {HOSTILE}

<script>alert(2)</script>

See [there](javascript:alert(3)), [the other](other.md#two), [no page](../src/gone.py) and ![a picture](gone.png).

| {HOSTILE} |
| --- |
| <b onclick="alert(4)">x</b> |
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose v1 is champion and whose v3 was refused, with hostile text wherever somebody may write some."""
    folder = tmp_path_factory.mktemp("project")
    examined.copy(examined.registered(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        params = load_params()
        decisions.decide(params, "v3")
        examined.promote(params, "v1", "Ada Lovelace", decisions.decide(params, "v1"))
        text = Path("params.yaml").read_text(encoding="utf-8")
        Path("params.yaml").write_text(text.replace("    seed: 2\n", f"    seed: 2\n    why: {json.dumps(HOSTILE)}\n"))
        rewrite("v2", f"{HOSTILE}\u2028")
        Path("docs").mkdir()
        Path("docs/index.md").write_text(PAGE, encoding="utf-8")
        Path("docs/other.md").write_text("# Other\n\n## Two\n\nNothing.\n", encoding="utf-8")
    return folder


def test_answers_of_who_learned_from_records_are_counted_and_not_shown(project, monkeypatch):
    monkeypatch.chdir(project)
    params = load_params()
    monkeypatch.setattr(Params, "records_of", lambda self, *names: "training" if names == ("v1",) else "none")
    shown = {name: gather(params, name, 5, {}) for name in ("v1", "v3", "esi-base")}
    assert [shown[name].imported for name in shown] == [True, False, False]
    assert (shown["v1"].data, shown["v1"].cases) == ({}, {})
    assert shown["v1"].counts["think"].n == 40


def rewrite(name: str, thinking: str) -> None:
    """Let a model have thought something else before each of its answers, and seal that as it would have been."""
    folder = paths.graded(name)
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            line["transcript"]["messages"][-1]["thinking"] = thinking
        path.write_text("".join(artifacts.canonical_json(line) + "\n" for line in lines), encoding="utf-8")
    seal(folder, **read_manifest(folder).model_dump(exclude={"files"}))


@pytest.fixture
def params(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Params]:
    monkeypatch.chdir(project)
    yield load_params()
    shutil.rmtree("build", ignore_errors=True)


@pytest.fixture
def site(params: Params) -> Path:
    """The site of the project; `v2` is in its params with a hostile reason."""
    build.stage(params, most=3)
    return paths.SITE


@pytest.mark.long
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert not sites.dead(site)
    pages = sites.read(site)
    assert {"index.html", "versions/v1.html", "answers/v2-full.html", "audit-log.html", "search.html"} <= pages.keys()
    for url, page in pages.items():
        assert not [link for link in page.loads if "//" in link], url
        assert "default-src 'none'" in page.policy, url
        assert "unsafe" not in page.policy, url
        assert len(set(page.ids)) == len(page.ids), url


def test_hostile_text_is_text(site: Path) -> None:
    for url, page in sites.read(site).items():
        assert not page.inline, f"{url} holds {page.inline}"
        assert not [link for link in [*page.links, *page.loads] if link.startswith(("javascript", "data"))], url
    assert HOSTILE in "".join(sites.read(site)["versions/v2.html"].text)
    assert "<script>alert(2)</script>" in "".join(sites.read(site)["docs/index.html"].text)
    shown = sites.data(site, "v2")["modes"]["think"]["shown"]
    assert all(["thinks", f"{HOSTILE}\u2028"] in answer["steps"] for answer in shown.values())
    for script in site.glob("*.js"):
        assert "innerHTML" not in script.read_text(encoding="utf-8")


def test_equal_files_give_equal_bytes(site: Path, params: Params) -> None:
    before = {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    build.stage(params, most=3)
    assert {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()} == before


def test_all_wrong_answers_are_shown_and_some_right_ones(site: Path) -> None:
    found = sites.data(site, "v2")
    for mode in found["modes"].values():
        verdicts = mode["verdicts"]
        shown = [verdicts[int(at)] for at in mode["shown"]]
        assert len(verdicts) == 40
        assert sum(verdict != "r" for verdict in shown) == sum(verdict != "r" for verdict in verdicts) > 0
        assert shown.count("r") == 3
    exam = sites.data(site, f"exam.{found['exam']}")
    assert set(exam["requests"]) >= set(found["modes"]["think"]["shown"])
    assert len(exam["cases"]) == 40
    assert [set(values) for values in exam["values"]] == [
        {traits[place] for _, traits in exam["cases"]} for place, _ in enumerate(exam["slices"])
    ]


def test_right_answers_that_parent_or_child_got_wrong_come_first(site: Path) -> None:
    mine = sites.data(site, "v1")["modes"]["think"]
    near = [sites.data(site, name)["modes"]["think"]["verdicts"] for name in ("esi-base", "v2")]
    assert set(mine["verdicts"]) == {"r"}
    assert len(mine["shown"]) == 3
    assert all(any(verdicts[int(at)] != "r" for verdicts in near) for at in mine["shown"])


def test_a_dangerous_answer_is_two_clicks_away(site: Path) -> None:
    """From the first page to the list of such answers, and on to one of them."""
    verdicts = sites.data(site, "v3")["modes"]["think"]["verdicts"]
    page = sites.read(site)["index.html"]
    assert "answers/v3.html#mode=think&verdict=s" in page.links
    assert f"think: {verdicts.count('s')}" in "".join(page.text)
    assert verdicts.count("s") > 0


def test_a_version_on_another_exam_than_the_base_is_shown_with_it(params: Params) -> None:
    bases = {"esi": params.bases["esi"].model_copy(update={"exam": "x9"})}
    build.stage(params.model_copy(update={"bases": bases}), most=0)
    index = (paths.SITE / "index.html").read_text(encoding="utf-8")
    assert ">v1</a>, on x1</th>" in index
    assert "v1, think on x1: exact" in index
    assert "It is x9 where none is named." in index


def test_the_audit_log_and_the_gate_are_told(site: Path) -> None:
    pages = sites.read(site)
    log = "".join(pages["audit-log.html"].text)
    assert "decision" in log
    assert "Ada Lovelace" in log
    for name, state in {"v1": "champion", "v3": "refused", "v2": "open"}.items():
        assert f"{name} {state}" in " ".join("".join(pages[f"versions/{name}.html"].text).split()), name


def test_the_search_knows_what_the_audit_log_and_the_gate_say(site: Path, params: Params) -> None:
    index = json.loads((site / "search-index.js").read_text(encoding="utf-8").removeprefix("clinrl.index="))
    texts = {url: text for _, url, text in index}
    for line in audit_log.lines(params):
        said = texts[f"audit-log.html#L{line.digest[:12]}"]
        assert all(reason in said for reason in line.body.get("reasons", ()))
        assert "Ada Lovelace" in said or "approver" not in line.body
    page = " ".join("".join(sites.read(site)["versions/v3.html"].text).split())
    says = build.Site(params, site, 3).standings["v3"].says
    assert says in texts["versions/v3.html"]
    assert says.replace("`", "") in page


def test_of_a_long_audit_log_the_last_lines_are_shown_in_full_and_each_line_is_read_once(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    digests = standing._digests
    monkeypatch.setattr(standing, "_digests", lambda body: read.append(body) or digests(body))
    monkeypatch.setattr(build, "FULL_LINES", 2)
    build.stage(params, most=3)
    lines = audit_log.lines(params)
    assert read == [line.body for line in lines]
    assert len(lines) == 4
    text = (paths.SITE / "audit-log.html").read_text(encoding="utf-8")
    assert [f'id="L{line.digest[:12]}"' in text for line in lines] == [True] * 4
    assert [f"<code>{line.digest}</code>" in text for line in lines] == [False, False, True, True]
    assert "The last 2 are shown in full" in text
    assert not sites.dead(paths.SITE)


def test_without_graded_answers_the_page_says_what_makes_them(params: Params, tmp_path: Path) -> None:
    hidden = tmp_path / "graded"
    shutil.move("data/graded", hidden)
    try:
        build.stage(params)
        text = "".join(sites.read(paths.SITE)["answers/v1.html"].text)
        assert "dvc repro evaluate@v1" in text
        assert not list(paths.SITE.glob("answers/data/*"))
        assert not sites.dead(paths.SITE)
    finally:
        shutil.move(hidden, "data/graded")


def test_answers_that_were_altered_are_no_page(params: Params) -> None:
    path = paths.graded("v1") / "think.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"ANSWER", b"answer", 1))
    with pytest.raises(ArtefactError, match="was altered"):
        build.stage(params)
    path.write_bytes(before)
    assert not paths.SITE.exists()


def test_a_folder_that_something_else_made_is_left_alone(params: Params, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ParamsError, match="was not made by `clinrl site`"):
        build.stage(params, out=tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_that_is_too_large_is_refused(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIMIT_MB", 0.01)
    monkeypatch.setattr(build, "MODEL_MB", 0.0)
    with pytest.raises(ArtefactError, match="show fewer answers"):
        build.stage(params)


def test_answers_leave_room_for_the_pages_of_every_model(
    params: Params, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written first, and were counted alone: the default was refused where every version had answers."""
    monkeypatch.chdir(project)
    build.stage(params, out=tmp_path / "with")
    assert [*(tmp_path / "with/answers/data").glob("v*.js")]
    monkeypatch.setattr(build, "PAGES_MB", build.LIMIT_MB)
    build.stage(params, out=tmp_path / "without")
    assert not (tmp_path / "without/answers/data").exists()


def test_the_command_prints_where_it_begins(project: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(project)
    assert cli.main(["site", "--out", "build/pages", "--answers", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == "build/pages/index.html\n"
    assert " MB in " in said.err
    assert "r" not in {sites.data(Path("build/pages"), "v2")["modes"]["think"]["verdicts"][int(at)]
                       for at in sites.data(Path("build/pages"), "v2")["modes"]["think"]["shown"]}  # fmt: skip
