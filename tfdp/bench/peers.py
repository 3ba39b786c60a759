"""What tfdp is compared with, and whether it is installed."""

from __future__ import annotations

import shutil
import subprocess

HOW_TO_GET_TORCH = (
    "get it with `pip install torch` (its CPU build is enough), or name an "
    "interpreter that has it with --torch-python"
)


def torch_version(python: str) -> str | None:
    """The PyTorch of an interpreter.

    Args:
        python: String, the interpreter's name or path.

    Returns:
        String, the version, or `None` if there is no such interpreter, or it has no
        PyTorch that can talk by Gloo.

    Example:

    >>> torch_version("no such interpreter") is None
    True
    """
    if shutil.which(python) is None:
        return None
    program = (
        "import torch, torch.distributed as d; assert d.is_gloo_available(); "
        "print(torch.__version__)"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
