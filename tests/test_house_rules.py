"""Every file keeps the house rules, and each rule finds a planted violation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.helpers.house import (
    EVERYWHERE,
    IN_PRODUCT,
    MACHINE,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    PRODUCT,
    PURE,
    ROOT,
    Rule,
    Source,
    catches_are_narrow,
    docstrings_stand_alone,
    imports_are_allowed,
    imports_no_tests,
    is_named_for_its_subject,
    is_within,
    sizes_are_small,
    sources,
    starts_with_its_docstring,
    text_files,
    uses_are_allowed,
)

TEXT_FILES = tuple(text_files())  # here, because a test without a mark starts no process


@pytest.fixture(scope="module")
def parsed() -> None:
    """Every file has been parsed."""
    list(sources(*PRODUCT, "tests"))


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("rule", EVERYWHERE + IN_PRODUCT)
def test_every_file_keeps(rule: Rule) -> None:
    files = sources(*PRODUCT, *(("tests",) if rule in EVERYWHERE else ()))
    offences = [f"{source.module}:{offence}" for source in files for offence in rule(source)]
    assert not offences, "\n".join([str(rule.__doc__), *offences])


FINDS_THE_REPOSITORY = re.compile(
    r"^if not __package__:.*\n(?:    .*\n)*?"
    r"    sys\.path(?:\.insert\(0, |\[0\] = )str\(Path\(__file__\)\.resolve\(\)\.parents\[(\d)\]\)",
    re.M,
)


@pytest.mark.parametrize("folder", ["tools", "tools/bench"])
def test_all_in_tools_itself_are_programs_that_find_what_they_import(folder: str) -> None:
    # Other tests run programs in processes that have the project's modules already.
    assert {*(ROOT / folder).glob("[a-z]*.py")}
    for path in (ROOT / folder).glob("[a-z]*.py"):
        text = path.read_text(encoding="utf-8")
        assert "__main__" in text, f"{path} belongs in a package"
        before, *_ = re.split(r"^from (?:data|model|paro|tools)[. ]", text, maxsplit=1, flags=re.M)
        assert FINDS_THE_REPOSITORY.findall(before) == [str(folder.count("/") + 1)], path


@pytest.mark.process
def test_pure_files_the_parser_and_the_planner_start_without_torch() -> None:
    modules = [
        source.module
        for source in sources(*PRODUCT)
        if is_within(source.module, (*PURE, "paro.arguments"))
    ]
    modules.append("tools.plan")
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"one of {modules} imports torch"


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in TEXT_FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE.search(line)
    ]
    assert not offences, "\n".join(offences)
    planted = ("cd " + "/" + "tmp", "at '/" + "work/main/paro'", "/" + "home/me")
    assert all(map(MACHINE.search, (*planted, "pip --index" + "-url x")))


def test_every_folder_of_tests_is_a_package() -> None:
    # Otherwise two files of one name in different folders would clash.
    folders = {path.parent for path in (ROOT / "tests").glob("**/*.py")}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, "\n".join(missing)


def caught(function: str, *statements: str) -> str:
    """Source of a function that catches the errors of statements."""
    body = "".join(f"        {each}\n" for each in statements)
    return f"def {function}():\n    try:\n{body}    except (OSError, ValueError): ..."


DIST, GROUPS = "import torch.distributed as d", "paro.distributed.groups"
PLANNER = "paro.planning.planner"
PLANTED: list[tuple[Rule, str, str, str]] = [
    # rule, module, source, expected message
    (imports_no_tests, "tools.x", "def f():\n    from tests import gpu", "2: the product imports"),
    (imports_are_allowed, PLANNER, "import numpy as np", "may not import numpy"),
    (imports_are_allowed, "model.llama", "import transformers", "may not import transformers"),
    (imports_are_allowed, "data.loader", "from paro import strategy", "import paro.strategy"),
    (uses_are_allowed, "paro.config", "import os\nos.environ.get('X')", "2: os.environ belongs"),
    (uses_are_allowed, "pretrain_llama", "from os import environ as e", "1: os.environ belongs"),
    (uses_are_allowed, "paro.x", f"{DIST}\nd.new_group([0])", "2: torch.distributed.new_group"),
    (uses_are_allowed, GROUPS, f"{DIST}\nd.all_reduce(1)", "2: torch.distributed.all_reduce"),
    (uses_are_allowed, "paro.x", "from torch.distributed import isend", "1: torch"),
    (starts_with_its_docstring, "x", '# Why\n"""Says what."""', "no docstring"),
    (docstrings_stand_alone, "x", 'def f():\n    """The sum."""', "f opens with the"),
    (docstrings_stand_alone, "x", 'class A:\n    """What adds."""', "A opens with what"),
    (docstrings_stand_alone, "x", 'def f():\n    """Add; see g."""', "f points elsewhere"),
    (sizes_are_small, "x", "\n" * (MAX_FILE_LINES + 1), "401 lines, 400 allowed"),
    (sizes_are_small, "x", "def f():\n" + "    1\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
    (catches_are_narrow, "x", caught("main", "run()"), "2: main catches ValueError"),
    (catches_are_narrow, "x", caught("f", "yield"), "2: f catches"),
    (catches_are_narrow, "x", caught("f", *7 * ["g()"]), "from 7 statements"),
    (is_named_for_its_subject, "paro.common.x", "", "common names no subject"),
]


@pytest.mark.parametrize(("rule", "module", "text", "message"), PLANTED)
def test_a_planted_offence_is_found(rule: Rule, module: str, text: str, message: str) -> None:
    offences = list(rule(Source(module, text, ast.parse(text))))
    assert len(offences) == 1, offences
    assert message in offences[0]
