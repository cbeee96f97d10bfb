"""What is shipped: the wheel's contents and metadata, and a Dockerfile that keeps its promises.

The image itself is not built here; that needs a Docker engine.
"""

import email.message
import email.parser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    in_tree = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "router").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == in_tree
    assert "router/py.typed" in packed
    assert any(name.startswith("router/queue/lua/") and name.endswith(".lua") for name in packed)


def test_the_wheel_is_named_two_pool_router_and_brings_the_command_and_the_licence(wheel: Path) -> None:
    metadata = _metadata(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [entry_points] = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]

    assert metadata["Name"] == "two-pool-router"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert re.search(r"^router\s*=", entry_points, re.MULTILINE)


def test_the_wheel_asks_for_what_its_dependencies_need_but_do_not_install(wheel: Path) -> None:
    """transformers renders chat templates with jinja2 and Starlette parses forms with python-multipart; neither asks
    for it, so that a clean installation fails at the first chat or upload where we do not."""
    required = {re.split(r"[ ;<>=!\[~]", line)[0].lower() for line in _metadata(wheel).get_all("Requires-Dist") or []}

    assert {"jinja2", "python-multipart"} <= required


def test_the_lock_names_an_exact_version_of_every_direct_dependency(wheel: Path) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    locked = {_normal(line.split("==")[0]) for line in lines}

    required = {_normal(re.split(r"[ ;<>=!\[~]", line)[0]) for line in _metadata(wheel).get_all("Requires-Dist") or []}

    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", line) for line in lines)
    assert required - locked == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, comments dropped and continued lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(line.split(None, 1)[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def _last_stage() -> dict[str, str]:
    """The last value of each instruction of the stage that runs."""
    instructions = _instructions()
    start = max(number for number, (name, _) in enumerate(instructions) if name == "FROM")
    return dict(instructions[start:])


def test_the_image_does_not_run_as_root() -> None:
    user = _last_stage()["USER"]

    # A number, because Kubernetes' runAsNonRoot can't tell who a name is.
    assert re.fullmatch(r"[1-9]\d*", user)


def test_the_image_watches_its_own_health_with_what_it_already_has() -> None:
    check = _last_stage()["HEALTHCHECK"]

    assert 'CMD ["python"' in check
    assert "/healthz" in check


def test_the_image_is_built_in_stages_from_a_pinned_slim_python_and_starts_the_router() -> None:
    bases = [value for name, value in _instructions() if name == "FROM"]
    last = _last_stage()

    assert len(bases) == 2
    assert all(re.match(r"python:3\.\d+-slim\b", base) for base in bases)
    assert last["EXPOSE"] == "8080"
    assert last["ENTRYPOINT"] == '["router"]'
    assert "COPY" not in last
