"""Tasks as OpenEnv environments: those of one turn answered over the wire, and OpenEnv's validator on every task.

OpenEnv takes seconds to import, so each test imports what it needs: only the process that runs them pays for it.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import toys
from clinrl.cli import main as cli
from clinrl.exports import openenv_manifest
from clinrl.models.rollout import tools
from clinrl.tasks.base import Task, get_task
from clinrl.types import Transcript, last_turn
from oddities import Served, served
from validators import check_episode, validated

pytest.importorskip("openenv", reason="OpenEnv is an optional extra")

ONE_TURN = ("esi", "imaging", "toy")
SEED = 41


@pytest.fixture(scope="module", autouse=True)
def toy() -> Iterator[None]:
    with toys.at_home():
        yield


@pytest.fixture(scope="module", params=[*ONE_TURN, "audit"])
def any_task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Task, Served]]:
    with served(tmp_path_factory.mktemp("served") / "log", task=request.param) as server:
        yield get_task(request.param), server


def answers(task: Task, case: object) -> dict[str, Transcript]:
    """What every policy says, and gold with its thinking."""
    said = {name: policy(case, Random(3)) for name, policy in task.policies().items()}
    return said | {"gold": task.gold(case, thinking=True)}


@pytest.mark.parametrize("any_task", ONE_TURN, indirect=True)
def test_prompt_and_score_are_those_of_the_exam(any_task: tuple[Task, Served]) -> None:
    from clinrl.tasks.openenv import Answer, TaskClient

    task, server = any_task
    mix, totals = task.checks.mixes[-1], set()
    with TaskClient(base_url=server.url).sync() as session:
        for index, case in enumerate(task.cases(3, SEED, pool="train", mix=mix)):
            for transcript in answers(task, case).values():
                opened = session.reset(seed=SEED, index=index, mix=mix)
                said = [opened.observation.system, opened.observation.text]
                assert (said, opened.reward) == ([message.content for message in task.prompt(case.facts)], None)
                assert (session.state().done, session.state().pool) == (False, "train")
                turn = last_turn(transcript)
                found = session.step(Answer(content=turn.content, thinking=turn.thinking))
                assert (found.reward, found.done) == (task.score(case, transcript, task.Reward()).total, True)
                assert session.step(Answer(content=turn.content)).reward == 0.0
                totals.add(found.reward)
    assert len(totals) > 1
    assert server.log.read_text() == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mix": "extreme"}, "mix: allowed: "),
        ({"pool": "exam"}, "pool: the exam is closed; start the server with --open-exam to open it"),
        ({"index": 200}, "index: Input should be less than 200"),
        ({"level": "easy"}, "level: Extra inputs are not permitted"),
    ],
)
def test_a_reset_that_asks_for_what_is_not_there_is_refused_and_changes_nothing(options, says) -> None:
    from clinrl.tasks.openenv import Impossible, OneTurn

    environment = OneTurn(get_task("toy"))
    environment.reset(seed=1)
    before = environment.state
    with pytest.raises(Impossible, match=f"^{says}"):
        environment.reset(**options)
    assert environment.state == before


def test_neither_observations_nor_states_hold_anything_of_the_key() -> None:
    from clinrl.tasks.openenv import OneTurn, TaskObservation, TaskState

    assert set(TaskObservation.model_fields) == {"text", "system", "done", "reward", "metadata"}
    assert set(TaskState.model_fields) == {"episode_id", "step_count", "pool", "done"}
    environment, task = OneTurn(get_task("esi")), get_task("esi")
    (case,) = task.cases(1, SEED, pool="train", mix=task.checks.mixes[0])
    said = environment.reset(seed=SEED, episode_id="e").model_dump_json() + environment.state.model_dump_json()
    assert case.id not in said
    assert str(SEED) not in said.replace(case.facts.narrative, "")


def test_a_reward_that_asks_other_models_is_refused_before_anybody_connects() -> None:
    from clinrl.errors import ParamsError
    from clinrl.tasks.openenv import application

    task = get_task("toy")
    assert task.asks.models(task.Reward()) == ()
    with pytest.raises(ParamsError, match="this reward needs judge, which are not served; choose another"):
        application(task, task.Reward(judged=0.25))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["imaging", "--reward", "imaging-llm-eval-1"], "this reward needs judge, which are not served"),
        (["imaging", "--reward", "esi-v49"], "esi-v49 is no version of imaging"),
        (["esi", "--reward", "esi-v43"], "versions.esi-v43.profile is 'esi-distilled', an sft recipe"),
        (["esy"], "'esy' is no task whose environment can be served; did you mean esi?"),
    ],
)
def test_what_cannot_be_paid_is_a_sentence(words, says, monkeypatch, capsys) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert cli.main(["openenv", *words, "--port", "0"]) == 2
    assert says in capsys.readouterr().err


def test_the_reward_of_a_version_is_paid(monkeypatch) -> None:
    """The first of the series that trusts nobody: what it pays differs from the task's own reward."""
    from clinrl.config.params import load_params
    from clinrl.tasks.openenv import Answer, OneTurn

    opened = []
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr("uvicorn.Server.run", lambda served, sockets: opened.append(served.config.app))
    assert cli.main(["openenv", "esi", "--reward", "esi-v49", "--port", "0"]) == 0
    task, reward = get_task("esi"), load_params().reward("esi-v49")
    environment = OneTurn(task, reward)
    paid = []
    for case in task.cases(20, SEED, pool="train", mix="natural"):
        environment.reset(seed=SEED, index=len(paid))
        paid.append(environment.step(Answer(content="ANSWER: ESI 2")).reward)
        transcript = task.policies()["always_2"](case, Random(0))
        assert paid[-1] == task.score(case, transcript, reward).total
    assert len(opened) == 1


@pytest.mark.long
def test_the_manifest_says_what_the_code_does(any_task: tuple[Task, Served], tmp_path, capsys) -> None:
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser

    task, _ = any_task
    openenv_manifest.stage(None, task.name, out=tmp_path)
    folder = Path(capsys.readouterr().out.strip())
    report = validated(folder, "--level", "static", "--json")
    assert {result["check_id"]: result["status"] for result in report["results"]} == {"static.manifest": "pass"}
    manifest, reward = OpenEnvYamlParser().parse(folder), task.Reward()
    assert (manifest.name, manifest.version) == (task.name, str(task.version))
    assert manifest.reward.range == (reward.low, reward.high)
    assert 0 < manifest.reward.floor_margin < reward.high - reward.low
    declared = manifest.capabilities.declared_tools or []
    assert declared == (list(tools(task.episodes.environment)) if task.episodes else [])


@pytest.mark.long
def test_the_validator_passes_the_server(any_task: tuple[Task, Served]) -> None:
    report = validated("--url", any_task[1].url, "--json", "--timeout", "30")
    assert (report["passed"], report["summary"]["failed_criteria"]) == (True, [])
    assert report["mode"] == "simulation"


@pytest.mark.slow
@pytest.mark.parametrize("any_task", ONE_TURN, indirect=True)
def test_the_validators_graders_pass_what_the_server_says(any_task: tuple[Task, Served], tmp_path) -> None:
    task, server = any_task
    openenv_manifest.stage(None, task.name, out=tmp_path)
    check_episode(server.url, tmp_path / f"openenv_{task.name}", {"seed": SEED}, [{"content": "I am not sure."}])
