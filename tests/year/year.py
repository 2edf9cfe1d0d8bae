"""A year of operation on this machine, and data/reports/year.json: what happened week by week.

A small hospital's project with a Prefect and an MLflow server of its own, and `clinrl serve` with a shadow: patients of
the generator, retrainings every Monday, drafts good and bad, and what goes wrong in a year. Flows are called against
the servers, each in a fork of this process, since a process for each run of a deployment would import for longer than
it works. Nothing of the checkout is touched; the calendar is simulated, and no wait of a person is.
"""

import argparse
import hashlib
import hmac
import json
import os
import re
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "docs", ROOT / "src", ROOT / "tests/flows", ROOT / "tests", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import disk  # noqa: E402
import httpx  # noqa: E402
import people  # noqa: E402
import timeline  # noqa: E402
import world  # noqa: E402

import forks  # noqa: E402
import serve  # noqa: E402
from clinrl import paths  # noqa: E402
from clinrl.artifacts import write_json, write_text  # noqa: E402
from clinrl.cli.main import main as clinrl  # noqa: E402
from clinrl.config.params import load_params  # noqa: E402
from clinrl.errors import GateError, Refused  # noqa: E402
from clinrl.evaluation.answers import load_report  # noqa: E402
from clinrl.pipeline import propose  # noqa: E402
from clinrl.registry import versions  # noqa: E402
from clinrl.release import audit_log  # noqa: E402
from clinrl.release.standing import check_servable  # noqa: E402
from clinrl.runtime import child, determinism, starter  # noqa: E402
from clinrl.runtime.forkserver import Fork  # noqa: E402
from clinrl.runtime.guard import listen  # noqa: E402
from clinrl.signing import keys  # noqa: E402
from clinrl.tasks.base import get_task  # noqa: E402
from clinrl.types import Message, Transcript  # noqa: E402
from clinrl.watching import counts, standing, store  # noqa: E402
from flows import credentials, servers  # noqa: E402
from processes import free_port  # noqa: E402

REPORT = ROOT / "data/reports/year.json"
SEED = 2026
EVERY = "0.9999999999"
"""The share of answers that get one in shadow: a share is below 1, and this one is above any answer's number."""
LIMIT_S = servers.STARTUP_S = 1800.0
"""Seconds after which something hangs."""
UNUSED = ("SCHEDULER", "LATE_RUNS", "FOREMAN", "TRIGGERS")
"""What a Prefect server does besides, again and again, and nobody needs who starts runs by himself."""
NEEDED = (
    *forks.DVC_NEEDS, "great_expectations", "mlflow.store.tracking.rest_store",
    "mlflow.store.model_registry.rest_store",
    "prefect.flow_runs", "sklearn.linear_model", "sklearn.feature_extraction.text", "statsmodels.stats.proportion",
    "statsmodels.stats.contingency_tables", "torch", "flows.retrain", "flows.watch",
    "clinrl.evaluation.evaluate", "clinrl.cli.operate", "clinrl.watching.labels", "clinrl.registry.log_run",
)  # fmt: skip
"""What flows and commands import, so that their forks find it."""
EPILOG = """examples:
  python tests/year/year.py
  python tests/year/year.py --weeks 4 --seed 7 --out /tmp/year.json

Exit code 0: every promise of the year was kept; 1: one was not, and the last lines say which.
Ctrl-C or SIGTERM ends it; the report then has the weeks that are over. Each run begins anew."""


class Answer(NamedTuple):
    """What the champion said to a request."""

    request: world.Request
    ident: str
    version: str
    level: int
    """0 if it cannot be read."""


class Hospital:
    """The checkout, its servers, and what goes on in them. The working directory is the checkout."""

    def __init__(self, scratch: Path, seed: int, stack: ExitStack, *, is_toy: bool) -> None:
        self.is_toy, self.seed, self.stack, self.ada = is_toy, seed, stack, people.signer_in(scratch / "ada")
        self.calendar, self.log, self.results = (scratch / name for name in ("today", "year.log", "results"))
        self.uncounted = scratch / serve.UNCOUNTED
        self.calendar.write_text(str(world.day(1)), encoding="ascii")
        self.results.mkdir()
        self.log.touch()
        store.today = lambda: int(self.calendar.read_text(encoding="ascii"))
        self.kept = credentials.load_credentials()
        self.ports = {"prefect": free_port(), "mlflow": free_port()}
        self.running: dict[str, Any] = {}
        self.api = f"http://{servers.HOST}:{self.ports['prefect']}/api"
        os.environ |= self.kept._asdict() | {
            "PREFECT_API_URL": self.api, "MLFLOW_TRACKING_URI": f"http://{servers.HOST}:{self.ports['mlflow']}",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
            "PREFECT_LOGGING_COLORS": "0",
            **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in UNUSED},
        }  # fmt: skip
        self.serving, self.url, self.misled = None, "", False

    def begin(self, *names: str) -> None:
        """Start servers that do not run, on the ports that they had."""
        for name in [name for name in names if name not in self.running]:
            login = {"prefect": self.kept.PREFECT_API_AUTH_STRING, "mlflow": self.kept.mlflow}[name]
            start = {"prefect": partial(servers.prefect, ui=False), "mlflow": servers.mlflow}[name]
            with listen(servers.HOST, self.ports[name]) as listening:
                server = start(listening, login)
            self.running[name] = server
            self.stack.callback(child.end, server)
            health = self.api if name == "prefect" else os.environ["MLFLOW_TRACKING_URI"]
            servers.wait(name, server, f"{health}/health", login if name == "mlflow" else "")

    def end(self, name: str) -> None:
        """A server is away."""
        child.end(self.running.pop(name), 0.0)

    def serve(self) -> None:
        """Start `clinrl serve` with a shadow of every request."""
        words = [sys.executable, str(HERE / "serve.py"), str(self.calendar), "esi", "--port", "0", "--shadow", EVERY]
        log = self.stack.enter_context(self.log.open("a"))
        self.serving = child.start(words, stdout=-1, stderr=log, env=os.environ | {"PYTHONPATH": f"{ROOT}/src"})
        self.stack.callback(child.end, self.serving)
        assert self.serving.stdout is not None
        self.url = self.serving.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"the champion is not served; {self.log} says why")

    def call(self, program: Callable[[], Any]) -> Any:
        """What a program returns in a fork, whose words go to the log. Raises RuntimeError if it does not end well."""
        ended = forks.fork(program, limit_s=LIMIT_S)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(ended.out + ended.err)
        if ended.code != 0:
            raise RuntimeError(f"a process of the year ended with {ended.code}; {self.log} says why")
        return ended.value

    def retrain(self, *, is_full: bool) -> tuple[Fork, Path]:
        """Begin the scheduled run of Monday, and where its last state will be."""
        out = self.results / "retrain.json"
        out.unlink(missing_ok=True)

        def program() -> int:
            determinism.use_one_thread()
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(log, number)
            if is_full:
                disk.fill(people.CLONE / ".clinrl/checkpoints")
            write_json(out, flow("retrain", "scheduled"))
            return 0

        return Fork(program, partial(starter.die_with, os.getpid())), out

    def ask(self, request: world.Request) -> tuple[str, str, int]:
        """Ask the champion: the id of the answer, the version, and the level; 0 for one that cannot be read."""
        said = (
            httpx.post(f"{self.url}/chat/completions", json=body(request), timeout=300, trust_env=False)
            .raise_for_status()
            .json()
        )
        turn = Message(role="assistant", content=said["choices"][0]["message"]["content"])
        level = get_task("esi").parse(Transcript(messages=(turn,), stop="answered"))
        return said["id"], said["model"], level if isinstance(level, int) else 0

    def traffic(self, week: int, number: int) -> list[Answer]:
        """Ask what is asked in a week, of the versions that the registry names; all of it is counted afterwards."""
        if "mlflow" in self.running:  # else the server goes on with those that it has
            named = self.call(names)
            until(lambda: self.served() == named)
        has_shadow, found = f"esi@{versions.CANDIDATE}" in self.served(), list[Answer]()
        for request in world.requests(week, self.seed, number):
            with suppress(httpx.HTTPError):
                found.append(Answer(request, *self.ask(request)))
        shadows = len(found) if has_shadow else 0
        until(lambda: are_counted([one.ident for one in found], world.day(week), shadows))
        return found

    def served(self) -> set[str]:
        """The names under which somebody can be asked now."""
        return {one["id"] for one in httpx.get(f"{self.url}/models", timeout=60, trust_env=False).json()["data"]}

    @contextmanager
    def asking(self, lost: Counter[str]) -> Iterator[None]:
        """Somebody asks without a pause, until the champion of the block's end is served.

        How often depends on the speed of the machine, so these requests are not counted.
        """
        out, done = self.results / "asking.json", self.results / "done"
        done.unlink(missing_ok=True)
        self.uncounted.touch()
        patients = cycle(world.requests(1, self.seed - 1, 400))

        def program() -> int:
            asked, answered = 0, 0
            while not done.exists():
                asked += 1
                with suppress(httpx.HTTPError):
                    self.ask(next(patients))
                    answered += 1
            write_json(out, {"asked": asked, "lost": asked - answered})
            return 0

        client = Fork(program, partial(starter.die_with, os.getpid()))
        try:
            yield
            until(lambda: self.served() == {f"esi@{versions.CHAMPION}", champion()})
        finally:
            done.touch()
            client.wait(LIMIT_S)
            self.uncounted.unlink()
        lost.update(changes=1, **json.loads(out.read_text()))


def body(request: world.Request) -> dict[str, Any]:
    """What a client sends."""
    from clinrl.tasks.esi.cases import EsiFacts

    turns = get_task("esi").prompt(EsiFacts(narrative=request.text))
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    how = {"enable_thinking": request.is_thinking}
    return {"model": "esi@champion", "messages": messages, "chat_template_kwargs": how}


def flow(module: str, name: str) -> dict[str, Any]:
    """Run a flow about the task to its end, and say how it ended."""
    from flows import runs

    try:
        state = runs.start(getattr(import_module(f"flows.{module}"), name), {"task": "esi"})
    except Refused as refused:
        return {"ended": "Refused", "says": masked(str(refused))}
    return {"ended": state.name, "says": masked(str(state.message or ""))}


def masked(text: str) -> str:
    """A sentence without what is another in each run."""
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", text).replace(str(Path.cwd()), ".")


def champion() -> str:
    """Whom the audit log of the checkout calls champion; empty before the first."""
    lines = [line for line in audit_log.read(paths.AUDIT_LOG, keys.keyring()) if line.kind in ("promotion", "rollback")]
    body = lines[-1].body if lines else {}
    return str(body["to"]["version"] if "to" in body else body.get("version", ""))


def names() -> set[str]:
    """The names that the server should have by the audit log and the registry, as soon as it has looked."""
    found, candidate = {f"esi@{versions.CHAMPION}", champion()}, versions.holder("esi", versions.CANDIDATE)
    with suppress(GateError):
        if candidate is not None:
            check_servable(load_params(), candidate, versions.CANDIDATE)
            found |= {f"esi@{versions.CANDIDATE}", candidate.name}
    return found


def until(is_so: Callable[[], object]) -> Any:
    """Wait for something."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError("something of the year hangs")
        time.sleep(0.3)
    return found


def looked() -> dict[str, Any]:
    """A look of the watch, by its flow, and what it saw."""
    found = flow("watch", "watch")
    if found["ended"] != "Completed":
        return {"ended": found["ended"], "alarms": [], "acted": []}
    entry = next(one for one in versions.entries("esi") if one.name == champion())
    now = standing.standing(load_params(), entry)
    return {"ended": "Completed", "alarms": list(now.alarms), "acted": list(now.raised)}


def given(path: Path, answers: Sequence[tuple[str, int]]) -> int:
    """Hand in a file of labels; the exit code of `clinrl watch labels`."""
    path.write_text("".join(json.dumps({"id": ident, "label": level}) + "\n" for ident, level in answers))
    try:
        return clinrl(["watch", "labels", "esi", str(path)])
    finally:
        path.unlink()


def lived(hospital: Hospital, week: int, lost: Counter[str]) -> dict[str, Any]:
    """One week. Returns what the report says of it."""
    asked = world.ASKED_TOY if hospital.is_toy else world.ASKED
    hospital.calendar.write_text(str(world.day(week)), encoding="ascii")
    away = {server for server in ("prefect", "mlflow") if any(event.says.lower().startswith(server) for event in
            world.events(week) if event.kind == world.AWAY)}  # fmt: skip
    hospital.begin(*({"prefect", "mlflow"} - away))
    for server in away & hospital.running.keys():
        hospital.end(server)
    proposed = [draft for draft in world.DRAFTS if draft.week == week]
    for draft in proposed:
        hospital.call(partial(people.propose_draft, world.toy_draft(draft) if hospital.is_toy else draft))
    seen = len(audit_log.read(paths.AUDIT_LOG, keys.keyring())) if paths.AUDIT_LOG.exists() else 0
    run, out = hospital.retrain(is_full=world.is_so(week, world.DISK))
    login = hospital.kept.PREFECT_API_AUTH_STRING
    waits = until(lambda: run.poll() is not None or ("prefect" not in away and people.paused(hospital.api, login)))
    answers = hospital.traffic(week, asked) if hospital.serving else []
    if waits is True and hospital.serving is None:
        raise RuntimeError(f"the first version was not released: {json.loads(out.read_text())}")
    if isinstance(waits, str):
        with hospital.asking(lost) if hospital.serving is not None else ExitStack():
            hospital.call(partial(people.approve, waits, hospital.ada))
            run.wait(LIMIT_S)
            hospital.call(people.merge)
        if hospital.serving is None:
            hospital.serve()
            answers = hospital.traffic(week, asked)
    run.wait(LIMIT_S)
    hospital.call(people.merge)
    told = [(one.ident, world.label(one.request, week)) for one in answers]
    refused = 0
    if world.is_so(week, world.POISON):
        refused = hospital.call(partial(given, hospital.results / "labels", [(ident, 7) for ident, _ in told]))
    hospital.call(partial(given, hospital.results / "labels", told))
    look, rolled = hospital.call(looked), {}
    if standing.SAFETY in look["alarms"] and standing.SAFETY not in look["acted"]:
        with hospital.asking(lost):
            rolled = hospital.call(partial(flow, "watch", "rollback"))
            people.commit("rolled back")
    if week == world.RESTORED and hospital.misled:
        with hospital.asking(lost):
            hospital.call(people.bring_back)
            people.commit("the labels of last week were poisoned")
    hospital.misled |= bool(rolled) and world.is_so(week, world.POISON)
    critical = [one for one in answers if one.request.level <= 2]
    lines = [line for line in audit_log.read(paths.AUDIT_LOG, keys.keyring())[seen:] if line.kind != "approval"]
    return {
        "week": week, "monday": world.monday(week).isoformat(),
        "events": [{"kind": event.kind, "says": event.says} for event in world.events(week)],
        "proposed": [draft.name for draft in proposed],
        "retraining": json.loads(out.read_text()) if out.exists() else {"ended": "Crashed", "says": ""},
        "asked": asked if hospital.serving else 0, "answered": len(answers),
        "served": dict(sorted(Counter(one.version for one in answers).items())),
        "exact": sum(one.request.level == one.level for one in answers),
        "critical": len(critical), "under": sum(not 1 <= one.level <= one.request.level for one in critical),
        "labels": {"given": len(told), "refused_file": bool(refused)},
        "watch": look, "rollback": rolled, "audit": [said(line) for line in lines], "champion": champion(),
    }  # fmt: skip


def are_counted(idents: Sequence[str], day: int, shadows: int) -> bool:
    """Whether the server has written down that it gave these answers, and so many in shadow on a day."""
    try:
        with closing(sqlite3.connect(f"file:{paths.watched('esi')}?mode=ro", uri=True)) as held:
            salt = next((row[0] for row in held.execute("SELECT salt FROM secret")), b"")
            keys = [hmac.new(salt, ident.encode(), hashlib.sha256).hexdigest() for ident in idents]
            query = f"SELECT count(*) FROM answers WHERE id IN ({', '.join('?' * len(keys))})"
            ((answers,),) = held.execute(query, keys)
            query = "SELECT coalesce(sum(n), 0) FROM counts WHERE day = ? AND instr(feature, ?)"
            ((found,),) = held.execute(query, (day, counts.SHADOW))
            return bool(answers == len(keys) and found == shadows)
    except sqlite3.OperationalError:  # the server makes the file, and its tables, when it first writes
        return False


def said(line: audit_log.Entry) -> dict[str, Any]:
    """A line of the audit log without its digests."""
    held = line.body
    who = held.get("approver", "")
    match line.kind:
        case "decision":
            spent = held.get("budget") or {}
            reasons = [] if held["promote"] else held["reasons"][:1]
            return {"kind": "decision", "version": held["candidate"], "promote": held["promote"],
                    "look": spent.get("number"), "level": spent.get("level"), "left": spent.get("left_after"),
                    "reasons": reasons}  # fmt: skip
        case "rollback":
            return {"kind": "rollback", "version": held["to"]["version"], "from": held["from"]["version"],
                    "approver": who, "beforehand": held.get("beforehand", False)}  # fmt: skip
        case _:
            return {"kind": line.kind, "version": held["version"], "approver": who}


def ended(name: str) -> dict[str, Any]:
    """What became of a draft, and what its exam said."""
    record = propose.Draft.model_validate_json(paths.draft(name).read_bytes())
    reports = {mode: load_report(name, mode).metrics for mode in world.BOTH if paths.report(name).exists()}
    exam = {mode: {metric: found[metric].value for metric in ("exact", "critical_under", "no_parse") if metric in found}
            for mode, found in reports.items()}  # fmt: skip
    return {"outcome": record.outcome, "says_why": masked(record.says), "exam": exam}


def leaks(kept: credentials.Credentials, scratch: Path) -> dict[str, int]:
    """In how many files a patient's words or a secret stand that may not: logs, databases, whatever git holds."""
    secrets = (kept.PREFECT_API_AUTH_STRING.partition(":")[2], kept.MLFLOW_TRACKING_PASSWORD,
               keys.PRIVATE.read_text(encoding="ascii").splitlines()[1])  # fmt: skip
    sown = {"patient": world.CANARY, "prefect": secrets[0], "mlflow": secrets[1], "key": secrets[2]}
    own = (credentials.FILE.name, keys.PRIVATE.name)
    files = [path for path in scratch.rglob("*") if path.is_file() and not path.is_symlink() and path.name not in own]
    contents = [people.objects()]
    for path in files:
        with suppress(FileNotFoundError):  # after an interrupt, a training may still be ending
            contents.append(path.read_bytes())
    return {what: sum(text.encode() in content for content in contents) for what, text in sown.items()}


def promises(weeks: Sequence[dict[str, Any]], drafts: dict[str, Any], lost: Counter[str], found: dict[str, int]) -> Any:
    """The figures that the year is about."""
    lines = [line | {"week": week["week"]} for week in weeks for line in week["audit"]]
    passed = {line["version"] for line in lines if line["kind"] == "decision" and line["promote"]}
    approved = {line["version"] for line in lines if line["kind"] == "promotion" and line["approver"]}
    served = {name for week in weeks for name in week["served"]}
    planted = [draft for draft in world.DRAFTS if draft.is_planted and draft.name in drafts]
    since = {line["version"]: line["week"] for line in lines if line["kind"] == "promotion"}
    back = {line["from"]: line["week"] for line in reversed(lines) if line["kind"] == "rollback"}
    kept_out = [
        draft.name for draft in planted
        if draft.name not in since or back.get(draft.name, 2 * world.WEEKS) - since[draft.name] <= 2
    ]  # fmt: skip
    good = [draft.name for draft in world.DRAFTS if not draft.is_planted and draft.name in drafts]
    return {
        "planted": len(planted), "kept_out_or_rolled_back": len(kept_out),
        "good": len(good), "promoted": len([name for name in good if name in since]),
        "served_without_decision_or_approver": len(served - (passed & approved)),
        "requests": sum(week["asked"] for week in weeks),
        "lost": sum(week["asked"] - week["answered"] for week in weeks),
        "changes_of_champion": lost["changes"], "lost_over_changes": lost["lost"],
        "leaks": sum(found.values()),
    }  # fmt: skip


def is_kept(promised: dict[str, Any]) -> bool:
    """Whether every promise was."""
    zero = ("served_without_decision_or_approver", "lost", "lost_over_changes", "leaks")
    return promised["planted"] == promised["kept_out_or_rolled_back"] and not any(promised[name] for name in zero)


def live(scratch: Path, weeks: int, seed: int, *, is_toy: bool = False) -> dict[str, Any]:
    """The report of so many weeks, lived in an empty folder; an interrupt leaves those that are over."""
    project, lost = scratch / "hospital", Counter[str]()
    project.mkdir()
    (scratch / "alone").write_text("1000", encoding="ascii")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # stages ask for python
    os.environ |= {determinism.RUNNING: str(scratch / "alone"), "GIT_CONFIG_GLOBAL": os.devnull, "PATH": path}
    made = forks.fork(lambda: people.write_project(ROOT, project, people.signer_in(scratch / "ada"), is_toy=is_toy))
    if made.code:
        raise RuntimeError(made.err)
    with ExitStack() as stack, chdir(project):
        servers.configure()
        hospital = Hospital(scratch, seed, stack, is_toy=is_toy)
        for name in NEEDED:
            import_module(name)
        begun, told = time.monotonic(), []
        with suppress(KeyboardInterrupt):
            for week in range(1, weeks + 1):
                told.append(lived(hospital, week, lost))
                left = (time.monotonic() - begun) / week * (weeks - week) / 60
                says = f"{told[-1]['champion']}; {told[-1]['retraining']['ended']}; about {left:.0f} min left"
                print(f"week {week} of {weeks}: {says}", file=sys.stderr, flush=True)
        drafts = {
            draft.name: {"week": draft.week, "says": draft.says, "planted": draft.is_planted, **ended(draft.name)}
            for draft in world.DRAFTS
            if draft.week <= len(told)
        }
        limit = load_params().gates["esi"].limits["critical_under"].max
        assert limit is not None
        stack.close()
        found = leaks(hospital.kept, scratch)
    kept = promises(told, drafts, lost, found)
    report = {"seed": seed, "weeks": told, "drafts": drafts, "leaks": found, "promises": kept}
    return report | {"limit": limit["embedded"], "alpha": world.ALPHA, "is_toy": is_toy}


def main(argv: Sequence[str] | None = None) -> int:
    """Live the year, write the report, and say whether every promise was kept."""
    top = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter)
    top.add_argument("--weeks", type=int, default=world.WEEKS, choices=range(1, world.WEEKS + 1), metavar="N")
    top.add_argument("--seed", type=int, default=SEED)
    top.add_argument("--out", type=Path, default=REPORT)
    top.add_argument("--scratch", type=Path, help="an empty folder that is kept; by default one that is removed")
    top.add_argument("--toy", action="store_true", help="small exams, and trainings of few steps")
    arguments = top.parse_args(argv)
    determinism.pin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = arguments.out.absolute()
    with tempfile.TemporaryDirectory(prefix="year-") as folder:
        scratch = (arguments.scratch or Path(folder)).absolute()
        scratch.mkdir(parents=True, exist_ok=True)
        report = live(scratch, arguments.weeks, arguments.seed, is_toy=arguments.toy)
    write_json(out, report)
    if out != REPORT:  # the page of that one is among the documentation's
        write_text(out.with_suffix(".md"), timeline.page(report, f"{out.stem}.svg"))
        out.with_suffix(".svg").write_bytes(timeline.picture(report))
    for what, number in report["promises"].items():
        print(f"{what.replace('_', ' ')}: {number}")
    print(f"{sum(os.times()[:4]) / 60:.0f} minutes of processor time", file=sys.stderr)
    return 0 if is_kept(report["promises"]) else 1


if __name__ == "__main__":
    sys.exit(main())
