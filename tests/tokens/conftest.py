"""One model folder a template, made once for all tests of counting."""

from pathlib import Path

import pytest

from tests.tokens.model_folder import TEMPLATES, make_model_folder


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model_folder(root / name, template) for name, template in TEMPLATES.items()}
