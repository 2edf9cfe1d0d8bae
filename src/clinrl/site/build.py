"""`clinrl site`: write all pages into one folder, which a browser opens from disk without a server or a network.

Nothing is computed here that a report does not hold already. Equal files of the checkout give equal bytes.
"""

import base64
import gzip
import posixpath
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from clinrl import paths
from clinrl.analysis.compared import Compared
from clinrl.analysis.run import Run
from clinrl.artifacts import canonical_json, replaced, sha256_file
from clinrl.config.params import Params
from clinrl.errors import ArtefactError, Refused, echo
from clinrl.release import audit_log
from clinrl.reports import numbers, results
from clinrl.reports.render import environment, load
from clinrl.runtime.progress import progress
from clinrl.site import answers, charts, markdown, tree, versions
from clinrl.site.answers import Shown
from clinrl.site.standing import MEANS, History, Standing, standing
from clinrl.site.tree import Node
from clinrl.site.versions import Exam
from clinrl.tasks.base import get_task

if TYPE_CHECKING:
    from jinja2 import Environment

LIMIT_MB, MODEL_MB, PAGES_MB = 20, 0.15, 0.08
"""Largest size of the folder: of the whole, or for each model where that is more; and what a model takes without its
answers."""
FULL_LINES = 1000
"""The number of the audit log's lines that are shown in full: those of many years would exceed the limit."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Copied:
    """A file of the checkout that was copied into the site."""

    url: str
    sha256: str


@dataclass
class Site:
    """The records behind the pages, and the folder that the pages are written to."""

    params: Params
    folder: Path
    most: int
    """Most right answers that are shown of a model in each mode."""
    targets: dict[str, str] = field(default_factory=dict)
    """File of the checkout to its URL in the site."""
    entries: list[tuple[str, str, str]] = field(default_factory=list)
    """For the search: title, URL and text."""
    size: int = 0

    @cached_property
    def names(self) -> list[str]:
        """Every model that has a page: bases, versions, merges."""
        return [*self.params.roots, *self.params.versions, *self.params.merges.all]

    @property
    def limit_mb(self) -> float:
        """The largest size of the folder."""
        return max(LIMIT_MB, MODEL_MB * len(self.names))

    @cached_property
    def exams(self) -> dict[str, Exam]:
        """The exam reports of each model."""
        return {name: versions.examined(self.params, name) for name in self.names}

    @cached_property
    def compared(self) -> dict[str, Compared]:
        """The comparisons that have a report and pages."""
        made = {name: get_task(spec.task) for name, spec in self.params.comparisons.items()
                if _is_compared(name)}  # fmt: skip
        return {
            name: load(paths.comparison_report(name), task, self.params.modes, Compared) for name, task in made.items()
        }

    @cached_property
    def log(self) -> tuple[list[audit_log.Entry], str]:
        """The entries of the audit log, and why it cannot be trusted; no entries if it cannot."""
        try:
            return audit_log.lines(self.params), ""
        except Refused as refused:
            return [], str(refused)

    @cached_property
    def standings(self) -> dict[str, Standing]:
        """Each model's state at its gate."""
        history = History(*self.log)
        return {
            name: standing(self.params, self.params.model(name), exam.reports, exam.agreement, history)
            for name, exam in self.exams.items()
        }

    @cached_property
    def rows(self) -> dict[str, list[Node]]:
        """The rows of each task's tree."""
        return {task: tree.nodes(self.params, task) for task in self.params.bases}

    @cached_property
    def colours(self) -> dict[str, charts.Styles]:
        """Task to the style of each name, which is the same in all figures of the task."""
        found = {}
        for task in self.params.bases:
            histories = [exam.history for name, exam in self.exams.items() if self.params.model(name).task.name == task]
            rows = [arm for name, spec in self.params.comparisons.items() if spec.task == task for arm in spec.arms]
            modes = list(self.params.modes)
            found[task] = charts.styles(versions.names_in(get_task(task), modes, histories, rows))
        return found

    def modes(self, task: str) -> dict[str, int]:
        """The index of each mode's colour in the palette."""
        return {mode: self.colours[task][mode][0] for mode in self.params.modes}

    def text(self, url: str, content: str) -> None:
        """Write a file of the site."""
        target = self.folder / url
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
        self.size += len(content.encode())

    def page(self, url: str, template: str, title: str, **records: Any) -> None:
        """Write a page from its template."""
        root = "../" * url.count("/")
        self.text(url, _environment().get_template(f"{template}.html.j2").render(
            title=title, root=root, url=url, site=self, **records
        ))  # fmt: skip

    def file(self, path: Path | None) -> Copied | None:
        """A file of the checkout, copied into the site; None if it is not here."""
        if path is None or not path.is_file():
            return None
        url = f"files/{path.as_posix()}"
        if not (self.folder / url).exists():
            (self.folder / url).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.folder / url)
            self.size += path.stat().st_size
        return Copied(url, sha256_file(path))

    def figure(self, **records: Any) -> Markup:
        """A figure as HTML, to be placed in a text."""
        return Markup(_environment().get_template("figure.html.j2").render(records))


def stage(params: Params, *, out: Path | None = None, most: int = 200) -> None:
    """Write the site into a folder, and print the path of its first page.

    `most` right answers of each model and mode are shown, beside all wrong ones. Raises ParamsError for a folder that
    something else made, and ArtefactError for graded answers that were altered, or where the folder would be too large.
    """
    target, start = out or paths.SITE, time.monotonic()
    with replaced(target, "clinrl site") as folder:
        site = Site(params, folder, most)
        with progress("Pages", len(site.names) + len(site.compared) + 3) as advance:
            write(site, advance)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size > site.limit_mb * 1e6:
            raise ArtefactError(
                f"the site would be {size / 1e6:.0f} MB, more than {site.limit_mb:.0f}; show fewer answers with "
                "`--answers`"
            )
    print(target / "index.html")
    echo(f"{size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s; it opens in a browser")


def write(site: Site, advance: Callable[..., None]) -> None:
    """Write all pages, and the files that they load."""
    for path in sorted((HERE / "static").iterdir()):
        site.text(path.name, path.read_text(encoding="utf-8"))
    site.text(
        "style.css", _environment().get_template("style.css.j2").render(colours=charts.COLOURS, dashes=charts.DASHES)
    )
    found = {path: _url(path) for path in markdown.files()}
    site.targets |= {path.as_posix(): url for path, url in found.items()}
    for picture in sorted(Path("docs/images").glob("*.svg")):
        if copied := site.file(picture):
            site.targets[picture.as_posix()] = copied.url
    pages = {path: _read(site, path, url) for path, url in found.items()}
    advance()
    for path, url in found.items():
        name = path.stem if path.parent == paths.comparison_pages("") else ""
        site.page(
            url,
            "text",
            pages[path].title,
            page=pages[path],
            source=path.as_posix(),
            compared=site.compared.get(name),
            registered=site.file(paths.preregistration(name)) if name else None,
        )
        site.entries += [(f"{pages[path].title}: {heading}" if heading != pages[path].title else heading,
                          f"{url}#{anchor}" if anchor else url, text)
                         for anchor, heading, text in pages[path].sections if heading]  # fmt: skip
    advance(len(site.compared))
    shown = dict(_answers(site))
    for name in site.names:
        _version(site, name, shown.get(name))
        advance()
    lines, unbelieved = site.log
    site.page("audit-log.html", "log", "Audit log", lines=lines, unbelieved=unbelieved, full=FULL_LINES)
    site.entries += [
        (f"Audit log: {line.at} {line.kind}", f"audit-log.html#L{line.digest[:12]}", _words(line))
        for line in lines[-FULL_LINES:]
    ]
    groups = _groups({path: (url, pages[path].title) for path, url in found.items()})
    site.page("docs.html", "docs", "Documentation", groups=groups)
    site.page("comparisons.html", "comparisons", "Comparisons", urls=site.targets, compared=site.compared, titles={
        path.as_posix(): page.title for path, page in pages.items()})  # fmt: skip
    trees = [(task, _tree(site, task)) for task in site.params.bases if any(
        site.exams[name].reports for node in site.rows[task] for name in node.names)]  # fmt: skip
    trees.sort(key=lambda one: -len(one[1].rows))  # the task with most rows first
    site.page("index.html", "index", "Versions", trees=trees, shown=shown, means=MEANS)
    site.page("search.html", "search", "Search")
    site.text("search-index.js", f"clinrl.index={canonical_json(site.entries)}\n")
    advance(2)


def _words(line: audit_log.Entry) -> str:
    """What the search knows of a line of the audit log: its texts, its reasons, and the versions of a rollback."""
    sides = [line.body[side].get("version") for side in ("from", "to") if isinstance(line.body.get(side), dict)]
    parts = (*line.body.values(), *line.body.get("reasons", ()), *sides)
    return " ".join(text for text in parts if isinstance(text, str))


def _is_compared(name: str) -> bool:
    """Whether a comparison has its report and its pages. An interrupted command may have left only some of them."""
    report, tables = paths.comparison_report(name), paths.comparison_pages(name) / "tables.md"
    return all(path.exists() for path in (report, report.with_suffix(".md"), tables))


def _url(path: Path) -> str:
    """The URL of a Markdown file's page in the site."""
    parts = path.with_suffix(".html").parts
    if parts[0] == "data":
        return posixpath.join(*parts[1:])
    return posixpath.join(*parts) if parts[0] == "docs" else f"project/{path.stem.lower()}.html"


def _read(site: Site, path: Path, url: str) -> markdown.Page:
    """The page of a Markdown file. On the page of a comparison its figure is drawn as SVG."""
    pictures = {}
    report = site.compared.get(path.stem) if path.parent == paths.comparison_pages("") else None
    if report is not None:
        task = get_task(report.task)
        rows = [versions.rows_of(task, report, name, site.modes(task.name), name)
                for name in dict.fromkeys([*report.columns[:1], *task.compared, report.quality]) if name]  # fmt: skip
        drawn = [
            (name, axes, {row: [(100 * a, 100 * b) for a, b in zip(*both, strict=True)] for row, both in series})
            for name, axes, series in results.curves(task, report)
        ]
        every = [point for _, _, rows in drawn for points in rows.values() for point in points]
        lines = [
            charts.chart(
                f"Thresholds on probabilities, {name}", f"{across}, % of cases", f"{upward}, % of cases",
                {row: points[1:] for row, points in series.items()}, site.colours[task.name],
                marks={row: points[0] for row, points in series.items()}, beside=every,
            )
            for name, (across, upward), series in drawn
        ]  # fmt: skip
        figure = site.figure(intervals=[row for row in rows if row], charts=lines, modes=site.modes(task.name))
        pictures[path.with_suffix(".png").as_posix()] = figure
    return markdown.read(path, url, site.targets, pictures)


def _answers(site: Site) -> Iterator[tuple[str, Shown]]:
    """Write the answers of every model that has them here, first seeds first, and yield them with the model's name.

    Stops adding models once what is left is needed for the pages of models, and a tenth for what answers share.
    """
    room = 0.9 * site.limit_mb - PAGES_MB * len(site.names)
    first = [node.names[0] for rows in site.rows.values() for node in rows]
    exams: dict[str, list[dict[str, Any]]] = {}
    opened: dict[str, Run] = {}
    for name in dict.fromkeys([*first, *site.names]):
        shown = answers.gather(site.params, name, site.most, opened) if site.size < room * 1e6 else None
        if shown is not None:
            if shown.data:
                site.text(f"answers/data/{name}.js", _packed(name, shown.data))
                exams.setdefault(shown.exam, []).append(shown.cases)
            yield name, shown
    for exam, cases in exams.items():
        site.text(f"answers/data/exam.{exam}.js", _packed(f"exam.{exam}", answers.merged(cases)))


def _packed(name: str, data: Any) -> str:
    """A script that passes data to its page. The data are compressed, since transcripts repeat themselves."""
    packed = base64.b64encode(gzip.compress(canonical_json(data).encode(), mtime=0)).decode()
    return f'clinrl.put("{name}","{packed}")\n'


def _version(site: Site, name: str, shown: Shown | None) -> None:
    """Write the page of a model, and the page of its answers."""
    params, model, exam = site.params, site.params.model(name), site.exams[name]
    task, spec = model.task, site.params.versions.get(name)
    arms = versions.arms(params, site.compared, name)
    url, modes = f"versions/{name}.html", site.modes(model.task.name)
    lineage = versions.lineage(params, model, site.exams)
    for row in lineage:
        row |= {
            "probe": site.file(paths.probe_proof(row["name"])),
            "proof": site.file(paths.data_proof(row["data"])) if row["data"] else None,
        }
    reports = (paths.mine_report, paths.protocol_report, paths.external_report)
    further = [of(name).with_suffix(".md").as_posix() for of in reports]
    site.page(
        url, "version", name, model=model, task=task, spec=spec, exam=exam, standing=site.standings[name], arms=arms,
        means=MEANS, seeds=params.seeds_of(name), shown=shown, modes=modes,
        method=params.profiles[spec.profile].method if spec else model.kind,
        headline=versions.headline(task, exam, arms), beside=versions.beside(task, arms[0], modes) if arms else [],
        baselines=results.rows(list(exam.reports.values())), slices=list(versions.slices(task, exam)),
        confusions={mode: versions.shaded(one.confusion) for mode, one in exam.reports.items()},
        curves=charts.training(exam.history, [*map(str, task.labels)], exam.alarms or (), site.colours[task.name]),
        recipe=versions.difference(params, model), lineage=lineage, present=numbers.present,
        exam_proof=site.file(paths.data_proof(model.exam)),
        tests=results.test_groups(list(exam.reports.values()), exam.between), result=results.paired,
        further=[site.targets[page] for page in further if page in site.targets],
    )  # fmt: skip
    site.page(f"answers/{name}.html", "answers", f"Answers of {name}", name=name, shown=shown, model=model, task=task)
    words = [spec.profile, spec.why] if spec else [model.kind]
    site.entries.append((name, url, " ".join([site.standings[name].state, *words, site.standings[name].says])))


def _tree(site: Site, task: str) -> tree.Tree:
    """The picture of a task's tree, with the compared shares of each row."""
    found, modes = get_task(task), site.modes(task)

    def values(node: Node, measure: str) -> Sequence[charts.Dot]:
        arms = versions.arms(site.params, site.compared, node.names[0])
        drawn: list[charts.Dot] = []
        for mode, report in site.exams[node.names[0]].reports.items():
            mean, own = arms[0].figure(mode, measure) if arms else None, report.metrics.get(measure)
            number, text = (
                (mean, numbers.figure(mean, found, measure, report.n))
                if mean
                else (own, numbers.metric(own, found, measure, report.n))
            )
            if number is None:
                return []
            of = f"{arms[0].name}, mean of {arms[0].seeds} seeds" if mean else node.names[0]
            exam = "" if report.exam == site.params.bases[task].exam else f" on {report.exam}"
            says = f"{of}, {mode}{exam}: {measure} {text}"
            drawn.append(charts.Dot(number.value, number.low, number.high, (), modes[mode], says))
        return drawn

    return tree.layout(task, site.rows[task], list(found.compared), values)


def _groups(pages: Mapping[Path, tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """URL and title of each page of the documentation, and of each page directly in data/reports, by group."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path, (url, title) in pages.items():
        if path.parts[0] != "data":
            group = path.parent.name if len(path.parts) > 2 else "pages" if len(path.parts) > 1 else "project"
            found.setdefault(group, []).append((url, title))
        elif path.parent == Path("data/reports"):
            found.setdefault("reports", []).append((url, title))
    return dict(sorted(found.items(), key=lambda item: ("tutorials", "tasks", "pages").index(item[0])
                       if item[0] in ("tutorials", "tasks", "pages") else 9))  # fmt: skip


def _with_code(sentence: str) -> Markup:
    """A sentence of the command line as HTML, with the parts between backticks as code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(sentence.split("`"))
    )


@cache
def _environment() -> "Environment":
    made = environment(HERE / "templates")
    made.filters["with_code"] = _with_code
    return made
