"""Of several docker clients, one that can build is taken."""

import pytest
from deploy import support

WORKS = '#!/bin/sh\n[ "$DOCKER_BUILDKIT $*" = "1 build --help" ]\n'
LACKS = "#!/bin/sh\necho 'ERROR: BuildKit is enabled but the buildx component is missing' >&2\nexit 1\n"


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Install a docker client in each of some folders; the PATH has these alone, in that order."""

    def install(*scripts):
        folders = [tmp_path / str(number) for number in range(len(scripts))]
        for folder, script in zip(folders, scripts, strict=True):
            folder.mkdir()
            if script:
                (folder / "docker").write_text(script)
                (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", ":".join(map(str, folders)))
        return [str(folder / "docker") for folder in folders]

    monkeypatch.delenv("DOCKER", raising=False)
    support.docker.cache_clear()
    yield install
    support.docker.cache_clear()


@pytest.mark.parametrize("scripts", [[WORKS], [LACKS, WORKS], ["", LACKS, LACKS, WORKS, WORKS]])
def test_the_first_that_has_buildkit_is_taken(clients, scripts):
    found = clients(*scripts)
    assert support.docker() == found[scripts.index(WORKS)]


def test_one_that_is_asked_for_is_taken(clients, monkeypatch):
    first, second = clients(WORKS, WORKS)
    for asked in (second, first):
        monkeypatch.setenv("DOCKER", asked)
        support.docker.cache_clear()
        assert support.docker() == asked


def test_none_that_works_is_said(clients, monkeypatch):
    found = clients(LACKS, WORKS)
    monkeypatch.setenv("DOCKER", found[0])
    with pytest.raises(support.CannotRun, match=f"{found[0]} lacks it"):
        support.docker()
    monkeypatch.setenv("DOCKER", "docker-of-mine")
    with pytest.raises(support.CannotRun, match="docker-of-mine is not installed"):
        support.docker()
