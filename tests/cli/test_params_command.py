"""What a version really uses: its blocks with defaults filled in, at the active scale."""

import json
from io import StringIO

import pytest
from ruamel.yaml import YAML

from clinrl.config.params import Params
from clinrl.config.resolved import plain, stage, uses
from clinrl.errors import ParamsError
from valid_params import VALID

PARAMS = Params.model_validate(VALID)


def test_a_version_is_shown_with_defaults_at_the_active_scale():
    found = uses(PARAMS, "v2", resolved=True)
    assert (found["parent"], found["lineage"], found["seed"]) == ("v1", ["v1", "v2"], 46)
    recipe = found["recipe"]["grpo"]
    assert (recipe["view"], recipe["qlora"]) == ("given", False)  # which records leave out
    assert (recipe["trainer"]["steps"], recipe["trainer"]["scale_rewards"]) == (40, "group")
    assert {*recipe["reward"]} == {*type(PARAMS.reward("v2")).model_fields}
    assert found["base"]["architecture"] == "qwen3"
    assert found["modes"]["direct"]["max_new_tokens"] == PARAMS.budget("direct", "esi") == 100


def test_a_merge_and_a_base_have_an_exam_and_no_recipe():
    for name in ("v3-full", "v2-v3", "esi-base"):
        found = uses(PARAMS, name, resolved=True)
        assert ({*found["exam"]}, found["base"]["template"]) == ({"esi-x1"}, "qwen3_5_think")
        assert "recipe" not in found
        assert ("merge" in found) == (name != "esi-base")


def test_unresolved_and_without_a_name_it_is_what_the_file_says():
    assert plain(PARAMS, defaults=False) == plain(VALID, defaults=False)


def test_yaml_and_json_say_the_same(capsys: pytest.CaptureFixture[str]):
    stage(PARAMS, "v1", resolved=True)
    text = capsys.readouterr().out
    stage(PARAMS, "v1", resolved=True, as_json=True)
    assert YAML(typ="safe").load(StringIO(text)) == json.loads(capsys.readouterr().out)


def test_an_unknown_name_is_refused():
    with pytest.raises(ParamsError, match="'v9' is neither a version, a merge nor the base of a task; allowed: esi-b"):
        stage(PARAMS, "v9")
