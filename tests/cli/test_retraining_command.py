"""`clinrl simulate-retraining`: its table, its JSON, its report, and what it refuses."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from clinrl.cli.main import main
from valid_params import VALID

ROOT = Path(__file__).parents[2]
FEW = ("--lives", "20", "--weeks", "4")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    YAML(typ="safe").dump(VALID, Path("params.yaml"))


def test_the_table_has_a_row_a_scenario_and_rule(capsys):
    assert main(["simulate-retraining", "esi", *FEW]) == 0
    head, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert head == ["drafts", "rule", "useless", "worse", "better", "looks"]
    assert len(rows) == 21
    assert {row[1] for row in rows} == {"without a budget", "an even share each week", "the plan"}
    assert rows[0][5] == "4.0"


def test_rows_about_drafts_that_cannot_be_are_named_and_left_out(capsys):
    assert main(["simulate-retraining", "esi", *FEW, "--wrong", "0.02", "--discordance", "0.02"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + 5 * 3
    assert "left out, since a draft would gain as much as the champion errs, 2.0%: one in the year is two points" in err


def test_json_is_the_same_with_the_numbers_behind_it(capsys):
    main(["simulate-retraining", "esi", *FEW, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["useless"].keys() == {"value", "low", "high", "n"}
    assert rows[0]["useless"]["n"] == 20


def test_exam_and_mine_data_may_have_other_sizes(capsys):
    main(["simulate-retraining", "esi", *FEW, "--cases", "300", "--mine", "1200", "--write"])
    report = json.loads(Path("data/reports/retraining/esi.json").read_bytes())
    assert [(study["world"]["cases"], study["world"]["mine"]) for study in report["studies"]] == [
        (300, 1200), (600, 1200), (300, 1200), (300, 1200),
    ]  # fmt: skip


def test_where_nothing_is_mined_the_number_of_cases_is_asked_for(capsys):
    YAML(typ="safe").dump(VALID | {"mining": {}}, Path("params.yaml"))
    assert main(["simulate-retraining", "esi", *FEW]) == 0  # on the data that is for it
    datasets = {name: spec for name, spec in VALID["datasets"].items() if spec["use"] != "mine"}
    YAML(typ="safe").dump(VALID | {"mining": {}, "datasets": datasets}, Path("params.yaml"))
    assert main(["simulate-retraining", "esi", *FEW]) == 2
    assert "params.yaml has no number of cases for the mine data of esi; give --mine" in capsys.readouterr().err
    assert main(["simulate-retraining", "esi", *FEW, "--mine", "500"]) == 0


def test_a_report_is_written_on_four_worlds(capsys):
    main(["simulate-retraining", "esi", *FEW, "--write"])
    report = json.loads(Path("data/reports/retraining/esi.json").read_bytes())
    worlds = [study["world"] for study in report["studies"]]
    assert [(world["cases"], world["discordance"], world["lopsided"]) for world in worlds] == [
        (800, 0.041, False), (1600, 0.041, False), (800, 0.1895, False), (800, 0.041, True),
    ]  # fmt: skip
    page = Path("data/reports/retraining/esi.md").read_text()
    assert "## 800 cases of the exam, 800 to mine, 4.1% discordant" in page
    assert page.count("| every draft is useless | the plan |") == 4


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["ekg"], 2, "'ekg' is no task that `clinrl simulate-retraining` knows"),
        (["esi", "--wrong", "0.5"], 2, "--wrong is 0.5; a champion errs in less than half of the cases"),
        (["esi", "--discordance", "0.2"], 2, "independently of each other, differ in 0.1895; give at most that"),
    ],
)
def test_what_it_refuses_is_one_sentence(words, code, says, capsys):
    assert main(["simulate-retraining", *words]) == code
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("share", ["0", "1", "nan", "-0.1", "half"])
def test_a_share_lies_between_0_and_1(share, capsys):
    with pytest.raises(SystemExit):
        main(["simulate-retraining", "esi", f"--wrong={share}"])
    assert "is not a share above 0 and below 1" in capsys.readouterr().err


def test_a_task_without_a_plan_is_refused(capsys):
    YAML(typ="safe").dump({key: value for key, value in VALID.items() if key != "plans"}, Path("params.yaml"))
    assert main(["simulate-retraining", "esi"]) == 2
    assert "plans: 'esi' is not a task with a change plan" in capsys.readouterr().err
