"""The file for a bug report: all that is needed, no secrets, bounded."""

import json
import tarfile

import msgspec

from seer.doctor import bundle
from seer.doctor.bundle import MAX_PART, cleaned, write_bundle

SECRET = "hf_1234567890abcdef"
ENVIRON = {
    "HOME": "/home/ada",
    "HF_TOKEN": SECRET,
    "WANDB_API_KEY": "another-secret-value",
    "DATABASE_URL": "postgres://somewhere",
    "CUDA_VISIBLE_DEVICES": "0",
    "SHORT_KEY": "a",
}


def read(file):
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_a_bundle_has_what_a_report_needs_and_no_secret(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "start.log").write_text(f"loading /home/ada/models/x with {SECRET} and another-secret-value\n")
    file = tmp_path / "bundle.tar.gz"
    report, config = '{"model": "/home/ada/models/x"}', 'model = "/home/ada/models/x"'
    names = write_bundle(file, report, config, logs, ENVIRON)
    parts = read(file)
    assert set(parts) == {f"seer-doctor/{name}" for name in names}
    assert {"doctor.json", "config.toml", "packages.txt", "system.txt", "logs/start.log"} <= set(names)
    whole = "\n".join(parts.values())
    for hidden in (SECRET, "another-secret-value", "postgres://", "DATABASE_URL", "/home/ada"):
        assert hidden not in whole
    assert parts["seer-doctor/environment.txt"] == "CUDA_VISIBLE_DEVICES=0"
    assert "~/models/x with [left out] and [left out]" in parts["seer-doctor/logs/start.log"]
    assert "msgspec==" in parts["seer-doctor/packages.txt"]


def test_each_part_is_bounded_and_keeps_its_end(tmp_path):
    (tmp_path / "start.log").write_text("x" * (2 * MAX_PART) + "the end")
    write_bundle(tmp_path / "b.tar.gz", "é" * MAX_PART, "", tmp_path, {})
    parts = _bytes(tmp_path / "b.tar.gz")
    assert all(len(data) <= MAX_PART for data in parts.values())
    assert parts["seer-doctor/logs/start.log"].endswith(b"the end")


def test_a_secret_at_the_cut_or_with_escaped_characters_is_left_out(tmp_path):
    secret = 'pä"ssw\\ord-of-ada'
    (tmp_path / "start.log").write_text(f"x{SECRET}\n" + "y" * (MAX_PART - 10) + "\n")
    report = json.dumps({"why": f"no login with {secret}"})
    config = msgspec.json.encode(f"key {secret}").decode()
    write_bundle(tmp_path / "b.tar.gz", report, config, tmp_path, ENVIRON | {"DB_PASSWORD": secret})
    parts = read(tmp_path / "b.tar.gz")
    assert parts["seer-doctor/doctor.json"] == '{"why": "no login with [left out]"}'
    assert parts["seer-doctor/config.toml"] == '"key [left out]"'
    assert set(parts["seer-doctor/logs/start.log"]) == {"y", "\n"}


def _bytes(file):
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def test_short_values_of_secrets_do_not_garble_texts():
    assert cleaned("a text", ENVIRON) == "a text"
    assert cleaned("/ at root", {"HOME": "/"}) == "/ at root"


def test_no_listed_variable_looks_like_a_secret():
    assert not [name for name in bundle.ENVIRONMENT if bundle._SECRET.search(name)]


def test_of_the_kernels_log_only_lines_about_gpus_and_kills_are_kept():
    text = "usb 1-1: new device of ada\nNVRM: Xid (PCI:0000:01): 79\nOut of memory: Killed process 7 (vllm)\n"
    assert bundle._kernel_lines(text).splitlines() == text.splitlines()[1:]
    assert len(bundle._kernel_lines("Xid\n" * 500).splitlines()) == bundle.KERNEL_LINES
