"""The registry's names are followed: nobody is lost, nobody gets another's answer, and nothing unchecked is opened."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from answering import Running, exam, prompts, running
from cryptography.hazmat.primitives.asymmetric import ec

import dolls
import locks
from clinrl import paths
from clinrl.artifacts import write_json
from clinrl.errors import RegistryError, SignatureError
from clinrl.models.chat import read_turn
from clinrl.registry import versions
from clinrl.release import audit_log, promotion
from clinrl.release.standing import check_servable
from clinrl.serving import backends, server
from clinrl.serving import live as live_module
from clinrl.serving.backends import Local
from clinrl.serving.live import Live
from clinrl.signing import keys
from clinrl.tasks.base import get_task
from clinrl.tracking.mlflow_store import connect
from processes import eventually

CANDIDATE = "esi@candidate"
DIRECT = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}


def raises(error: Exception) -> Any:
    def call(*_: Any) -> None:
        raise error

    return call


def point(name: str) -> None:
    versions.point("esi", "candidate", versions.find("esi", name))


def folder_of(name: str) -> Path:
    with connect() as client:
        return Path(urlsplit(client.get_model_version_download_uri("esi", str(versions.find("esi", name).number))).path)


def alter(file: Path) -> bytes:
    """Change a file's last byte; what it was."""
    before = file.read_bytes()
    other = file.with_name("other")
    other.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.replace(other, file)  # copies of a project share files
    return before


def answers(one: Running, count: int) -> dict[str, list[str]]:
    """What each version says about the first cases in its exam."""
    found = {}
    for name in ("v1", "v2"):
        sampler, written = exam(one.live.params, name, count, thinking=False)
        found[name] = [read_turn(text.text, sampler.opens(False)).content for text in written]
    return found


@pytest.mark.long
def test_a_new_candidate_is_asked_at_the_next_look_and_each_answer_is_by_whom_it_names(project: Any) -> None:
    with running(project) as one, ThreadPoolExecutor(4) as pool:
        expected, asked, done = answers(one, 3), prompts(3), threading.Event()
        assert expected["v1"] != expected["v2"]

        def ask(number: int) -> list[tuple[str, int, str]]:
            heard = []
            while not done.is_set():
                said = one.client.chat.completions.create(model=CANDIDATE, messages=asked[number], **DIRECT)
                heard.append((said.model, number, said.choices[0].message.content))
            return heard

        asking = [pool.submit(ask, number) for number in range(3)]
        for name in ("v1", "v2", "v1"):
            point(name)
            one.live.renew()
            said = one.client.chat.completions.create(model=CANDIDATE, messages=asked[0], **DIRECT)
            assert said.model == name
        done.set()
        heard = [one for asked in asking for one in asked.result()]
    assert {name for name, _, _ in heard} == {"v1", "v2"}
    assert all(content == expected[name][number] for name, number, content in heard)


@pytest.mark.long
def test_a_version_that_lost_its_names_is_closed_when_nobody_can_wait_for_it(project: Any) -> None:
    with running(project, keep_s=0.0) as one:
        first = one.live.names[CANDIDATE]
        point("v1")
        one.live.renew()
        assert "v2" not in one.live.names
        threading.Event().wait(0.01)
        one.live.renew()
        assert not first.folder.exists()
        assert [*first.sampler.model.peft_config] == [one.live.names["v1"].served.digest]
        assert one.client.chat.completions.create(model="v1", messages=prompts(1)[0], max_tokens=2).model == "v1"
        point("v2")
        one.live.renew()
        assert one.client.chat.completions.create(model="v2", messages=prompts(1)[0], max_tokens=2).model == "v2"


@pytest.mark.long
@pytest.mark.parametrize("altered", ["adapter/adapter_model.safetensors", "base/model.safetensors", "served.json"])
def test_what_was_altered_is_refused_and_the_one_before_goes_on(project: Any, capfd: Any, altered: str) -> None:
    with running(project) as one:
        before = alter(folder_of("v1") / altered)
        point("v1")
        for _ in range(3):
            one.live.renew()
        said = capfd.readouterr().err
        assert said.count("esi@candidate is not renewed: ") == 1
        assert f"'{altered}' of v1 was altered after this checkout signed it" in said
        assert "; v2 goes on" in said
        assert one.client.chat.completions.create(model=CANDIDATE, messages=prompts(1)[0], max_tokens=2).model == "v2"
        (folder_of("v1") / altered).write_bytes(before)
        if altered != "served.json":  # the wait for another try takes seconds: once is enough
            one.live._wait.clear()
        eventually(lambda: one.live.renew() or one.live.names[CANDIDATE].served.name == "v1", 60)
        assert "esi@candidate is v1" in capfd.readouterr().err


@pytest.mark.long
def test_an_adapter_that_does_not_fit_leaves_the_others_as_they_are(project: Any, monkeypatch: Any) -> None:
    """Signed as it is: what it does is seen when it is opened alone."""
    with running(project) as one:
        expected = answers(one, 2)["v2"]

        def checked_copy(_params: Any, entry: Any, place: Path) -> Path:
            folder = Path(shutil.copytree(folder_of("v1"), place / "model"))
            shutil.copy(folder / "base/model.safetensors", folder / "adapter/adapter_model.safetensors")
            return folder

        with monkeypatch.context() as patch:
            patch.setattr(versions, "checked_copy", checked_copy)
            point("v1")
            one.live.renew()
        assert [*one.live.names] == [CANDIDATE, "v2"]
        for messages, content in zip(prompts(2), expected, strict=True):
            said = one.client.chat.completions.create(model=CANDIDATE, messages=messages, **DIRECT)
            assert said.choices[0].message.content == content


def test_a_champion_by_name_alone_and_a_refused_candidate_are_not_served(project: Any, capfd: Any) -> None:
    versions.point("esi", "champion", versions.find("esi", "v1"))
    versions.tag(versions.find("esi", "v2"), {"gate": "refused"})
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    said = capfd.readouterr().err
    assert "v1 is the champion of esi by name only: data/reports/decisions.jsonl knows of no approval" in said
    assert "v2 was refused by its gate, or trained on a waiver, and is no candidate" in said
    assert re.match(r"nothing is served yet: .*; `clinrl versions esi` lists what there is$", live.why_nothing_served())


def test_the_signed_model_of_another_task_is_no_candidate(project: Any, capfd: Any) -> None:
    with connect() as client:
        of_esi = client.get_model_version("esi", str(versions.find("esi", "v1").number))
        client.create_registered_model("imaging")
        made = client.create_model_version("imaging", of_esi.source, of_esi.run_id, dict(of_esi.tags))
        client.set_registered_model_alias("imaging", "candidate", made.version)
    live = Live(project, "imaging", Local("embedded", 1), 60.0)
    live.renew()
    assert not live.names
    assert re.search("holds [0-9a-f]{12} of esi and not [0-9a-f]{12} of imaging", capfd.readouterr().err)


@pytest.mark.long
def test_what_was_trained_on_a_waiver_is_not_served_without_its_tag_either(project: Any, capfd: Any) -> None:
    manifest = paths.adapter("v2") / "manifest.json"
    content = json.loads(manifest.read_text())
    write_json(manifest, content | {"spec": content["spec"] | {"waiver": "A control."}})
    with dolls.few_draws():
        dolls.examine(project, "v2", [1, 2, 3, 4])
        locks.record(project)
        entry = versions.register(project, "v2")
    with connect() as client:
        client.delete_model_version_tag("esi", str(entry.number), "waiver")
    versions.point("esi", "candidate", entry)
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    assert not live.names
    assert "is not renewed: v2 was trained on a waiver (A control.) and is never served" in capfd.readouterr().err


def test_a_version_of_another_task_version_is_not_served(project: Any, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(get_task("esi")), "version", 3)
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    assert not live.names
    assert "at version 2 of the task esi, and the clinrl that is imported here is at 3" in capfd.readouterr().err


@pytest.mark.long
def test_the_champion_that_was_approved_is_served_until_the_lines_of_the_next_come(released: Any, capfd: Any) -> None:
    """As after a scheduled promotion, whose lines are on a branch, and a restart of the server."""
    versions.point("esi", "champion", versions.find("esi", "v2"))
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    for _ in range(3):
        live.renew()
        assert live.names["esi@champion"].served.name == "v1"
    told = capfd.readouterr().err
    assert told.count("v2 is esi@champion in the registry, and not in data/reports/decisions.jsonl") == 1
    live.end()


@pytest.mark.long
def test_a_rollback_in_the_middle_of_a_look_leaves_the_champion(released: Any, monkeypatch: Any) -> None:
    """After the audit log was read, and before the registry is: the champion of that log stays until the next look."""
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    live.renew()
    audit_log.write(released, "refusal", {"decision": "0" * 64, "reason": "too early"})  # so all is checked again
    holder, is_over = versions.holder, list[bool]()

    def held(model: str, alias: str) -> versions.Entry | None:
        if not is_over:
            is_over.append(True)
            promotion.rollback(released, "esi", approver="Ada Lovelace")
        return holder(model, alias)

    monkeypatch.setattr(live_module.versions, "holder", held)
    for name in ("v1", "v2"):
        live.renew()
        assert live.names["esi@champion"].served.name == name
    live.end()


@pytest.mark.long
@pytest.mark.parametrize("fault", [RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), KeyError("lora_A")])
def test_a_candidate_that_cannot_be_opened_hinders_no_rollback_and_is_not_copied_at_each_look(
    released: Any, monkeypatch: Any, capfd: Any, fault: Exception
) -> None:
    opened = backends.opening.adapted

    def adapted(model: Any, folder: Path, *, name: str) -> Any:
        if name == versions.find("esi", "v2").digest:
            assert live.names["esi@champion"].served.name == "v1", "it does not wait for the candidate"
            raise fault
        return opened(model, folder, name=name)

    copies = []
    checked_copy = versions.checked_copy
    monkeypatch.setattr(backends.opening, "adapted", adapted)
    monkeypatch.setattr(versions, "checked_copy", lambda *words: copies.append(words[1].name) or checked_copy(*words))
    point("v2")
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    for _ in range(3):
        live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    assert copies == ["v1", "v2"]
    assert "esi@candidate is not renewed: " in (told := capfd.readouterr().err)
    assert ("out of memory in loading an adapter (9 GiB more were wanted)" in told) == ("CUDA" in str(fault))
    live.end()


def test_a_full_disk_is_not_tried_again_at_each_look(project: Any, monkeypatch: Any) -> None:
    tries = []

    def full(*_words: Any) -> Path:
        tries.append(1)
        threading.Event().wait(0.2)
        raise shutil.Error("No space left on device")

    monkeypatch.setattr(versions, "checked_copy", full)
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    live.renew()
    assert len(tries) == 1


def test_the_end_removes_a_copy_that_is_being_made_and_no_other_is_begun(project: Any, monkeypatch: Any) -> None:
    checked_copy, places, begun = versions.checked_copy, [], threading.Event()

    def slow(params: Any, entry: Any, place: Path) -> Path:
        checked_copy(params, entry, place)
        places.append(place)
        begun.set()
        eventually(lambda: not place.exists())
        (place / "base").mkdir(parents=True)  # as a copy does that goes on
        eventually(lambda: not place.exists())
        raise shutil.Error("no such file")

    monkeypatch.setattr(versions, "checked_copy", slow)
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    looking = threading.Thread(target=live.renew, daemon=True)
    looking.start()
    assert begun.wait(60)
    server._end(live, looking)
    assert not looking.is_alive()
    live._wait.clear()
    live.renew()
    (place,) = places
    assert not place.exists()


def test_another_server_that_starts_meanwhile_leaves_a_copy_that_is_not_locked_yet(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = live_module.fcntl.flock

    def late(number: int, how: int) -> None:
        if how == live_module.fcntl.LOCK_EX:
            live_module._sweep()
        lock(number, how)

    monkeypatch.setattr(live_module.fcntl, "flock", late)
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    (place,) = live._places
    assert os.fstat(live._places[place]).st_ino == place.stat().st_ino, "its folder is the one that is locked"
    live.end()


def test_the_copies_of_a_server_that_was_killed_are_removed_at_the_next_start(
    project: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (copies := tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    killed, running = (Live(project, "esi", Local("embedded", 1), 60.0) for _ in range(2))
    for live in (killed, running):
        live.renew()
    held = [*running._places]
    assert held
    assert sorted(copies.iterdir()) == sorted([*killed._places, *held])
    for lock in killed._places.values():
        os.close(lock)  # as the kernel does
    Live(project, "esi", Local("embedded", 1), 60.0)
    assert [*copies.iterdir()] == held
    running.end()


def test_folders_without_end_under_the_name_of_a_copy_hold_no_server_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (f"{live_module.COPY}deep", *["x"] * 1500):
        Path(name).mkdir()
        os.chdir(name)
    try:
        live_module._sweep()
    finally:
        os.chdir(tmp_path)
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)  # pytest cannot


def test_a_pipe_under_the_name_of_a_copy_holds_no_server_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    os.mkfifo(tmp_path / f"{live_module.COPY}pipe")
    sweep = threading.Thread(target=live_module._sweep, daemon=True)
    sweep.start()
    sweep.join(20)
    assert not sweep.is_alive()


def test_a_candidate_that_is_refused_while_it_serves_loses_its_name(project: Any, capfd: Any) -> None:
    live = Live(project, "esi", Local("embedded", 1), 0.0)
    live.renew()
    assert CANDIDATE in live.names
    refused = versions.find("esi", "v2")
    with connect() as client:
        client.set_model_version_tag("esi", str(refused.number), versions.GATE, versions.REFUSED)
    live.renew()
    assert not live.names
    assert "v2 was refused by its gate" in capfd.readouterr().err
    point("v1")
    live.renew()
    assert live.names[CANDIDATE].served.name == "v1"
    live.end()


@pytest.mark.long
def test_a_candidate_that_goes_on_in_place_of_another_loses_its_name_when_it_is_refused(
    project: Any, monkeypatch: Any
) -> None:
    live = Live(project, "esi", Local("embedded", 1), 60.0)
    live.renew()
    with monkeypatch.context() as patch:
        patch.setattr(live._backend, "open", raises(RegistryError("no memory")))
        point("v1")
        live.renew()
        assert live.names[CANDIDATE].served.name == "v2"
        with connect() as client:
            client.set_model_version_tag("esi", str(versions.find("esi", "v2").number), versions.GATE, versions.REFUSED)
        live.renew()
    assert CANDIDATE not in live.names
    live.end()


@pytest.mark.long
def test_a_registry_that_is_away_changes_nothing(project: Any, monkeypatch: Any, capfd: Any) -> None:
    """Each time that it is away, and its return, is said once: no rollback is followed meanwhile."""
    with running(project) as one:
        for _ in range(2):
            capfd.readouterr()
            with monkeypatch.context() as patch:
                patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
                one.live.renew()
                one.live.renew()
            assert capfd.readouterr().err.count("esi@candidate is not renewed: ") == 1
            assert [*one.live.names] == [CANDIDATE, "v2"]
            one.live.renew()
            one.live.renew()
            assert capfd.readouterr().err.count("esi@candidate is v2 ") == 1
        with connect() as client:
            client.delete_registered_model_alias("esi", "candidate")
        one.live.renew()
        one.live.renew()
        assert [*one.live.names] == []
        assert capfd.readouterr().err.count("esi@candidate is no version any more") == 1


def test_a_project_without_a_model_serves_nothing_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    import exhibits

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    live = Live(exhibits.params(), "esi", Local("embedded", 1), 60.0)
    live.renew()
    assert "nothing is served yet: esi has neither a champion nor a candidate; " in live.why_nothing_served()


@pytest.mark.long
def test_who_may_approve_is_read_again_and_a_champion_that_nobody_approved_is_not_served(
    released: Any, tmp_path: Path, capfd: Any
) -> None:
    """By the file that the server was started with, whatever lies beside it."""
    source = Path(shutil.move("params.yaml", tmp_path / "mine.yaml"))
    live = Live(released, "esi", Local("embedded", 1), 60.0, source)
    before, somebody = source.read_text(), keys._signer_of(ec.generate_private_key(ec.SECP256R1())).key.line
    other = f"{before}approvers: {{Grace Hopper: {somebody}}}\n"
    Path("params.yaml").write_text(other)
    live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    source.write_text(other)
    live.renew()
    live.renew()
    assert "esi@champion" not in live.names
    assert "is not renewed" in capfd.readouterr().err
    for _ in range(2):  # said again when it is wrong again
        source.write_text("scale: nothing\n")
        live.renew()
        live.renew()
        assert capfd.readouterr().err.count("params.yaml is not read again") == 1
        source.write_text(before)
        live.renew()
        assert live.names["esi@champion"].served.name == "v1"
    live.end()


@pytest.mark.long
def test_a_folder_is_read_again_when_the_keys_change_and_not_when_params_do(
    released: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server it is fetched, and no rollback is followed meanwhile; each merged draft changes params."""
    live, looks = Live(released, "esi", Local("embedded", 1), 60.0, Path("params.yaml")), list[str]()
    live.renew()
    monkeypatch.setattr(versions, "check_intact", lambda _, entry: looks.append(entry.name))
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# a draft\n")
    live.renew()
    assert looks == []
    keys.trust("Grace Hopper", keys._signer_of(ec.generate_private_key(ec.SECP256R1())).key)
    live.renew()
    assert looks == ["v1"]
    live.end()


@pytest.mark.parametrize("whose", ["Registrar", "this checkout"])
def test_a_version_that_nobody_signed_whose_key_counts_still_is_not_served_any_more(
    released: Any, capfd: Any, whose: str
) -> None:
    """A key was stolen, and its public part is removed while the server runs."""
    public = keys.PUBLIC
    if whose == "Registrar":  # who registered is trusted, and the checkout has another key
        keys.TRUSTED.mkdir(exist_ok=True)
        public = keys.PUBLIC.rename(keys.TRUSTED / "Registrar.pub")
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(live_module, "check_servable", lambda *_: None)
        live.renew()
        assert live.names["esi@champion"].served.name == "v1"
        public.unlink()
        for _ in range(3):
            live.renew()
            assert "esi@champion" not in live.names
        assert "nobody" in capfd.readouterr().err
    live.end()


@pytest.mark.long
def test_a_champion_is_served_no_longer_if_the_key_of_the_audit_logs_last_line_is_revoked(
    released: Any, capfd: Any
) -> None:
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    keys.PUBLIC.unlink()
    live.renew()
    assert "esi@champion" not in live.names
    assert "which does not count here" in capfd.readouterr().err
    live.end()


@pytest.mark.long
def test_a_revoked_key_reaches_the_champion_though_the_registry_names_another_version(released: Any) -> None:
    """As between a scheduled promotion and the merge of its lines."""
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    live.renew()
    versions.point("esi", "champion", versions.find("esi", "v2"))
    live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    keys.PUBLIC.unlink()
    live.renew()
    assert "esi@champion" not in live.names
    live.end()


def test_what_could_not_be_read_under_other_keys_is_not_taken_for_sound(
    released: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    looks = []

    def away(_params: Any, entry: versions.Entry) -> None:
        looks.append(entry.digest)
        raise RegistryError("the server is away")

    monkeypatch.setattr(versions, "check_intact", away)
    keys.TRUSTED.mkdir(exist_ok=True)
    shutil.copyfile(keys.PUBLIC, keys.TRUSTED / "Grace Hopper.pub")
    for _ in range(3):
        live.renew()
    assert looks.count(versions.holder("esi", "champion").digest) == 3
    live.end()


def test_keys_that_cannot_be_read_are_said_and_end_nothing(
    released: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(released, "esi", Local("embedded", 1), 60.0)
    live.renew()

    def denied(*_files: Path) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr(live_module, "_state_of", denied)
    for _ in range(2):
        live.renew()
    assert live.names["esi@champion"].served.name == "v1"
    assert capfd.readouterr().err.count("permission denied") == 1
    live.end()


def test_a_key_that_is_trusted_for_registrations_approves_nothing(released: Any) -> None:
    entry = versions.holder("esi", "champion")
    check_servable(released, entry, "champion")
    keys.TRUSTED.mkdir(exist_ok=True)
    keys.PUBLIC.rename(keys.TRUSTED / "Ada Lovelace.pub")  # as a server has it that did not approve
    with pytest.raises(SignatureError):
        check_servable(released, entry, "champion")
