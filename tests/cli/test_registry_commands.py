"""The registry's commands: rows for people and scripts, reasons on stderr, and exit codes."""

import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
import examined
import locks
from clinrl import paths
from clinrl.cli.main import main
from clinrl.config.params import load_params
from clinrl.errors import SignatureError
from clinrl.registry import versions
from clinrl.release import audit_log
from clinrl.release.gate import Decision
from clinrl.reports import numbers
from clinrl.signing import approval, keys

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def project(tmp_path, monkeypatch):
    examined.copy(examined.registered(), tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(project, capsys):
    """A function of the words of a command: its exit code, its first table, and what it said on stderr."""

    def run(*words):
        code = main([*words])
        printed = capsys.readouterr()
        header, *lines = [line.split("\t") for line in printed.out.split("\n\n")[0].splitlines()] or [[]]
        return code, [dict(zip(header, line, strict=True)) for line in lines], printed.err

    return run


def test_from_registered_to_champion_and_back(run, capsys):
    code, (row,), _ = run("register", "v1")
    assert (code, row["model"], row["number"], row["version"], row["gate"]) == (0, "esi", "1", "v1", "open")

    code, rows, said = run("decide", "v1")
    assert code == 0
    assert {row["verdict"] for row in rows} == {"passed"}
    assert "all 21 limits hold on 40 cases" in said

    code, (row,), _ = run("promote", "v1", "--approver", "Ada Lovelace")
    assert (code, row["aliases"], row["gate"], row["approver"]) == (0, "champion", "passed", "Ada Lovelace")

    code, rows, _ = run("versions", "esi")
    assert [(row["number"], row["version"]) for row in rows] == [
        ("1", "v1"), ("2", "v2"), ("3", "v3"), ("4", "v1-v2"),
    ]  # fmt: skip

    code, (row,), _ = run("lookup", "esi", "champion")
    assert (code, row["version"]) == (0, "v1")
    assert len(row["digest"]) == 16
    main(["lookup", "esi", "champion", "--json"])
    assert json.loads(capsys.readouterr().out)["digest"] == versions.find("esi", "v1").digest, "what the loader takes"

    for option in ("--from", "--to"):
        code, _, said = run("rollback", "esi", "--approver", "Ada Lovelace", option, "")
        assert (code, "nothing to roll back" in said) == (1, False), "a name that is empty is none"
    code, _, said = run("rollback", "esi", "--approver", "Ada Lovelace")
    assert (code, said) == (1, "clinrl: esi had no champion before v1; there is nothing to roll back to\n")


@pytest.mark.long
def test_an_approval_that_was_made_elsewhere_is_given_as_a_token(run, capsys):
    run("register", "v1")
    _, _, said = run("decide", "v1")
    digest = said.split("clinrl: decision ")[1].split(";")[0]
    token = approval.token(digest, "Ada Lovelace", keys.signer("embedded"))
    code, _, said = run("promote", "v1", "--approver", "Ada Lovelace", f"--token={token[::-1]}")
    assert (code, "no approval of this decision" in said) == (1, True)
    code, (row,), _ = run("promote", "v1", "--approver", "Ada Lovelace", "--token", token)
    assert (code, row["aliases"]) == (0, "champion")


def test_the_audit_file_is_read_again_once_somebody_vouched_for_what_a_revoked_key_signed(run, capsys):
    assert main(["keys", "vouch", "nothing was revoked"]) == 1
    run("decide", "v1")
    former = keys.signer("embedded").key.fingerprint
    for file in (keys.PRIVATE, keys.PUBLIC):
        file.unlink()
    main(["keys", "init"])
    with pytest.raises(SignatureError, match="run `clinrl keys vouch`"):
        audit_log.read(paths.AUDIT_LOG, keys.keyring())
    capsys.readouterr()
    assert main(["keys", "vouch", "the laptop was stolen"]) == 0
    assert capsys.readouterr().out == f"{former}\n"
    assert [line.kind for line in audit_log.read(paths.AUDIT_LOG, keys.keyring())] == ["decision", "review"]
    assert main(["keys", "vouch", "twice"]) == 1


def test_the_tree_of_a_task_takes_no_version(project, capsys):
    assert main(["plan", "v1", "--graph"]) == 2
    assert "leave the version and --json out" in capsys.readouterr().err


def test_a_refused_version_says_why_and_ends_with_1(run):
    code, rows, said = run("decide", "v3")
    assert code == 1
    assert {row["metric"] for row in rows if row["verdict"] == "refused"} == {"critical_under", "exact"}
    assert said.startswith("clinrl: critical_under (")
    code, _, said = run("promote", "v3", "--approver", "Ada Lovelace")
    assert (code, said.startswith("clinrl: v3 may not be promoted: critical_under")) == (1, True)


@pytest.mark.long
def test_what_the_approver_sees_is_in_the_record_that_is_approved(project, capsys):
    main(["register", "v1"])
    capsys.readouterr()
    assert main(["decide", "v1", "--json"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    digest = said.pop("digest")
    decision = Decision.model_validate_json(json.dumps(said))
    assert digest == decision.digest
    assert decision.model_dump(mode="json") in [line.body for line in audit_log.read(paths.AUDIT_LOG, keys.keyring())]
    rows = numbers.form(decision.rows)
    assert [row["who"] for row in rows if row["mode"] == "think"] == [
        "v1", *(f"always {level}" for level in range(1, 6)), "random", "prior-matched", "bag of words",
    ]  # fmt: skip
    assert (rows[0]["exact"], rows[0]["critical_under"]) == ("100.0% [91.2, 100.0]", "0.0% [0.0, 8.8]")
    assert all(row["ahead in exact"].startswith("+") for row in rows if row["role"] == "simple policy")
    assert f"clinrl approve {decision.digest} --as NAME" in printed.err
    main(["register", "v3"])
    capsys.readouterr()
    assert main(["decide", "v3"]) == 1
    assert "clinrl approve" not in capsys.readouterr().err


def test_on_a_terminal_the_form_follows_the_findings(project, capsys, monkeypatch):
    main(["register", "v1"])
    capsys.readouterr()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "220")
    main(["decide", "v1"])
    printed = capsys.readouterr().out
    assert printed.index("verdict") < printed.index("ahead in exact") < printed.index("prior-matched  simple policy")


@pytest.mark.long
def test_a_rollback_says_that_the_full_model_is_still_champion(run):
    params = load_params()
    for name in ("v2", "v2-full"):
        dolls.examine(params, name, examined.RIGHT)
    locks.record(params)
    for name in ("v1", "v2", "v2-full"):
        run("register", name)
        assert run("promote", name, "--approver", "Ada Lovelace")[0] == 0
    code, (row,), said = run("rollback", "esi", "--approver", "Ada Lovelace")
    assert (code, row["version"]) == (0, "v1")
    assert said.startswith("clinrl: v2-full, the full model of v2, is still the champion of esi-merged; ")
    assert run("rollback", "esi", "--approver", "Ada Lovelace")[0] == 1
    assert run("rollback", "esi", "--from", "v2", "--approver", "Ada Lovelace")[0] == 1
    assert run("rollback", "esi", "--from", "champion", "--approver", "Ada Lovelace")[0] == 2
    code, (row,), said = run("rollback", "esi", "--from", "v1", "--approver", "Ada Lovelace")
    assert (code, row["version"], said) == (0, "v2", "")


def test_lineage_names_the_broken_link_and_ends_with_1(run):
    code, rows, _ = run("lineage", "v1")
    assert (code, {row["state"] for row in rows}) == (0, {"holds", "open", "unrecorded"})
    shutil.rmtree("data/cases/d1")
    code, rows, said = run("lineage", "v1")
    assert (code, [row["link"] for row in rows if row["state"] == "absent"]) == (0, ["data", "lock"])
    paths.cases("x1").joinpath(paths.CASES_FILE).write_text("\n")
    code, rows, said = run("lineage", "v1")
    assert code == 1
    assert "lock" in [row["link"] for row in rows if row["state"] == "broken"]
    assert "clinrl: v1, lock: data/cases/x1 is not what dvc.lock records" in said


@pytest.mark.long
def test_a_stage_by_hand_says_what_is_not_here_and_what_was_altered(run):
    paths.cases("d1").joinpath(paths.CASES_FILE).write_text("\n")
    _, _, err = run("validate", "d1")
    assert "data/cases/d1 is not what dvc.lock records; `dvc repro validate@d1` makes both anew" in err
    shutil.rmtree(paths.cases("d1"))
    _, _, err = run("validate", "d1")
    assert "data/cases/d1 is not here; `dvc repro validate@d1` makes all that this needs, in order\n" in err
    assert "is not what dvc.lock records" not in err


@pytest.mark.long
def test_a_stage_by_hand_says_nothing_of_outputs_of_stages_that_were_removed(run):
    read = "validate: {foreach: '${datasets}', do: {cmd: c, deps: ['data/cases/${key}']}}"
    gone = "outs: [{path: data/cases/d1/gone, md5: '1'}]"
    lock = f"stages: {{validate@d1: {{deps: [{{path: data/cases/d1}}]}}, dataset@gone: {{{gone}}}}}"
    Path("dvc.lock").write_text(lock)
    Path("dvc.yaml").write_text(f"stages: {{{read}, dataset: {{cmd: c}}}}")
    assert "gone" not in run("validate", "d1")[2]
    Path("dvc.yaml").write_text(f"stages: {{{read}, dataset@gone: {{cmd: c}}}}")
    assert "data/cases/d1/gone is not here" in run("validate", "d1")[2]


def test_json_is_one_value(project, capsys):
    kinds = {"decide v1": dict, "versions esi": list, "lookup esi v1": dict, "lineage v1": list}
    for words, kind in kinds.items():
        assert main([*words.split(), "--json"]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), kind)


def test_a_registered_model_without_a_version_is_an_empty_table_and_a_sentence(run):
    (Path("mlruns") / "mlflow.db").unlink()
    code, rows, said = run("versions", "esi")
    assert (code, rows) == (0, [])
    assert "clinrl: no model esi is registered in the registry in " in said
    assert said.endswith("; `clinrl register NAME` registers a version\n")


def test_an_unknown_name_costs_one_sentence_and_no_import(run):
    assert run("register", "v9")[0] == 2
    assert run("versions", "essi")[2].startswith(
        "clinrl: 'essi' is no model that `clinrl versions` knows; did you mean"
    )
    assert run("rollback", "v1", "--approver", "Ada")[0] == 2
    assert run("lookup", "esi", "winner")[0] == 1


def test_a_promotion_without_a_name_is_a_usage_error(project):
    with pytest.raises(SystemExit, match="2"):
        main(["promote", "v1"])


def test_two_that_took_one_exam_are_dumped_as_numbers(project, capsys):
    assert main(["compare", "v1", "v3", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)
    found = [first[key] for key in ("mode", "metric", "name", "other", "c")]
    assert found == ["think", "exact", "v1", "v3", 0]
    assert first["b"] > 0
    assert first["p"] < 0.05
    assert first["difference"]["low"] <= first["difference"]["value"] == 1.0 == first["difference"]["high"]


def test_two_that_sat_one_exam_are_tested_against_each_other(run):
    code, rows, _ = run("compare", "v1", "v3")
    assert code == 0
    assert [(row["mode"], row["metric"]) for row in rows] == [
        (mode, metric) for mode in ("think", "direct") for metric in ("exact", "critical_under")
    ]
    exact = rows[0]
    assert (int(exact["only v1"]) > 0, exact["only v3"], float(exact["p"]) < 0.05) == (True, "0", True)
    code, same, err = run("compare", "v1", "v1")
    assert (code, same, err) == (2, [], "clinrl: v1 cannot be compared with itself; name another model\n")
    code, _, err = run("compare", "v1")
    assert (code, err) == (2, "clinrl: v1 is one model; name the other too: `clinrl compare v1 OTHER`\n")
    code, _, err = run("compare", "v1", "../v3")
    assert (code, "'../v3' is no name that `clinrl compare` knows; allowed: " in err) == (2, True)
    assert run("compare", "recipes", "--json")[0] == 2
    tree = YAML(typ="safe").load(Path("params.yaml"))
    tree["comparisons"] = {"v1": {"task": "esi", "columns": ["exact"], "arms": {"a": ["v1"], "b": ["v3"]}}}
    YAML(typ="safe").dump(tree, Path("params.yaml"))
    assert "--json is for two models" in run("compare", "v1", "--json")[2]  # and this the comparison of one name
    tree["comparisons"]["both"] = tree["comparisons"].pop("v1")
    YAML(typ="safe").dump(tree, Path("params.yaml"))
    code, _, err = run("compare", "v1", "both")
    assert (code, err) == (2, "clinrl: both is a comparison, which is given alone: `clinrl compare both`\n")
    code, _, err = run("lookup", "esi")
    assert (code, err) == (2, "clinrl: WHICH is missing: champion, candidate, previous, a version of esi or a number\n")


def test_an_approver_whom_nobody_lists_spends_no_look(project, capsys):
    text = Path("params.yaml").read_text(encoding="utf-8")
    listed = f"{text}approvers: {{Grace Hopper: {keys.signer('embedded').key.line}}}\n"
    Path("params.yaml").write_text(listed, encoding="utf-8")
    assert main(["promote", "v1", "--approver", "Grace Hoper"]) == 1
    assert "does not list 'Grace Hoper'" in capsys.readouterr().err
    assert not paths.AUDIT_LOG.exists()
