"""Names of the Hugging Face hub: which texts may be one, and how to fetch what it names."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def how_to_fetch(path: str | Path) -> str:
    """Return advice if a missing folder may be a model's name on the hub, else ''.

    A hub name is OWNER/NAME where OWNER is not a local folder.
    """
    name = str(path)
    owner, _, model = name.partition("/")
    if not model or not HUB_NAME.fullmatch(name) or Path(owner).exists():
        return ""
    return (
        f"; if it is a name of the Hugging Face hub, give the folder that 'hf download {name} "
        f"--local-dir {model}' fills"
    )
