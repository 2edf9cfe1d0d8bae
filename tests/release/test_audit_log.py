"""The audit log: a chain that only grows, and that says where it was broken."""

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from multiprocessing import get_context

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from clinrl.artifacts import canonical_json, digest
from clinrl.errors import ArtefactError, SignatureError
from clinrl.release import audit_log
from clinrl.signing import keys

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "reports" / "decisions.jsonl"


ME, STRANGER = (keys._signer_of(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
RING = {"me": ME.key}


def append(path, kind, body, *, signer=ME, **more):
    return audit_log.append(path, kind, body, signer=signer, keys=RING, **more)


def read(path):
    return audit_log.read(path, RING)


def three(path):
    for number in range(3):
        append(path, "decision", {"number": number})
    return path.read_text().splitlines(keepends=True)


def test_no_file_is_an_empty_chain(path):
    assert read(path) == []


def test_what_was_checked_is_not_checked_again_while_it_stays_the_same(path, monkeypatch):
    lines, checked, decode = three(path), [], audit_log._decode
    monkeypatch.setattr(audit_log, "_decode", lambda signature: checked.append(signature) or decode(signature))

    for _ in range(3):
        read(path)
        append(path, "decision", {})
    assert len(read(path)) == 6
    assert len(checked) == len({*checked}) == 4  # the third was not read by whoever wrote it

    path.write_text("".join(lines).replace('"number":1', '"number":5'))
    with pytest.raises(ArtefactError, match="line 2 was altered"):
        read(path)
    path.write_text("".join(lines))
    with pytest.raises(SignatureError, match="signed from line 1 on"):
        audit_log.read(path, {"stranger": STRANGER.key})


def test_a_body_is_written_out_once_to_check_its_line(path, monkeypatch):
    three(path)
    monkeypatch.setattr(audit_log, "_checked", {})
    written = []
    monkeypatch.setattr(audit_log, "canonical_json", lambda value: written.append(value) or canonical_json(value))
    assert [entry.body for entry in read(path)] == [value for value in written if isinstance(value, dict)]


def test_lines_follow_each_other_and_say_when(path):
    first = append(path, "decision", {"b": 1, "a": [2]})
    second = append(path, "approval", {})

    assert read(path) == [first, second]
    assert first.at <= second.at <= datetime.now(UTC).isoformat()
    assert first.previous == audit_log.START
    assert second.previous == first.digest


@given(bodies=st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=3), max_size=5))
def test_what_is_written_is_read(bodies, tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "decisions.jsonl"
    for body in bodies:
        append(path, "decision", body)
    assert [entry.body for entry in read(path)] == bodies


def test_a_line_is_not_written_twice_if_the_caller_says_so(path):
    body = {"number": 1}
    for _ in range(2):
        append(path, "decision", body, unless=lambda lines: any(line.body == body for line in lines))
    assert [entry.body for entry in read(path)] == [body]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: [lines[0], lines[1].replace('"number":1', '"number":7'), lines[2]], "line 2 was altered"),
        (lambda lines: [lines[0], lines[2]], "line 2 does not follow line 1"),
        (lambda lines: lines[1:], "line 1 does not follow line 0"),
        (lambda lines: [lines[0], lines[2], lines[1]], "line 2 does not follow"),
        (lambda lines: [lines[0], "{}\n", *lines[1:]], "line 2 is not an entry"),
        (lambda lines: [lines[0], "\n", *lines[1:]], "line 2 is not an entry"),
        (lambda lines: [lines[0], lines[1].replace('"number":1', '"number":NaN'), lines[2]], "line 2 is not an entry"),
        (lambda lines: [lines[0], lines[1].replace('"number":1', '"number":1,"number":1'), lines[2]], "2 was altered"),
        (lambda lines: [lines[0], lines[1].replace('"body":', '"body": '), lines[2]], "line 2 was altered"),
    ],
)
def test_damage_is_named_by_its_line(path, damage, says):
    path.write_text("".join(damage(three(path))))
    with pytest.raises(ArtefactError, match=says):
        read(path)
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match=says):
        append(path, "decision", {})
    assert path.read_bytes() == before


def rewritten(path, number):
    """The whole chain from a line on, written anew with digests that fit, as anybody can compute them."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries[number]["body"] = {"number": 99}
    previous = entries[number]["previous"]
    for entry in entries[number:]:
        entry["previous"] = previous
        previous = entry["digest"] = digest({k: v for k, v in entry.items() if k not in ("digest", "signature")})
    path.write_text("".join(canonical_json(entry) + "\n" for entry in entries))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_chain_cannot_be_written_anew_without_a_key(path, number):
    three(path)
    rewritten(path, number)
    with pytest.raises(ArtefactError, match=f"line {number + 1} has an invalid signature"):
        read(path)


def signed_by_both(path):
    """A file whose second line, its last, was signed with a key that was revoked since."""
    append(path, "decision", {"number": 0})
    audit_log.append(path, "approval", {"number": 1}, signer=STRANGER, keys=RING | {"them": STRANGER.key})


def test_a_last_line_of_somebody_whose_key_does_not_count_is_named(path):
    signed_by_both(path)
    with pytest.raises(SignatureError, match=r"from line 2 on with the key SHA256:.*, which does not count here"):
        read(path)
    with pytest.raises(SignatureError, match="from line 2 on with the key"):
        append(path, "decision", {})


def test_looking_for_keys_that_do_not_count_makes_no_line_count(path):
    signed_by_both(path)
    assert audit_log.uncounted_keys(path, RING)
    with pytest.raises(SignatureError, match="from line 2 on"):
        read(path)


def test_a_review_lets_the_lines_of_a_revoked_key_stand(path):
    signed_by_both(path)
    with path.open("a") as stream:
        stream.write('{"at":')  # cut short by a kill
    assert audit_log.uncounted_keys(path, RING) == [STRANGER.key.fingerprint]
    append(path, "review", {"reason": "stolen"}, reviewed=True)
    append(path, "decision", {"number": 2})
    assert [entry.kind for entry in read(path)] == ["decision", "approval", "review", "decision"]
    rewritten(path, 1)
    with pytest.raises(ArtefactError, match="line 3 has an invalid signature"):
        read(path)


def test_nobody_writes_whose_own_key_does_not_count(path):
    with pytest.raises(SignatureError, match="does not count in this checkout"):
        append(path, "decision", {}, signer=STRANGER)
    assert not path.exists()


def test_a_line_that_was_cut_short_does_not_count_and_is_replaced(path):
    lines = three(path)
    path.write_text("".join(lines[:2]) + lines[2][:40])
    assert len(read(path)) == 2

    append(path, "refusal", {"after": "a kill"})

    assert [entry.kind for entry in read(path)] == ["decision", "decision", "refusal"]


def test_a_full_disk_is_told_with_the_file_and_breaks_no_chain(path, monkeypatch):
    three(path)
    monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError, match="No space left") as raised:
        append(path, "refusal", {})
    monkeypatch.undo()
    assert raised.value.filename == str(path)
    append(path, "refusal", {"after": "space was freed"})
    assert read(path)[-1].body == {"after": "space was freed"}


def test_a_line_that_was_committed_cut_short_may_be_replaced(path, monkeypatch):
    lines = three(path)
    monkeypatch.chdir(path.parent)
    path.write_text("".join(lines[:2]) + lines[2][:60])
    for words in (["init", "-q"], ["add", path.name], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=path.parent, check=True)
    append(path, "refusal", {"after": "a kill"})
    audit_log.check_committed(path)
    path.write_text(lines[0])
    with pytest.raises(ArtefactError, match="lacks lines that it has in git"):
        audit_log.check_committed(path)


def test_lines_are_missed_though_their_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    three(log := tmp_path / "data/reports/decisions.jsonl")
    for words in (["init", "-q"], ["add", "data"], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], check=True)
    shutil.rmtree("data")
    with pytest.raises(ArtefactError, match="lacks lines that it has in git"):
        audit_log.check_committed(log)


def test_what_git_has_is_not_taken_as_checked_in_a_checkout_of_another_user(tmp_path, monkeypatch):
    path = tmp_path / "ward two/decisions.jsonl"
    three(path)
    monkeypatch.chdir(path.parent)
    subprocess.run(["git", "init", "-q"], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))  # which may trust every folder
    with pytest.raises(ArtefactError, match=r"; run `git config --global --add safe.directory '.*/ward two'`"):
        audit_log.check_committed(path)


def write(path, number):
    for step in range(10):
        append(path, "decision", {"writer": number, "step": step})


def test_writers_take_turns(path):
    context = get_context("fork")
    writers = [context.Process(target=write, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = read(path)
    assert sorted((entry.body["writer"], entry.body["step"]) for entry in entries) == [
        (writer, step) for writer in range(4) for step in range(10)
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_line_is_not_written_into_a_file_that_git_replaced_meanwhile(path):
    three(path)
    text = path.read_text()

    def sign(data):
        path.unlink()  # as git does, while a person confirms the signature
        path.write_text(text)
        return ME.sign(data)

    with pytest.raises(ArtefactError, match="was replaced meanwhile, and no line was added"):
        append(path, "decision", {"number": 4}, signer=keys.Signer(ME.key, sign))
    assert path.read_text() == text
