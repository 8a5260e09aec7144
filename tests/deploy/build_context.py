"""Which files a Dockerfile's stage gets to see: what the ignore file lets through, and COPY lines bring in.

Invariants:
- only what is understood is accepted: any other instruction that brings in files, flag, pattern or form is a
  `NotUnderstood` that quotes it, never a guess;
- a COPY of what is not there, or is ignored, fails, as it does in a build.

The ignore file's rules are Docker's: patterns are relative to the context, the last that matches a path or a
folder above it decides, `!` lets through again, `*` stays within a name, `**/` is any number of folders.
"""

import posixpath
import re
import shutil
from pathlib import Path

_WITHOUT_FILES = {
    "ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "STOPSIGNAL", "USER",
}  # fmt: skip


class NotUnderstood(Exception):  # noqa: N818 - reads as what it says
    """The text says what, and quotes it."""


def instructions(text):
    """Return (word, rest) of each of a Dockerfile's instructions, continued lines joined."""
    found, pending = [], ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            if re.match(r"#\s*(syntax|escape|check)\s*=", line.strip()) and not found:
                raise NotUnderstood(f"directive {line!r}")
            continue
        if not line.strip() and not pending:
            continue
        pending += line.strip().removesuffix("\\").rstrip() + " "
        if line.rstrip().endswith("\\"):
            continue
        word, _, rest = pending.strip().partition(" ")
        if "<<" in rest:
            raise NotUnderstood(f"a here-document: {word} {rest}")
        found.append((word.upper(), rest.strip()))
        pending = ""
    if pending:
        raise NotUnderstood(f"no end of {pending!r}")
    return found


def stage(text, name):
    """Return the instructions of a stage, those of the stages that it stands on first."""
    stages, current, base = {}, None, {}
    for word, rest in instructions(text):
        if word == "FROM":
            parts = rest.split()
            if len(parts) != 3 or parts[1].upper() != "AS" or parts[2] in stages:
                raise NotUnderstood(f"FROM {rest}")
            current = parts[2]
            stages[current], base[current] = [], parts[0]
        elif current is not None:
            stages[current].append((word, rest))
        elif word != "ARG":
            raise NotUnderstood(f"{word} before FROM")
    if name not in stages:
        raise NotUnderstood(f"no stage {name!r}; there are {', '.join(stages)}")
    chain = [name]
    while base[chain[-1]] in stages:
        chain.append(base[chain[-1]])
    return [each for link in reversed(chain) for each in stages[link]]


class Ignored:
    """The rules of an ignore file."""

    def __init__(self, text):
        self._rules = []
        for line in text.splitlines():
            pattern = line.strip()
            if not pattern or pattern.startswith("#"):
                continue
            excludes = not pattern.startswith("!")
            pattern = posixpath.normpath(pattern.removeprefix("!").strip()).lstrip("/")
            if re.search(r"[\[\]?\\]|\*\*(?!/)|^\.\.", pattern):
                raise NotUnderstood(f"pattern {line!r}")
            parts = re.split(r"(\*\*/|\*)", pattern)
            meaning = {"**/": "(?:.*/)?", "*": "[^/]*"}
            rule = re.compile("".join(meaning.get(part) or re.escape(part) for part in parts))
            self._rules.append((excludes, rule, pattern))

    def __call__(self, path):
        """Say whether a build does not see a path."""
        pieces = path.split("/")
        above = ["/".join(pieces[:count]) for count in range(1, len(pieces) + 1)]
        out = False
        for excludes, rule, _ in self._rules:
            if any(rule.fullmatch(each) for each in above):
                out = excludes
        return out

    def all_of(self, folder):
        """Say whether that is so for all that can be in a folder."""
        lets_in = [pattern for excludes, _, pattern in self._rules if not excludes]
        return self(folder) and not any("*" in each or each.startswith(f"{folder}/") for each in lets_in)


def files(context, out, folder=""):
    """Yield the paths in a context that the build sees, relative to it."""
    for entry in sorted((Path(context) / folder).iterdir()):
        path = f"{folder}/{entry.name}".lstrip("/")
        if entry.is_dir() and not entry.is_symlink():
            if not out.all_of(path):
                yield from files(context, out, path)
        elif not out(path):
            if not (entry.is_file() and not entry.is_symlink()) and not _leads_inside(context, entry):
                raise NotUnderstood(f"{path} is no plain file, and no link to a folder of the context")
            yield path


def _leads_inside(context, link):
    """Say whether a link leads to a folder of the context: a build copies the link, and the folder for itself."""
    relative = link.is_symlink() and not link.readlink().is_absolute()
    return relative and link.is_dir() and link.resolve().is_relative_to(Path(context).resolve())


def copied(context, dockerfile, name):
    """Return the files of a stage that come from the context: absolute path there -> path in the context.

    Raises `NotUnderstood`, or `FileNotFoundError` for what a build would not find.
    """
    dockerfile = Path(dockerfile)
    out = Ignored(dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text())
    seen = list(files(context, out))
    there, workdir = {}, "/"
    for word, rest in stage(dockerfile.read_text(), name):
        if "$" in rest and word in ("WORKDIR", "COPY"):
            raise NotUnderstood(f"{word} {rest}")
        if word == "WORKDIR":
            workdir = posixpath.join(workdir, rest)
        elif word == "COPY":
            there |= _copy(rest, workdir, seen)
        elif word not in _WITHOUT_FILES or "type=bind" in rest:
            raise NotUnderstood(f"{word} {rest}")
    return there


def _copy(rest, workdir, seen):
    *sources, target = rest.split()
    if re.search(r"^\[|--|[*?\[\]\"']", rest) or not sources:
        raise NotUnderstood(f"COPY {rest}")
    into = target.endswith("/") or target == "."
    target = posixpath.normpath(posixpath.join(workdir, target))
    if len(sources) > 1 and not into:
        raise NotUnderstood(f"COPY {rest}: several sources into what is no folder")
    there = {}
    for source in (posixpath.normpath(each) for each in sources):
        below = [path for path in seen if path.startswith(f"{source}/")]
        if source in seen:
            there[posixpath.join(target, posixpath.basename(source)) if into else target] = source
        elif not below:
            raise FileNotFoundError(f"COPY {rest}: the build does not see {source}")
        there |= {posixpath.join(target, path.removeprefix(f"{source}/")): path for path in below}
    return there


def lay_out(context, there, root, folder):
    """Make `folder` hold exactly what a stage has under `root`; what is there already, unchanged, stays as it is."""
    wanted = {
        path.removeprefix(f"{root}/"): context / source
        for path, source in there.items()
        if path.startswith(f"{root}/")
    }
    for path in [each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir()]:
        if str(path.relative_to(folder)) not in wanted:
            path.unlink()
    for name, source in wanted.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            if not copy.is_symlink():
                copy.symlink_to(source.readlink())
        elif not copy.exists() or copy.read_bytes() != source.read_bytes():
            shutil.copyfile(source, copy)
