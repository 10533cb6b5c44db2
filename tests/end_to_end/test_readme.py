"""The pages match the code: commands, flags, tables, links and the files that they name."""

from __future__ import annotations

import argparse
import pkgutil
import re
from dataclasses import fields

from model.config import LLAMA_PRESETS
from paro.arguments.megatron import rule_of
from paro.arguments.parser import build_parser
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.report.record import Metrics
from paro.spec.offload import state_bytes
from paro.spec.strategy_limits import StrategyLimits
from paro.strategy import legal_letters, parse_strategy
from tests.helpers.closed_form import GATHER, GRAD_SYNC, PARAM_ALL_GATHER, REDUCE, Multiples
from tests.helpers.ranks import ROOT
from tests.paro.planning.cases import run_of

# Every page by its path, the README first.
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
README = PAGES[ROOT / "README.md"]
TEXT = "\n".join(PAGES.values())
MEASURED = (ROOT / "examples" / "measured" / "README.md").read_text(encoding="utf-8")
MOST_LINES, MOST_COLUMNS = 150, 100  # of the README; tables and links may be wider

FENCED = r"^```\w*\n(.*?)^```$"

LAUNCHERS_FLAGS = {  # torchrun's and sbatch's
    *("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--nproc-per-node", "--nnodes"),
    *("--node-rank", "--master-addr", "--master-port", "--max-restarts"),
    *("--nodes", "--ntasks-per-node"),
}


# Commands


def test_every_make_target_exists() -> None:
    blocks = re.findall(FENCED, TEXT, re.DOTALL | re.M)
    inline = re.findall(r"`[^`]+`", re.sub(FENCED, "", TEXT, flags=re.DOTALL | re.M))
    named = set(re.findall(r"^make ([a-z]+)", "".join(blocks), re.M))
    named |= set(re.findall(r"\bmake ([a-z]+)", "".join(inline)))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"quickstart", "test"} <= named
    assert named <= targets


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_every_flag_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXT + MEASURED))
    known = LAUNCHERS_FLAGS | flags_of(build_parser())
    for tool in (ROOT / "tools").rglob("*.py"):
        known |= set(re.findall(r'"(--[a-z0-9-]+)"', tool.read_text(encoding="utf-8")))
    known |= {flag for flag in named if rule_of(flag)}
    assert len(named) > 40
    assert named <= known, named - known


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_link_leads_somewhere() -> None:
    pages = PAGES | {ROOT / "examples" / "measured" / "README.md": MEASURED}
    checked = 0
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(FENCED, "", text, flags=re.S | re.M)):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                checked += 1
                assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page.name}: {target}"
    assert checked > 10


def test_the_readme_is_short_and_links_every_page() -> None:
    lines = README.splitlines()
    assert len(lines) <= MOST_LINES
    wide = [line for line in lines if len(line) > MOST_COLUMNS and "|" not in line]
    assert not [line for line in wide if "](" not in line]
    for page in PAGES:
        place = page.relative_to(ROOT)
        assert page.name == "README.md" or f"]({place})" in README, page


def test_every_file_that_is_named_exists() -> None:
    path = r"`((?:paro|model|data|tools|examples|tests|docs)/[\w./]*)`"
    named = set(re.findall(path, TEXT + MEASURED))
    assert len(named) > 5
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


# Tables


def multiples(*parts: Multiples) -> str:
    """`2X + Y` for a sum of multiples of X and Y."""
    x, y = (sum(part[index] for part in parts) for index in (0, 1))
    terms = [
        f"{'' if count == 1 else count}{name}" for count, name in ((x, "X"), (y, "Y")) if count
    ]
    return " + ".join(terms) or "0"


def strategy_row(letters: str) -> str:
    """A row of the table: what a strategy stores and sends, and figures for 7B."""
    params, grads, optim = letters
    fraction = {"N": "1", "I": "1/m", "G": "1/n"}
    known_as = {
        "NNN": "DDP",
        "NNG": "ZeRO-1",
        "NGG": "ZeRO-2",
        "GGG": "ZeRO-3",
        "III": "MiCS, HSDP",
    }
    strategy = parse_strategy(letters, world_size=32, group_size=8)
    precision, memory = PrecisionConfig(compute="bf16"), RunMemory(None)
    run = run_of(LLAMA_PRESETS["7B"], letters, precision, world_size=32, group_size=8)
    stored = state_bytes(run.specs(memory.units(run))).total
    sent = memory.sent(run, 10)
    cells = [
        f"`{letters}`",
        known_as.get(letters, ""),
        *(fraction[letter] for letter in letters),
        multiples(GATHER[params], REDUCE[grads]),
        multiples(GRAD_SYNC[grads + optim], PARAM_ALL_GATHER[params + optim]),
        str(StrategyLimits(32, 8, 8, survive=0).survival(strategy).nodes),
        f"{stored / 1e9:.1f}",
        f"{sent.intra / 1e9:.1f}",
        f"{sent.inter / 1e9:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_table_of_strategies_is_what_the_formulas_say() -> None:
    expected = [strategy_row(letters) for letters in legal_letters()]
    assert re.findall(r"^\| `[NIG]{3}` \|.*$", TEXT, re.M) == expected, "\n".join(expected)


def test_the_fields_of_the_metrics_file_are_all_told_in_order() -> None:
    table = next(
        block for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.M) if "`iteration_time_ms`" in block
    )
    cells = re.findall(r"^\| ([^|]*) \|", table, re.M)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert named == [field.name for field in fields(Metrics)]


# The architecture's walks


def test_walks_name_what_exists_in_few_stops() -> None:
    text = PAGES[ROOT / "docs" / "architecture.md"]
    walks = re.findall(r"^## From (.*?)(?=^## )", text, re.M | re.S)
    assert len(walks) == 2
    for walk in walks:
        stops = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", walk, re.M)
        assert [int(number) for number, _ in stops] == [*range(1, len(stops) + 1)]
        assert 5 < len(stops) <= 10
        for _, name in stops:
            pkgutil.resolve_name(name)
