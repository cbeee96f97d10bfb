"""The process environment, touched nowhere else but here and in `load.py`."""

import os
from pathlib import Path


def set_shared_metrics_dir(path: Path) -> None:
    """Tell prometheus-client where processes share their series; it takes this from the environment only."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(path)
