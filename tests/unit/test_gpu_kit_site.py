"""The site that is carried to a GPU machine: GPU code is cut, folders travel in parts (bench/gpu)."""

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_kit import FOLDER, loaded

PTX, CUBIN = 1, 2


@pytest.fixture
def fatbin(monkeypatch):
    return loaded("fatbin", monkeypatch)


@pytest.fixture
def parts(monkeypatch):
    module = loaded("parts", monkeypatch)
    monkeypatch.setattr(module, "BLOCK", 4096)
    return module


@pytest.fixture
def site(monkeypatch, parts):
    monkeypatch.setitem(sys.modules, "parts", parts)
    return loaded("site", monkeypatch)


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(payload))
    struct.pack_into("<I", header, 0x1C, arch)
    return bytes(header) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(folder: Path, section: bytes) -> Path:
    """A shared library that gcc links, with these bytes as its GPU code."""
    (folder / "code.bin").write_bytes(section)
    (folder / "code.s").write_text(
        f'.section .nv_fatbin, "a"\n.balign 8\n.incbin "{folder / "code.bin"}"\n.section .note.GNU-stack,""\n'
    )
    subprocess.run(["gcc", "-shared", "-o", folder / "lib.so", folder / "code.s"], check=True)
    return folder / "lib.so"


def kept(fatbin, elf: bytearray) -> list[list[tuple[int, int, bytes]]]:
    found = []
    for name, at, size in fatbin.sections(elf):
        if name in fatbin.SECTIONS:
            for _, _, entries in fatbin.containers(elf, at, size):
                found.append([(e.kind, e.arch, bytes(elf[e.at + 64 : e.at + e.size])) for e in entries])
    return found


def test_a_library_keeps_what_its_gpu_runs_where_it_was(fatbin, tmp_path):
    first = container(entry(CUBIN, 80, b"A" * 64), entry(CUBIN, 90, b"B" * 72), entry(CUBIN, 90, b"b" * 40),
                      entry(CUBIN, 100, b"C" * 48), entry(PTX, 90, b"P" * 8))  # fmt: skip
    older = container(entry(CUBIN, 80, b"D" * 64), entry(PTX, 75, b"E" * 24), entry(PTX, 80, b"F" * 32))
    foreign = container(entry(CUBIN, 100, b"G" * 64), entry(CUBIN, 120, b"H" * 16))
    file = library(tmp_path, first + bytes(24) + older + foreign)
    whole = file.read_bytes()
    elf = bytearray(whole)
    before, after = fatbin.cut(elf, 90)
    assert kept(fatbin, elf) == [
        [(CUBIN, 90, b"B" * 72), (CUBIN, 90, b"b" * 40)], [(PTX, 80, b"F" * 32)], [(CUBIN, 120, b"H" * 16)]
    ]  # fmt: skip
    assert (before, after) == (sum(map(len, (first, older, foreign))) - 48, 136 + 104 + 96 + 80)
    assert len(elf) == len(whole)
    (at,) = [at for name, at, _ in fatbin.sections(whole) if name == ".nv_fatbin"]
    end = at + len(first) + 24 + len(older) + len(foreign)
    assert (elf[:at], elf[end:]) == (whole[:at], whole[end:])
    again = bytearray(elf)
    fatbin.cut(again, 90)
    assert again == elf


def test_what_is_no_library_or_has_no_gpu_code_stays_as_it_is(fatbin):
    for data in (b"", b"text", Path(sys.executable).resolve().read_bytes()):
        elf = bytearray(data)
        assert fatbin.cut(elf, 90) == (0, 0)
        assert elf == data


def test_gpu_code_of_another_form_is_an_error(fatbin, tmp_path):
    broken = container(entry(CUBIN, 90, b"A" * 64)).replace(b"\x50\xed\x55\xba", b"\x50\xed\x55\xbb")
    with pytest.raises(ValueError, match="no container of GPU code at byte"):
        fatbin.cut(bytearray(library(tmp_path, broken).read_bytes()), 90)
    long = bytearray(container(entry(CUBIN, 90, b"A" * 64)))
    struct.pack_into("<Q", long, 8, 100)
    with pytest.raises(ValueError, match="ends beyond its container"):
        fatbin.cut(bytearray(library(tmp_path, bytes(long) + bytes(64)).read_bytes()), 90)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_what_nvcc_links_is_cut(fatbin, tmp_path):
    (tmp_path / "a.cu").write_text(
        "__global__ void k(float *x) { x[0] += 1; } void f(float *x) { k<<<1, 1>>>(x); }"
    )
    codes = [f"-gencode=arch=compute_{arch},code={kind}_{arch}" for arch, kind in
             ((80, "sm"), (90, "sm"), (100, "sm"), (100, "compute"))]  # fmt: skip
    done = subprocess.run(
        ["nvcc", "-shared", "-Xcompiler", "-fPIC", *codes, "a.cu", "-o", "a.so"], cwd=tmp_path,
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"nvcc does not run here: {done.stderr[-200:]!r}")
    elf = bytearray((tmp_path / "a.so").read_bytes())
    before, after = fatbin.cut(elf, 90)
    assert 0 < after < before
    assert {arch for each in kept(fatbin, elf) for _, arch, _ in each} == {90}


def tree(folder: Path) -> Path:
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "package" / "zeros").write_bytes(bytes(100_000))
    (folder / "package" / "deep" / "noise").write_bytes(
        b"".join(i.to_bytes(4, "little") for i in range(20_000))
    )
    tool = folder / "tool"
    tool.write_text("run\n")
    tool.chmod(0o755)
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mode & 0o100) for file in files}


def test_a_folder_travels_in_parts_of_bounded_size(parts, tmp_path):
    source, out = tree(tmp_path / "source"), tmp_path / "out"
    said = parts.pack(source, out, "site", 6000, {"arch": 90})
    files = sorted(out.glob("*.xz"))
    assert len(files) == len(said["parts"]) == 3
    assert max(file.stat().st_size for file in files) <= 6000
    parts.pack(source, tmp_path / "again", "site", 6000, {"arch": 90})
    assert contents(out) == contents(tmp_path / "again")
    assert parts.unpack(out, "site", tmp_path / "there")
    assert contents(tmp_path / "there" / "site") == contents(source)
    assert not parts.unpack(out, "site", tmp_path / "there")


def test_nothing_is_unpacked_before_every_part_is_right(parts, tmp_path):
    source, out = tree(tmp_path / "source"), tmp_path / "out"
    parts.pack(source, out, "site", 6000, {})
    whole = (out / "site-01.xz").read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:100]):
        (out / "site-01.xz").write_bytes(damaged)
        assert parts.missing(out, "site") == ["site-01.xz"]
        with pytest.raises(parts.PartsError, match=r"site-01\.xz: missing or damaged"):
            parts.unpack(out, "site", tmp_path / "there")
    (out / "site-01.xz").unlink()
    assert parts.missing(out, "site") == ["site-01.xz"]
    assert not (tmp_path / "there" / "site").exists()
    (out / "site-01.xz").write_bytes(whole)
    assert parts.unpack(out, "site", tmp_path / "there")


def test_a_new_site_takes_the_place_of_the_old_one(parts, tmp_path):
    source, out = tree(tmp_path / "source"), tmp_path / "out"
    parts.pack(source, out, "site", 6000, {})
    parts.unpack(out, "site", tmp_path / "there")
    (source / "package" / "zeros").unlink()
    parts.pack(source, out, "site", 100_000, {})
    assert [file.name for file in out.glob("*.xz")] == ["site-00.xz"]
    assert parts.unpack(out, "site", tmp_path / "there")
    assert contents(tmp_path / "there" / "site") == contents(source)


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)


def test_wheels_become_a_site(site, parts, tmp_path, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    code = container(entry(CUBIN, 80, b"A" * 64), entry(CUBIN, 90, b"B" * 64))
    wheel(wheels, "torch", {
        "torch/lib.so": library(tmp_path, code).read_bytes(), "torch/lib.a": b"left", "torch/__init__.py": b"#",
        "torch-1.0.data/purelib/extra.py": b"extra", "torch-1.0.data/scripts/run": b"left",
    })  # fmt: skip
    wheel(wheels, "nvidia_cublas", {"nvidia/cublas.so": b"left"})
    site.make(wheels, tmp_path / "out", site.OWN_CUDA, 1 << 20)
    said = json.loads(capsys.readouterr().out)
    assert (said["packages"], said["cut_to_bytes"]) == (1, said["gpu_code_bytes"] // 2)
    parts.unpack(tmp_path / "out", "site", tmp_path / "there")
    assert set(contents(tmp_path / "there" / "site")) == {"torch/lib.so", "torch/__init__.py", "extra.py"}
    about = json.loads((tmp_path / "out" / "site.json").read_text())
    assert (about["arch"], about["packages"]["torch"]["version"]) == (90, "1.0")


def test_what_is_left_out_is_in_the_lock_and_what_is_pinned_is_for_one_python(site):
    lock = (FOLDER.parents[1] / "requirements" / "cuda13.lock").read_text()
    pins = list(site.pins(lock))
    names = {pin.partition("==")[0] for pin in pins}
    assert names >= site.OWN_CUDA | site.OWN | site.UNUSED
    assert all("--hash=sha256:" in pin and ";" not in pin for pin in pins)
    assert len(names) == len(pins)
    assert not {"torch", "vllm", "triton", "transformers"} & (site.OWN_CUDA | site.OWN | site.UNUSED)


def test_cuda_is_linked_from_the_machines_own_torch(site, tmp_path):
    own, here = tmp_path / "own" / "nvidia", tmp_path / "site"
    for name in ("cu13", "nccl"):
        (own / name).mkdir(parents=True)
    (here / "nvidia" / "nccl").mkdir(parents=True)
    assert site.link_cuda(here, [str(own)]) == ["cu13"]
    assert (here / "nvidia" / "cu13").resolve() == own / "cu13"
    assert not (here / "nvidia" / "nccl").is_symlink()


def test_missing_parts_are_named(site, parts, tmp_path, capsys):
    parts.pack(tree(tmp_path / "source"), tmp_path / "out", "site", 6000, {})
    (tmp_path / "out" / "site-00.xz").unlink()
    with pytest.raises(SystemExit) as ended:
        site.unpack(tmp_path / "out", tmp_path / "there")
    assert ended.value.code == 3
    assert json.loads(capsys.readouterr().out) == {"missing": ["site-00.xz"]}


def test_a_part_and_the_checkout_fit_into_what_may_be_sent_at_once(site):
    root = FOLDER.parents[1]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout")
    checkout = sum((root / name).lstat().st_size for name in listed.stdout.split("\0") if name)
    assert checkout + site.PART_BYTES < 62 << 20, "64 MiB, less what a commit adds: take smaller parts"


def test_what_is_unpacked_is_compiled_and_a_library_that_does_not_load_is_named(
    site, parts, tmp_path, capsys, monkeypatch
):
    source = tmp_path / "source"
    for name, code in (
        ("torch", "__version__ = '2'"),
        ("vllm", "__version__ = '0'"),
        ("seer", "__version__ = '1'"),
    ):
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").write_text(code)
    (source / "seer" / "_native.py").write_text("")
    parts.pack(source, tmp_path / "out", "site", 100_000, {})
    monkeypatch.setattr(site.importlib.util, "find_spec", lambda _: None)
    site.unpack(tmp_path / "out", tmp_path / "there")
    said = json.loads(capsys.readouterr().out.splitlines()[0])
    assert said["versions"].startswith("2 0 ")
    assert any(line.startswith("seer._native ") for line in said["imports"])
    assert any(line.startswith("vllm._C_stable_libtorch fails: No module named") for line in said["imports"])
    assert list((tmp_path / "there" / "site" / "vllm" / "__pycache__").glob("*.pyc"))
