"""The dossier of a version, with the papers that a regulator asks for: a folder of Markdown pages and one HTML page.

It is written from artefacts alone. Every number is looked up by its key in the file that states it, and is cited with
that file's SHA-256; an artefact that was never made is "not done". Equal artefacts give equal bytes. Sources of the
order of the papers: FDA, "Marketing Submission Recommendations for a Predetermined Change Control Plan for Artificial
Intelligence-Enabled Device Software Functions" (December 2024); Regulation (EU) 2024/1689, Annex IV; TRIPOD-LLM
(doi:10.1038/s41591-024-03425-5).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clinrl import paths
from clinrl.artifacts import MANIFEST, identity_of, read_record, write_text
from clinrl.config.files import files_with
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.config.recipes import SftProfile
from clinrl.errors import ArtefactError, ParamsError, echo, format_value
from clinrl.intervals import LEVEL
from clinrl.provenance import bom, lock
from clinrl.provenance.cited import MARK, Cited, Place, Record, leaves, plain
from clinrl.release import audit_log
from clinrl.reports.render import page, render

PAPERS = {
    "README": "Dossier",
    "change-control": "Change control plan",
    "annex-iv": "Technical documentation",
    "tripod-llm": "TRIPOD-LLM",
    "preregistration": "Pre-registration",
}
"""Name of each page to its heading, in the order of the HTML page."""
HTML, NUMBERS = "dossier.html", "numbers.json"


def stage(params: Params, source: Path, name: str, *, out: Path | None = None, check: bool = False) -> int:
    """Write the dossier of a version, or with `check` compare the existing one with its artefacts.

    Returns 1, with a line on stderr, if a file that the dossier calls "not here" went unchecked, else 0. Raises
    ParamsError for an `out` that holds anything but a dossier of this version, and ArtefactError where two artefacts
    state a number differently, where one is not what dvc.lock records, and with `check` for the first number that has
    changed, with file, key and both values.
    """
    folder = out or paths.dossier(name)
    if out and not check and not _is_for(out, name):
        raise ParamsError(f"{folder} holds something else than a dossier of {name}; name another folder with --out")
    cited, texts = make(params, source, name)
    if check:
        _compare(folder, cited.record(name))
    cited.check(_pairs(cited, params, source, name))
    _check_adapters(cited, params, name)
    if paths.AUDIT_LOG.exists():
        audit_log.lines(params)  # raises where a line was altered
    for file, text in sorted(texts.items(), key=lambda named: named[0] != NUMBERS):  # first what says whose it is
        if check:
            _compare_text(folder / file, text)
        else:
            write_text(folder / file, text)
    if not check:
        print("\n".join(str(folder / file) for file in texts))
    if cited.absent:
        echo(
            f"{folder} is not complete: {', '.join(sorted(cited.absent))}, as dvc.lock records it, is not here and was "
            f"not checked; run `dvc repro evaluate@{name}`, or `dvc pull` from a remote, and give this command again"
        )
    return 1 if cited.absent else 0


def make(params: Params, source: Path, name: str) -> tuple[Cited, dict[str, str]]:
    """The values that a dossier cites, and the text of each of its files by name."""
    cited = Cited(lock.read() if lock.LOCK.exists() else {})  # a project that never ran `dvc repro` has none
    context = _context(params, source, params.model(name), cited)
    pages = {paper: render(f"dossier_{paper.replace('-', '_')}", **context) for paper in PAPERS}
    record = cited.record(name)
    sources = {f"S{number}": item for number, item in enumerate(record.files.items(), start=1)}
    texts = {f"{paper}.md": text + _sources(text, sources) for paper, text in pages.items()}
    anchors = "\n" + "".join(f'[{mark}]: #{mark} "{file}"\n' for mark, (file, _) in sources.items())
    html = page(
        {paper: text + anchors for paper, text in pages.items()},
        title=f"Dossier of {name}", headings=PAPERS, sources=sources,
    )  # fmt: skip
    # No line ends within an interval, or between a value and its mark.
    html = re.sub(r"\[(-?[\d.]+), (-?[\d.]+)\], n (\d+)", r"[\1,&nbsp;\2], n&nbsp;\3", html)
    texts[HTML] = html.replace(' <a href="#S', '&nbsp;<a href="#S')
    texts[NUMBERS] = json.dumps(record.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    return cited, texts


def _sources(text: str, sources: Mapping[str, tuple[str, str]]) -> str:
    found = {mark: item for mark, item in sources.items() if mark in set(MARK.findall(text))}
    links = "".join(f"[{mark}]: #sources\n" for mark in found)
    return "\n" + render("dossier_sources", sources=found) + ("\n" + links if found else "")


def _context(params: Params, source: Path, model: Model, cited: Cited) -> dict[str, Any]:
    name, task = model.name, model.task
    lineage = params.lineage(name)
    reports = _reports(params, name)
    first = next(iter(reports.values()))
    reporting = task.reporting
    found = dict.fromkeys([*task.compared, *reporting.headline, *cited.names(first, "metrics")])
    mined = [params.mining[name].data] if name in params.mining else []
    used = list(dict.fromkeys([*(params.versions[version].data for version in lineage), model.exam, *mined]))
    compared = [comparison for comparison, spec in params.comparisons.items() if name in spec.versions]
    registered = [str(paths.preregistration(comparison)) for comparison in compared]
    drafts = sorted(map(str, paths.draft(name).parent.glob("*.json")))
    adapter = cited.look(first, "adapter_digest")

    return {
        "name": name, "task": task, "scale": params.scale, "confidence": f"{LEVEL:.0%}", "papers": PAPERS,
        "compared": model.compared,
        "lineage": lineage, "versions": params.versions, "reports": reports, "first": first,
        "metrics": [metric for metric in found if metric in cited.names(first, "metrics")],
        "data": used, "drawn": not params.imports.keys() & {*used},
        "omitting": [v for v in lineage if isinstance(params.profiles[params.versions[v].profile], SftProfile)],
        "between": str(paths.report(name) / "between_modes.json"),
        "alerts": str(paths.report(name) / "alarms.json"), "probe": str(paths.probe_proof(name)),
        "manifest": str(model.folder / MANIFEST), "base": str(paths.base(task.name) / MANIFEST),
        "seeds": {other: _reports(params, other) for other in params.seeds_of(name)},
        "mining": str(paths.mine_report(name)),
        "external": str(paths.external_report(name)), "protocol": str(paths.protocol_report(name)),
        "comparisons": [str(paths.comparison_report(comparison)) for comparison in compared],
        "rebuilds": sorted(map(str, paths.attestations(name).glob("*.json"))), "bill": bom.FILE,
        "registrations": [file for file in registered if cited.look(file)],
        "plan": _where(cited, source, ("plans", task.name)),
        "drafts": [draft for draft in drafts if cited.look(draft, "task") == task.name],
        "log": str(paths.AUDIT_LOG),
        **{kind: _last(cited, kind, adapter) for kind in ("decision", "promotion", "rollback")},
        "proof": lambda dataset: str(paths.data_proof(dataset)), "text": plain, "look": cited.look,
        "where": lambda *keys: _where(cited, source, keys),
        "show": cited.show, "word": cited.word, "line": cited.line, "names": cited.names, "state": cited.state,
    }  # fmt: skip


def _reports(params: Params, name: str) -> dict[str, str]:
    return {mode: str(paths.report(name) / f"{mode}.json") for mode in params.modes}


def _where(cited: Cited, source: Path, keys: Sequence[str]) -> Place:
    """The parameter file that has an entry of a section (params.yaml if none has it), and the keys of the entry."""
    files = map(str, files_with(source))
    return (next((file for file in files if cited.look(file, *keys[:2]) is not None), str(source)), *keys)


def _last(cited: Cited, kind: str, digest: str | None) -> str | None:
    """Position in the audit log of the last line of a kind about an adapter; None without one. A decision that compares
    a champion with itself shows nothing, so an earlier one counts first."""
    log = str(paths.AUDIT_LOG)
    keys = {"decision": ("candidate_digest",), "promotion": ("digest",), "rollback": ("from", "digest")}[kind]
    lines = [at for at in cited.names(log) if cited.look(log, at, "kind") == kind]
    found = [at for at in reversed(lines) if cited.look(log, at, "body", *keys) == digest]
    others = (at for at in found if cited.look(log, at, "body", "champion_digest") != digest)
    return next(others, found[0] if found else None)


def _pairs(cited: Cited, params: Params, source: Path, name: str) -> Iterator[tuple[Place, Place]]:
    """Pairs of places that must state the same number: in reports, proofs, manifests, parameters and dvc.lock."""
    folder, reports = paths.report(name), _reports(params, name)
    exam, first = params.versions[name].exam, next(iter(reports.values()))
    summary, mined = str(folder / "summary.json"), str(paths.mine_report(name))
    yield (summary, "mode_agreement"), (str(folder / "between_modes.json"), "mode_agreement", "value")
    for mode, report in reports.items():
        yield from (((summary, mode, m), (report, "metrics", m, "value")) for m in cited.names(summary, mode))
        yield from (((first, key), (report, key)) for key in ("adapter_digest", "exam_digest", "n"))
        own = [row for row in cited.names(report, "rows") if cited.look(report, "rows", row, "name") == name]
        for row in own:
            yield from _below(cited, (report, "rows", row, "metrics"), (report, "metrics"))
    yield (first, "exam_digest"), (str(paths.data_proof(exam)), "data", "identity")
    yield (first, "n"), _where(cited, source, ("datasets", exam, "cases"))
    yield (first, "adapter_digest"), (mined, "adapter_digest")
    for version in params.lineage(name):
        block, probe = _where(cited, source, ("versions", version)), str(paths.probe_proof(version))
        proof = str(paths.data_proof(params.versions[version].data))
        recipe = _where(cited, source, ("profiles", params.versions[version].profile))
        manifest = str(paths.adapter(version) / MANIFEST)
        yield (*block, "seed"), (probe, "seed")
        yield (proof, "data", "identity"), (probe, "data", "identity")
        yield (proof, "data", "identity"), (manifest, "inputs", "data")
        yield from (((*block, key), (manifest, "spec", key)) for key in ("parent", "data", "profile", "seed"))
        of_base = (*_where(cited, source, ("bases", params.versions[version].task)), params.scale)  # its own come first
        shape = (*of_base, "lora") if cited.names(*of_base, "lora") else (*recipe, "lora")
        lora = (manifest, "spec", "lora")
        yield from ((one, other) for one, other in _below(cited, shape, lora) if len(other) <= len(lora) + 1)
        targets = [(*shape, "targets", at) for at in cited.names(*shape, "targets")]  # the manifest has them sorted
        targets.sort(key=lambda place: str(cited.look(*place)))
        yield from ((place, (*lora, "targets", str(at))) for at, place in enumerate(targets))
        for key in ("omit", "reward", "stream"):
            yield from _below(cited, (*recipe, key), (manifest, "spec", key))
        yield from _below(cited, (*recipe, "reward"), (probe, "reward"))
        other = cited.names(*of_base, "recipes", recipe[-1])
        trainer = _below(cited, (*recipe, "trainer", params.scale), (manifest, "spec", "trainer"))
        yield from ((one, made) for one, made in trainer if made[3] not in other)
        trained = (str(lock.LOCK), "stages", f"train@{version}", "params")
        for file in cited.names(*trained):
            for key in cited.names(*trained, file):
                yield from _below(cited, (*trained, file, key), (file, *key.split(".")))


def _below(cited: Cited, one: Place, other: Place) -> Iterator[tuple[Place, Place]]:
    """The place of each value below one place, paired with the same keys below the other."""
    yield from (((*one, *keys), (*other, *keys)) for keys, _ in leaves(cited.look(*one) or ()) if keys)


def _check_adapters(cited: Cited, params: Params, name: str) -> None:
    first = next(iter(_reports(params, name).values()))
    stated, folder = cited.look(first, "adapter_digest"), paths.adapter(name)
    if stated and (folder / MANIFEST).exists() and (here := identity_of(folder)) != stated:
        raise ArtefactError(
            f"{first} says {stated!r} at /adapter_digest, but {folder} is {here!r}; run `dvc checkout`, or `dvc repro "
            f"evaluate@{name}`"
        )


def _is_for(folder: Path, name: str) -> bool:
    """Whether a folder is free, or holds a dossier of this version."""
    try:
        return Record.model_validate_json((folder / NUMBERS).read_bytes()).name == name
    except FileNotFoundError:
        return not folder.exists() or not any(folder.iterdir())
    except ValidationError:
        return False


def _compare(folder: Path, now: Record) -> None:
    file = folder / NUMBERS
    where = "" if folder == paths.dossier(now.name) else f" --out {folder}"
    again = f"restore what was altered, or write it again with `clinrl dossier {now.name}{where}`"
    then = read_record(
        file, Record,
        lambda: f"{file} is not here, so there is no dossier to check; {again}",
        lambda fault: f"{file} is no record of a dossier: {fault}; {again}",
    )  # fmt: skip
    found = {(value.file, value.key): value.value for value in now.values}
    for value in then.values:
        if (current := found.get((value.file, value.key))) != value.value:
            raise ArtefactError(
                f"{file} says that {value.file} has {value.value!r} at {value.key}, but it has {current!r}; {again}"
            )
    for path, digest in then.files.items():
        if now.files.get(path) != digest:
            raise ArtefactError(f"{path} is another file than the dossier was written from ({digest[:12]}); {again}")


def _compare_text(file: Path, text: str) -> None:
    current = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, (line, wanted) in enumerate(zip_longest(current, text.splitlines()), start=1):
        if line != wanted:
            texts = f"{format_value(line)}, but its sources say {format_value(wanted)}"
            raise ArtefactError(f"{file}, line {number}, is {texts}; write it again")
