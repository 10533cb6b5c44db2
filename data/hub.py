"""Names of the Hugging Face hub: which texts may be one, and how to fetch what it names."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def how_to_fetch(path: str | Path) -> str:
    """Return advice for a refusal of a folder that may be a model's name; else nothing.

    Such a name has an owner, which is no folder here.
    """
    name = str(path)
    owner, _, model = name.partition("/")
    if not model or not HUB_NAME.fullmatch(name) or Path(owner).exists():
        return ""
    return (
        f"; if it is a name of the Hugging Face hub, give the folder that 'hf download {name} "
        f"--local-dir {model}' fills"
    )
