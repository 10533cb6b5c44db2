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
    imports_are_allowed,
    imports_no_program,
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


@pytest.mark.parametrize("folder", ["tools", "tools/bench"])
def test_what_lies_in_tools_itself_is_a_program(folder: str) -> None:
    modules = set((ROOT / folder).glob("*.py")) - {ROOT / folder / "__init__.py"}
    helpers = [path.name for path in modules if "__main__" not in path.read_text(encoding="utf-8")]
    assert modules
    assert not helpers, "these belong in a package"


FINDS_THE_REPOSITORY = re.compile(
    r"^if not __package__:.*\n(?:    .*\n)*?"
    r"    sys\.path(?:\.insert\(0, |\[0\] = )str\(Path\(__file__\)\.resolve\(\)\.parents\[(\d)\]\)",
    re.M,
)


@pytest.mark.parametrize("folder", ["tools", "tools/bench"])
def test_a_program_finds_what_it_imports_wherever_it_is_started(folder: str) -> None:
    # Other tests run programs in processes that have the project's modules already.
    for path in (ROOT / folder).glob("[a-z]*.py"):
        text = path.read_text(encoding="utf-8")
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


def test_every_folder_of_tests_is_a_package() -> None:
    # Otherwise two files of one name in different folders would clash.
    folders = {path.parent for path in (ROOT / "tests").glob("**/*.py")}
    missing = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, "\n".join(missing)


PLANTED: list[tuple[Rule, str, str, str]] = [
    # rule, module, source, expected message
    (imports_no_program, "paro.config.run", "import pretrain_llama", "imports the program"),
    (imports_no_program, "model.llama", "def f():\n    from tools import plan", "2: model.llama"),
    (imports_no_program, "tools.plan", "from tests.helpers import ranks", "tests.helpers.ranks"),
    (imports_no_program, "tools.plan", "import tools.bench.fixed_runs", "own evidence"),
    (imports_are_allowed, "paro.strategy", "import torch", "may not import torch"),
    (
        imports_are_allowed,
        "paro.planning.search.planner",
        "import numpy as np",
        "may not import numpy",
    ),
    (imports_are_allowed, "model.config", "from torch import nn", "may not import torch.nn"),
    (imports_are_allowed, "model.config", "import paro.strategy", "may not import paro.strategy"),
    (imports_are_allowed, "model.llama", "import transformers", "may not import transformers"),
    (imports_are_allowed, "data.loader", "from paro import strategy", "import paro.strategy"),
    (imports_are_allowed, "data.loader", "import model.config", "may not import model.config"),
    (imports_are_allowed, "paro.errors", "import paro.layout", "may not import paro.layout"),
    (
        uses_are_allowed,
        "paro.config.run",
        "import os\nos.environ.get('X')",
        "2: os.environ belongs",
    ),
    (uses_are_allowed, "pretrain_llama", "from os import environ as e", "1: os.environ belongs"),
    (uses_are_allowed, "model.llama", "import os\nos.getenv('X')", "2: os.getenv belongs"),
    (
        uses_are_allowed,
        "paro.distributed.runtime",
        "import torch.distributed as dist\ndist.new_group([0])",
        "2: torch.distributed.new_group belongs to paro.distributed.groups",
    ),
    (
        uses_are_allowed,
        "paro.distributed.groups",
        "import torch\nimport torch.distributed\ntorch.distributed.all_reduce(1)",
        "3: torch.distributed.all_reduce belongs",
    ),
    (uses_are_allowed, "paro.optim.x", "from torch.distributed import isend", "1: torch"),
    (
        uses_are_allowed,
        "tools.bench",
        "from torch import distributed as d\nd.barrier()",
        "2: torch.distributed.barrier belongs",
    ),
    (starts_with_its_docstring, "x", "", "no docstring"),
    (starts_with_its_docstring, "x", "import os", "no docstring"),
    (starts_with_its_docstring, "x", '# Why\n"""Says what."""', "no docstring"),
    (sizes_are_small, "x", "\n" * (MAX_FILE_LINES + 1), "401 lines, 400 allowed"),
    (sizes_are_small, "x", "def f():\n" + "    1\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
    (
        catches_are_narrow,
        "tools.plan",
        "def main():\n    try:\n        run()\n    except (OSError, ValueError):\n        pass",
        "2: main catches ValueError",
    ),
    (
        catches_are_narrow,
        "x",
        "def f():\n    try:\n        yield\n    except ValueError as e:\n        pass",
        "2: f catches",
    ),
    (
        catches_are_narrow,
        "x",
        "def f():\n    try:\n" + "        g()\n" * 7 + "    except ValueError: ...",
        "from 7 statements",
    ),
    (is_named_for_its_subject, "paro.utils", "", "utils names no subject"),
    (is_named_for_its_subject, "paro.common.x", "", "common names no subject"),
]


@pytest.mark.parametrize(("rule", "module", "text", "told"), PLANTED)
def test_a_planted_offence_is_found(rule: Rule, module: str, text: str, told: str) -> None:
    offences = list(rule(Source(module, text, ast.parse(text))))
    assert len(offences) == 1, offences
    assert told in offences[0]


INNOCENT: list[tuple[Rule, str, str]] = [
    (imports_no_program, "tools.bench.x", "import os\nfrom tools.bench.planning import steps"),
    (imports_no_program, "pretrain_llama", "from paro.config.run import RunConfig\nimport torch"),
    (
        imports_are_allowed,
        "paro.planning.search.planner",
        "import math\nfrom model.config import Llama",
    ),
    (imports_are_allowed, "model.llama", "import math\nfrom torch import nn\nimport model.rotary"),
    (imports_are_allowed, "paro.sharding.sharded_unit", "import torch"),
    (imports_are_allowed, "data.loader", "from paro.errors import UserError"),
    (catches_are_narrow, "x", "def f():\n    try:\n        int(a)\n    except ValueError: ..."),
    (catches_are_narrow, "x", "def main():\n    try:\n        run()\n    except UserError: ..."),
    (uses_are_allowed, "paro.distributed.runtime", "import os\nos.environ['X']"),
    (
        uses_are_allowed,
        "paro.distributed.groups",
        "import torch.distributed as dist\ndist.new_group([0])",
    ),
    (uses_are_allowed, "paro.optim.x", "import os\nos.replace('a', 'b')\nself.wire.all_reduce(x)"),
    (
        uses_are_allowed,
        "paro.distributed.comm_stream",
        "import torch.distributed as dist\ndist.ReduceOp.SUM",
    ),
    (starts_with_its_docstring, "x", '#!/usr/bin/env python\n"""Says what."""\n'),
    (sizes_are_small, "x", "\n" * MAX_FILE_LINES),
]


@pytest.mark.parametrize(("rule", "module", "text"), INNOCENT)
def test_the_innocent_are_left_alone(rule: Rule, module: str, text: str) -> None:
    assert not list(rule(Source(module, text, ast.parse(text))))


@pytest.mark.parametrize(
    "text",
    ["cd " + "/" + "tmp", "at '/" + "work/main/paro'", "/" + "home/me", "pip --index" + "-url x"],
)
def test_a_planted_path_is_found(text: str) -> None:
    assert MACHINE.search(text)


@pytest.mark.parametrize("text", ["paro/work", "https://a.b/home", "#!/usr/bin/env", "$RUN/tmp"])
def test_other_paths_are_left_alone(text: str) -> None:
    assert not MACHINE.search(text)
